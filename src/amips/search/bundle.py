"""The bundle: a searcher on disk.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, fingerprint, operating points
      data-<id>/
        sizes.npy, entries.npy, codes.npy, centroids.npy      the keys by cell, see `amips.index.cell_files`
        [, codebook.npy, keys.npy] [, projection.npy, keyprojection.npy] [, second.npy] [, labels.npy]
        [, demand.npy]         where new keys go, see `amips.search.placing`
        [, attributes.arrow]   of the keys, see `amips.search.attributes`
        [, logtrain.npy ...]   a sample of the log, see `amips.search.query_log`
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_flag, check_number, check_whole
from amips.design import Design, GraphStorage, Storage, Structure
from amips.errors import AmipsError, BundleError, RunError
from amips.index import CODING, FILES, GRAPH_FILES, SECOND, FaissCellStore, GraphStore, read_array
from amips.nets import DESCRIPTION, WEIGHTS, Model, load_model
from amips.npy import save_npy
from amips.routers import check_fits
from amips.search.attributes import ATTRIBUTES, Attributes
from amips.search.bundle_directory import (
    MANIFEST,
    check_bundle_place,
    read_bundle,
    replace_bundle,
)
from amips.search.graph_searcher import GraphSearcher
from amips.search.memory import MEMORY_FILES, Memory
from amips.search.memory_searcher import MemorySearcher, Snapshot, plain_index
from amips.search.origin import Origin
from amips.search.placing import Placement, Rule
from amips.search.points import Point
from amips.search.query_log import LOG_FILES, QueryLog
from amips.search.report import Report
from amips.search.routing_kind import CENTROIDS, MODEL, ROUTINGS, manifest_targets, own_router, routing_of
from amips.search.searcher import Searcher
from amips.search.selectivity import Depth
from amips.search.wrapped import OUTSIDE, WrappedIndex
from amips.search.wrapping import open_wrapped
from amips.signing import Trusted
from amips.vectors import inspect, open_vectors

LABELS, DEMAND = "labels.npy", "demand.npy"
MOST = 1 << 48  # keys, dimensions and cells
GATES_END = 1.01  # cosines end at 1, but for rounding
FINGERPRINT = re.compile(r"([0-9a-f]{64})?")


def save(searcher: Snapshot, out: str | Path) -> None:
    """Write a bundle, or replace one; a router of your own is not in it: `load` takes it as `model`.

    Of an index from which keys were removed, compact it first (`amips.search.compacted`).
    """
    check_bundle_place(out)
    replace_bundle(out, lambda data: write_snapshot(searcher, data))


def write_snapshot(searcher: Snapshot, data: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the files of an index into a data directory: what its manifest is to say, and their names."""
    files = searcher.store.save(data)
    if searcher.labels is not None:
        save_npy(data / LABELS, searcher.labels)
        files.append(LABELS)
    if isinstance(searcher.model, Model):
        searcher.model.save(data)
        files += [DESCRIPTION, WEIGHTS]
    memory = searcher.memory if isinstance(searcher, MemorySearcher) else None
    files += [] if memory is None else memory.save(data)
    plain = plain_index(searcher)
    placement = plain.placement if isinstance(plain, Searcher) else Placement()
    if placement.demand is not None:
        save_npy(data / DEMAND, placement.demand)
        files.append(DEMAND)
    files += [] if plain.attributes is None else plain.attributes.save(data)
    origin = searcher.origin
    files += [] if origin.log is None else origin.log.save(data)
    fields = {
        "n": searcher.n,
        "d": searcher.d,
        "c": searcher.c,
        "storage": searcher.store.storage,
        "structure": "cells" if isinstance(plain, Searcher) else "graph",
        "router": routing_of(searcher.model),
        "keys": searcher.fingerprint,
        "temperature": plain.temperature if isinstance(plain, Searcher) else 0.0,
        "placement": placement.rule,
        "gate": None if memory is None else memory.gate,
        "points": [point.to_json() for point in searcher.points],
        "depths": [depth.to_json() for depth in plain.depths] if isinstance(plain, Searcher) else [],
        "target_recall": searcher.target_recall,
        "design": None if searcher.design is None else searcher.design.to_json(),
        "report": None if searcher.report is None else searcher.report.to_json(),
        "origin": origin.to_json(),
        "log": origin.log is not None,
    }
    return fields, files


