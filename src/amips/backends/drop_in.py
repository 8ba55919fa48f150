"""Any engine searched with the predicted key in the place of the query: the paper's drop-in."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amips.backends.backend import BLOCK_BYTES, Backend, Ids, checked_search, sample_of
from amips.errors import RunError
from amips.index.top_keys import score_candidates
from amips.nets import Model
from amips.routers import check_fits
from amips.search import Cost
from amips.search.searcher import DROP_IN_CANDIDATES
from amips.vectors import Floats, open_vectors


@dataclass(frozen=True)
class DropIn:
    """An engine asked for the neighbours of y^(x), and these scored with x: scores are true again.

    Args:
        engine: any.
        model: a mapper, which predicts one key: trained on a task with cells=1, of the engine's keys.
        keys: float32 [n, d], an array or a memory-mapped file: the engine's keys, for scoring. A sample of
            them is compared, not all.
        candidates: how many to ask the engine for, for each result asked for.
    """

    engine: Backend
    model: Model
    keys: Floats
    candidates: int = DROP_IN_CANDIDATES

    def __post_init__(self) -> None:
        if self.model.c != 1:
            raise RunError("a drop-in needs a model that predicts one key: train on a task with cells=1")
        if self.keys.shape != (self.n, self.d) or self.model.d != self.d:
            raise RunError(
                f"{self.engine.title} holds {self.n} keys of dimension {self.d}; keys of shape "
                f"{list(self.keys.shape)} and a model of dimension {self.model.d} do not fit"
            )
        if self.candidates < 1:
            raise RunError(f"candidates={self.candidates}: expected at least 1")
        if self.engine.fingerprint:
            check_fits(self.model, self.engine.fingerprint, "")
        if self.engine.sample and sample_of(open_vectors(self.keys)) != self.engine.sample:
            raise RunError(f"{self.engine.title} was built of other keys, or of these in another order")

    @property
    def n(self) -> int:
        """The number of keys."""
        return self.engine.n

    @property
    def d(self) -> int:
        """The dimension."""
        return self.engine.d

    def budgets(self) -> list[int]:
        """The engine's."""
        return self.engine.budgets()

    def search(
        self, x: Any, k: int = 10, budget: int | None = None, *, threads: int | None = None
    ) -> tuple[Floats, Ids]:
        """As `Backend.search`, with candidates that the engine found with the predicted key."""
        return checked_search(self, x, k, budget, threads)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """As `search`, for queries that are known to be good and k of at most n."""
        candidates = self.engine.find(self._map(x), min(k * self.candidates, self.n), budget)[1]
        return score_candidates(self.keys.__getitem__, x, candidates, k, BLOCK_BYTES)

    def cost(self, x: Floats, k: int, budget: int) -> Cost | None:
        """The prediction, the engine's search, and scoring candidates again; None if the engine is silent."""
        most = min(k * self.candidates, self.n)
        cost = self.engine.cost(self._map(x), most, budget)
        if cost is None:
            return None
        again = 2 * self.d * np.minimum(cost.scanned, most)
        network = cost.network + self.model.architecture.key_flops()
        return replace(cost, network=network, scan=cost.scan + again)

    def _map(self, x: Floats) -> Floats:
        return np.ascontiguousarray(self.model.keys(x)[:, 0])
