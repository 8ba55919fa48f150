"""`memory=` of a fit: keys twice as large as what the process may allocate, from labels to answers."""

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import amips
from amips.builder import Builder, graphs
from amips.fitting.affordable import affordable_cells, graph_needs, no_room_for_graph, part_of_log
from amips.fitting.candidates import INDEX_SHARE, Estimator, check_index_memory
from amips.fitting.clock import Clock
from amips.fitting.settings import Settings
from amips.index import FaissCellStore, cell_bytes, pq_parts
from amips.vectors import open_vectors
from helpers import make_world, unit

N, D = 500_000, 128  # 256 MB; of few dimensions, what lies beside codes counts most
MEMORY = 4 * N * D // 2

# A first, small fit lets libraries take their own buffers. What is allocated after that is bounded by the
# system itself: private memory, whether used or not; pages of files, which it can take back, are not in it.
LIMITED = """
import json, resource, sys, threading
import numpy as np
import amips
threading.stack_size(1 << 20)  # of 8 MB that a thread may use, the limit counts all
folder, memory = sys.argv[1], int(sys.argv[2])

def allocated():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))

rng = np.random.default_rng(0)
small = rng.standard_normal((2000, 32)).astype(np.float32)
amips.fit(small, small[::-1], minutes=0.02, cells=16, storage="lean", out=folder + "/small", quiet=True)
limit = allocated() + memory
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
options = {"memory": memory, "minutes": 0.5, "cells": 256, "structure": "cells", "quiet": True}
if len(sys.argv) > 3:
    options["storage"] = sys.argv[3]
    del options["memory"]
index = amips.fit(folder + "/keys.npy", folder + "/queries.npy", out=folder + "/bundle", **options)
del index
index = amips.load(folder + "/bundle", mmap=True)
x = np.load(folder + "/fresh.npy")
scores, ids = index.search(x, 10)
alone = [index.search(x[i : i + 1], 10)[1][0].tolist() for i in range(20)]
np.save(folder + "/ids.npy", ids)
print(json.dumps({"alone": alone, "storage": index.store.storage, "recall": index.target_recall}))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Keys and queries in files, and fresh queries with their top keys."""
    folder = tmp_path_factory.mktemp("memory")
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((N // 50, D), np.float32)
    keys = unit(topics[rng.integers(0, len(topics), N)] + 0.8 * rng.standard_normal((N, D), np.float32))
    queries = unit(keys[rng.integers(0, N, 1300)] + 0.03 * rng.standard_normal((1300, D), np.float32))
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries[:1200])
    np.save(folder / "fresh.npy", queries[1200:])
    return folder, np.argpartition(-(queries[1200:] @ keys.T), 10, axis=1)[:, :10]


def run_limited(folder, *more):
    command = [sys.executable, "-c", LIMITED, str(folder), str(MEMORY), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


linux = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(resource, "RLIMIT_DATA")),
    reason="needs a limit on private memory",
)


