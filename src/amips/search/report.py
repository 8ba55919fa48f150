"""What was measured when an index was chosen: kept in its bundle, shown by `amips info`."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from amips.arguments import check_choice, check_flag, check_number, check_recall, check_whole, refused
from amips.design import Design
from amips.errors import AmipsError, BundleError
from amips.tables import text_table

Objective = Literal["flops", "latency", "throughput"]
SystemName = Literal["plain IVF", "best design"]
PLAIN: Final = "plain IVF"
BEST: Final = "best design"
SURE_COSTS = 1.5  # times the FLOPs at a mean recall, from which on it is said that being sure costs more


@dataclass(frozen=True)
class Row:
    """What a system costs at a recall, on test queries that nothing was chosen by.

    Args:
        system: "plain IVF" or "best design".
        recall: the recall@10 at which it is measured.
        flops: of a query, as a share of a full scan.
        scanned: keys of a query, as a share of all; a key in two cells counts twice.
        latency: seconds of a query that comes alone; None where no time was taken.
        throughput: seconds of a query among many; None likewise.
        served, served_flops: recall@10 and FLOPs of `search(recall=...)`, which keeps a margin; None, too.
    """

    system: SystemName
    recall: float
    flops: float
    scanned: float
    latency: float | None = None
    throughput: float | None = None
    served: float | None = None
    served_flops: float | None = None

    def __post_init__(self) -> None:
        check_choice("system", self.system, SystemName)
        check_recall(self.recall)
        for name in ("flops", "scanned"):
            check_number(name, getattr(self, name), least=0)
        for name in ("latency", "throughput", "served", "served_flops"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0)

    @property
    def costs_more_to_be_sure(self) -> bool:
        """Whether the margin that makes a recall sure takes half as much again, or more."""
        return self.served_flops is not None and self.served_flops > SURE_COSTS * self.flops

    def service(self) -> str:
        """What `search` serves when it is asked for this recall, for a terminal; nothing if not measured."""
        served, flops, latency, throughput = self.served, self.served_flops, self.latency, self.throughput
        if served is None or flops is None or latency is None or throughput is None:
            return ""
        return (
            f"{self.system}: asked for recall@10 {self.recall:g} it serves {served:.3f}, for {flops:.2%} of "
            f"a full scan; {1e6 * latency:,.0f} us for a query alone, {1e6 * throughput:,.0f} us among many"
        )


@dataclass(frozen=True)
class Trial:
    """A design that was tried, and its cost on the val queries.

    Args:
        cost: by the objective if `measured`, otherwise FLOPs: a share of a full scan, or seconds of a query;
            None if the recall is out of its reach.
        measured: on the index itself; otherwise estimated from the scores of its router.
    """

    design: Design
    cost: float | None
    measured: bool

    def __post_init__(self) -> None:
        if not isinstance(self.design, Design):
            raise refused("design", self.design, "a Design")
        if self.cost is not None:
            check_number("cost", self.cost, least=0)
        check_flag("measured", self.measured)


@dataclass(frozen=True)
class MemoryCost:
    """What an index costs at the recall asked for, without a memory of the log and with it, on val.

    Args:
        flops: of a query, as a share of a full scan.
        latency: seconds of a query that comes alone.
        throughput: seconds of a query among many.
    """

    flops: tuple[float, float]
    latency: tuple[float, float]
    throughput: tuple[float, float]

    def __post_init__(self) -> None:
        for name in ("flops", "latency", "throughput"):
            pair = getattr(self, name)
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise refused(name, pair, "two numbers")
            for number in pair:
                check_number(name, number, least=0)
            object.__setattr__(self, name, tuple(pair))

    def note(self) -> str:
        """All three, for a terminal; FLOPs and times need not agree."""
        flops = " and ".join(f"{share:.2%}" for share in self.flops)
        times = [
            f"{' and '.join(f'{1e6 * one:,.0f}' for one in pair)} us {kind}"
            for pair, kind in ((self.latency, "for a query alone"), (self.throughput, "among many"))
        ]
        text = f"without a memory of the log and with it, on val: {flops} of a full scan, {', '.join(times)}"
        slower = [pair[1] > pair[0] for pair in (self.latency, self.throughput)]
        if self.flops[1] < self.flops[0] and any(slower):
            text += '; fewer FLOPs, but not faster: objective="latency" or "throughput" decides by time'
        return text


@dataclass(frozen=True)
class Report:
    """What `amips.fit` measured, as numbers; its text is made from them.

    Args:
        recall, objective: what was asked for: the recall@10 at which this cost is to be least.
        best: the best design that uses the queries, and `cost`, what it costs by the objective on val; None
            if the recall is out of its reach.
        baseline: the best plain IVF, and `baseline_cost` likewise.
        rows: costs of both at some recalls, on test queries.
        plain_cells: the numbers of cells that plain IVF was tried with, and `untried_cells` those that there
            was no time for.
        trials: every design that was tried, in order.
        wanted: whether the structure of the best design was asked for: then plain IVF does not replace it.
        memory: what a memory of the log changes, where one is in front of the best design.
    """

    recall: float
    objective: Objective
    best: Design
    cost: float | None
    baseline: Design
    baseline_cost: float | None
    rows: list[Row] = field(default_factory=list)
    plain_cells: list[int] = field(default_factory=list)
    untried_cells: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    wanted: bool = False
    memory: MemoryCost | None = None

    def __post_init__(self) -> None:
        check_flag("wanted", self.wanted)
        check_recall(self.recall)
        check_choice("objective", self.objective, Objective)
        for name in ("cost", "baseline_cost"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0)
        for number in (*self.plain_cells, *self.untried_cells):
            check_whole("cells", number, 1)

    @property
    def pays(self) -> bool:
        """Whether the best design costs less than plain IVF on val."""
        return self.cost is not None and (self.baseline_cost is None or self.cost < self.baseline_cost)

    @property
    def design(self) -> Design:
        """What the index is made of."""
        return self.best if self.pays or self.wanted else self.baseline

    def gain(self, recall: float) -> float | None:
        """How many times fewer FLOPs the best design needs than plain IVF at a recall that has rows."""
        flops = {row.system: row.flops for row in self.rows if row.recall == recall}
        return flops[PLAIN] / flops[BEST] if len(flops) == 2 and flops[BEST] else None

    def table(self) -> str:
        """Costs at some recalls, for a terminal."""
        head = ["recall@10", f"FLOPs: {PLAIN}", BEST, f"keys: {PLAIN}", BEST, "fewer FLOPs"]
        lines = []
        for recall in sorted({row.recall for row in self.rows}):
            both = {row.system: row for row in self.rows if row.recall == recall}
            if (gain := self.gain(recall)) is not None:
                plain, best = both[PLAIN], both[BEST]
                shares = [f"{share:.2%}" for share in (plain.flops, best.flops, plain.scanned, best.scanned)]
                lines.append([f"{recall:.2f}" if recall == round(recall, 2) else f"{recall:g}", *shares])
                lines[-1].append(f"{gain:.2f}x")
        return text_table(head, lines)

    def notes(self) -> list[str]:
        """What it comes to, a line each."""
        costs = [cost_in_words(cost, self.objective) for cost in (self.baseline_cost, self.cost)]
        lines = [
            f"{self.objective} at recall@10 {self.recall:g} on val: {PLAIN} {costs[0]}; the {BEST} {costs[1]}"
        ]
        lines += [line for row in self.rows if (line := row.service())]
        if self.memory is not None and self.best.memory:
            lines.append(self.memory.note())
        if any(row.system == BEST and row.costs_more_to_be_sure for row in self.rows):
            lines.append(
                "few held-out queries: to be sure of the recall, search scans far more than the table says; "
                "with more queries in the log it scans less"
            )
        if not self.pays and self.wanted:
            lines.append("plain IVF costs less here: the bundle is a graph because a graph was asked for")
        elif not self.pays:
            lines.append("learning does not pay here: the bundle is plain IVF")
        return lines

    @property
    def against(self) -> str:
        """The baseline, in words: the best of which plain IVF."""
        numbers = sorted(self.plain_cells) or [self.baseline.cells]
        at_the_end = self.baseline.cells in (numbers[0], numbers[-1])
        more = " (with more time others may be better)" if self.untried_cells and at_the_end else ""
        return f"{PLAIN}, the best of {', '.join(f'{number:,}' for number in numbers)} cells{more}"

    def __str__(self) -> str:
        lines = [f"chosen: {self.design.describe()}", f"against: {self.against}"]
        return "\n".join([*lines, "", self.table(), "", *self.notes()])

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values |= {name: values[name].to_json() for name in ("best", "baseline")}
        values["rows"] = [asdict(row) for row in self.rows]
        values["memory"] = None if self.memory is None else asdict(self.memory)
        values["trials"] = [
            {"design": trial.design.to_json(), "cost": trial.cost, "measured": trial.measured}
            for trial in self.trials
        ]
        return values

    @classmethod
    def from_json(cls, values: Any) -> "Report":
        """The inverse of `to_json`; raises BundleError on anything else."""
        try:
            parts = dict(values)
            parts |= {name: Design.from_json(parts[name]) for name in ("best", "baseline")}
            parts |= {name: list(parts[name]) for name in ("plain_cells", "untried_cells")}
            parts["rows"] = [Row(**row) for row in parts["rows"]]
            if parts.get("memory") is not None:
                parts["memory"] = MemoryCost(**parts["memory"])
            parts["trials"] = [
                Trial(**{**trial, "design": Design.from_json(trial["design"])}) for trial in parts["trials"]
            ]
            return cls(**parts)
        except (TypeError, KeyError, ValueError, AmipsError) as problem:
            raise BundleError(f"not a report: {problem}") from None


def cost_in_words(cost: float | None, objective: str) -> str:
    """A cost by an objective, for a terminal."""
    if cost is None:
        return "does not reach it"
    return f"{cost:.2%} of a full scan" if objective == "flops" else f"{1e6 * cost:,.0f} us a query"
