"""Routers: a query in, one score for each cell out, and the best cells in order.

A router reads off where a query's best keys probably are. The plain one scores centroids; the learned
ones score cells with a network, or score centroids with the key that a network predicts.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from amips.errors import RunError
from amips.nets import Model
from amips.vectors import Floats

Factors = tuple[Floats, Floats | None]


class Router(Protocol):
    """Scores cells."""

    @property
    def name(self) -> str:
        """What it is, in a word."""
        ...

    @property
    def c(self) -> int:
        """The number of cells."""
        ...

    @property
    def network_flops(self) -> int:
        """FLOPs of the network for one query."""
        ...

    @property
    def coarse_flops(self) -> int:
        """FLOPs of scoring centroids for one query."""
        ...

    @property
    def flops(self) -> int:
        """Both together."""
        ...

    @property
    def floats(self) -> int:
        """About how many numbers are held at once for one query."""
        ...

    @property
    def factors(self) -> Factors | None:
        """W [c, r] and A [r, d], or None for A = 1, if the scores are W A x and no more; otherwise None."""
        ...

    def scores(self, x: Floats) -> Floats:
        """[m, d] -> [m, c], larger is better."""
        ...


@dataclass(frozen=True)
class CentroidRouter:
    """<x, centroid>: what FAISS IVF does, and the baseline."""

    centroids: Floats
    name = "centroid"
    network_flops = 0

    @property
    def c(self) -> int:
        """The number of cells."""
        return len(self.centroids)

    @property
    def coarse_flops(self) -> int:
        """2 c d."""
        return 2 * self.centroids.size

    @property
    def flops(self) -> int:
        """2 c d."""
        return self.coarse_flops

    @property
    def floats(self) -> int:
        """A score for each cell."""
        return self.c

    @property
    def factors(self) -> Factors | None:
        """The centroids."""
        return self.centroids, None

    def scores(self, x: Floats) -> Floats:
        """<x, centroid_j>."""
        return x @ self.centroids.T


@dataclass(frozen=True)
class CellRouter:
    """A network with an output for each cell: SupportNet, KeyNet with c > 1, or linear."""

    model: Model
    coarse_flops = 0

    @property
    def name(self) -> str:
        """The kind of network."""
        return self.model.architecture.kind

    @property
    def c(self) -> int:
        """The number of cells."""
        return self.model.c

    @property
    def network_flops(self) -> int:
        """One forward pass."""
        return self.model.architecture.score_flops

    @property
    def flops(self) -> int:
        """One forward pass."""
        return self.network_flops

    @property
    def floats(self) -> int:
        """The network's, and a score for each cell: a KeyNet's keys of all cells are far more than these."""
        return self.c + self.model.architecture.floats

    @property
    def factors(self) -> Factors | None:
        """The network's."""
        return self.model.factors

    def scores(self, x: Floats) -> Floats:
        """The network's scores."""
        return self.model.scores(x)


@dataclass(frozen=True)
class MapperRouter:
    """A network that predicts the top key; the centroids are scored with that instead of with x."""

    model: Model
    centroids: Floats
    factors = None

    @property
    def name(self) -> str:
        """The kind of network, as a mapper."""
        return f"{self.model.architecture.kind} mapper"

    @property
    def c(self) -> int:
        """The number of cells."""
        return len(self.centroids)

    @property
    def network_flops(self) -> int:
        """The prediction."""
        return self.model.architecture.key_flops()

    @property
    def coarse_flops(self) -> int:
        """2 c d."""
        return 2 * self.centroids.size

    @property
    def flops(self) -> int:
        """Both together."""
        return self.network_flops + self.coarse_flops

    @property
    def floats(self) -> int:
        """The network's, and a score for each cell."""
        return self.c + self.model.architecture.floats

    def scores(self, x: Floats) -> Floats:
        """<y^(x), centroid_j>."""
        return self.map(x) @ self.centroids.T

    def map(self, x: Floats) -> Floats:
        """The predicted top key, [m, d]."""
        return self.model.keys(x)[:, 0]


@dataclass(frozen=True)
class OwnRouter:
    """A router that was brought along: any object with `scores(x)`, [m, d] float32 -> [m, c], larger is
    better.

    The scores may be a numpy array or a torch tensor. An attribute `flops`, if it has one, is what scoring
    one query costs; otherwise its cost is not known, and counts as nothing.
    """

    model: Any
    c: int
    name = "own router"
    coarse_flops = 0
    factors = None

    @property
    def network_flops(self) -> int:
        """As it says; 0 if it does not."""
        return int(getattr(self.model, "flops", 0))

    @property
    def flops(self) -> int:
        """As it says; 0 if it does not."""
        return self.network_flops

    @property
    def floats(self) -> int:
        """A score for each cell; what else it holds is not known."""
        return self.c

    def scores(self, x: Floats) -> Floats:
        """Its scores, checked."""
        # A copy of what is read from a file: torch warns of memory that it could not write to.
        raw = self.model.scores(x if x.flags.writeable else np.array(x))
        scores = np.asarray(raw.detach().cpu() if hasattr(raw, "detach") else raw, np.float32)
        if scores.shape != (len(x), self.c):
            raise RunError(
                f"the router gave scores of shape {list(scores.shape)} for {len(x)} queries, "
                f"expected [{len(x)}, {self.c}]: one for each cell"
            )
        return scores


def check_fits(model: Any, keys: str, cells: str) -> None:
    """RunError unless the model was trained on these keys and, if it scores cells, on these cells.

    Of centroids (None) and of a router that was brought along nothing is known, and nothing is checked.
    """
    if not isinstance(model, Model):
        return
    if model.about.get("keys", keys) != keys:
        raise RunError("the model was trained on other keys")
    if model.c > 1 and model.about.get("cells", cells) != cells:
        raise RunError("the model was trained on other cells of these keys")


def router_for(model: Any, centroids: Floats) -> Router:
    """The way to route with a model over cells with these centroids; without a model, by centroid."""
    if model is None:
        return CentroidRouter(centroids)
    if not isinstance(model, Model):
        if not callable(getattr(model, "scores", None)):
            raise RunError(f"a {type(model).__name__} cannot route: it has no method scores(x)")
        return OwnRouter(model, len(centroids))
    if model.d != centroids.shape[1]:
        raise RunError(f"the model is for dimension {model.d}, the cells have dimension {centroids.shape[1]}")
    if model.c == 1:
        return MapperRouter(model, centroids)
    if model.c != len(centroids):
        raise RunError(f"the model scores {model.c} cells, but there are {len(centroids)}")
    return CellRouter(model)
