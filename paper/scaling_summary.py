"""What the experiment on scaling says: growth as powers of n, tables, a chart, findings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amips.bench import SMALL, Chart, Metric, Panel, Series, Table
from paper.claims import Claim, Finding, all_of, decided
from paper.search_runs import CLEARLY, shown

WHERE = "Appendix A.9, Figure 28"
METRIC: Metric = "recall@0.1%"
LEVEL = 0.9
ORIGINAL, MAPPED, ROUTED, LINEAR, AMIPS = "original", "mapped", "routed", "linear", "own"
WAYS = {
    ORIGINAL: "x",
    MAPPED: "mapped (drop-in)",
    ROUTED: "routed by KeyNet XS",
    LINEAR: "routed linearly",
    AMIPS: "amips",
}
PAPER = (
    "The paper (BioASQ, 15M keys; figures, no table): mapped queries dominate in the middle of the budgets "
    "as they do with fewer keys, and the gap to the original query does not collapse; recall curves lie "
    "lower."
)


@dataclass(frozen=True)
class Growth:
    """y = factor n^exponent, and the largest relative distance of a point from it."""

    factor: float
    exponent: float
    off: float


def growth_of(n: Sequence[float], y: Sequence[float]) -> Growth | None:
    """Least squares of log y over log n; None unless there are two points above 0."""
    known = [(a, b) for a, b in zip(n, y, strict=True) if b > 0 and math.isfinite(b)]
    if len({a for a, _ in known}) < 2:
        return None
    logs = np.log(np.array(known, np.float64))
    exponent, constant = np.polyfit(logs[:, 0], logs[:, 1], 1)
    off = np.exp(np.abs(logs[:, 1] - exponent * logs[:, 0] - constant)).max() - 1
    return Growth(float(np.exp(constant)), float(exponent), float(off))


def _fewer(row: dict[str, Any], name: str) -> float | None:
    """How many times fewer FLOPs than x a way needs at the recall that is compared."""
    theirs, own = row["flops"][ORIGINAL], row["flops"][name]
    return None if theirs is None or own is None else theirs / own


MEASURES: dict[str, Any] = {
    "labelling, seconds": lambda row: row["labelling seconds"],
    "labelling, memory": lambda row: row["labelling memory"],
    "training, seconds a million samples": lambda row: row["training seconds"],
    "network, bytes": lambda row: row["network bytes"],
    "index, bytes": lambda row: row["index bytes"],
    "index of amips, bytes": lambda row: row["own bytes"],
    **{
        f"FLOPs at {METRIC} = {LEVEL}, {way}": (lambda row, name=name: row["flops"][name])
        for name, way in WAYS.items()
    },
    **{
        f"keys scanned at {METRIC} = {LEVEL}, {way}": (lambda row, name=name: row["scanned"][name])
        for name, way in WAYS.items()
    },
}
MEMORY = ("labelling, memory", "index, bytes", "index of amips, bytes", "network, bytes")


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def growth_table(values: dict[str, Any]) -> Table:
    """How each measure grows with the number of keys: the exponent of a power law, and its last value."""
    rows = []
    last = values["rows"][-1]
    for what, pick in MEASURES.items():
        power = values["growth"][what]
        exponent = "-" if power is None else f"{power['exponent']:.2f}"
        off = "-" if power is None else f"{power['off']:.0%}"
        rows.append([what, exponent, off, shown(pick(last))])
    head = ["what", "grows as n to the power", "points off the fit by at most", f"at n = {last['n']:,}"]
    note = "A dash where fewer than two numbers of keys gave a value: not reached, or not measured."
    return Table("Growth", head, rows, note)


def by_n_table(values: dict[str, Any]) -> Table:
    """A line for each number of keys."""
    rows = []
    control = values["control"]
    for row in [*values["rows"], *([] if control is None else [control])]:
        recalls = [shown(row["recall"][name], ".3f") for name in WAYS]
        rows.append(
            [
                f"{row['n']:,}" + (", of the data alone" if row is control else ""),
                f"{row['labelling seconds']:.3g} ({_megabytes(row['labelling memory'])})",
                f"{row['training seconds']:.3g}",
                f"{row['samples'] / 1e6:.3g}",
                f"{row['erel']:.3f}",
                f"{row['mrr']:.3f}",
                shown(None if (cost := row["flops"][ORIGINAL]) is None else cost / row["full scan"], ".2%"),
                shown(row["cells of x"], ","),
                " / ".join(recalls),
                " / ".join(shown(_fewer(row, name), ".2f") for name in (ROUTED, LINEAR, AMIPS)),
                shown(row["lead"][MAPPED], "+.3f"),
                " / ".join(_megabytes(row[what]) for what in ("index bytes", "own bytes", "network bytes")),
            ]
        )
    head = [
        "keys",
        f"labelling {values['labelled']:,} queries, s (MB)",
        "training, s a million samples",
        "million samples",
        "erel",
        "MRR",
        f"FLOPs of x at {LEVEL:.2f}, of a full scan",
        "with so many cells",
        f"{METRIC} at that cost: " + " / ".join(WAYS.values()),
        f"times fewer FLOPs than x at {LEVEL:.2f}: " + " / ".join(WAYS[n] for n in (ROUTED, LINEAR, AMIPS)),
        "lead of mapped",
        "index / amips's index / network, MB",
    ]
    return Table("At every number of keys", head, rows, PAPER)


def growth_chart(values: dict[str, Any]) -> Chart:
    """Time, cost and memory over n."""
    ns = [float(row["n"]) for row in values["rows"]]

    def line(name: str, what: str, unit: float = 1.0) -> Series:
        measured = [MEASURES[what](row) for row in values["rows"]]
        known = [(n, unit * value) for n, value in zip(ns, measured, strict=True) if value is not None]
        group: Any = "baseline" if name == WAYS[ORIGINAL] else "contender"
        return Series(name, [n for n, _ in known], [value for _, value in known], group=group)

    labelled = f"labelling {values['labelled']:,} queries"
    lines = [
        (
            "time",
            "seconds",
            [
                line(labelled, "labelling, seconds"),
                line("training, a million samples", "training, seconds a million samples"),
            ],
        ),
        (
            "cost",
            f"FLOPs at {METRIC} = {LEVEL}",
            [line(way, f"FLOPs at {METRIC} = {LEVEL}, {way}") for way in WAYS.values()],
        ),
        (
            "memory",
            "MB",
            [line(name, name, 1e-6) for name in MEMORY],
        ),
    ]
    panels = [
        Panel(title, "keys", label, [one for one in series if one.x], log_x=True, log_y=True)
        for title, label, series in lines
    ]
    return Chart("scaling", "Growth with the number of keys", panels, "Straight lines are powers of n.")


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times fewer" if ratio >= 1 else f"{1 / ratio:.2f} times more"


def findings(values: dict[str, Any]) -> list[Finding]:
    """What grows how, what learning is worth on the way, and what the paper says of it."""
    rows, grows, control = values["rows"], values["growth"], values["control"]
    first, last = rows[0], rows[-1]

    def power(what: str) -> str:
        return "an unknown power of n" if grows[what] is None else f"n^{grows[what]['exponent']:.2f}"

    among = "" if control is None else " (generated ones among them)"
    costs = {name: f"FLOPs at {METRIC} = {LEVEL}, {way}" for name, way in WAYS.items()}
    parts = [
        f"{WAYS[name]} {power(what)}" if grows[what] is not None else f"{WAYS[name]} does not reach it"
        for name, what in costs.items()
    ]
    sentences = [
        f"From {first['n']:,} to {last['n']:,} keys{among}, "
        f"labelling a query grows as {power('labelling, seconds')}, training KeyNet XS on a sample as "
        f"{power('training, seconds a million samples')}, the memory of the index as "
        f"{power('index, bytes')}.",
        f"FLOPs for {METRIC} = {LEVEL:.2f} grow with the number of keys: {', '.join(parts)}.",
    ]
    sentences += [_worth(first, last, name) for name in (AMIPS, LINEAR, ROUTED) if _known(first, last, name)]
    if control is not None:
        sentences += _beside(rows, control)
    return [*sentences, _lead_claim(rows)]


def _known(first: dict[str, Any], last: dict[str, Any], name: str) -> bool:
    return _fewer(first, name) is not None and _fewer(last, name) is not None


def _worth(first: dict[str, Any], last: dict[str, Any], name: str) -> str:
    """What a way saves over x at the fewest keys and at the most."""
    before, after = _fewer(first, name), _fewer(last, name)
    assert before is not None
    assert after is not None
    trend = "grows" if after > before else "shrinks"
    if abs(after / before - 1) <= SMALL:
        trend = "stays about the same"
    return (
        f"Against x, {WAYS[name]} needs {_times(before)} FLOPs at {first['n']:,} keys and "
        f"{_times(after)} at {last['n']:,}: with n, what it is worth {trend}."
    )


def _beside(rows: list[dict[str, Any]], control: dict[str, Any]) -> list[str]:
    """The keys of the data alone beside about as many with generated ones among them."""
    of_data = _fewer(control, AMIPS)
    known = {row["n"]: worth for row in rows if (worth := _fewer(row, AMIPS)) is not None}
    if of_data is None or not known:
        return []
    near = min(known, key=lambda n: abs(math.log(n / control["n"])))
    return [
        f"Of the {control['n']:,} keys of the data alone, amips needs {_times(of_data)} FLOPs than "
        f"x; of {near:,} keys with generated ones among them, {_times(known[near])}."
    ]


def _lead_claim(rows: list[dict[str, Any]]) -> Claim:
    """Not decided where a network is no nearer to the top keys than the query: it is untrained."""
    leads = [(row["n"], row["lead"][MAPPED]) for row in rows]
    known = [(n, value) for n, value in leads if value is not None]
    words = ", ".join(f"{100 * value:+.1f} points at {n:,}" for n, value in known) or "nowhere comparable"
    untrained, without = [row for row in rows if row["erel"] >= 0], ""
    if untrained:
        without = "; untrained (erel of 0 and more): " + ", ".join(
            f"{row['n']:,} keys, {row['samples'] / 1e6:.2g} million samples" for row in untrained
        )
    intervals = [row.get("lead interval", {}).get(MAPPED) for row in rows]
    if len(known) < len(leads):
        ahead: bool | None = False
    elif None in intervals:
        ahead = all(value > CLEARLY for _, value in known)
    else:
        ahead = all_of(decided(low, high, CLEARLY) for low, high in intervals)
        words = ", ".join(
            f"{100 * value:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}) at {n:,}"
            for (n, value), (low, high) in zip(known, intervals, strict=True)
        )
    return Claim(
        "mapped queries stay ahead in the middle of the budgets as n grows",
        WHERE,
        None if untrained else ahead,
        f"The mapped query's lead over x at equal FLOPs, in {METRIC}: {words}{without}",
        intervals=None not in intervals,
    )
