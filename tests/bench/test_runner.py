"""Every system answers as a naive search does, and costs what can be counted by hand."""

import builtins
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import amips
from amips.backends.backend import rungs
from amips.backends.hnsw import BUDGETS
from amips.bench import runner
from amips.bench.derive import within
from amips.bench.lineup import cells_of
from amips.bench.results import ResultsStore
from amips.bench.runner import Runner, Settings
from amips.bench.searchers import budgets, spent
from amips.bench.systems import System
from amips.builder import builder
from amips.cells import Cells, kmeans
from amips.design import Design
from amips.errors import AmipsError, ResultsError, RunError, TrainingInterrupted
from amips.learn import train
from amips.nets import Linear, Net, SupportNet, load_model
from amips.search import mass_bounds
from helpers import make_world, with_linear
from reference import architecture, base, best_in_cells, random_net

torch.set_num_threads(1)

D, N, K = 16, 600, 10
CELLS = 24
SETTINGS = Settings(batch=32, singles=4, rounds=2, minutes=0.005)
PLAIN = Design.plain(CELLS)


@pytest.fixture(scope="module")
def opened(task, tmp_path_factory):
    """A bench of the small task."""
    return Runner(task, ResultsStore(tmp_path_factory.mktemp("bench") / "results", {}), SETTINGS)


@pytest.fixture(scope="module")
def mapper(task, tmp_path_factory):
    """A network with random weights that predicts one key."""
    net = random_net(architecture("key", d=D, c=1, width=7, depth=3, injected=(1, 2)))
    out = tmp_path_factory.mktemp("runs") / "mapper"
    Net(net.architecture, net.weights, {"keys": task.fingerprint}).save(out)
    return str(out)


@pytest.fixture(scope="module")
def systems(mapper):
    """Every way to search with cells."""
    return {
        "centroid": System(PLAIN),
        "linear": System(with_linear(CELLS), label="linear"),
        "mapper": System(PLAIN, run=mapper),
        "drop-in": System(PLAIN, run=mapper, mode="drop-in"),
        "rescored": System(PLAIN, run=mapper, mode="drop-in-rescored"),
    }


WAYS = ("centroid", "linear", "mapper", "drop-in", "rescored")


def coarse(name, opened, systems):
    """The score of every cell in float64, and the vector that keys are scored with first."""
    x = opened.x.astype(np.float64)
    centroids = opened.builder.cells(PLAIN).centroids
    if name == "centroid":
        return x @ centroids.T, x
    if name == "linear":
        weights = opened.builder.model(systems["linear"].design).weights
        (w,) = (np.asarray(value, np.float64) for value in weights.values())
        return x @ w.reshape(CELLS, D).T, x
    model = load_model(systems["mapper"].run)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    mapped = base(model.architecture, model.weights, x / norms)
    return mapped @ centroids.T, x if name == "mapper" else mapped


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("probes", [1, 3, CELLS])
def test_answers_are_those_of_a_naive_search(opened, systems, name, probes):
    system = systems[name]
    scores, first = coarse(name, opened, systems)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :probes]
    cells = opened.builder.cells(PLAIN)
    keys = np.asarray(opened.task.keys)
    deep = 4 * K if name == "rescored" else K
    best, ids = best_in_cells(keys, first, cells.assignment, chosen, deep)
    if name == "rescored":
        exact = np.einsum("md,mkd->mk", opened.x, keys[ids]).astype(np.float64)
        exact[ids < 0] = -np.inf
        order = np.argsort(-exact, axis=1, kind="stable")[:, :K]
        best, ids = np.take_along_axis(exact, order, axis=1), np.take_along_axis(ids, order, axis=1)
        ids[np.isneginf(best)] = -1
    run = opened._run(system, opened.open(system), probes)
    # Cells that all but tie for the last place may be chosen otherwise in float32.
    ordered = -np.sort(-scores, axis=1)
    clear = np.full(len(ids), True) if probes == CELLS else ordered[:, probes - 1] - ordered[:, probes] > 1e-5
    assert clear.mean() > 0.97
    np.testing.assert_array_equal(run.ids[clear], ids[clear])
    np.testing.assert_allclose(
        run.scores[clear], best[clear], atol=1e-4 * np.abs(best[np.isfinite(best)]).max()
    )
    if name != "drop-in":  # true inner products, whoever chose the keys
        true = np.einsum("md,mkd->mk", opened.x, keys[run.ids])
        np.testing.assert_allclose(run.scores[run.ids >= 0], true[run.ids >= 0], atol=1e-5)
    scanned = cells.sizes[chosen].sum(axis=1)
    np.testing.assert_array_equal(run.scanned[clear], scanned[clear])
    where = ids == opened.true[:, :1]
    rank = np.where(where.any(axis=1), where.argmax(axis=1) + 1, 0)
    np.testing.assert_array_equal(run.rank[clear], rank[clear])


