"""What the paper says of routing, held against routers over the same cells."""

import math
from dataclasses import dataclass

import numpy as np

from amips.bench import Array, Bootstrap, Family, Measured, Ratio, in_words
from amips.task import BY_SOURCE
from paper.claims import Claim, Finding, all_of, decided

WHERE, WHERE_128 = "Section 4.3, Figure 3", "Section 4.3, Figure 4"
GAIN, GAIN_128 = 0.10, 0.16  # the paper's gain at k = 1: "at least 10 points", with 128 cells 16
NEAR = 0.98  # accuracy from here on is near 100 %
LITTLE = 0.02  # accuracies this near to each other are alike
LEVELS = (0.95, 0.9, 0.8)  # the accuracy whose cost is compared: the first that centroids surely reach,
ROOM = 0.02  # ... by this much on val
AS_PUBLISHED = "with the published code's weight of the score loss"
MOST, ABOUT_4 = 0.95, 3.0  # the accuracy that takes "roughly 4 times" fewer FLOPs with 128 cells: 3 at least
FEW, MANY = 4, 16  # of 128 cells: SupportNet with the first finds what centroids find with the second


@dataclass(frozen=True)
class Comparison:
    """Routers over the same cells, by name, on test and on val.

    Args:
        base, base_on_val: what centroids do.
        test, val: every learned router.
        kinds: "SupportNet" or "KeyNet" for each of these that is a network.
        shapes: (kind, size and loss) of each network: those of one shape differ in depth and injections
            alone.
        scored: the networks whose score loss weighs more than in the published code.
        bootstrap: draws of the test queries.
        full_scan: FLOPs of scoring every key.
    """

    base: Family
    base_on_val: Family
    test: dict[str, Family]
    val: dict[str, Family]
    kinds: dict[str, str]
    shapes: dict[str, tuple[str, str]]
    scored: frozenset[str]
    bootstrap: Bootstrap
    full_scan: float

    def best(self, kind: str | None = None) -> str:
        """The router that finds most at k = 1 on val: of one kind, or of all."""
        names = [name for name in self.val if kind is None or self.kinds.get(name) == kind]
        return max(names, key=lambda name: accuracies(self.val[name])[0])

    def gain(self, name: str, k: int = 1, base_k: int = 1) -> "Gain":
        """Accuracy of a router with k cells minus that of the centroids with `base_k`."""
        ours, theirs = hits(self.test[name], k), hits(self.base, base_k)
        low, high = self.interval(ours - theirs)
        return Gain(float((ours - theirs).mean()), low, high)

    def interval(self, values: Array) -> tuple[float, float]:
        """A 95 % interval of the mean of one value for each test query."""
        low, high = np.quantile(self.bootstrap.weights @ values, (0.025, 0.975))
        return float(low), float(high)

    @property
    def level(self) -> float:
        """The accuracy whose cost is compared."""
        most = max(accuracies(self.base_on_val))
        return next((level for level in LEVELS if most >= level + ROOM), LEVELS[-1])

    def gain_for_its_flops(self, name: str, k: int) -> "Gain":
        """What a router finds in k cells minus what the centroids find for as many FLOPs, interpolated."""
        costs = flops(self.base)
        columns = [hits(self.base, run.run.budget) for run in by_budget(self.base)]
        run = next(run for run in by_budget(self.test[name]) if run.run.budget == k)
        cost = run.cost("flops")
        assert cost is not None
        place = float(np.interp(cost.mean(), costs, np.arange(len(costs))))
        below, above = columns[math.floor(place)], columns[math.ceil(place)]
        values = hits(self.test[name], k) - (below + (place % 1) * (above - below))
        return Gain(float(values.mean()), *self.interval(values))

    def ratio(self, name: str) -> Ratio | None:
        """How many times fewer FLOPs than centroids a router needs for the accuracy that is compared."""
        return self.bootstrap.ratio(self.base, self.test[name], "flops", "recall@1", self.level)


