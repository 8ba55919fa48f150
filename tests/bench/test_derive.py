"""From runs to figures: metrics, fronts, costs at a recall, intervals."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amips.bench import derive
from amips.bench.derive import (
    Bootstrap,
    Family,
    Measured,
    Ratio,
    _ratio_of_draw,
    baseline,
    cost_at,
    families,
    on_test,
    on_val,
    within,
    yardstick_seconds,
)
from amips.bench.results import Run
from amips.bench.systems import System
from amips.design import Design
from amips.metrics import front
from helpers import with_linear

# Few distinct values, so that ties are common.
points = hnp.arrays(np.int64, st.tuples(st.integers(1, 12), st.just(2)), elements=st.integers(0, 6))


class Queries:
    """Of a split, its length and its top keys."""

    def __init__(self, top_ids):
        self.top_ids = top_ids

    def __len__(self):
        return len(self.top_ids)


def run_of(ids, scan, rank=None, system=None, budget=1, network=0, coarse=0, times=None):
    """A stored run with these ids [m, k] and FLOPs of the scan [m]."""
    ids = np.asarray(ids, np.int32)
    scan = np.asarray(scan, np.int64)
    rank = np.zeros(len(ids), np.int32) if rank is None else np.asarray(rank, np.int32)
    system = system or System(Design.plain(4))
    scores = np.zeros(ids.shape, np.float32)
    return Run(system, budget, ids, scores, rank, scan // 2, scan, network, coarse, times or {})


def family_of(name, recalls, costs, role="contender", times=None):
    """Runs whose recall@10 (shares of 10 keys, [runs, m]) and FLOPs [runs, m] are given."""
    true = np.arange(10)
    runs = []
    for i, (found, cost) in enumerate(zip(recalls, costs, strict=True)):
        hits = np.rint(10 * np.asarray(found)).astype(int)
        ids = np.where(true < hits[:, None], true, 1000 + true)
        timed = None if times is None else times[i]
        run = run_of(ids, cost, budget=i + 1, times=timed)
        runs.append(Measured(run, slice(0, None), np.tile(true, (len(hits), 1)), 10_000))
    return Family(name, role, runs)


# fronts


@given(points)
def test_front_is_what_nothing_beats(values):
    cost, recall = values.astype(float).T
    best = front(cost, recall)
    undominated = set()
    for i in range(len(cost)):
        beaten = any(
            cost[j] <= cost[i] and recall[j] >= recall[i] and (cost[j] < cost[i] or recall[j] > recall[i])
            for j in range(len(cost))
        )
        if not beaten:
            undominated.add((cost[i], recall[i]))
    found = [(cost[i], recall[i]) for i in best]
    assert len(found) == len(undominated)  # of equal points one
    assert set(found) == undominated
    assert found == sorted(found)
    assert (np.diff(recall[best]) > 0).all()


def test_front_of_equal_points_is_the_first():
    assert front(np.array([2.0, 1.0, 1.0, 1.0]), np.array([0.5, 0.5, 0.5, 0.2])).tolist() == [1]


def test_no_points_have_no_front_and_reach_nothing():
    none = np.array([])
    assert len(front(none, none)) == 0
    assert math.isnan(cost_at(none, none, 0.1))


def test_cost_at_a_recall():
    cost, recall = np.array([40.0, 10.0, 20.0, 30.0]), np.array([0.9, 0.3, 0.5, 0.4])  # 30 is beaten
    assert cost_at(cost, recall, 0.3) == 10
    assert cost_at(cost, recall, 0.5) == 20
    assert cost_at(cost, recall, 0.9) == 40
    assert cost_at(cost, recall, 0.4) == pytest.approx(15)
    assert cost_at(cost, recall, 0.7) == pytest.approx(30)
    assert cost_at(cost, recall, 0.0) == 10
    assert math.isnan(cost_at(cost, recall, 0.91))


@given(points, st.lists(st.integers(0, 70), min_size=2, max_size=8))
def test_more_recall_never_costs_less(values, tenths):
    cost, recall = values.astype(float).T
    targets = [number / 10 for number in tenths]
    found = [cost_at(cost, recall, target) for target in sorted(targets)]
    reached = [c for c in found if not math.isnan(c)]
    assert len(reached) == sum(target <= recall.max() for target in targets)
    assert not any(map(math.isnan, found[: len(reached)]))  # what is not reached comes last
    assert (np.diff(reached) >= -1e-9).all()


@given(points)
def test_cost_at_the_recall_of_a_point_of_the_front_is_its_own(values):
    cost, recall = values.astype(float).T
    for i in front(cost, recall):
        assert cost_at(cost, recall, recall[i]) == pytest.approx(cost[i])


# metrics


def test_shares_of_n_are_at_least_one_key():
    assert within(50_000) == [5, 50, 250]
    assert within(601) == [1, 1, 4]
    assert within(3) == [1, 1, 1]


def test_metrics_are_those_of_plain_loops():
    rng = np.random.default_rng(0)
    n, m, val = 2500, 60, 20
    deep = {"recall@0.01%": 1, "recall@0.1%": 3, "recall@0.5%": 13}
    returned = np.array([rng.choice(40, 30, replace=False) for _ in range(m)])
    true = np.array([rng.choice(40, 12, replace=False) for _ in range(m)])
    rank = [returned[i].tolist().index(true[i, 0]) + 1 if true[i, 0] in returned[i] else 0 for i in range(m)]
    run = run_of(returned[:, :10], np.arange(m), rank=rank, network=7, coarse=5)
    task = SimpleNamespace(val=Queries(true[:val]), test=Queries(true[val:]), n=n)
    middle = slice(5, 25)
    for rows, (family,) in (
        (range(val, m), on_test([run], task)),
        (range(val), on_val([run], task)),
        (range(5, 25), families([run], middle, true[middle], n)),
    ):
        (measured,) = family.runs
        assert (family.name, family.role) == ("centroid", "baseline")
        naive = {name: [] for name in ("recall@1", "recall@10", "mrr", *deep)}
        for i in rows:
            naive["recall@1"].append(float(returned[i, 0] == true[i, 0]))
            naive["recall@10"].append(sum(key in returned[i, :10] for key in true[i, :10]) / 10)
            where = [p for p in range(30) if returned[i, p] == true[i, 0]]
            naive["mrr"].append(1 / (where[0] + 1) if where else 0)
            for name, count in deep.items():
                naive[name].append(float(true[i, 0] in returned[i, :count]))
        for name, values in naive.items():
            np.testing.assert_allclose(measured.metric(name), values, err_msg=name)
        np.testing.assert_array_equal(measured.cost("flops"), [7 + 5 + i for i in rows])
        np.testing.assert_array_equal(measured.cost("scanned"), [i // 2 for i in rows])
        assert measured.cost("single/1") is None


def test_families_share_a_front_over_cells_and_budgets_and_come_in_order():
    systems = [System(backend="hnsw"), System(with_linear(8), label="linear")]
    systems += [System(Design.plain(cells)) for cells in (4, 16)]
    runs = [run_of([[0]], [2], system=s, budget=b) for s in systems for b in (1, 2)]
    found = families(runs, slice(0, None), np.zeros((1, 1), int), 10)
    assert [(f.name, f.role, len(f.runs)) for f in found] == [
        ("centroid", "baseline", 4),
        ("linear", "contender", 2),
        ("HNSW", "reference", 2),
    ]


def test_centroid_routing_of_any_storage_is_one_baseline():
    """The best of either at every recall: sq8 is cheaper here up to 0.6, flat alone reaches 0.9."""
    shares = np.array([[0.4] * 5, [0.6] * 5, [0.9] * 5])
    flat = family_of("centroid", shares, np.array([[10] * 5, [20] * 5, [40] * 5]), role="baseline")
    small = family_of("centroid, sq8", shares[:2], np.array([[4] * 5, [8] * 5]), role="baseline")
    linear, graph = (
        family_of(role, shares, np.ones((3, 5)), role=role) for role in ("contender", "reference")
    )
    merged = baseline([flat, small, linear, graph])
    assert (merged.name, merged.role) == ("centroid routing", "baseline")
    assert merged.runs == flat.runs + small.runs
    reached = [merged.cost_at("flops", "recall@10", target) for target in (0.4, 0.6, 0.9)]
    assert reached == [4, 8, 40]
    assert merged.cost_at("flops", "recall@10", 0.75) == pytest.approx(24)  # between one of each
    # Draws of the merged family are not mistaken for those of a member.
    boot = Bootstrap(5)
    for family in (flat, small, merged):
        assert boot.recalls(family, "recall@10").shape == (boot.draws, len(family.runs))
    assert boot.ratio(flat, merged, "flops", "recall@10", 0.6) == Ratio(2.5, 2.5, 2.5)
    # Nor are those of a contender that happens to be called the same.
    posing = family_of(merged.name, shares, np.array([[2] * 5, [4] * 5, [20] * 5]))
    assert boot.ratio(merged, posing, "flops", "recall@10", 0.6) == Ratio(2, 2, 2)
    assert baseline([linear, flat, graph]) is flat
    assert baseline([linear, graph]) is None
    assert baseline([]) is None


# times


def timed(own, yard, way="amips", mode="batch/1"):
    return {f"{way}/{mode}": np.array(own), f"yardstick/{way}/{mode}": np.array(yard)}


def only(times):
    return Measured(run_of([[0]], [2], times=times), slice(0, None), np.zeros((1, 1), int), 10)


def test_a_slow_round_of_the_machine_changes_nothing():
    calm = only(timed([3e-3, 3.3e-3, 2.7e-3], [1e-3] * 3))
    slow = only(timed([6e-3, 3.3e-3, 2.7e-3], [2e-3, 1e-3, 1e-3]))  # twice as slow in the first round
    np.testing.assert_allclose(calm.cost("batch/1"), slow.cost("batch/1"))
    np.testing.assert_allclose(calm.cost("batch/1"), [3, 3.3, 2.7])
    only_own = only(timed([6e-3, 3.3e-3, 2.7e-3], [1e-3] * 3))
    assert not np.allclose(only_own.cost("batch/1"), calm.cost("batch/1"))


def test_single_queries_have_their_median_within_a_round():
    """One that the machine held up decides nothing, whether it was the search's or the yardstick's."""
    own = [[1e-3, 2e-3, 90e-3], [4e-3, 6e-3, 8e-3]]
    yard = [[1e-3, 70e-3, 0.5e-3], [3e-3, 2e-3, 1e-3]]
    measured = only(timed(own, yard, mode="single/1"))
    np.testing.assert_allclose(measured.cost("single/1"), [2 / 1, 6 / 2])
    family = Family("a", "contender", [measured])
    assert family.cost_at("single/1", "recall@1", 0.0) == pytest.approx(2.5)  # the median of the rounds
    assert family.rounds("single/1") == 2
    assert family.rounds("batch/1") == 0


def test_the_time_of_a_mapped_query_is_of_as_many_results_as_its_recall_needs():
    times = timed([1.0], [1.0]) | timed([2.0], [1.0], mode="batch/1@0.1%")
    times |= timed([3.0], [1.0], mode="batch/1@0.5%")
    own, plain = System(Design.plain(4), run="/runs/a", mode="drop-in"), System(Design.plain(4))
    for system, deep in ((own, [2.0, 3.0]), (plain, [1.0, 1.0])):  # who scores with x has the top key first
        run = run_of([[0]], [2], rank=[1], system=system, times=times)
        family = Family("a", "contender", [Measured(run, slice(0, None), np.zeros((1, 1), int), 10)])
        assert family.costs("batch/1").tolist() == [1.0]
        assert family.costs("batch/1", "recall@1").tolist() == [1.0]
        found = [family.cost_at("batch/1", metric, 1.0) for metric in ("recall@0.1%", "recall@0.5%")]
        assert found == deep
        assert family.costs("flops", "recall@0.1%").tolist() == family.costs("flops").tolist()
        drawn = Bootstrap(1, draws=100)
        assert drawn.costs(family, "batch/1", "recall@0.1%").max() == deep[0]
        assert drawn.costs(family, "batch/1").max() == 1.0


def test_the_rounds_of_a_family_are_those_of_the_run_with_fewest():
    shares, costs = np.full((3, 5), 0.5), np.full((3, 5), 10)
    times = [timed([3.0] * 4, [1.0] * 4), timed([3.0] * 2, [1.0] * 2), None]
    assert family_of("a", shares, costs, times=times).rounds("batch/1") == 2


def test_the_fastest_way_counts_for_each_mode():
    times = timed([5.0, 5.0], [1.0, 1.0]) | timed([8.0, 8.0], [2.0, 2.0], way="faiss")
    times |= timed([1.0, 1.0], [1.0, 1.0], mode="single/1")
    times |= timed([3.0, 3.0], [1.0, 1.0], way="faiss", mode="single/1")
    for order in (times, dict(reversed(times.items()))):
        measured = only(order)
        np.testing.assert_allclose(measured.cost("batch/1"), [4, 4])  # faiss: its clock ran at half speed
        np.testing.assert_allclose(measured.cost("single/1"), [1, 1])


def test_the_yardstick_in_seconds_is_the_median_of_all_its_times():
    runs = [run_of([[0]], [2], times=timed([9.0, 9.0], [1.0, 2.0]))]
    runs += [run_of([[0]], [2], times=timed([9.0], [7.0], way="faiss"))]
    assert yardstick_seconds(runs) == {"batch/1": 2.0}
    # Of single queries, of the medians of the rounds: 2, 30 and 4.
    single = timed([[9.0] * 3] * 2, [[1.0, 2.0, 50.0], [30.0, 30.0, 1.0]], mode="single/1")
    other = timed([[9.0] * 3], [[4.0, 4.0, 80.0]], way="faiss", mode="single/1")
    runs += [run_of([[0]], [2], times=times) for times in (single, other)]
    assert yardstick_seconds(runs) == {"batch/1": 2.0, "single/1": 4.0}


def test_a_round_whose_yardstick_was_held_up_does_not_count():
    """Threads that wait for a busy core make the fixed search slow, and all else look fast beside it."""
    steady = [run_of([[0]], [2], times=timed([4.0] * 3, [2.0] * 3)) for _ in range(5)]
    stalled = run_of([[0]], [2], times=timed([4.0, 4.0, 4.0], [2.0, 900.0, 2.0]))
    (family,) = families([*steady, stalled], slice(None), np.zeros((1, 1), int), 10)
    np.testing.assert_allclose(family.runs[-1].cost("batch/1"), [2, 2])
    never = run_of([[0]], [2], times=timed([4.0], [900.0]))
    (family,) = families([*steady, never], slice(None), np.zeros((1, 1), int), 10)
    assert family.runs[-1].cost("batch/1") is None


def test_runs_without_times_have_no_place_on_a_front_of_times():
    shares, costs = np.array([[0.4] * 5, [0.9] * 5]), np.array([[10] * 5, [20] * 5])
    family = family_of("a", shares, costs, times=[timed([3.0], [1.0]), None])
    assert family.cost_at("batch/1", "recall@10", 0.4) == 3
    assert math.isnan(family.cost_at("batch/1", "recall@10", 0.9))
    assert family.nearest("batch/1", "recall@10", 0.9) is None
    assert family.nearest("flops", "recall@10", 0.5) is family.runs[1]
    assert Bootstrap(5).ratio(family, family, "batch/1", "recall@10", 0.9) is None


# intervals


def drawn_family(rng, name, m, costs, chances=(0.3, 0.6, 0.85, 0.99)):
    """Queries that each find every key or none with these chances, at these mean costs."""
    found = rng.random(m)[None] < np.asarray(chances)[:, None]
    spent = rng.gamma(4, np.asarray(costs)[:, None] / 4, (len(chances), m))
    return family_of(name, found.astype(float), np.rint(spent))


def test_the_interval_covers_a_planted_ratio():
    """The ratio at a recall is exactly 2 in truth; of 95 % intervals nearly all must cover it."""
    costs = np.array([1e6, 2e6, 4e6, 8e6])
    covered, widths = 0, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        base = drawn_family(rng, "base", 300, costs)
        ours = drawn_family(rng, "ours", 300, costs / 2)
        ratio = Bootstrap(300, draws=200, seed=seed).ratio(base, ours, "flops", "recall@10", 0.8)
        assert ratio.low < ratio.value < ratio.high
        covered += ratio.low <= 2 <= ratio.high
        widths.append(ratio.high - ratio.low)
    assert covered >= 34
    assert np.median(widths) < 1  # and they say something


def test_a_family_against_itself_is_exactly_one():
    rng = np.random.default_rng(1)
    one = drawn_family(rng, "one", 200, [1e6, 2e6, 4e6, 8e6])
    two = replace(one, name="two")
    for axis in ("flops", "scanned"):
        ratio = Bootstrap(200).ratio(one, two, axis, "recall@10", 0.7)
        assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)
        assert not ratio.better
        assert not ratio.worse


def test_the_same_draws_make_an_even_gain_certain():
    """Half the cost on every query: noise between queries is large, but shared."""
    rng = np.random.default_rng(2)
    base = drawn_family(rng, "base", 100, [1e6, 2e6, 4e6, 8e6])
    ours = replace(
        base,
        name="ours",
        runs=[replace(r, run=replace(r.run, scan=r.run.scan // 2), _known={}) for r in base.runs],
    )
    ratio = Bootstrap(100).ratio(base, ours, "flops", "recall@10", 0.7)
    assert ratio.better
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([2, 2, 2], rel=1e-4)


def test_a_side_that_misses_the_recall_in_a_draw_costs_any_amount():
    assert _ratio_of_draw(6.0, 3.0) == 2
    assert _ratio_of_draw(math.nan, 3.0) == math.inf
    assert _ratio_of_draw(6.0, math.nan) == 0
    assert math.isnan(_ratio_of_draw(math.nan, math.nan))


def test_draws_in_which_one_side_misses_the_recall_widen_the_interval():
    """Left out, they would leave an interval of the lucky draws."""
    m = 100
    costs = np.array([[10] * m, [20] * m])
    few, others = np.zeros((2, m)), np.zeros((2, m))
    few[1, :3] = others[1, 97:] = 1
    # On all queries either reaches 0.03. So does either in 58 % of the draws, but both at once in fewer
    # than half of them.
    few, others = family_of("few", few, costs), family_of("others", others, costs)
    boot = Bootstrap(m)
    reached = [boot.recalls(family, "recall@10")[:, 1] >= 0.03 - 1e-6 for family in (few, others)]
    assert min(r.mean() for r in reached) > 0.5 > (reached[0] & reached[1]).mean()
    assert few.cost_at("flops", "recall@10", 0.03) == others.cost_at("flops", "recall@10", 0.03) == 20
    ratio = boot.ratio(few, others, "flops", "recall@10", 0.03)
    assert ratio == Ratio(1)
    assert str(ratio) == "1.00"
    assert not ratio.better
    assert not ratio.worse
    # One side that always reaches it: only the other may cost any amount.
    sure = family_of("sure", np.ones((1, m)), np.full((1, m), 10))
    assert boot.ratio(few, sure, "flops", "recall@10", 0.03).high is None
    assert boot.ratio(few, sure, "flops", "recall@10", 0.03).low > 1
    assert boot.ratio(sure, few, "flops", "recall@10", 0.03).low is None
    assert boot.ratio(sure, few, "flops", "recall@10", 0.03).high < 1
    # Draws in which neither reaches it tell nothing, here 42 %: the others do.
    assert boot.ratio(few, replace(few, name="again"), "flops", "recall@10", 0.03) == Ratio(1, 1, 1)


def test_too_few_draws_that_reach_it_make_no_ratio():
    """A recall that hangs on one query: neither side reaches it in more than half of the draws."""
    m = 200
    found = np.zeros((1, m))
    found[0, ::2] = 0.1
    found[0, 0] = 1
    one = family_of("one", found, np.full((1, m), 10))
    two = replace(one, name="two")
    target = found.mean()
    boot = Bootstrap(m)
    reached = boot.recalls(one, "recall@10")[:, 0] >= target - 1e-12
    assert 0.3 < reached.mean() < 0.5
    assert one.cost_at("flops", "recall@10", target) == 10
    assert boot.ratio(one, two, "flops", "recall@10", target) is None
    assert boot.ratio(one, two, "flops", "recall@10", target - 0.01) == Ratio(1, 1, 1)


def test_what_is_not_reached_has_no_ratio():
    found, costs = np.full((1, 50), 0.5), np.full((1, 50), 10)
    low = family_of("low", found, costs)
    high = family_of("high", found + 0.4, costs)
    boot = Bootstrap(50)
    assert boot.ratio(high, low, "flops", "recall@10", 0.9) is None
    assert boot.ratio(low, high, "flops", "recall@10", 0.9) is None
    assert boot.ratio(low, high, "flops", "recall@10", 0.49).value == 1


def test_times_are_drawn_over_rounds():
    found, costs = np.ones((1, 50)), np.full((1, 50), 10)
    base = family_of("base", found, costs, times=[timed([4.0] * 9, [1.0] * 9)])
    steady = family_of("steady", found, costs, times=[timed([2.0] * 9, [1.0] * 9)])
    shaky = family_of("shaky", found, costs, times=[timed([1.0, 2.0, 8.0], [1.0] * 3)])
    boot = Bootstrap(50)
    ratio = boot.ratio(base, steady, "batch/1", "recall@10", 0.9)
    assert (ratio.value, ratio.low, ratio.high) == (2, 2, 2)
    ratio = boot.ratio(base, shaky, "batch/1", "recall@10", 0.9)
    assert (ratio.value, ratio.low, ratio.high) == (2, 0.5, 4)
    assert not ratio.better


@pytest.mark.parametrize("rounds", [(1, 9), (9, 1), (1, 1)])
def test_a_time_taken_once_tells_nothing_of_its_spread(rounds):
    found, costs = np.ones((1, 50)), np.full((1, 50), 10)
    sides = [
        family_of(f"{seconds}", found, costs, times=[timed([seconds] * count, [1.0] * count)])
        for seconds, count in zip((4.0, 2.0), rounds, strict=True)
    ]
    boot = Bootstrap(50)
    ratio = boot.ratio(*sides, "batch/1", "recall@10", 0.9)
    assert ratio == Ratio(2)
    assert not ratio.known
    assert str(ratio) == "2.00"  # never an interval from 0 to infinity
    assert not ratio.better
    assert not boot.ratio(*reversed(sides), "batch/1", "recall@10", 0.9).worse
    assert boot.ratio(*sides, "flops", "recall@10", 0.9) == Ratio(1, 1, 1)  # that is not a time


def width(ratio):
    return ratio.high - ratio.low


def test_noisy_copies_of_one_source_are_drawn_together():
    """Every query twice tells no more than once: the same interval, which as many sources would narrow."""
    rng = np.random.default_rng(3)
    m = 300
    once = [drawn_family(rng, name, m, [1e6, 2e6, 4e6, 8e6]) for name in ("base", "ours")]

    def repeated(family, rows):
        runs = []
        for one in family.runs:
            run = one.run
            again = run_of(run.ids[rows], run.scan[rows], budget=run.budget)
            runs.append(Measured(again, slice(0, None), one.true[rows], one.n))
        return replace(family, runs=runs)

    rows = rng.permutation(np.repeat(np.arange(m), 2))
    twice = [repeated(family, rows) for family in once]
    asked = ("flops", "recall@10", 0.8)
    plain = Bootstrap(m).ratio(*once, *asked)
    together = Bootstrap(100 + 7 * rows).ratio(*twice, *asked)  # sources are names, not places
    assert together.value == pytest.approx(plain.value)
    assert (together.low, together.high) == pytest.approx((plain.low, plain.high))
    apart = Bootstrap(2 * m).ratio(*twice, *asked)
    assert width(apart) < 0.85 * width(plain)
    assert Bootstrap(np.arange(m)).ratio(*once, *asked) == plain


def test_weights_of_copies_are_equal_and_sum_to_one():
    sources = np.array([5, 9, 5, 2, 9, 5])  # as many copies as there happen to be
    weights = Bootstrap(sources, draws=200).weights
    assert weights.shape == (200, 6)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    np.testing.assert_array_equal(weights[:, [0, 0, 1]], weights[:, [2, 5, 4]])
    assert len(np.unique(weights[:, 0])) > 3


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_seed_gives_the_same_interval(seed):
    family = drawn_family(np.random.default_rng(0), "a", 40, [1e5, 2e5, 4e5, 8e5])
    other = drawn_family(np.random.default_rng(1), "b", 40, [1e5, 2e5, 4e5, 8e5])
    ratios = [
        Bootstrap(40, draws=100, seed=seed).ratio(family, other, "flops", "recall@10", 0.6) for _ in "ab"
    ]
    assert ratios[0] == ratios[1]


def test_very_many_queries_have_fewer_draws(monkeypatch):
    monkeypatch.setattr(derive, "MOST_WEIGHTS", 1 << 16)
    assert Bootstrap(128, draws=1000).draws == 512
    assert Bootstrap(2000, draws=1000).draws == 100
    assert Bootstrap(np.arange(128) // 2, draws=1000).draws == 512  # what is held is one for each query
    boot = Bootstrap(10, draws=100)
    assert boot.weights.shape == (100, 10)
    np.testing.assert_allclose(boot.weights.sum(axis=1), 1, rtol=1e-6)
