"""Milvus: an HNSW graph in a Milvus server, or in Milvus Lite, which runs in this process.

Milvus does not tell what it looked at, so there is only time.
"""

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from amips.engines.finder import Finder, Given, Ids, from_rows, library
from amips.engines.hnsw import BUDGETS
from amips.errors import AmipsError, BundleError
from amips.vectors import Floats

FILE = "milvus.db"
ROWS_AT_ONCE = 2000
SECONDS = 3600.0  # that a server may take to build its index
QUERIES_AT_ONCE = 1024


class Milvus(Finder):
    """Settings: `links` of each key (M), `construction` (efConstruction), `table`: the collection's name.

    Milvus Lite 3.2 ignores the first two when they come from pymilvus 3.0, and takes these defaults.
    """

    title, budget, extra, server = "Milvus", "ef", "milvus", "AMIPS_MILVUS"
    needs = ("pymilvus",)

    def __init__(self, client: Any, table: str, n: int, d: int) -> None:
        self.client, self.table, self.n, self.d = client, table, n, d

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """Milvus's own, and a name that no other collection has."""
        return {"links": 16, "construction": 200, "table": f"amips_{uuid4().hex[:12]}"}

    @classmethod
    def make(cls, given: Given, directory: Path) -> list[str]:
        """Insert the keys, and wait for the index: until it is there Milvus looks at every key."""
        kinds, keys, table = library(cls, "pymilvus").DataType, given.keys, given.settings["table"]
        client = cls._connect(directory, given.address)
        try:
            schema = client.create_schema(auto_id=False)
            schema.add_field("id", kinds.INT64, is_primary=True)
            schema.add_field("v", kinds.FLOAT_VECTOR, dim=keys.d)
            client.create_collection(table, schema=schema, consistency_level="Strong")
            for start, block in keys.blocks(ROWS_AT_ONCE):
                client.insert(table, [{"id": start + i, "v": row} for i, row in enumerate(block)])
            client.flush(table)
            index = client.prepare_index_params()
            shape = {"M": given.settings["links"], "efConstruction": given.settings["construction"]}
            index.add_index("v", index_type="HNSW", metric_type="IP", params=shape)
            client.create_index(table, index)
            end = time.monotonic() + SECONDS
            while client.describe_index(table, "v")["pending_index_rows"] > 0:
                if time.monotonic() > end:
                    raise AmipsError(f"Milvus has not built the index of {table} in an hour")
                time.sleep(0.2)
        finally:
            client.close()
        return []  # Milvus changes its files as it sees fit

    @classmethod
    def open(cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None) -> "Milvus":
        """Connect and load the collection."""
        client, table = cls._connect(directory, address), settings["table"]
        rows = int(client.get_collection_stats(table)["row_count"]) if client.has_collection(table) else 0
        if rows != n:
            client.close()
            raise BundleError(f"{directory}: the collection {table!r} has {rows} rows, expected {n}")
        client.load_collection(table)
        return cls(client, table, n, d)

    @classmethod
    def _connect(cls, directory: Path, address: str | None) -> Any:
        pymilvus = library(cls, "pymilvus")
        if address is None:
            library(cls, "milvus_lite")
        try:
            return pymilvus.MilvusClient(uri=address or str(directory / FILE))
        except pymilvus.MilvusException as problem:
            where = "Milvus Lite" if address is None else "the Milvus server"
            raise AmipsError(f"{where} does not answer: {str(problem).splitlines()[0]}") from None

    def close(self) -> None:
        """Let go of the connection."""
        self.client.close()

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph."""
        rows = []
        parameters = {"metric_type": "IP", "params": {"ef": max(k, budget)}}
        for low in range(0, len(x), QUERIES_AT_ONCE):
            found = self.client.search(
                self.table,
                x[low : low + QUERIES_AT_ONCE],
                anns_field="v",
                limit=k,
                search_params=parameters,
                output_fields=["id"],  # with none given, Milvus Lite returns the vectors too
            )
            rows += [([hit["distance"] for hit in hits], [hit["id"] for hit in hits]) for hits in found]
        return from_rows(rows, k)
