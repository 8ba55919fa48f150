"""What is saved beside a FAISS index: the same answers after loading, and no others."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import amips
from amips.blas import faiss
from amips.cells import ivf_parts
from amips.nets import Architecture, Net
from amips.search import WrappedIndex
from helpers import generate, reseal

N, D, C = 2000, 16, 30
IP = faiss.METRIC_INNER_PRODUCT


@pytest.fixture(scope="module")
def world():
    return generate(N, 2500, D, seed=6)


@pytest.fixture(scope="module")
def index(world, tmp_path_factory):
    """In a file, behind a map of ids and a rotation."""
    keys, _ = world
    built = faiss.index_factory(D, f"IDMap,RR{D},IVF{C},Flat", IP)
    built.train(keys)
    built.add_with_ids(keys, np.arange(N) + 7000)
    path = tmp_path_factory.mktemp("faiss") / "products.faiss"
    faiss.write_index(built, str(path))
    return path


@pytest.fixture(scope="module")
def wrapped(world, index):
    task = amips.label(*world, cells=faiss.read_index(str(index)), val=300, test=200)
    model = amips.train(task, amips.Linear(rank=0), samples=20_000)
    return amips.wrap(index, model, task=task, recall=0.9)


def mapper():
    weights = {"Wx.0": np.eye(D, dtype=np.float32), "b.0": np.zeros(D, np.float32)}
    weights |= {"W": np.eye(D, dtype=np.float32), "b": np.zeros(D, np.float32)}
    return Net(Architecture("key", D, 1, D, 1, (), alpha=1.0), weights, {})


def refused(path, *words, **options):
    with pytest.raises(amips.BundleError) as caught:
        amips.load(path, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_again(world, index, wrapped, tmp_path):
    before = index.read_bytes()
    wrapped.save(tmp_path / "b")
    x = world[1][:100]
    for source in (index, str(index), faiss.read_index(str(index))):
        loaded = amips.load(tmp_path / "b", index=source)
        assert isinstance(loaded, WrappedIndex)
        assert (loaded.points, loaded.temperature, loaded.target_recall) == (
            wrapped.points,
            wrapped.temperature,
            0.9,
        )
        for options in ({}, {"recall": 0.95}, {"probes": 3}, {"min_mass": 0.05}):
            for got, want in zip(loaded.search(x, **options), wrapped.search(x, **options), strict=True):
                np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(loaded.cost(x).flops, wrapped.cost(x).flops)
        assert repr(loaded) == repr(wrapped)
    assert index.read_bytes() == before
    size = sum(path.stat().st_size for path in (tmp_path / "b").rglob("*") if path.is_file())
    assert size < len(before) / 2  # everything but the index
    amips.load(tmp_path / "b", index=index).save(tmp_path / "b")  # over itself
    assert len(list((tmp_path / "b").glob("data-*"))) == 1


def test_pickled(world, wrapped):
    """For joblib and Ray: with its index, whose parts are found in it again."""
    again = pickle.loads(pickle.dumps(wrapped))
    assert (again.points, again.target_recall) == (wrapped.points, wrapped.target_recall)
    x = world[1][:50]
    for options in ({}, {"probes": 4}):
        np.testing.assert_array_equal(again.search(x, **options)[1], wrapped.search(x, **options)[1])


def test_it_says_which_index_it_needs(index, wrapped, tmp_path):
    wrapped.save(tmp_path / "b")
    refused(
        tmp_path / "b",
        "routes a FAISS index that is kept elsewhere",
        f"IndexIVFFlat of 2,000 keys, 30 cells, read from {index}",
        "load it with index=, the index or its file",
    )
    with pytest.raises(amips.AmipsError, match=r"gone\.faiss does not exist"):
        amips.load(tmp_path / "b", index=tmp_path / "gone.faiss")


def test_a_bundle_with_an_index_of_its_own_takes_no_other(world, index, tmp_path):
    task = amips.label(*world, cells=8, val=300, test=200)
    amips.build(task, None, storage="flat", out=tmp_path / "own")
    refused(tmp_path / "own", "holds an index of its own: load it without index=", index=index)


def test_keys_may_have_been_added_since(world, index, wrapped, tmp_path):
    wrapped.save(tmp_path / "b")
    grown = faiss.read_index(str(index))
    grown.add_with_ids(world[0][:50] * 1.001, np.arange(50) + 10**6)
    loaded = amips.load(tmp_path / "b", index=grown)
    assert loaded.n == N + 50
    assert (loaded.search(world[0][:50], 2, probes=C)[1] >= 10**6).any(axis=1).all()


def test_a_rebuilt_index_says_what_to_run(world, wrapped, tmp_path):
    wrapped.save(tmp_path / "b")
    keys, _ = world

    def built(factory, metric=IP, seed=7):
        index = faiss.index_factory(D, factory, metric)
        faiss.extract_index_ivf(index).cp.seed = seed
        index.train(keys)
        index.add(keys)
        return index

    again = "label with cells=index, train, and wrap it again"
    refused(tmp_path / "b", "built anew since", "other cells", again, index=built(f"RR{D},IVF{C},Flat"))
    refused(tmp_path / "b", "c 30, here 20", again, index=built(f"RR{D},IVF20,Flat"))
    refused(
        tmp_path / "b", "metric inner product, here L2", index=built(f"RR{D},IVF{C},Flat", faiss.METRIC_L2)
    )
    refused(
        tmp_path / "b", "type IndexIVFFlat, here IndexIVFScalarQuantizer", index=built(f"RR{D},IVF{C},SQ8")
    )
    with pytest.raises(amips.AmipsError, match="has no cells"):
        amips.load(tmp_path / "b", index=faiss.index_factory(D, "Flat"))


@pytest.mark.parametrize("model", [None, mapper()], ids=["no model", "mapper"])
def test_other_routers(world, index, model, tmp_path):
    wrapped = amips.wrap(index, model)
    wrapped.save(tmp_path / "b")
    loaded = amips.load(tmp_path / "b", index=index)
    x = world[1][:50]
    np.testing.assert_array_equal(loaded.search(x, probes=4)[1], wrapped.search(x, probes=4)[1])
    assert (loaded.points, loaded.target_recall) == ([], None)
    assert (loaded.model is None) == (model is None)


# Damage


def content(folder):
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", ".writer")
    )


def test_damaged_files(index, wrapped, tmp_path):
    wrapped.save(tmp_path / "b")
    for path in content(tmp_path / "b"):
        whole = path.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", bytes([*whole[:-40], whole[-40] ^ 1, *whole[-39:]])):
            path.write_bytes(damaged)
            refused(tmp_path / "b", str(tmp_path / "b"), index=index)
        path.unlink()
        refused(tmp_path / "b", path.name, index=index)
        path.write_bytes(whole)
    assert amips.load(tmp_path / "b", index=index).target_recall == 0.9


@pytest.mark.parametrize(
    "field", ["points", "temperature", "target_recall", "quantizer", "type", "n", "file", "router"]
)
def test_a_manifest_that_says_too_little(index, wrapped, tmp_path, field):
    wrapped.save(tmp_path / "b")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    del manifest[field]
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    refused(tmp_path / "b", "it has changed", index=index)
    reseal(tmp_path / "b" / "manifest.json")
    refused(tmp_path / "b", "is damaged", field, index=index)


def test_it_never_touches_a_directory_of_something_else(wrapped, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(amips.BundleError, match="exists and is not a bundle"):
        wrapped.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_failing_disk_leaves_the_old_one(world, index, wrapped, tmp_path, monkeypatch, fails_at):
    wrapped.save(tmp_path / "b")
    calls, real = 0, os.fsync

    def fsync(handle):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(amips.BundleError, match=r"cannot be written: No space left on device$"):
        amips.wrap(index, mapper()).save(tmp_path / "b")
    monkeypatch.undo()
    assert amips.load(tmp_path / "b", index=index).points == wrapped.points


SAVING = """
import sys
from pathlib import Path
import amips
a, b, out, index, ready = sys.argv[1:]
both = [amips.load(path, index=index) for path in (a, b)]
Path(ready).touch()
while True:
    for wrapped in both:
        wrapped.save(out)
