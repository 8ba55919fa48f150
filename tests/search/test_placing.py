"""Second cells of keys that are added: the rule of the build, without a table of all cells by all cells."""

import numpy as np

from amips.search.placing import Placement, Placer
from amips.search.spill import PARALLEL
from amips.vectors import unit_rows


def test_the_second_cell_is_that_of_the_rule_and_no_table_is_kept():
    rng = np.random.default_rng(0)
    c, d = 90, 8
    centroids, keys = (unit_rows(rng.standard_normal((m, d), np.float32))[0] for m in (c, 40))
    scales = rng.uniform(0.5, 1, c).astype(np.float32)
    means = centroids * scales[:, None]
    placer = Placer(Placement("log"), None, centroids, scales, means, np.inf)
    first, second = placer(keys)
    assert (first == (keys @ centroids.T).argmax(axis=1)).all()
    r = keys - means[first]
    others = keys[:, None] - means[None]
    along = np.einsum("md,mcd->mc", r, others)
    loss = (others**2).sum(axis=2) + PARALLEL * along**2 / (r**2).sum(axis=1)[:, None]
    loss[np.arange(len(keys)), first] = np.inf
    assert (second == loss.argmin(axis=1)).all()
    arrays = [value for value in vars(placer).values() if isinstance(value, np.ndarray)]
    assert max(array.size for array in arrays) == c * d
