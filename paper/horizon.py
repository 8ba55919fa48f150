"""How long to train: one KeyNet with 1, 3, 5 and 7 units of budget, each a run of its own (c = 1)."""

import math
from itertools import pairwise
from typing import Any

import numpy as np

from amips.bench import Bootstrap, Chart, Panel, Series, Summary, Table, describe_machine
from paper.claims import Claim, Finding, alike, all_of, claim_values, decided, verdict
from paper.mappers import (
    EREL_HEAD,
    HALF,
    ONE_SEED,
    Difference,
    Trained,
    difference,
    draws,
    erel_cells,
    paper_depth,
    task_facts,
    trained,
)
from paper.workspace import Workspace

WHERE = "Appendix A.7, Figure 15"
HORIZONS = (1, 3, 5, 7)
KNEE = 3  # where the paper's metrics stop moving
SATURATED = 0.01  # a change of MRR that is surely no larger than this counts as none
SIZE = "S"
# Portion of the scale's budget in one unit; at small, three units are the run of other experiments, too.
UNITS = {"small": 1 / 3}
# Appendix "Training horizon": exp(erel) by billions of samples.
PAPER = {1: 0.40, 3: 0.375, 7: 0.365}
NOTE = (
    "The paper: KeyNet S, L = 16, NQ (2.6M keys), a unit is a billion samples; MRR gains about 0.002 from 3 "
    "to 7. It gives no other numbers in words."
)


def portion(scale: str, horizon: int) -> float:
    """How much of the scale's budget a horizon is."""
    return horizon * UNITS.get(scale, 1.0)


def run(workspace: Workspace) -> Summary:
    """The training loss, erel and MRR at the end of each horizon."""
    task = workspace.mapping_task()
    name = workspace.scale.name
    networks: dict[int, Trained] = {}
    for horizon in HORIZONS:
        part, depth = portion(name, horizon), paper_depth(workspace)
        networks[horizon] = trained(workspace, task, "KeyNet", SIZE, depth, portion=part)
    findings = compare(networks)
    values: dict[str, Any] = {
        "networks": {str(horizon): one.described() for horizon, one in networks.items()},
        "portions": {str(horizon): portion(name, horizon) for horizon in HORIZONS},
        **claim_values(findings),
    }
    return Summary(
        name="horizon",
        title="How long to train",
        verdict=verdict(findings),
        tables=[_table(networks)],
        charts=[_chart(networks)],
        facts=task_facts(task),
        method=[
            f"KeyNet {SIZE}, L = {paper_depth(workspace)}, c = 1, recipe {workspace.scale.recipe!r}: a unit "
            f"is {portion(name, 1):.3g} times {workspace.scale.budget}. Each run is trained from the start, "
            "and its rate falls to 0 at its own end. The training loss is the mean since the evaluation "
            "before.",
            ONE_SEED,
        ],
        command=workspace.command("horizon"),
        machine=describe_machine(),
        values=values,
    )


def units(horizon: int) -> str:
    """A horizon in words: "1 unit", "4 units"."""
    return f"{horizon} unit{'s' if horizon > 1 else ''}"


def _loss(one: Trained) -> float:
    return one.curve("loss")[1][-1]


def _table(networks: dict[int, Trained]) -> Table:
    rows = []
    for horizon, one in networks.items():
        errors = [f"{_loss(one):.4f}", *erel_cells(one.mean("erel")), f"{one.mean('mrr'):.4f}"]
        rows.append([units(horizon), f"{one.samples / 1e6:.3g}", *errors])
    for horizon, ratio in PAPER.items():
        cells = [f"{1000 * horizon:,}", "", "", "", *(2 * [f"{ratio:.3f}"]), ""]  # either of the two
        rows.append([f"the paper, NQ: {units(horizon)}", *cells])
    head = ["budget", "million samples", "training loss at the end", *EREL_HEAD, "MRR"]
    return Table("At the end of each horizon, on test", head, rows, f"{NOTE} {HALF}")


def _chart(networks: dict[int, Trained]) -> Chart:
    traces, ends = [], []
    for horizon, one in networks.items():
        xs, ys = one.curve("loss")
        name = units(horizon)
        traces.append(Series(name, xs, ys, [f"{name}: {y:.4f}" for y in ys]))
        ends.append(Series(name, [one.mean("mrr")], [math.exp(one.mean("erel"))], [name], "points"))
    panels = [
        Panel("during training", "training samples", "training loss", traces, log_x=True),
        Panel("at the end", "MRR", "exp(erel)", ends),
    ]
    return Chart("horizon", "Training horizons", panels, "At the end, the lower right corner is best.")


def compare(networks: dict[int, Trained]) -> list[Finding]:
    """Training loss, transport error and MRR over the horizons, against what the paper says of them."""
    first, last = HORIZONS[0], HORIZONS[-1]
    bootstrap = draws(networks[first].task)
    losses = [_loss(one) for one in networks.values()]
    ratios = {horizon: math.exp(one.mean("erel")) for horizon, one in networks.items()}
    early, late, slowed = _returns([networks[one] for one in (first, KNEE, last)], bootstrap)
    moved = difference(networks[last], networks[KNEE], "erel", bootstrap)
    gain = difference(networks[last], networks[KNEE], "mrr", bootstrap)
    return [
        Claim(
            "longer runs reach lower losses",
            WHERE,
            all(later < earlier for earlier, later in pairwise(losses)),
            f"The training loss, which knows no split, is at the end "
            f"{', '.join(f'{loss:.4f}' for loss in losses)} after {', '.join(map(str, HORIZONS))} units",
        ),
        f"A unit is {networks[first].samples / 1e6:.3g} million samples here and a billion in the paper.",
        Claim(
            "diminishing returns past 3 units",
            WHERE,
            # Less comes of what is added, and something still: an error that rises is no return.
            all_of([_positive(early), _positive(slowed), None if late.high < 0 else True]),
            f"exp(erel) is {ratios[first]:.3f}, {ratios[KNEE]:.3f} and {ratios[last]:.3f} after {first}, "
            f"{KNEE} and {last} units (the paper: {', '.join(f'{ratio:.3f}' for ratio in PAPER.values())}); "
            f"it falls by {early.text()} up to {KNEE} units and by {late.text()} from there, "
            f"{slowed.text()} less (erel {moved.text()}); "
            f"exp(erel_half) is {', '.join(f'{math.sqrt(ratios[one]):.3f}' for one in (first, KNEE, last))}",
            value=slowed.value,
            low=slowed.low,
            high=slowed.high,
        ),
        Claim(
            "from 3 to 7 units MRR gains about 0.002: it is saturated",
            WHERE,
            alike(gain.low, gain.high, SATURATED),
            f"MRR gains {gain.text()} from {KNEE} to {last} units",
            value=gain.value,
            low=gain.low,
            high=gain.high,
        ),
    ]


def _returns(networks: list[Trained], bootstrap: Bootstrap) -> list[Difference]:
    """By how much exp(erel) falls up to the knee, from there on, and how much less from there on."""
    drawn = [np.exp(bootstrap.weights @ one.rows["erel"]) for one in networks]
    means = [math.exp(one.mean("erel")) for one in networks]

    def falls(values: list[Any]) -> list[Any]:
        early, late = values[0] - values[1], values[1] - values[2]
        return [early, late, early - late]

    return [
        Difference(value, *(float(end) for end in np.quantile(one, (0.025, 0.975))))
        for value, one in zip(falls(means), falls(drawn), strict=True)
    ]


def _positive(gain: Difference) -> bool | None:
    return decided(gain.low, gain.high, 0)