def test_drop_in_is_not_scored_with_the_query(opened, systems):
    """Or the test above would pass for want of a difference."""
    plain, again = (opened._run(systems[n], opened.open(systems[n]), 3) for n in ("drop-in", "rescored"))
    assert (plain.ids != again.ids).any()
    assert (plain.rank != again.rank).any()


def test_flops_are_network_coarse_and_scan(opened, systems):
    """By hand: two for each multiply-add."""
    width, layers = 7, 2
    network = 2 * (3 * D * width + layers * width * width + width * D)  # x enters all three layers
    expected = {
        "centroid": (0, 2 * CELLS * D),
        "linear": (2 * CELLS * D, 0),
        "mapper": (network, 2 * CELLS * D),
        "drop-in": (network, 2 * CELLS * D),
        "rescored": (network, 2 * CELLS * D),
    }
    for name, (net, centroids) in expected.items():
        run = opened._run(systems[name], opened.open(systems[name]), 3)
        assert (run.network, run.coarse) == (net, centroids), name
        scan = 2 * D * run.scanned
        if name == "rescored":
            scan = scan + 2 * D * np.minimum(run.scanned, 4 * K)
        np.testing.assert_array_equal(run.scan, scan, err_msg=name)


def test_flat_is_exact(opened):
    system = System(backend="exact")
    run = opened._run(system, opened.open(system), 1)
    np.testing.assert_array_equal(run.ids, opened.true[:, :K])
    np.testing.assert_allclose(run.scores[100:], opened.task.test.top_scores[:, :K], atol=1e-5)
    assert (run.rank == 1).all()
    assert (run.scanned == N).all()
    assert (run.scan == 2 * N * D).all()
    assert (run.network, run.coarse) == (0, 0)
    assert budgets(system) == [1]


def test_hnsw_costs_what_it_computed(opened):
    system = System(backend="hnsw", settings=(("links", 8),))
    graph = opened.open(system)
    runs = [opened._run(system, graph, budget) for budget in (10, 64, 256)]
    for run in runs:
        assert (run.scanned > 0).all()
        assert (run.scanned <= 2 * N).all()
        np.testing.assert_array_equal(run.scan, 2 * D * run.scanned)
        true = np.einsum("md,mkd->mk", opened.x, np.asarray(opened.task.keys)[run.ids])
        np.testing.assert_allclose(run.scores, true, atol=1e-5)
    means = [run.scanned.mean() for run in runs]
    assert means == sorted(set(means))
    assert (np.diff([(run.rank == 1).mean() for run in runs]) >= 0).all()
    opened.opener.close()
    kept = opened._run(system, opened.open(system), 64)  # from disk now
    np.testing.assert_array_equal(kept.ids, runs[1].ids)
    np.testing.assert_array_equal(kept.scanned, runs[1].scanned)


