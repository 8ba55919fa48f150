"""LanceDB: a table on disk with an inverted file (IVF_FLAT) over its vectors.

LanceDB does not tell what it looked at, so there is only time.
"""

from pathlib import Path
from typing import Any

import numpy as np

from amips.engines.finder import Finder, Given, Ids, from_rows, library, rungs
from amips.errors import BundleError
from amips.vectors import Floats

TABLE = "keys"
QUERIES_AT_ONCE = 1024


class LanceDB(Finder):
    """Settings: `partitions` of the inverted file."""

    title, budget, extra = "LanceDB", "nprobes", "lancedb"
    needs = ("lancedb", "pyarrow")

    def __init__(self, table: Any, n: int, d: int, partitions: int) -> None:
        self.table, self.n, self.d, self.partitions = table, n, d, partitions

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """2 sqrt(n) partitions."""
        return {"partitions": max(1, min(round(2 * n**0.5), n // 16))}

    @classmethod
    def make(cls, given: Given, directory: Path) -> list[str]:
        """Write the table block by block, then the index."""
        lancedb, pa = library(cls, "lancedb"), library(cls, "pyarrow")
        keys = given.keys
        schema = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32(), keys.d))])

        def batches() -> Any:
            for start, block in keys.blocks():
                ids = pa.array(np.arange(start, start + len(block)))
                rows = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), keys.d)
                yield pa.record_batch([ids, rows], schema=schema)

        table = lancedb.connect(str(directory)).create_table(TABLE, batches(), schema=schema)
        ivf = library(cls, "lancedb.index").IvfFlat
        partitions = given.settings["partitions"]
        table.create_index("v", config=ivf(distance_type="dot", num_partitions=partitions))
        return []  # LanceDB has versions and checks of its own

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "LanceDB":
        """Open the table."""
        database = library(cls, "lancedb").connect(str(directory))
        try:
            table = database.open_table(TABLE)
            rows = table.count_rows()
        except Exception as problem:  # a damaged table makes LanceDB raise nearly anything
            reason = str(problem).splitlines()[0]
            raise BundleError(f"{directory} holds no readable table {TABLE!r}: {reason}") from None
        if rows != n:
            raise BundleError(f"{directory}: the table {TABLE!r} has {rows} rows, expected {n}")
        return cls(table, n, d, settings["partitions"])

    def budgets(self) -> list[int]:
        """Partitions."""
        return rungs(self.partitions)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Many queries go as one: most of the time of one is the way there and back."""
        rows: list[tuple[list[float], list[int]]] = [([], []) for _ in range(len(x))]
        for low in range(0, len(x), QUERIES_AT_ONCE):
            block = x[low : low + QUERIES_AT_ONCE]
            query = self.table.search(block[0] if len(block) == 1 else list(block), vector_column_name="v")
            query = query.distance_type("dot").nprobes(min(budget, self.partitions)).limit(k)
            found = query.select(["id", "_distance"]).to_arrow()
            # The distance is 1 - <x, y>.
            ids, scores = found["id"].to_numpy(), 1 - found["_distance"].to_numpy()
            of = found["query_index"].to_numpy() if len(block) > 1 else np.zeros(len(ids), np.int64)
            for row in range(len(block)):
                mine = np.flatnonzero(of == row)
                mine = mine[np.argsort(-scores[mine], kind="stable")]
                rows[low + row] = (scores[mine], ids[mine])
        return from_rows(rows, k)
