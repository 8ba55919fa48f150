"""What was measured when an index was chosen: kept in its bundle, shown by `amips info`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from amips.errors import BundleError
from amips.tables import text_table


@dataclass(frozen=True)
class Report:
    """What `amips.fit` found.

    Args:
        recall, objective: what was asked for: the recall@10 at which this cost is to be least.
        baseline, chosen: designs, in words: the best plain IVF, and what the bundle holds.
        head, rows: a table of costs on test queries that nothing was chosen by.
        trials: what was tried: a design in words, and its cost on val.
        notes: what else was said.
    """

    recall: float
    objective: str
    baseline: str
    chosen: str
    head: list[str]
    rows: list[list[str]]
    trials: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Costs at some recalls, for a terminal."""
        return text_table(self.head, self.rows)

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen}", f"against: {self.baseline}", "", self.table(), "", *self.notes]
        return "\n".join(lines).rstrip()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Report":
        """The inverse of `to_json`; raises BundleError on anything else."""
        try:
            trials = [(str(design), str(cost)) for design, cost in values["trials"]]
            rows = [[str(cell) for cell in row] for row in values["rows"]]
            return cls(**{**values, "trials": trials, "rows": rows})
        except (TypeError, KeyError, ValueError) as problem:
            raise BundleError(f"not a report: {problem}") from None