def test_both_ways_of_the_baseline_give_the_same(opened, systems):
    ways = opened.open(systems["centroid"]).ways
    assert set(ways) == {"amips", "faiss"}
    for probes in (1, 5, CELLS):
        scores, ids = ways["amips"](opened.x, K, probes)
        other_scores, other_ids = ways["faiss"](opened.x, K, probes)
        np.testing.assert_array_equal(ids, other_ids)
        found = ids >= 0
        np.testing.assert_allclose(scores[found], other_scores[found], atol=1e-5)
    assert set(opened.open(systems["linear"]).ways) == {"amips"}


def test_the_cells_of_the_task_are_used_as_they_are(opened, task):
    assert opened.builder.cells(cells_of(task)) is task.cells
    made = kmeans(task.keys, CELLS, seed=0)
    np.testing.assert_array_equal(opened.builder.cells(PLAIN).assignment, made.assignment)
    np.testing.assert_array_equal(opened.builder.cells(PLAIN).centroids, made.centroids)


def test_each_number_of_cells_has_its_own_index(opened):
    """Asked for in turns; one is held at a time."""
    for count, storage in ((CELLS, "flat"), (12, "flat"), (CELLS, "flat"), (CELLS, "sq8"), (CELLS, "flat")):
        searcher = opened.open(System(Design.plain(count, storage))).searcher
        assert (searcher.c, searcher.store.storage) == (count, storage)
        np.testing.assert_array_equal(searcher.cells, opened.builder.cells(Design.plain(count)).assignment)


# budgets


@pytest.mark.parametrize("most", [1, 2, 3, 7, 10, 64, 1000, 4097])
def test_rungs_rise_from_one_to_all(most):
    steps = rungs(most)
    assert steps[0] == 1
    assert steps[-1] == most
    assert (np.diff(steps) > 0).all()
    assert all(b <= max(a + 1, 1.5 * a + 1) for a, b in itertools.pairwise(steps))


def test_budgets_of_cells():
    assert budgets(System(Design.plain(20))) == [1, 2, 3, 4, 6, 8, 12, 17, 20]


def recall_on_val(bench, run):
    held = slice(0, len(bench.task.val))
    pairs = zip(run.ids[held], bench.true[held, :K], strict=True)
    return np.mean([len(set(a) & set(b)) / K for a, b in pairs])


def test_the_ladder_of_the_baseline_ends_when_enough_is_found(task, tmp_path, monkeypatch):
    """However many keys that takes."""
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    system = System(PLAIN)
    answered = bench.answer(system)
    runs = bench.store.runs([system])
    assert [run.budget for run in runs] == answered == rungs(CELLS)[: len(answered)]
    enough = [recall_on_val(bench, run) >= 0.985 for run in runs]
    assert enough == [False] * (len(runs) - 1) + [True]
    assert 1 < len(answered) < len(rungs(CELLS))
    with monkeypatch.context() as patched:
        patched.setattr(runner, "ENOUGH", 0.1)
        assert bench.answer(system) == answered[:1]
    with monkeypatch.context() as patched:
        patched.setattr(runner, "MOST_SCANNED", 0.01)
        assert bench.answer(system) == answered
    monkeypatch.setattr(runner, "ENOUGH", 2)
    assert bench.answer(system) == rungs(CELLS)


@pytest.mark.parametrize("name", ["linear", "mapper", "drop-in"])
def test_the_ladder_of_a_contender_ends_at_a_fifth_of_the_keys(task, systems, tmp_path, monkeypatch, name):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    system = systems[name]
    answered = bench.answer(system)
    runs = bench.store.runs([system])
    assert [run.budget for run in runs] == answered == rungs(CELLS)[: len(answered)]
    ends = [
        recall_on_val(bench, run) >= 0.985 or run.scanned[: len(task.val)].mean() >= 0.2 * N for run in runs
    ]
    assert ends == [False] * (len(runs) - 1) + [True]
    if name != "linear":  # which finds enough with fewer
        assert recall_on_val(bench, runs[-1]) < 0.985
    for limit, least in (("ENOUGH", 0.0), ("MOST_SCANNED", 0.001)):  # either ends it
        with monkeypatch.context() as patched:
            patched.setattr(runner, limit, least)
            assert bench.answer(system) == answered[:1]
    assert Runner(task, bench.store, replace(SETTINGS, most_keys=1)).answer(system) == answered[:1]
    monkeypatch.setattr(runner, "MOST_SCANNED", 2)
    monkeypatch.setattr(runner, "ENOUGH", 2)
    assert bench.answer(system) == rungs(CELLS)


