"""PostgreSQL with pgvector: a table of keys, found by pgvector's HNSW index, or by cell in plain SQL.

    CREATE TABLE keys (id int PRIMARY KEY, cell int, v vector(d));
    CREATE INDEX ON keys USING hnsw (v vector_ip_ops);     -- searched by itself
    CREATE INDEX ON keys (cell);                           -- searched in the cells that a model chose:

    SELECT id, -(v <#> :x) FROM keys WHERE cell = ANY(:cells) ORDER BY (v <#> :x) + 0, id LIMIT :k

The second needs no vector index: `+ 0` keeps the planner from using one, and the rows come in the order of
their cells, so that a cell is read as consecutive pages. It works in any SQL store that can compute inner
products.

pgvector does not tell how many keys its own search looked at, so that has time only; a routed search looks at
the keys of its cells.
"""

import threading
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

from amips.backends.backend import BuildInputs, Ids, Row, from_rows, library, one_line
from amips.backends.hnsw import BUDGETS
from amips.backends.postgres import connect
from amips.backends.routable import TableBackend, by_cell, plain_name, undone_by, write_cells
from amips.errors import BundleError
from amips.vectors import Floats

DATA = "postgres"
MOST = 1000  # pgvector's limit of ef_search
PLAIN_BYTES = 7900  # of a vector that fits into a page; larger ones are kept elsewhere, and read slower


class PgVector(TableBackend):
    """Settings: `links` of each key (m), `construction` (ef_construction), `table`."""

    title, budget, extra, server = "pgvector", "ef_search", "pgvector", "AMIPS_PGVECTOR"
    needs = ("psycopg", "pgvector")

    def __init__(
        self, directory: Path, connection: Any, resources: ExitStack, table: str, n: int, d: int
    ) -> None:
        self.directory, self.connection, self.table, self.n, self.d = directory, connection, table, n, d
        self._resources = resources
        self._lock = threading.Lock()  # one connection, one search at a time
        self._session: dict[str, str] = {}  # what was set of pgvector's

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """pgvector's own, and a name that no other table has."""
        return {"links": 16, "construction": 64, "table": f"amips_{uuid4().hex[:12]}"}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Copy the keys in the order of their cells; then both indexes."""
        keys, o, table = inputs.keys, inputs.settings, plain_name(inputs.settings["table"])
        cells, files = write_cells(inputs, directory)
        connection, resources = connect(cls, directory / DATA, inputs.address)
        with resources, cls._errors():
            connection.execute(f"CREATE TABLE {table} (id int, cell int, v vector({keys.d}))")
            with undone_by(lambda: connection.execute(f"DROP TABLE {table}")):
                if 4 * keys.d <= PLAIN_BYTES:
                    connection.execute(f"ALTER TABLE {table} ALTER COLUMN v SET STORAGE PLAIN")
                copy = f"COPY {table} FROM STDIN WITH (FORMAT BINARY)"
                with connection.cursor().copy(copy) as out:
                    out.set_types(["int4", "int4", "vector"])
                    for ids, of, rows in by_cell(keys, cells):
                        for row in zip(ids.tolist(), of.tolist(), rows, strict=True):
                            out.write_row(row)
                with_ = f"WITH (m = {int(o['links'])}, ef_construction = {int(o['construction'])})"
                connection.execute(f"CREATE INDEX ON {table} USING hnsw (v vector_ip_ops) {with_}")
                connection.execute(f"CREATE INDEX ON {table} (cell)")
                connection.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
                connection.execute(f"VACUUM ANALYZE {table}")
        return files

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "PgVector":
        """Connect; the server of a directory of its own is started if it is not running."""
        connection, resources = connect(cls, directory / DATA, address)
        table, psycopg = settings["table"], library(cls, "psycopg")
        with resources:
            with one_line(f"{directory}: PostgreSQL", psycopg.Error, error=BundleError):
                (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            if rows != n:
                raise BundleError(f"{directory}: the table {table} has {rows} rows, expected {n}")
            return cls(directory, connection, resources.pop_all(), table, n, d)

    @classmethod
    def _errors(cls) -> AbstractContextManager[None]:
        return one_line("PostgreSQL", library(cls, "psycopg").Error)

    def close(self) -> None:
        """Disconnect; a server that runs for the directory alone stops with the last."""
        self._resources.close()

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """pgvector's own search; for more results than its limit allows it goes on from where it was."""
        query = f"SELECT id, -(v <#> %b) AS score FROM {self.table} ORDER BY v <#> %b LIMIT %b"
        with self._lock, self._errors():
            self._limit(k, budget)
            return from_rows(self._ask(query, [(row, row, k) for row in x]), k)

    def among(self, column: str, values: list[int], x: Floats, k: int) -> Row:
        """In plain SQL, without the vector index."""
        query = (
            f"SELECT id, -(v <#> %b) AS score FROM {self.table} WHERE {column} = ANY(%b) "
            "ORDER BY (v <#> %b) + 0, id LIMIT %b"
        )
        with self._lock, self._errors():
            return self._ask(query, [(x, values, x, k)])[0]

    def _limit(self, k: int, budget: int) -> None:
        """Settings are sent when they change: each is a way to the server and back, as a search is."""
        wanted = {"ef_search": str(min(max(k, budget), MOST))}
        if k > MOST:  # pgvector before 0.8 cannot go on
            wanted |= {"iterative_scan": "strict_order", "max_scan_tuples": str(2**31 - 1)}
        elif "iterative_scan" in self._session:
            wanted["iterative_scan"] = "off"
        if changed := {name: value for name, value in wanted.items() if self._session.get(name) != value}:
            self.connection.execute("; ".join(f"SET hnsw.{n} = {value}" for n, value in changed.items()))
            self._session |= changed

    def _ask(self, query: str, asked: list[tuple[Any, ...]]) -> list[Row]:
        rows: list[Row] = []
        with self.connection.cursor(binary=True) as cursor:
            for parameters in asked:
                answers = cursor.execute(query, parameters, prepare=True).fetchall()
                rows.append(([score for _, score in answers], [key for key, _ in answers]))
        return rows
