"""Refits: better on new queries or refused, put in place in one step, undone by one call."""

import json
import threading

import numpy as np
import pyarrow as pa
import pytest

import amips
from amips.errors import AmipsError
from amips.fitting.refitting import WORTH, refitted, surely_cheaper
from amips.search import GraphSearcher, recalls
from helpers import make_world, unit

N, D = 2000, 16


@pytest.fixture(scope="module")
def world():
    """Keys, a log, and queries of another kind: keys with noise."""
    keys, log = make_world(N, 2500, D, seed=5)
    rng = np.random.default_rng(1)
    new = unit(keys[rng.integers(N, size=1500)] + 0.35 * rng.standard_normal((1500, D)))
    return keys, log, new


@pytest.fixture(scope="module")
def task(world):
    return amips.label(world[0], world[1], cells=40, query_aware=3.0)


@pytest.fixture(params=["cells", "graph"])
def bundle(request, task, tmp_path):
    ids = np.arange(N) + 1000
    options = {"structure": "graph"} if request.param == "graph" else {"storage": "flat"}
    amips.build(task, out=tmp_path / "bundle", recall=0.9, ids=ids, **options)
    return tmp_path / "bundle"


def recall(index, world, x):
    top = np.argsort(-(x @ world[0].T), axis=1, kind="stable")[:, :10] + 1000
    return recalls(index.search(x)[1], top, 10).mean()


def test_it_is_better_on_the_newest_queries_and_can_be_undone(bundle, world):
    index = amips.load(bundle)
    before = [point.to_json() for point in index.points]
    assert recall(index, world, world[2][1000:]) < 0.86
    result = index.refit(world[2][:1000], minutes=0.05)
    assert result.held_out == 200
    costs = index.cost(world[2][800:1000]).flops / (2 * N * D)  # of those that it was chosen on
    assert result.cost_now == pytest.approx(costs.mean(), rel=0.02)
    assert isinstance(index.snapshot, GraphSearcher) or result.cost_now < 0.98 * result.cost_recalibrated
    assert "chosen on the newest 200" in str(result)
    json.dumps(result.to_json())
    assert recall(index, world, world[2][1000:]) >= 0.88
    assert index.origin.round == 1
    assert index.origin.events[-1].what == "refitted"
    assert index.origin.n == N
    index.close()
    again = amips.load(bundle)
    assert again.origin.round == 1
    assert again.search(world[2][:5])[1].tolist() == index.search(world[2][:5])[1].tolist()
    assert 1 in again.origin.log.val_rounds
    again.rollback()
    assert [point.to_json() for point in again.points] == before
    assert again.origin.events[-1].what == "rolled back"
    assert [point.to_json() for point in amips.load(bundle).points] == before
    with pytest.raises(AmipsError, match="nothing to go back to"):
        again.rollback()


def test_it_is_refused_if_nothing_is_better(bundle, world, monkeypatch):
    """Refused where nothing is surely cheaper, and then everything is as it was."""
    index = amips.load(bundle)
    index.refit(world[2], minutes=0.05)
    assert len(list(bundle.glob("data-*"))) == 2  # the one before stays
    held = {path.name: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    snapshot = index.snapshot
    monkeypatch.setattr("amips.fitting.refitting.WORTH", 0.01)
    with pytest.raises(AmipsError, match="refused: on the newest 300 queries nothing is better") as caught:
        index.refit(world[2], minutes=0.05)
    assert "\n" not in str(caught.value)
    assert index.snapshot is snapshot
    assert {path.name: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == held


def test_what_is_not_surely_cheaper_is_not():
    """Cheaper on average by more than what counts, but not surely: refused with few, not with many."""
    rng = np.random.default_rng(0)
    before = np.ones(4000)
    now = before - 0.03 + 0.3 * rng.standard_normal(4000)
    assert now[:200].mean() < WORTH
    assert not surely_cheaper(now[:200], before[:200])
    assert surely_cheaper(now, before)
    assert surely_cheaper(np.full(20, 0.9), before[:20])
    assert not surely_cheaper(np.full(200, 0.985), before[:200])


def test_keys_that_were_changed_since_stay_changed(task, world, tmp_path):
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage="flat", ids=np.arange(N) + 1000)
    index.refit(world[2], minutes=0.05)
    index.remove([1000, 1001])
    index.add(3 * world[0][:1], ids=[77])
    index.update([1005], -world[0][5:6])
    index.rollback()
    for one in (index, amips.load(tmp_path / "b")):
        assert one.n == N - 1
        ids = one.search(world[0][:1], 5, recall=0.9)[1]
        assert ids[0, 0] == 77
        assert not np.isin([1000, 1001], one.search(world[0], 10)[1]).any()
        assert one.search(-world[0][5:6], 1)[1][0, 0] == 1005


def test_the_log_goes_with_the_keys(task, world, tmp_path):
    """Its top keys are known by number: of what was removed since there is none."""
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage="flat", ids=np.arange(N) + 1000)
    first = index.origin.log
    index.refit(world[2], minutes=0.05)
    index.remove(np.arange(1000, 1400))
    index.rollback()
    log = amips.load(tmp_path / "b").origin.log
    np.testing.assert_array_equal(log.top, np.where(first.top < 400, -1, first.top - 400))