def test_the_ladder_of_a_reference_has_no_cap(task, tmp_path, monkeypatch):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    monkeypatch.setattr(runner, "MOST_SCANNED", 0.001)
    monkeypatch.setattr(runner, "ENOUGH", 2)
    assert bench.answer(System(backend="hnsw", settings=(("links", 8),))) == list(BUDGETS)


def test_a_ladder_that_is_given_is_climbed_to_its_end(task, tmp_path):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    assert bench.answer(System(Design.plain(8)), [2, 8]) == [2, 8]
    assert [run.budget for run in bench.store.runs([System(Design.plain(8))])] == [2, 8]


def test_what_is_stored_is_not_run_again(task, tmp_path, monkeypatch):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    system = System(Design.plain(8))
    bench.take_times({system: bench.answer(system, [1, 4])})
    monkeypatch.setattr(Runner, "open", lambda *_: pytest.fail("opened again"))
    bench.take_times({system: bench.answer(system, [1, 4])})
    bench.run([system], "bench", [1, 4])


# times


def test_times_are_taken_of_every_way_and_mode_beside_the_yardstick(opened, systems, monkeypatch):
    monkeypatch.setattr(runner, "threads", lambda: 2)
    system = systems["centroid"]
    opened.take_times({system: opened.answer(system, [2])})
    times = opened.store.get(system, 2).times
    modes = [f"{batch}/{count}" for batch in ("single", "batch") for count in ("1", "all")]
    expected = {f"{way}/{mode}" for way in ("amips", "faiss") for mode in modes}
    assert set(times) == expected | {f"yardstick/{name}" for name in expected}
    for name, seconds in times.items():
        assert (seconds > 0).all()
        assert seconds.shape == ((2, 4) if "/single/" in f"/{name}" else (2,)), name  # the yardstick's too


def test_timed_queries_are_drawn_from_the_test_queries(task, tmp_path):
    """They come in the order of the log: the first would be those of one hour."""
    store = ResultsStore(tmp_path / "results", {})
    test = np.asarray(task.test.queries)

    def rows(settings):
        timed = Runner(task, store, settings).timed
        assert timed.flags.c_contiguous
        found = [np.flatnonzero((test == one).all(axis=1)) for one in timed]
        assert all(len(where) == 1 for where in found)
        return [int(where[0]) for where in found]

    drawn = rows(SETTINGS)
    assert len(drawn) == len(set(drawn)) == 32
    assert max(drawn) >= 50 > min(drawn)  # from all over
    assert drawn != sorted(drawn)
    assert rows(replace(SETTINGS, rounds=5)) == drawn
    assert rows(replace(SETTINGS, batch=4)) == drawn[:4]
    assert rows(replace(SETTINGS, seed=1)) != drawn
    assert sorted(rows(replace(SETTINGS, batch=1000))) == list(range(100))


class Recording:
    """An opened system that only writes down how it was called."""

    def __init__(self, name, calls, ways=("amips",)):
        self.ways = {way: self.way(f"{name}/{way}", calls) for way in ways}

    @staticmethod
    def way(name, calls):
        def search(x, k, budget):
            calls.append((name, len(x), budget))

        return search


