"""The verdict says what was planted, and nothing else."""

import re

import numpy as np
import pytest

from amips.bench.derive import Bootstrap, Ratio, families, families_on_val
from amips.bench.store import Run
from amips.bench.systems import System
from amips.bench.verdict import choose, give_verdict, in_words

M = 200  # val queries, and as many test queries
N = 10_000
TRUE = np.tile(np.arange(10), (M, 1))
LEVELS = (0.3, 0.55, 0.75, 0.92, 0.97, 0.99)
COSTS = np.array([1, 2, 4, 8, 16, 32]) * 1_000_000
PAID = "Learning pays on this data."
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


CENTROID = System(cells=64)
LINEAR = System(cells=64, router="linear")
OTHER = System(cells=64, router="/runs/other")


def told(*runs, seconds=None):
    """The verdict on these runs."""
    every = [run for some in runs for run in some]
    tested = families(every, M, TRUE, N)
    on_val = families_on_val(every, M, TRUE, N)
    return give_verdict(tested, on_val, Bootstrap(M), M, 1024, seconds or {"single/1": 1e-4, "batch/1": 1e-5})


def test_a_clear_win():
    base, ours = planted(CENTROID, COSTS), planted(LINEAR, COSTS / 2, seed=1)
    verdict = told(base, ours)
    assert verdict.chosen == "linear"
    conclusion, words, intervals, regimes = verdict.sentences
    assert conclusion == PAID
    assert words.startswith("At recall@10 = 0.95 on 200 held-out queries: ")
    factor = float(words.split(": ")[1].split("x fewer FLOPs")[0])
    assert factor == pytest.approx(2, abs=0.3)
    assert "than the best FAISS IVF (64 cells, 5 probes), by linear (64 cells, 5 probes)" in words
    found = re.search(r"95 % intervals: FLOPs ([\d.]+) \(([\d.]+) to ([\d.]+)\)\.$", intervals)
    value, low, high = map(float, found.groups())
    assert value == factor
    assert 1 < low < value < high
    assert regimes == "It needs fewer FLOPs at recall@10 0.50, 0.60, 0.70, 0.80, 0.90, 0.95 and 0.98."


def test_a_clear_loss():
    conclusion, words, _, regimes = told(
        planted(CENTROID, COSTS), planted(LINEAR, COSTS * 2, seed=1)
    ).sentences
    assert conclusion == NOT_PAID
    assert "x more FLOPs" in words
    assert regimes == "At recall@10 0.50, 0.60, 0.70, 0.80, 0.90, 0.95 and 0.98 centroid routing is better."


def test_no_difference_does_not_pay():
    conclusion, words, intervals, regimes = told(planted(CENTROID, COSTS), planted(LINEAR, COSTS)).sentences
    assert conclusion == NOT_PAID
    assert "about the same FLOPs" in words
    assert intervals.endswith("FLOPs 1.00 (1.00 to 1.00).")
    assert regimes.endswith("centroid routing is as good.")


@pytest.mark.parametrize(("factor", "shown"), [(1 / 1.01, "1.01"), (1.01, "0.99")])
def test_a_sure_but_tiny_difference_is_none(factor, shown):
    """One per cent on every query is certain, since queries are paired, and not worth a word."""
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, factor * COSTS))
    conclusion, words, intervals, regimes = verdict.sentences
    assert conclusion == NOT_PAID
    assert "about the same FLOPs" in words
    assert intervals.endswith(f"FLOPs {shown} ({shown} to {shown}).")
    assert regimes.endswith("centroid routing is as good.")


def test_where_it_wins_and_where_it_loses():
    ours = COSTS * np.array([1.3, 1.3, 1.3, 0.7, 0.7, 0.7])
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, ours))
    assert verdict.sentences[0] == PAID
    assert verdict.sentences[3:] == [
        "It needs fewer FLOPs at recall@10 0.90, 0.95 and 0.98.",
        "At recall@10 0.50, 0.60, 0.70 and 0.80 centroid routing is better.",
    ]


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


