"""The same recipe on vectors of other encoders, of other dimensions: training, and search with KeyNet.

Every directory of vectors is a workspace of its own, with the scale's settings; nothing is tuned for any.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from amips.bench import (
    Axis,
    Bootstrap,
    Chart,
    Family,
    Metric,
    Panel,
    Ratio,
    Series,
    Summary,
    Table,
    describe_machine,
)
from amips.errors import AmipsError
from amips.task import Task
from paper.claims import Claim, Finding, claim_values, decided, verdict
from paper.ivf import METRICS, TARGETS, best_on_val, index_ways, leads
from paper.mappers import EREL_HEAD, HALF, ONE_SEED, Trained, budget, difference, draws, erel_cells, trained
from paper.search_runs import CLEARLY, ORIGINAL, Lead, Query, Searched, Way, front_of, none_if_nan, search_all
from paper.workspace import Workspace

WHERE_TRAINING = "Appendix A.5, Figure 11"
WHERE_SEARCH = "Appendix A.5, Figures 12 and 13"
SIZES = ("XS", "S")  # those that the paper has here
JUDGED: Metric = "recall@0.1%"
ALIKE = 0.1  # values of erel this near to each other are comparable
PAPER = (
    "The paper (NQ and Quora, d = 768; figures, no table): with MPNet and DistilRoBERTa erel falls smoothly "
    "to values comparable with those of MiniLM, S below XS, nearly the same for both encoders; mapped "
    "queries dominate in the middle of the budgets with all of them."
)


@dataclass(frozen=True)
class Place:
    """The data of one encoder: what was trained on it and how it is searched."""

    name: str
    task: Task
    networks: list[Trained]
    searched: Searched[Way]

    @property
    def families(self) -> dict[Way, Family]:
        """What was measured on test."""
        return self.searched.test

    @property
    def second(self) -> float:
        """What a time of 1 takes, in a large batch on one thread."""
        return self.searched.seconds["batch/1"]

    @property
    def learned(self) -> dict[Way, Family]:
        """Searching with a network."""
        return {way: family for way, family in self.families.items() if way != ORIGINAL}

    @cached_property
    def leads(self) -> dict[Way, Lead | None]:
        """By how much each way finds more than x at equal FLOPs, where it does most on val."""
        bootstrap = draws(self.task)
        return {way: leads(self.searched, way, bootstrap)["flops"] for way in self.learned}

    def best(self, query: Query) -> Lead | None:
        """The lead of the size that leads most on val; None if that has no cost in common with x."""
        return self.leads[best_on_val(self.searched, query)]


def encoder_of(data: Path) -> str:
    """The encoder that `amips embed` recorded, or the name of the directory."""
    path = data / "embed.json"
    if not path.is_file():
        return data.resolve().name
    return Path(str(json.loads(path.read_text())["encoder"])).name


def run(workspace: Workspace) -> Summary:
    """Train and search on the workspace's data and on those of the other encoders."""
    if not workspace.also:
        raise AmipsError(
            "encoders compares data of several encoders: add --also DIR with keys and queries of "
            "another, or --encoder wordllama where the data hold their texts (keys.jsonl, queries.jsonl)"
        )
    directories = [workspace.data, *workspace.also]
    names = [encoder_of(data) for data in directories]
    for name in names:
        if names.count(name) > 1:
            raise AmipsError(f"two of the data are called {name!r}: rename a directory")
    places = []
    for name, data in zip(names, directories, strict=True):
        out = workspace.out / "encoders" / name
        if data is workspace.data:  # in its own place, where other experiments find their tasks and models
            places.append(_measure(workspace, name, f"encoders/{name}/search"))
        else:
            own = Workspace(data, workspace.scale, out, workspace.seed, workspace.progress)
            places.append(_measure(own.by(workspace.split_by), name, "search"))
    findings = compare(places)
    scale = workspace.scale
    return Summary(
        name="encoders",
        title="The same recipe on other encoders",
        verdict=verdict(findings),
        tables=[_training_table(places), _search_table(places)],
        charts=[_curves(places), *(_chart(place) for place in places)],
        facts=[
            (place.name, f"{place.task.n:,} keys of dimension {place.task.d}, {len(place.task.train):,} rows")
            for place in places
        ],
        method=[
            f"KeyNet {' and '.join(SIZES)}, c = 1, each trained for {budget(workspace)} (recipe "
            f"{scale.recipe!r}) on every data set, with the same settings. A network has a fixed fraction of "
            "n d parameters, so that it is larger where the dimension is.",
            "Search as in ivf: with x, drop-in and routed, each over indexes of sqrt(n) / 2 to 10 sqrt(n) "
            "cells. erel is relative to the distance of "
            "query and key, which encoders differ in. " + HALF,
            ONE_SEED,
        ],
        command=workspace.command("encoders", "--also OTHER"),
        machine=describe_machine(),
        values={"encoders": {place.name: _values(place) for place in places}, **claim_values(findings)},
    )


