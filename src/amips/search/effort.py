"""How much of an index a search looks at: the one rule for `recall`, `probes` and `min_mass`."""

from typing import Any, Protocol

from amips.errors import AmipsError
from amips.search.points import Point, point_for


class Measured(Protocol):
    """What is known of an index that searches."""

    @property
    def points(self) -> list[Point]:
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


def effort_for(
    index: Measured, probes: Any, recall: float | None, min_mass: float | None, k: int, default: Any = None
) -> tuple[Any, float | None]:
    """(probes, None), or (None, the bound on the mass), for what was asked; AmipsError if that cannot be.

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
            return default, None
    if recall is not None:
        point = point_for(index.points, recall, k)
        probes, min_mass = (None, point.min_mass) if point.min_mass else (point.probes, None)
    if min_mass is None:
        return probes, None
    if not 0 < min_mass <= 1:
        raise AmipsError(f"min_mass={min_mass}: expected a share of the top keys, above 0 and up to 1")
    if not index.temperature > 0:
        raise AmipsError("this index does not know what mass a cell holds: give probes")
    return None, min_mass
