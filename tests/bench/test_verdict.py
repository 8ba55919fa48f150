"""The verdict says what was planted, and nothing else."""

import re

import numpy as np
import pytest

from amips.bench.derive import Bootstrap, Ratio, families
from amips.bench.results import Run
from amips.bench.systems import System
from amips.bench.verdict import best_system, choose, give_verdict, in_words
from amips.design import Design
from helpers import with_linear

M = 200  # val queries, and as many test queries
N = 10_000
TRUE = np.tile(np.arange(10), (M, 1))
LEVELS = (0.3, 0.55, 0.75, 0.92, 0.97, 0.998)
COSTS = np.array([1, 2, 4, 8, 16, 32]) * 1_000_000
PAID = "Learning pays on this data."
EVERY = "0.50, 0.60, 0.70, 0.80, 0.90, 0.95 and 0.98"
NOT_PAID = "On this data, with these models, learning does not pay."


def answers(level, rng):
    """Ids [M, 10] of which a share `level` is true, with some noise from query to query."""
    hits = rng.binomial(10, level, size=M)
    return np.where(hits[:, None] > TRUE, TRUE, 1000 + TRUE)


def planted(system, costs, val_costs=None, levels=LEVELS, seconds=None, batched=None, seed=0):
    """Runs of a system whose points are (costs, levels); on val they may cost something else."""
    rng = np.random.default_rng(seed)
    runs = []
    for i, (level, cost) in enumerate(zip(levels, costs, strict=False)):
        ids = np.concatenate([answers(level, rng), answers(level, rng)]).astype(np.int32)
        held = cost if val_costs is None else val_costs[i]
        spread = rng.uniform(0.9, 1.1, 2 * M)
        scan = (np.repeat([held, cost], M) * spread).astype(np.int64)
        times = {}
        if seconds is not None:
            for mode, each in (("single/1", seconds), ("batch/1", seconds if batched is None else batched)):
                times[f"amips/{mode}"] = each[i] * np.array([1.0, 1.02, 0.98])
                times[f"yardstick/amips/{mode}"] = np.ones(3)
        scores, rank = np.zeros(ids.shape, np.float32), np.ones(2 * M, np.int32)
        runs.append(Run(system, i + 1, ids, scores, rank, scan // 100, scan, 0, 0, times))
    return runs


def on_test(runs):
    return families(runs, slice(M, None), TRUE, N)


def on_val(runs):
    return families(runs, slice(0, M), TRUE, N)


CENTROID = System(Design.plain(64))
LINEAR = System(with_linear(64), label="linear")
OTHER = System(Design.plain(64), run="/runs/other")


def told(*runs, seconds=None):
    """The verdict on these runs."""
    every = [run for some in runs for run in some]
    seconds = seconds or {"single/1": 1e-4, "batch/1": 1e-5}
    return give_verdict(on_test(every), on_val(every), Bootstrap(M), M, 1024, seconds)


def test_a_clear_win():
    base, ours = planted(CENTROID, COSTS), planted(LINEAR, COSTS / 2, seed=1)
    verdict = told(base, ours)
    assert verdict.contender == "linear"
    conclusion, words, intervals, regimes = verdict.sentences
    assert conclusion == PAID
    found = re.fullmatch(
        r"At recall@10 = 0\.95 on 200 held-out queries, linear \(64 cells, 5 probes\) against the best FAISS "
        r"IVF \(64 cells, 5 probes\), one thread: ([\d.]+)x fewer FLOPs\.",
        words,
    )
    factor = float(found[1])
    assert factor == pytest.approx(2, abs=0.3)
    found = re.search(r"95 % intervals: FLOPs ([\d.]+) \(([\d.]+) to ([\d.]+)\)\.$", intervals)
    value, low, high = map(float, found.groups())
    assert value == factor
    assert 1 < low < value < high
    assert regimes == f"FLOPs, against centroid routing: less at recall@10 {EVERY}."


def test_a_clear_loss():
    conclusion, words, _, regimes = told(
        planted(CENTROID, COSTS), planted(LINEAR, COSTS * 2, seed=1)
    ).sentences
    assert conclusion == NOT_PAID
    assert "x more FLOPs" in words
    assert regimes == f"FLOPs, against centroid routing: more at recall@10 {EVERY}."


def test_no_difference_does_not_pay():
    conclusion, words, intervals, regimes = told(planted(CENTROID, COSTS), planted(LINEAR, COSTS)).sentences
    assert conclusion == NOT_PAID
    assert "about the same FLOPs" in words
    assert intervals.endswith("FLOPs 1.00 (1.00 to 1.00).")
    assert regimes == f"FLOPs, against centroid routing: as much at recall@10 {EVERY}."


@pytest.mark.parametrize(("factor", "shown"), [(1 / 1.01, "1.01"), (1.01, "0.99")])
def test_a_sure_but_tiny_difference_is_none(factor, shown):
    """One per cent on every query is certain, since queries are paired, and not worth a word."""
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, factor * COSTS))
    conclusion, words, intervals, regimes = verdict.sentences
    assert conclusion == NOT_PAID
    assert "about the same FLOPs" in words
    assert intervals.endswith(f"FLOPs {shown} ({shown} to {shown}).")
    assert regimes == f"FLOPs, against centroid routing: as much at recall@10 {EVERY}."


