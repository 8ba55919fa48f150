"""Bringing a FAISS index and a model together: `wrap`, and again after saving what is beside the index."""

from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_choice, check_number, check_whole
from amips.blas import faiss
from amips.cells import SAME_NORM, IVFParts, ivf_parts
from amips.errors import AmipsError, BundleError
from amips.metrics import TARGET_RECALL
from amips.nets import DESCRIPTION, WEIGHTS, Model, load_model
from amips.search.points import Point
from amips.search.routing_kind import MODEL, ROUTINGS, manifest_targets, own_router
from amips.search.wrapped import WrappedIndex
from amips.task import Task
from amips.vectors import row_norms

SAMPLE = 256  # keys of which the norm is looked at
AGAIN = "label with cells=index, train, and wrap it again"


def wrap(
    index: Any,
    model: Any,
    *,
    task: "Task | str | Path | None" = None,
    recall: float | None = None,
    ids: Any = None,
) -> WrappedIndex:
    """Route an existing FAISS IVF index with a model.

    Args:
        index: a `faiss.IndexIVF`, also inside `IndexIDMap` or behind linear transforms
            (`IndexPreTransform`), or the path of a file that holds one.
        model: a router must have been trained on this index's own cells: `amips.label(..., cells=index)`. A
            mapper (trained with cells=1) works with any index; an object with `scores(x)` has to know the
            cells itself; None leaves it to the index's own quantizer. Or the directory of a training run.
        task: measure on its val queries (`WrappedIndex.measured`), so that `recall=` can be asked for.
        recall: what `search` then serves when nothing else is asked for; 0.95 if None. Needs a task.
        ids: needs a task: [n], the ids of its keys in the index, if they were not added in the task's order.
    """
    for name, value in (("recall", recall), ("ids", ids)):
        if task is None and value is not None:
            raise AmipsError(
                f"{name} says how to measure, and there is nothing to measure on: give a task, too"
            )
    file = str(index) if isinstance(index, str | Path) else ""
    parts = ivf_parts(read_faiss(index))
    model = load_model(model) if isinstance(model, str | Path) else model
    wrapped = WrappedIndex(parts, checked_model(model, parts), key_norm=shared_norm(parts), file=file)
    if task is None:
        return wrapped
    return wrapped.measured(task, recall=TARGET_RECALL if recall is None else recall, ids=ids)


def read_faiss(index: Any) -> Any:
    """The FAISS index, read from its file if this is a path."""
    if not isinstance(index, str | Path):
        return index
    if not Path(index).is_file():
        raise AmipsError(f"{index} does not exist")
    try:
        return faiss.read_index(str(index))
    except RuntimeError as problem:
        raise AmipsError(f"{index} is not a readable FAISS index: {str(problem).splitlines()[-1]}") from None


def checked_model(model: Any, parts: IVFParts) -> Any:
    """The model, if it can choose cells of this index."""
    if not isinstance(model, Model):
        if model is not None and not callable(getattr(model, "scores", None)):
            raise AmipsError(f"a {type(model).__name__} cannot route: it has no method scores(x)")
        return model
    if model.d != parts.index.d:
        raise AmipsError(f"the model is for dimension {model.d}, the index for {parts.index.d}")
    if model.c > 1 and model.c != parts.ivf.nlist:
        raise AmipsError(f"the model scores {model.c} cells, the index has {parts.ivf.nlist}: {AGAIN}")
    if model.c > 1 and model.about.get("quantizer") != parts.fingerprint:
        raise AmipsError(f"the model was trained on other cells than this index has: {AGAIN}")
    return model


def shared_norm(parts: IVFParts) -> float:
    """The norm of the keys of an L2 index, if a sample of them has the same; 0 otherwise.

    0 also where the index does not hold them as they are, up to a rotation: then a task must tell
    (`WrappedIndex.measured`).
    """
    turned = all(t.is_orthonormal and t.d_in == t.d_out and not t.have_bias for t in parts.transforms)
    if parts.inner_product or not isinstance(parts.ivf, faiss.IndexIVFFlat) or not turned:
        return 0.0
    sizes = parts.sizes
    ends = np.cumsum(sizes)
    n = int(ends[-1])
    entries = np.unique(np.linspace(0, n - 1, min(SAMPLE, n)).astype(np.int64))
    keys = np.empty((len(entries), parts.ivf.d), np.float32)
    for row, entry in zip(keys, entries, strict=True):
        cell = int(np.searchsorted(ends, entry, side="right"))
        parts.ivf.reconstruct_from_offset(cell, int(entry - ends[cell] + sizes[cell]), faiss.swig_ptr(row))
    norms = row_norms(keys)
    if not len(norms) or norms.max() - norms.min() > SAME_NORM * norms.max():
        return 0.0
    return float(norms.mean(dtype=np.float64))


def open_wrapped(
    path: Path, manifest: dict[str, Any], data: Path, listed: set[str], index: Any, router: Any
) -> WrappedIndex:
    """What `WrappedIndex.save` wrote, around its index, or the path of the file that holds it."""
    try:
        n, d, c = (check_whole(name, manifest[name], 0, error=BundleError) for name in ("n", "d", "c"))
        about = f"{manifest['type']} of {n:,} keys, {c:,} cells"
        points = [Point.from_json(point) for point in manifest["points"]]
        routing = check_choice("router", manifest["router"], ROUTINGS, error=BundleError)
        targets, file = manifest_targets(manifest), str(manifest["file"])
        targets["key_norm"] = check_number("key_norm", manifest["key_norm"], least=0, error=BundleError)
        identity = {"d": d, "c": c, **{name: manifest[name] for name in ("type", "metric", "quantizer")}}
    except (KeyError, TypeError, ValueError, AttributeError, AmipsError) as problem:
        raise BundleError(f"{path} is damaged: {problem}") from None
    if index is None:
        kept = f", read from {file}" if file else ""
        raise BundleError(
            f"{path} routes a FAISS index that is kept elsewhere ({about}{kept}): load it with index=, "
            "the index or its file"
        )
    model = own_router(path, routing, router)
    parts = ivf_parts(read_faiss(index))
    if routing == MODEL:
        if not {DESCRIPTION, WEIGHTS} <= listed:
            raise BundleError(f"{path} is damaged: it does not list its model")
        model = load_model(data, BundleError)
    own = parts.identity
    for name, saved in identity.items():
        if name != "quantizer" and own[name] != saved:
            raise BundleError(f"{path} belongs to another index ({name} {saved}, here {own[name]}): {AGAIN}")
    if own["quantizer"] != identity["quantizer"]:
        raise BundleError(
            f"the index has been built anew since {path} was saved, and has other cells: {AGAIN}"
        )
    file = str(index) if isinstance(index, str | Path) else file
    return WrappedIndex(parts, checked_model(model, parts), points, **targets, file=file)
