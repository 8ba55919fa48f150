"""Nearest keys, and graphs from keys and log: connected, of bounded degree, the same for the same seed."""

import numpy as np
import pytest

import amips
from amips import exact, native
from amips.graph import entry_points, make_graph, making, near, nearest_keys, reached
from helpers import generate, make_world, unit


def overlap(lists, true):
    """The mean share of the true ids that are in each list."""
    return float((true[:, :, None] == lists[:, None, :]).any(axis=2).mean())


def best_others(keys, asked, count):
    """By every pair, in double precision: the best others of each key, and all inner products."""
    scores = asked.astype(np.float64) @ keys.astype(np.float64).T
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1, kind="stable")[:, :count], scores


def check_own(lists):
    """No key is in its own list, none is there twice, and -1 comes last."""
    for key, row in enumerate(lists.tolist()):
        ids = [j for j in row if j >= 0]
        assert row[: len(ids)] == ids
        assert key not in ids
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("norms", [False, True])
def test_the_nearest_keys_are_the_nearest(norms, monkeypatch):
    monkeypatch.setattr(near, "BLOCK", 256)  # several of them
    keys = make_world(700, 1, 20, seed=1)[0]
    asked = None
    if norms:
        asked, sizes = keys, np.exp(np.random.default_rng(0).standard_normal((700, 1)))
        keys = (keys * sizes).astype(np.float32)
    lists = nearest_keys(keys, 15, asked=asked)
    np.testing.assert_array_equal(lists, best_others(keys, keys if asked is None else asked, 15)[0])
    check_own(lists)
    if norms:  # not those of the keys as queries without norms
        assert (lists != nearest_keys(asked, 15)).mean() > 0.5


def test_equal_keys_are_near_and_none_is_its_own():
    keys = unit(np.random.default_rng(2).standard_normal((30, 9)))
    keys = np.concatenate([keys, keys, keys, keys[:5]])
    lists = nearest_keys(keys, 6)
    check_own(lists)
    best, scores = best_others(keys, keys, 6)
    rows = np.arange(len(keys))[:, None]
    np.testing.assert_allclose(scores[rows, lists], scores[rows, best], atol=1e-6)
    assert (scores[rows, lists[:, :2]] > 0.99999).all()


def test_fewer_keys_than_asked_for():
    keys = unit(np.random.default_rng(3).standard_normal((4, 5)))
    lists = nearest_keys(keys, 7)
    np.testing.assert_array_equal(lists[:, :3], best_others(keys, keys, 3)[0])
    assert (lists[:, 3:] == -1).all()


def test_nearly_all_of_the_nearest_are_in_cells_nearby(monkeypatch):
    keys = generate(4000, 1, 32)[0]
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal((4000, 1))).astype(np.float32)
    true, true_by_norm = nearest_keys(keys, 16), nearest_keys(norms * keys, 16, asked=keys)
    monkeypatch.setattr(near, "EXACT_KEYS", 1000)
    lists, by_norm = nearest_keys(keys, 16), nearest_keys(norms * keys, 16, asked=keys)
    assert overlap(lists, true) > 0.9
    assert overlap(by_norm, true_by_norm) > 0.9
    check_own(lists)
    check_own(by_norm)
    monkeypatch.setattr(near, "PROBES", 1)
    fewer = nearest_keys(keys, 16)
    check_own(fewer)
    assert overlap(fewer, true) < 0.9  # it is the cells that were looked in


# Graphs

N, D = 900, 16


@pytest.fixture(scope="module")
def log():
    """Keys, queries and their top 10."""
    keys, queries = make_world(N, 1500, D, seed=4)
    return keys, queries, exact.top_k(keys, queries, 10)[1]


def same(first, second):
    return np.array_equal(first.neighbours, second.neighbours) and np.array_equal(
        first.entries, second.entries
    )


def check_graph(graph, n, degree):
    assert graph.neighbours.shape == (n, degree)
    assert graph.neighbours.dtype == graph.entries.dtype == np.int32
    assert graph.neighbours.min() >= -1
    assert graph.neighbours.max() < n
    free = graph.neighbours < 0
    assert (free[:, 1:] >= free[:, :-1]).all()
    assert ((graph.entries >= 0) & (graph.entries < n)).all()
    assert len(graph.entries) > 0
    assert reached(graph.neighbours, graph.entries).all()


def test_without_a_log_or_with_an_empty_one_it_is_the_plain_graph(log):
    keys, queries, top = log
    plain = make_graph(keys, None, None)
    assert same(make_graph(keys, queries[:0], top[:0]), plain)
    assert same(make_graph(keys, None, top[:0]), plain)
    assert not same(make_graph(keys, queries, top), plain)


@pytest.mark.parametrize("degree", [2, 3, 8, 31, 32, 64])
def test_no_key_has_more_neighbours_than_the_degree(log, degree):
    keys, queries, top = log
    for graph in (make_graph(keys, None, None, degree=degree), make_graph(keys, queries, top, degree=degree)):
        check_graph(graph, N, degree)
        assert (graph.neighbours >= 0).sum(axis=1).mean() > min(0.6 * degree, 6)


