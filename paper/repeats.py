"""When a memory of the log pays: traffic that comes again, split by time.

A log is made of the queries of the data. With probability `share` a row asks a popular query again, drawn by
a Zipf law, with noise as in the paper; every other row asks something new. The last rows are held out. So
the share of held-out traffic that has a near relative in the past is known, and goes from 0 to 1.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import Design, KeyNet, SupportNet, label
from amips.bench import Summary, cells_of
from amips.builder import Builder, graph_searcher, memory_of
from amips.cells import default_count
from amips.errors import ResultsError
from amips.files import read_json, write_json
from amips.metrics import TOP, cost_at
from amips.nets import Model
from amips.search import (
    DROP_IN_CANDIDATES,
    GraphSearcher,
    Memory,
    MemorySearcher,
    Point,
    Searcher,
    Snapshot,
    calibrated,
    margin_ladder,
    mass_bounds,
    measure,
    measure_margins,
    measure_masses,
    measure_memory,
    recalls,
    surest_point,
)
from amips.task import Split, Task
from amips.vectors import Floats, Vectors, unit_rows
from paper.repeats_fit import fitted, minutes_of
from paper.repeats_summary import summarize
from paper.repeats_ways import (
    ALONE,
    CELLS,
    DEPTH,
    DROP_IN,
    GRAPH,
    IVF,
    LEARNED,
    MEMORY,
    NOISE,
    RECALL,
    ROUTED,
    SUPPORT,
    TARGETS,
    times_in_turns,
)
from paper.routing import SCORED_128, network_recipe
from paper.search_runs import none_if_nan
from paper.workspace import Workspace

SHARES = (0.5, 1.0, 0.0, 0.25, 0.75)  # the one that matters most first
ENOUGH = 0.985  # recall@10 beyond which nothing is measured
PROBES = (1, 2, 4, 8, 16, 32, 64, 128)
SUPPORTED = 128  # cells that the SupportNet chooses from, as in the paper,
PORTION = 3.0  # ... and its samples, of the scale's
POPULAR = 8  # one of so many queries of the data is popular, where the scale does not say how many


def make_log(
    queries: Vectors, share: float, rows: int, popular: int, seed: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """A log in the order of time [rows, d], at norm 1, and which rows ask a popular query [rows].

    The first so many rows that ask one ask each of them once, the others by a Zipf law: 1 / rank. What is
    new in the last rows of any log is in no log of share `LEARNED` before its last rows.
    """
    rng = np.random.default_rng([seed, 11])
    order, chance = rng.permutation(queries.n), rng.random(rows)
    again = chance < share
    source = np.empty(rows, np.int64)
    ranks = 1 / np.arange(1, popular + 1)
    asked = rng.choice(popular, rows, p=ranks / ranks.sum())[: int(again.sum())]
    asked[:popular] = rng.permutation(popular)[: len(asked)]
    source[again] = order[asked]
    fresh = order[popular:] if again.any() else order
    fresh = fresh if share <= LEARNED else fresh[::-1]
    source[~again] = fresh[: rows - int(again.sum())]
    log = unit_rows(queries.take(source))[0]
    eps = np.random.default_rng([seed, 12]).standard_normal(log.shape, np.float32)
    log[again] = unit_rows(log[again] + NOISE * eps[again])[0]
    return log, again


def popular_queries(workspace: Workspace) -> int:
    """How many queries are asked again and again."""
    return workspace.scale.sources or workspace.queries.n // POPULAR


def held_out_rows(workspace: Workspace) -> int:
    """Rows of a log that are held out to choose by, and as many to report on."""
    return min(workspace.scale.held_out, workspace.queries.n // 8)


def repeats_log(workspace: Workspace, share: float) -> tuple[Floats, NDArray[np.bool_]]:
    """The log of a share, and which of its rows ask a popular query."""
    queries = workspace.queries
    return make_log(queries, share, queries.n, popular_queries(workspace), workspace.seed)


def repeats_task(workspace: Workspace, share: float, cells: int = 1) -> tuple[Task, NDArray[np.bool_]]:
    """The log of a share as a task split by time, and which of its rows ask a popular query.

    Args:
        cells: plain cells of the task, with targets for each where there are several.
    """
    held_out = held_out_rows(workspace)
    log, again = repeats_log(workspace, share)
    name = f"task-repeats-{round(100 * share)}" + (f"-{cells}" if cells > 1 else "")
    task = label(
        workspace.keys,
        log,
        out=workspace.work / name,
        cells=cells,
        query_aware=0.0,
        cell_targets=cells > 1,
        split="time",
        val=held_out,
        test=held_out,
        k=DEPTH,
        seed=workspace.seed,
        progress=workspace.progress,
    )
    return task, again


def remembering_network(workspace: Workspace, task: Task) -> Model:
    """A KeyNet of traffic that all comes again: the best case for one."""
    return workspace.model(task, KeyNet(workspace.scale.sizes[0]), "repeats")


def supported_cells(workspace: Workspace) -> Searcher:
    """Plain cells with a SupportNet that chooses among them, of traffic that all comes again."""
    task = repeats_task(workspace, 1.0, min(SUPPORTED, workspace.keys.n // 4))[0]
    recipe = network_recipe(workspace, task.d, SCORED_128)
    spec = SupportNet(workspace.scale.sizes[0])
    net = workspace.model(task, spec, "repeats-support", recipe, PORTION, evaluations=1)
    return Builder(task, workspace.work / "designs-support").searcher(cells_of(task), net)


def run(workspace: Workspace) -> Summary:
    """Measure every way at every share of traffic that comes again."""
    tasks = {share: repeats_task(workspace, share) for share in SHARES}
    first = tasks[LEARNED][0]
    minutes, designs = workspace.scale.router_minutes, workspace.work / f"designs-{round(100 * LEARNED)}"
    builder = Builder(first, designs, minutes=minutes, progress=workspace.progress)
    counts = sorted({max(2, default_count(first.n, factor)) for factor in (1.0, 4.0)})
    plain = [builder.searcher(Design.plain(count)) for count in counts]
    graph = graph_searcher(builder, builder.resolved(Design.graph()))
    cells = builder.searcher(builder.resolved(Design(counts[-1])))
    net = remembering_network(workspace, tasks[1.0][0])
    supported = supported_cells(workspace)
    by_share = {}
    for share, (task, again) in tasks.items():
        place = workspace.work / f"repeats-{round(100 * share)}.json"
        if not place.exists():
            write_json(place, measured(task, again, plain, graph, cells, net, supported))
        by_share[share] = read_json(place, ResultsError)
        place = workspace.work / f"repeats-fit-{round(100 * share)}.json"
        if not place.exists():
            log = repeats_log(workspace, share)[0][: -held_out_rows(workspace)]
            write_json(place, fitted(workspace, log, task))
        by_share[share]["fit"] = read_json(place, ResultsError)
    values = {f"{share:g}": by_share[share] for share in sorted(by_share)}
    full = 2 * first.n * first.d
    about = {
        "samples": int(net.about["samples"]),
        "size": workspace.scale.sizes[0],
        "fit_minutes": minutes_of(workspace),
        "network_flops": plain[0].with_model(net).router.network_flops / full,
        "support": {
            "cells": supported.c,
            "samples": int(supported.model.about["samples"]),
            "network_flops": supported.router.network_flops / full,
            "samples_a_second": supported.model.about["samples"] / supported.model.about["seconds"],
            "samples_a_second_of_keynet": net.about["samples"] / net.about["seconds"],
        },
    }
    return summarize(workspace, first, values, {**about, "popular": popular_queries(workspace)})


def measured(
    task: Task,
    again: NDArray[np.bool_],
    plain: list[Searcher],
    graph: GraphSearcher,
    cells: Searcher,
    net: Model,
    supported: Searcher,
) -> dict[str, Any]:
    """Costs at recalls on the test queries of one log, by way; and of the memory, what it recognises."""
    graph = replace(graph, points=_swept(graph, task.val), target_recall=RECALL)
    cells = replace(cells, points=_swept(cells, task.val), target_recall=RECALL)
    remembering = Builder(task).with_memory(graph, DEPTH)
    walked = [_pair(p) for p in _swept(graph, task.test)]
    remembered = measure_memory(remembering, task.test) if isinstance(remembering, MemorySearcher) else []
    memory = memory_of(Builder(task), DEPTH).with_gate(-1.0)  # recognises every query
    first = replace(surest_point(graph.points, TOP), recognised=1.0)
    alone = MemorySearcher(graph, memory, [first])
    points: dict[str, list[tuple[float, float]]] = {
        ALONE: [_remembered(memory, task)],
        IVF: [_pair(p) for index in plain for p in measure(index, task.test)],
        ROUTED: [_pair(p) for index in plain for p in measure(index.with_model(net), task.test)],
        DROP_IN: [pair for index in plain for pair in _dropped_in(index.with_model(net), task)],
        SUPPORT: [_pair(p) for p in measure(supported, task.test)],
        CELLS: [_pair(p) for p in _swept(cells, task.test)],
        GRAPH: walked,
        MEMORY: [*walked, *(_pair(p) for p in remembered)],
    }
    indexes: dict[str, Snapshot] = {
        IVF: calibrated(plain[-1], task.val, RECALL),
        ROUTED: calibrated(plain[-1].with_model(net), task.val, RECALL),
        SUPPORT: calibrated(supported, task.val, RECALL),
        CELLS: cells,
        GRAPH: graph,
        MEMORY: remembering,
        ALONE: alone,
    }
    full = 2 * task.n * task.d
    costs = {
        name: {f"{target:g}": none_if_nan(_cost(pairs, target) / full) for target in TARGETS}
        for name, pairs in points.items()
    }
    known = np.asarray(again[-len(task.test) :])
    values: dict[str, Any] = {
        "costs": costs,
        "again": float(known.mean()),
        "times": times_in_turns(indexes, np.asarray(task.test.queries)),
    }
    if isinstance(remembering, MemorySearcher):
        x = np.asarray(task.test.queries)
        recognised, candidates = remembering.memory.recognise(x)
        hits = np.asarray(task.test.top_ids)[recognised, :TOP, None] == candidates[:, None, :]
        values["memory"] = {
            "gate": remembering.memory.gate,
            "logged": len(remembering.memory.logged),
            "looking": float(remembering.memory.flops(x).mean() / full),
            "again_recognised": float(recognised[known].mean()) if known.any() else 0.0,
            "new_recognised": float(recognised[~known].mean()) if not known.all() else 0.0,
            "recall": float(hits.any(axis=2).mean()),
        }
        ids = remembering.search(x, TOP, recall=RECALL)[1]
        values["served"] = float(recalls(ids, np.asarray(task.test.top_ids), TOP).mean())
    return values


def _swept(index: Searcher | GraphSearcher, split: Split) -> list[Point]:
    """Points of rising effort on a split, up to a recall beyond those that are compared."""
    points: list[Point] = []
    for effort in margin_ladder(index) if isinstance(index, GraphSearcher) else mass_bounds():
        if isinstance(index, GraphSearcher):
            points += measure_margins(index, split, [effort])
        else:
            points += measure_masses(index, split, [effort])
        if points[-1].recall10 >= ENOUGH:
            break
    return points


def _remembered(memory: Memory, task: Task) -> tuple[float, float]:
    """Recall@10 and FLOPs of the memory alone: what the nearest logged query found, however near that is."""
    x = np.asarray(task.test.queries)
    candidates = memory.recognise(x)[1]
    hits = np.asarray(task.test.top_ids)[:, :TOP, None] == candidates[:, None, :]
    return float(hits.any(axis=2).mean()), float(memory.flops(x).mean() + 2 * task.d * memory.depth)


def _pair(point: Point) -> tuple[float, float]:
    return point.recall10, point.flops


def _dropped_in(index: Searcher, task: Task) -> list[tuple[float, float]]:
    """Recall@10 and FLOPs of the predicted key in the place of x, with a final scoring by x."""
    x, top = np.asarray(task.test.queries), np.asarray(task.test.top_ids)
    pairs = []
    for probes in (p for p in PROBES if p <= index.c):
        ids = index.search(x, TOP, probes=probes, drop_in=True)[1]
        cost = index.cost(x, TOP, probes=probes)
        scored = 2 * index.d * np.minimum(cost.scanned, TOP * DROP_IN_CANDIDATES)
        pairs.append((float(recalls(ids, top, TOP).mean()), float((cost.flops + scored).mean())))
    return pairs


def _cost(pairs: list[tuple[float, float]], target: float) -> float:
    recall, cost = np.array(pairs).T
    return cost_at(cost, recall, target)
