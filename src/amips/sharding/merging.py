"""The best of what several shards found."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats

Results = tuple[Floats, NDArray[Any]]


class Merged:
    """The k best results of m queries, of all that was put in; a key of two shards counts once.

    Scores are true inner products, so that merging loses nothing: the result is what one index of all the
    keys that were scanned would give, equal scores by the lower id.
    """

    def __init__(self, m: int, k: int, dtype: Any) -> None:
        self.scores = np.full((m, k), -np.inf, np.float32)
        self.ids = np.full((m, k), "" if np.dtype(dtype).kind == "U" else -1, dtype)

    def add(self, rows: NDArray[np.int64], results: Results) -> None:
        """Results [len(rows), k'] of some of the queries."""
        k = self.scores.shape[1]
        ids = np.concatenate([self.ids[rows], results[1]], axis=1)
        scores = np.concatenate([self.scores[rows], results[0]], axis=1)
        # By id, and of one id the best first: the scores of two stores may differ in the last digit.
        order = np.lexsort((-scores, ids), axis=1)
        ids, scores = np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
        scores[:, 1:][ids[:, 1:] == ids[:, :-1]] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, ids = np.take_along_axis(scores, best, axis=1), np.take_along_axis(ids, best, axis=1)
        nothing = "" if ids.dtype.kind == "U" else -1
        self.ids = self.ids.astype(np.result_type(self.ids, ids), copy=False)  # strings of any length
        self.scores[rows], self.ids[rows] = scores, np.where(np.isneginf(scores), nothing, ids)