@linux
@pytest.mark.timeout(900)
def test_twice_the_memory(world):
    folder, top = world
    done = run_limited(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["storage"] != "flat"
    ids = np.load(folder / "ids.npy")
    assert ids[:20].tolist() == said["alone"]  # read in one pass or as they come, the answers are the same
    recall = (ids[:, :, None] == top[:, None, :]).any(axis=2).mean()
    assert recall > said["recall"] - 0.05


@linux
def test_without_the_bound_it_would_not_fit(world):
    """The limit is a real one: float32 keys in memory fail, in one line."""
    done = run_limited(world[0], "flat")
    assert done.returncode != 0
    assert "not enough memory" in done.stderr


def test_the_storage_is_one_that_fits():
    keys, queries = make_world(3000, 400, 64, seed=1)
    flat, sq8 = (cell_bytes(storage, 3000, 64) for storage in ("flat", "sq8"))
    assert flat > sq8 > cell_bytes("pq", 3000, 64, 0, pq_parts(64))
    task = amips.label(keys, queries, cells=1)

    def enough(index_bytes):
        return int(index_bytes / INDEX_SHARE) + 1

    def storages(memory, storage=None):

        settings = Settings(1, None, 0.9, "flops", storage, None, None, None, 0, 0, memory)
        return [name for name, _ in Estimator(Builder(task), settings).storages()]

    assert storages(None)[0] == "flat"
    assert storages(enough(flat))[0] == "flat"
    assert storages(enough(flat) - 9)[0] == "sq8"
    assert set(storages(enough(sq8) - 9)) <= {"lean", "pq"}
    with pytest.raises(
        amips.AmipsError, match=r"memory=1000: an index of these 3,000 keys takes [0-9,]+ bytes at"
    ):
        storages(1000)
    with pytest.raises(amips.AmipsError, match="takes"):
        storages(enough(flat) - 9, "flat")


def test_too_little_for_any_index_is_said_before_labels_are_made(tmp_path, monkeypatch):
    keys, queries = make_world(300_000, 200, 16, seed=1)
    monkeypatch.setattr("amips.fitting.fitting.label", lambda *_, **__: pytest.fail("labelled"))
    with pytest.raises(
        amips.AmipsError, match=r"^memory=8000000: an index of these 300,000 keys takes [0-9,]+ bytes at"
    ):
        amips.fit(keys, queries, memory=8_000_000, minutes=0.02, out=tmp_path / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_too_little_for_the_codes_that_are_needed_leaves_no_work(tmp_path, monkeypatch):
    """How many dimensions lean codes need is known once there are labels."""
    keys, queries = make_world(40_000, 400, 64, seed=1)
    memory = int(cell_bytes("pq", 40_000, 64, 0, pq_parts(64)) / INDEX_SHARE) - 9
    monkeypatch.setattr("amips.fitting.affordable.check_index_memory", lambda *_: None)
    with pytest.raises(amips.AmipsError, match=f"^memory={memory}: an index of these 40,000 keys takes"):
        amips.fit(keys, queries, memory=memory, minutes=0.05, storage="pq", out=tmp_path / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_too_little_for_anything_is_said_at_once(tmp_path):
    keys, queries = make_world(500, 200, 16, seed=1)
    with pytest.raises(amips.VectorError, match=r"^memory=1000 bytes is too little for d = 16") as caught:
        amips.fit(keys, queries, memory=1000, minutes=0.02, out=tmp_path / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []
    least = int(re.search("at least ([0-9]+) are", str(caught.value))[1])
    with pytest.raises(amips.VectorError, match=f"^memory={least - 1} bytes .* at least {least} are needed"):
        amips.fit(keys, queries, memory=least - 1, minutes=0.02, quiet=True)
    assert amips.fit(keys, queries, memory=least, minutes=0.05, quiet=True).n == 500  # what it said is enough


def settings_of(memory, structure=None):
    return Settings(1, None, 0.9, "flops", None, None, structure, None, 0, 0, memory)


@pytest.mark.parametrize("d", [96, 128, 384, 1536])
def test_keys_may_be_twice_the_memory(d):
    n = 10_000_000
    check_index_memory(settings_of(4 * n * d // 2), n, d)


def test_cells_take_what_is_counted():
    """Of codes: what FAISS and numpy hold for each key, in bytes."""
    n, d = 60_000, 64
    rng = np.random.default_rng(0)
    keys, cells = rng.standard_normal((n, d), np.float32), rng.integers(0, 20, n).astype(np.int32)
    store = FaissCellStore.build(open_vectors(keys, "keys"), cells, keys[:20], "sq8")
    beside = store.entries.nbytes + store.assignment.nbytes + 8 * n  # numbers in FAISS
    codes = sum(len(store.codes_in(cell)) for cell in range(20))
    assert beside + codes == n * (d + 16)
    assert beside + codes < cell_bytes("sq8", n, d) < 2 * (beside + codes)


def test_a_graph_that_was_asked_for_is_within_the_memory_or_refused(tmp_path, monkeypatch):
    keys, queries = make_world(20_000, 200, 64, seed=1)
    memory = graph_needs(settings_of(None, "graph"), 20_000, 64) - 1
    monkeypatch.setattr("amips.fitting.fitting.label", lambda *_, **__: pytest.fail("labelled"))
    with pytest.raises(amips.AmipsError, match=rf"^memory={memory}: a graph over these 20,000 keys takes"):
        amips.fit(keys, queries, structure="graph", memory=memory, out=tmp_path / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_is_not_tried_where_the_machine_has_no_room(monkeypatch):
    settings, needed = settings_of(None), graph_needs(settings_of(None), 10**7, 128)
    monkeypatch.setattr("amips.fitting.affordable.available_memory", lambda: needed - 1)
    assert "more memory than this machine has left" in no_room_for_graph(settings, 10**7, 128)
    monkeypatch.setattr("amips.fitting.affordable.available_memory", lambda: needed)
    assert no_room_for_graph(settings, 10**7, 128) == ""
    assert "than was given" in no_room_for_graph(settings_of(needed - 1), 10**7, 128)
    monkeypatch.setattr("amips.fitting.affordable.available_memory", lambda: None)
    assert no_room_for_graph(settings, 10**7, 128) == ""  # where it is not known


def test_a_part_of_the_log_is_read_where_it_is(tmp_path):
    rows = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    np.save(tmp_path / "log.npy", rows)
    log = open_vectors(tmp_path / "log.npy", "queries")
    part = part_of_log(log, 100, settings_of(None))
    assert part.array is None  # nothing was read
    chosen = part.load()[:, 0].astype(int) // 4
    assert len(part) == len(set(chosen)) == 100
    assert (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(part.take(np.array([7, 3])), rows[chosen[[7, 3]]])
    last = part_of_log(log, 100, replace(settings_of(None), order="time"))
    np.testing.assert_array_equal(last.load(), rows[900:])


def test_entry_points_are_looked_for_with_an_eighth_of_the_memory():
    log = open_vectors(np.arange(4000, dtype=np.float32).reshape(1000, 4), "queries")
    assert graphs._some(log, None, 0) is log
    assert graphs._some(log, 8 * 16 * 1000, 0) is log
    some = graphs._some(log, 8 * 16 * 50, 0)
    assert some.n == 50
    assert set(some.load()[:, 0]) <= set(log.load()[:, 0])


def test_lean_codes_of_a_graph_are_looked_for_within_the_memory(monkeypatch):
    keys, queries = make_world(2000, 300, 64, seed=1)
    builder, bounds = Builder(amips.label(keys, queries, cells=1), memory=10**8), []
    monkeypatch.setattr(graphs, "fewest_dimensions", lambda *options: bounds.append(options[-1]))
    builder.resolved(graphs.graph_design(builder.task))
    assert bounds == [10**8]


def test_numbers_of_cells_are_within_the_memory(tmp_path):
    """A router is judged in 48 bytes for each cell and each of 1,000 held-out queries."""
    task, clock = SimpleNamespace(n=10**6, d=64, val=range(1000)), Clock(1e9)

    def numbers(name, memory, cells=None):
        settings = replace(settings_of(memory), cells=cells)
        return affordable_cells(task, settings, clock, 1e9, tmp_path / name)[0]

    assert numbers("no bound", None) == [4000, 8000, 2000, 1000, 16000, 500]
    assert numbers("some", 48_000 * 2000) == [2000, 1000, 500]
    assert numbers("fewer", 48_000 * 100) == [100]
    assert numbers("asked", 48_000 * 100, 100) == [100]
    with pytest.raises(amips.AmipsError, match="a router of 101 cells is judged in 4,848,000 bytes"):
        numbers("too many", 48_000 * 100, 101)
