"""Searching with the predicted key on leaky and on held-out rows: is a lead over x learned, or remembered?"""

from pathlib import Path
from typing import Any

from amips.bench import Chart, Family, Metric, Panel, Series, Table
from amips.task import Task
from paper.ivf import index_ways
from paper.search_runs import CLEARLY, Query, Way, front_of, lead, none_if_nan, recall_at, search_all, shown
from paper.workspace import Workspace

WAYS: dict[Query, str] = {
    "original": "x",
    "mapped": "mapped (drop-in)",
    "routed": "routed by the prediction",
}
SEARCHED: tuple[Metric, ...] = ("recall@1", "recall@0.1%")
LEVELS = (0.5, 0.7, 0.9)  # recalls of x whose costs recalls are compared at
KINDS = {"leaky": "leaky rows", "held_out": "held-out rows"}


def searched(workspace: Workspace, task: Task, size: str, run: Path) -> dict[str, Any]:
    """Leads over x and fronts, for both kinds of rows: `val` of the task is leaky, `test` is held out."""
    measured = search_all(workspace, task, "leak", index_ways(task.n, {size: str(run)}), None, times=False)
    by_kind = {"leaky": measured.val, "held_out": measured.test}
    return {
        metric: {kind: _figures(families, metric) for kind, families in by_kind.items()}
        for metric in SEARCHED
    }


def _figures(ways: dict[Way, Family], metric: Metric) -> dict[str, Any]:
    families = {way.query: family for way, family in ways.items()}
    base = families["original"]
    at = {}
    for level in LEVELS:
        cost = base.cost_at("flops", metric, level)
        at[f"{level}"] = {
            name: none_if_nan(recall_at(family, "flops", metric, cost)) for name, family in families.items()
        }
    return {
        "front": {
            name: [side.tolist() for side in front_of(family, "flops", metric)]
            for name, family in families.items()
        },
        "lead": {
            name: none_if_nan(lead(base, family, "flops", metric))
            for name, family in families.items()
            if family is not base
        },
        "at": at,
    }


def search_table(values: dict[str, Any]) -> Table:
    """Recalls at the costs at which x has round ones, and the largest lead."""
    rows = []
    for metric in SEARCHED:
        for name, way in WAYS.items():
            if name == "original":
                continue
            for kind, words in KINDS.items():
                one = values[metric][kind]
                recalls = [shown(one["at"][f"{level}"][name], ".3f") for level in LEVELS]
                rows.append([metric, way, words, *recalls, shown(one["lead"][name], "+.3f")])
    head = ["recall", "searched with", "on", *(f"where x has {level}" for level in LEVELS)]
    note = (
        "FAISS IVF, the same network and the same index for both kinds of rows; recalls at equal FLOPs. A "
        "dash: the cost is below its cheapest point, or x does not have that recall."
    )
    return Table("Searched with the predicted key", [*head, "largest lead over x"], rows, note)


def search_chart(values: dict[str, Any]) -> Chart:
    """Fronts of leaky and of held-out rows, side by side."""
    metric = SEARCHED[-1]
    panels = []
    for kind, words in KINDS.items():
        series = []
        for name, way in WAYS.items():
            cost, recall = values[metric][kind]["front"][name]
            series.append(Series(way, cost, recall, group="baseline" if name == "original" else "contender"))
        panels.append(Panel(words, "FLOPs a query", metric, series, log_x=True))
    return Chart("leak-search", "FAISS IVF searched with x and with the predicted key", panels)


def search_sentences(values: dict[str, Any]) -> list[str]:
    """Where the predicted key leads."""
    said = []
    for metric in SEARCHED:
        leads = {kind: values[metric][kind]["lead"]["mapped"] for kind in KINDS}
        parts = [
            f"nowhere comparable on {words}"
            if leads[kind] is None
            else f"{100 * leads[kind]:+.1f} points on {words}"
            for kind, words in KINDS.items()
        ]
        ahead = {kind: value is not None and value > CLEARLY for kind, value in leads.items()}
        worth = {
            (True, True): "it leads on both",
            (True, False): "it leads only where relatives of the query were trained on",
            (False, True): "it leads on held-out rows only",
            (False, False): "it leads on neither",
        }[ahead["leaky"], ahead["held_out"]]
        said.append(
            f"Searched with the predicted key (drop-in), the largest lead over x at equal FLOPs in {metric} "
            f"is {' and '.join(parts)}: {worth}."
        )
    return said