@dataclass(frozen=True)
class Gain:
    """A difference of accuracies with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """In points of accuracy, with the interval."""
        return (
            f"{100 * self.value:+.1f} points, 95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        )


def by_budget(family: Family) -> list[Measured]:
    """The runs of a family, by the number of cells searched."""
    return sorted(family.runs, key=lambda run: run.run.budget)


def accuracies(family: Family) -> list[float]:
    """Routing accuracy by number of cells."""
    return [float(run.metric("recall@1").mean()) for run in by_budget(family)]


def flops(family: Family) -> list[float]:
    """FLOPs of a query by number of cells."""
    costs = [run.cost("flops") for run in by_budget(family)]
    return [float(cost.mean()) for cost in costs if cost is not None]


def hits(family: Family, k: int) -> Array:
    """For each query whether its top key is in the k cells searched."""
    return next(run.metric("recall@1") for run in family.runs if run.run.budget == k)


def compare(routers: Comparison) -> list[Finding]:
    """10 cells: the best router, then the paper's claims of both networks."""
    findings = _headline(routers)
    for kind in dict.fromkeys(routers.kinds.values()):
        name = routers.best(kind)
        gain = routers.gain(name)
        findings.append(
            Claim(
                f"{kind} finds at least 10 points more than the centroids at k = 1",
                WHERE,
                decided(gain.low, gain.high, GAIN),
                f"{name} (of the {kind}s the best on val): {gain} against the centroids",
                value=gain.value,
                low=gain.low,
                high=gain.high,
            )
        )
        findings.append(_cost_claim(routers, kind, name))
        last = by_budget(routers.test[name])[-1]
        low, high = routers.interval(last.metric("recall@1"))
        findings.append(
            Claim(
                f"{kind} comes near 100 % at k = 5",
                WHERE,
                decided(low, high, NEAR),
                f"{name} finds {last.metric('recall@1').mean():.1%} at k = {last.run.budget}, 95 % interval "
                f"{low:.1%} to {high:.1%}",
                value=float(last.metric("recall@1").mean()),
                low=low,
                high=high,
            )
        )
    text = "SupportNet finds at least 10 points more than the centroids at k = 1"
    return findings + _as_published(routers, text, WHERE, GAIN) + _shape_claims(routers)


def _as_published(routers: Comparison, text: str, where: str, least: float) -> list[Finding]:
    """The claim of SupportNets whose score loss weighs what it does in the published code, by itself.

    Only where others weigh it more: those are then the best, and the claim above is of them.
    """
    kept = [
        name for name, kind in routers.kinds.items() if kind == "SupportNet" and name not in routers.scored
    ]
    if not routers.scored or not kept:
        return []
    name = max(kept, key=lambda name: accuracies(routers.val[name])[0])
    gain = routers.gain(name)
    evidence = f"{name}: {gain} against the centroids"
    end = decided(gain.low, gain.high, least)
    figures = (gain.value, gain.low, gain.high)
    return [Claim(f"{text}, {AS_PUBLISHED}", where, end, evidence, BY_SOURCE, *figures)]


def _cost_claim(routers: Comparison, kind: str, name: str) -> Claim:
    ratio, level = routers.ratio(name), f"For {routers.level:.0%} accuracy"
    text = f"{kind} needs fewer FLOPs than the centroids for the same accuracy"
    if ratio is None:
        missed = math.isnan(routers.base.cost_at("flops", "recall@1", routers.level))
        who = "the centroids do" if missed else f"{name} does"
        return Claim(text, WHERE, None if missed else False, f"{level}: {who} not reach it")
    reproduced = True if ratio.better else False if ratio.worse else None
    return Claim(
        text,
        WHERE,
        reproduced,
        f"{level} {name} needs {in_words(ratio, 'FLOPs', 'fewer', 'more')}, ratio {ratio}",
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
    )


def _shape_claims(routers: Comparison) -> list[Finding]:
    """Whether depth and injections matter, of the shapes that there are several of."""
    findings: list[Finding] = []
    for shape in dict.fromkeys(routers.shapes.values()):
        alike = {
            name: accuracies(routers.test[name])[0] for name, own in routers.shapes.items() if own == shape
        }
        if len(alike) < 2:
            continue
        low, high = min(alike.values()), max(alike.values())
        drawn = np.array([routers.bootstrap.weights @ hits(routers.test[name], 1) for name in alike])
        least, most = (float(end) for end in np.quantile(np.ptp(drawn, axis=0), (0.025, 0.975)))
        findings.append(
            Claim(
                "depth and re-injections have little impact",
                WHERE,
                # The largest and the smallest of equal ones differ, too: only what is more decides.
                True if most <= LITTLE else False if least > LITTLE else None,
                f"{' '.join(shape)}: {low:.1%} to {high:.1%} at k = 1 over {len(alike)} depths and "
                f"injections, {100 * (high - low):.1f} points apart ({100 * least:.1f} to {100 * most:.1f})",
                value=high - low,
                low=least,
                high=most,
            )
        )
    return findings


