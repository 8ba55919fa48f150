"""Edges of a graph: what is kept, what the log asks for together, and that every key can be reached."""

from itertools import product

import numpy as np
import pytest

from amips import native
from amips.graph import connect, prune, reached, reverse, together
from helpers import unit

COMPILED = native.compiled
WAYS = list(product([False, True], repeat=2))  # fill, ordered
both = pytest.mark.parametrize(
    "compiled",
    [pytest.param(True, marks=pytest.mark.skipif(COMPILED is None, reason="not compiled")), False],
    ids=["compiled", "numpy"],
)


@pytest.fixture
def use(monkeypatch):
    """Switches between the compiled part and numpy."""
    return lambda compiled: monkeypatch.setattr(native, "compiled", COMPILED if compiled else None)


def signs(n, seed):
    """Unit vectors whose inner products are multiples of 1/4, and exact in float32: most are tied."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((n, 16), np.float32)
    for row in rows:
        row[rng.choice(8, 4, replace=False)] = rng.choice([-0.5, 0.5], 4)
    return rows


def directions(n, seed):
    """Random unit vectors, a fifth of them equal to others."""
    rng = np.random.default_rng(seed)
    rows = unit(rng.standard_normal((n, 11)))
    rows[n - n // 5 :] = rows[: n // 5]
    return rows


def candidates_of(n, width, seed):
    """Some twice, some missing, the key itself among them."""
    rng = np.random.default_rng([seed, 1])
    ids = rng.integers(0, n, (n, width)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.15] = -1
    ids[rng.random(ids.shape) < 0.1] = 3
    own = rng.random(ids.shape) < 0.1
    ids[own] = np.nonzero(own)[0]
    return ids


def pruned(vectors, candidates, degree, fill, ordered):
    """The relative-neighbour rule, key by key, in double precision."""
    wide = vectors.astype(np.float64)
    scores = np.stack(
        [(wide * row).sum(axis=1) for row in wide]
    )  # a product would round equal keys differently
    out = np.full((len(vectors), degree), -1)
    for i, row in enumerate(candidates.tolist()):
        ids = list(dict.fromkeys(j for j in row if j >= 0 and j != i))
        if not ordered:
            ids.sort(key=lambda j, i=i: (-scores[i, j], j))
        kept, left = [], []
        for j in ids:
            hidden = any(scores[between, j] >= scores[i, j] for between in kept)
            (left if hidden or len(kept) == degree else kept).append(j)
        lists = [*kept, *left] if fill else kept
        out[i, : len(lists[:degree])] = lists[:degree]
    return out


@both
@pytest.mark.parametrize(("fill", "ordered"), WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_by_the_rule(use, compiled, fill, ordered, seed):
    use(compiled)
    for vectors in (signs(90, seed), directions(90, seed)):
        for width, degree in ((40, 6), (12, 20), (1, 1)):
            ids = candidates_of(90, width, seed)
            lists = prune(vectors, ids, degree, fill=fill, ordered=ordered)
            assert lists.dtype == np.int32
            expected = pruned(vectors, ids, degree, fill, ordered)
            np.testing.assert_array_equal(lists, expected)
            if width == 40:  # something is hidden, and something is not
                assert (pruned(vectors, ids, degree, not fill, ordered) != expected).any()
                assert (expected[:, 1] >= 0).any()


@both
def test_of_keys_that_are_all_equal_one_is_kept(use, compiled):
    use(compiled)
    vectors = np.tile(unit(np.random.default_rng(0).standard_normal((1, 37))), (12, 1))
    every = np.tile(np.arange(12, dtype=np.int32), (12, 1))
    lists = prune(vectors, every, 4)
    np.testing.assert_array_equal(lists[:, 0], [1] + [0] * 11)
    assert (lists[:, 1:] == -1).all()
    np.testing.assert_array_equal(prune(vectors, every, 4, fill=True)[:2], [[1, 2, 3, 4], [0, 2, 3, 4]])


@pytest.mark.skipif(COMPILED is None, reason="not compiled")
@pytest.mark.parametrize(("fill", "ordered"), WAYS)
def test_compiled_and_numpy_keep_the_same(use, fill, ordered):
    vectors = directions(1500, 7)  # more than are pruned at a time
    ids = candidates_of(1500, 50, 7)
    use(True)
    expected = prune(vectors, ids, 12, fill=fill, ordered=ordered)
    use(False)
    lists = prune(vectors, ids, 12, fill=fill, ordered=ordered)
    assert (lists == expected).all(axis=1).mean() > 0.999  # an inner product may be rounded elsewhere


def totals_of(top, n):
    """How much two keys stand beside each other in the lists, [n, n]."""
    totals = np.zeros((n, n))
    for row in top.tolist():
        for a, first in enumerate(row):
            for b, second in enumerate(row):
                if first >= 0 and second >= 0 and first != second:
                    totals[first, second] += 1 / np.log2(a + 2) / np.log2(b + 2)
    return totals


def log_of(n, m, length, seed):
    """Top lists of m queries, the last places of some free; the last 5 keys are asked for by none."""
    rng = np.random.default_rng(seed)
    popular = 1 / np.arange(1, n - 4)
    top = np.stack([rng.choice(n - 5, length, replace=False, p=popular / popular.sum()) for _ in range(m)])
    top[np.arange(length) >= rng.integers(2, length + 1, (m, 1))] = -1
    return top


@both
@pytest.mark.parametrize("most", [1, 5, 60])
def test_keys_that_are_asked_for_together(use, compiled, most):
    use(compiled)
    n, top = 40, log_of(40, 120, 9, seed=2)
    totals, lists = totals_of(top, n), together(top, n, most)
    assert lists.shape == (n, most)
    for key, row in enumerate(lists.tolist()):
        ids = [j for j in row if j >= 0]
        best = np.sort(totals[key][totals[key] > 0])[::-1][:most]
        assert row[len(ids) :] == [-1] * (most - len(ids))
        assert len(set(ids)) == len(ids) == len(best)
        assert key not in ids
        np.testing.assert_allclose(totals[key][ids], best, rtol=1e-5)  # which of two that are equal is open
    assert (lists[n - 5 :] == -1).all()
    assert (lists[:, 0] >= 0).sum() > 15


def test_what_stands_together_by_hand():
    lists = together(np.array([[0, 1, 2], [0, 2, -1], [3, -1, -1]]), 5, 3)
    # Beside 0: 2 at ranks 2 and 1, 1/2 + 1/1.58; 1 at rank 1 once, 1/1.58.
    np.testing.assert_array_equal(lists, [[2, 1, -1], [0, 2, -1], [0, 1, -1], [-1] * 3, [-1] * 3])


@pytest.mark.skipif(COMPILED is None, reason="not compiled")
def test_compiled_and_numpy_agree_about_the_log(use):
    n, top = 700, log_of(700, 900, 12, seed=5)
    use(True)
    expected = together(top, n, 20)
    use(False)
    lists, totals = together(top, n, 20), totals_of(top, n)
    np.testing.assert_array_equal(lists >= 0, expected >= 0)
    rows = np.arange(n)[:, None]
    np.testing.assert_allclose(totals[rows, lists], totals[rows, expected], rtol=1e-5)
    assert (lists == expected).mean() > 0.9  # but for sums of the same weights in another order


def test_reverse_edges():
    rng = np.random.default_rng(3)
    n, lists = 50, np.full((50, 7), -1, np.int32)
    for row in lists:
        count = int(rng.integers(0, 8))
        row[:count] = rng.choice(12, count, replace=False)  # a few keys are in many lists, others in none
    for most in (2, 9, 60):
        expected = np.full((n, most), -1)
        for key in range(n):
            places = sorted((list(row).index(key), i) for i, row in enumerate(lists) if key in row)
            sources = [i for _, i in places][:most]
            expected[key, : len(sources)] = sources
        np.testing.assert_array_equal(reverse(lists, most), expected)


def walk_everywhere(lists, entries):
    """The keys that edges lead to, one by one."""
    seen, front = set(), [int(entry) for entry in entries]
    while front:
        key = front.pop()
        if key not in seen:
            seen.add(key)
            front += [j for j in lists[key].tolist() if j >= 0]
    return seen


def check_lists(lists, n):
    """Numbers of keys only, and none after the first place that is free: a walk reads no further."""
    assert lists.dtype == np.int32
    assert lists.min() >= -1
    assert lists.max() < n
    free = lists < 0
    assert (free[:, 1:] >= free[:, :-1]).all()


@pytest.mark.parametrize("width", [2, 3, 8])
def test_every_key_is_reached(width):
    changed = 0
    for seed in range(40):
        rng = np.random.default_rng([width, seed])
        n = int(rng.integers(2, 60))
        lists, candidates = np.full((n, width), -1, np.int32), np.full((n, 4), -1, np.int32)
        for rows in (lists, candidates):
            for row in rows:
                count = int(rng.integers(0, len(row) + 1))
                row[:count] = rng.integers(0, n, count)
        entries = np.unique(rng.integers(0, n, 1 + seed % 3)).astype(np.int32)
        before = lists.copy()
        seen = reached(lists, entries)
        assert set(np.flatnonzero(seen)) == walk_everywhere(lists, entries)
        edges = connect(lists, candidates, entries)
        np.testing.assert_array_equal(lists, before)  # the lists that came are left as they are
        assert reached(edges, entries).all()
        check_lists(edges, n)
        if seen.all():
            np.testing.assert_array_equal(edges, lists)
        changed += not seen.all()
    assert changed > 10


def test_cliques_of_equal_keys_are_reached():
    size, count, width = 40, 6, 5
    first = size * np.repeat(np.arange(count), size)
    own = np.arange(size * count)
    lists = (first[:, None] + (own[:, None] + np.arange(1, width + 1)) % size).astype(np.int32)
    entries = np.array([3, 45], np.int32)
    assert reached(lists, entries).sum() == 2 * size
    edges = connect(lists, lists, entries)
    assert reached(edges, entries).all()
    check_lists(edges, len(lists))
    assert (edges != lists).sum() < 4 * size / 2  # what an edge leads to needs none of its own
    apart = np.full_like(lists, -1)  # not even a clique
    edges = connect(apart, apart, entries)
    assert reached(edges, entries).all()
    check_lists(edges, len(lists))


def test_an_edge_comes_from_a_candidate_that_is_reached():
    lists = np.array([[1, 2], [0, 2], [0, 1], [-1, -1]], np.int32)
    candidates = np.array([[-1], [-1], [-1], [2]], np.int32)
    edges = connect(lists, candidates, np.array([0], np.int32))
    np.testing.assert_array_equal(edges, [[1, 2], [0, 2], [0, 3], [-1, -1]])


def test_no_edge_is_there_twice():
    """What an edge of a list leads to needs no second one from it."""
    lists = np.array([[1, -1, -1], [0, -1, -1], [3, -1, -1], [4, -1, -1], [-1, -1, -1]], np.int32)
    candidates = np.array([[-1], [-1], [-1], [-1], [3]], np.int32)
    edges = connect(lists, candidates, np.array([0], np.int32))
    assert reached(edges, np.array([0])).all()
    for row in edges.tolist():
        ids = [j for j in row if j >= 0]
        assert len(ids) == len(set(ids)), edges
