"""`shard`: from a task or a bundle to shards that queries can be routed between."""

import hashlib
import shutil
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import (
    check_choice,
    check_flag,
    check_number,
    check_path,
    check_recall,
    check_seed,
    check_whole,
)
from amips.builder import build
from amips.errors import AmipsError, BundleError
from amips.files import begin_output, manifest_kinds, remove_directory, remove_partials
from amips.index import OwnCells
from amips.locks import locked
from amips.metrics import TARGET_RECALL, TOP
from amips.nets import DEFAULT_MINUTES
from amips.npy import load_npy, save_npy
from amips.progress import Bar
from amips.resources import plain_resource_errors
from amips.search import GraphSearcher, Index, keys_at, live_numbers, load, plain_index
from amips.sharding.directory import (
    LOCK,
    MANIFEST,
    PLAN,
    ROUTER,
    WORK,
    is_sharded,
    load_shards,
    shard_path,
    write_shards,
)
from amips.sharding.partition import COPIES, KINDS, SLACK, Kind, Partition, divide
from amips.sharding.shard_measuring import measure_shards
from amips.sharding.sharded import LocalShards, ShardedIndex
from amips.task import Task, label, load_task
from amips.vectors import Vectors, unit_rows

SHARD_QUERIES = 20_000  # of the log that a shard is labelled with, at most
WHOLE = "shard the task or the bundle that they were made of"
FEWEST_QUERIES = 50  # that a shard is labelled with: others are taken where too few want its keys


@plain_resource_errors()
def shard(
    source: Any,
    *,
    out: str | Path,
    shards: int = 16,
    routers: Any = ("centroid", "linear"),
    copies: float = COPIES,
    slack: float = SLACK,
    recall: float = TARGET_RECALL,
    minutes: float = DEFAULT_MINUTES,
    seed: int = 0,
    progress: bool = False,
) -> ShardedIndex:
    """Divide keys into shards such that each query needs few of them, one bundle a shard.

    Query-aware cells are grouped so that the top keys of a training query lie in few shards of even size; a
    router of shards is chosen on val. The same call continues what was interrupted. One shard is in memory at
    a time: keys are read from their files in blocks, and what comes back has them mapped (`mmap=True`).

    Args:
        source: a task or its directory; or a bundle, whose kept log takes the place of the queries.
        out: the directory to make.
        shards: how many.
        routers: candidates for the router of shards: "centroid", "linear" (both over cells, whose masses are
            added up), "support" and "key" (networks with an output for each shard). That with the fewest
            shards contacted at the recall on val is taken.
        copies: fraction of the keys that have a copy in a second shard, where queries find them that are not
            sent to the first. 0 for none.
        slack: how much larger than the mean a shard may be.
        recall: the recall@10 that `search` serves if it is asked for nothing else.
        minutes: of training, at most, for each router.
    """
    shards, seed = check_whole("shards", shards, 2), check_seed(seed)
    copies = check_number("copies", copies, least=0, most=1, what="a fraction of the keys")
    slack, recall = check_number("slack", slack, above=0), check_recall(recall)
    minutes, progress = check_number("minutes", minutes, above=0), check_flag("progress", progress)
    names = [routers] if isinstance(routers, str) else list(routers)
    kinds: list[Kind] = [check_choice("routers", name, KINDS) for name in names]
    if not kinds:
        raise AmipsError(f"routers: name at least one of {', '.join(KINDS)}")
    task, index = _opened(source)
    n = index.n if task is None and index is not None else task.n if task is not None else 0
    if n < shards * FEWEST_QUERIES:
        most = n // FEWEST_QUERIES
        cure = f"ask for {most}" if most > 1 else "keep them in one bundle"
        raise AmipsError(f"shards={shards}: {n:,} keys are too few; {cure}")
    fingerprint = _fingerprint(index) if task is None else task.fingerprint
    plan = {
        "keys": fingerprint,
        "options": None if task is None else task.options,
        "shards": shards,
        "routers": kinds,
        "copies": copies,
        "slack": slack,
        "recall": recall,
        "minutes": minutes,
        "seed": seed,
    }
    out = begin_output(out, plan, BundleError, what="shards", mark=PLAN)
    busy = BundleError(f"{out} is being made by another process: wait until it ends")
    with locked(out / LOCK, busy):
        if not (out / MANIFEST).is_file():
            remove_partials(out)
            _make(out, task, index, shards, kinds, copies, slack, recall, minutes, seed, progress)
    return load_shards(out, mmap=True)


