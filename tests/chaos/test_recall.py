"""The promise of `recall=`: on new queries it is kept, whatever the data, the storage, k and the target.

AMIPS_CHAOS=300 makes so many indexes instead of a few (`make chaos`). A recall held with 95 % confidence
may be missed by one index in twenty, and then by little.
"""

import os
import sys

import numpy as np
import pytest

import amips
from amips import exact
from amips.search import recalls

INDEXES = int(os.environ.get("AMIPS_CHAOS", "0")) or 8
FRESH = 4000
STORAGES = ("flat", "sq8", "pq", "lean")
GRAPH_STORAGES = ("flat", "sq8", "lean")


def vectors(rng, kind, n, d, centers):
    """Rows of one of three kinds: Gaussian, in clusters, in clusters with norms of any size."""
    rows = rng.standard_normal((n, d))
    if kind != "gaussian":
        rows = 0.5 * rows + centers[rng.integers(0, len(centers), n)]
    if kind == "norms":
        rows *= np.exp(rng.standard_normal((n, 1)))
    return rows.astype(np.float32)


def one_index(seed):
    """An index of random data and design; how far it misses a promise on fresh queries; what it is."""
    rng = np.random.default_rng([2026, seed])
    kind, d = ("gaussian", "clusters", "norms")[seed % 3], int(rng.choice([12, 24, 32]))
    centers = rng.standard_normal((30, d))
    keys = vectors(rng, kind, int(rng.integers(800, 2500)), d, centers)
    centers += 0.5 * rng.standard_normal(centers.shape)  # queries are not keys
    log, fresh = (vectors(rng, kind, m, d, centers) for m in (int(rng.integers(600, 4000)), FRESH))
    storage, target = STORAGES[(seed // 3) % 4], float(rng.choice([0.8, 0.9, 0.95, 0.98]))
    k = int(rng.choice([1, 3, 10]))
    if seed % 2:
        index = amips.fit(keys, log, recall=target, minutes=0.03, seed=seed)
    else:
        task = amips.label(keys, log, seed=seed, query_aware=float(rng.choice([0, 1.5])))
        options = {}
        if seed % 4 == 0:
            storage, options = GRAPH_STORAGES[(seed // 4 + seed // 12) % 3], {"structure": "graph"}
        if storage == "lean":
            options["dimensions"] = d // 2
        index = amips.build(task, None, storage=storage, recall=target, **options)
    ids = index.search(fresh, k, recall=target)[1]
    each = recalls(ids, exact.top_k(keys, fresh, k)[1], k)
    what = f"{seed}: {kind}, {index!r}, recall@{k} {target}: {each.mean():.4f}"
    return target - float(each.mean()), what


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_recall_is_kept_on_new_queries():
    indexes = [one_index(seed) for seed in range(INDEXES)]
    lines = [f"{'MISSED' if by > 0 else 'kept'} {by:+.4f}  {what}" for by, what in indexes]
    sys.stdout.write("\n".join(lines) + "\n")
    missed = [line for line in lines if line.startswith("MISSED")]
    # 5 % of the indexes may miss, and half as many by the noise of the fresh queries: what 1 run in 1,000
    # exceeds if that is so.
    allowed = np.quantile(np.random.default_rng(0).binomial(INDEXES, 0.075, 200_000), 0.999)
    assert len(missed) <= allowed, missed
    assert max(by for by, _ in indexes) < 0.02, missed
