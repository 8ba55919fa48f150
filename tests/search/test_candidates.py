"""Codes lose top keys among many that are nearly as good: then more of them are scored again."""

import numpy as np
import pytest

import amips
from amips.builder import Builder
from amips.design import Design
from amips.search import measuring

N, D, TOPICS = 8000, 96, 4


@pytest.mark.parametrize(("n", "widths"), [(100, [80]), (600_000, [80]), (10**6, [80, 640])])
def test_more_keys_allow_more_candidates(n, widths):
    assert measuring._widths(n) == widths


def test_ten_million_keys_allow_fifty_thousand_candidates():
    assert measuring._widths(10**7) == [80, 640, 5120]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A task whose keys are four crowds, each of keys that differ in what codes hardly tell apart."""
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((TOPICS, D), np.float32)
    keys = topics[rng.integers(0, TOPICS, N)] + 0.1 * rng.standard_normal((N, D), np.float32)
    queries = topics[rng.integers(0, TOPICS, 600)] + 0.3 * rng.standard_normal((600, D), np.float32)
    return amips.label(keys, queries, out=tmp_path_factory.mktemp("crowded") / "task", val=200, test=100)


def points_of(task, monkeypatch, share):
    monkeypatch.setattr(measuring, "WIDEST", share)
    design = Design(16, 0.0, router=None, storage="lean", dimensions=16, spill_fraction=0.0)
    return amips.build(task, design=design, recall=0.95).points


def test_what_codes_lose_is_found_among_more_candidates(crowded, monkeypatch):
    few = points_of(crowded, monkeypatch, 0.01)
    many = points_of(crowded, monkeypatch, 0.9)
    assert {point.refine for point in few} == {None, 80, 0}
    assert {point.refine for point in many} == {None, 80, 640, 0}

    def best(points, refine):
        return max(point.recall10 for point in points if point.refine == refine)

    assert best(many, None) < best(many, 80) < best(many, 640), [best(many, r) for r in (None, 80, 640)]
    assert best(many, 80) < 0.95 < best(many, 640)
    # With more candidates codes reach the recall below the cost of a full scan.
    cost = {
        name: min(p.flops for p in points if p.recall10 >= 0.95)
        for name, points in [("few", few), ("many", many)]
    }
    assert cost["many"] < cost["few"] == 2.0 * N * D


def test_what_is_late_measures_no_more(crowded, monkeypatch):
    """About one recall: one effort, whatever it reached, and every key."""
    design = Design(16, 0.0, router=None, storage="lean", dimensions=16, spill_fraction=0.0)
    builder, looks = Builder(crowded), []
    in_time = builder.index(design, late=lambda: False).points
    late = builder.index(design, late=lambda: looks.append(1) or True).points
    assert looks
    assert len(in_time) > 4
    assert [point.certain for point in late] == [False, True]