def test_where_it_wins_and_where_it_loses():
    ours = COSTS * np.array([1.3, 1.3, 1.3, 0.7, 0.7, 0.7])
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, ours))
    assert verdict.sentences[0] == PAID
    assert verdict.sentences[3:] == [
        "FLOPs, against centroid routing: less at recall@10 0.90, 0.95 and 0.98; more at recall@10 0.50, "
        "0.60, 0.70 and 0.80."
    ]


def test_every_kind_of_cost_has_its_own_regimes():
    """FLOPs are won throughout, time at batch 1 only at high recalls, time at the large batch nowhere."""
    spent = COSTS / 1e6
    base = planted(CENTROID, COSTS, seconds=spent)
    single = spent * np.array([1.5, 1.5, 1.0, 1.0, 0.5, 0.5])
    verdict = told(base, planted(LINEAR, COSTS / 2, seconds=single, batched=spent))
    flops, one, many = verdict.sentences[3:]
    assert flops == f"FLOPs, against centroid routing: less at recall@10 {EVERY}."
    found = re.fullmatch(
        r"Time at batch 1, against centroid routing: less at recall@10 (.+); as much at recall@10 (.+); "
        r"more at recall@10 (.+)\.",
        one,
    )
    less, even, more = ([float(text) for text in re.split(", | and ", part)] for part in found.groups())
    assert sorted([*less, *even, *more]) == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98]
    assert more[0] == 0.5
    assert less[-1] == 0.98
    assert max(more) < min(even) <= max(even) < min(less)
    assert many == f"Time at batch 1,024, against centroid routing: as much at recall@10 {EVERY}."


def test_times_of_one_round_conclude_nothing():
    """Three times less, once: no more than an accident can do."""
    base = planted(CENTROID, COSTS, seconds=COSTS / 1e6)
    ours = planted(LINEAR, COSTS / 2, seconds=COSTS / 3e6)
    for run in (*base, *ours):
        run.times.update({name: seconds[:1] for name, seconds in run.times.items()})
    said = told(base, ours).sentences
    unknown = "time at batch 1 and time at batch 1,024"
    assert said[0] == f"Learning saves FLOPs on this data; of {unknown} too little is known."
    assert "time not known well enough (batch 1)" in said[1]
    assert len(said) == 4  # regimes are told of FLOPs alone
    assert said[2].startswith("How many times less, with 95 % intervals where these are known: FLOPs 2.00 (")
    assert said[2].endswith("; time at batch 1 3.00; time at batch 1,024 3.00.")


def test_all_storages_of_the_baseline_are_one():
    """Either loses to the best of both, and the cheaper is the one that is named."""
    flat = planted(CENTROID, COSTS)
    small = planted(System(Design.plain(32, "sq8")), COSTS / 4)
    for runs in ((flat, small), (small, flat)):
        said = told(*runs, planted(LINEAR, COSTS / 2)).sentences
        assert said[0] == NOT_PAID
        assert "linear (64 cells, 5 probes) against the best FAISS IVF (32 cells, 5 probes)" in said[1]
        assert said[1].endswith("one thread: 2.00x more FLOPs.")
    assert told(flat, planted(LINEAR, COSTS / 2)).sentences[0] == PAID


@pytest.mark.parametrize(
    ("flops", "single", "batch", "conclusion"),
    [
        (0.5, 0.5, 0.5, PAID),
        (
            0.5,
            1.0,
            0.5,
            "Learning saves FLOPs and time at batch 1,024 on this data, but not time at batch 1.",
        ),
        (
            0.5,
            0.5,
            2.0,
            "Learning saves FLOPs and time at batch 1 on this data, but not time at batch 1,024.",
        ),
        (
            0.5,
            2.0,
            2.0,
            "Learning saves FLOPs on this data, but not time at batch 1 and time at batch 1,024.",
        ),
        (
            2.0,
            0.5,
            0.5,
            "Learning saves time at batch 1 and time at batch 1,024 on this data, but not FLOPs.",
        ),
        (1.0, 2.0, 1.0, NOT_PAID),
        (2.0, 1.0, 0.995, NOT_PAID),
    ],
)
def test_flops_and_times_are_concluded_from_separately(flops, single, batch, conclusion):
    base = planted(CENTROID, COSTS, seconds=COSTS / 1e6)
    ours = planted(LINEAR, flops * COSTS, seconds=single * COSTS / 1e6, batched=batch * COSTS / 1e6)
    said = told(base, ours).sentences
    assert said[0] == conclusion
    times = {0.5: "2.00x less time", 0.995: "about the same time", 1: "about the same time"}
    times[2] = "2.00x more time"
    assert f"{times[single]} (batch 1)" in said[1]
    assert f"{times[batch]} (batch 1,024)" in said[1]
    assert f"time at batch 1 {1 / single:.2f} (" in said[2]
    assert said[2].count(" to ") == 3
    for cost, factor in (("FLOPs", flops), ("Time at batch 1", single), ("Time at batch 1,024", batch)):
        word = {0.5: "less", 2.0: "more"}.get(factor, "as much")
        assert f"{cost}, against centroid routing: {word} at recall@10 {EVERY}." in said[3:]
    assert len(said) == 6