def test_systems_on_the_same_cells_are_timed_in_turns(task, tmp_path, monkeypatch):
    """Round by round every system and budget, each right after the yardstick; those with times are left."""
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), replace(SETTINGS, rounds=3, singles=2))
    monkeypatch.setattr(runner, "threads", lambda: 1)
    one, two, old = System(Design.plain(8)), System(with_linear(8)), System(Design.plain(8, "sq8"))
    calls, opens = [], []
    fakes = {
        one: Recording("one", calls, ("amips", "faiss")),
        two: Recording("two", calls),
        old: Recording("old", calls),
    }

    def open_fake(_, system):
        opens.append(system)
        return fakes[system]

    monkeypatch.setattr(Runner, "open", open_fake)
    vars(bench)["yardstick"] = Recording.way("yardstick", calls)
    bench.store.put_times(old, 1, {})
    bench.store.put_times(two, 2, {})
    bench.take_times({one: [1, 4], old: [1], two: [1, 2, 3]})
    assert opens == [one, two]  # once each, and only who lacks times

    probes = runner.YARDSTICK_PROBES
    warm = 2 * len(("yardstick", "one/amips", "one/faiss", "two"))
    assert {name for name, _, _ in calls[:warm]} == {"yardstick", "one/amips", "one/faiss", "two/amips"}
    assert sorted(size for _, size, _ in calls[:warm]) == [1] * 4 + [32] * 4

    def turn(name, budget):
        """Two single queries of the yardstick, two of the search, then the batch of each."""
        single = [("yardstick", 1, probes)] * 2 + [(name, 1, budget)] * 2
        return [*single, ("yardstick", 32, probes), (name, 32, budget)]

    order = [("one/amips", 1), ("one/faiss", 1), ("one/amips", 4), ("one/faiss", 4)]
    order += [("two/amips", 1), ("two/amips", 3)]
    assert calls[warm:] == 3 * [call for name, budget in order for call in turn(name, budget)]
    for system, budget in ((one, 1), (one, 4), (two, 1), (two, 3)):
        assert bench.store.has_times(system, budget)


def test_mapped_queries_are_timed_with_fractions_of_n_results(task, tmp_path, monkeypatch, mapper):
    """On one thread, beside the usual number; what was timed before that is timed again."""
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), replace(SETTINGS, rounds=1, singles=2))
    monkeypatch.setattr(runner, "threads", lambda: 1)
    system = System(PLAIN, run=mapper, mode="drop-in")
    bench.answer(system, [1])
    asked = []

    counting = SimpleNamespace(ways={"amips": lambda x, k, budget: asked.append((len(x), k))})
    vars(bench)["yardstick"] = lambda x, k, budget: asked.append("yardstick")
    monkeypatch.setattr(Runner, "open", lambda *_: counting)
    usual = {
        f"{side}amips/{mode}": np.ones(1) for side in ("", "yardstick/") for mode in ("single/1", "batch/1")
    }
    bench.store.put_times(system, 1, usual)
    bench.take_times({system: [1]})
    timed = [call for call in asked if call != "yardstick"][2:]  # after the warm ones
    depths = [SETTINGS.k, *within(task.n)]
    assert timed == [call for k in depths for call in [(1, k), (1, k), (len(bench.timed), k)]]
    names = {f"{mode}/1{at}" for mode in ("single", "batch") for at in ("", "@0.01%", "@0.1%", "@0.5%")}
    stored = bench.store.get(system, 1).times
    assert {name.removeprefix("amips/") for name in stored if not name.startswith("yardstick")} == names
    asked.clear()
    bench.take_times({system: [1]})
    assert asked == []


def test_a_depth_is_what_every_system_is_asked_for(task, tmp_path, systems):
    """Results, costs and times are of so many; the first k are stored, and the rank among all of them."""
    usual = Runner(task, ResultsStore(tmp_path / "a", {}), replace(SETTINGS, rounds=1, singles=2))
    deep = Runner(task, ResultsStore(tmp_path / "b", {}), replace(SETTINGS, depth=40, rounds=1, singles=2))
    assert (usual.asked, deep.asked) == (SETTINGS.k, 40)
    for name in ("centroid", "drop-in", "rescored"):
        runs = [bench._run(systems[name], bench.open(systems[name]), 4) for bench in (usual, deep)]
        assert runs[0].ids.shape == runs[1].ids.shape
        assert runs[1].rank.max() <= 40
        np.testing.assert_array_equal(runs[0].scanned, runs[1].scanned)
        if name == "rescored":  # four candidates for each result
            assert (runs[1].scan >= runs[0].scan).all()
            assert (runs[1].scan > runs[0].scan).any()
        else:
            np.testing.assert_array_equal(runs[0].ids, runs[1].ids)
    deep.answer(systems["drop-in"], [1])
    deep.take_times({systems["drop-in"]: [1]})
    assert not any("@" in name for name in deep.store.get(systems["drop-in"], 1).times)