"""


@pytest.mark.slow
def test_killed_at_any_moment_one_of_two_is_whole(index, wrapped, tmp_path):
    wrapped.save(tmp_path / "a")
    amips.wrap(index, mapper()).save(tmp_path / "b")
    out, ready = tmp_path / "out", tmp_path / "ready"
    start = time.monotonic()
    wrapped.save(out)
    one_save = time.monotonic() - start  # of two, on a machine that may be busy
    rng, kinds = random.Random(0), set()
    for kill in range(30):
        paths = (tmp_path / "a", tmp_path / "b", out, index, ready)
        process = subprocess.Popen([sys.executable, "-c", SAVING, *map(str, paths)])
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(max(0.02, 6 * one_save) * rng.random())
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        ready.unlink()
        loaded = amips.load(out, index=index)
        kinds.add(loaded.model.c)
        assert loaded.points == (wrapped.points if loaded.model.c > 1 else [])
        if kill >= 7 and len(kinds) == 2:
            break
    assert kinds == {1, C}


def test_an_index_is_known_by_its_quantizer_alone(world, index, wrapped, tmp_path):
    """Saved with one file, loaded with another that has the same cells and other keys."""
    wrapped.save(tmp_path / "b")
    other = faiss.read_index(str(index))
    other.reset()
    other.add_with_ids(world[0][:100], np.arange(100))
    loaded = amips.load(tmp_path / "b", index=other)
    assert loaded.n == 100
    assert ivf_parts(other).fingerprint == wrapped.parts.fingerprint
    ids = loaded.search(world[0][:100], 1, probes=C)[1][:, 0]
    best = (world[0][:100] @ world[0][:100].T).argmax(axis=1)
    np.testing.assert_array_equal(ids, best)
