"""Second cells of keys that are added: the rule of the build, with or without a table of cells by cells."""

import numpy as np
import pytest

from amips.search.placing import Placement, Placer
from amips.search.spill import PARALLEL
from amips.vectors import unit_rows


@pytest.mark.parametrize(("m", "most"), [(40, 2048), (300, 2048), (300, 80)])
def test_the_second_cell_is_that_of_the_rule(m, most, monkeypatch):
    """A table of cells by cells is kept where cells are few, and for many keys; not otherwise."""
    monkeypatch.setattr("amips.search.placing.GRAM_CELLS", most)
    rng = np.random.default_rng(0)
    c, d = 90, 8
    centroids, keys = (unit_rows(rng.standard_normal((m, d), np.float32))[0] for m in (c, m))
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
    assert max(array.size for array in arrays) == (c * c if (m, most) == (300, 2048) else c * d)
