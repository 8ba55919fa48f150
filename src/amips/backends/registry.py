"""Backends by name: building them, and opening them again."""

import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from amips.arguments import check_recall
from amips.backends.backend import MANIFEST, Backend, BuildInputs, sample_of
from amips.cells import Cells
from amips.cells import check as check_cells
from amips.errors import AmipsError, BundleError
from amips.files import check_output, read_manifest, write_manifest
from amips.search import Point
from amips.vectors import inspect, open_vectors

KIND, FORMAT = "backend", 1

# The module and the class of each; imported when asked for, and their libraries later still.
BACKENDS = {
    "fastscan": ("fastscan", "FastScan"),
    "hnsw": ("hnsw", "HNSW"),
    "leanvec": ("leanvec", "LeanVec"),
    "svs": ("svs", "SVS"),
    "usearch": ("usearch", "USearch"),
    "symphonyqg": ("symphonyqg", "SymphonyQG"),
    "lorann": ("lorann", "LoRANN"),
    "scann": ("scann", "ScaNN"),
    "soar": ("scann", "SOAR"),
    "pgvector": ("pgvector", "PgVector"),
    "lancedb": ("lancedb", "LanceDB"),
    "milvus": ("milvus", "Milvus"),
}


def backend_class(name: str) -> type[Backend]:
    """The class of a backend."""
    if name not in BACKENDS:
        raise AmipsError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    kind: type[Backend] = getattr(importlib.import_module(f"amips.backends.{module}"), cls)
    return kind


def missing(names: Iterable[str] = BACKENDS) -> dict[str, str]:
    """Which of these backends cannot be run here, and why, in one line each."""
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
    """Put keys into a backend, and open it.

    Args:
        name: one of `BACKENDS`.
        keys: an array or a file.
        directory: a new or empty one. Whoever is interrupted leaves it unfinished: delete it.
        queries: an array or a file like those that will be asked, for backends that learn from them.
        cells: a partition of the keys, for backends whose cells can be addressed ("leanvec", "pgvector",
            "lancedb", "milvus").
        address: of a server that is to hold the keys ("pgvector": a DSN; "milvus": a URI). If None, that in
            the environment variable AMIPS_PGVECTOR or AMIPS_MILVUS; without one, it runs here.
        settings: of the backend; see its class.
    """
    kind = backend_class(name)
    table = open_vectors(keys, "keys")
    log = None if queries is None else open_vectors(queries, "queries")
    directory = check_output(directory, AmipsError, what="an empty directory")
    fingerprint = inspect(table, zero="keep").fingerprint
    known = kind.settings(table.n, table.d)
    if wrong := sorted(set(settings) - set(known)):
        raise AmipsError(f"{name} has no setting {wrong[0]!r}; it has {', '.join(known)}")
    if log is not None and log.d != table.d:
        raise AmipsError(f"queries have dimension {log.d}, keys have {table.d}")
    if cells is not None:
        if not kind.routable:
            raise AmipsError(f"{kind.title} does not let one address cells: leave them out")
        check_cells(cells, 1, table)
    address = _address(kind, address)
    kind.require()
    directory.mkdir(parents=True, exist_ok=True)
    settings = known | settings
    about = {"kind": KIND, "format": FORMAT, "backend": name, "n": table.n, "d": table.d}
    about |= {"keys": fingerprint, "sample": sample_of(table)}
    about |= {"settings": settings, "server": address is not None}
    files = kind.make(BuildInputs(table, log, cells, settings, address), directory)
    write_manifest(directory, MANIFEST, about, files)
    return load(directory, address=address)


def load(directory: str | Path, *, address: str | None = None) -> Backend:
    """Open a backend that `build` wrote; one that a server holds needs its address again."""
    directory = Path(directory)
    manifest = read_manifest(directory, MANIFEST, KIND, FORMAT, BundleError)
    if not {"backend", "n", "d", "keys", "sample", "settings", "server"} <= manifest.keys():
        raise BundleError(f"{directory / MANIFEST} is damaged: it does not say which backend it is of")
    kind = backend_class(manifest["backend"])
    address = _address(kind, address) if manifest["server"] or address is not None else None
    if manifest["server"] and address is None:
        raise AmipsError(
            f"{directory}: a server holds the keys; give its address, or set it in {kind.server}"
        )
    kind.require()
    backend = kind.open(directory, manifest["n"], manifest["d"], manifest["settings"], address)
    backend.directory = directory
    backend.fingerprint, backend.sample = manifest["keys"], manifest["sample"]
    try:
        backend.points = [Point.from_json(values) for values in manifest.get("points", [])]
        target = manifest.get("target_recall")
        backend.target_recall = None if target is None else check_recall(target, "target_recall")
    except (TypeError, ValueError, AttributeError, AmipsError) as problem:
        raise BundleError(f"{directory / MANIFEST} is damaged: {problem}") from None
    return backend


def _address(kind: type[Backend], address: str | None) -> str | None:
    if kind.server is not None:
        return address or os.environ.get(kind.server) or None
    if address is not None:
        raise AmipsError(f"{kind.title} has no server: leave the address out")
    return None