def test_each_time_is_stored_beside_the_yardsticks_own(task, tmp_path, monkeypatch):
    """A clock that counts: every call takes as long as its number."""
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), replace(SETTINGS, rounds=2, singles=3))
    monkeypatch.setattr(runner, "threads", lambda: 1)
    system = System(Design.plain(8))
    bench.answer(system, [1])
    calls = []
    now = [0.0]
    vars(bench)["yardstick"] = Recording.way("yardstick", calls)
    monkeypatch.setattr(Runner, "open", lambda *_: Recording("own", calls))

    def clock():
        now[0] += len(calls)  # a call adds its number to the time between two looks
        return now[0]

    monkeypatch.setattr(runner.time, "perf_counter", clock)
    bench.take_times({system: [1]})
    times = bench.store.get(system, 1).times
    # The first four calls are warm ones.
    np.testing.assert_array_equal(times["yardstick/amips/single/1"], [[5, 6, 7], [13, 14, 15]])
    np.testing.assert_array_equal(times["amips/single/1"], [[8, 9, 10], [16, 17, 18]])
    np.testing.assert_allclose(times["yardstick/amips/batch/1"], np.array([11, 19]) / 32)
    np.testing.assert_allclose(times["amips/batch/1"], np.array([12, 20]) / 32)


def test_run_answers_and_times_group_by_group(task, tmp_path, monkeypatch):
    """A group shares its index: cells and storage; all of it is answered before it is timed."""
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    done = []

    def answer(self, system, ladder=None):
        done.append(("answer", system))
        return [7] if ladder is None else list(ladder)

    monkeypatch.setattr(Runner, "answer", answer)
    monkeypatch.setattr(Runner, "take_times", lambda _, answered: done.append(("times", answered)))
    eight, nine = System(Design.plain(8)), System(Design.plain(9))
    linear, small = System(with_linear(8), label="linear"), System(Design.plain(8, "sq8"))
    flat, graph = System(backend="exact"), System(backend="hnsw")
    bench.run([graph, nine, eight, flat, small, linear], "bench")
    assert done == [
        ("answer", eight),
        ("answer", linear),
        ("times", {eight: [7], linear: [7]}),
        ("answer", small),
        ("times", {small: [7]}),
        ("answer", nine),
        ("times", {nine: [7]}),
        ("answer", flat),
        ("times", {flat: [7]}),
        ("answer", graph),
        ("times", {graph: [7]}),
    ]
    done.clear()
    bench.run([eight, linear], "bench", [2, 3], times=False)
    assert done == [("answer", eight), ("answer", linear)]
    done.clear()
    bench.run([eight], "bench", [2, 3])
    assert done[-1] == ("times", {eight: [2, 3]})
    done.clear()
    with pytest.raises(AmipsError, match="there are only 600 keys"):
        bench.run([eight, System(Design.plain(601))], "bench")
    assert done == []  # refused before anything is run


def test_systems_on_the_same_cells_share_one_index(task, systems, tmp_path, monkeypatch):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), replace(SETTINGS, rounds=1))
    bench.yardstick  # noqa: B018  (it has an index of its own)
    built = []
    real = builder.FaissCellStore.build

    def build(keys, assignment, centroids, storage, *others):
        built.append((len(centroids), storage))
        return real(keys, assignment, centroids, storage, *others)

    monkeypatch.setattr(builder.FaissCellStore, "build", staticmethod(build))
    other = System(Design.plain(12))
    chosen = [systems["drop-in"], other, systems["centroid"], systems["mapper"]]
    bench.run(chosen, "bench", [1, 2])
    assert built == [(12, "flat"), (CELLS, "flat")]
    for system in chosen:
        assert all(run.times for run in bench.store.runs([system]))


