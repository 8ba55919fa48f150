"""What `repeats` ends in: from which share of traffic that comes again on which way pays."""

from typing import Any

from amips.bench import Chart, Panel, Series, Summary, Table, describe_machine
from amips.task import BY_TIME, Task
from paper.claims import Claim, Finding, claim_values, verdict
from paper.repeats_fit import KINDS, fit_findings, fit_table
from paper.repeats_ways import (
    BATCH,
    CLEARLY,
    DEPTH,
    DROP_IN,
    GRAPH,
    IVF,
    LEARNED,
    MEMORY,
    NOISE,
    RECALL,
    ROUNDS,
    ROUTED,
    SUPPORT,
    TARGETS,
    WAYS,
)
from paper.workspace import Workspace

CLAIMED = {
    DROP_IN: ("searching with the predicted key costs less than x", "Section 4.4, Figure 5"),
    ROUTED: ("routing by the predicted key costs less than x", "Section 4.4, Figure 5"),
    SUPPORT: ("routing by SupportNet costs less than x", "Section 4.3, Figure 4"),
}


def gains(values: dict[str, Any], way: str, rival: str, target: float = RECALL) -> dict[float, float]:
    """How many times fewer FLOPs a way needs than a rival, by share; where either does not reach it, none."""
    said = {}
    for share, one in values.items():
        costs = [one["costs"].get(name, {}).get(f"{target:g}") for name in (rival, way)]
        if None not in costs:
            said[float(share)] = costs[0] / costs[1]
    return said


def findings(values: dict[str, Any]) -> list[Finding]:
    """From which share on which way pays, and what that says of the paper's claim."""
    memory = gains(values, MEMORY, GRAPH)
    by_share = ", ".join(f"{gain:.2f} at {share:g}" for share, gain in memory.items())
    paying = [share for share, gain in memory.items() if gain > CLEARLY]
    said: list[Finding] = [
        *fit_findings(values),
        f"One graph, made of the log of share {LEARNED:g}, searched by the logs of all shares: with a memory "
        f"in front so many times fewer FLOPs at recall@10 {RECALL:g} than alone: {by_share}. It knows one "
        "log only: where more comes again than in that, the memory gains more before it than before an index "
        "that was fitted to the log.",
        f"In FLOPs that memory pays from a share of {min(paying):g} on."
        if paying
        else "In FLOPs that memory does not pay at any share.",
    ]
    for way, claimed in CLAIMED.items():
        of_way = {target: gains(values, way, IVF, target) for target in TARGETS}
        reached = [(gain, share, target) for target, one in of_way.items() for share, gain in one.items()]
        if not reached:
            evidence = f"{way}: it reaches none of these recalls"
        else:
            gain, share, target = max(reached)
            paying = [share for gain, share, _ in reached if gain > CLEARLY]
            against = gains(values, MEMORY, way, target)[share]
            evidence = (
                f"{way}: at best {gain:.2f} times fewer FLOPs than FAISS IVF searched with x (recall@10 "
                f"{target:g}, share {share:g}); it pays "
                + (f"from a share of {min(paying):g} on" if paying else "at no share")
                + f", and the graph with a memory needs {against:.1f} times fewer than it there"
            )
        cheaper = bool(reached) and max(reached)[0] > CLEARLY
        said.append(Claim(*claimed, cheaper, evidence, BY_TIME))
    return said


