"""The bundle: a searcher on disk.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, fingerprint, operating points
      data-<id>/
        index.faiss [, keys.npy] [, lean.npz] [, second.npy] [, labels.npy] [, model.json, model.safetensors]

`amips.search.bundle_directory` says how it is replaced in one step. What `WrappedIndex.save` writes is a
bundle, too, without the index: `load` takes that from elsewhere.
"""

from pathlib import Path
from typing import Any, overload

import numpy as np

from amips.design import Design
from amips.errors import AmipsError, BundleError, RunError
from amips.index import BESIDE, INDEX, SECOND, FaissCellStore, read_array
from amips.nets import DESCRIPTION, WEIGHTS, Model, load_model
from amips.routers import check_fits
from amips.search.bundle_directory import (
    MANIFEST,
    bundle_stamp,
    check_bundle_place,
    read_bundle,
    replace_bundle,
)
from amips.search.points import Point
from amips.search.report import Report
from amips.search.searcher import Searcher
from amips.search.wrapped import OUTSIDE, WrappedIndex
from amips.search.wrapping import open_wrapped
from amips.vectors import inspect, open_vectors

LABELS = "labels.npy"


def save(searcher: Searcher, out: str | Path) -> None:
    """Write a bundle, or replace one."""
    check_bundle_place(out)
    if searcher.model is not None and not isinstance(searcher.model, Model):
        raise BundleError(
            "a router of your own cannot be saved: save with_model(None), and bring it again after loading"
        )
    replace_bundle(out, lambda data: _write(searcher, data))


def _write(searcher: Searcher, data: Path) -> tuple[dict[str, Any], list[str]]:
    files = searcher.store.save(data)
    if searcher.labels is not None:
        np.save(data / LABELS, searcher.labels)
        files.append(LABELS)
    if searcher.model is not None:
        searcher.model.save(data)
        files += [DESCRIPTION, WEIGHTS]
    fields = {
        "n": searcher.n,
        "d": searcher.d,
        "c": searcher.c,
        "storage": searcher.store.storage,
        "keys": searcher.fingerprint,
        "temperature": searcher.temperature,
        "points": [point.to_json() for point in searcher.points],
        "target_recall": searcher.target_recall,
        "design": None if searcher.design is None else searcher.design.to_json(),
        "report": None if searcher.report is None else searcher.report.to_json(),
    }
    return fields, files


@overload
def load(
    path: str | Path, *, index: None = None, keys: Any = None, mmap: bool = False, verify: bool = True
) -> Searcher: ...


@overload
def load(
    path: str | Path, *, index: Any, keys: Any = None, mmap: bool = False, verify: bool = True
) -> WrappedIndex: ...


def load(
    path: str | Path, *, index: Any = None, keys: Any = None, mmap: bool = False, verify: bool = True
) -> Searcher | WrappedIndex:
    """Open a bundle.

    Args:
        path: the bundle directory.
        index: for a bundle that `wrap(...).save` wrote, the FAISS index that it routes, or its file.
        keys: the keys it is expected to hold, an array or a file: others are an error.
        mmap: leave the keys on disk, mapped into memory as they are needed.
        verify: check the SHA-256 of every file before it is read. Sizes are always checked.
    """
    path = Path(path)
    while True:
        before = bundle_stamp(path)
        try:
            return _read(path, index, keys, mmap, verify)
        except (BundleError, FileNotFoundError) as problem:
            if bundle_stamp(path) != before:
                continue  # it was replaced while it was being read, and its old files are gone
            if isinstance(problem, BundleError):
                raise
            raise BundleError(f"{problem.filename} is missing") from None


def _read(path: Path, index: Any, keys: Any, mmap: bool, verify: bool) -> Searcher | WrappedIndex:
    manifest, data, listed = read_bundle(path, verify)
    if manifest.get("storage") == OUTSIDE:
        return open_wrapped(path, manifest, data, listed, index)
    if index is not None:
        raise BundleError(f"{path} holds an index of its own: load it without index=")
    try:
        points = [Point(**point) for point in manifest["points"]]
        n, d, c, storage = (manifest[name] for name in ("n", "d", "c", "storage"))
        fingerprint, temperature = str(manifest["keys"]), float(manifest["temperature"])
        stated, target = manifest["design"], manifest["target_recall"]
        design = None if stated is None else Design.from_json(stated)
        target = None if target is None else float(target)
        report = None if manifest["report"] is None else Report.from_json(manifest["report"])
    except (KeyError, TypeError, ValueError, AmipsError) as problem:
        raise BundleError(f"{path / MANIFEST} is damaged: {problem}") from None
    for needed in [INDEX, *BESIDE.get(storage, [])]:
        if needed not in listed:  # and so not verified
            raise BundleError(f"{path / MANIFEST} is damaged: it does not list {data.name}/{needed}")
    store = FaissCellStore.load(data, storage, mmap, SECOND in listed)
    shape = (store.n, store.d, len(store.sizes))
    if shape != (n, d, c):
        raise BundleError(
            f"{data / INDEX} holds {shape[0]} keys of dimension {shape[1]} in {shape[2]} cells, "
            f"expected {n} of dimension {d} in {c}"
        )
    model = load_model(data, BundleError) if WEIGHTS in listed else None
    if model is not None and (model.d != d or model.c not in (1, c)):
        raise BundleError(
            f"{data / DESCRIPTION}: a model for d = {model.d}, c = {model.c}; expected {d}, {c}"
        )
    if keys is not None and inspect(open_vectors(keys), zero="keep").fingerprint != fingerprint:
        raise BundleError(f"{path} holds other keys than those given")
    labels = read_array(data / LABELS, (n,), "iU") if LABELS in listed else None
    searcher = Searcher(store, model, points, labels, fingerprint, temperature, target, design, report)
    if model is not None:
        try:
            check_fits(model, fingerprint, searcher.cells_fingerprint)
        except RunError as problem:
            raise BundleError(f"{data / DESCRIPTION}: {problem} than the index holds") from None
    return searcher
