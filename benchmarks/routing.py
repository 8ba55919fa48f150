"""Recall against keys scanned, FLOPs and time for four ways to route the same cells, on held-out queries.

DATA is a directory with keys and queries as .npy: `keys.npy` and `queries.npy`, or `keys.i8.npy` and
`queries.i8.npy` with rows to be normalised. Everything is chosen before the test queries are looked at;
every system scans the same FAISS lists, in turns, on one thread.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from machine import write
from numpy.typing import NDArray

import amips
from amips.search import recalls

Floats = NDArray[np.float32]
TARGETS = (("recall@1", 0.90), ("recall@1", 0.95), ("recall@10", 0.90), ("recall@10", 0.95))


def read(data: Path, name: str) -> Floats:
    """Unit-norm float32 rows."""
    plain = data / f"{name}.npy"
    rows = np.load(plain if plain.exists() else data / f"{name}.i8.npy").astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def the_split(m: int, train: int) -> NDArray[np.str_]:
    """2,000 test, 2,000 val, then train: a fixed permutation, so that figures can be compared."""
    order = np.random.default_rng(1).permutation(m)
    split = np.full(m, "", "<U5")
    split[order[:2000]], split[order[2000:4000]], split[order[4000 : 4000 + train]] = "test", "val", "train"
    return split


def measure(
    systems: dict[str, amips.Searcher], split: amips.task.Split, rounds: int
) -> list[dict[str, object]]:
    """One row for each system and number of probes; times are taken in turns."""
    x, true = np.asarray(split.queries), np.asarray(split.top_ids)
    few, many = x[:200], x[:1024]
    cells = next(iter(systems.values())).c
    ladder = [p for p in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if p <= cells // 4]
    rows = []
    for probes in ladder:
        single: dict[str, list[float]] = {name: [] for name in systems}
        batch: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(rounds):
            for name, index in systems.items():
                started = time.perf_counter()
                for query in few:
                    index.search(query, 10, probes)
                single[name].append((time.perf_counter() - started) / len(few))
                started = time.perf_counter()
                index.search(many, 10, probes)
                batch[name].append((time.perf_counter() - started) / len(many))
        for name, index in systems.items():
            ids, cost = index.search(x, 10, probes)[1], index.cost(x, probes)
            rows.append(
                {
                    "system": name,
                    "probes": probes,
                    "recall@1": float((ids[:, 0] == true[:, 0]).mean()),
                    "recall@10": float(recalls(ids, true, 10).mean()),
                    "scanned": float(cost.scanned.mean() / index.n),
                    "flops": float(cost.flops.mean()),
                    "batch 1": statistics.median(single[name]),
                    "batch 1024": statistics.median(batch[name]),
                }
            )
    return rows


def at(rows: list[dict[str, object]], system: str, metric: str, recall: float, cost: str) -> float | None:
    """The cost at which a system reaches a recall, between its two nearest points."""
    points = [(float(r[metric]), float(r[cost])) for r in rows if r["system"] == system]  # type: ignore[arg-type]
    for (r0, c0), (r1, c1) in zip([(0.0, 0.0), *points], points, strict=False):
        if r1 >= recall:
            return c0 + (recall - r0) / (r1 - r0) * (c1 - c0) if r0 > 0 else c1
    return None


def main() -> None:
    """Label, train, build, measure, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="Tasks and runs are kept here and reused.")
    parser.add_argument("--cells", default="316,1024")
    parser.add_argument("--train", type=int, default=60_000, help="Training queries.")
    parser.add_argument("--minutes", type=float, default=2.0, help="Training time of each network.")
    parser.add_argument("--rounds", type=int, default=3)
    o = parser.parse_args()
    keys, queries = read(o.data, "keys"), read(o.data, "queries")
    options = {"split": the_split(len(queries), o.train), "copies": 0, "k": 10}
    mapping = amips.label(keys, queries, out=o.work / "task-1", **options)
    keynet = amips.train(mapping, amips.KeyNet(), minutes=o.minutes, out=o.work / "keynet", evaluations=1)
    table, raw = [], []
    for c in map(int, o.cells.split(",")):
        task = amips.label(keys, queries, cells=c, out=o.work / f"task-{c}", **options)
        linear = amips.train(
            task,
            amips.Linear(),
            recipe=amips.Recipe(route_top=10),
            minutes=o.minutes / 2,
            out=o.work / f"linear-{c}",
            evaluations=1,
        )
        support = amips.train(
            task, amips.SupportNet(), minutes=o.minutes, out=o.work / f"support-{c}", evaluations=1
        )
        index = amips.build(task, None)
        models = {"centroid": None, "linear": linear, "SupportNet XS": support, "KeyNet XS, mapper": keynet}
        systems = {name: index.with_model(model) for name, model in models.items()}
        with amips.blas.threads(1):
            rows = measure(systems, task.test, o.rounds)
        raw += [{"cells": c, **row} for row in rows]
        for metric, recall in TARGETS:
            for name, system in systems.items():
                costs = [
                    at(rows, name, metric, recall, cost)
                    for cost in ("scanned", "flops", "batch 1", "batch 1024")
                ]
                full = 2 * system.n * system.d
                cells = ["not reached"] * 4
                if None not in costs:
                    scanned, flops, one, many = costs
                    cells = [f"{scanned:.2%}", f"{flops / full:.2%}", f"{one * 1e6:.0f}", f"{many * 1e6:.0f}"]
                table.append([f"{c}", f"{metric} {recall:.2f}", name, *cells])
    head = [
        "cells",
        "recall",
        "routed by",
        "keys scanned",
        "FLOPs, share of a full scan",
        "us, batch 1",
        "us, batch 1024",
    ]
    counts = f"{len(keys):,} keys, {o.train:,} training queries, {len(mapping.test):,} test queries"
    title = f"Routing: {counts}, 1 thread"
    options_given = f"--cells {o.cells} --train {o.train} --minutes {o.minutes}"
    command = f"python benchmarks/routing.py DATA --work WORK {options_given}"
    write("routing", title, command, head, table, raw)


if __name__ == "__main__":
    main()