def _measure(workspace: Workspace, name: str, folder: str) -> Place:
    task = workspace.mapping_task()
    networks = [trained(workspace, task, "KeyNet", size) for size in SIZES]
    ways = index_ways(task.n, {one.size: str(one.directory) for one in networks})
    searched = search_all(workspace, task, folder, ways, None, times=True, all_threads=False)
    return Place(name, task, networks, searched)


def _values(place: Place) -> dict[str, Any]:
    """What was measured with one encoder."""
    families = place.families.values()
    return {
        "n": place.task.n,
        "d": place.task.d,
        "networks": {one.name: one.described() for one in place.networks},
        "lead": {
            family.name: None if (one := place.leads[way]) is None else [one.value, one.low, one.high]
            for way, family in place.learned.items()
        },
        "recall": {family.name: family.recalls(JUDGED).tolist() for family in families},
        "flops": {family.name: family.costs("flops").tolist() for family in families},
        "seconds": {
            family.name: [none_if_nan(place.second * float(v)) for v in family.costs("batch/1", JUDGED)]
            for family in families
        },
    }


def _training_table(places: list[Place]) -> Table:
    rows = []
    for place in places:
        for one in place.networks:
            errors = [*erel_cells(one.mean("erel")), f"{one.mean('mrr'):.3f}"]
            size = [f"KeyNet {one.size}", f"{one.model.architecture.parameters:,}"]
            rows.append([place.name, str(place.task.d), *size, f"{one.samples / 1e6:.3g}", *errors])
    head = ["encoder", "d", "network", "parameters", "million samples", *EREL_HEAD, "MRR"]
    return Table("The networks on test", head, rows, PAPER)


def _search_table(places: list[Place]) -> Table:
    rows = []
    for place in places:
        bootstrap = draws(place.task)
        base = place.families[ORIGINAL]
        for way, family in place.learned.items():
            cells = [_ratio(bootstrap.ratio(base, family, "flops", JUDGED, t)) for t in TARGETS]
            cells += [
                _ratio(bootstrap.ratio(base, family, axis, JUDGED, TARGETS[1]))
                for axis in ("scanned", "batch/1")
            ]
            ahead = place.leads[way]
            rows.append([place.name, family.name, *cells, "-" if ahead is None else ahead.text()])
    head = ["encoder", "searched with", *(f"FLOPs at {target:.2f}" for target in TARGETS)]
    head += [f"keys scanned at {TARGETS[1]:.2f}", f"time at {TARGETS[1]:.2f}", "lead"]
    note = (
        "How many times less than the unmodified query needs; above 1 is a gain. Times are of large batches "
        "on one thread, the network's included, for as many results as the recall needs. The lead is "
        "that in recall at equal FLOPs, at the cost where it is largest on val."
    )
    return Table(f"{JUDGED[0].upper()}{JUDGED[1:]}: against searching with x", head, rows, note)


