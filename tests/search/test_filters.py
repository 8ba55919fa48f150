"""Searching behind filters: what matches and nothing else, k results, and the recall that was asked for."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

import amips
from amips.search import recalls
from helpers import generate

N, D, K = 6000, 24, 10


@pytest.fixture(scope="module")
def world():
    keys, queries = generate(N, 4400, D, seed=5)
    return keys, queries[:4000], queries[4000:]


@pytest.fixture(scope="module")
def task(world):
    return amips.label(world[0], world[1], cells=96, k=16, val=400, test=10)


@pytest.fixture(scope="module", params=["flat", "lean", "sq8", "pq", "graph flat", "graph lean"])
def index(request, task):
    structure, _, storage = request.param.rpartition(" ")
    options = {"structure": "graph"} if structure else {"spill_fraction": 0.3}
    if storage == "lean":
        options["dimensions"] = 16
    return amips.build(task, storage=storage, **options)


def masks(keys):
    """Random filters of several selectivities, and two that queries correlate with."""
    rng = np.random.default_rng(2)
    chosen = {f"random {share}": rng.random(N) < share for share in (0.5, 0.1, 0.01, 0.001)}
    near = keys @ keys[17]
    chosen["a topic"] = near >= np.quantile(near, 0.9)
    chosen["all but a topic"] = near <= np.quantile(near, 0.5)
    return chosen


def true_top(keys, x, mask, k=K):
    scores = np.where(mask, x @ keys.T, -np.inf)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.where(np.isneginf(np.take_along_axis(scores, top, 1)), -1, top)


@pytest.mark.parametrize(
    "name", ["random 0.5", "random 0.1", "random 0.01", "random 0.001", "a topic", "all but a topic"]
)
def test_recall_is_kept_and_nothing_else_matches(index, world, name):
    keys, _, x = world
    mask = masks(keys)[name]
    scores, ids = index.search(x, K, filter=mask)
    top = true_top(keys, x, mask)
    assert mask[ids[ids >= 0]].all()
    assert ((ids >= 0).sum(axis=1) == min(K, mask.sum())).all()
    recall = ((ids[:, :, None] == top[:, None, :]) & (ids >= 0)[:, :, None]).any(1).sum() / (top >= 0).sum()
    assert recall >= 0.93
    shown = np.maximum(ids, 0)
    np.testing.assert_allclose(scores[ids >= 0], np.einsum("md,mkd->mk", x, keys[shown])[ids >= 0], atol=2e-6)
    one = np.concatenate([index.search(q, K, filter=mask)[1] for q in x[:80]])
    assert mask[one[one >= 0]].all()
    assert (one[:, : min(K, mask.sum())] >= 0).all()
    assert ((one[:, :, None] == top[:80, None, :]) & (one >= 0)[:, :, None]).any(1).sum() >= 0.92 * (
        top[:80] >= 0
    ).sum()


@pytest.mark.parametrize("storage", ["flat", "lean"])
def test_cost_follows_the_selectivity_and_ends_at_scoring_what_matches(task, world, storage):
    index = amips.build(task, storage=storage)
    rng = np.random.default_rng(0)
    for share in (0.5, 0.1, 0.01, 0.001):
        mask = rng.random(N) < share
        flops = index.cost(world[2], K, filter=mask).flops
        assert flops.max() <= 2 * D * mask.sum() + index.router.flops
    assert (flops == 2 * D * mask.sum()).all()  # few matches: no cell is even chosen


@pytest.mark.filterwarnings("ignore:recall is known of the top 10")
def test_more_than_ten_results(index, world):
    keys, _, x = world
    mask = np.random.default_rng(3).random(N) < 0.2
    ids = index.search(x[:100], 50, filter=mask)[1]
    assert (ids >= 0).all()
    assert mask[ids].all()
    assert recalls(ids, true_top(keys, x[:100], mask, 50), 50).mean() > 0.85


def test_every_key_is_the_same_as_no_filter(index, world):
    x = world[2]
    plain, every = index.search(x, K)[1], index.search(x, K, filter=np.ones(N, bool))[1]
    assert recalls(every, plain, K).mean() > 0.97


def test_an_effort_that_is_asked_for_is_kept(task, world):
    index, x = amips.build(task, storage="flat"), world[2]
    mask = np.random.default_rng(3).random(N) < 0.5
    for effort in ({"probes": 96}, {"min_mass": 1e-9}):
        assert (index.search(x, K, filter=mask, **effort)[1] == true_top(world[0], x, mask)).mean() > 0.999
    few = index.search(x, K, filter=mask, probes=1)[1]
    assert recalls(few, true_top(world[0], x, mask), K).mean() < 0.9
    rare = np.zeros(N, bool)
    rare[:: N // 12] = True
    assert (index.search(x, K, filter=rare, probes=np.full(len(x), 1))[1] >= 0).all()  # k, if k match


def test_nothing_matches(index, world):
    scores, ids = index.search(world[2][:3], K, filter=np.zeros(N, bool))
    assert (ids == -1).all()
    assert np.isneginf(scores).all()
    assert (index.search(world[2][0], K, filter=[])[1] == -1).all()


def test_ids_are_a_filter_too(world):
    keys, queries, x = world
    names = np.array([f"key-{i}" for i in range(N)])
    small = amips.label(keys, queries[:1000], cells=32)
    index = amips.build(small, ids=names, storage="flat")
    chosen = np.random.default_rng(0).permutation(N)[:40]
    answers = index.search(x[:20], K, filter=[*names[chosen], "unknown"])[1]
    mask = np.zeros(N, bool)
    mask[chosen] = True
    assert (answers == names[true_top(keys, x[:20], mask)]).all()
    with pytest.raises(amips.AmipsError, match="ids of this index are strings"):
        index.search(x[:1], K, filter=[1, 2])
    numbered = amips.build(small, storage="flat")
    assert (numbered.search(x[:20], K, filter=chosen)[1] == true_top(keys, x[:20], mask)).all()
    with pytest.raises(amips.AmipsError, match="give it as bool"):
        numbered.search(x[:1], K, filter=mask.astype(int))
    assert (numbered.search(x[0], K, filter=[0, 1, 1])[1] >= 0).sum() == 2
    for wrong in (np.ones(5, bool), "nowhere.npy", [[1, 2]], [1.5], np.ones((N, 2), bool)):
        with pytest.raises(amips.AmipsError):
            numbered.search(x[:1], K, filter=wrong)


@pytest.mark.filterwarnings("ignore:recall is known of the top 10")
@pytest.mark.parametrize("storage", ["flat", "lean"])
def test_filters_and_changes(world, storage, tmp_path):
    """After add, remove, update, compact and reload, a filter means the same keys."""
    keys, queries, x = world
    more = {"dimensions": 16} if storage == "lean" else {}
    small = amips.label(keys[:3000], queries[:2000], cells=32)
    table = pa.table({"half": np.arange(3000) % 2, "name": [str(i % 7) for i in range(3000)]})
    index = amips.build(small, storage=storage, out=tmp_path / "bundle", attributes=table, **more)
    index.add(keys[3000:3500], attributes=pa.table({"half": np.full(500, 1)}))
    index.add(keys[3500:3600])
    index.remove(np.arange(0, 3000, 3))
    index.update([1, 2], keys[4000:4002])
    current = dict(enumerate(keys[:3600]))
    half = {i: i % 2 for i in range(3000)} | dict.fromkeys(range(3000, 3500), 1)
    for gone in range(0, 3000, 3):
        del current[gone]
    current[1], current[2] = keys[4000], keys[4001]

    def check(index):
        alive = np.array(sorted(current))
        rows = np.stack([current[i] for i in alive])
        wanted = np.array([half.get(i) == 1 for i in alive])
        top = alive[true_top(rows, x, wanted)]
        ids = index.search(x, K, where="half = 1")[1]
        assert np.isin(ids, alive[wanted]).all()
        assert recalls(ids, top, K).mean() > 0.93
        missing = index.search(x, 200, where="half is null")[1]
        assert set(missing[0][missing[0] >= 0]) == set(range(3500, 3600))
        if len(index) == len(alive):
            in_order = np.zeros(len(alive), bool)
            in_order[:5] = True
            assert (index.search(x, K, filter=in_order)[1] >= 0).sum() == 5 * len(x)

    check(index)
    check(amips.load(tmp_path / "bundle"))  # the changes are replayed
    index.compact()
    check(index)
    check(amips.load(tmp_path / "bundle"))
    with pytest.raises(amips.AmipsError, match="no column 'price'"):
        index.add(keys[5000:5001], attributes=pa.table({"price": [1]}))
    with pytest.raises(amips.AmipsError, match="type string, expected int64"):
        index.add(keys[5000:5001], attributes=pa.table({"half": ["x"]}))
    check(index)
    index.close()


def test_columns_of_others_are_masks(task, world):
    index, x = amips.build(task, storage="flat"), world[2][:5]
    mask = np.arange(N) % 3 == 0
    expected = index.search(x, K, filter=mask)[1]
    columns = [pa.array(mask), pa.chunked_array([mask[:50], mask[50:]])]
    for column in columns:
        assert (index.search(x, K, filter=column)[1] == expected).all()
    with pytest.raises(amips.AmipsError, match="values that are missing"):
        index.search(x, K, filter=pa.array([None, *mask[1:].tolist()]))


def test_both_must_hold_and_masks_are_kept(task, world):
    index = amips.build(task, storage="flat")
    index.set_attributes(pa.table({"third": np.arange(N) % 3}))
    mask = np.arange(N) % 2 == 0
    ids = index.search(world[2], K, filter=mask, where="third = 0")[1]
    assert (ids % 6 == 0).all()
    state = index._state
    first = state.filters.allowed(mask, "third = 0")
    assert state.filters.allowed(mask.copy(), "third = 0") is first
    mask[0] = not mask[0]
    assert state.filters.allowed(mask, "third = 0") is not first
    for low in range(100):
        state.filters.allowed(None, f"third < {low}")
    assert len(state.filters._masks) <= 16


def test_an_audit_behind_a_filter(index, world):
    mask = np.random.default_rng(8).random(N) < 0.1
    result = index.audit(world[2], filter=mask, sample=200)
    assert result.recall10.mean > 0.93
    assert result.matches == mask.sum()
    with pytest.raises(amips.AmipsError, match="behind a filter"):
        index.adopt(result)
    with pytest.raises(amips.AmipsError, match="no key matches"):
        index.audit(world[2], filter=np.zeros(N, bool))


def test_many_removed_keys_keep_the_recall(task, world):
    index = amips.build(task, storage="flat")
    gone = np.random.default_rng(1).permutation(N)[: N * 9 // 10]
    index.remove(gone)
    mask = np.ones(N, bool)
    mask[gone] = False
    ids = index.search(world[2], K)[1]
    assert mask[ids].all()
    assert recalls(ids, true_top(world[0], world[2], mask), K).mean() > 0.93


def test_depths_survive_a_bundle(task, world, tmp_path):
    index = amips.build(task, storage="flat", out=tmp_path / "bundle")
    assert len(index.depths) > 2
    again = amips.load(tmp_path / "bundle")
    mask = np.random.default_rng(1).random(N) < 0.1
    assert (again.search(world[2], K, filter=mask)[1] == index.search(world[2], K, filter=mask)[1]).all()


def test_without_a_condition_pyarrow_is_not_imported(task, tmp_path):
    amips.build(task, storage="flat", out=tmp_path / "bundle", attributes=pa.table({"a": np.arange(N)}))
    code = (
        f"import amips, numpy as np, sys; index = amips.load({str(tmp_path / 'bundle')!r}); "
        f"index.search(np.ones({D}, np.float32), filter=np.arange(50)); print('pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
