"""Exact search with torch on a device, here the CPU: the same ids as numpy's, ties, memory, crashes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amips.device import TorchEngine, ahead
from amips.device.reducers import GROUP, CellOrder, packed, unpacked
from amips.errors import VectorError
from amips.exact import cell_maxima, ranks, sweep, top_k
from helpers import journal_rows, kill_when, make_world

SMALLEST = 1_000_000  # bytes; several pieces, blocks and shards
sizes = st.one_of(st.integers(1, 40), st.sampled_from([GROUP, 20 * GROUP - 1, 1023, 1024, 1025, 2049]))


def small_whole_numbers(seed, *shapes):
    """Products of few small whole numbers are exact, and often tie."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


def same(one, two):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, two, strict=True))


class TestSameAsNumpy:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        n=sizes,
        m=sizes,
        d=st.integers(1, 9),
        k=st.sampled_from([1, 2, 10, 100, 2000]),
        memory=st.sampled_from([10_000_000, 1 << 30]),
        seed=st.integers(0, 99),
    )
    def test_top_k_with_ties_and_doubles(self, n, m, d, k, memory, seed):
        keys, queries = small_whole_numbers(seed, (n, d), (m, d))
        assert same(
            top_k(keys, queries, k, memory=memory, device="cpu"), top_k(keys, queries, k, memory=memory)
        )

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        n=sizes,
        m=sizes,
        d=st.integers(1, 9),
        c=st.sampled_from([1, 2, 7, 64, 1500]),
        uneven=st.booleans(),
        memory=st.sampled_from([SMALLEST, 1 << 30]),
        seed=st.integers(0, 99),
    )
    def test_cell_maxima_with_ties_and_doubles(self, n, m, d, c, uneven, memory, seed):
        keys, queries = small_whole_numbers(seed, (n, d), (m, d))
        cells = (c * np.random.default_rng(seed).random(n) ** (6 if uneven else 1)).astype(np.int64)
        options = {"count": c, "memory": memory}
        assert same(
            cell_maxima(keys, cells, queries, device="cpu", **options),
            cell_maxima(keys, cells, queries, **options),
        )

    @pytest.mark.parametrize("memory", [SMALLEST, 1 << 30])
    def test_vectors_of_every_size(self, memory):
        keys, queries = make_world(3000, 1200, 24, seed=8)
        cells = np.arange(3000) % 17
        for one, two in (
            (top_k(keys, queries, 10, memory=memory, device="cpu"), top_k(keys, queries, 10, memory=memory)),
            (
                cell_maxima(keys, cells, queries, memory=memory, device="cpu"),
                cell_maxima(keys, cells, queries, memory=memory),
            ),
        ):
            assert np.array_equal(one[1], two[1])
            assert np.allclose(one[0], two[0], atol=1e-6)

    @pytest.mark.parametrize("memory", [SMALLEST, 1 << 30])
    def test_ranks(self, memory):
        rng = np.random.default_rng(3)
        keys = rng.standard_normal((2500, 6), np.float32)
        keys = np.concatenate([keys, keys[:500]])
        targets = rng.integers(0, len(keys), 700)
        points = keys[targets] + rng.standard_normal((700, 6), np.float32)
        on_device = ranks(keys, points, targets, memory=memory, device="cpu")
        assert np.array_equal(on_device, ranks(keys, points, targets, memory=memory))
        assert (ranks(keys, keys, np.arange(len(keys)), device="cpu") == 1).all()

    @pytest.mark.parametrize("n", [1, 2, 3000])
    def test_equal_keys_are_scored_once(self, n):
        rng = np.random.default_rng(1)
        keys = np.repeat(rng.standard_normal((1, 37), np.float32), n, axis=0)
        queries = rng.standard_normal((33, 37), np.float32)
        scores, ids = top_k(keys, queries, 600, device="cpu")
        assert np.array_equal(ids, np.tile(np.arange(min(600, n)), (33, 1)))
        assert (scores == scores[:, :1]).all()
        of_cells = cell_maxima(keys, np.arange(n) % 2, queries, count=2, device="cpu")[1]
        assert (of_cells == [0, 1 if n > 1 else -1]).all()

    @pytest.mark.parametrize(
        "allow",
        [
            "torch.set_float32_matmul_precision('medium')",
            "torch.backends.cuda.matmul.allow_tf32 = True",
            "torch.backends.fp32_precision = 'tf32'",
            "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        ],
    )
    def test_a_caller_who_allows_less_precision_gets_the_same(self, allow):
        """In a process of its own: some of these settings cannot be taken back."""
        run(PRECISION.replace("ALLOW", allow))


class TestReducers:
    def test_packed_integers_order_like_scores_and_then_by_lower_id(self):
        values = [-np.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3.0e38, np.inf]
        scores = torch.tensor(values, dtype=torch.float32)
        integers = packed(scores, torch.full((len(values),), 7))
        assert torch.equal(integers[[3]], integers[[4]])  # -0 ties with 0
        others = [i for i in range(len(values)) if i != 3]
        assert (integers[others].diff() > 0).all()
        back, ids = unpacked(integers)
        assert torch.equal(back, scores)
        assert (ids == 7).all()
        ids = torch.tensor([0, 5, 2**31 - 2])
        assert (packed(torch.ones(3), ids).diff() < 0).all()
        assert torch.equal(unpacked(packed(torch.full((3,), -1.0), ids))[1], ids)

    @pytest.mark.parametrize("sizes", [[1] * 9, [40, 0, 3, 200, 0, 0, 1], [0, 0, 500], [33]])
    @pytest.mark.parametrize("piece", [1, 7, 64, 1000])
    def test_chunks_are_within_cells_and_cover_a_piece(self, sizes, piece):
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        n = int(bounds[-1])
        order = np.random.default_rng(0).permutation(n)
        cells_of = np.repeat(np.arange(len(sizes)), sizes)
        layout = CellOrder(order, bounds, torch.device("cpu"))
        for first in range(0, n, piece):
            count = min(piece, n - first)
            ids, columns, cells = (tensor.numpy() for tensor in layout.chunks(first, count))
            assert np.array_equal(ids, order[first : first + count])
            assert np.array_equal(np.unique(columns), np.arange(count))
            assert (cells_of[first + columns] == cells[:, None]).all()
            assert columns.size <= 2 * count
            assert (np.diff(columns, axis=1) >= 0).all()

    def test_pieces_of_the_keys_follow_from_the_memory(self):
        widths = [TorchEngine("cpu", memory, 1024, 64).width for memory in (1_000_000, 10**8, 10**9)]
        assert widths == [GROUP, 736, 7616]
        assert TorchEngine("cpu", 10**9, 1024, 10**5).width == 288
        assert all(width % GROUP == 0 for width in widths)


class TestErrors:
    @pytest.mark.parametrize("name", ["cuda:99", "nonsense", "meta"])
    def test_a_device_that_is_not_there(self, name):
        keys, queries = make_world(50, 20, 8, seed=3)
        for call in (
            lambda: top_k(keys, queries, 1, device=name),
            lambda: cell_maxima(keys, np.zeros(50, int), queries, device=name),
            lambda: ranks(keys, queries, np.zeros(20, int), device=name),
        ):
            with pytest.raises(VectorError, match=f"device='{name}' cannot be used") as caught:
                call()
            assert "\n" not in str(caught.value)

    def test_a_device_that_is_no_name(self):
        with pytest.raises(VectorError, match="device=3: expected a name such as 'cpu' or 'cuda'"):
            top_k(np.ones((3, 2)), np.ones((3, 2)), 1, device=3)

    @pytest.mark.parametrize("n", [5, 3000])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_values_that_are_not_finite(self, n, sign):
        keys = np.random.default_rng(0).standard_normal((n, 2)).astype(np.float32)
        keys[3] = sign * np.nan
        queries = np.ones((4, 2), np.float32)
        with pytest.raises(VectorError, match="not finite"):
            top_k(keys, queries, 5, device="cpu")
        with pytest.raises(VectorError, match="not finite"):
            cell_maxima(keys, np.zeros(n, int), queries, device="cpu")

    def test_what_goes_wrong_while_reading_ahead_is_raised(self):
        def numbers():
            yield 1
            raise VectorError("the file is cut")

        items = ahead(numbers())
        assert next(items) == 1
        with pytest.raises(VectorError, match="the file is cut"):
            next(items)

    def test_reading_ahead_keeps_the_order_and_ends(self):
        assert list(ahead(iter(range(50)))) == list(range(50))
        assert list(ahead(iter([]))) == []


PRECISION = """
import numpy as np, torch
from amips.device import full_precision
from amips.exact import top_k
rng = np.random.default_rng(0)
keys, queries = rng.standard_normal((500, 64), np.float32), rng.standard_normal((90, 64), np.float32)
expected = top_k(keys, queries, 10, device="cpu")
def state():
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch cannot say where old and new settings disagree
        old = None
    return old, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
ALLOW
before = state()
assert before != ("highest", "none", "none")
with full_precision():
    assert state() == ("highest", "ieee", "ieee"), state()
    assert torch.backends.cuda.matmul.allow_tf32 is False
assert state() == before, state()
found = top_k(keys, queries, 10, device="cpu")
assert all(np.array_equal(a, b) for a, b in zip(found, expected))
assert state() == before, state()
"""
WORK = """
import sys, numpy as np
from amips import exact
folder, kind, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
keys, queries, out = folder + "/keys.npy", folder + "/queries.npy", sys.argv[4]
def work():
    options = {"memory": memory, "out": out, "device": "cpu"}
    if kind == "top_k":
        exact.top_k(keys, queries, 10, **options)
    else:
        cells = np.arange(exact.sweep.open_vectors(keys).n) % 200
        exact.cell_maxima(keys, cells, queries, **options)
"""
MEASURE = (
    WORK
    + """
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
exact.top_k(np.ones((600, 32), np.float32), np.ones((40, 32), np.float32), 3, device="cpu")
before = peak()
work()
print(peak() - before)
"""
)


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["top_k", "cell_maxima"])
def test_the_memory_limit_is_respected(tmp_path, kind):
    """Scores of 480 MB through 24 MB; here what the device takes comes on top of what the host does."""
    rng = np.random.default_rng(11)
    keys = rng.standard_normal((40_000, 128), np.float32)
    keys[1000:2000] = keys[:1000]
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", rng.standard_normal((3_000, 128), np.float32))
    limit = 24_000_000
    grown = int(run(MEASURE, tmp_path, kind, limit, tmp_path / "out"))
    assert 0 < grown < 2 * limit + 20e6


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
    words = [sys.executable, "-c", WORK + "work()", str(tmp_path), kind, str(memory), str(broken)]
    kill_when(subprocess.Popen(words), lambda: journal_rows(broken) > 0)
    assert 0 < journal_rows(broken) < 8_000
    assert (broken / "ids.npy").read_bytes() != whole["ids.npy"]
    run(WORK + "work()", tmp_path, kind, memory, broken)
    assert {name: (broken / name).read_bytes() for name in whole} == whole


def test_what_numpy_began_a_device_continues(tmp_path, monkeypatch):
    keys, queries = make_world(900, 1000, 8, seed=13)
    whole = top_k(keys, queries, 5, memory=SMALLEST, out=tmp_path / "whole")
    commits, commit = [], sweep.RowFiles.commit

    def stop_after_two(self):
        commit(self)
        commits.append(self.done)
        if len(commits) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep.RowFiles, "commit", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            top_k(keys, queries, 5, memory=SMALLEST, out=tmp_path / "broken")
    assert 0 < commits[-1] < 1000
    rest = top_k(keys, queries, 5, memory=SMALLEST, out=tmp_path / "broken", device="cpu")
    assert np.array_equal(rest[1], whole[1])
    assert np.array_equal(rest[0][: commits[-1]], whole[0][: commits[-1]])