def _ratio(ratio: Ratio | None) -> str:
    return "not reached" if ratio is None else str(ratio)


def _curves(places: list[Place]) -> Chart:
    panels = []
    for size in dict.fromkeys(one.size for place in places for one in place.networks):
        series = []
        for place in places:
            for one in (one for one in place.networks if one.size == size):
                xs, ys = one.curve("erel")
                series.append(Series(f"{place.name}, d = {place.task.d}", xs, ys))
        panels.append(Panel(f"KeyNet {size}", "training samples", "erel on val", series, log_x=True))
    return Chart("training", "Training on several encoders", panels, "Lower is better.")


def _chart(place: Place) -> Chart:
    panels = []
    axes: dict[Axis, tuple[str, float]] = {
        "flops": ("FLOPs a query", 1.0),
        "batch/1": ("us a query, large batch", 1e6 * place.second),
    }
    for axis, (label, unit) in axes.items():
        for metric in METRICS:
            series = []
            for way, family in place.families.items():
                x, y = front_of(family, axis, metric)
                base = way == ORIGINAL
                series.append(
                    Series(
                        "original" if base else family.name,
                        (unit * x).tolist(),
                        y.tolist(),
                        group="baseline" if base else "contender",
                    )
                )
            panels.append(Panel("", label, metric, series, log_x=True))
    slug = "".join(ch if ch.isalnum() else "-" for ch in place.name.lower())
    return Chart(f"search-{slug}", f"FAISS IVF with {place.name}, d = {place.task.d}", panels)


def compare(places: list[Place]) -> list[Finding]:
    """The errors of every size over the encoders; then size and search with each encoder."""
    findings: list[Finding] = []
    by_size: dict[str, dict[str, float]] = {}
    for place in places:
        for one in place.networks:
            by_size.setdefault(one.size, {})[place.name] = one.mean("erel")
    for size, errors in by_size.items():
        apart = max(errors.values()) - min(errors.values())
        parts = [f"{value:.3f} on {name}" for name, value in errors.items()]
        # Errors of networks that have learned nothing may be alike, too.
        learned = max(errors.values()) < 0
        farther = "" if learned else ", not all below 0, which is where the query itself is"
        findings.append(
            Claim(
                "comparable errors with every encoder",
                WHERE_TRAINING,
                learned and apart <= ALIKE,
                f"KeyNet {size}, the same recipe: erel {', '.join(parts)}, {apart:.3f} apart{farther}",
            )
        )
    for place in places:
        findings += _of_place(place, draws(place.task))
    return findings


def _of_place(place: Place, bootstrap: Bootstrap) -> list[Finding]:
    """Whether the larger network is better, and whether mapping helps the search."""
    smallest, largest = place.networks[0], place.networks[-1]
    gain = difference(largest, smallest, "erel", bootstrap)
    sure = "" if gain.sure else ", no sure difference"
    mapped, routed = place.best("mapped"), place.best("routed")
    parts = [
        f"the {what} {'at no budget as cheap' if one is None else f'by {one.text()}'}"
        for what, one in (("mapped query (drop-in)", mapped), ("routed one", routed))
    ]
    return [
        Claim(
            "the larger network reaches the lower error",
            WHERE_TRAINING,
            True if gain.high < 0 else False if gain.low > 0 else None,
            f"{place.name}: erel of KeyNet {largest.size} minus that of {smallest.size} is "
            f"{gain.text()}{sure}",
        ),
        Claim(
            "mapped queries lead in the middle of the budgets with every encoder",
            WHERE_SEARCH,
            False if mapped is None else decided(mapped.low, mapped.high, CLEARLY),
            f"{place.name}: at equal FLOPs ahead of the original query in {JUDGED}, at the cost where "
            f"it is most so on val: {', '.join(parts)}",
            value=None if mapped is None else mapped.value,
            low=None if mapped is None else mapped.low,
            high=None if mapped is None else mapped.high,
        ),
    ]
