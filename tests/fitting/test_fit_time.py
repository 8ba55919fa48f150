"""`amips.fit(order="time")`: a log as it came, and a memory of it where that pays."""

import json

import numpy as np
import pytest

import amips
from amips.builder import Builder
from amips.builder.memories import remembering
from amips.cli import main
from amips.search import MemoryCost, MemorySearcher
from helpers import unit

OPTIONS = {"minutes": 0.1, "recall": 0.9, "structure": "cells", "cells": 64, "storage": "flat", "quiet": True}


def traffic(share, rows=2500):
    """Keys that are hard to find, and a log of which so much asks one of 100 queries again, nearly."""
    rng = np.random.default_rng(6)
    keys, queries = (unit(rng.standard_normal((m, 32))).astype(np.float32) for m in (5000, 100 + rows))
    again = rng.random(rows) < share
    log = np.where(again[:, None], queries[rng.integers(100, size=rows)], queries[100:])
    return keys, unit(log + 0.02 * again[:, None] * rng.standard_normal(log.shape)).astype(np.float32)


def test_a_log_that_repeats_itself_is_remembered(tmp_path):
    keys, log = traffic(0.8)
    index = amips.fit(keys, log, order="time", out=tmp_path / "b", ids=np.arange(5000) + 7, **OPTIONS)
    assert isinstance(index.snapshot, MemorySearcher)
    assert index.design.memory == 64
    report = index.report
    assert report.best == index.design
    without = [t.cost for t in report.trials if t.measured and not t.design.memory and t.cost is not None]
    assert report.cost < min(without)  # on val it never loses to the same fit without
    assert report.gain(0.9) > 1
    assert "a memory of the log with 64 top keys a query" in str(report)
    # What the memory changes is said in FLOPs and in time, and is kept in the bundle.
    assert report.memory.flops[1] < report.memory.flops[0] == min(without)
    assert report.memory.flops[1] == report.cost
    assert min(*report.memory.latency, *report.memory.throughput) > 0
    assert report.memory.note() in str(report)
    loaded = amips.load(tmp_path / "b")
    np.testing.assert_array_equal(loaded.search(log[-300:])[1], index.search(log[-300:])[1])
    assert loaded.search(log[-300:])[1].min() >= 7
    assert loaded.report == report
    assert [path.name for path in tmp_path.iterdir()] == ["b"]  # the work is cleaned up


def test_what_is_held_out_is_the_last_of_the_log():
    """The first part asks what never comes again: were rows held out by chance, half would be known."""
    keys, first = traffic(0.0, rows=1400)
    last = traffic(1.0, rows=1200)[1]
    index = amips.fit(keys, np.concatenate([first, last]), order="time", **OPTIONS)
    known = max(point.recognised for point in index.points)
    assert known > 0.6


def test_new_traffic_gives_what_it_gives_without_a_memory(monkeypatch):
    tried = []

    def noting(self, index, depth):
        tried.append((index, remembering(self, index, depth)))
        return tried[-1][1]

    monkeypatch.setattr(Builder, "with_memory", noting)
    index = amips.fit(*traffic(0.0), order="time", **OPTIONS)
    ((without, with_memory),) = tried
    assert with_memory is without
    assert not index.design.memory


def test_the_command(tmp_path, monkeypatch, capsys):
    keys, log = traffic(0.8)
    np.save(tmp_path / "k.npy", keys)
    np.save(tmp_path / "q.npy", log)
    files = [str(tmp_path / name) for name in ("k.npy", "q.npy", "b")]
    options = ["--order", "time", "--minutes", "0.1", "--cells", "64"]
    monkeypatch.setattr("sys.argv", ["amips", "fit", *files[:2], "--out", files[2], *options])
    assert main() in (0, None)
    assert "trying a memory of the log" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["design"]["memory"] == 64
    assert 0 < manifest["gate"] <= 1


def test_a_memory_that_saves_flops_and_no_time_says_so():
    slower = MemoryCost((0.04, 0.02), (30e-6, 40e-6), (20e-6, 10e-6)).note()
    assert "4.00% and 2.00% of a full scan, 30 and 40 us for a query alone, 20 and 10 us among many" in slower
    assert 'fewer FLOPs, but not faster: objective="latency"' in slower
    assert "not faster" not in MemoryCost((0.04, 0.02), (30e-6, 20e-6), (20e-6, 10e-6)).note()


@pytest.mark.parametrize("flops", [[0.1], "ab", [0.1, -1], None, [0.1, "a"]])
def test_a_damaged_note_of_a_memory_is_refused(flops):
    with pytest.raises(amips.AmipsError, match="flops"):
        MemoryCost(flops, (1.0, 1.0), (1.0, 1.0))


def test_another_order_is_refused():
    with pytest.raises(amips.AmipsError, match="order='size'"):
        amips.fit(*traffic(0.0, 50), order="size")