@pytest.mark.parametrize("entries", [1, 5, 64, 5000])
def test_entries_are_keys(log, entries):
    keys, queries, top = log
    graph = make_graph(keys, queries, top, entries=entries)
    check_graph(graph, N, 32)
    assert len(graph.entries) <= entries
    assert (np.diff(graph.entries) > 0).all()
    np.testing.assert_array_equal(graph.entries, entry_points(keys, queries, entries))


def test_entries_are_where_queries_go(log):
    """The best entry of a query is nearer to its top key if entries come from the log."""
    keys, queries, _ = log
    best = [(queries @ keys[entry_points(keys, rows, 8)].T).max(axis=1) for rows in (queries, None)]
    assert (best[0] - best[1]).mean() > 0.02


def test_the_same_for_the_same_seed(log):
    keys, queries, top = log
    graph = make_graph(keys, queries, top, entries=16, seed=5)
    assert same(make_graph(keys.copy(), queries, top, entries=16, seed=5), graph)
    assert not same(make_graph(keys, queries, top, entries=16, seed=6), graph)


def test_compiled_and_numpy_make_the_same(log, monkeypatch):
    if native.compiled is None:
        pytest.skip("not compiled")
    graph = make_graph(*log)
    monkeypatch.setattr(native, "compiled", None)
    other = make_graph(*log)
    assert (other.neighbours == graph.neighbours).all(axis=1).mean() > 0.98
    np.testing.assert_array_equal(other.entries, graph.entries)


def test_keys_that_are_asked_for_together_are_neighbours(log):
    """The top two keys of new queries are joined by an edge more often than without the log."""
    keys, queries, top = log
    shares = []
    for graph in (make_graph(keys, queries[:1000], top[:1000]), make_graph(keys, None, None)):
        first, second = top[1000:, 0], top[1000:, 1]
        joined = (graph.neighbours[first] == second[:, None]) | (graph.neighbours[second] == first[:, None])
        shares.append(joined.any(axis=1).mean())
    assert shares[0] > shares[1] + 0.02, shares


def test_large_keys_are_neighbours_where_norms_differ(log, monkeypatch):
    norms = np.exp(np.random.default_rng(1).standard_normal(N))
    keys = (log[0] * norms[:, None]).astype(np.float32)
    large = np.argsort(-norms)[: N // 20]
    by_norm = np.isin(make_graph(keys, None, None).neighbours, large).sum()
    monkeypatch.setattr(making, "NORMS_DIFFER", np.inf)
    assert by_norm > 1.3 * np.isin(make_graph(keys, None, None).neighbours, large).sum()


@pytest.mark.parametrize("n", [2, 3, 33, 300])
@pytest.mark.parametrize("distinct", [1, 2])
def test_keys_that_are_equal(n, distinct):
    rows = unit(np.random.default_rng(0).standard_normal((distinct, 7)))
    graph = make_graph(rows[np.arange(n) % distinct], None, None, degree=4)
    check_graph(graph, n, 4)


@pytest.mark.parametrize("in_cells", [False, True])
def test_what_was_interrupted_goes_on(monkeypatch, tmp_path, in_cells):
    """The same lists, and only the blocks that were missing are looked for again."""
    monkeypatch.setattr(near, "BLOCK", 100)
    monkeypatch.setattr(near, "EXACT_KEYS", 100 if in_cells else 10_000)
    keys = make_world(650, 1, 12, seed=4)[0]
    whole = nearest_keys(keys, 9)
    commit, commits = near.RowFiles.commit, []

    def counted(files):
        if files.directory is None:  # exact search has such files in memory
            return commit(files)
        if len(commits) == 3:
            raise KeyboardInterrupt
        commit(files)
        commits.append(files.done)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(near.RowFiles, "commit", counted)
        with pytest.raises(KeyboardInterrupt):
            nearest_keys(keys, 9, out=tmp_path / "near")
        assert commits == [100, 200, 300]
        commits.clear()
        commits += [0, 0]  # one more block, and again
        with pytest.raises(KeyboardInterrupt):
            nearest_keys(keys, 9, out=tmp_path / "near")
        assert commits[2:] == [400]
    for _ in range(2):  # the second time there is nothing left to do
        np.testing.assert_array_equal(nearest_keys(keys, 9, out=tmp_path / "near"), whole)


def test_lists_of_keys_of_different_norms_go_on_too(tmp_path):
    rng = np.random.default_rng(0)
    keys = make_world(300, 1, 12, seed=5)[0] * np.exp(rng.standard_normal((300, 1))).astype(np.float32)
    whole = making.near_lists(keys)
    assert whole.shape[1] > making.NEAR
    for _ in range(2):
        np.testing.assert_array_equal(making.near_lists(keys, out=tmp_path / "near"), whole)


def test_lists_of_other_keys_are_not_continued(tmp_path):
    keys, others = (make_world(200, 1, 12, seed=seed)[0] for seed in (7, 8))
    nearest_keys(keys, 5, out=tmp_path / "near")
    with pytest.raises(amips.AmipsError, match="other inputs"):
        nearest_keys(others, 5, out=tmp_path / "near")
