"""What each term of the losses buys: score alone, gradient (or key) alone, and both (c = 1).

The paper's formulas sum the gradient and key losses over d; the authors' published code averages them, which
makes a score weight of 0.01 weigh d times more beside them. Both together are trained either way.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from amips.bench import Bootstrap, Chart, Panel, Series, Summary, Table, describe_machine
from amips.nets import Recipe
from paper.claims import Claim, Finding, all_of, claim_values, verdict
from paper.mappers import (
    KINDS,
    ONE_SEED,
    Difference,
    Trained,
    budget,
    difference,
    draws,
    paper_depth,
    speaks,
    task_facts,
    trained,
)
from paper.workspace import Workspace

WHERE = "Appendix A.6, Figure 14"
BOTH, GRADIENT, SCORE = "both", "gradient only", "score only"
AVERAGED = "both averaged"  # over d, as the authors' code does
# What is left out of the recipe; what is left keeps its weight. SupportNet keeps its penalty throughout.
WITHOUT: dict[str, dict[str, float]] = {
    SCORE: {"grad": 0.0, "key": 0.0},
    GRADIENT: {"score": 0.0, "consist": 0.0},
    BOTH: {},
}
RATES = {"full": (1.0, 3.0)}  # of the recipe's; the paper has two, and does not say which
SIZE = "XS"
NOTICEABLE = 0.9  # a score error below this multiple of another is noticeably lower,
NEARLY = 1.05  # ... and a gradient error up to this one hardly higher
PAPER = (
    "The paper (NQ, L = 16; a figure, no table): score alone has the lowest score error and the highest "
    "gradient error, gradient alone the reverse; both together have nearly the gradient error of gradient "
    "alone, and a noticeably lower score error."
)


Networks = dict[tuple[str, float, str], Trained]  # by kind, rate (of the recipe's) and losses


def recipes(base: Recipe) -> dict[str, Recipe]:
    """The recipes made of one: they differ in the weights of the losses, the last in their reduction."""
    weights = {loss: replace(base, **zeros) for loss, zeros in WITHOUT.items()}  # type: ignore[arg-type]
    return {**weights, AVERAGED: replace(base, reduction="mean")}


def run(workspace: Workspace) -> Summary:
    """Score error and gradient error on test of both networks under every loss."""
    task = workspace.mapping_task()
    name = workspace.scale.name
    networks: Networks = {}
    for kind in KINDS:
        for rate in RATES.get(name, (1.0,)):
            for loss, recipe in recipes(workspace.recipe()).items():
                tags = [loss.replace(" ", "-")] if loss != BOTH else []
                tags += [f"rate{rate:g}"] if rate != 1 else []
                changed = replace(recipe, rate=rate * recipe.rate)
                one = trained(
                    workspace, task, kind, SIZE, paper_depth(workspace), changed, tag="-".join(tags)
                )
                networks[kind, rate, loss] = one
    findings = compare(networks)
    values: dict[str, Any] = {
        "networks": {
            label(*key): {**one.described(), "recipe": one.model.about["recipe"]}
            for key, one in networks.items()
        },
        **claim_values(findings),
    }
    return Summary(
        name="losses",
        title="What each term of the losses buys",
        verdict=verdict(findings),
        tables=[_table(networks)],
        charts=[_chart(networks)],
        facts=task_facts(task),
        method=[
            f"{SIZE}, L = {paper_depth(workspace)}, c = 1, each trained for {budget(workspace)} (recipe "
            f"{workspace.scale.recipe!r}). Score is SupportNet's score loss and KeyNet's consistency loss "
            "(weight 0.01), gradient is SupportNet's gradient loss and KeyNet's key loss (weight 1), a sum "
            "over d as in the paper's formulas; averaged: its mean over d, as in the authors' code.",
            "The score error is the mean of (f(x) - sigma(x))^2, for KeyNet with f(x) = <F(x), x>; the "
            "gradient error the mean of ||y^ - y*||^2. " + ONE_SEED,
        ],
        command=workspace.command("losses"),
        machine=describe_machine(),
        values=values,
    )


def label(kind: str, rate: float, loss: str = "") -> str:
    """What a network of this experiment, or those of one kind and rate, are called."""
    return ", ".join([kind, *([loss] if loss else []), *([f"{rate:g} times the rate"] if rate != 1 else [])])


def _table(networks: Networks) -> Table:
    rows = []
    for key, one in networks.items():
        errors = [f"{one.mean('score'):.5f}", f"{one.mean('key'):.4f}", f"{one.mean('erel'):.3f}"]
        rows.append([label(*key), f"{one.samples / 1e6:.3g}", *errors, f"{one.mean('mrr'):.3f}"])
    head = ["network, losses", "million samples", "score error", "gradient error", "erel", "MRR"]
    return Table("Errors on test", head, rows, PAPER)


def _chart(networks: Networks) -> Chart:
    series = [
        Series(label(*key), [one.mean("score")], [one.mean("key")], [label(*key)], "points")
        for key, one in networks.items()
    ]
    panel = Panel("", "score error", "gradient error", series, log_x=True, log_y=True)
    return Chart("losses", "Gradient error against score error", [panel], "The lower left corner is best.")


def compare(networks: Networks) -> list[Finding]:
    """For each network: the two losses alone, then both together, against what the paper says of them."""
    bootstrap = draws(next(iter(networks.values())).task)
    findings: list[Finding] = []
    for kind, rate in dict.fromkeys((kind, rate) for kind, rate, _ in networks):
        of = {loss: networks[kind, rate, loss] for loss in (*WITHOUT, AVERAGED)}
        score, gradient = ({loss: one.mean(m) for loss, one in of.items()} for m in ("score", "key"))
        name = label(kind, rate)
        lowest = min(WITHOUT, key=lambda loss: score[loss])
        highest = max(WITHOUT, key=lambda loss: gradient[loss])
        own = [
            difference(of[first], of[second], metric, bootstrap)
            for first, second, metric in ((SCORE, GRADIENT, "score"), (GRADIENT, SCORE, "key"))
        ]
        doubts = ["" if gain.sure else " (no sure difference)" for gain in own]
        findings.append(
            Claim(
                "each loss alone is best at its own error",
                WHERE,
                all_of(speaks(gain, metric) for gain, metric in zip(own, ("score", "key"), strict=True)),
                f"{name}: the score error is lowest with {lowest} ({score[lowest]:.5f}) and the gradient "
                f"error highest with {highest} ({gradient[highest]:.3f}); score alone against gradient "
                f"alone: score error {score[SCORE]:.5f} against {score[GRADIENT]:.5f}{doubts[0]}, gradient "
                f"error {gradient[SCORE]:.3f} against {gradient[GRADIENT]:.3f}{doubts[1]}",
                intervals=True,
            )
        )
        for together, words in ((BOTH, "summed over d"), (AVERAGED, "averaged over d")):
            ratios = [ratio_of(of[together], of[GRADIENT], metric, bootstrap) for metric in ("key", "score")]
            findings.append(
                Claim(
                    "both losses have a noticeably lower score error at hardly any cost in gradient error",
                    WHERE,
                    all_of(
                        no_more(ratio, most) for ratio, most in zip(ratios, (NEARLY, NOTICEABLE), strict=True)
                    ),
                    f"{name}, {words}: both losses together have {_times(ratios[0])} times the gradient "
                    f"error of gradient alone, and {_times(ratios[1])} times its score error",
                    intervals=True,
                )
            )
    return findings


def ratio_of(one: Trained, other: Trained, metric: str, bootstrap: Bootstrap) -> Difference:
    """The mean error of one network in units of that of another, on the same test queries."""
    drawn = (bootstrap.weights @ one.rows[metric]) / (bootstrap.weights @ other.rows[metric])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Difference(one.mean(metric) / other.mean(metric), float(low), float(high))


def no_more(ratio: Difference, most: float) -> bool | None:
    """Whether a ratio is surely no more than this; None where the interval leaves both open."""
    return True if ratio.high <= most else False if ratio.low > most else None


def _times(ratio: Difference) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
