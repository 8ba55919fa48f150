"""Batches gathered from memory-mapped arrays: no loop over rows, nothing held but the batch."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from amips.learn.losses import Batch, draw_cells
from amips.learn.recipe import Recipe
from amips.task import Task


def _mapped(path: Path) -> Tensor:
    # Copy-on-write, because torch wants memory it could write to; nothing is written.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


class Batches:
    """The training rows of a task in a random order of its own for each epoch.

    What batch number `step` holds follows from the seed alone, so a resumed run needs no more state. With
    several processes, `step` names the batch of all of them, and each takes its own equal part.
    """

    def __init__(
        self, task: Task, recipe: Recipe, seed: int, rank: int, world: int, device: torch.device
    ) -> None:
        train = task.path / "train"
        self.queries = _mapped(train / "queries.npy")
        self.keys = _mapped(task.path / "keys.npy")
        of_cells = "cells" if task.c > 1 else "top"
        self.sigma = _mapped(train / of_cells / "scores.npy")[:, : task.c]
        self.ids = _mapped(train / of_cells / "ids.npy")[:, : task.c]
        self.recipe, self.seed, self.rank, self.world, self.device = recipe, seed, rank, world, device
        self.c = task.c
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.int64)

    @property
    def rows(self) -> int:
        """Training rows in one epoch."""
        return len(self.queries)

    def _rows_at(self, first: int, count: int) -> Tensor:
        """Rows number first..first + count of the endless sequence of shuffled epochs."""
        parts = []
        while count:
            epoch, offset = divmod(first, self.rows)
            if epoch != self.epoch:
                rng = np.random.default_rng([self.seed, 11, epoch])
                self.epoch, self.order = epoch, torch.from_numpy(rng.permutation(self.rows))
            part = self.order[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return torch.cat(parts)

    def __call__(self, step: int) -> Batch:
        """This process's part of batch number `step`."""
        size = self.recipe.batch
        rows = self._rows_at(step * size * self.world, size * self.world)
        mine = slice(self.rank * size, (self.rank + 1) * size)
        rows = rows[mine]
        sigma, ids = self.sigma[rows], self.ids[rows].long()
        cells = signs = None
        if self.c > self.recipe.all_cells_up_to:
            generator = torch.Generator().manual_seed((self.seed << 40) + step)
            # Drawn for the whole batch, so that the parts together are what one process would draw.
            drawn = draw_cells(size * self.world, self.c, self.recipe.sampled_cells, generator)
            cells, signs = (values[mine] for values in drawn)
            ids = ids.gather(1, cells)
        targets = self.keys[ids.flatten()].view(*ids.shape, -1)
        batch = Batch(self.queries[rows], sigma, targets, cells, signs)
        if self.device.type == "cpu":
            return batch
        moved = [None if v is None else v.to(self.device) for v in vars(batch).values()]
        return Batch(*moved)  # type: ignore[arg-type]
