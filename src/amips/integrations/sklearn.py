"""Nearest neighbours in scikit-learn's manner.

from amips.integrations.sklearn import AmipsNeighbors

neighbors = AmipsNeighbors(n_neighbors=10).fit(X, queries=Q)
distances, rows = neighbors.kneighbors(x)
"""

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_whole
from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.fitting import fit
from amips.integrations.exact_keys import LEAST, ExactKeys
from amips.vectors import Floats, inspect, open_vectors, unit_rows

with needs_extra("amips.integrations.sklearn", "sklearn", "sklearn"):
    from scipy.sparse import csr_matrix
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data

METRICS = ("inner_product", "cosine")


class AmipsNeighbors(BaseEstimator):  # type: ignore[misc]
    """The rows of X with the largest inner products with a query.

    `fit(X, queries=Q)` learns from queries like those that will be asked (`amips.fit`). Without queries there
    is nothing to learn from, and `kneighbors` scores all rows.

    Distances are scores with the sign changed, so that they ascend as scikit-learn expects: -<x, y>, or
    1 - cos(x, y). The former may be negative: it is no metric.

    Args:
        n_neighbors: how many are returned by default.
        metric: "inner_product", or "cosine", for which rows and queries are brought to norm 1.
        recall: the share of the true nearest that `fit(X, queries=Q)` is to find at least cost.
        minutes: how long that may take.
        random_state: the seed of that: a whole number, one of numpy's `RandomState`, or None for any.

    Attributes:
        index_: the `amips.search.Index`; None where all rows are scored.
        n_samples_fit_: rows of X.
        n_features_in_: columns of X; `feature_names_in_` if they have names.
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        metric: str = "inner_product",
        recall: float = 0.95,
        minutes: float = 5.0,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.recall = recall
        self.minutes = minutes
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, queries: Any = None) -> "AmipsNeighbors":
        """Take in the rows X [n, d], and learn from queries [m, d] where they are looked for.

        Args:
            X: an array or a data frame.
            y: nothing is done with it, as scikit-learn's pipelines give one; but a table of several columns
                is taken for queries: `fit(X, Q)`.
            queries: an array or a file. Behind a transformer of a pipeline give them transformed.
        """
        if queries is None and np.ndim(y) == 2 and np.shape(y)[1] > 1:
            queries = y
        check_choice("metric", self.metric, METRICS)
        rows = self._prepared(validate_data(self, X, dtype=np.float32, order="C"))
        inspect(open_vectors(rows, "X"), zero="keep")
        self.n_samples_fit_ = len(rows)
        self._rows, self.index_ = rows, None
        if queries is not None:
            if len(rows) < LEAST:
                raise AmipsError(
                    f"{len(rows)} rows are all scored as fast as any are found: leave queries out"
                )
            asked = self._prepared(open_vectors(queries, "queries").load())
            options: Any = {"recall": self.recall, "minutes": self.minutes, "seed": self._seed()}
            self.index_ = fit(rows, asked, quiet=True, **options)
        self._exact = ExactKeys()
        self._exact.replace(np.arange(len(rows)), rows)
        return self

    def kneighbors(
        self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> tuple[Floats, NDArray[np.int64]] | NDArray[np.int64]:
        """Distances float32 [m, k], ascending, and numbers of rows int64 [m, k]; the latter alone if asked.

        Args:
            X: queries [m, d]; when not given, the rows that it was fitted on, each without itself.
            n_neighbors: k; that of the constructor when not given.
            return_distance: whether distances are returned.
        """
        check_is_fitted(self)
        k = check_whole("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors, 1)
        most = self.n_samples_fit_ - (X is None)
        if k > most:
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, n_samples_fit = {most}"
            )
        if X is None:
            scores, ids = _without_self(*self._search(self._rows, k + 1))
        else:
            x = validate_data(self, X, dtype=np.float32, order="C", reset=False)
            scores, ids = self._search(self._prepared(x), k)
        distances = 1 - scores if self.metric == "cosine" else -scores
        return (distances, ids) if return_distance else ids

    def kneighbors_graph(
        self, X: Any = None, n_neighbors: int | None = None, mode: str = "connectivity"
    ) -> Any:
        """The neighbours as a sparse matrix [m, n]: ones, or distances (`mode="distance"`)."""
        check_choice("mode", mode, ("connectivity", "distance"))
        distances, ids = self.kneighbors(X, n_neighbors)
        m, k = ids.shape
        values = np.ones(m * k) if mode == "connectivity" else distances.ravel()
        places = np.arange(0, m * k + 1, k)
        return csr_matrix((values, ids.ravel(), places), shape=(m, self.n_samples_fit_))

    def _search(self, x: Floats, k: int) -> tuple[Floats, NDArray[np.int64]]:
        """Scores and rows; what a fitted index did not find k of is looked up among all rows."""
        if self.index_ is None:
            return self._exact.search(x, k)
        scores, ids = self.index_.search(x, k)
        few = np.flatnonzero((ids < 0).any(axis=1))
        if len(few):
            scores[few], ids[few] = self._exact.search(x[few], k)
        return scores, ids

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _prepared(self, rows: Floats) -> Floats:
        return unit_rows(rows)[0] if self.metric == "cosine" else rows

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_exact")


def _without_self(scores: Floats, ids: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """Of the neighbours [n, k + 1] of each row those that are not the row itself, [n, k]."""
    n, width = ids.shape
    own = ids == np.arange(n)[:, None]
    own[~own.any(axis=1), -1] = True  # a row with a small norm may be far from itself: then the last one goes
    return scores[~own].reshape(n, width - 1), ids[~own].reshape(n, width - 1)
