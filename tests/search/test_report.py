"""The report of a fit: numbers that are kept as JSON, and a text made from them."""

import json
import math
from dataclasses import replace

import pytest

import amips
from amips import Design
from amips.search import MemoryCost, Report, Row, Trial

BEST, PLAIN = Design(100, dimensions=32), Design.plain(50)


@pytest.fixture
def report():
    rows = [
        Row("plain IVF", 0.9, 0.10, 0.09),
        Row("best design", 0.9, 0.04, 0.03),
        Row("plain IVF", 0.95, 0.20, 0.19, 2e-3, 1e-3, 0.957, 0.21),
        Row("best design", 0.95, 0.05, 0.04, 5e-4, 2e-4),
    ]
    trials = [Trial(PLAIN, 0.2, measured=False), Trial(BEST, 0.051, measured=True), Trial(PLAIN, None, True)]
    memory = MemoryCost((0.05, 0.03), (5e-4, 4e-4), (2e-4, 3e-4))
    return Report(0.95, "flops", BEST, 0.051, PLAIN, 0.21, rows, [25, 50], [100], trials, memory=memory)


def test_json_and_back(report):
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert Report.from_json(values) == report


def test_the_text_is_made_from_the_numbers(report):
    text = str(report)
    assert text.startswith(
        f"chosen: {BEST.describe()}\nagainst: plain IVF, the best of 25, 50 cells (with more"
    )
    assert ["0.95", "20.00%", "5.00%", "19.00%", "4.00%", "4.00x"] in [
        line.split() for line in text.splitlines()
    ]
    assert report.gain(0.95) == pytest.approx(4)
    assert "4.00x" in text
    assert "flops at recall@10 0.95 on val: plain IVF 21.00% of a full scan; the best design 5.10%" in text
    assert (
        "plain IVF: asked for recall@10 0.95 it serves 0.957, for 21.00% of a full scan; "
        "2,000 us for a query alone, 1,000 us among many"
    ) in text
    assert report.rows[3].service() == ""  # what was not measured is not said
    assert "does not pay" not in text


def test_what_the_index_is_made_of(report):
    assert (report.pays, report.design) == (True, BEST)
    for change in ({"cost": 0.21}, {"cost": None}, {"cost": None, "baseline_cost": None}):
        other = replace(report, **change)
        assert (other.pays, other.design) == (False, PLAIN)
        assert other.notes()[-1] == "learning does not pay here: the bundle is plain IVF"
    wanted = replace(report, cost=0.21, wanted=True)  # a graph that was asked for stays
    assert (wanted.pays, wanted.design) == (False, BEST)
    assert "because a graph was asked for" in wanted.notes()[-1]
    assert replace(report, baseline_cost=None).pays
    assert "plain IVF does not reach it" in replace(report, baseline_cost=None).notes()[0]
    assert "us a query" in replace(report, objective="latency").notes()[0]


WRONG = [None, "x", [], {}, math.nan, math.inf, -1, True, 10**400, [[]], {"x": 1}, "\x1b[2J\n", 10**5000]


@pytest.mark.parametrize("value", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_report_of_someone_else_is_checked(report, value):
    """In every place of it."""
    right = report.to_json()
    none, empty = (
        {"cost", "baseline_cost", "latency", "throughput", "served", "served_flops", "memory"},
        {"rows", "trials", "plain_cells", "untried_cells"},
    )
    places = [(name,) for name in right]
    places += [("rows", 0, name) for name in right["rows"][0]]
    places += [("trials", 0, name) for name in right["trials"][0]] + [("plain_cells", 0)]
    places += [("memory", name) for name in right["memory"]] + [("memory", "flops", 0)]
    for *path, last in places:
        if (value is None and last in none) or (value in ([], {}) and last in empty):
            continue
        if value is True and last in ("measured", "wanted"):
            continue
        wrong = json.loads(json.dumps(right))
        inner = wrong
        for step in path:
            inner = inner[step]
        inner[last] = value
        with pytest.raises(amips.BundleError, match="not a report: ") as caught:
            Report.from_json(wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, [], "x", {}, {"recall": 0.9}])
def test_what_is_no_report(wrong):
    with pytest.raises(amips.BundleError, match="not a report"):
        Report.from_json(wrong)


def test_what_being_sure_costs_is_said(report):
    assert not any("few held-out queries" in line for line in report.notes())
    dear = replace(report.rows[3], served=1.0, served_flops=1.0)
    assert "few held-out queries" in replace(report, rows=[*report.rows[:3], dear]).notes()[-1]
