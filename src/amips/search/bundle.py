"""The bundle: a searcher on disk.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, fingerprint, operating points
      data-<id>/
        index.faiss, cells.npy [, keys.npy] [, labels.npy] [, model.json, model.safetensors]

A new version is written into a data directory of its own, and then the manifest is replaced by one
rename. Before that moment the old bundle is whole, after it the new one is; what is left over of the
other is removed.
"""

import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from amips import version
from amips.errors import BundleError
from amips.files import read_manifest, write_manifest
from amips.index import FaissIVF
from amips.nets import load_model
from amips.nets.model import DESCRIPTION, WEIGHTS
from amips.search.points import Point
from amips.search.searcher import Searcher
from amips.vectors import inspect, open_vectors

MANIFEST = "manifest.json"
FORMAT = 1
LABELS = "labels.npy"


def save(searcher: Searcher, out: str | Path) -> None:
    """Write a bundle, or replace one."""
    out = Path(out)
    if out.exists() and not (out / MANIFEST).exists() and (not out.is_dir() or _foreign(out)):
        raise BundleError(f"{out} exists and is not a bundle; choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    data = out / f"data-{uuid.uuid4().hex[:12]}"
    data.mkdir()
    files = searcher.engine.save(data)
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
        "storage": searcher.engine.storage,
        "keys": searcher.fingerprint,
        "data": data.name,
        "points": [point.to_json() for point in searcher.points],
    }
    write_manifest(out, MANIFEST, fields, [f"{data.name}/{file}" for file in files])
    for left in out.glob("data-*"):
        if left != data:
            shutil.rmtree(left, ignore_errors=True)


def _foreign(out: Path) -> bool:
    """Whether a directory holds anything that an interrupted `save` would not have left."""
    return any(not child.name.startswith(("data-", f".{MANIFEST}")) for child in out.iterdir())


def load(path: str | Path, *, keys: Any = None, mmap: bool = False, verify: bool = True) -> Searcher:
    """Open a bundle.

    Args:
        path: the bundle directory.
        keys: the keys it is expected to hold, an array or a file: others are an error.
        mmap: leave the keys on disk, mapped into memory as they are needed.
        verify: check the SHA-256 of every file before it is read. Sizes are always checked.
    """
    path = Path(path)
    manifest = read_manifest(path, MANIFEST, "bundle", FORMAT, BundleError, verify)
    try:
        data = path / str(manifest["data"])
        listed = {file.split("/", 1)[1] for file in manifest["files"]}
        points = [Point(**point) for point in manifest["points"]]
        n, d, c, storage = (manifest[name] for name in ("n", "d", "c", "storage"))
        fingerprint = str(manifest["keys"])
    except (KeyError, TypeError, IndexError) as problem:
        raise BundleError(f"{path / MANIFEST} is damaged: {problem}") from None
    engine = FaissIVF.load(data, storage, mmap)
    found = (engine.n, engine.d, int(engine.index.nlist))
    if found != (n, d, c):
        raise BundleError(
            f"{data / 'index.faiss'} holds {found[0]} keys of dimension {found[1]} in {found[2]} cells, "
            f"expected {n} of dimension {d} in {c}"
        )
    model = load_model(data, BundleError) if WEIGHTS in listed else None
    if model is not None and (model.d != d or model.c not in (1, c)):
        raise BundleError(
            f"{data / DESCRIPTION}: a model for d = {model.d}, c = {model.c}; expected {d}, {c}"
        )
    if model is not None and model.about.get("keys", fingerprint) != fingerprint:
        raise BundleError(f"{data / DESCRIPTION}: the model was trained on other keys than the index holds")
    if keys is not None and inspect(open_vectors(keys), zero="keep").fingerprint != fingerprint:
        raise BundleError(f"{path} holds other keys than those given")
    labels = np.load(data / LABELS, allow_pickle=False) if LABELS in listed else None
    return Searcher(engine, model, points, labels, fingerprint, path)
