"""The bundle: a searcher on disk.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, fingerprint, operating points
      data-<id>/
        index.faiss [, keys.npy] [, lean.npz] [, second.npy] [, labels.npy] [, model.json, model.safetensors]

A new version is written into a data directory of its own, and then the manifest is replaced by one
rename. Before that moment the old bundle is whole, after it the new one is; what is left over of the
other is removed.
"""

import hashlib
import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from amips import version
from amips.design import Design
from amips.errors import AmipsError, BundleError, RunError
from amips.files import fsync_directory, locked, read_json, read_manifest, write_manifest
from amips.index import BESIDE, INDEX, SECOND, FaissCellStore, read_array
from amips.nets import DESCRIPTION, WEIGHTS, Model, load_model
from amips.routers import check_fits
from amips.search.points import Point
from amips.search.report import Report
from amips.search.searcher import Searcher
from amips.vectors import inspect, open_vectors

MANIFEST = "manifest.json"
FORMAT = 2
LABELS, LOCK = "labels.npy", ".lock"
OWN = re.compile(
    rf"data-[0-9a-f]{{12}}|\.{re.escape(MANIFEST)}\.\d+\.tmp|\.lock"
)  # what a save may leave behind


def save(searcher: Searcher, out: str | Path) -> None:
    """Write a bundle, or replace one."""
    out = Path(out)
    check_bundle_place(out)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK):  # two saves at a time would clear away each other's data
        data = out / f"data-{uuid.uuid4().hex[:12]}"
        try:
            _write(searcher, out, data)
        except BaseException:
            # The last step can fail after its rename: what the manifest names stays.
            if not (out / MANIFEST).exists() or data.name not in (out / MANIFEST).read_text():
                shutil.rmtree(data, ignore_errors=True)
            raise
        for left in out.iterdir():
            if left != data and OWN.fullmatch(left.name) and left.name != LOCK:
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _write(searcher: Searcher, out: Path, data: Path) -> None:
    data.mkdir()
    if searcher.model is not None and not isinstance(searcher.model, Model):
        raise BundleError(
            "a router of your own cannot be saved: save with_model(None), and bring the router again after loading"
        )
    files = searcher.store.save(data)
    if searcher.labels is not None:
        np.save(data / LABELS, searcher.labels)
        files.append(LABELS)
    if searcher.model is not None:
        searcher.model.save(data)
        files += [DESCRIPTION, WEIGHTS]
    fields = {
        "kind": "bundle",
        "format": FORMAT,
        "amips": version.__version__,
        "n": searcher.n,
        "d": searcher.d,
        "c": searcher.c,
        "storage": searcher.store.storage,
        "keys": searcher.fingerprint,
        "data": data.name,
        "temperature": searcher.temperature,
        "points": [point.to_json() for point in searcher.points],
        "target_recall": searcher.target_recall,
        "design": None if searcher.design is None else searcher.design.to_json(),
        "report": None if searcher.report is None else searcher.report.to_json(),
    }
    fsync_directory(data)  # its names must be on disk before the manifest that relies on them
    fields["sha256"] = _digest(fields)
    write_manifest(out, MANIFEST, fields, [f"{data.name}/{file}" for file in files])


def check_bundle_place(out: str | Path) -> None:
    """BundleError unless a bundle can be written here without harm to anything else."""
    out = Path(out)
    if not out.exists():
        return
    if out.is_dir() and (out / MANIFEST).exists():
        if read_json(out / MANIFEST, BundleError).get("kind") == "bundle":
            return
    elif out.is_dir() and all(OWN.fullmatch(child.name) for child in out.iterdir()):
        return  # empty, or what an interrupted save has left
    raise BundleError(f"{out} exists and is not a bundle; choose another directory")


def _digest(fields: dict[str, Any]) -> str:
    """SHA-256 of the manifest's own fields; those of the files are checked against the files."""
    own = {name: value for name, value in fields.items() if name not in ("files", "sha256")}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def load(path: str | Path, *, keys: Any = None, mmap: bool = False, verify: bool = True) -> Searcher:
    """Open a bundle.

    Args:
        path: the bundle directory.
        keys: the keys it is expected to hold, an array or a file: others are an error.
        mmap: leave the keys on disk, mapped into memory as they are needed.
        verify: check the SHA-256 of every file before it is read. Sizes are always checked.
    """
    path = Path(path)
    while True:
        before = _stamp(path)
        try:
            return _read(path, keys, mmap, verify)
        except (BundleError, FileNotFoundError) as problem:
            if _stamp(path) != before:
                continue  # it was replaced while it was being read, and its old files are gone
            if isinstance(problem, BundleError):
                raise
            raise BundleError(f"{problem.filename} is missing") from None


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a bundle is replaced."""
    try:
        stat = (path / MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read(path: Path, keys: Any, mmap: bool, verify: bool) -> Searcher:
    manifest = read_manifest(path, MANIFEST, "bundle", FORMAT, BundleError, verify)
    if manifest.get("sha256") != _digest(manifest):
        raise BundleError(f"{path / MANIFEST} does not have the SHA-256 that it states: it has changed")
    try:
        data = path / str(manifest["data"])
        listed = {Path(file).name for file in manifest["files"] if Path(file).parent == Path(data.name)}
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
    searcher = Searcher(
        store, model, points, labels, fingerprint, temperature, target, design, report
    )
    if model is not None:
        try:
            check_fits(model, fingerprint, searcher.cells_fingerprint)
        except RunError as problem:
            raise BundleError(f"{data / DESCRIPTION}: {problem} than the index holds") from None
    return searcher
