"""Exact top keys and cell maxima: against brute force, with ties, within memory, across crashes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amips.blas import threads
from amips.errors import AmipsError, VectorError
from amips.exact import cell_maxima, check_memory, engine, ranks, sweep, top_k
from amips.exact.reduce import TILE
from amips.exact.sweep import QUERY_BLOCK
from helpers import journal_rows, kill_when, make_world

SMALLEST = 1_000_000  # bytes; enough for the small dimensions here, and several blocks and shards


def brute_top(keys, queries, k):
    """Scores [m, k] and ids [m, k] in float64: best first, then lowest id."""
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, ids, axis=1), ids


def brute_cells(keys, cells, queries, count):
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T
    best = np.full((len(queries), count), -np.inf)
    ids = np.full((len(queries), count), -1)
    for j in range(count):
        members = np.flatnonzero(cells == j)
        if members.size:
            top = scores[:, members].argmax(axis=1)
            ids[:, j] = members[top]
            best[:, j] = scores[np.arange(len(queries)), ids[:, j]]
    return best, ids


def random_set(rng, n, m, d, whole):
    """Keys and queries; of few small whole numbers their products are exact and often tie."""
    if whole:
        return (rng.integers(-2, 3, size).astype(np.float32) for size in ((n, d), (m, d)))
    return (rng.standard_normal(size, np.float32) for size in ((n, d), (m, d)))


borders = [
    511,
    512,
    513,
    *(TILE + i for i in (-1, 0, 1)),
    *(QUERY_BLOCK + i for i in (-1, 0, 1)),
    2 * TILE + 1,
]
sizes = st.one_of(st.integers(1, 40), st.sampled_from(sorted(set(borders))))


class TestAgainstBruteForce:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        n=sizes,
        m=sizes,
        d=st.integers(1, 9),
        k=st.sampled_from([1, 2, 10, 100, 2000]),
        whole=st.booleans(),
        memory=st.sampled_from([10_000_000, 1 << 30]),
        seed=st.integers(0, 99),
    )
    def test_top_k(self, n, m, d, k, whole, memory, seed):
        keys, queries = random_set(np.random.default_rng(seed), n, m, d, whole)
        scores, ids = top_k(keys, queries, k, memory=memory)
        expected_scores, expected_ids = brute_top(keys, queries, k)
        assert (scores.dtype, ids.dtype) == (np.float32, np.int32)
        assert scores.shape == ids.shape == (m, min(k, n))
        if whole:  # exact in float32: ties must be settled by the lower id
            assert np.array_equal(ids, expected_ids)
            assert np.array_equal(scores, expected_scores)
        else:
            assert np.allclose(scores, expected_scores, atol=1e-5)
            assert (np.sort(ids, axis=1)[:, 1:] != np.sort(ids, axis=1)[:, :-1]).all()
            own = np.einsum("md,mkd->mk", queries.astype(np.float64), keys[ids].astype(np.float64))
            assert np.allclose(own, scores, atol=1e-5)
            assert (np.diff(scores, axis=1) <= 0).all()

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        n=sizes,
        m=sizes,
        d=st.integers(1, 9),
        c=st.sampled_from([1, 2, 7, 64, 1500]),
        uneven=st.booleans(),
        whole=st.booleans(),
        memory=st.sampled_from([1_000_000, 1 << 30]),
        seed=st.integers(0, 99),
    )
    def test_cell_maxima(self, n, m, d, c, uneven, whole, memory, seed):
        rng = np.random.default_rng(seed)
        keys, queries = random_set(rng, n, m, d, whole)
        cells = (c * rng.random(n) ** (6 if uneven else 1)).astype(np.int64)
        scores, ids = cell_maxima(keys, cells, queries, count=c, memory=memory)
        expected_scores, expected_ids = brute_cells(keys, cells, queries, c)
        assert (scores.dtype, ids.dtype) == (np.float32, np.int32)
        empty = np.bincount(cells, minlength=c) == 0
        assert (scores[:, empty] == -np.inf).all()
        assert (ids[:, empty] == -1).all()
        if whole:
            assert np.array_equal(ids, expected_ids)
            assert np.array_equal(scores, expected_scores)
        else:
            assert np.allclose(scores[:, ~empty], expected_scores[:, ~empty], atol=1e-5)
            assert (cells[ids[:, ~empty]] == np.flatnonzero(~empty)).all()

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(n=sizes, m=st.integers(1, 40), seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 1e3]))
    def test_ranks(self, n, m, seed, scale):
        """Whatever the scale of the vectors."""
        rng = np.random.default_rng(seed)
        keys = (scale * rng.standard_normal((n, 6))).astype(np.float32)
        targets = rng.integers(0, n, m)
        points = (keys[targets] + scale * rng.standard_normal((m, 6))).astype(np.float32)
        away = np.linalg.norm(points[:, None].astype(np.float64) - keys, axis=2)
        own = away[np.arange(m), targets]
        clearly = (away < own[:, None] - 1e-4 * scale).sum(axis=1)
        about = (away < own[:, None] + 1e-4 * scale).sum(axis=1)
        found = ranks(keys, points, targets, memory=SMALLEST)
        assert (found >= 1 + clearly).all()
        assert (found <= np.maximum(about, 1)).all()
        assert (clearly + 1 == about).mean() > 0.5  # so the bounds leave no room for most rows

    def test_ranks_of_the_keys_themselves(self):
        """A key is its own nearest, also when it has doubles."""
        keys = np.random.default_rng(0).standard_normal((700, 12)).astype(np.float32)
        keys = np.concatenate([keys, keys])
        assert (ranks(keys, keys, np.arange(1400)) == 1).all()

    def test_ranks_of_known_places(self):
        keys = np.arange(10, dtype=np.float32)[:, None]
        points = np.full((10, 1), 2.1, np.float32)
        assert ranks(keys, points, np.arange(10)).tolist() == [5, 3, 1, 2, 4, 6, 7, 8, 9, 10]

    def test_keys_and_queries_of_different_norms(self):
        """The largest inner product, not the smallest angle."""
        keys = np.array([[1, 0], [10, 9], [0, 3]], np.float32)
        scores, ids = top_k(keys, np.array([[1, 0], [-1, 0]], np.float32), 3)
        assert ids.tolist() == [[1, 0, 2], [2, 0, 1]]
        assert scores.tolist() == [[10, 1, 0], [0, -1, -10]]


class TestTies:
    def test_a_tie_at_the_last_place_goes_to_the_lower_id(self):
        keys = np.stack([np.zeros(2000), np.arange(2000)], axis=1).astype(np.float32)
        keys[[3, 700, 1999], 0] = 1
        _, ids = top_k(keys, np.array([[1, 0]], np.float32), 5)
        assert ids.tolist() == [[3, 700, 1999, 0, 1]]

    @pytest.mark.parametrize("n", [1, 2, TILE, TILE + 1, 3 * TILE + 7])
    @pytest.mark.parametrize("k", [1, 3, 600])
    def test_all_keys_identical(self, n, k):
        """Inexact products of one key must not order its doubles."""
        rng = np.random.default_rng(1)
        keys = np.repeat(rng.standard_normal((1, 37), np.float32), n, axis=0)
        queries = rng.standard_normal((33, 37), np.float32)
        scores, ids = top_k(keys, queries, k)
        assert np.array_equal(ids, np.tile(np.arange(min(k, n)), (33, 1)))
        assert (scores == scores[:, :1]).all()
        cells = np.arange(n) % 2
        _, of_cells = cell_maxima(keys, cells, queries, count=2)
        assert (of_cells == [0, 1 if n > 1 else -1]).all()

    def test_doubles_across_tile_borders(self):
        """Each of 400 keys three times, 777 apart, in an order of their own: lower ids first."""
        rng = np.random.default_rng(2)
        distinct = rng.standard_normal((777, 24), np.float32)
        keys = np.concatenate([distinct, distinct, distinct])
        queries = rng.standard_normal((64, 24), np.float32)
        for memory in (500_000, 1 << 30):
            scores, ids = top_k(keys, queries, 9, memory=memory)
            _, expected = brute_top(distinct, queries, 3)
            assert np.array_equal(ids[:, ::3], expected)
            assert np.array_equal(ids[:, 1::3], expected + 777)
            assert np.array_equal(ids[:, 2::3], expected + 2 * 777)
            assert np.array_equal(scores[:, ::3], scores[:, 2::3])
            cells = np.repeat([0, 1, 0], 777)
            _, of_cells = cell_maxima(keys, cells, queries, memory=memory)
            assert np.array_equal(of_cells, expected[:, :1] + [0, 777])

    def test_some_doubles_among_ties_of_different_keys(self):
        """Keys that differ but score the same, mixed with doubles: only the id decides."""
        keys = np.array([[1, 5], [1, 7], [1, 5], [1, 6], [1, 7], [0, 1], [1, 5]], np.float32)
        query = np.array([[2, 0]], np.float32)
        for k in range(1, 8):
            assert top_k(keys, query, k)[1].tolist() == [[0, 1, 2, 3, 4, 6, 5][:k]]

    def test_minus_zero_ties_with_zero(self):
        keys = np.array([[-0.0, 1], [0.0, 2], [1, 0]], np.float32)
        assert top_k(keys, np.array([[-1, 0]], np.float32), 3)[1].tolist() == [[0, 1, 2]]


class TestCells:
    def test_empty_cells_first_last_and_between(self):
        keys, queries = make_world(50, 20, 8, seed=3)
        cells = np.where(np.arange(50) % 2, 2, 5)
        scores, ids = cell_maxima(keys, cells, queries, count=8)
        assert (np.isneginf(scores).all(axis=0) == [1, 1, 0, 1, 1, 0, 1, 1]).all()
        assert ((ids == -1).all(axis=0) == [1, 1, 0, 1, 1, 0, 1, 1]).all()
        assert np.array_equal(ids[:, [2, 5]], brute_cells(keys, cells, queries, 8)[1][:, [2, 5]])

    def test_very_uneven_cells(self):
        keys, queries = make_world(3000, 100, 8, seed=4)
        cells = np.zeros(3000, np.int32)
        cells[[1, 1500, 2999]] = [1, 2, 3]
        scores, ids = cell_maxima(keys, cells, queries)
        assert (ids[:, 1:] == [1, 1500, 2999]).all()
        expected = brute_cells(keys, cells, queries, 4)
        assert np.array_equal(ids, expected[1])
        assert np.allclose(scores, expected[0], atol=1e-6)

    def test_every_key_a_cell(self):
        keys, queries = make_world(700, 30, 8, seed=5)
        scores, ids = cell_maxima(keys, np.arange(700)[::-1], queries)
        assert (ids == np.arange(700)[::-1]).all()
        assert np.allclose(scores, queries @ keys[::-1].T, atol=1e-6)

    def test_the_best_cell_holds_the_top_key(self, world):
        keys, queries = world
        cells = np.random.default_rng(6).integers(0, 9, len(keys))
        _, top = top_k(keys, queries, 1)
        scores, ids = cell_maxima(keys, cells, queries)
        best = scores.argmax(axis=1)
        assert np.array_equal(ids[np.arange(len(queries)), best], top[:, 0])
        assert np.array_equal(best, cells[top[:, 0]])

    @pytest.mark.parametrize(
        ("cells", "match"),
        [
            (np.zeros(49, int), "50 integers"),
            (np.zeros((50, 1), int), "50 integers"),
            (np.zeros(50), "50 integers"),
            (np.full(50, -1), r"lie in 0\.\."),
            (np.full(50, 4), r"lie in 0\.\.3; found 4\.\.4"),
        ],
    )
    def test_cells_that_do_not_fit(self, cells, match):
        keys, queries = make_world(50, 20, 8, seed=3)
        with pytest.raises(VectorError, match=match):
            cell_maxima(keys, cells, queries, count=4)


class TestErrors:
    def test_dimensions_that_differ(self):
        a, b = np.ones((3, 4), np.float32), np.ones((3, 5), np.float32)
        for call in (
            lambda: top_k(a, b, 1),
            lambda: cell_maxima(a, np.zeros(3, int), b),
            lambda: ranks(a, b, np.zeros(3, int)),
        ):
            with pytest.raises(VectorError, match="keys have dimension 4 but queries have dimension 5"):
                call()

    def test_k_below_one(self):
        with pytest.raises(VectorError, match="k is 0"):
            top_k(np.ones((3, 4)), np.ones((3, 4)), 0)

    def test_too_little_memory_names_the_least(self):
        keys, queries = make_world(50, 20, 8, seed=3)
        cells = np.arange(50) % 4
        for call in (
            lambda memory: top_k(keys, queries, 10, memory=memory),
            lambda memory: cell_maxima(keys, cells, queries, memory=memory),
            lambda memory: ranks(keys, queries, np.zeros(20, int), memory=memory),
            lambda memory: check_memory(memory, d=8, k=10, c=4),
        ):
            with pytest.raises(VectorError, match="memory=1000 bytes is too little for d = 8") as caught:
                call(1000)
            least = int(str(caught.value).split("at least ")[1].split()[0])
            call(least)
            with pytest.raises(VectorError, match="too little"):
                call(least - 1)

    def test_values_that_are_not_finite(self):
        keys = np.ones((5, 2), np.float32)
        keys[3] = np.nan
        with pytest.raises(VectorError, match="not finite"):
            top_k(keys, np.ones((4, 2), np.float32), 5)


class TestSameResultAnyWay:
    def test_threads_do_not_change_the_ids(self):
        keys, queries = make_world(3000, 2500, 24, seed=7)
        cells = np.arange(3000) % 17
        results = []
        for count in (1, 2, None):
            with threads(count):
                results.append((*top_k(keys, queries, 10), *cell_maxima(keys, cells, queries)))
        for result in results[1:]:
            for a, b in zip(result, results[0], strict=True):
                assert np.array_equal(a, b) if a.dtype == np.int32 else np.allclose(a, b, atol=1e-6)

    def test_memory_does_not_change_the_ids(self):
        keys, queries = make_world(3000, 1200, 24, seed=8)
        cells = np.arange(3000) % 17
        large = (*top_k(keys, queries, 10), *cell_maxima(keys, cells, queries))
        small = (
            *top_k(keys, queries, 10, memory=SMALLEST),
            *cell_maxima(keys, cells, queries, memory=SMALLEST),
        )
        for a, b in zip(large, small, strict=True):
            assert np.array_equal(a, b) if a.dtype == np.int32 else np.allclose(a, b, atol=1e-6)

    def test_files_and_arrays_in_and_out(self, tmp_path):
        keys, queries = make_world(1500, 900, 16, seed=9)
        np.save(tmp_path / "keys.npy", keys.astype(np.float64))
        np.save(tmp_path / "queries.npy", queries)
        expected = top_k(keys, queries, 7)
        found = top_k(
            tmp_path / "keys.npy", tmp_path / "queries.npy", 7, memory=500_000, out=tmp_path / "out"
        )
        assert all(isinstance(table, np.memmap) for table in found)
        assert np.array_equal(found[1], expected[1])
        assert np.allclose(found[0], expected[0], atol=1e-6)
        assert np.array_equal(np.load(tmp_path / "out" / "ids.npy"), expected[1])

    def test_a_finished_result_is_not_computed_again(self, tmp_path, monkeypatch):
        keys, queries = make_world(300, 100, 8, seed=10)
        first = top_k(keys, queries, 5, out=tmp_path / "out")
        monkeypatch.setattr(engine, "parallel", lambda *_: pytest.fail("computed again"))
        again = top_k(keys, queries, 5, out=tmp_path / "out")
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))

    def test_a_result_of_another_shape_is_left_alone(self, tmp_path):
        keys, queries = make_world(300, 100, 8, seed=10)
        top_k(keys, queries, 5, out=tmp_path / "out")
        before = (tmp_path / "out" / "ids.npy").read_bytes()
        with pytest.raises(AmipsError, match="other inputs"):
            top_k(keys, queries, 6, out=tmp_path / "out")
        assert (tmp_path / "out" / "ids.npy").read_bytes() == before


def run(code, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WORK = """
import sys, numpy as np
from amips import exact
folder, kind, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
keys, queries, out = folder + "/keys.npy", folder + "/queries.npy", sys.argv[4]
def work(**options):
    if kind == "top_k":
        exact.top_k(keys, queries, 10, memory=memory, out=out, **options)
    else:
        cells = np.arange(exact.sweep.open_vectors(keys).n) % 200
        exact.cell_maxima(keys, cells, queries, memory=memory, out=out, **options)