def _make(
    out: Path,
    task: Task | None,
    index: Index | None,
    shards: int,
    kinds: list[Kind],
    copies: float,
    slack: float,
    recall: float,
    minutes: float,
    seed: int,
    progress: bool,
) -> None:
    """Partition, bundles, points, and last the manifest."""
    work = out / WORK
    labels = None
    if task is None:
        assert index is not None
        task, labels = _task_of(index, work / "task", seed, progress)
    partition = divide(
        task, shards, kinds=kinds, copies=copies, slack=slack, recall=recall, minutes=minutes, seed=seed,
        work=work, progress=progress,
    )  # fmt: skip
    _keep_partition(out, partition)
    inner = (1 + recall) / 2 if recall < 1 else 1.0
    _make_bundles(out, task, partition, labels, inner, seed, progress)
    (out / ROUTER).mkdir(exist_ok=True)
    routing = partition.estimate(task.val)
    about = {
        "chosen": partition.chosen,
        "cells": len(partition.router.group),
        "copies": float((partition.second >= 0).mean()),
        "contacted_on_val": partition.contacted,
    }
    sharded = ShardedIndex(
        router=partition.router,
        shards=LocalShards([]),
        sizes=partition.sizes,
        n=task.n,
        d=task.d,
        id_type=np.int64 if labels is None else labels.dtype,
        points=[],
        temperature=routing.temperature,
        target_recall=recall,
        inner_recall=inner,
        about=about,
    )
    x, top = np.asarray(task.val.queries), np.asarray(task.val.top_ids)[:, :TOP]
    true = top if labels is None else labels[top]
    points = measure_shards(sharded, x, true, task.val.source, recall, partial(_open_made, out))
    sharded = replace(sharded, points=points)
    asked = sharded.choose_shards(x, best_effort=True)
    about["asked_on_val"] = float(asked.sum(axis=1).mean())
    write_shards(out, sharded)
    remove_directory(work)


def _keep_partition(out: Path, partition: Partition) -> None:
    """Note which keys are where; bundles of another partition, of a call before, go."""
    place, parts = out / WORK / "partition.npy", np.stack([partition.assignment, partition.second])
    if place.is_file() and np.array_equal(load_npy(place, BundleError), parts):
        return
    for shard in range(partition.router.count):
        remove_directory(shard_path(out, shard))
    save_npy(place, parts)


def _make_bundles(
    out: Path,
    task: Task,
    partition: Partition,
    labels: NDArray[Any] | None,
    recall: float,
    seed: int,
    progress: bool,
) -> None:
    """One bundle a shard, those that are there already left as they are."""
    top = np.asarray(task.train.top_ids)[:, :TOP]
    with Bar(partition.router.count, "bundles", "shards", progress) as shown:
        for number in range(partition.router.count):
            place = shard_path(out, number)
            if not (place / "manifest.json").is_file():
                inside = (partition.assignment == number) | (partition.second == number)
                ids = np.flatnonzero(inside)
                wanting = np.flatnonzero(inside[top].any(axis=1))
                rows = _sample(wanting, len(top), np.random.default_rng([seed, 43, number]))
                part = label(
                    _some_of(task.key_vectors, ids),
                    task.train.vectors.take(rows),
                    out=out / WORK / f"task-{number:03d}",
                    seed=seed,
                )
                names = ids if labels is None else labels[ids]
                build(part, out=place, recall=recall, ids=names, seed=seed, keep_log=0).close()
                shutil.rmtree(out / WORK / f"task-{number:03d}", ignore_errors=True)
            shown.update()


