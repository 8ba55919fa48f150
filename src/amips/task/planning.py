"""What a task is to be made of: the options of `label`, checked, and the split of the queries.

Nothing is written here. A request that cannot be carried out fails before its directory is begun.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import cells as partition
from amips import exact
from amips.arguments import (
    check_array,
    check_choice,
    check_flag,
    check_number,
    check_seed,
    check_whole,
    refused,
)
from amips.cluster import check_address
from amips.errors import TaskError, VectorError
from amips.task.task import BY_ROWS, BY_SOURCE, BY_TIME, SPLITS
from amips.vectors import Vectors, first_equal, inspect

# Queries for choosing, and as many for reporting, where there are at least five times as many.
HELD_OUT = 1000
# What the paper does, where it differs from the defaults: noisy copies, and targets for every cell.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"cells": 1, "query_aware": 0.0, "copies": 4, "cell_targets": True}
}


@dataclass(frozen=True)
class LabelOptions:
    """Options of `label`, each checked by itself; None where the keys or queries decide."""

    cells: Any
    query_aware: float | None
    spherical: bool
    runs: int
    copies: int
    noise: float
    noisy_splits: tuple[str, ...]
    val: int | None
    test: int | None
    k: int
    cell_targets: bool
    seed: int
    zero: str
    memory: int
    device: str | None
    ray: str | None
    progress: bool


def checked_options(preset: Any, **options: Any) -> LabelOptions:
    """What `label` was called with, with what the preset says of options that are None."""
    if preset is not None:
        check_choice("preset", preset, tuple(PRESETS), error=TaskError)
    defaults = {"copies": 0, "cell_targets": False} | PRESETS.get(preset or "", {})
    options |= {name: value for name, value in defaults.items() if options[name] is None}
    check_choice("zero", options["zero"], ("error", "keep"), error=VectorError)
    for name in ("spherical", "progress", "cell_targets"):
        options[name] = check_flag(name, options[name], error=VectorError)
    absent = {name for name in ("val", "test", "query_aware") if options[name] is None}
    wholes = {"runs": 1, "k": 1, "memory": 1, "val": 1, "test": 1, "copies": 0}
    for name in (name for name in wholes if name not in absent):
        options[name] = check_whole(name, options[name], wholes[name], error=VectorError)
    for name in (name for name in ("noise", "query_aware") if name not in absent):
        options[name] = check_number(name, options[name], least=0, error=VectorError)
    options["seed"] = check_seed(options["seed"], error=VectorError)
    if options["device"] is not None:
        exact.check_device(options["device"])
    if check_address(options["ray"]) is not None and options["device"] is not None:
        raise VectorError("device and ray: workers of a Ray cluster multiply on their CPUs; give one of both")
    splits = options["noisy_splits"]
    if not isinstance(splits, tuple | list) or not set(map(str, splits)) <= set(SPLITS):
        raise refused("noisy_splits", splits, f"some of {', '.join(SPLITS)}", VectorError)
    return LabelOptions(**options)


@dataclass(frozen=True)
class Rows:
    """The rows of a split: the query that each is made from [m], and whether noise is added to it [m].

    `each` of them belong together: a query and its copies.
    """

    source: NDArray[np.int64]
    noisy: NDArray[np.bool_]
    each: int


@dataclass(frozen=True)
class TaskPlan:
    """What a task is to be made of.

    Args:
        cells: their number, or the partition itself.
        strength: of query-aware cells; 0 for plain ones.
        rows: of each split.
        unit_norm: whether keys and queries came with norm 1.
        duplicates: how many queries are equal to an earlier one; a split by time keeps them.
        identity: what makes a task the same, as its manifest has it.
    """

    keys: Vectors
    queries: Vectors
    cells: int | partition.Cells
    strength: float
    rows: dict[str, Rows]
    unit_norm: bool
    duplicates: int
    identity: dict[str, Any]


def task_plan(options: LabelOptions, keys: Vectors, queries: Vectors, split: Any) -> TaskPlan:
    """Check the options against keys and queries, and split the queries."""
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    cells = _checked_cells(options.cells, keys)
    count = partition.check(cells, options.runs, keys)
    strength = _strength(options, cells)
    if options.cell_targets and isinstance(cells, partition.Cells) and (cells.sizes == 0).any():
        empty = int((cells.sizes == 0).argmax())
        raise VectorError(
            f"cell {empty} holds no keys, so it has no top key; label without cell_targets (--cell-targets)"
        )
    exact.check_memory(options.memory, keys.d, min(options.k, keys.n), count)
    way = _checked_way(split, options)
    own_split = None if split is None or isinstance(split, str) else _checked_split(split, queries)
    hint = ', or keep them with zero="keep" (--keep-zero)'
    key_facts, query_facts = inspect(keys, options.zero, hint), inspect(queries, any_norm=True)
    distinct = np.flatnonzero(first_equal(queries, unit=True) == np.arange(queries.n))
    usable = np.arange(queries.n) if way == BY_TIME else distinct
    val, test = (_held_out(number, len(usable)) for number in (options.val, options.test))
    identity = {
        "keys": key_facts.fingerprint,
        "queries": query_facts.fingerprint,
        "cells": cells if isinstance(cells, int) else _fingerprint(cells),
        "spherical": options.spherical,
        "runs": options.runs,
        "copies": options.copies,
        "noise": options.noise,
        "noisy_splits": list(options.noisy_splits),
        "val": val,
        "test": test,
        "split": (None if way == BY_SOURCE else way)
        if own_split is None
        else hashlib.sha256(own_split.tobytes()).hexdigest(),
        "k": options.k,
        "cell_targets": options.cell_targets,
        "seed": options.seed,
        "memory": options.memory,  # it decides the block sizes, and so the last bits of the scores
    } | ({"query_aware": float(strength)} if strength else {})
    if way == BY_ROWS:
        rows = _split_rows(queries, distinct, val, test, options)
    elif way == BY_TIME:
        _check_enough(queries, queries.n, "queries", val, test)
        parts = np.split(usable, [queries.n - val - test, queries.n - test])
        rows = {name: _with_copies(name, part, options) for name, part in zip(SPLITS, parts, strict=True)}
    else:
        sources = (
            _split_randomly(queries, distinct, val, test, options.seed)
            if own_split is None
            else {name: distinct[own_split[distinct] == name] for name in SPLITS}
        )
        if lacking := [name for name in SPLITS if len(sources[name]) == 0]:
            raise VectorError(f"split: no distinct query is in {lacking[0]!r}")
        rows = {name: _with_copies(name, np.sort(sources[name]), options) for name in SPLITS}
    unit_norm, duplicates = key_facts.unit_norm and query_facts.unit_norm, queries.n - len(distinct)
    return TaskPlan(keys, queries, cells, strength, rows, unit_norm, duplicates, identity)


def _strength(options: LabelOptions, cells: "int | partition.Cells") -> float:
    """How query-aware the cells are: as asked for, or as much as pays where they can be."""
    possible = isinstance(cells, int) and cells > 1 and options.runs == 1 and options.spherical
    if options.query_aware is None:
        return partition.STRENGTH if possible else 0.0
    if options.query_aware and not possible:
        raise VectorError("query_aware is for a number of cells, spherical, one run")
    return options.query_aware


def _checked_cells(cells: Any, keys: Vectors) -> "int | partition.Cells":
    if cells is None:
        return partition.default_count(keys.n)
    if hasattr(cells, "ntotal"):  # a FAISS index
        return partition.from_faiss(cells, keys)
    return cells if isinstance(cells, partition.Cells) else check_whole("cells", cells, 1, error=VectorError)


def _held_out(number: int | None, distinct: int) -> int:
    return max(1, min(HELD_OUT, distinct // 5)) if number is None else number


def _split_randomly(
    queries: Vectors, distinct: NDArray[np.int64], val: int, test: int, seed: int
) -> dict[str, NDArray[np.int64]]:
    _check_enough(queries, len(distinct), "distinct queries", val, test)
    shuffled = np.random.default_rng([seed, 0]).permutation(distinct)
    return {"val": shuffled[:val], "test": shuffled[val : val + test], "train": shuffled[val + test :]}


def _check_enough(queries: Vectors, count: int, what: str, val: int, test: int) -> None:
    """VectorError unless something of so many is left to train on."""
    if count < val + test + 1:
        less = "lower val and test, or " if val + test > 2 else ""
        raise VectorError(
            f"{queries.name}: {count} {what} are too few to hold out "
            f"{val} for val and {test} for test; {less}bring more queries"
        )


def _checked_way(split: Any, options: LabelOptions) -> str:
    """What is split: queries ("source"), rows with noisy copies among them ("rows"), or the log ("time")."""
    if not isinstance(split, str):
        return BY_SOURCE
    way: str = check_choice("split", split, (BY_SOURCE, BY_ROWS, BY_TIME), error=VectorError)
    if way == BY_ROWS and tuple(options.noisy_splits) != ("train",):
        raise VectorError(f"noisy_splits: with split={BY_ROWS!r} noise comes first, and is in every split")
    return way


def _with_copies(name: str, source: NDArray[np.int64], options: LabelOptions) -> Rows:
    """Each query of a split, followed by its noisy copies."""
    each = 1 + (options.copies if name in options.noisy_splits else 0)
    return Rows(np.repeat(source, each), np.arange(len(source) * each) % each > 0, each)


def _split_rows(
    queries: Vectors, distinct: NDArray[np.int64], val: int, test: int, options: LabelOptions
) -> dict[str, Rows]:
    """Noisy copies first, then rows at random: what is held out has relatives in train."""
    each = 1 + options.copies
    numbers = _split_randomly(queries, np.arange(len(distinct) * each), val, test, options.seed)
    rows = {name: np.sort(numbers[name]) for name in SPLITS}
    return {name: Rows(distinct[ids // each], ids % each > 0, 1) for name, ids in rows.items()}


def _checked_split(split: Any, queries: Vectors) -> NDArray[np.str_]:
    words = check_array("split", split, error=VectorError)
    if words.shape != (queries.n,) or words.dtype.kind != "U":
        raise VectorError(
            f"split: expected {queries.n} words, one for each query, got {words.dtype} {words.shape}"
        )
    if unknown := set(np.unique(words).tolist()) - {*SPLITS, ""}:
        raise VectorError(f"split: {sorted(unknown)[0]!r} is not one of train, val, test or nothing")
    return words.astype("<U5")


def _fingerprint(cells: partition.Cells) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(cells.assignment, np.int32).tobytes())
    digest.update(np.ascontiguousarray(cells.centroids, np.float32).tobytes())
    return digest.hexdigest()
