"""Building engines and opening them again, by name."""

import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from amips.backends.backend import Backend, BuildInputs, sample_of
from amips.cells import Cells
from amips.cells import check as check_cells
from amips.errors import AmipsError, BundleError
from amips.files import read_manifest, write_manifest
from amips.vectors import inspect, open_vectors

MANIFEST, KIND, FORMAT = "engine.json", "engine", 1

# The module and the class of each; imported when asked for, and their libraries later still.
BACKENDS = {
    "hnsw": ("hnsw", "HNSW"),
    "leanvec": ("leanvec", "LeanVec"),
    "svs": ("svs_engine", "SVS"),
    "usearch": ("usearch_engine", "USearch"),
    "scann": ("scann_engine", "ScaNN"),
    "soar": ("scann_engine", "SOAR"),
    "pgvector": ("pgvector", "PgVector"),
    "lancedb": ("lancedb_engine", "LanceDB"),
    "milvus": ("milvus", "Milvus"),
}


def backend_class(name: str) -> type[Backend]:
    """The class of an engine."""
    if name not in BACKENDS:
        raise AmipsError(f"there is no engine {name!r}; there are {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    found: type[Backend] = getattr(importlib.import_module(f"amips.backends.{module}"), cls)
    return found


def missing(names: Iterable[str] = BACKENDS) -> dict[str, str]:
    """Which of these engines cannot be run here, and why, in one line each."""
    reasons = {}
    for name in names:
        try:
            backend_class(name).require()
        except AmipsError as problem:
            reasons[name] = str(problem)
    return reasons


def build(
    name: str,
    keys: Any,
    directory: str | Path,
    *,
    queries: Any = None,
    cells: Cells | None = None,
    address: str | None = None,
    **settings: Any,
) -> Backend:
    """Put keys into an engine, and open it.

    Args:
        name: one of `BACKENDS`.
        keys: an array or a file.
        directory: a new or empty one. Whoever is interrupted leaves it unfinished: delete it.
        queries: an array or a file like those that will be asked, for engines that learn from them.
        cells: a partition of the keys, for engines whose cells can be addressed ("leanvec", "pgvector",
            "lancedb", "milvus").
        address: of a server that is to hold the keys ("pgvector": a DSN; "milvus": a URI). If None, that in
            the environment variable AMIPS_PGVECTOR or AMIPS_MILVUS; without one, the engine runs here.
        settings: of the engine; see its class.
    """
    finder = backend_class(name)
    table = open_vectors(keys, "keys")
    log = None if queries is None else open_vectors(queries, "queries")
    directory = Path(directory)
    fingerprint = inspect(table, zero="keep").fingerprint
    known = finder.settings(table.n, table.d)
    if wrong := sorted(set(settings) - set(known)):
        raise AmipsError(f"{name} has no setting {wrong[0]!r}; it has {', '.join(known)}")
    if log is not None and log.d != table.d:
        raise AmipsError(f"queries have dimension {log.d}, keys have {table.d}")
    if cells is not None:
        if not finder.celled:
            raise AmipsError(f"{finder.title} does not let one address cells: leave them out")
        check_cells(cells, 1, table)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise AmipsError(f"{directory} is not an empty directory; choose another for the engine")
    address = _address(finder, address)
    finder.require()
    directory.mkdir(parents=True, exist_ok=True)
    settings = known | settings
    about = {"kind": KIND, "format": FORMAT, "engine": name, "n": table.n, "d": table.d}
    about |= {"keys": fingerprint, "sample": sample_of(table)}
    about |= {"settings": settings, "server": address is not None}
    files = finder.make(BuildInputs(table, log, cells, settings, address), directory)
    write_manifest(directory, MANIFEST, about, files)
    return load(directory, address=address)


def load(directory: str | Path, *, address: str | None = None) -> Backend:
    """Open an engine that `build` made; one that a server holds needs its address again."""
    directory = Path(directory)
    manifest = read_manifest(directory, MANIFEST, KIND, FORMAT, BundleError)
    if not {"engine", "n", "d", "settings", "server"} <= manifest.keys():
        raise BundleError(f"{directory / MANIFEST} is damaged: it does not say which engine it is of")
    finder = backend_class(manifest["engine"])
    address = _address(finder, address) if manifest["server"] or address is not None else None
    if manifest["server"] and address is None:
        raise AmipsError(
            f"{directory}: a server holds the keys; give its address, or set it in {finder.server}"
        )
    finder.require()
    made = finder.open(directory, manifest["n"], manifest["d"], manifest["settings"], address)
    made.fingerprint, made.sample = manifest.get("keys", ""), manifest.get("sample", "")
    return made


def _address(finder: type[Backend], given: str | None) -> str | None:
    if finder.server is not None:
        return given or os.environ.get(finder.server) or None
    if given is not None:
        raise AmipsError(f"{finder.title} has no server: leave the address out")
    return None
