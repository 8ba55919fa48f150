"""The same recipe on vectors of other encoders, of other dimensions: training, and search with KeyNet.

Every directory of vectors is a workspace of its own, with the scale's settings; nothing is tuned for any of them.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from amips.bench.derive import Bootstrap, Family, Metric, Ratio
from amips.bench.machine import describe
from paper.ivf import METRICS, TARGETS, index_systems
from paper.workspace import Workspace
from paper.mappers import ONE_SEED, Trained, compared, difference, draws, sizes, trained
from paper.search_runs import CLEARLY, front_of, lead, none_if_nan, run_systems
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.errors import AmipsError
from amips.task import Task

TOLD: Metric = "recall@0.1%"
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
    families: list[Family]

    @property
    def base(self) -> Family:
        """Searching with x."""
        return next(family for family in self.families if family.role == "baseline")

    @property
    def others(self) -> list[Family]:
        """Searching with a network."""
        return [family for family in self.families if family.role != "baseline"]


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
            "study encoders compares data of several encoders: add --also DIR with keys and queries of "
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
        # The workspace's own data are at work in its own place, where other studies find their tasks and models.
        own = workspace if data is workspace.data else Workspace(data, workspace.scale, out, workspace.seed, workspace.progress)
        places.append(_measure(own, name, "search" if own is not workspace else f"encoders/{name}/search"))
    scale = workspace.scale
    return Summary(
        name="encoders",
        title="The same recipe on other encoders",
        verdict=_verdict(places),
        tables=[_training_table(places), _search_table(places)],
        charts=[_curves(places), *(_chart(place) for place in places)],
        facts=[
            (place.name, f"{place.task.n:,} keys of dimension {place.task.d}, {len(place.task.train):,} rows")
            for place in places
        ],
        method=[
            f"KeyNet {' and '.join(sizes(workspace))}, c = 1, each trained for {scale.budget} (recipe "
            f"{scale.recipe!r}) on every data set, with the same settings. A network has its share of n d "
            "parameters, so that it is larger where the dimension is.",
            "Search as in the study ivf, which also takes times: with x over indexes of sqrt(n) / 2 to "
            "10 sqrt(n) cells, drop-in and routed on one of 4 sqrt(n). erel is relative to the distance of "
            "query and key, which encoders differ in.",
            ONE_SEED,
        ],
        command=f"amips study encoders --data DATA --also OTHER --scale {scale.name} --out OUT",
        machine=describe(),
        values={
            place.name: {
                "n": place.task.n,
                "d": place.task.d,
                "networks": {one.name: one.described() for one in place.networks},
                "lead": {family.name: none_if_nan(_lead(place, family)) for family in place.others},
                "recall": {family.name: family.recalls(TOLD).tolist() for family in place.families},
                "flops": {family.name: family.costs("flops").tolist() for family in place.families},
            }
            for place in places
        },
    )


def _measure(workspace: Workspace, name: str, folder: str) -> Place:
    task = workspace.mapping_task()
    networks = [trained(workspace, task, "KeyNet", size) for size in sizes(workspace)]
    runs = {str(one.directory): f"KeyNet {one.size}" for one in networks}
    systems = index_systems(task.n, runs, ("drop-in", "cells"))
    tested, _ = run_systems(workspace, task, folder, systems, None, times=False)
    return Place(name, task, networks, tested)


def _training_table(places: list[Place]) -> Table:
    rows = []
    for place in places:
        for one in place.networks:
            erel = one.mean("erel")
            errors = [f"{erel:.3f}", f"{math.exp(erel):.3f}", f"{one.mean('mrr'):.3f}"]
            size = [f"KeyNet {one.size}", f"{one.model.architecture.parameters:,}"]
            rows.append([place.name, str(place.task.d), *size, f"{one.samples / 1e6:.3g}", *errors])
    head = ["encoder", "d", "network", "parameters", "million samples", "erel", "exp(erel)", "MRR"]
    return Table("The networks on test", head, rows, PAPER)


def _search_table(places: list[Place]) -> Table:
    rows = []
    for place in places:
        bootstrap = draws(place.task)
        for family in place.others:
            cells = [_ratio(bootstrap.ratio(place.base, family, "flops", TOLD, t)) for t in TARGETS]
            cells.append(_ratio(bootstrap.ratio(place.base, family, "scanned", TOLD, TARGETS[1])))
            ahead = _lead(place, family)
            rows.append([place.name, family.name, *cells, "-" if math.isnan(ahead) else f"{ahead:+.3f}"])
    head = ["encoder", "searched with", *(f"FLOPs at {target:.2f}" for target in TARGETS)]
    head += [f"keys scanned at {TARGETS[1]:.2f}", "largest lead"]
    note = (
        "How many times fewer than the unmodified query needs; above 1 is a gain. The largest lead is "
        "that in recall at equal FLOPs, over all budgets; below 0 the unmodified query is ahead everywhere."
    )
    return Table(f"{TOLD[0].upper()}{TOLD[1:]}: against searching with x", head, rows, note)


def _ratio(ratio: Ratio | None) -> str:
    return "not reached" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


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
    for metric in METRICS:
        series = []
        for family in place.families:
            x, y = front_of(family, "flops", metric)
            base = family is place.base
            series.append(
                Series(
                    "original" if base else family.name,
                    x.tolist(),
                    y.tolist(),
                    group="baseline" if base else "contender",
                )
            )
        panels.append(Panel("", "FLOPs a query", metric, series, log_x=True))
    slug = "".join(ch if ch.isalnum() else "-" for ch in place.name.lower())
    return Chart(f"search-{slug}", f"FAISS IVF with {place.name}, d = {place.task.d}", panels)


def _verdict(places: list[Place]) -> list[str]:
    said = []
    by_size: dict[str, dict[str, float]] = {}
    for place in places:
        for one in place.networks:
            by_size.setdefault(one.size, {})[place.name] = one.mean("erel")
    for size, found in by_size.items():
        apart = max(found.values()) - min(found.values())
        parts = [f"{value:.3f} on {name}" for name, value in found.items()]
        # Errors of networks that have learned nothing may be alike, too.
        learned = max(found.values()) < 0
        farther = "" if learned else ", not all below 0, which is where the query itself is"
        said.append(
            f"KeyNet {size}, the same recipe: erel {', '.join(parts)}, {apart:.3f} apart{farther}: "
            f"{compared(learned and apart <= ALIKE, 'comparable errors with every encoder')}."
        )
    for place in places:
        said += _of_place(place, draws(place.task))
    return said


def _of_place(place: Place, bootstrap: Bootstrap) -> list[str]:
    """Whether the larger network is better, and whether mapping helps the search."""
    smallest, largest = place.networks[0], place.networks[-1]
    gain = difference(largest, smallest, "erel", bootstrap)
    sure = "" if gain.sure else ", no sure difference"
    drop_in = [family for family in place.others if family.name.endswith("drop-in")]
    leads = {
        way: max((value for f in found if not math.isnan(value := _lead(place, f))), default=math.nan)
        for way, found in (
            ("mapped", drop_in),
            ("routed", [family for family in place.others if family not in drop_in]),
        )
    }
    parts = [
        f"the {what} {'at no budget as cheap' if math.isnan(at) else f'by at most {100 * at:+.1f} points'}"
        for what, at in (("mapped query (drop-in)", leads["mapped"]), ("routed one", leads["routed"]))
    ]
    return [
        f"{place.name}: erel of KeyNet {largest.size} minus that of {smallest.size} is {gain.text()}{sure}: "
        f"{compared(gain.high < 0, 'the larger network reaches the lower error')}.",
        f"{place.name}: at equal FLOPs ahead of the original query in {TOLD}: {', '.join(parts)}: "
        f"{compared(leads['mapped'] > CLEARLY, 'mapped queries lead in the middle of the budgets')}.",
    ]


def _lead(place: Place, family: Family) -> float:
    return lead(place.base, family, "flops", TOLD)