def test_a_contender_that_stops_early():
    """It is compared where both are, and it is said what it does not reach."""
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, COSTS[:3] / 2, seed=1))
    assert verdict.sentences[1].startswith("At recall@10 = 0.70 on 200 held-out queries: ")
    assert verdict.sentences[3] == "It needs fewer FLOPs at recall@10 0.50, 0.60 and 0.70."
    missed = "It does not reach recall@10 0.80, 0.90, 0.95 and 0.98, which centroid routing does."
    assert verdict.sentences[4:] == [missed]


def test_what_is_barely_reached_is_not_said_to_be_missed():
    """Both have a recall of 0.80 at most, on different queries: few draws have both, so no ratio."""
    base, ours = planted(CENTROID, COSTS[:3]), planted(LINEAR, COSTS[:3])
    for runs, good in ((base, np.arange(2 * M) % 2 == 0), (ours, np.arange(2 * M) % M < M // 2)):
        hits = np.where(good, 10, 6)[:, None]
        runs[-1].ids[:] = np.where(np.arange(10) < hits, np.arange(10), 1000)
    every = families([*base, *ours], M, TRUE, N)
    assert Bootstrap(M).ratio(*every, "flops", "recall@10", 0.8) is None
    assert not any("0.80" in sentence for sentence in told(base, ours).sentences)


def test_a_contender_that_gets_nowhere():
    """Nothing is reached on val either: the one that came nearest is told of."""
    worst = planted(OTHER, COSTS[:1], levels=(0.1,), seed=2)
    verdict = told(planted(CENTROID, COSTS), planted(LINEAR, COSTS[:1], seed=1), worst)
    assert verdict.chosen == "linear"
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
    assert verdict.chosen == "linear"
    assert verdict.sentences[0] == PAID
    assert "by linear" in verdict.sentences[1]
    assert "other" not in " ".join(verdict.sentences)
    swapped = told(base, planted(LINEAR, COSTS / 2, val_costs=COSTS), planted(OTHER, COSTS, COSTS / 20))
    assert swapped.chosen == "other"
    assert swapped.sentences[0] == NOT_PAID


def test_the_highest_recall_any_reaches_decides_the_choice():
    cheap_but_low = planted(OTHER, COSTS[:4] / 100)
    on_val = families_on_val([*planted(LINEAR, COSTS), *cheap_but_low], M, TRUE, N)
    assert choose(on_val) == "linear"
    assert choose(families_on_val(planted(CENTROID, COSTS), M, TRUE, N)) is None


def test_references_are_told_of_whichever_side_they_favour():
    base = planted(CENTROID, COSTS, seconds=COSTS / 1e6)
    ours = planted(LINEAR, COSTS / 2, seconds=COSTS / 2e6)
    graph = planted(System(engine="hnsw"), COSTS / 8, seconds=COSTS / 8e6)
    exact = planted(System(engine="flat"), COSTS[-1:], levels=(1.0,), seconds=COSTS[-1:] / 1e6)
    said = told(base, ours, graph, exact).sentences[-1]
    assert said.startswith(
        "For reference, HNSW, 32 links, at recall@10 = 0.95 on one thread, is 4.0x faster at "
    )
    # 4.0 and 2.0 yardsticks at 0.97, and a little less at 0.95.
    micro = float(said.split("at batch 1 (")[1].split(" us")[0])
    assert 100 <= micro <= 250
    slow = planted(System(engine="hnsw"), COSTS, seconds=COSTS / 1e6)
    assert "is 2.0x slower at batch 1 (" in told(base, ours, slow).sentences[-1]
    # Without a contender it is set beside the baseline.
    assert (
        told(base, graph)
        .sentences[-1]
        .endswith("than centroid; a graph takes longer to build and more memory.")
    )


@pytest.mark.parametrize("system", [CENTROID, LINEAR, System(engine="flat")])
def test_one_family_is_no_comparison(system):
    said = told(planted(system, COSTS[:1])).sentences
    assert said == ["Nothing was compared: there is no baseline, or nothing beside it."]


def test_ratios_in_words():
    assert in_words(Ratio(1.9, 1.5, 2.2), "FLOPs", "fewer", "more") == "1.90x fewer FLOPs"
    assert in_words(Ratio(0.5, 0.4, 0.6), "time", "less", "more") == "2.00x more time"
    assert in_words(Ratio(1.9, 0.9, 2.2), "FLOPs", "fewer", "more") == "about the same FLOPs"
