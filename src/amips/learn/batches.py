"""Batches gathered from memory-mapped arrays: no loop over rows, nothing held but the batch.

For a device other than the CPU the next batch is gathered and pinned in a thread while this one is learned
from, and fetched by the device itself.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from amips.device import Ahead, as_tensor, moved, pinned
from amips.errors import RunError
from amips.learn.losses import Batch, CellBatch, draw_cells
from amips.nets import Recipe
from amips.task import Task

AnyBatch = TypeVar("AnyBatch", Batch, CellBatch)


class _Rows(Generic[AnyBatch]):
    """The training rows of a task in a random order of its own for each epoch.

    What batch number `step` holds follows from the seed alone, so a resumed run needs no more state. With
    several processes, `step` names the batch of all of them, and each takes its own equal part.
    """

    def __init__(
        self, task: Task, recipe: Recipe, seed: int, rank: int, world: int, device: torch.device
    ) -> None:
        self.queries = as_tensor(task.train.queries)
        self.recipe, self.seed, self.rank, self.world, self.device = recipe, seed, rank, world, device
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.int64)
        self.mine = slice(rank * recipe.batch, (rank + 1) * recipe.batch)
        self.ahead: Ahead[AnyBatch] | None = None if device.type == "cpu" else Ahead(self._pinned)

    def gathered(self, step: int) -> AnyBatch:
        """This process's part of batch number `step`, in host memory."""
        raise NotImplementedError

    def __call__(self, step: int) -> AnyBatch:
        """This process's part of batch number `step`, on the device."""
        if self.ahead is None:
            return self.gathered(step)
        return _each(self.ahead(step), lambda tensor: moved(tensor, self.device))

    def _pinned(self, step: int) -> AnyBatch:
        return _each(self.gathered(step), lambda tensor: pinned(tensor, self.device))

    def close(self) -> None:
        """End the thread that gathers batches."""
        if self.ahead is not None:
            self.ahead.close()

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

    def part(self, step: int) -> Tensor:
        """The rows of this process's part of batch number `step`."""
        size = self.recipe.batch * self.world
        return self._rows_at(step * size, size)[self.mine]


def _each(batch: AnyBatch, change: Callable[[Tensor], Tensor]) -> AnyBatch:
    """The batch with every tensor changed."""
    tensors: dict[str, Any] = {name: v for name, v in vars(batch).items() if isinstance(v, Tensor)}
    changed: dict[str, Any] = {name: change(tensor) for name, tensor in tensors.items()}
    return replace(batch, **changed)


class TopCells:
    """The cells of the top keys of training rows."""

    def __init__(self, task: Task, recipe: Recipe) -> None:
        self.top = as_tensor(task.train.top_ids)[:, : recipe.route_top]
        self.assignment = torch.from_numpy(task.cells.assignment.astype(np.int64))

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, t]."""
        return self.assignment[self.top[rows].long()]


def _need_cell_targets(task: Task) -> None:
    if task.c > 1 and not task.has_cell_targets:
        raise RunError(
            f"{task.path} has no targets for each cell, which this network learns from: "
            "label again with cell_targets=True (--cell-targets)"
        )


class CellBatches(_Rows[CellBatch]):
    """Queries and the cells of their top keys, for routers that learn cells alone."""

    def __init__(
        self, task: Task, recipe: Recipe, seed: int, rank: int, world: int, device: torch.device
    ) -> None:
        super().__init__(task, recipe, seed, rank, world, device)
        self.top = TopCells(task, recipe)
        self.sigma = None
        if recipe.listwise:
            _need_cell_targets(task)
            self.sigma = as_tensor(task.train.cell_scores)

    def gathered(self, step: int) -> CellBatch:
        """This process's part of batch number `step`, in host memory."""
        rows = self.part(step)
        sigma = None if self.sigma is None else self.sigma[rows]
        return CellBatch(self.queries[rows], self.top(rows), sigma, self.recipe.anchor / self.rows)


class Batches(_Rows[Batch]):
    """Queries with the support values and top keys of their cells.

    With a routing loss also the cells of their top keys: those of `routed`, which has the same queries.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        seed: int,
        rank: int,
        world: int,
        device: torch.device,
        routed: Task | None = None,
        kind: str = "support",
    ) -> None:
        super().__init__(task, recipe, seed, rank, world, device)
        self.drawn = recipe.cells_drawn(kind, task.c)
        _need_cell_targets(task)
        self.top = TopCells(routed or task, recipe) if recipe.route_weight else None
        self.keys = as_tensor(task.keys)
        self.sigma = as_tensor(task.train.cell_scores)
        self.ids = as_tensor(task.train.cell_ids)
        self.c = task.c

    def gathered(self, step: int) -> Batch:
        """This process's part of batch number `step`, in host memory."""
        rows = self.part(step)
        sigma, ids = self.sigma[rows], self.ids[rows].long()
        cells = signs = None
        if self.drawn:
            # torch's generator looks at 32 bits of a seed only, so both numbers are mixed into as many.
            mixed = np.random.SeedSequence([self.seed, 13, step]).generate_state(1)
            generator = torch.Generator().manual_seed(int(mixed[0]))
            # Drawn for the whole batch, so that the parts together are what one process would draw.
            drawn = draw_cells(self.recipe.batch * self.world, self.c, self.drawn, generator)
            cells, signs = (values[self.mine] for values in drawn)
            ids = ids.gather(1, cells)
        targets = self.keys[ids.flatten()].view(*ids.shape, -1)
        top = None if self.top is None else self.top(rows)
        return Batch(self.queries[rows], sigma, targets, cells, signs, top)
