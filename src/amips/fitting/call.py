"""The shortest way in: keys and queries to a bundle, in one call."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from amips.arguments import check_choice, check_flag, check_number, check_recall, check_seed, check_whole
from amips.cluster import check_address, connected
from amips.design import GraphStorage, Storage, Structure, checked_fraction
from amips.errors import AmipsError, VectorError
from amips.exact import check_device
from amips.extras import needs_extra
from amips.files import remove_partials
from amips.fitting.candidates import IndexSizeError
from amips.fitting.clock import Clock
from amips.fitting.fitting import Fitting
from amips.fitting.settings import FIT_MINUTES, Order, Settings
from amips.index import check_enough_keys
from amips.locks import locked
from amips.metrics import TARGET_RECALL
from amips.resources import plain_resource_errors
from amips.scratch import Scratch
from amips.search import (
    KEEP_LOG,
    Attributes,
    Index,
    Objective,
    Opened,
    check_bundle_place,
    check_labels,
    checked_keep_log,
    read_table,
    save,
    with_facts,
)
from amips.vectors import inspect, open_vectors

LOCK = ".lock"


@plain_resource_errors()
def fit(
    keys: Any,
    queries: Any,
    *,
    out: str | Path | None = None,
    minutes: float = FIT_MINUTES,
    cells: int | None = None,
    recall: float = TARGET_RECALL,
    objective: Objective = "flops",
    storage: Storage | None = None,
    spill_fraction: float | None = None,
    structure: Structure | None = None,
    order: Order | None = None,
    ids: Any = None,
    attributes: Any = None,
    seed: int = 0,
    device: str | None = None,
    ray: str | None = None,
    keep_log: int | bool = KEEP_LOG,
    memory: int | None = None,
    quiet: bool = False,
) -> Index:
    """From keys and queries to an index that is cheaper to search than plain IVF, in about the minutes given.

    Labels the queries; searches over designs (numbers of cells, plain and query-aware; the router trained or
    not; second cells; float32 or lean storage; and, from some thousand keys on, a graph) by their cost on
    held-out queries; builds the best and keeps the cheapest. What was gained over plain IVF is measured on
    other queries, printed, and kept as `index.report`. If nothing was, the index is plain IVF.
    `index.search(x)` then serves the recall asked for here.

    Work in progress is kept in `OUT.work`, reused when the same call is made again and removed at its end;
    what a call left there that is not made again may be deleted.

    Args:
        keys, queries: arrays or files, see `amips.vectors.open_vectors`.
        out: the bundle directory; None keeps the index in memory.
        minutes: how long it may take. With little time, part of the queries is used, and fewer designs are
            tried.
        cells: how many cells; several numbers are tried when not given.
        recall: the recall@10 at which cost is to be least.
        objective: what decides between the best designs: "flops", or the measured time of a query alone
            ("latency") or among many ("throughput").
        storage: "flat", "sq8", "pq" or "lean"; the cheaper of "flat" and "lean" when not given.
        spill_fraction: of the keys, that are put into a second cell, too; what pays when not given, 0 for
            none.
        structure: "cells" or "graph"; the cheaper of both when not given. `cells`, `spill_fraction` and
            storage "pq" are of cells only.
        order: "time" if the queries are a log in the order of time: what comes again then counts as often as
            it comes, the last part of the log is held out, and a memory of the log is put in front of the
            index where that makes it cheaper. Otherwise queries that are equal count once.
        ids: what to return for each key instead of 0..n-1.
        attributes: of the keys, for `search(..., where=)`: an Arrow table, a data frame, or a Parquet or
            Arrow file, one row a key.
        device: where queries are labelled and routers trained, "cuda" for example; by default the former
            is done by numpy, on the CPU, and the latter as `train` does it.
        ray: a Ray cluster that labels the queries, partitions the keys and, where its nodes see `OUT.work`,
            trains the routers: "auto", HOST:PORT or "local". As many more queries are labelled in the time
            as it has processors.
        keep_log: training queries to keep in the bundle, at most, and a fifth of that held out: what
            `drift` compares traffic with, and `refit` mixes in. False for none.
        memory: bytes that it may take beside its inputs: for exact search, for making cells, and for the
            index, of which codes are held then, and float32 keys stay in their file (`load(mmap=True)`).
            Pages of files, which the system takes back when it needs them, do not count. None: no bound,
            but a graph is tried only where the machine has room for it.
        quiet: print nothing.
    """
    clock = Clock(60 * check_number("minutes", minutes, above=0))
    settings = Settings(
        check_number("minutes", minutes, above=0),
        None if cells is None else check_whole("cells", cells, 2),  # a router needs cells to choose from
        check_recall(recall),
        check_choice("objective", objective, Objective),
        None if storage is None else check_choice("storage", storage, Storage),
        None if spill_fraction is None else checked_fraction(spill_fraction),
        None if structure is None else check_choice("structure", structure, Structure),
        None if order is None else check_choice("order", order, Order),
        check_seed(seed),
        checked_keep_log(keep_log),
        None if memory is None else check_whole("memory", memory, 1),
    )
    settings = _with_structure(settings)
    quiet = check_flag("quiet", quiet)
    if out is not None:
        check_bundle_place(out)  # before the work, not after it
    with needs_extra("amips.fit", "train", "torch"):
        import amips.learn  # noqa: F401
    if device is not None:
        check_device(device)
    if check_address(ray) is not None and device is not None:
        raise AmipsError("device and ray: workers of a Ray cluster multiply on their CPUs; give one of both")
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    if settings.cells is not None and settings.cells > keys.n:
        raise VectorError(f"cells={cells}: the number of cells must be between 2 and the {keys.n} keys")
    check_enough_keys(str(storage), keys.n)
    facts = {
        "labels": None if ids is None else check_labels(ids, keys.n),
        "attributes": None if attributes is None else Attributes.of(read_table(attributes, keys.n)),
    }
    call = {"keys": inspect(keys).fingerprint, "queries": inspect(queries).fingerprint, **asdict(settings)}
    # A folder for each call: the same call continues, another does not destroy what was done for it.
    name = hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()[:12]
    if out is None:
        scratch = Scratch("amips-fit-")
        fitting = Fitting(scratch.path / name, settings, quiet, device, ray, clock)
        try:
            with connected(ray):  # once, for all steps
                return Index(with_facts(fitting.run(keys, queries), **facts))
        finally:
            scratch.remove()
    out = Path(out).resolve()
    with connected(ray), _alone(out) as work:
        fitting = Fitting(work / name, settings, quiet, device, ray, clock)
        try:
            index = with_facts(fitting.run(keys, queries), **facts)
        except IndexSizeError:
            fitting.remove()
            raise
        save(index, out)
        fitting.remove()
        fitting.say(f"saved {out}")
    return Index(index, Opened.at(out))


def _with_structure(settings: Settings) -> Settings:
    """The settings, with the structure that other options imply; AmipsError if one is of the other."""
    of_cells = {"cells": settings.cells, "spill_fraction": settings.spill_fraction}
    names = [name for name, value in of_cells.items() if value is not None]
    if settings.storage is not None and settings.storage not in get_args(GraphStorage):
        names.append("storage")
    if not names:
        return settings
    if settings.structure == "graph":
        value = getattr(settings, names[0])
        raise AmipsError(f"{names[0]}={value}: a graph cannot have that; leave it out, or take cells")
    return replace(settings, structure="cells")


@contextmanager
def _alone(out: Path) -> Iterator[Path]:
    """The folder of work in progress for a bundle, kept from other calls; gone afterwards if it is empty."""
    work = out.with_name(out.name + ".work")
    busy = AmipsError(f"another amips fit is at work on {out}; wait for it, or choose another out")
    try:
        with locked(work / LOCK, busy, remove=True, make=True):
            remove_partials(work)
            yield work
    finally:
        with suppress(OSError):  # it has the work of another call
            work.rmdir()