def test_what_fit_makes_on_the_same_cells_shares_them_too(task, tmp_path, monkeypatch):
    """Query-aware cells are made once, and one router is trained for both storages."""
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), replace(SETTINGS, rounds=1))
    made = []
    real = builder.make_cells

    def make_cells(keys, count, queries, top, *, strength, **options):
        made.append((count, strength))
        assert top.shape[1] >= K
        np.testing.assert_array_equal(queries.load(), task.train.queries)
        return real(keys, count, queries, top, strength=strength, **options)

    monkeypatch.setattr(builder, "make_cells", make_cells)
    own = Design(12, 1.5, Linear(rank=8), spill_fraction=0.0, storage="flat")
    systems = [System(own), System(replace(own, storage="lean", dimensions=8)), System(Design.plain(12))]
    bench.run(systems, "bench")
    assert sorted(made) == [(12, 0), (12, 1.5), (24, 0)]  # and the plain ones, of the baseline and yardstick
    assert list(bench.work.glob("run-*")) == [bench.builder.run_directory(own)]
    for system in systems[:2]:
        runs = bench.store.runs([system])
        opened = bench.open(system).searcher
        assert opened.temperature > 0
        assert opened.store.storage == system.design.storage
        assert opened.model.architecture.rank == 8
        np.testing.assert_array_equal(opened.cells, bench.builder.cells(own).assignment)
        assert (opened.cells != bench.builder.cells(Design.plain(12)).assignment).any()
        for run in runs:
            bound = mass_bounds()[run.budget]
            scores, ids = opened.search(bench.x, K, min_mass=bound)
            np.testing.assert_array_equal(run.ids, ids)
            cost = opened.cost(bench.x, K, min_mass=bound)
            np.testing.assert_array_equal(run.scanned, cost.scanned)
            assert np.isfinite(scores[ids >= 0]).all()
        ranked = [(run.rank > 0).mean() for run in runs]
        assert ranked == sorted(ranked)
        assert len(ranked) > 3


def test_budgets_of_masses():
    system = System(Design(20))
    assert budgets(system) == list(range(len(mass_bounds())))
    assert spent(system, 0) == "cells with a mass of at least 0.4"
    assert spent(System(Design.plain(20)), 1200) == "1,200 probes"


def test_numbers_that_are_left_to_the_builder_are_known_before_anything_is_run(opened):
    system = opened.resolved(System(Design(12), label="ours"))
    assert system == System(opened.builder.resolved(Design(12)), label="ours")
    assert system.design.router.rank == Linear().rank_for(D)
    assert system.design.dimensions is not None
    assert opened.resolved(System(backend="exact")) == System(backend="exact")


# what is kept to save time


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def empty(path):
    path.write_bytes(b"")


def nonsense(path):
    path.write_bytes(b"first line\nsecond line\n" * 9)


@pytest.mark.parametrize("harm", [cut, empty, nonsense])
def test_damaged_cells_are_made_again(task, tmp_path, harm):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    want = bench.builder.cells(Design.plain(12))
    (file,) = bench.work.glob("cells-*")
    harm(file)
    searcher = bench.opener.searcher(System(Design.plain(12)))
    np.testing.assert_array_equal(searcher.cells, want.assignment)
    np.testing.assert_array_equal(bench.builder.cells(Design.plain(12)).centroids, want.centroids)


