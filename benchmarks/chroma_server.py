"""Chroma, a server of the field with HNSW inside, driven over HTTP: for `serve.py`.

`pip install chromadb` in an environment of its own; `--chroma` names its `chroma`.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats

COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"
NAME, BLOCK = "keys", 1000


@contextmanager
def chroma(executable: Path, folder: Path, port: int) -> Iterator[str]:
    """The server in a process of its own; its address."""
    command = [str(executable), "run", "--path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{address}/api/v2/heartbeat").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


class Collection:
    """Keys in a server that runs, made if they are not there."""

    def __init__(self, address: str, keys: Floats) -> None:
        self._client = httpx.Client(base_url=address, timeout=600)
        wanted = {"name": NAME, "get_or_create": True, "configuration": {"hnsw": {"space": "ip"}}}
        self.path = f"{COLLECTIONS}/{self._ask('POST', COLLECTIONS, wanted)['id']}"
        for low in range(self._ask("GET", f"{self.path}/count"), len(keys), BLOCK):
            block = keys[low : low + BLOCK]
            ids = [str(row) for row in range(low, low + len(block))]
            self._ask("POST", f"{self.path}/add", {"ids": ids, "embeddings": block.tolist()})

    def set_effort(self, budget: int) -> None:
        """Search with this efSearch: from the next start of the server on."""
        self._ask("PUT", self.path, {"new_configuration": {"hnsw": {"ef_search": budget}}})

    def search(self, x: Floats, k: int) -> NDArray[np.int64]:
        """Ids [m, k]."""
        rows: list[list[str]] = []
        for low in range(0, len(x), 100):
            rows += self._ask("POST", f"{self.path}/query", query(x[low : low + 100], k))["ids"]
        return np.array(rows).astype(np.int64)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()


def query(x: Floats, k: int) -> dict[str, Any]:
    """The body of a search."""
    return {"query_embeddings": x.tolist(), "n_results": k, "include": ["distances"]}
