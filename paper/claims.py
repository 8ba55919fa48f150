"""What the paper says, as data: each claim with the place where it is made, and whether it held here."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amips.bench import Summary
from amips.errors import ResultsError
from amips.task import BY_SOURCE

CLAIMS = "claims"  # where the values of a summary keep them


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and what was measured of it.

    Args:
        text: what the paper says, in a few words.
        where: the section and the figure or table of the paper.
        held: True if it was measured here too, False if it was not; None if the measurement does not decide.
        evidence: what was measured, a clause without a full stop.
        split: how queries were held out: by "source", or by "rows", the paper's way, after noise was added.
        value: the figure that decides, where one does,
        low, high: ... and its 95 % interval.
        intervals: whether several figures decide, each by a 95 % interval of its own, which the evidence has.
    """

    text: str
    where: str
    held: bool | None
    evidence: str
    split: str = BY_SOURCE
    value: float | None = None
    low: float | None = None
    high: float | None = None
    intervals: bool = False

    @property
    def bare(self) -> bool:
        """Whether it was decided by figures without an interval."""
        return self.held is not None and self.low is None and not self.intervals

    @property
    def evidence_text(self) -> str:
        """The evidence, and that it has no interval where that is so."""
        return f"{self.evidence}; no interval" if self.bare else self.evidence

    @property
    def figure(self) -> str:
        """The figure that decides with its interval, "" where there is none."""
        if self.value is None:
            return ""
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def sentence(self) -> str:
        """The evidence, and what it says of the claim."""
        if self.held is None:
            return f"{self.evidence}: not decided (the paper: {self.text})."
        if self.held:
            return f"{self.evidence}: as in the paper ({self.text})."
        return f"{self.evidence}: not reproduced (the paper: {self.text})."


Finding = str | Claim  # what an experiment ends in: sentences, some of which test a claim


def verdict(findings: Sequence[Finding]) -> list[str]:
    """Findings as sentences."""
    return [finding.sentence() if isinstance(finding, Claim) else finding for finding in findings]


def claim_values(findings: Sequence[Finding]) -> dict[str, Any]:
    """The claims among the findings, for the values of a summary."""
    return {CLAIMS: [asdict(finding) for finding in findings if isinstance(finding, Claim)]}


def claims_of(summary: Summary) -> list[Claim]:
    """The claims that a summary tests, [] for one that tests none; ResultsError if they are damaged."""
    try:
        return [Claim(**values) for values in summary.values.get(CLAIMS, [])]
    except TypeError as problem:
        raise ResultsError(f"the summary of {summary.name} holds no readable claims: {problem}") from None


def all_of(ends: Iterable[bool | None]) -> bool | None:
    """Whether all of several things hold: not if one does not, None if one of the others is open."""
    known = list(ends)
    return False if False in known else None if None in known else True


def alike(low: float, high: float, most: float) -> bool | None:
    """Whether something is surely within `most` of 0, by its interval; False where it is surely beyond."""
    if -most <= low and high <= most:
        return True
    return False if low > most or high < -most else None


def decided(low: float, high: float, least: float) -> bool | None:
    """Whether something is at least `least`, by its interval: None where the interval leaves both open."""
    if low >= least:
        return True
    return False if high < least else None