def _some_of(keys: Vectors, ids: NDArray[np.int64]) -> Vectors:
    """Keys with these ids, read as they are asked for."""
    return Vectors("keys of the shard", len(ids), keys.d, lambda low, high: keys.take(ids[low:high]))


def _open_made(out: Path, shard: int) -> Index:
    return load(shard_path(out, shard), mmap=True, watch=False)


def _sample(wanting: NDArray[np.int64], m: int, rng: "np.random.Generator") -> NDArray[np.int64]:
    """Queries that want keys of a shard, and others where these are too few to hold some out."""
    if len(wanting) > SHARD_QUERIES:
        wanting = rng.choice(wanting, SHARD_QUERIES, replace=False)
    if len(wanting) < FEWEST_QUERIES:
        others = np.setdiff1d(np.arange(m), wanting)
        wanting = np.append(wanting, rng.permutation(others)[: FEWEST_QUERIES - len(wanting)])
    return np.sort(wanting)


def _opened(source: Any) -> tuple[Task | None, Index | None]:
    """A task, or a bundle."""
    if isinstance(source, Task):
        return source, None
    if isinstance(source, Index):
        return None, source
    if isinstance(source, ShardedIndex):
        raise BundleError(f"{source!r} is in shards already; {WHOLE}")
    source = check_path("source", source, error=BundleError)
    if is_sharded(source):
        raise BundleError(f"{source} is in shards already; {WHOLE}")
    kinds = manifest_kinds(Path(source)) if Path(source).is_dir() else set()
    if "bundle" not in kinds:
        return load_task(source), None
    index = load(source, mmap=True, watch=False)
    if not isinstance(index, Index):
        raise BundleError(f"{source} routes a FAISS index of your own, which has the keys: shard a task")
    return None, index


def _fingerprint(index: Index | None) -> str:
    """Of the live keys of a bundle, their ids and its log: what was changed makes other shards."""
    assert index is not None
    keys, labels = _live(index)
    log = plain_index(index.snapshot).origin.log
    digest = hashlib.sha256()
    for part in chain((block for _, block in keys.blocks()), [] if log is None else [log.train, log.val]):
        digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels).view(np.uint8).data)
    return digest.hexdigest()


def _task_of(index: Index, place: Path, seed: int, progress: bool) -> tuple[Task, NDArray[Any] | None]:
    """The live keys of a bundle, labelled with the log that it keeps, and their ids."""
    log = plain_index(index.snapshot).origin.log
    if log is None:
        raise BundleError("the bundle keeps no log to learn shards from: shard a task, or fit with keep_log")
    keys, labels = _live(index)
    queries = np.concatenate([log.train, log.val]).astype(np.float32)
    return label(keys, unit_rows(queries)[0], out=place, seed=seed, progress=progress), labels


def _live(index: Index) -> tuple[Vectors, NDArray[Any] | None]:
    """The keys of a bundle that were not removed, read as they are wanted; their ids, if not 0..n-1."""
    snapshot = index.snapshot
    plain = plain_index(snapshot)
    if not isinstance(plain, GraphSearcher) and not isinstance(plain.store, OwnCells):
        raise BundleError(f"{index!r} leaves its keys with another library: shard a task")
    alive, labels = plain.alive, plain.labels
    if alive is None:
        return Vectors(
            "keys", plain.n, plain.d, lambda low, high: keys_at(snapshot, np.arange(low, high))
        ), labels
    kept = live_numbers(snapshot)
    labels = kept if labels is None else labels[kept]
    return Vectors("keys", len(kept), plain.d, lambda low, high: keys_at(snapshot, kept[low:high])), labels
