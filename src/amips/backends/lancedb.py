"""LanceDB: a table on disk, found by an inverted file (IVF_FLAT) over its vectors, or by cell without it.

    id int64, cell int32, v float32[d]      the table, in the order of its cells
    IVF_FLAT on v                           searched by itself
    B-tree on cell                          searched in the cells that a model chose:

    table.search(x).where("cell IN (...)", prefilter=True).bypass_vector_index()

The second reads the rows that the B-tree names and scores each: it is exact, and needs no vector index. Each
query has a condition of its own, so it is a request of its own, of some milliseconds, where many queries
without conditions go as one.

LanceDB does not tell what its own search looked at, so that has time only; a routed search looks at the keys
of its cells. Scores are made from 1 - <x, y> in 32 bits: those far below 1 lose digits.

Its errors are of nearly any kind, a panic of Rust among them: so all are caught where it is called.
"""

from pathlib import Path
from typing import Any

import numpy as np

from amips.backends.backend import BuildInputs, Ids, Row, from_rows, library, one_line, rungs
from amips.backends.routable import TableBackend, by_cell, write_cells
from amips.cells import default_count
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats

TABLE = "keys"
QUERIES_AT_ONCE = 1024


class LanceDB(TableBackend):
    """Settings: `partitions` of the inverted file."""

    title, budget, extra = "LanceDB", "nprobes", "lancedb"
    needs = ("lancedb", "pyarrow")

    def __init__(self, directory: Path, table: Any, n: int, d: int, partitions: int) -> None:
        self.directory, self.table, self.n, self.d, self.partitions = directory, table, n, d, partitions

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """2 sqrt(n) partitions of 16 keys or more."""
        return {"partitions": default_count(n, 2.0, fewest=16)}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Write the table block by block, in the order of its cells; then the indexes."""
        lancedb, pa = library(cls, "lancedb"), library(cls, "pyarrow")
        keys, partitions = inputs.keys, inputs.settings["partitions"]
        if not 1 <= partitions <= keys.n:
            raise AmipsError(f"partitions={partitions}: expected 1 to the {keys.n} keys")
        cells, files = write_cells(inputs, directory)
        columns = [("id", pa.int64()), ("cell", pa.int32()), ("v", pa.list_(pa.float32(), keys.d))]
        schema = pa.schema(columns)

        def batches() -> Any:
            for ids, of, block in by_cell(keys, cells):
                rows = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), keys.d)
                yield pa.record_batch([pa.array(ids), pa.array(of), rows], schema=schema)

        index = library(cls, "lancedb.index")
        with one_line(cls.title, Exception):
            table = lancedb.connect(str(directory)).create_table(TABLE, batches(), schema=schema)
            table.create_index("v", config=index.IvfFlat(distance_type="dot", num_partitions=partitions))
            for column in ("cell", "id"):
                table.create_index(column, config=index.BTree())
        return files  # LanceDB has versions and checks of its own for the others

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "LanceDB":
        """Open the table."""
        database = library(cls, "lancedb").connect(str(directory))
        with one_line(f"{directory} holds no readable table {TABLE!r}", Exception, error=BundleError):
            table = database.open_table(TABLE)
            rows = table.count_rows()
        if rows != n:
            raise BundleError(f"{directory}: the table {TABLE!r} has {rows} rows, expected {n}")
        return cls(directory, table, n, d, settings["partitions"])

    def budgets(self) -> list[int]:
        """Numbers of partitions, up to all."""
        return rungs(self.partitions)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Many queries go as one: most of the time of one is the way there and back."""
        rows: list[Row] = []
        for low in range(0, len(x), QUERIES_AT_ONCE):
            block = x[low : low + QUERIES_AT_ONCE]
            query = self._nearest(block[0] if len(block) == 1 else list(block), k)
            answers = _run(query.nprobes(min(budget, self.partitions)))
            scores, ids = _row(answers)
            of = answers["query_index"].to_numpy() if len(block) > 1 else np.zeros(len(ids), np.int64)
            order = np.argsort(of, kind="stable")
            ends = np.searchsorted(of[order], np.arange(1, len(block)))
            rows += zip(np.split(scores[order], ends), np.split(ids[order], ends), strict=True)
        return from_rows(rows, k)

    def among(self, column: str, values: list[int], x: Floats, k: int) -> Row:
        """Rows by the B-tree of the column, each of them scored."""
        return _row(_run(self.exact(column, values, x, k)))

    def exact(self, column: str, values: list[int], x: Floats, k: int) -> Any:
        """LanceDB's query for `among`, not run yet."""
        wanted = f"{column} IN ({', '.join(map(str, values))})"
        return self._nearest(x, k).where(wanted, prefilter=True).bypass_vector_index()

    def _nearest(self, x: Any, k: int) -> Any:
        query = self.table.search(x, vector_column_name="v").distance_type("dot").limit(k)
        return query.select(["id", "_distance"])


def _run(query: Any) -> Any:
    with one_line(LanceDB.title, Exception):
        return query.to_arrow()


def _row(answers: Any) -> tuple[Floats, Ids]:
    """Scores and ids; the distance is 1 - <x, y>."""
    return 1 - answers["_distance"].to_numpy(), answers["id"].to_numpy()
