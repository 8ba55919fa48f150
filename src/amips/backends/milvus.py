"""Milvus in a server, or Milvus Lite, which runs in this process: an HNSW graph, or by cell without it.

    id INT64 PRIMARY KEY
    v FLOAT_VECTOR      HNSW: searched by itself
    cell INT32          INVERTED: searched in the cells that a model chose, with filter="cell in [...]",
    flat FLOAT_VECTOR   FLAT: on the same keys again

A filtered search goes through the index of its field, and no parameter is known against it: in Milvus Lite, a
graph walked with a filter that few keys pass misses many of them. So routed search has a field of its own,
with the FLAT index, which scores every key that passes and no other. That is exact; the keys are kept twice,
in memory and on disk. Each query has a filter of its own, so it is a request of its own. Milvus Lite
goes through all n rows in Python for each request (about 1 us each), whatever the filter: there, a routed
search is never faster than that.

Milvus does not tell what its own search looked at, so that has time only; a routed search looks at the keys
of its cells.
"""

import logging
import time
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from amips.backends.backend import BuildInputs, Ids, Row, from_rows, library, one_line
from amips.backends.hnsw import BUDGETS
from amips.backends.routable import TableBackend, plain_name, undone_by, write_cells
from amips.cells import Cells
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats

FILE = "milvus.db"
ROWS_AT_ONCE = 1000
INDEXED = ("v", "flat", "cell")
SECONDS = 3600.0  # that a server may take to build its indexes
QUERIES_AT_ONCE = 1024


class Milvus(TableBackend):
    """Settings: `links` of each key (M), `construction` (efConstruction), `table`: the collection's name.

    Milvus Lite 3.2 ignores the first two when they come from pymilvus 3.0, and takes these defaults.
    """

    title, budget, extra, server = "Milvus", "ef", "milvus", "AMIPS_MILVUS"
    needs = ("pymilvus",)

    def __init__(self, directory: Path, client: Any, table: str, n: int, d: int) -> None:
        self.directory, self.client, self.table, self.n, self.d = directory, client, table, n, d

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """Milvus's own, and a name that no other collection has."""
        return {"links": 16, "construction": 200, "table": f"amips_{uuid4().hex[:12]}"}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Insert the keys, and wait for the indexes: until they are there Milvus looks at every key."""
        table = plain_name(inputs.settings["table"])
        cells, files = write_cells(inputs, directory)
        with closing(cls._connect(directory, inputs.address)) as client, cls._errors():
            if client.has_collection(table):
                raise AmipsError(f"table={table!r}: Milvus has a collection of that name; choose another")
            with undone_by(lambda: client.drop_collection(table)):
                cls._fill(client, table, inputs, cells)
        return files  # Milvus changes its own as it sees fit

    @classmethod
    def _fill(cls, client: Any, table: str, inputs: BuildInputs, cells: Cells) -> None:
        kinds, keys = library(cls, "pymilvus").DataType, inputs.keys
        schema = client.create_schema(auto_id=False)
        schema.add_field("id", kinds.INT64, is_primary=True)
        schema.add_field("cell", kinds.INT32)
        schema.add_field("v", kinds.FLOAT_VECTOR, dim=keys.d)
        schema.add_field("flat", kinds.FLOAT_VECTOR, dim=keys.d)
        client.create_collection(table, schema=schema, consistency_level="Strong")
        for start, block in keys.blocks(ROWS_AT_ONCE):
            of = cells.assignment[start : start + len(block)].tolist()
            rows = enumerate(zip(of, block, strict=True), start)
            client.insert(table, [{"id": i, "cell": c, "v": v, "flat": v} for i, (c, v) in rows])
        client.flush(table)
        index = client.prepare_index_params()
        shape = {"M": inputs.settings["links"], "efConstruction": inputs.settings["construction"]}
        index.add_index("v", index_type="HNSW", metric_type="IP", params=shape)
        index.add_index("flat", index_type="FLAT", metric_type="IP")
        index.add_index("cell", index_type="INVERTED")
        client.create_index(table, index)
        end = time.monotonic() + SECONDS
        while any(client.describe_index(table, name)["pending_index_rows"] > 0 for name in INDEXED):
            if time.monotonic() > end:
                raise AmipsError(f"Milvus has not built the indexes of {table} in an hour")
            time.sleep(0.2)

    @classmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "Milvus":
        """Connect and load the collection."""
        client, table = cls._connect(directory, address), settings["table"]
        with ExitStack() as resources, cls._errors():
            resources.callback(client.close)
            there = client.has_collection(table)
            rows = int(client.get_collection_stats(table)["row_count"]) if there else 0
            if rows != n:
                raise BundleError(f"{directory}: the collection {table!r} has {rows} rows, expected {n}")
            client.load_collection(table)
            resources.pop_all()
        return cls(directory, client, table, n, d)

    @classmethod
    def _connect(cls, directory: Path, address: str | None) -> Any:
        pymilvus = library(cls, "pymilvus")
        if address is None:
            library(cls, "milvus_lite")
        # It writes the traceback of every error that it raises to the terminal, too.
        logging.getLogger("pymilvus.decorators").setLevel(logging.CRITICAL)
        where = "Milvus Lite" if address is None else "the Milvus server"
        with one_line(f"{where} does not answer", pymilvus.MilvusException):
            return pymilvus.MilvusClient(uri=address or str(directory / FILE))

    @classmethod
    def _errors(cls) -> AbstractContextManager[None]:
        return one_line("Milvus", library(cls, "pymilvus").MilvusException)

    def close(self) -> None:
        """Let go of the connection."""
        self.client.close()

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph."""
        rows: list[Row] = []
        for low in range(0, len(x), QUERIES_AT_ONCE):
            rows += self._search("v", x[low : low + QUERIES_AT_ONCE], k, {"ef": max(k, budget)})
        return from_rows(rows, k)

    def among(self, column: str, values: list[int], x: Floats, k: int) -> Row:
        """Every key that passes the filter is scored."""
        return self._search("flat", x[None], k, {}, f"{column} in {values}")[0]

    def _search(
        self, field: str, x: Floats, k: int, parameters: dict[str, Any], condition: str = ""
    ) -> list[Row]:
        asked = {"search_params": {"metric_type": "IP", "params": parameters}, "limit": k}
        # With no fields given, Milvus Lite returns the vectors too.
        asked |= {"anns_field": field, "filter": condition, "output_fields": ["id"]}
        with self._errors():
            answers = self.client.search(self.table, x, **asked)
        return [([hit["distance"] for hit in hits], [hit["id"] for hit in hits]) for hits in answers]
