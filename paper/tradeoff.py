"""Transport error against MRR at the end of training: both networks, in several sizes and depths (c = 1)."""

from amips.bench.derive import Bootstrap
from amips.bench.machine import describe
from paper.workspace import Workspace
from paper.mappers import (
    KINDS,
    ONE_SEED,
    Trained,
    better,
    compared,
    counted,
    difference,
    draws,
    errors_table,
    grid,
    in_millions,
    pairs,
    sizes,
    task_facts,
)
from amips.bench.summary import Chart, Panel, Series, Summary

METRICS = {"erel": "the lower erel", "mrr": "the higher MRR"}
PAPER = (
    "The paper (FIQA, 52K keys; Quora, 513K; a figure, no table): size matters most and improves both "
    "metrics for both networks; shallower networks mostly do better; as the size grows, SupportNet has the "
    "lower erel and the slightly lower MRR, at small sizes the opposite. The query itself has erel 0 "
    "and, among keys of equal norm, MRR 1: only both together say something."
)


def run(workspace: Workspace) -> Summary:
    """Both errors on test of every network."""
    task = workspace.mapping_task()
    found = grid(workspace, task, list(KINDS))
    return Summary(
        name="tradeoff",
        title="Transport error against MRR",
        verdict=_verdict(found, sizes(workspace)),
        tables=[errors_table("At the end of training, on test", found, PAPER)],
        charts=[_chart(found)],
        facts=task_facts(task),
        method=[
            f"c = 1, each network trained for {workspace.scale.budget} (recipe {workspace.scale.recipe!r}): KeyNet "
            "without injections, SupportNet with the input in every layer. MRR ranks the true top key by "
            "distance from the predicted one, over all keys.",
            ONE_SEED,
        ],
        command=f"amips study tradeoff --data DATA --scale {workspace.scale.name} --out OUT",
        machine=describe(),
        values={"networks": {one.name: one.described() for one in found}},
    )


def _chart(found: list[Trained]) -> Chart:
    series = []
    for kind in KINDS:
        for size in dict.fromkeys(one.size for one in found):
            members = [one for one in found if (one.kind, one.size) == (kind, size)]
            x, y = ([one.mean(metric) for one in members] for metric in ("mrr", "erel"))
            text = [f"{one.name}: erel {one.mean('erel'):.3f}, MRR {one.mean('mrr'):.3f}" for one in members]
            series.append(Series(f"{kind} {size}", x, y, text, "points"))
    panel = Panel("", "MRR", "erel", series)
    caption = "One point for each depth. The lower right corner is best."
    return Chart("tradeoff", "Transport error against MRR, on test", [panel], caption)


def _verdict(found: list[Trained], ordered: tuple[str, ...]) -> list[str]:
    bootstrap = draws(found[0].task)
    best = {
        "erel": min(found, key=lambda one: one.model.about["val"]["erel"]),
        "mrr": max(found, key=lambda one: one.model.about["val"]["mrr"]),
    }
    said = [
        f"Of {len(found)} networks, {best['erel'].name} has the lowest erel on val "
        f"({best['erel'].mean('erel'):.3f} on test, MRR {best['erel'].mean('mrr'):.3f}), {best['mrr'].name} "
        f"the highest MRR ({best['mrr'].mean('mrr'):.3f} on test, erel {best['mrr'].mean('erel'):.3f})."
    ]
    if best["mrr"].mean("erel") > 0:
        said.append(
            f"{best['mrr'].name} predicts points farther from the top key than the query is: its MRR is that "
            "of an answer near the query itself."
        )
    given = [f"{kind}s {in_millions([one for one in found if one.kind == kind])}" for kind in KINDS]
    said.append(f"The same budget gave {' and '.join(given)}.")
    for by, larger, claim in (
        ("size", "larger", "a larger network improves both metrics"),
        ("depth", "deeper", "shallower networks mostly do better"),
    ):
        for kind in KINDS:
            there = pairs([one for one in found if one.kind == kind], by)
            wins = {metric: counted(there, metric, bootstrap) for metric in METRICS}
            parts = [f"{METRICS[m]} in {won} (surely in {sure})" for m, (won, sure) in wins.items()]
            # Surely every larger one, for the first claim; for the second, most of the shallower ones.
            held = all(
                sure == len(there) if by == "size" else 2 * won < len(there) for won, sure in wins.values()
            )
            said.append(
                f"{kind}: of {len(there)} pairs that differ in {by} alone, the {larger} one has "
                f"{' and '.join(parts)}: {compared(held, claim)}."
            )
    return said + [
        _between(found, size, size == ordered[-1], bootstrap) for size in (ordered[0], ordered[-1])
    ]


def _between(found: list[Trained], size: str, largest: bool, bootstrap: Bootstrap) -> str:
    """SupportNet against KeyNet of one size, at every depth."""
    gains: dict[str, list[bool]] = {metric: [] for metric in METRICS}
    depths = sorted({one.depth for one in found})
    for depth in depths:
        key, support = (
            next(one for one in found if (one.kind, one.size, one.depth) == (kind, size, depth))
            for kind in ("KeyNet", "SupportNet")
        )
        for metric in METRICS:
            gains[metric].append(better(difference(support, key, metric, bootstrap), metric))
    # The claim: at the largest size SupportNet has the lower erel and the lower MRR; at the smallest neither.
    held = (
        (all(gains["erel"]) and not any(gains["mrr"]))
        if largest
        else (not any(gains["erel"]) and all(gains["mrr"]))
    )
    parts = [f"{METRICS[metric]} at {sum(found)} of {len(depths)} depths" for metric, found in gains.items()]
    claim = "the lower erel and the lower MRR" if largest else "the higher erel and the higher MRR"
    claim += f" at {'large' if largest else 'small'} sizes"
    return f"Size {size}: against KeyNet, SupportNet has {' and '.join(parts)}: {compared(held, claim)}."