"""

MEASURE = (
    WORK
    + """
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
exact.top_k(np.ones((600, 32), np.float32), np.ones((40, 32), np.float32), 3)
before = peak()
work()
print(peak() - before)
"""
)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Files of 60,000 keys (some twice) and 20,000 queries: their products would take 4.8 GB."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(11)
    keys = rng.standard_normal((60_000, 32), np.float32)
    keys[1000:2000] = keys[:1000]
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", rng.standard_normal((20_000, 32), np.float32))
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["top_k", "cell_maxima"])
def test_the_memory_limit_is_respected(large, tmp_path, kind):
    """64 MB for a score matrix of 4.8 GB; the slack is for what the libraries keep for themselves."""
    limit = 64_000_000
    grown = int(run(MEASURE, large, kind, limit, tmp_path / "out"))
    assert 0 < grown < 1.5 * limit + 20e6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["top_k", "cell_maxima"])
def test_the_memory_limit_is_respected_for_keys_larger_than_it(tmp_path, kind):
    """150 MB of keys on disk through 32 MB: their pages are not kept either."""
    rng = np.random.default_rng(12)
    keys = np.lib.format.open_memmap(tmp_path / "keys.npy", "w+", np.float32, (150_000, 256))
    for low in range(0, len(keys), 10_000):
        keys[low : low + 10_000] = rng.standard_normal((10_000, 256), np.float32)
    keys.flush()
    np.save(tmp_path / "queries.npy", rng.standard_normal((200, 256), np.float32))
    limit = 32_000_000
    grown = int(run(MEASURE, tmp_path, kind, limit, tmp_path / "out"))
    (tmp_path / "keys.npy").unlink()
    assert 0 < grown < 1.5 * limit + 50e6


@pytest.mark.parametrize("kind", ["top_k", "cell_maxima"])
def test_a_killed_run_resumes_with_the_same_bytes(tmp_path, kind):
    rng = np.random.default_rng(14)
    keys = rng.standard_normal((12_000, 16), np.float32)
    keys[1000:2000] = keys[:1000]
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", rng.standard_normal((8_000, 16), np.float32))
    memory = 5_000_000
    run(WORK + "work()", tmp_path, kind, memory, tmp_path / "whole")
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in ("scores.npy", "ids.npy")}

    broken = tmp_path / "broken"
    process = subprocess.Popen(
        [sys.executable, "-c", WORK + "work()", str(tmp_path), kind, str(memory), str(broken)]
    )
    kill_when(process, lambda: journal_rows(broken) > 0)
    done = journal_rows(broken)
    assert 0 < done < 8_000
    assert (broken / "ids.npy").read_bytes() != whole["ids.npy"]

    run(WORK + "work()", tmp_path, kind, memory, broken)
    assert {name: (broken / name).read_bytes() for name in whole} == whole


def test_a_resumed_run_computes_only_what_is_left(tmp_path, monkeypatch):
    keys, queries = make_world(900, 1000, 8, seed=13)
    whole = top_k(keys, queries, 5, memory=SMALLEST, out=tmp_path / "whole")

    class Stop(Exception):  # noqa: N818
        pass

    commits, commit = [], sweep.RowFiles.commit

    def stop_after_three(self):
        commit(self)
        commits.append(self.done)
        if len(commits) == 3:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(sweep.RowFiles, "commit", stop_after_three)
        with pytest.raises(Stop):
            top_k(keys, queries, 5, memory=SMALLEST, out=tmp_path / "broken")
    assert 0 < commits[-1] < 1000

    seen, rows = [], type(sweep.open_vectors(queries)).rows
    with monkeypatch.context() as patch:
        patch.setattr(sweep.Vectors, "rows", lambda self, a, b: seen.append(a) or rows(self, a, b))
        again = top_k(keys, sweep.open_vectors(queries), 5, memory=SMALLEST, out=tmp_path / "broken")
    assert commits[-1] in seen
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("resident", [True, False])
def test_the_bar_moves_with_the_keys(resident, tmp_path, monkeypatch, capsys):
    """A few queries against very many keys are one block: minutes, in which something must be said."""
    rng = np.random.default_rng(0)
    keys, x = rng.standard_normal((40_000, 8), np.float32), rng.standard_normal((40, 8), np.float32)
    np.save(tmp_path / "keys.npy", keys)
    monkeypatch.setattr("amips.progress.SECONDS", 0.0)
    monkeypatch.setattr(sweep, "RESIDENT", TILE)
    top_k(keys if resident else tmp_path / "keys.npy", x, 3, memory=SMALLEST, progress=True)
    said = [line for line in capsys.readouterr().err.splitlines() if " % of 40 queries" in line]
    assert len(said) >= 2
    assert said[-1].startswith("top keys: 100 %")
