"""What kind of data this is, and how models were trained on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amips import exact
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.errors import ResultsError
from amips.metrics import SCAN, TARGET_RECALL, TOP
from amips.nets import is_unfinished_run, load_model, read_run_config, read_run_log
from amips.task import Task
from amips.vectors import row_norms

SCANNED = f"keys scanned for recall@{TOP} {TARGET_RECALL}"
# Metric, file, title, axis, what to make of it.
CURVES = [
    (
        SCAN,
        "training-scan",
        "Training: keys to scan",
        f"{SCANNED} (share)",
        "Lower is better; what training chooses by.",
    ),
    ("routing@1", "training-routing", "Training: routing accuracy", "routing accuracy in the first cell", ""),
    (
        "routing@8",
        "training-routing-8",
        "Training: routing in eight cells",
        "routing accuracy in 8 cells",
        "",
    ),
    (
        "erel",
        "training-erel",
        "Training: transport error",
        "erel (relative transport error)",
        "Lower is better.",
    ),
]


def facts(task: Task) -> list[tuple[str, str]]:
    """What kind of data this is."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(task.n, min(task.n, 4096), replace=False))
    keys, queries = np.asarray(task.keys[rows]), np.asarray(task.test.queries)
    norms = row_norms(keys)
    apart = float(np.linalg.norm(keys.mean(axis=0) - queries.mean(axis=0)))
    spread = float(np.sqrt(np.square(keys - keys.mean(axis=0)).sum(axis=1).mean()))
    top = np.asarray(task.test.top_scores[:, 0])
    known = [
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
        known.append(("score of a key's nearest other key", f"mean {others.mean():.3f}"))
    return known


def top_scores(task: Task) -> list[Chart]:
    """The histogram of <x, y*(x)> on the test queries."""
    top = np.asarray(task.test.top_scores[:, 0], np.float64)
    counts, edges = np.histogram(top, bins=min(40, max(5, len(top) // 20)))
    middles = (edges[1:] + edges[:-1]) / 2
    bars = Series("test queries", middles.tolist(), counts.astype(float).tolist(), kind="bars")
    marks = [("mean", float(top.mean())), ("median", float(np.median(top)))]
    panel = Panel("", "score of the top key", "queries", [bars], marks=marks)
    return [Chart("top-scores", "How near the top key is", [panel])]


def training_curves(runs: Mapping[str, str]) -> list[Chart]:
    """Metrics on val during the training of runs (labels by directory), with centroid routing as a line."""
    logs = {label: read_run_log(directory, ResultsError) for directory, label in runs.items()}
    charts = []
    for metric, name, title, axis, caption in CURVES:
        series = [line for label, log in logs.items() if (line := _curve(label, log, metric)) is not None]
        if series:
            panel = Panel("", "training samples", f"{axis} on val", [*series, *_centroid_lines(logs, metric)])
            charts.append(Chart(name, title, [panel], caption))
    return charts


def _curve(label: str, log: list[dict[str, Any]], metric: str) -> Series | None:
    points = [(float(e["samples"]), float(e["val"][metric])) for e in log if metric in e.get("val", {})]
    return Series(label, [x for x, _ in points], [y for _, y in points]) if points else None


def _centroid_lines(logs: Mapping[str, list[dict[str, Any]]], metric: str) -> list[Series]:
    """One line where all runs have the same cells, otherwise one for each run."""
    lines = {}
    for label, log in logs.items():
        entries = [e for e in log if metric in e.get("centroid", {})]
        if entries:
            lines[label] = (entries[0]["centroid"][metric], float(entries[-1]["samples"]))
    if not lines:
        return []
    if len({value for value, _ in lines.values()}) == 1:
        value, _ = next(iter(lines.values()))
        lines = {"": (value, max(last for _, last in lines.values()))}
    return [
        Series(
            f"centroid routing{f', {label}' if label else ''}", [0.0, last], [value, value], group="reference"
        )
        for label, (value, last) in lines.items()
    ]


def training_summary(run: str | Path) -> Summary:
    """How a run went: its best figures on val beside those of its beginning and of centroids, and curves."""
    run = Path(run)
    config, log = read_run_config(run, ResultsError), read_run_log(run, ResultsError)
    if not log:
        raise ResultsError(f"{run} holds no evaluations yet")
    metric = SCAN if SCAN in log[0]["val"] else "erel"
    log = [entry for entry in log if metric in entry["val"]]
    network, recipe = config.get("network"), config.get("recipe")
    if not log or not isinstance(network, dict) or not isinstance(recipe, dict):
        raise ResultsError(
            f"{run} is damaged: its log has no {metric}, or its settings no network and recipe"
        )
    best = min(log, key=lambda entry: float(entry["val"][metric]))
    columns = {
        "centroid routing": log[-1].get("centroid", {}),
        "untrained": log[0]["val"],
        "trained": best["val"],
    }
    finished = not is_unfinished_run(run)
    if finished:
        columns["trained"] = load_model(run, ResultsError).about.get("val", best["val"])
    columns = {name: values for name, values in columns.items() if values}
    figures = ", ".join(
        f"{name} {_shown(metric, values)}" for name, values in columns.items() if metric in values
    )
    what = SCANNED if metric == SCAN else "erel (relative transport error)"
    verdict = [f"{what}, on val: {figures}"]
    if best["step"] == 0 and len(log) > 1:
        verdict.append("training did not improve on the start")
    if not finished:
        verdict.append("this run is not finished; continue it with amips train ... --resume")
    rows = [[name, *(_shown(name, values) for values in columns.values())] for name in best["val"]]
    settings = {**network, **recipe}
    return Summary(
        "training",
        f"Training of a {network.get('kind')} network",
        verdict,
        tables=[Table("On the val queries", ["metric", *columns], rows)],
        charts=training_curves({str(run): "this run"}),
        facts=[(name, f"{value}") for name, value in settings.items()],
        command=f"amips report {run.name}",
        values={"metric": metric, **{name: values.get(metric) for name, values in columns.items()}},
    )


def _shown(metric: str, values: Mapping[str, float]) -> str:
    if metric not in values:
        return ""
    return f"{100 * values[metric]:.1f} %" if metric == SCAN else f"{values[metric]:.4f}"