def test_keys_that_were_changed_before_are_part_of_it(task, world, tmp_path):
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage="lean", ids=np.arange(N) + 1000)
    index.remove(np.arange(1000, 1100))
    index.add(3 * world[0][:1], ids=[77])
    index.refit(world[2], minutes=0.05)
    assert index.n == N - 99
    assert index.search(world[0][:1], 1)[1][0, 0] == 77
    assert amips.load(tmp_path / "b").search(world[0][:1], 1)[1][0, 0] == 77
    index.rollback()
    assert index.n == N - 99


@pytest.mark.parametrize("kind", ["cells", "graph", "memory"])
def test_keys_change_while_it_is_refitted(task, world, tmp_path, monkeypatch, kind):
    """Changes do not wait for it, and are there when it is put in place, and when it is undone."""
    options = {"structure": "graph"} if kind == "graph" else {"storage": "flat"}
    out = None if kind == "memory" else tmp_path / "b"
    index = amips.build(task, out=out, recall=0.9, ids=np.arange(N) + 1000, **options)

    def change():
        index.add(3 * world[0][:1], ids=[77])
        index.remove([1000, 1001])
        index.update([1005], -world[0][5:6])
        index.add(world[0][:1], ids=[10**6])
        index.remove([10**6])

    def refitter(*arguments):
        thread = threading.Thread(target=change)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        with pytest.raises(AmipsError, match="refitted already"):
            index.refit(world[2])
        return refitted(*arguments)

    monkeypatch.setattr("amips.search.refits._refitters", [refitter])
    result = index.refit(world[2], minutes=0.05)
    for round_number in (1, 0):
        for one in (index,) if out is None else (index, amips.load(out)):
            assert one.origin.round == round_number
            assert one.n == N - 1
            assert one.search(world[0][:1], 1)[1].item() == 77
            assert one.search(-world[0][5:6], 1, recall=1.0)[1].item() == 1005
            place = np.arange(one.n) == 3  # the user's order: two before it are gone
            assert one.search(-world[0][5:6], 1, filter=place)[1].item() == 1005
            assert not np.isin([1000, 1001], one.search(world[0], 10)[1]).any()
        if round_number:
            assert result.index is index.snapshot
            assert index.add(world[0][:1]).item() > 10**6  # which was an id
            index.remove(index.add(world[0][:1]))
            index.remove([10**6 + 1])
            index.rollback()


def test_in_memory(task, world):
    index = amips.build(task, recall=0.9, storage="flat")
    index.refit(world[2], minutes=0.05)
    assert index.origin.round == 1
    index.rollback()
    assert index.origin.round == 0


def test_a_trained_router_goes_on_from_its_weights(task, world):
    model = amips.train(task, samples=20_000)
    index = amips.build(task, model, recall=0.9, storage="flat", spill_fraction=0.2)
    result = index.refit(world[2], minutes=0.06)
    assert any(name.startswith("estimate: keys moved") for name in result.tried)
    assert not isinstance(index.snapshot, GraphSearcher)


def test_bad_input_changes_nothing(bundle, world):
    index = amips.load(bundle)
    for queries, words in (
        (world[2][:390], "needs 400"),
        (world[2][:, :8], "dimension 8"),
        (np.full((200, D), np.nan, np.float32), "not finite|NaN"),
    ):
        with pytest.raises(AmipsError, match=words):
            index.refit(queries)
    with pytest.raises(AmipsError, match="minutes"):
        index.refit(world[2], minutes=0)
    assert index.origin.round == 0


def test_compacting_keeps_the_way_back(task, world, tmp_path):
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage="flat")
    index.refit(world[2], minutes=0.05)
    index.add(world[0][:1])
    index.compact()
    index.rollback()
    assert index.n == N + 1