def compare_128(routers: Comparison) -> list[Finding]:
    """128 cells: the best router, then the paper's claims of its SupportNet."""
    findings = _headline(routers)
    name = routers.best("SupportNet")
    gain = routers.gain(name)
    findings.append(
        Claim(
            "with 128 cells SupportNet finds 16 points more than the centroids at k = 1 (72 % against 56 %)",
            WHERE_128,
            decided(gain.low, gain.high, GAIN_128),
            f"{name}: {gain} against the centroids",
            value=gain.value,
            low=gain.low,
            high=gain.high,
        )
    )
    text = "with 128 cells SupportNet finds 16 points more than the centroids at k = 1"
    findings += _as_published(routers, text, WHERE_128, GAIN_128)
    if MANY in [run.run.budget for run in by_budget(routers.base)]:
        gain = routers.gain(name, FEW, MANY)
        findings.append(
            Claim(
                f"with 128 cells SupportNet reaches with {FEW} cells what the centroids reach with {MANY}",
                WHERE_128,
                decided(gain.low, gain.high, 0),
                f"{name} with {FEW} cells minus the centroids with {MANY}: {gain}",
                value=gain.value,
                low=gain.low,
                high=gain.high,
            )
        )
    return [*findings, _low_budgets_claim(routers, name), _fourfold_claim(routers, name)]


def _low_budgets_claim(routers: Comparison, name: str) -> Claim:
    """Whether a router finds more than the centroids do for as many FLOPs, wherever it searches few cells."""
    few = [run.run.budget for run in by_budget(routers.test[name]) if run.run.budget <= FEW]
    gains = {k: routers.gain_for_its_flops(name, k) for k in few}
    least = min(gains.values(), key=lambda gain: gain.value)
    said = "; ".join(f"k = {k}: {gain}" for k, gain in gains.items())
    return Claim(
        "with 128 cells SupportNet finds more than the centroids for the same FLOPs, wherever these are few",
        WHERE_128,
        all_of(decided(gain.low, gain.high, 0) for gain in gains.values()),
        f"{name} minus the centroids at its own FLOPs: {said}",
        value=least.value,
        low=least.low,
        high=least.high,
    )


def _fourfold_claim(routers: Comparison, name: str) -> Claim:
    """Whether a router saves as many FLOPs as the paper says."""
    text = f"with 128 cells SupportNet needs about 4 times fewer FLOPs than the centroids for {MOST:.0%}"
    reached = [
        not math.isnan(family.cost_at("flops", "recall@1", MOST))
        for family in (routers.base, routers.test[name])
    ]
    ratio = routers.bootstrap.ratio(routers.base, routers.test[name], "flops", "recall@1", MOST)
    if ratio is None:
        who = "the centroids do" if not reached[0] else f"{name} does"
        return Claim(
            text, WHERE_128, False if reached == [True, False] else None, f"{who} not reach it surely"
        )
    low, high = (end if end is not None else math.nan for end in (ratio.low, ratio.high))
    return Claim(
        text,
        WHERE_128,
        decided(low, high, ABOUT_4),
        f"For {MOST:.0%} {name} needs {in_words(ratio, 'FLOPs', 'fewer', 'more')}, ratio {ratio}",
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
    )


def _headline(routers: Comparison) -> list[Finding]:
    """The learned router that was best on val against the centroids, and which routers surely differ."""
    best = routers.best()
    gains = {name: routers.gain(name) for name in routers.test}
    gain, first = gains[best], accuracies(routers.base)[0]
    sure = "" if gain.low > 0 or gain.high < 0 else " (no sure difference)"
    costs = [flops(family)[0] / routers.full_scan for family in (routers.base, routers.test[best])]
    count = len(hits(routers.base, by_budget(routers.base)[0].run.budget))
    findings: list[Finding] = [
        f"In the best cell alone (k = 1) the centroids find {first:.1%} of the top keys of "
        f"{count:,} held-out queries; the learned router that was best on val, {best}, "
        f"finds {first + gain.value:.1%}: {gain}{sure}, for {costs[1]:.1%} instead of {costs[0]:.1%} "
        "of the FLOPs of a full scan."
    ]
    every = "; ".join(f"{name} {one}" for name, one in gains.items())
    findings.append(f"Gains over the centroids at k = 1: {every}.")
    if (ratio := routers.ratio(best)) is not None and routers.kinds.get(best) is None:
        said = in_words(ratio, "FLOPs", "fewer", "more")
        findings.append(f"For {routers.level:.0%} accuracy {best} needs {said}, ratio {ratio}.")
    return findings
