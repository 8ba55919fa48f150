"""How much of an index a search looks at: the one rule for `recall`, `probes` and `min_mass`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from amips.arguments import check_number
from amips.errors import AmipsError
from amips.search.points import Point, point_for


class Measured(Protocol):
    """What is known of an index that searches."""

    @property
    def points(self) -> Sequence[Point]:
        """Recall and cost on held-out queries, by effort."""
        ...

    @property
    def target_recall(self) -> float | None:
        """What is served when nothing is asked for."""
        ...

    @property
    def temperature(self) -> float:
        """Of the stopping rule; 0 if it is not known."""
        ...


@dataclass(frozen=True)
class Effort:
    """A number of probes (one, or [m]), or a bound on the mass; and how many candidates codes are asked for.

    `refine` None leaves that to the index; 0 scores every key itself. `asked`: it was asked for as it is, not
    chosen for a recall, and stays what it is behind a filter.
    """

    probes: Any = None
    min_mass: float | None = None
    refine: int | None = None
    asked: bool = False

    def of_rows(self, rows: slice) -> "Effort":
        """The same for some of the queries, where each has a number of probes of its own."""
        return replace(self, probes=self.probes[rows]) if np.ndim(self.probes) else self


def effort_of(point: Point) -> Effort:
    """The effort that a point of cells was measured at."""
    if not point.min_mass:
        return Effort(point.probes, refine=point.refine)
    return Effort(None, point.min_mass, point.refine)


def effort_for(
    index: Measured,
    probes: Any,
    recall: float | None,
    min_mass: float | None,
    k: int,
    best_effort: bool = False,
    default: Any = None,
) -> Effort:
    """The effort for what was asked; AmipsError if that cannot be.

    `default` is the number of probes where nothing was asked and nothing was measured.
    """
    asked = (probes is not None) + (recall is not None) + (min_mass is not None)
    if asked > 1:
        raise AmipsError("give one of recall, probes and min_mass")
    if asked == 0:
        recall = index.target_recall
        if recall is None:
            if default is None:
                raise AmipsError("nothing was measured on this index: give probes")
            return Effort(default, asked=True)
    if probes is not None:
        return Effort(probes, asked=True)
    refine = None
    if recall is not None:
        effort = effort_of(point_for(index.points, recall, k, best_effort))
        if not effort.min_mass:
            return effort
        min_mass, refine = effort.min_mass, effort.refine
    bound = check_number("min_mass", min_mass, above=0, most=1, what="a share of the top keys,")
    if not index.temperature > 0:
        raise AmipsError("this index does not know what mass a cell holds: give probes")
    return Effort(None, bound, refine, asked=recall is None)
