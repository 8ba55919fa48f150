"""Routers: a query in, one score for each cell out, and the best cells in order.

A router reads off where a query's best keys probably are. The plain one scores centroids; the learned
ones score cells with a network, or score centroids with the key that a network predicts.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.errors import RunError
from amips.nets import Model
from amips.vectors import Floats


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

    def scores(self, x: Floats) -> Floats:
        """The network's scores."""
        return self.model.scores(x)


@dataclass(frozen=True)
class MapperRouter:
    """A network that predicts the top key; the centroids are scored with that instead of with x."""

    model: Model
    centroids: Floats

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


def check_fits(model: Model, keys: str, cells: str) -> None:
    """RunError unless the model was trained on these keys and, if it scores cells, on these cells."""
    if model.about.get("keys", keys) != keys:
        raise RunError("the model was trained on other keys")
    if model.c > 1 and model.about.get("cells", cells) != cells:
        raise RunError("the model was trained on other cells of these keys")


def router_for(model: Model | None, centroids: Floats) -> Router:
    """The way to route with a model over cells with these centroids; without a model, by centroid."""
    if model is None:
        return CentroidRouter(centroids)
    if model.d != centroids.shape[1]:
        raise RunError(f"the model is for dimension {model.d}, the cells have dimension {centroids.shape[1]}")
    if model.c == 1:
        return MapperRouter(model, centroids)
    if model.c != len(centroids):
        raise RunError(f"the model scores {model.c} cells, but there are {len(centroids)}")
    return CellRouter(model)


def best_cells(scores: Floats, probes: int) -> NDArray[np.int64]:
    """The `probes` best cells of each row, best first, [m, probes]; ties go to the lower cell."""
    c = scores.shape[1]
    if probes >= c:
        return np.argsort(-scores, axis=1, kind="stable")
    if len(scores) == 1:  # one query: the calls are what costs, so as few as can be
        row = scores[0]
        reached = np.flatnonzero(row >= np.partition(row, c - probes)[c - probes])
        if len(reached) >= probes:  # fewer where scores are not numbers: the way for many takes those
            return reached[np.argsort(-row[reached], kind="stable")[:probes]][None]
    chosen = np.sort(np.argpartition(scores, c - probes, axis=1)[:, c - probes :], axis=1)
    # argpartition takes any of the cells that tie for the last place: such rows are sorted in full.
    last = np.take_along_axis(scores, chosen, axis=1).min(axis=1)
    tied = (scores >= last[:, None]).sum(axis=1) > probes
    if tied.any():
        chosen[tied] = np.sort(np.argsort(-scores[tied], axis=1, kind="stable")[:, :probes], axis=1)
    order = np.argsort(-np.take_along_axis(scores, chosen, axis=1), axis=1, kind="stable")
    return np.take_along_axis(chosen, order, axis=1)


def limit_probes(cells: NDArray[np.int64], probes: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Keep the first probes[i] cells of row i; the others become -1, which a scan skips."""
    return np.ascontiguousarray(np.where(np.arange(cells.shape[1]) < probes[:, None], cells, -1))


def cells_by_share(scores: Floats, temperature: float, share: float) -> NDArray[np.int64]:
    """Every cell that is expected to hold at least this share of a query's top keys; [m, p], -1 skips.

    softmax(scores / temperature)_j is the share that cell j is expected to hold. To scan a cell costs as
    many products as it has keys, whichever it is, so that a bound on the share, the same for all queries,
    finds the most for a given cost over all of them: easy queries end after a cell or two, hard ones go on.
    The best cell comes first, and is always taken; of one query the others follow in order.
    """
    high = scores.max(axis=1, keepdims=True)
    exponents = (scores - high) / np.float32(temperature)
    least = np.log(np.float32(max(share, 1e-30))) + np.log(np.exp(exponents).sum(axis=1, keepdims=True))
    taken, best = exponents >= least, scores.argmax(axis=1)
    taken[np.arange(len(scores)), best] = True  # one of those that tie: nothing asks for a scan of all
    if len(scores) == 1:  # FAISS keeps fewer candidates for a moment when the best cells come first
        found = np.flatnonzero(taken[0])
        return found[np.argsort(-scores[0, found], kind="stable")][None]
    rows, found = np.nonzero(taken)
    first = np.searchsorted(rows, np.arange(len(scores)))
    place = np.arange(len(rows)) - first[rows]
    cells = np.full((len(scores), int(place.max(initial=0)) + 1), -1, np.int64)
    cells[rows, place] = found
    swapped = cells == best[:, None]
    cells[swapped] = cells[:, 0]
    cells[:, 0] = best
    return cells


def fit_temperature(scores: Floats, cells: NDArray[np.integer[Any]]) -> float:
    """The temperature t at which softmax(scores / t) best predicts the cells [m, k] of the top keys.

    It has the least cross-entropy, over a grid of steps of 10 % around the spread of the scores.
    """
    spread = float(np.std(scores - scores.mean(axis=1, keepdims=True)))
    if not spread > 0:
        return 1.0
    wanted = np.take_along_axis(scores, cells, axis=1).mean(axis=1)
    high = scores.max(axis=1)

    def entropy(t: float) -> float:
        total = np.log(np.exp((scores - high[:, None]) / np.float32(t)).sum(axis=1))
        return float((total + (high - wanted) / t).mean())

    return min((spread * 1.1**step for step in range(-36, 24)), key=entropy)