def summarize(workspace: Workspace, task: Task, values: dict[str, Any], about: dict[str, Any]) -> Summary:
    """Tables and charts of what was measured."""
    recalled = [one["memory"] for one in values.values() if "memory" in one]
    looking = max((one["looking"] for one in recalled), default=0.0)
    said, support = findings(values), about["support"]
    return Summary(
        name="repeats",
        title="When a memory of the log pays",
        verdict=verdict(said),
        tables=[
            fit_table(values, about["fit_minutes"]),
            *(_cost_table(values, target) for target in TARGETS[::-1]),
            _memory_table(values),
            _time_table(values),
        ],
        charts=[
            Chart(
                "repeats",
                "What a query costs by how much traffic comes again",
                [_panel(values, target) for target in TARGETS],
                "Lower is better. A line ends where a way does not reach the recall.",
            )
        ],
        facts=[
            ("keys", f"{task.n:,} of dimension {task.d}"),
            (
                "log",
                f"{len(task.train):,} rows to learn from, then {len(task.val):,} to choose by, "
                f"then {len(task.test):,} to report on",
            ),
        ],
        method=[
            f"A row of a log asks, with a probability from 0 to 1, one of "
            f"{about['popular']:,} popular queries, drawn by a Zipf law (1 / rank), with noise of sigma "
            f"{NOISE} a coordinate, at norm 1; every other row asks a query that was never asked. Train, val "
            "and test are the log in this order; each popular query is among its "
            "first rows. FLOPs are a share of a full scan, the network and the look-up included, at a mean "
            "recall@10 on test; fronts over probes, margins and numbers of cells.",
            "Of `fit` each share has an index of its own. In the other tables graph, cells and router are "
            f"made of one log, of share {LEARNED:g}, and fitted to the val rows of each; "
            "what is new in held-out rows is in none of it. The memory of a share: the distinct rows of its "
            f"train with {DEPTH} top keys each; a look-up costs up to {looking:.2%} of a full scan, which a "
            "hash of exact repeats would save for those alone. The memory alone answers every query by what "
            "the nearest logged one found, however near that is: one recall, which more work does not raise.",
            f"One KeyNet {about['size']}, depth 4, was trained on the log of share 1, "
            f"{about['samples']:,} samples: only queries that come again, its best case; it serves every "
            f"share. Its prediction costs {about['network_flops']:.2%} of a full scan. So did a SupportNet "
            f"{about['size']}, {support['samples']:,} samples with 1,000 times the weight of the score (see "
            f"routing128), which chooses among {support['cells']} plain cells; x scores. Its scores cost "
            f"{support['network_flops']:.2%}. It learned from {support['samples_a_second']:,.0f} samples a "
            f"second, KeyNet from {support['samples_a_second_of_keynet']:,.0f}.",
        ],
        command=workspace.command("repeats"),
        machine=describe_machine(),
        values={"shares": values, **about, **claim_values(said)},
    )


def _percent(cost: float | None) -> str:
    return "" if cost is None else f"{cost:.2%}"


def _cost_table(values: dict[str, Any], target: float) -> Table:
    rows = []
    for way in WAYS:
        costs = [one["costs"].get(way) for one in values.values()]
        cells = ["not run" if c is None else _percent(c[f"{target:g}"]) or "not reached" for c in costs]
        rows.append([way, *cells])
    gained = gains(values, MEMORY, GRAPH, target)
    cells = [f"{gained[float(s)]:.2f}x" if float(s) in gained else "" for s in values]
    rows.append(["fewer FLOPs with the memory", *cells])
    head = ["share that comes again", *values]
    return Table(f"FLOPs at recall@10 {target:g}, of a full scan", head, rows)


def _memory_table(values: dict[str, Any]) -> Table:
    head = [
        "share that comes again",
        "look-up",
        "recognised of what came before",
        "of what is new",
        "recall@10",
        "served",
    ]
    rows = []
    for share, one in values.items():
        memory = one.get("memory")
        if memory is None:
            rows.append([share, "no memory: it does not pay on val", "", "", "", ""])
            continue
        fractions = [f"{memory[name]:.1%}" for name in ("again_recognised", "new_recognised")]
        rows.append(
            [
                share,
                _percent(memory["looking"]),
                *fractions,
                f"{memory['recall']:.3f}",
                f"{one['served']:.3f}",
            ]
        )
    note = "Recall@10: of what the memory answers. Served: of all test queries, asked for 0.95."
    return Table("What the memory recognises", head, rows, note)


def _time_table(values: dict[str, Any]) -> Table:
    rows = []
    for way in (way for way in WAYS if way != DROP_IN):
        for place, kind in enumerate(KINDS):
            times = [one["times"].get(way) for one in values.values()]
            rows.append([way, kind, *("" if t is None else f"{1e6 * t[place]:,.0f} us" for t in times)])
    head = ["share that comes again", "a query", *values]
    note = (
        f"Asked for recall@10 {RECALL:g}, which is then kept with 95 % confidence; the memory alone has the "
        f"recall that it has. On one thread, in turns: of each query, and of each batch of {BATCH}, the "
        f"least of {ROUNDS}, on a machine that others used, too. KeyNet as drop-in reaches none of "
        "the recalls and has no time."
    )
    return Table("Time of a query", head, rows, note)


def _panel(values: dict[str, Any], target: float) -> Panel:
    series = []
    for way in WAYS:
        pairs = [
            (float(share), 100 * one["costs"][way][f"{target:g}"])
            for share, one in values.items()
            if one["costs"].get(way, {}).get(f"{target:g}") is not None
        ]
        if pairs:
            x, y = (list(side) for side in zip(*pairs, strict=True))
            series.append(Series(way, x, y, group="baseline" if way == IVF else "contender"))
    title, y_label = f"recall@10 {target:g}", "FLOPs, % of a full scan"
    return Panel(title, "share of traffic that comes again", y_label, series, log_y=True)