def test_a_contender_that_stops_early():
    """It is compared where both are, and it is said what it does not reach."""
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, COSTS[:3] / 2, seed=1))
    assert verdict.sentences[1].startswith("At recall@10 = 0.70 on 200 held-out queries, linear (64 cells, ")
    assert verdict.sentences[3:] == [
        "FLOPs, against centroid routing: less at recall@10 0.50, 0.60 and 0.70.",
        "Within a fifth of the keys it does not reach recall@10 0.80, 0.90, 0.95 and 0.98, which centroid "
        "routing reaches.",
    ]
    # It is said once, not for every kind of cost.
    timed = told(
        planted(CENTROID, COSTS, seconds=COSTS / 1e6), planted(LINEAR, COSTS[:3] / 2, seconds=COSTS / 1e6)
    )
    assert [sentence.startswith("Within a fifth") for sentence in timed.sentences[3:]] == [
        False,
        True,
        False,
        False,
    ]


def test_what_is_barely_reached_is_nobodys_gain():
    """Both have a recall of 0.80 at most, on different queries: in many draws only one of them has it."""
    base, ours = planted(CENTROID, COSTS[:3]), planted(LINEAR, COSTS[:3] / 2)
    for runs, good in ((base, np.arange(2 * M) % 2 == 0), (ours, np.arange(2 * M) % M < M // 2)):
        hits = np.where(good, 10, 6)[:, None]
        runs[-1].ids[:] = np.where(np.arange(10) < hits, np.arange(10), 1000)
    ratio = Bootstrap(M).ratio(*on_test([*base, *ours]), "flops", "recall@10", 0.8)
    assert (ratio.low, ratio.high) == (None, None)
    said = told(base, ours).sentences
    assert said[0] == NOT_PAID
    assert said[1].startswith("At recall@10 = 0.80 ")
    assert "FLOPs not known well enough" in said[1]
    assert "0.80" not in said[3]  # neither more nor less nor as much
    assert not any("does not reach" in sentence for sentence in said)


def test_what_hardly_any_draw_reaches_is_not_spoken_of():
    """A recall of 0.80 that hangs on a few queries, the same for both: no ratio, and not missed either."""
    base, ours = planted(CENTROID, COSTS[:3]), planted(LINEAR, COSTS[:3])
    hits = np.where(np.arange(M) % 2 == 0, 9, 7)
    for run in (base[-1], ours[-1]):
        run.ids[:] = np.where(np.arange(10) < np.tile(hits, 2)[:, None], np.arange(10), 1000)
    every = on_test([*base, *ours])
    assert [family.cost_at("flops", "recall@10", 0.8) > 0 for family in every] == [True, True]
    bootstrap = Bootstrap(M)
    bootstrap.weights[:501] = np.where(hits < 8, 2 / M, 0)  # draws of bad luck
    seconds = {"single/1": 1e-4, "batch/1": 1e-5}
    assert bootstrap.ratio(*every, "flops", "recall@10", 0.8) is None
    said = give_verdict(every, on_val([*base, *ours]), bootstrap, M, 1024, seconds).sentences
    assert not any("0.80" in sentence for sentence in said)


def test_a_contender_that_gets_nowhere():
    """Nothing is reached on val either: the one that came nearest is told of."""
    worst = planted(OTHER, COSTS[:1], levels=(0.1,), seed=2)
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, COSTS[:1], seed=1), worst)
    assert verdict.contender == "linear"
    assert verdict.sentences == ["Linear does not reach recall@10 = 0.50: learning does not pay."]


def test_centroids_that_get_nowhere_are_not_blamed_on_the_contender():
    verdict = told(planted(CENTROID, COSTS[:1]), planted(LINEAR, COSTS, seed=1))
    assert verdict.sentences == ["Centroid routing does not reach recall@10 = 0.50, which linear does."]


