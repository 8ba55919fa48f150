"""Any backend searched with the predicted key in the place of the query: the paper's drop-in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from amips.arguments import check_flag, check_recall, check_whole
from amips.backends.backend import BLOCK_BYTES, Backend, sample_of
from amips.backends.budget_search import BudgetSearch, Ids, measured_points
from amips.errors import RunError
from amips.index import score_candidates
from amips.metrics import TARGET_RECALL
from amips.nets import Model
from amips.routers import check_fits
from amips.search import DROP_IN_CANDIDATES, Cost, Point, split_norms
from amips.task import Task, load_task
from amips.vectors import Floats, open_vectors


@dataclass(frozen=True)
class DropIn(BudgetSearch):
    """A backend asked for the neighbours of y^(x), and these scored with x: scores are true again.

    Args:
        backend: any.
        model: a mapper, which predicts one key: trained on a task with cells=1, of the backend's keys.
        keys: float32 [n, d], an array or a memory-mapped file: the backend's keys, for scoring. A sample of
            them is compared, not all.
        candidates: how many to ask the backend for, for each result asked for.
        rescore: False returns what the backend has for the predicted key as it is, as in the paper: scores
            are then <y^(x), y>, and `candidates` does not matter.
    """

    backend: Backend
    model: Model
    keys: Floats
    candidates: int = DROP_IN_CANDIDATES
    points: Sequence[Point] = ()  # recall by budget, on held-out queries, from `measure`
    target_recall: float | None = None  # what `search` serves when nothing else is asked for
    rescore: bool = True

    def __post_init__(self) -> None:
        if self.model.c != 1:
            raise RunError("a drop-in needs a model that predicts one key: train on a task with cells=1")
        if self.keys.shape != (self.n, self.d) or self.model.d != self.d:
            raise RunError(
                f"{self.backend.title} holds {self.n} keys of dimension {self.d}; keys of shape "
                f"{list(self.keys.shape)} and a model of dimension {self.model.d} do not fit"
            )
        check_whole("candidates", self.candidates, 1, error=RunError)
        check_flag("rescore", self.rescore, error=RunError)
        if self.backend.fingerprint:
            check_fits(self.model, self.backend.fingerprint, "")
        if self.backend.sample and sample_of(open_vectors(self.keys)) != self.backend.sample:
            raise RunError(f"{self.backend.title} was built of other keys, or of these in another order")

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.backend.n

    @property
    def d(self) -> int:
        """The dimension."""
        return self.backend.d

    def budgets(self) -> list[int]:
        """Budgets of the backend, from cheap to dear."""
        return self.backend.budgets()

    def measure(self, task: Task | str | Path, *, recall: float = TARGET_RECALL) -> "DropIn":
        """The same with recall by budget, measured on the val queries of a task of these keys."""
        recall, task = check_recall(recall), load_task(task, verify=True)
        return replace(self, points=measured_points(self, task.val), target_recall=recall)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """The k best, scored with x, of the keys that the backend has for the predicted key."""
        if not self.rescore:
            return self.backend.find(self._map(x), k, budget)
        candidates = self.backend.find(self._map(x), min(k * self.candidates, self.n), budget)[1]
        return score_candidates(self.keys.__getitem__, x, candidates, k, BLOCK_BYTES)

    def find_cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """Prediction, the backend's search, and scoring candidates again; None if the backend is silent."""
        most = min(k * self.candidates, self.n) if self.rescore else k
        cost = self.backend.find_cost(self._map(x), most, budget)
        if cost is None:
            return None
        again = 2 * self.d * np.minimum(cost.scanned, most) if self.rescore else 0
        network = cost.network + self.model.architecture.key_flops()
        return replace(cost, network=network, scan=cost.scan + again)

    def _map(self, x: Floats) -> Floats:
        """The predicted key of each query; models are trained on queries of norm 1."""
        return np.ascontiguousarray(self.model.keys(split_norms(x)[0])[:, 0])