@pytest.mark.parametrize("harm", [cut, empty, nonsense])
def test_a_damaged_graph_is_named_in_one_line(task, tmp_path, harm):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    system = System(backend="hnsw", settings=(("links", 8),))
    bench.open(system)
    bench.opener.close()
    assert [path.name for path in bench.work.iterdir()] == ["hnsw-links-8"]
    harm(bench.work / "hnsw-links-8" / "index.faiss")
    with pytest.raises(ResultsError, match=r"hnsw-links-8/index\.faiss .+; delete .+hnsw-links-8$") as caught:
        bench.answer(system)
    assert "\n" not in str(caught.value)


# the linear router of the bench, and other cells of a task


def test_other_cells_of_a_task(task, tmp_path):
    before = (task.c, dict(task.options), task.train.cell_ids.shape, task.has_cell_targets)
    cells = kmeans(task.keys, 12, seed=3)
    other = task.with_cells(cells)
    assert (other.c, other.n, other.d, other.fingerprint) == (12, N, D, task.fingerprint)
    assert not other.has_cell_targets
    assert other.cells is cells
    for name in ("train", "val", "test"):
        one, two = getattr(task, name), getattr(other, name)
        np.testing.assert_array_equal(one.queries, two.queries)
        np.testing.assert_array_equal(one.top_ids, two.top_ids)
        assert two.cell_ids.shape == two.cell_scores.shape == (len(one), 0)
    model = train(other, Linear(), samples=512, out=tmp_path / "linear")
    assert (model.c, model.d) == (12, D)
    assert model.about["keys"] == task.fingerprint
    with pytest.raises(RunError, match="no targets for each cell") as caught:
        train(other, SupportNet(size="XS", depth=2), samples=512, out=tmp_path / "support")
    assert "\n" not in str(caught.value)
    assert (task.c, dict(task.options), task.train.cell_ids.shape, task.has_cell_targets) == before
    assert task.cells.count == 8
    assert task.options != other.options
    again = task.with_cells(Cells(np.roll(cells.assignment, 1), cells.centroids))
    assert again.options != other.options  # a run of these cells is not one of those


def test_the_linear_router_is_trained_once(opened, systems):
    design = systems["linear"].design
    first = opened.builder.model(design)
    weights = opened.builder.run_directory(design) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    second = opened.builder.model(design)
    assert weights.stat().st_mtime_ns == written
    for name, value in first.weights.items():
        np.testing.assert_array_equal(value, second.weights[name])


def test_an_interrupted_training_says_how_to_continue(task, tmp_path, monkeypatch):
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), replace(SETTINGS, minutes=1.0))

    def stop(*_, **__):
        raise TrainingInterrupted("stopped at step 3; resume it")

    monkeypatch.setattr("amips.learn.train", stop)
    with pytest.raises(TrainingInterrupted, match=r"^stopped; the same command continues where it was$"):
        bench.answer(System(with_linear(8), label="linear"))


def test_without_torch_the_linear_router_says_what_to_install(opened, systems, monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "amips.learn":  # which imports torch
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(AmipsError, match=r"needs torch; pip install 'amips\[train\]'"):
        opened.open(systems["linear"])


def test_quantised_cells_are_scored_with_the_query(opened):
    system = System(Design.plain(CELLS, "sq8"))
    run = opened._run(system, opened.open(system), CELLS)
    true = np.einsum("md,mkd->mk", opened.x, np.asarray(opened.task.keys)[run.ids])
    np.testing.assert_allclose(run.scores, true, atol=1e-5)
    assert (run.ids[:, 0] == opened.true[:, 0]).mean() > 0.95
    assert set(opened.open(system).ways) == {"amips"}


def test_fewer_keys_than_are_asked_for(tmp_path):
    task = amips.label(*make_world(12, 60, 8, seed=1), val=10, test=10, k=10, out=tmp_path / "task")
    bench = Runner(task, ResultsStore(tmp_path / "results", {}), SETTINGS)
    system = System(Design.plain(3))
    assert bench.answer(system, [1, 3]) == [1, 3]
    one, every = bench.store.runs([system])
    assert (one.ids == -1).any()
    assert np.isneginf(one.scores[one.ids == -1]).all()
    np.testing.assert_array_equal(every.ids, bench.true)