def test_the_contender_is_chosen_on_val():
    """`other` is far better on test and worse on val: who looks at test would choose it."""
    base = planted(CENTROID, COSTS)
    ours = planted(LINEAR, COSTS / 2, val_costs=COSTS / 2)
    other = planted(OTHER, COSTS / 20, val_costs=COSTS)
    verdict = told(base, ours, other)
    assert verdict.contender == "linear"
    assert verdict.sentences[0] == PAID
    assert "held-out queries, linear (64 cells, 5 probes) against the best" in verdict.sentences[1]
    assert "other" not in " ".join(verdict.sentences)
    swapped = told(base, planted(LINEAR, COSTS / 2, val_costs=COSTS), planted(OTHER, COSTS, COSTS / 20))
    assert swapped.contender == "other"
    assert swapped.sentences[0] == NOT_PAID


def test_the_highest_recall_any_reaches_decides_the_choice():
    cheap_but_low = planted(OTHER, COSTS[:4] / 100)
    assert choose(on_val([*planted(LINEAR, COSTS), *cheap_but_low])) == "linear"
    assert choose(on_val(planted(CENTROID, COSTS))) is None


def test_the_index_to_build_is_the_cheapest_on_val_learned_or_not():
    many, graph = System(with_linear(256), label="linear"), System(backend="hnsw")
    base, dear = planted(CENTROID, COSTS), planted(LINEAR, COSTS / 2, val_costs=COSTS * 2)
    assert best_system(on_val([*base, *dear])) == CENTROID  # whatever test says
    assert best_system(on_val([*base, *dear, *planted(many, COSTS, val_costs=COSTS / 2)])) == many
    assert best_system(on_val([*base, *planted(graph, COSTS / 9)])) == CENTROID  # cells are what is built
    hosted = System(with_linear(64), backend="leanvec")
    assert best_system(on_val([*base, *planted(hosted, COSTS / 9)])) == CENTROID  # a backend's
    low = planted(LINEAR, COSTS[:4] / 9, levels=LEVELS[:4])
    assert best_system(on_val([*base, *low])) == CENTROID  # cheap, but it does not get as far
    assert best_system(on_val(planted(CENTROID, COSTS[:1], levels=LEVELS[:1]))) is None


def test_references_are_told_of_whichever_side_they_favour():
    base = planted(CENTROID, COSTS, seconds=COSTS / 1e6)
    ours = planted(LINEAR, COSTS / 2, seconds=COSTS / 2e6)
    graph = planted(System(backend="hnsw"), COSTS / 8, seconds=COSTS / 8e6)
    exact = planted(System(backend="exact"), COSTS[-1:], levels=(1.0,), seconds=COSTS[-1:] / 1e6)
    said = told(base, ours, graph, exact).sentences[-2:]
    scan, walk = sorted(said, key=lambda sentence: "HNSW" in sentence)
    assert walk.startswith("For reference, at recall@10 = 0.95 on one thread, HNSW: 4.0x faster at batch 1 (")
    assert walk.endswith(" us a query) than linear.")
    # 4.0 and 2.0 yardsticks at 0.97, and a little less at 0.95.
    micro = float(walk.split("at batch 1 (")[1].split(" us")[0])
    assert 100 <= micro <= 250
    slow = planted(System(backend="hnsw"), COSTS, seconds=COSTS / 1e6)
    assert ", HNSW: 2.0x slower at batch 1 (" in told(base, ours, slow).sentences[-1]
    # The exact scan takes 32 yardsticks wherever it is compared: 3,200 us and, in the batch, 320.
    found = re.fullmatch(
        r"For reference, at recall@10 = 0\.95 on one thread, exact, all keys: ([\d.]+)x slower at batch 1 "
        r"\(3,200 us a query\) and ([\d.]+)x slower at batch 1,024 \(320 us a query\) than linear\.",
        scan,
    )
    assert found[1] == found[2]
    assert 4 <= float(found[1]) <= 8  # linear takes up to 8 at 0.97
    # Without a contender they are set beside the baseline.
    alone = told(base, graph, exact).sentences
    assert len(alone) == 2
    assert all(sentence.endswith(" than centroid.") for sentence in alone)


@pytest.mark.parametrize("system", [CENTROID, LINEAR, System(backend="exact")])
def test_one_family_is_no_comparison(system):
    said = told(planted(system, COSTS[:1])).sentences
    assert said == ["Nothing was compared: there is no baseline, or nothing beside it."]


def test_ratios_in_words():
    assert in_words(Ratio(1.9, 1.5, 2.2), "FLOPs", "fewer", "more") == "1.90x fewer FLOPs"
    assert in_words(Ratio(0.5, 0.4, 0.6), "time", "less", "more") == "2.00x more time"
    assert in_words(Ratio(1.9, 0.9, 2.2), "FLOPs", "fewer", "more") == "about the same FLOPs"