def read_index(
    path: Path,
    *,
    index: Any = None,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
    manifest: str = MANIFEST,
) -> Snapshot | WrappedIndex:
    """The index in a bundle as it was written, without what was changed since; arguments of `amips.load`."""
    verify, router = verify or trusted is not None, model
    stated, data, listed = read_bundle(path, verify, trusted, manifest)
    if stated.get("storage") == OUTSIDE:
        return open_wrapped(path, stated, data, listed, index, router)
    if index is not None:
        raise BundleError(f"{path} holds an index of its own: load it without index=")
    facts = _bundle_facts(path, stated)
    graph = facts.structure == "graph"
    stored = (GRAPH_FILES if graph else FILES).get(facts.storage, [])
    remembered = ([] if facts.gate is None else MEMORY_FILES) + (LOG_FILES if facts.has_log else [])
    for needed in [*stored, *remembered, *([DESCRIPTION, WEIGHTS] if facts.router == MODEL else [])]:
        if needed not in listed:  # and so not verified
            raise BundleError(f"{path / MANIFEST} is damaged: it does not list {data.name}/{needed}")
    own = own_router(path, facts.router, router)
    store: GraphStore | FaissCellStore
    if graph:
        storage = check_choice("storage", facts.storage, GraphStorage, error=BundleError)
        store = GraphStore.load(data, storage, mmap, finite=verify, coding=CODING in listed)
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
    attributes = Attributes.load(data / ATTRIBUTES, n) if ATTRIBUTES in listed else None
    if facts.has_log:
        facts.measured["origin"] = replace(facts.measured["origin"], log=QueryLog.load(data, n, d))
    if isinstance(store, GraphStore):
        known = {name: value for name, value in facts.measured.items() if name != "temperature"}
        known["attributes"] = attributes
        graph_index = GraphSearcher(store, facts.points, labels, facts.fingerprint, **known)
        snapshot = _with_memory(graph_index, data, facts)
        snapshot.prepare()  # loading waits for it, not the first query; threads would each do it
        return snapshot
    model = load_model(data, BundleError) if facts.router == MODEL else own
    if isinstance(model, Model) and (model.d != d or model.c not in (1, c)):
        raise BundleError(
            f"{data / DESCRIPTION}: a model for d = {model.d}, c = {model.c}; expected {d}, {c}"
        )
    demand = read_array(data / DEMAND, np.float32, (d, d)) if DEMAND in listed else None
    placement = Placement(facts.placement if demand is not None else "key", demand)
    known = {**facts.measured, "placement": placement, "attributes": attributes}
    searcher = Searcher(store, model, facts.points, labels, facts.fingerprint, **known)
    try:
        check_fits(model, facts.fingerprint, searcher.cells_fingerprint if model is not None else "")
    except RunError as problem:
        raise BundleError(f"{data / DESCRIPTION}: {problem} than the index holds") from None
    snapshot = _with_memory(searcher, data, facts)
    if not mmap:
        snapshot.prepare()  # loading waits for it, not the first query
    return snapshot


def _with_memory(index: Searcher | GraphSearcher, data: Path, facts: "_BundleFacts") -> Snapshot:
    """The index with its memory of the log, if it has one."""
    if facts.gate is None:
        return index
    memory = Memory.load(data, facts.gate, index.n, index.d)
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
    placement: Rule
    gate: float | None  # of a memory of the log, if there is one
    has_log: bool  # whether there is a sample of it
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
            "origin": Origin.from_json(manifest.get("origin"), None),
        }
        if structure == "cells":
            measured["depths"] = [Depth.from_json(depth) for depth in manifest.get("depths", [])]
        has_log = check_flag("log", manifest.get("log", False), error=BundleError)
        points = [Point.from_json(point) for point in manifest["points"]]
        if structure == "cells" and storage == "flat" and any(point.refine is not None for point in points):
            raise BundleError("an operating point has candidates of codes, and there are no codes")
        placement = check_choice("placement", manifest.get("placement", "key"), Rule, error=BundleError)
        gate = manifest.get("gate")
        if gate is not None:
            gate = check_number("gate", gate, above=0, most=GATES_END, error=BundleError)
        elif any(point.recognised for point in points):
            raise BundleError("an operating point has a memory of the log, and there is none")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, AmipsError) as problem:
        raise BundleError(f"{path / MANIFEST} is damaged: {problem}") from None
    kinds = (structure, storage, router)
    return _BundleFacts((n, d, c), *kinds, fingerprint, points, placement, gate, has_log, measured)


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
