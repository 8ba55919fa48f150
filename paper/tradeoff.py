"""Transport error against MRR at the end of training: both networks, in several sizes and depths (c = 1)."""

from amips.bench import Bootstrap, Chart, Panel, Series, Summary, describe_machine
from paper.claims import Claim, Finding, all_of, claim_values, verdict
from paper.mappers import (
    HALF,
    KINDS,
    ONE_SEED,
    Difference,
    Trained,
    budget,
    counted,
    difference,
    draws,
    errors_table,
    grid,
    in_millions,
    pairs,
    settled,
    sizes,
    speaks,
    task_facts,
)
from paper.workspace import Workspace

WHERE = "Appendix A.4, Figure 10"
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
    # A SupportNet takes long to train: at replica it has two sizes.
    of_sizes = sizes(workspace) if workspace.scale.name != "replica" else ("XS", "S")
    networks = grid(workspace, task, list(KINDS), of_sizes)
    findings = compare(networks, of_sizes)
    return Summary(
        name="tradeoff",
        title="Transport error against MRR",
        verdict=verdict(findings),
        tables=[errors_table("At the end of training, on test", networks, PAPER)],
        charts=[_chart(networks)],
        facts=task_facts(task),
        method=[
            f"c = 1, each network trained for {budget(workspace)} (recipe {workspace.scale.recipe!r}): "
            "KeyNet without injections, SupportNet with the input in every layer. MRR ranks the true top key "
            "by distance from the predicted one, over all keys. " + HALF,
            ONE_SEED,
        ],
        command=workspace.command("tradeoff"),
        machine=describe_machine(),
        values={"networks": {one.name: one.described() for one in networks}, **claim_values(findings)},
    )


def _chart(networks: list[Trained]) -> Chart:
    series = []
    for kind in KINDS:
        for size in dict.fromkeys(one.size for one in networks):
            members = [one for one in networks if (one.kind, one.size) == (kind, size)]
            x, y = ([one.mean(metric) for one in members] for metric in ("mrr", "erel"))
            text = [f"{one.name}: erel {one.mean('erel'):.3f}, MRR {one.mean('mrr'):.3f}" for one in members]
            series.append(Series(f"{kind} {size}", x, y, text, "points"))
    panel = Panel("", "MRR", "erel", series)
    caption = "One point for each depth. The lower right corner is best."
    return Chart("tradeoff", "Transport error against MRR, on test", [panel], caption)


def compare(networks: list[Trained], ordered: tuple[str, ...]) -> list[Finding]:
    """The best networks, then size, depth and the two kinds against what the paper says of them.

    Args:
        ordered: the sizes, from small to large.
    """
    bootstrap = draws(networks[0].task)
    nearest = min(networks, key=lambda one: one.on_val("erel"))
    highest = max(networks, key=lambda one: one.on_val("mrr"))
    findings: list[Finding] = [
        f"Of {len(networks)} networks, {nearest.name} has the lowest erel on val "
        f"({nearest.mean('erel'):.3f} on test, MRR {nearest.mean('mrr'):.3f}), {highest.name} "
        f"the highest MRR ({highest.mean('mrr'):.3f} on test, erel {highest.mean('erel'):.3f})."
    ]
    if highest.mean("erel") > 0:
        findings.append(
            f"{highest.name} predicts points farther from the top key than the query is: its MRR is that "
            "of an answer near the query itself."
        )
    samples = [f"{kind}s {in_millions([one for one in networks if one.kind == kind])}" for kind in KINDS]
    findings.append(f"The same budget gave {' and '.join(samples)}.")
    findings += [_by_shape(networks, kind, by, bootstrap) for by in ("size", "depth") for kind in KINDS]
    return findings + [
        _between(networks, size, size == ordered[-1], bootstrap) for size in (ordered[0], ordered[-1])
    ]


def _by_shape(networks: list[Trained], kind: str, by: str, bootstrap: Bootstrap) -> Claim:
    """Of one kind, networks that differ in size or in depth alone."""
    text, word = {
        "size": ("a larger network improves both metrics", "larger"),
        "depth": ("shallower networks mostly do better", "deeper"),
    }[by]
    neighbours = pairs([one for one in networks if one.kind == kind], by)
    wins = {metric: counted(neighbours, metric, bootstrap) for metric in METRICS}
    losses = {
        metric: counted([(second, first) for first, second in neighbours], metric, bootstrap)[1]
        for metric in METRICS
    }
    parts = [
        f"{METRICS[m]} in {won} (surely in {sure}, surely not in {losses[m]})"
        for m, (won, sure) in wins.items()
    ]
    # Surely every larger one, for the first claim; for the second, surely most of the shallower ones.
    ends = [
        settled(won, sure, len(neighbours)) if by == "size" else _mostly(losses[m], sure, len(neighbours))
        for m, (won, sure) in wins.items()
    ]
    reproduced = all_of(ends)
    evidence = f"{kind}: of {len(neighbours)} pairs that differ in {by} alone, the {word} one has "
    evidence += " and ".join(parts)
    return Claim(text, WHERE, reproduced, evidence, intervals=True)


def _mostly(surely: int, surely_not: int, total: int) -> bool | None:
    """Whether something is so in most of several pairs; None where too few of them are sure."""
    return True if 2 * surely > total else False if 2 * surely_not >= total else None


def _between(networks: list[Trained], size: str, largest: bool, bootstrap: Bootstrap) -> Claim:
    """SupportNet against KeyNet of one size, at every depth."""
    gains: dict[str, list[Difference]] = {metric: [] for metric in METRICS}
    depths = sorted({one.depth for one in networks})
    for depth in depths:
        key, support = (
            next(one for one in networks if (one.kind, one.size, one.depth) == (kind, size, depth))
            for kind in ("KeyNet", "SupportNet")
        )
        for metric in METRICS:
            gains[metric].append(difference(support, key, metric, bootstrap))
    # The claim: at the largest size SupportNet has the lower erel and the lower MRR; at the smallest neither.
    ends = {metric: [speaks(gain, metric) for gain in ones] for metric, ones in gains.items()}
    wanted = {"erel": largest, "mrr": not largest}
    reproduced = all_of(
        None if end is None else end == wanted[metric] for metric, ones in ends.items() for end in ones
    )
    parts = [
        f"{METRICS[m]} at {ones.count(True)} of {len(depths)} depths for sure ({_gains(gains[m])})"
        for m, ones in ends.items()
    ]
    text = "the lower erel and the lower MRR" if largest else "the higher erel and the higher MRR"
    text = f"SupportNet has {text} at {'large' if largest else 'small'} sizes"
    evidence = f"Size {size}: against KeyNet, SupportNet has {' and '.join(parts)}"
    return Claim(text, WHERE, reproduced, evidence, intervals=True)


def _gains(gains: list[Difference]) -> str:
    return ", ".join(gain.text() for gain in gains)
