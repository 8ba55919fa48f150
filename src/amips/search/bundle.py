"""The bundle: a searcher on disk.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, fingerprint, operating points
      data-<id>/
        sizes.npy, entries.npy, codes.npy, centroids.npy      the keys by cell, see `amips.index.cell_files`
        [, codebook.npy, keys.npy] [, projection.npy] [, second.npy] [, labels.npy]
        [, model.json, model.safetensors]
        or neighbours.npy, entries.npy, keys.npy and codes of a graph, see `amips.index.graph_store`
        [, logged.npy ...]     a memory of the log, see `amips.search.memory`

`amips.search.bundle_directory` says how it is replaced in one step. What `WrappedIndex.save` writes is a
bundle, too, without the index: `load` takes that from elsewhere.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_flag, check_number, check_path, check_whole
from amips.design import Design, GraphStorage, Storage, Structure
from amips.errors import AmipsError, BundleError, RunError
from amips.index import FILES, GRAPH_FILES, SECOND, FaissCellStore, GraphStore, read_array
from amips.nets import DESCRIPTION, WEIGHTS, Model, load_model
from amips.npy import save_npy
from amips.routers import check_fits
from amips.search.bundle_directory import (
    MANIFEST,
    bundle_stamp,
    check_bundle_place,
    read_bundle,
    replace_bundle,
)
from amips.search.graph_searcher import GraphSearcher
from amips.search.memory import MEMORY_FILES, Memory
from amips.search.memory_searcher import Index, MemorySearcher
from amips.search.points import Point
from amips.search.report import Report
from amips.search.routing_kind import CENTROIDS, MODEL, ROUTINGS, manifest_targets, own_router, routing_of
from amips.search.searcher import Searcher
from amips.search.wrapped import OUTSIDE, WrappedIndex
from amips.search.wrapping import open_wrapped
from amips.signing import Trusted
from amips.vectors import inspect, open_vectors

LABELS = "labels.npy"
MOST = 1 << 48  # keys, dimensions and cells
GATES_END = 1.01  # cosines end at 1, but for rounding
FINGERPRINT = re.compile(r"([0-9a-f]{64})?")


def save(searcher: Index, out: str | Path) -> None:
    """Write a bundle, or replace one; a router of your own is not in it: `load` takes it as `model`."""
    check_bundle_place(out)
    replace_bundle(out, lambda data: _write(searcher, data))


def _write(searcher: Index, data: Path) -> tuple[dict[str, Any], list[str]]:
    files = searcher.store.save(data)
    if searcher.labels is not None:
        save_npy(data / LABELS, searcher.labels)
        files.append(LABELS)
    if isinstance(searcher.model, Model):
        searcher.model.save(data)
        files += [DESCRIPTION, WEIGHTS]
    memory = searcher.memory if isinstance(searcher, MemorySearcher) else None
    files += [] if memory is None else memory.save(data)
    plain = searcher.index if isinstance(searcher, MemorySearcher) else searcher
    fields = {
        "n": searcher.n,
        "d": searcher.d,
        "c": searcher.c,
        "storage": searcher.store.storage,
        "structure": "cells" if isinstance(plain, Searcher) else "graph",
        "router": routing_of(searcher.model),
        "keys": searcher.fingerprint,
        "temperature": plain.temperature if isinstance(plain, Searcher) else 0.0,
        "gate": None if memory is None else memory.gate,
        "points": [point.to_json() for point in searcher.points],
        "target_recall": searcher.target_recall,
        "design": None if searcher.design is None else searcher.design.to_json(),
        "report": None if searcher.report is None else searcher.report.to_json(),
    }
    return fields, files


@overload
def load(
    path: str | Path,
    *,
    index: None = None,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
) -> Index: ...


@overload
def load(
    path: str | Path,
    *,
    index: Any,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
) -> WrappedIndex: ...


def load(
    path: str | Path,
    *,
    index: Any = None,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
) -> Index | WrappedIndex:
    """Open a bundle.

    Args:
        path: the bundle directory.
        index: for a bundle that `wrap(...).save` wrote, the FAISS index that it routes, or its file.
        keys: the keys it is expected to hold, an array or a file: others are an error.
        model: for a bundle of an index with a router of your own, that router: it is not in the bundle.
        mmap: leave the float32 keys on disk, mapped into memory as they are needed; otherwise all is read.
            The files must then stay as they are: one that is cut short while it is mapped ends the process.
        verify: check the SHA-256 of every file before it is read. All else is always checked, but for NaN and
            infinite values in keys that are left on disk.
        trusted: public keys, one or several, each a file or PEM as bytes: a bundle that none of them signed
            is an error (`amips sign`), and every file is verified.
    """
    path = check_path("path", path, error=BundleError)
    mmap = check_flag("mmap", mmap, error=BundleError)
    verify = check_flag("verify", verify, error=BundleError)
    while True:
        before = bundle_stamp(path)
        try:
            return _read(path, index, model, keys, mmap, verify or trusted is not None, trusted)
        except (BundleError, FileNotFoundError) as problem:
            if bundle_stamp(path) != before:
                continue  # it was replaced while it was being read, and its old files are gone
            if isinstance(problem, BundleError):
                raise
            raise BundleError(f"{problem.filename} is missing") from None


def _read(
    path: Path, index: Any, router: Any, keys: Any, mmap: bool, verify: bool, trusted: Trusted | None
) -> Index | WrappedIndex:
    manifest, data, listed = read_bundle(path, verify, trusted)
    if manifest.get("storage") == OUTSIDE:
        return open_wrapped(path, manifest, data, listed, index, router)
    if index is not None:
        raise BundleError(f"{path} holds an index of its own: load it without index=")
    facts = _bundle_facts(path, manifest)
    graph = facts.structure == "graph"
    stored = (GRAPH_FILES if graph else FILES).get(facts.storage, [])
    remembered = [] if facts.gate is None else MEMORY_FILES
    for needed in [*stored, *remembered, *([DESCRIPTION, WEIGHTS] if facts.router == MODEL else [])]:
        if needed not in listed:  # and so not verified
            raise BundleError(f"{path / MANIFEST} is damaged: it does not list {data.name}/{needed}")
    own = own_router(path, facts.router, router)
    store: GraphStore | FaissCellStore
    if graph:
        storage = check_choice("storage", facts.storage, GraphStorage, error=BundleError)
        store = GraphStore.load(data, storage, mmap, finite=verify)
        shape = (store.n, store.d, len(store.entries))
    else:
        store = FaissCellStore.load(data, facts.storage, mmap, SECOND in listed, finite=verify)
        shape = (store.n, store.d, len(store.sizes))
    n, d, c = facts.shape
    if shape != facts.shape:
        raise BundleError(
            f"{data} holds {shape[0]} keys of dimension {shape[1]} in {shape[2]} cells, "
            f"expected {n} of dimension {d} in {c}"
        )
    if keys is not None and inspect(open_vectors(keys), zero="keep").fingerprint != facts.fingerprint:
        raise BundleError(f"{path} holds other keys than those given")
    labels = _read_labels(data / LABELS, n) if LABELS in listed else None
    if isinstance(store, GraphStore):
        store.prepare()  # loading waits for it, not the first query; threads would each do it
        known = {name: value for name, value in facts.measured.items() if name != "temperature"}
        graph_index = GraphSearcher(store, facts.points, labels, facts.fingerprint, **known)
        return _with_memory(graph_index, data, facts)
    model = load_model(data, BundleError) if facts.router == MODEL else own
    if isinstance(model, Model) and (model.d != d or model.c not in (1, c)):
        raise BundleError(
            f"{data / DESCRIPTION}: a model for d = {model.d}, c = {model.c}; expected {d}, {c}"
        )
    searcher = Searcher(store, model, facts.points, labels, facts.fingerprint, **facts.measured)
    try:
        check_fits(model, facts.fingerprint, searcher.cells_fingerprint if model is not None else "")
    except RunError as problem:
        raise BundleError(f"{data / DESCRIPTION}: {problem} than the index holds") from None
    if not mmap:
        searcher.prepare()  # loading waits for it, not the first query
    return _with_memory(searcher, data, facts)


def _with_memory(index: Searcher | GraphSearcher, data: Path, facts: "_BundleFacts") -> Index:
    """The index with its memory of the log, if it has one."""
    if facts.gate is None:
        return index
    memory = Memory.load(data, facts.gate, index.n, index.d)
    memory.prepare()
    plain = [point for point in facts.points if not point.recognised]
    return MemorySearcher(replace(index, points=plain), memory, facts.points)


@dataclass(frozen=True)
class _BundleFacts:
    """What the manifest of a bundle says, each value checked."""

    shape: tuple[int, int, int]  # n, d, c
    structure: Structure
    storage: Storage
    router: str
    fingerprint: str
    points: list[Point]
    gate: float | None  # of a memory of the log, if there is one
    measured: dict[str, Any]  # by the names of `Searcher`


def _bundle_facts(path: Path, manifest: dict[str, Any]) -> _BundleFacts:
    try:
        n, d, c = (check_whole(name, manifest[name], 1, MOST, error=BundleError) for name in ("n", "d", "c"))
        storage = check_choice("storage", manifest["storage"], Storage, error=BundleError)
        structure = check_choice(
            "structure", manifest.get("structure", "cells"), Structure, error=BundleError
        )
        router = check_choice("router", manifest["router"], ROUTINGS, error=BundleError)
        if structure == "graph" and router != CENTROIDS:
            raise BundleError("a graph has no router")
        fingerprint = manifest["keys"]
        if not isinstance(fingerprint, str) or not FINGERPRINT.fullmatch(fingerprint):
            raise BundleError("the fingerprint of the keys is none")
        design, report = manifest["design"], manifest["report"]
        measured = {
            **manifest_targets(manifest),
            "design": None if design is None else Design.from_json(design),
            "report": None if report is None else Report.from_json(report),
        }
        points = [Point.from_json(point) for point in manifest["points"]]
        if structure == "cells" and storage == "flat" and any(point.refine is not None for point in points):
            raise BundleError("an operating point has candidates of codes, and there are no codes")
        gate = manifest.get("gate")
        if gate is not None:
            gate = check_number("gate", gate, above=0, most=GATES_END, error=BundleError)
        elif any(point.recognised for point in points):
            raise BundleError("an operating point has a memory of the log, and there is none")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, AmipsError) as problem:
        raise BundleError(f"{path / MANIFEST} is damaged: {problem}") from None
    return _BundleFacts((n, d, c), structure, storage, router, fingerprint, points, gate, measured)


def _read_labels(path: Path, n: int) -> NDArray[Any]:
    """Ids of keys: whole numbers, or strings of characters that there are."""
    labels = read_array(path, None, (n,))
    if labels.dtype != np.int64 and (labels.dtype.kind != "U" or not labels.dtype.isnative):
        raise BundleError(f"{path} is damaged: {labels.dtype}, expected int64 or strings")
    if labels.dtype.kind == "U" and labels.dtype.itemsize:
        points = labels.view(np.uint32)
        if points.max() > sys.maxunicode or ((points >= 0xD800) & (points <= 0xDFFF)).any():
            raise BundleError(f"{path} is damaged: it has characters that do not exist")
    return labels