@pytest.mark.parametrize("storage", ["flat", "sq8", "lean"])
def test_the_order_of_keys_is_that_of_their_changes(task, world, tmp_path, storage):
    """A mask has a value a key, in the order in which keys came: rolling back does not mix them up."""
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage=storage, ids=np.arange(N) + 1000)
    index.refit(world[2], minutes=0.05)
    index.remove([1010, 1020])
    index.add(world[0][:2], ids=[10**6, 7])
    index.update([1005], -world[0][5:6])
    index.add(world[0][20:21], ids=[1020])  # as it was
    index.add(world[0][3:4], ids=[2**63 - 1])
    stayed = np.delete(np.arange(N) + 1000, [10, 20]).tolist()
    expected = [*stayed, 10**6, 7, 1020, 2**63 - 1]
    index.rollback()
    for one in (index, amips.load(tmp_path / "b")):
        assert one.labels.tolist() == expected
        masked = one.search(world[0][:1], 1, filter=np.arange(one.n) == one.n - 2)[1]
        assert masked.tolist() == [[1020]]


def test_going_back_needs_a_refit(bundle, monkeypatch):
    """One line, also where a refit was killed before it had put anything in place."""
    index = amips.load(bundle)
    index.remove([1000])

    def stop(*_, **__):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(AmipsError, match="was not refitted") as caught:
            index.rollback()
        assert "\n" not in str(caught.value)
        with monkeypatch.context() as patch:
            patch.setattr("amips.search.bundle_directory.write_manifest", stop)
            with pytest.raises(KeyboardInterrupt):
                index._replace(index._whole(), "this")
        index.compact()
    assert amips.load(bundle).n == N - 1


def test_a_refit_that_fails_keeps_the_way_back(task, world, tmp_path, monkeypatch):
    """Wherever the second of two refits stops, one can go back behind the first."""
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage="flat")
    points = [point.to_json() for point in index.points]
    index.refit(world[2], minutes=0.05)

    def stop(*_, **__):
        raise KeyboardInterrupt

    for name in ("write_snapshot", "write_manifest"):
        where = "changing" if name == "write_snapshot" else "bundle_directory"
        with monkeypatch.context() as patch:
            patch.setattr(f"amips.search.{where}.{name}", stop)
            with pytest.raises(KeyboardInterrupt):
                index._replace(index._whole(), "this")
    again = amips.load(tmp_path / "b")
    assert again.origin.round == 1
    index.close()
    again.rollback()
    assert again.origin.round == 0
    assert [point.to_json() for point in again.points] == points
    assert not list((tmp_path / "b").glob("previous-*"))


def test_a_rollback_that_fails_can_be_tried_again(task, world, monkeypatch):
    index = amips.build(task, recall=0.9, storage="flat")
    index.refit(world[2], minutes=0.05)
    with monkeypatch.context() as patch:
        patch.setattr("amips.search.refits.with_changes_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.rollback()
    index.rollback()
    assert index.origin.round == 0


def test_attributes_given_since_stay(task, world, tmp_path):
    index = amips.build(task, out=tmp_path / "b", recall=0.9, storage="flat", ids=np.arange(N) + 1000)
    index.set_attributes(pa.table({"shelf": np.zeros(N, np.int64)}))
    index.refit(world[2], minutes=0.05)
    index.set_attributes(pa.table({"price": np.arange(N)}))
    index.remove([1003])
    index.add(world[0][:1], ids=[77], attributes=pa.table({"price": [123_456]}))
    index.rollback()
    for one in (index, amips.load(tmp_path / "b")):
        assert one.search(world[0][:1], 1, where="price = 123456")[1].tolist() == [[77]]
        assert one.search(world[0][:1], 3, where="price >= 2 and price <= 4")[1][0].tolist().count(-1) == 1
        assert one.search(world[0][:1], 1, where="price = 1500")[1].tolist() == [[2500]]
        with pytest.raises(AmipsError, match="shelf"):
            one.search(world[0][:1], 1, where="shelf = 0")


@pytest.mark.parametrize("kind", ["cells", "graph"])
def test_a_log_whose_keys_have_gone_is_searched_for_again(task, world, tmp_path, kind):
    options = {"structure": "graph"} if kind == "graph" else {"storage": "flat"}
    index = amips.build(task, recall=0.9, **options)
    index.update(np.arange(N), 0.99 * world[0])  # no key that the log asked for is left
    result = index.refit(world[2], minutes=0.2)
    assert result.older > 0
    before, now = result.of_log
    assert 0.7 < before <= 1
    assert 0.5 < now <= 1
    assert "held-out queries of the log: recall@10" in str(result)


def test_few_keys_left(task, world):
    index = amips.build(task, recall=0.9, storage="flat")
    index.remove(np.arange(8, N))
    with pytest.raises(AmipsError, match="refused"):
        index.refit(world[2], minutes=0.05)
