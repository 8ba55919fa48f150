"""What kind of data this is, and how models were trained on it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from amips import exact
from amips.bench.summary import Chart, Panel, Series
from amips.task import Task
from amips.vectors import row_norms


def facts(task: Task) -> list[tuple[str, str]]:
    """What kind of data this is."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(task.n, min(task.n, 4096), replace=False))
    keys, queries = np.asarray(task.keys[rows]), np.asarray(task.test.queries)
    norms = row_norms(keys)
    apart = float(np.linalg.norm(keys.mean(axis=0) - queries.mean(axis=0)))
    spread = float(np.sqrt(np.square(keys - keys.mean(axis=0)).sum(axis=1).mean()))
    top = np.asarray(task.test.top_scores[:, 0])
    found = [
        ("keys", f"{task.n:,}"),
        ("dimension", f"{task.d}"),
        ("queries", ", ".join(f"{len(getattr(task, s)):,} {s}" for s in ("train", "val", "test"))),
        ("duplicate queries left out", f"{task.facts['duplicate_queries']:,}"),
        ("norms of keys (a sample)", f"{norms.min():.3f} to {norms.max():.3f}, mean {norms.mean():.3f}"),
        ("score of the top key", f"mean {top.mean():.3f}, median {np.median(top):.3f}"),
        ("means of queries and keys apart", f"{apart / max(spread, 1e-30):.2f} of the keys' spread"),
    ]
    if task.n > 1:
        scores, ids = exact.top_k(task.key_vectors, keys[:512], 2)
        others = np.where(ids[:, 0] == rows[:512], scores[:, 1], scores[:, 0])
        found.append(("score of a key's nearest other key", f"mean {others.mean():.3f}"))
    return found


def top_scores(task: Task) -> list[Chart]:
    """The histogram of <x, y*(x)> on the test queries."""
    top = np.asarray(task.test.top_scores[:, 0], np.float64)
    counts, edges = np.histogram(top, bins=min(40, max(5, len(top) // 20)))
    middles = (edges[1:] + edges[:-1]) / 2
    bars = Series("test queries", middles.tolist(), counts.astype(float).tolist(), kind="bars")
    marks = [("mean", float(top.mean())), ("median", float(np.median(top)))]
    panel = Panel("", "score of the top key", "queries", [bars], marks=marks)
    return [Chart("top-scores", "How near the top key is", [panel])]


def read_log(run: str | Path) -> list[dict[str, Any]]:
    """What a run logged: one entry for each evaluation; nothing where there is no log."""
    path = Path(run) / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


def training_curves(runs: dict[str, str]) -> list[Chart]:
    """Transport error and routing accuracy on val during the training of runs, by directory and label."""
    erel: list[Series] = []
    routing: list[Series] = []
    for directory, label in runs.items():
        lines = read_log(directory)
        for series, key in ((erel, "erel"), (routing, "routing@1")):
            points = [(float(e["samples"]), float(e["val"][key])) for e in lines if key in e.get("val", {})]
            if points:
                xs, ys = zip(*points, strict=True)
                series.append(Series(label, list(xs), list(ys)))
    charts = []
    if erel:
        panel = Panel("", "training samples", "erel (relative transport error) on val", erel)
        charts.append(Chart("training-erel", "Training: transport error", [panel], "Lower is better."))
    if routing:
        panel = Panel("", "training samples", "routing accuracy in the first cell on val", routing)
        charts.append(Chart("training-routing", "Training: routing accuracy", [panel]))
    return charts
