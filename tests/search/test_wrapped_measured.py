"""A wrapped index of which the recall is known: what it promises, what it costs, and keys that come later."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.blas import faiss
from amips.cells import ivf_parts
from amips.search import Point, ladder, recalls
from amips.task import load_task
from helpers import generate, make_world

N, D, C = 4000, 32, 60
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
NAMES = np.random.default_rng(2).permutation(10**9 + 17 * np.arange(N))


@pytest.fixture(scope="module")
def world():
    """Queries come from elsewhere than the keys; the last of them are never labelled."""
    return generate(N, 5000, D, seed=4)


@pytest.fixture(scope="module")
def kinds(world):
    """Indexes with the same quantizer by name, and a copy of each for whoever changes it."""
    keys, _ = world
    quantizer = faiss.IndexFlatIP(D)
    quantizer.add(amips.cells.kmeans(keys, C, seed=1).centroids)
    rotation = faiss.RandomRotationMatrix(D, D)
    rotation.init(5)

    def flat():
        return faiss.IndexIVFFlat(quantizer, D, C, IP)

    indexes = {}
    indexes["plain"] = flat()
    indexes["plain"].add(keys)
    inside = flat()
    indexes["IDMap"] = faiss.IndexIDMap(inside)
    indexes["IDMap"].add_with_ids(keys, NAMES)
    indexes["native"] = flat()
    indexes["native"].add_with_ids(keys, NAMES)
    codes = faiss.IndexIVFPQ(quantizer, D, C, 16, 8, IP)
    codes.pq.cp.min_points_per_centroid = 1
    codes.train(keys)
    codes.add_with_ids(keys, NAMES)
    indexes["codes"] = codes
    l2 = faiss.IndexFlatL2(D)
    l2.add(quantizer.reconstruct_n(0, C))
    indexes["L2"] = faiss.IndexIVFFlat(l2, D, C, L2)
    indexes["L2"].add(keys)
    behind = faiss.index_factory(D, f"RR{D},IVF{C},Flat", IP)
    behind.train(keys)
    behind.add(keys)
    indexes["behind"] = behind
    stored = {name: faiss.serialize_index(index) for name, index in indexes.items()}
    return lambda name: faiss.deserialize_index(stored[name])


@pytest.fixture(scope="module")
def tasks(world, kinds):
    keys, queries = world
    return {
        name: amips.label(keys, queries[:4000], cells=kinds(name), val=800, test=500)
        for name in ("plain", "IDMap", "native", "codes", "L2", "behind")
    }


@pytest.fixture(scope="module")
def models(tasks):
    """Routers in two sets: those with the same quantizer share one."""
    shared = amips.train(tasks["plain"], amips.Linear(rank=0), samples=60_000)
    behind = amips.train(tasks["behind"], amips.Linear(rank=0), samples=60_000)
    l2 = replace(shared, about={**shared.about, **tasks["L2"].fingerprints})
    return {**dict.fromkeys(("plain", "IDMap", "native", "codes"), shared), "behind": behind, "L2": l2}


def rows(name, ids):
    """The rows of the keys that these ids stand for."""
    if name not in ("IDMap", "native", "codes"):
        return ids
    order = np.argsort(NAMES)
    return np.where(ids < 0, -1, order[np.searchsorted(NAMES[order], ids) % N])


def true_top(world, x):
    return np.argsort(-(x @ world[0].T), axis=1, kind="stable")[:, :10]


KINDS = ("plain", "IDMap", "native", "L2", "behind")


@pytest.mark.parametrize("name", KINDS)
def test_the_recall_that_was_asked_for_on_fresh_queries(world, kinds, tasks, models, name):
    wrapped = amips.wrap(kinds(name), models[name], task=tasks[name])
    fresh = world[1][4000:]
    top = true_top(world, fresh)
    assert wrapped.target_recall == 0.95
    reached, costs = [], []
    for recall in (0.7, 0.9, 0.95, 0.98):
        ids = rows(name, wrapped.search(fresh, recall=recall)[1])
        reached.append(recalls(ids, top, 10).mean())
        costs.append(wrapped.cost(fresh, recall=recall).flops.mean())
        assert reached[-1] > recall - 0.02
        assert (
            rows(name, wrapped.search(fresh, 1, recall=recall)[1])[:, 0] == top[:, 0]
        ).mean() > recall - 0.03
    assert costs == sorted(costs)
    assert costs[-1] < 2 * N * D  # of looking at everything
    np.testing.assert_array_equal(wrapped.search(fresh)[1], wrapped.search(fresh, recall=0.95)[1])


@pytest.mark.parametrize("name", ["plain", "IDMap", "native", "behind"])
def test_it_finds_more_than_faiss_with_as_many_probes(world, kinds, tasks, models, name):
    index = kinds(name)
    wrapped = amips.wrap(index, models[name])
    fresh = world[1][4000:]
    top = true_top(world, fresh)
    gains = []
    for probes in (2, 4, 8):
        ivf_parts(index).ivf.nprobe = probes
        own = rows(name, index.search(fresh, 10)[1])
        learned = rows(name, wrapped.search(fresh, 10, probes=probes)[1])
        gains.append(recalls(learned, top, 10).mean() - recalls(own, top, 10).mean())
    assert min(gains) > -0.005
    assert max(gains) > 0.02


def test_measured_later_or_at_once(kinds, tasks, models):
    at_once = amips.wrap(kinds("plain"), models["plain"], task=tasks["plain"], recall=0.9)
    later = amips.wrap(kinds("plain"), models["plain"])
    assert (later.points, later.target_recall) == ([], None)
    later = later.measured(str(tasks["plain"].path), recall=0.9)
    assert later.points == at_once.points
    assert later.temperature == at_once.temperature > 0
    assert later.target_recall == 0.9
    assert repr(later).endswith("routed by linear, for recall 0.9>")


def test_a_task_is_verified_before_it_is_measured_on(world, kinds, models, tmp_path):
    """Large files are not read when a task is opened, and rows of them are indices here."""
    amips.label(world[0], world[1][:1000], cells=kinds("plain"), val=100, test=100, out=tmp_path / "task")
    for split in ("val", "test"):
        path = tmp_path / "task" / split / "top" / "ids.npy"
        path.write_bytes(path.read_bytes()[:-4] + b"\x7f" * 4)
    task = load_task(tmp_path / "task", verify=False)
    wrapped = amips.wrap(kinds("plain"), models["plain"])
    for call in (wrapped.measured, wrapped.recall_on):
        with pytest.raises(amips.TaskError, match="ids"):
            call(task)


def test_points_are_what_a_search_on_val_finds(kinds, tasks, models):
    for name in ("plain", "codes"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # codes do not reach 0.95
            wrapped = amips.wrap(kinds(name), models[name], task=tasks[name])
        x, top = np.asarray(tasks[name].val.queries), np.asarray(tasks[name].val.top_ids)
        for point in [*wrapped.points[:8:3], *wrapped.points[-8::3]]:
            options = {"min_mass": point.min_mass} if point.min_mass else {"probes": point.probes}
            ids = rows(name, wrapped.search(x, 10, **options)[1])
            assert recalls(ids, top, 10).mean() == pytest.approx(point.recall10, abs=0.002)
            cost = wrapped.cost(x, **options)
            assert cost.scanned.mean() / N == pytest.approx(point.scanned)
            assert cost.flops.mean() == pytest.approx(point.flops)
        assert all(isinstance(point, Point) for point in wrapped.points)
        assert {point.probes for point in wrapped.points if not point.min_mass} <= set(ladder(C))


def test_a_recall_that_codes_do_not_reach(world, kinds, tasks, models):
    index = kinds("codes")
    index.nprobe = 3
    with pytest.warns(UserWarning, match=r"recall 0.999 is out of reach of this index: .* uses its nprobe"):
        wrapped = amips.wrap(index, models["codes"], task=tasks["codes"], recall=0.999)
    assert wrapped.target_recall is None
    x = world[1][4000:4100]
    np.testing.assert_array_equal(wrapped.search(x)[1], wrapped.search(x, probes=3)[1])
    best = max(point.recall10 for point in wrapped.points)
    assert wrapped.search(x, recall=best - 0.05)[1].shape == (100, 10)


def test_without_measuring_it_is_the_nprobe_of_the_index(world, kinds, models):
    index = kinds("plain")
    wrapped = amips.wrap(index, models["plain"])
    x = world[1][:50]
    for nprobe in (2, 7):
        index.nprobe = nprobe
        np.testing.assert_array_equal(wrapped.search(x)[1], wrapped.search(x, probes=nprobe)[1])
        assert (wrapped.cost(x).probed == nprobe).all()
    with pytest.raises(amips.AmipsError, match="no operating points; give probes instead of recall"):
        wrapped.search(x, recall=0.9)
    with pytest.raises(amips.AmipsError, match="does not know what mass"):
        wrapped.search(x, min_mass=0.1)
    with pytest.raises(amips.AmipsError, match="give one of recall, probes and min_mass"):
        wrapped.search(x, recall=0.9, probes=3)
    with pytest.raises(amips.AmipsError, match="recall=2: expected a share"):
        wrapped.measured("nowhere", recall=2)


def test_ids_that_are_not_known_are_asked_for(world, kinds, tasks, models):
    """Codes have to be searched to know their recall, and that gives ids, not rows."""
    order = np.random.default_rng(0).permutation(N)
    task = amips.label(world[0][order], world[1][:1500], cells=kinds("codes"), val=300, test=100)
    router = replace(models["codes"], about={**models["codes"].about, **task.fingerprints})
    with pytest.raises(amips.VectorError, match=r"which key has which id in the index is not known.*ids="):
        amips.wrap(kinds("codes"), router, task=task)
    named = amips.wrap(kinds("codes"), router, task=task, ids=NAMES[order], recall=0.5)
    assert max(point.recall10 for point in named.points) > 0.6
    # Float32 keys that are scanned are found: nothing has to be searched, and nothing is asked.
    assert amips.wrap(kinds("native"), router, task=task).target_recall == 0.95


class TestAppended:
    @pytest.mark.parametrize("name", ["plain", "IDMap", "native", "behind"])
    def test_keys_added_later_are_found(self, world, kinds, tasks, models, name):
        index = kinds(name)
        wrapped = amips.wrap(index, models[name], task=tasks[name])
        more = make_world(500, 10, D, seed=99)[0]
        names = np.arange(500) + 5 * 10**9
        index.add(more) if name in ("plain", "behind") else index.add_with_ids(more, names)
        assert wrapped.n == N + 500
        scores, ids = wrapped.search(more, 1, probes=C)
        wanted = np.arange(N, N + 500) if name in ("plain", "behind") else names
        np.testing.assert_array_equal(ids[:, 0], wanted)
        np.testing.assert_allclose(scores[:, 0], (more**2).sum(axis=1), rtol=1e-4)
        assert wrapped.search(world[1][:5], recall=0.9)[1].shape == (5, 10)
        # Wrapping and measuring again works, too: the quantizer is the same.
        again = amips.wrap(index, models[name], task=tasks[name])
        assert again.target_recall == 0.95
        for point, old in zip(again.points[:10], wrapped.points[:10], strict=True):
            assert point.probes == old.probes
            assert point.recall10 == pytest.approx(old.recall10, abs=0.003)  # among the keys that it knows

    def test_a_rebuilt_index_is_refused(self, world, kinds, models):
        other = faiss.index_factory(D, f"IVF{C},Flat", IP)
        other.train(world[0][::-1].copy())
        other.add(world[0])
        with pytest.raises(
            amips.AmipsError, match=r"label with cells=index, train, and wrap it again$"
        ) as caught:
            amips.wrap(other, models["plain"])
        assert "\n" not in str(caught.value)

    def test_a_task_of_keys_that_the_index_does_not_hold(self, world, kinds, tasks, models):
        index = kinds("plain")
        index.reset()
        index.add(world[0][::-1].copy())
        with pytest.raises(amips.VectorError, match="in another order"):
            amips.wrap(index, models["plain"], task=tasks["plain"])
        index.reset()
        index.add(world[0][:100])
        with pytest.raises(amips.VectorError, match="does not hold key 100"):
            amips.wrap(index, models["plain"], task=tasks["plain"])


class TestOtherRouters:
    @pytest.mark.parametrize("name", [*KINDS, "codes"])
    def test_without_a_model_it_is_faiss(self, world, kinds, name):
        index = kinds(name)
        wrapped = amips.wrap(index, None)
        x = world[1][:200]
        for probes in (1, 6, C):
            ivf_parts(index).ivf.nprobe = probes
            want = index.search(x, 10)
            got = wrapped.search(x, 10, probes=probes)
            np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
            assert (got[1] == want[1]).mean() > 0.99
        assert "routed by centroid" in repr(wrapped)

    def test_and_its_recall_can_be_known_as_well(self, world, kinds, tasks):
        own = amips.wrap(kinds("L2"), None, task=tasks["L2"])
        fresh = world[1][4000:]
        assert recalls(own.search(fresh, recall=0.9)[1], true_top(world, fresh), 10).mean() > 0.88

    def test_a_router_of_ones_own(self, world, kinds, tasks, models, tmp_path):
        class Own:
            flops = 123

            def scores(self, x):
                return models["plain"].scores(x)

        own, learned = (amips.wrap(kinds("plain"), m, task=tasks["plain"]) for m in (Own(), models["plain"]))
        x = world[1][4000:4100]
        np.testing.assert_array_equal(own.search(x)[1], learned.search(x)[1])
        assert own.cost(x).network == 123
        own.save(tmp_path / "b")
        with pytest.raises(amips.BundleError, match="needs the router it was saved with"):
            amips.load(tmp_path / "b", index=kinds("plain"))
        again = amips.load(tmp_path / "b", index=kinds("plain"), model=Own())
        assert (again.points, again.target_recall) == (own.points, own.target_recall)
        np.testing.assert_array_equal(again.search(x)[1], own.search(x)[1])
        with pytest.raises(amips.AmipsError, match=r"a dict cannot route: it has no method scores\(x\)"):
            amips.wrap(kinds("plain"), {})


def test_costs_by_hand(world, kinds, models):
    x = world[1][:30]
    for name, scan in (("plain", lambda keys: 2 * D * keys), ("codes", lambda keys: 16 * keys + 2 * 256 * D)):
        index = kinds(name)
        wrapped = amips.wrap(index, models[name])
        cost = wrapped.cost(x, probes=5)
        cells = wrapped.choose_cells(x, 5)
        sizes = np.bincount(ivf_parts(index).ivf.quantizer.search(world[0], 1)[1][:, 0], minlength=C)
        np.testing.assert_array_equal(cost.scanned, sizes[cells].sum(axis=1))
        np.testing.assert_array_equal(cost.scan, scan(cost.scanned))
        np.testing.assert_array_equal(cost.flops, cost.scan + 2 * C * D)
    counts = np.arange(30) % 5 + 1
    np.testing.assert_array_equal(wrapped.cost(x, probes=counts).probed, counts)


def test_probes_of_each_query_and_bounds_on_the_mass(world, kinds, tasks, models):
    wrapped = amips.wrap(kinds("IDMap"), models["IDMap"], task=tasks["IDMap"])
    x = world[1][4000:4080]
    counts = np.random.default_rng(0).integers(1, C, 80)
    many = wrapped.search(x, 5, probes=counts)
    alone = [wrapped.search(row, 5, probes=int(count)) for row, count in zip(x, counts, strict=True)]
    np.testing.assert_array_equal(many[1], np.concatenate([ids for _, ids in alone]))
    many = wrapped.search(x, 5, min_mass=0.05)
    alone = [wrapped.search(row, 5, min_mass=0.05) for row in x]
    np.testing.assert_array_equal(many[1], np.concatenate([ids for _, ids in alone]))
    assert len(set(wrapped.cost(x, min_mass=0.05).probed.tolist())) > 1  # as many cells as each query needs


def test_bad_queries_get_nothing(world, kinds, models):
    x = world[1][:6].copy()
    x[2, 3] = np.nan
    for name, worst in (("plain", -np.inf), ("L2", np.inf)):
        scores, ids = amips.wrap(kinds(name), models[name]).search(x, 4, probes=3, on_bad="skip")
        assert (ids[2] == -1).all()
        assert (scores[2] == worst).all()
        assert (np.delete(ids, 2, axis=0) >= 0).all()


@pytest.mark.parametrize("name", ["IDMap", "codes"])
def test_eight_threads_at_once(world, kinds, models, name):
    wrapped = amips.wrap(kinds(name), models[name])
    x = world[1][:40]
    want = {probes: wrapped.search(x, 10, probes=probes)[1] for probes in range(1, 9)}
    start = threading.Barrier(8)

    def work(probes):
        start.wait(30)
        return [wrapped.search(x, 10, probes=probes, threads=1 if probes % 2 else None)[1] for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        for probes, answers in zip(want, pool.map(work, want), strict=True):
            for got in answers:
                np.testing.assert_array_equal(got, want[probes])


@pytest.mark.parametrize("option", [{"recall": 0.9}, {"ids": NAMES}], ids=["recall", "ids"])
def test_how_to_measure_without_a_task_is_refused(kinds, option):
    """Rather than left out without a word."""
    with pytest.raises(amips.AmipsError, match="nothing to measure on: give a task") as caught:
        amips.wrap(kinds("IDMap"), None, **option)
    assert "\n" not in str(caught.value)


def test_a_bound_on_the_mass_looks_where_it_was_measured(world, kinds, tasks, models):
    """In cells that hold ten keys at least, whatever k is."""
    wrapped = amips.wrap(kinds("IDMap"), models["IDMap"], task=tasks["IDMap"])
    x = world[1][4000:4080]
    sharp = replace(wrapped, temperature=1e-6)  # the best cell has all of the mass
    assert (wrapped.parts.sizes < 30).any()
    for k in (1, 30):
        cost = sharp.cost(x, k, min_mass=0.9)
        assert (cost.scanned >= max(k, 10)).all()
        assert (sharp.search(x, k, min_mass=0.9)[1] >= 0).all()
