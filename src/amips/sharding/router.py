"""The router of shards: scores of cells, whose masses are added up over the cells of each shard.

With f a router of cells (centroids, or trained) and t its temperature,

    mass_s(x) = sum of softmax(f(x) / t)_j over the cells j of shard s,

which is a smooth maximum over the cells: f itself may be linear, and what chooses shards is not. A network
with one output for each shard (SupportNet, KeyNet) needs no cells: then each shard is its own.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import BundleError
from amips.index import read_array
from amips.nets import DESCRIPTION, WEIGHTS, Model, load_model
from amips.npy import save_npy
from amips.routers import Router, masses, router_for
from amips.vectors import Floats

CENTROIDS, SHARD_OF_CELL = "centroids.npy", "shards.npy"
LEAST = np.float32(1e-30)  # mass, whose logarithm is still a number


@dataclass(frozen=True)
class ShardRouter:
    """x to one score for each shard: the logarithm of its mass.

    Args:
        model: scores the cells, or is None: by centroid.
        centroids: of the cells, [c, d].
        group: the shard of each cell, [c].
        temperature: at which the scores of cells are masses.
        count: of shards.
    """

    model: Model | None
    centroids: Floats
    group: NDArray[np.int64]
    temperature: float
    count: int
    factors = None

    @cached_property
    def of_cells(self) -> Router:
        """What scores the cells."""
        return router_for(self.model, self.centroids)

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Cells by shard, and where each shard begins."""
        order = np.argsort(self.group, kind="stable")
        return order, np.searchsorted(self.group[order], np.arange(self.count))

    @property
    def name(self) -> str:
        """What scores the cells."""
        return self.of_cells.name

    @property
    def c(self) -> int:
        """The number of shards."""
        return self.count

    @property
    def network_flops(self) -> int:
        """Of scoring the cells."""
        return self.of_cells.network_flops

    @property
    def coarse_flops(self) -> int:
        """Of scoring centroids of cells."""
        return self.of_cells.coarse_flops

    @property
    def flops(self) -> int:
        """Both together."""
        return self.of_cells.flops

    @property
    def floats(self) -> int:
        """A score and a mass for each cell."""
        return self.of_cells.floats + 2 * len(self.group)

    def scores(self, x: Floats) -> Floats:
        """log mass_s(x) of queries of norm 1, [m, S]."""
        order, starts = self._order
        mass = masses(self.of_cells.scores(x), self.temperature)[:, order]
        return np.log(np.maximum(np.add.reduceat(mass, starts, axis=1), LEAST))

    def save(self, directory: Path) -> list[str]:
        """Write it; the names of the files."""
        save_npy(directory / CENTROIDS, self.centroids)
        save_npy(directory / SHARD_OF_CELL, self.group)
        if self.model is None:
            return [CENTROIDS, SHARD_OF_CELL]
        self.model.save(directory)
        return [CENTROIDS, SHARD_OF_CELL, DESCRIPTION, WEIGHTS]

    @classmethod
    def load(cls, directory: Path, count: int, d: int, temperature: float, trained: bool) -> "ShardRouter":
        """Read what `save` wrote for so many shards of dimension d, and check it."""
        centroids = read_array(directory / CENTROIDS, np.float32, (None, d))
        group = read_array(directory / SHARD_OF_CELL, np.int64, (len(centroids),))
        if not np.array_equal(np.unique(group), np.arange(count)):
            raise BundleError(f"{directory / SHARD_OF_CELL} is damaged: not every shard has a cell")
        model = load_model(directory, BundleError) if trained else None
        router = cls(model, centroids, group, temperature, count)
        if router.of_cells.c != len(group):
            raise BundleError(
                f"{directory} is damaged: the model scores {router.of_cells.c} cells of {len(group)}"
            )
        return router


def same_cells(count: int) -> NDArray[Any]:
    """The shard of each cell where every shard is a cell of its own."""
    return np.arange(count, dtype=np.int64)
