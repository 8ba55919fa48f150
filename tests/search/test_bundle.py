"""Bundles on disk: the same answers again, old or new but never half, and nothing damaged is believed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import amips
from amips.files import digest_of, sha256
from amips.index import FaissCellStore
from amips.nets import AffineArchitecture, AffineNet, Architecture, Net, weight_shapes
from helpers import make_world, plain_build

STORAGES = ("flat", "sq8", "pq", "lean")


def linear(task, scale=0.1, seed=1, **about):
    """Centroids with some noise: a router that is neither the centroids nor useless."""
    noise = np.random.default_rng(seed).standard_normal(task.cells.centroids.shape)
    weights = {"W": (task.cells.centroids + scale * noise).astype(np.float32)}
    known = {"keys": task.fingerprint, **about}
    return AffineNet(AffineArchitecture(task.d, task.c), weights, known)


def mapper(d, seed=1, **about):
    architecture = Architecture("key", d, 1, 12, 2, ())
    rng = np.random.default_rng(seed)
    shapes = weight_shapes(architecture).items()
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes}
    return Net(architecture, weights, about)


def names(n, kind):
    return {
        None: None,
        "int": np.arange(n) * 7 - 10**12,
        "str": [f"§{i}" for i in range(n)],
    }[kind]


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """A bundle with every file there can be: quantised, a model, names."""
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    built = plain_build(task, linear(task), out=out, storage="sq8", ids=names(task.n, "str"))
    return built, out


@pytest.fixture
def copy(whole, tmp_path):
    """The whole bundle to damage, and its directory of data."""
    bundle = tmp_path / "bundle"
    shutil.copytree(whole[1], bundle)
    (data,) = bundle.glob("data-*")
    return bundle, data


@pytest.fixture
def no_reading(monkeypatch):
    """Nobody must see a byte of what has not been verified."""

    def read(*arguments, **options):
        pytest.fail(f"read before it was verified: {arguments}")

    monkeypatch.setattr(FaissCellStore, "load", read)
    monkeypatch.setattr("amips.search.bundle.load_model", read)
    monkeypatch.setattr("amips.search.bundle.read_array", read)


def refused(bundle, *expected, **options):
    """One line of BundleError with all that is expected in it."""
    with pytest.raises(amips.BundleError) as caught:
        amips.load(bundle, **options)
    text = str(caught.value)
    assert "\n" not in text
    for part in expected:
        assert part in text, text


def rewrite(bundle, sign=True, remove=(), **changes):
    """Edit the manifest, with sizes and sums that fit again: damage by program, not by accident."""
    path = bundle / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    for name in remove:
        del manifest[name]
    if sign:
        for file, facts in manifest.get("files", {}).items():
            if (bundle / file).is_file():
                facts |= {"size": (bundle / file).stat().st_size, "sha256": sha256(bundle / file)}
        manifest["digest"] = digest_of(manifest)
    path.write_text(json.dumps(manifest))


CELLS = ("sizes.npy", "entries.npy", "codes.npy", "centroids.npy")
LOG = ("logtrain.npy", "logval.npy", "logrounds.npy", "logtop.npy")
FILES = (*CELLS, *LOG, "codebook.npy", "keys.npy", "labels.npy", "model.json", "model.safetensors")


# The same again


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("routed", ["linear", "mapper", "centroid"])
@pytest.mark.parametrize("kind", [None, "int", "str"])
def test_a_loaded_bundle_answers_as_the_built_one(task, world, tmp_path, storage, routed, kind):
    model = {"linear": linear(task), "mapper": mapper(task.d, keys=task.fingerprint), "centroid": None}[
        routed
    ]
    built = plain_build(task, model, out=tmp_path / "b", storage=storage, ids=names(task.n, kind))
    for mmap in (False, True):
        loaded = amips.load(tmp_path / "b", mmap=mmap)
        assert loaded.points == built.points
        assert loaded.points
        assert (loaded.n, loaded.d, loaded.c, loaded.fingerprint) == (
            built.n,
            built.d,
            built.c,
            built.fingerprint,
        )
        assert loaded.store.storage == storage
        assert loaded.router.name == built.router.name
        np.testing.assert_array_equal(loaded.cells, built.cells)
        assert loaded.temperature == built.temperature > 0
        reached = min(0.9, max(point.recall10 for point in built.points))  # codes: in a third of the keys
        for options in ({"probes": 3}, {"recall": reached}, {"probes": 1, "k": 200}, {"min_mass": 0.1}):
            expected, got = built.search(world[1][:40], **options), loaded.search(world[1][:40], **options)
            np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-6)  # BLAS minds the alignment
            np.testing.assert_array_equal(got[1], expected[1])
            assert got[1].dtype == expected[1].dtype
    assert loaded.search(world[1][:1], 1, probes=8)[1].dtype.kind == {None: "i", "int": "i", "str": "U"}[kind]


def test_the_model_comes_back_as_it_was(task, tmp_path):
    model = linear(task, note="how it was built")
    plain_build(task, model, out=tmp_path / "b")
    loaded = amips.load(tmp_path / "b").model
    assert loaded.about == model.about
    assert loaded.architecture == model.architecture
    np.testing.assert_array_equal(loaded.weights["W"], model.weights["W"])


def test_the_manifest_says_what_is_there(whole):
    manifest = json.loads((whole[1] / "manifest.json").read_text())
    assert manifest["amips"] == amips.__version__
    assert manifest["keys"] == whole[0].fingerprint
    assert sorted(manifest["files"]) == sorted(f"{manifest['data']}/{file}" for file in FILES)
    for file, facts in manifest["files"].items():
        assert facts == {"size": (whole[1] / file).stat().st_size, "sha256": sha256(whole[1] / file)}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_loaded_bundle_can_be_saved_elsewhere_and_over_itself(task, world, tmp_path, storage, mmap):
    built = plain_build(task, linear(task), out=tmp_path / "b", storage=storage)
    for out in (tmp_path / "again", tmp_path / "b"):
        loaded = amips.load(tmp_path / "b", mmap=mmap)
        loaded.save(out)
        expected = built.search(world[1][:20], probes=8)[1]
        np.testing.assert_array_equal(amips.load(out).search(world[1][:20], probes=8)[1], expected)
        np.testing.assert_array_equal(
            loaded.search(world[1][:20], probes=8)[1], expected
        )  # the one saved still works


def test_the_keys_may_be_named_when_loading(whole, world, tmp_path):
    keys = world[0]
    np.save(tmp_path / "keys.npy", keys)
    assert amips.load(whole[1], keys=keys).n == len(keys)
    assert amips.load(whole[1], keys=tmp_path / "keys.npy").n == len(keys)
    other = keys.copy()
    other[3, 3] += 1e-3
    refused(whole[1], str(whole[1]), "other keys", keys=other)
    refused(whole[1], "other keys", keys=keys[:-1])
    refused(whole[1], "other keys", keys=keys[:, :5])


# Replacing


def test_a_new_bundle_takes_the_place_of_the_old_one(task, tmp_path):
    out = tmp_path / "b"
    plain_build(task, linear(task), out=out, storage="pq", ids=names(task.n, "int"))
    (old,) = out.glob("data-*")
    (out / ".manifest.json.123.tmp").write_text("left by a process that was killed")
    open_still = amips.load(out, mmap=True)
    plain_build(task, None, out=out)
    (new,) = out.glob("data-*")
    assert new != old
    assert sorted(file.name for file in out.iterdir()) == sorted(
        [".lock", ".writer", new.name, "manifest.json"]
    )
    assert sorted(file.name for file in new.iterdir()) == sorted((*CELLS, *LOG))
    assert amips.load(out).model is None
    open_still.search(task.keys[:5], probes=8)  # its files are mapped, so they live on


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "x"},
        {"manifest.json": '{"name": "an app"}'},
        {"manifest.json": "no JSON"},
        {"manifest.json": '{"kind": "task", "format": 1, "files": {}}'},
        {"data-raw/important.bin": "x"},
        {"data-0123456789ab/codes.npy": "x", "thesis.txt": "x"},
    ],
)
def test_never_touches_a_directory_of_something_else(whole, task, tmp_path, files):
    for name, text in files.items():
        (tmp_path / "dir" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dir" / name).write_text(text)
    for attempt in (
        lambda: whole[0].save(tmp_path / "dir"),
        lambda: plain_build(task, None, out=tmp_path / "dir"),
    ):
        with pytest.raises(amips.BundleError, match=str(tmp_path / "dir")):
            attempt()
    there = {str(p.relative_to(tmp_path / "dir")): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert there == files


def test_does_not_replace_a_file_or_a_task(whole, task, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(amips.BundleError, match="not a bundle"):
        whole[0].save(tmp_path / "file")
    with pytest.raises(amips.BundleError, match="not a bundle"):
        whole[0].save(task.path)
    amips.task.load_task(task.path, verify=True)


def test_what_a_user_puts_beside_the_data_stays(whole, copy):
    (copy[0] / "data-mine").mkdir()
    (copy[0] / "data-mine" / "notes").write_text("x")
    (copy[0] / "README").write_text("x")
    whole[0].save(copy[0])
    assert (copy[0] / "data-mine" / "notes").read_text() == "x"
    assert (copy[0] / "README").exists()
    assert not copy[1].exists()


# Damage


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file(copy, no_reading, file, verify):
    path = copy[1] / file
    size = path.stat().st_size
    for kept in (size - 1, size // 2, 0):
        os.truncate(path, kept)
        refused(copy[0], str(path), f"{kept} bytes", f"expected {size}", verify=verify)
    path.write_bytes(b"\0" * (size + 1))
    refused(copy[0], str(path), f"expected {size}", verify=verify)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("mmap", [False, True])
def test_one_flipped_bit(copy, no_reading, file, mmap):
    path = copy[1] / file
    good = path.read_bytes()
    rng = random.Random(file)
    for at in [0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(6))]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        refused(copy[0], str(path), "SHA-256", mmap=mmap)


def test_one_flipped_bit_in_the_manifest(copy, whole, world):
    """Every one of them is loaded, or changes nothing (white space, the case of a letter in \\u00e9)."""
    path = copy[0] / "manifest.json"
    good = path.read_bytes()
    expected = whole[0].search(world[1][:3], probes=2)
    rng = random.Random(5)
    loaded = 0
    for at in rng.sample(range(len(good)), 150):
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            loaded = amips.load(copy[0])
        except amips.BundleError:
            loaded += 1
            continue
        assert loaded.points == whole[0].points
        np.testing.assert_array_equal(loaded.search(world[1][:3], probes=2)[1], expected[1])
    assert loaded > 100


@pytest.mark.parametrize("size", [0, 1, 100, -2])
def test_a_truncated_manifest(copy, no_reading, size):
    path = copy[0] / "manifest.json"
    path.write_bytes(path.read_bytes()[: size or None] if size else b"")
    refused(copy[0], str(path), "damaged")


@pytest.fixture(scope="module")
def other_task(tmp_path_factory):
    """Other keys in the same number of cells."""
    keys, queries = make_world(600, 300, 16, seed=5)
    return amips.label(
        keys, queries, cells=8, val=50, test=50, k=10, out=tmp_path_factory.mktemp("other") / "task"
    )


@pytest.fixture(scope="module")
def stranger(other_task, tmp_path_factory):
    """The data of a bundle that is like `whole` in every size, but of other keys, model and names."""
    out = tmp_path_factory.mktemp("stranger") / "bundle"
    shifted = [f"§{(i + 1) % other_task.n}" for i in range(other_task.n)]
    plain_build(other_task, linear(other_task), out=out, storage="sq8", ids=shifted)
    (data,) = out.glob("data-*")
    return data


@pytest.mark.parametrize("file", FILES)
def test_files_swapped_between_bundles(copy, stranger, no_reading, file):
    """Sizes may fit; sums do not."""
    assert (stranger / file).read_bytes() != (copy[1] / file).read_bytes()
    shutil.copy(stranger / file, copy[1] / file)
    refused(copy[0], str(copy[1] / file))


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file(copy, no_reading, file):
    (copy[1] / file).unlink()
    refused(copy[0], str(copy[1] / file), "missing")
    refused(copy[0], str(copy[1] / file), "missing", verify=False)


def test_missing_data_or_manifest(copy, tmp_path, task):
    shutil.rmtree(copy[1])
    refused(copy[0], str(copy[1]), "missing")
    (copy[0] / "manifest.json").unlink()
    refused(copy[0], str(copy[0]), "manifest.json")
    refused(tmp_path / "nowhere", "nowhere", "expected a finished bundle")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "file", "expected a finished bundle")
    refused(task.path, str(task.path), "not a finished bundle")


def test_another_version_or_kind(copy, no_reading):
    rewrite(copy[0], format=2)
    refused(copy[0], "manifest.json", "format 2", "reads 4", "make the bundle again")
    rewrite(copy[0], format=3, kind="task")
    refused(copy[0], "manifest.json", "'task'", "'bundle'")


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "{", "\xff\xfe", '{"kind": "bundle"}', "[" * 10**5]
)
def test_a_manifest_that_is_something_else(copy, no_reading, text):
    (copy[0] / "manifest.json").write_text(text, encoding="latin-1")
    refused(copy[0], "manifest.json")


NEEDED = ("n", "d", "c", "storage", "router", "keys", "data", "points", "temperature", "target_recall")
FIELDS = (*NEEDED, "design", "report", "files", "digest", "format", "kind")


@pytest.mark.parametrize("field", FIELDS)
def test_a_manifest_with_a_field_missing(copy, field):
    rewrite(copy[0], remove=[field], sign=field != "digest")
    refused(copy[0], "manifest.json")
    rewrite(copy[0], sign=False, **{field: None})
    refused(copy[0], "manifest.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 601},
        {"d": 17},
        {"c": 9},
        {"d": "16"},
        {"storage": "nonsense"},
        {"storage": "pq"},
        {"data": "../elsewhere"},
        {"data": 3},
        {"points": [{"probes": 1}]},
        {"points": 7},
        {"files": {"sizes.npy": {"size": 1}}},
        {"files": {}},
        {"keys": "0" * 64},
    ],
    ids=str,
)
def test_a_signed_manifest_that_does_not_fit(copy, changes):
    """As a program would write it, with the right sums, but about something else."""
    rewrite(copy[0], **changes)
    refused(copy[0], str(copy[0]))


def test_says_which_dimension_was_expected(copy):
    rewrite(copy[0], d=17)
    refused(copy[0], str(copy[1]), "600 keys of dimension 16 in 8 cells", "600 of dimension 17 in 8")


def test_an_edited_manifest_is_not_believed(copy, no_reading):
    manifest = json.loads((copy[0] / "manifest.json").read_text())
    manifest["points"][0]["recall10"] = 1.0
    rewrite(copy[0], sign=False, points=manifest["points"])
    refused(copy[0], "manifest.json", "it has changed")


def test_a_model_of_another_dimension_or_cell_count(copy, task):
    mapper(12).save(copy[1])
    rewrite(copy[0])
    refused(copy[0], "model.json", "d = 12", "expected 16")
    weights = {"W": np.ones((9, 16), np.float32)}
    AffineNet(AffineArchitecture(16, 9), weights, {}).save(copy[1])
    rewrite(copy[0])
    refused(copy[0], "model.json", "c = 9", "8")


def test_a_model_of_other_keys(copy, task, other_task):
    linear(other_task).save(copy[1])
    rewrite(copy[0])
    refused(copy[0], "model.json", "other keys")
    with pytest.raises(amips.RunError, match="other keys"):
        plain_build(task, linear(other_task))


def test_a_model_of_other_cells_cannot_be_built(task, world, tmp_path):
    again = amips.label(*world, cells=8, val=100, test=100, k=10, seed=3, out=tmp_path / "task")
    assert again.fingerprint == task.fingerprint
    model = amips.train(again, amips.Linear(), samples=500, out=tmp_path / "run")
    plain_build(again, model)
    with pytest.raises(amips.RunError, match="other cells"):
        plain_build(task, model)


@pytest.mark.parametrize("file", FILES)
def test_a_signed_file_that_is_garbage(copy, file):
    """Verified, and still not what it should be: FAISS's and numpy's complaints become one line."""
    (copy[1] / file).write_bytes(b"\x93NUMPY garbage \n\n of some length " * 20)
    rewrite(copy[0])
    refused(copy[0], str(copy[1]))


def test_signed_arrays_of_the_wrong_shape_or_type(copy, task):
    np.save(copy[1] / "labels.npy", np.arange(task.n - 1))
    rewrite(copy[0])
    refused(copy[0], "labels.npy", "expected [600]")
    np.save(copy[1] / "labels.npy", np.zeros(task.n))
    rewrite(copy[0])
    refused(copy[0], "labels.npy", "float64")
    np.save(copy[1] / "keys.npy", np.zeros((task.n, task.d + 1), np.float32))
    rewrite(copy[0])
    refused(copy[0], "keys.npy", "expected [600, 16]")


@pytest.mark.parametrize("temperature", ["hot", None, [1]])
def test_a_temperature_that_is_no_number(copy, temperature):
    rewrite(copy[0], temperature=temperature)
    refused(copy[0], "manifest.json", "damaged")


# Interrupted


SAVING = """
import sys
from pathlib import Path
import amips
a, b, out, ready = sys.argv[1:]
bundles = [amips.load(a), amips.load(b)]
Path(ready).touch()
while True:
    for bundle in bundles:
        bundle.save(out)
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_bundle_is_whole(task, world, tmp_path):
    """A process that writes two bundles by turns over each other is killed; one of them is there."""
    x = world[1][:20]
    a = plain_build(task, linear(task), out=tmp_path / "a", ids=names(task.n, "int"))
    b = plain_build(task, None, out=tmp_path / "b", storage="sq8")
    expected = {True: a.search(x, probes=8), False: b.search(x, probes=8)}
    out, ready = tmp_path / "out", tmp_path / "ready"
    began = time.monotonic()
    for bundle in (a, b, a):
        bundle.save(out)
    long = time.monotonic() - began  # of a busy machine, too, enough for both to be written
    rng = random.Random(0)
    seen, left_over = set(), 0
    end = time.monotonic() + 60
    for kill in range(25):
        command = [sys.executable, "-c", SAVING, *map(str, (tmp_path / "a", tmp_path / "b", out, ready))]
        process = subprocess.Popen(command)
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(2 * long * rng.random())
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        ready.unlink()
        left_over += len(list(out.glob("data-*"))) > 1
        loaded = amips.load(out, verify=True)
        which = loaded.model is not None
        seen.add(which)
        got = loaded.search(x, probes=8)
        np.testing.assert_array_equal(got[0], expected[which][0])
        np.testing.assert_array_equal(got[1], expected[which][1])
        assert loaded.points == (a if which else b).points
        if time.monotonic() > end and kill >= 8:
            break
    assert seen == {True, False}
    assert left_over  # it was hit in the middle of a save
    a.save(out)
    assert len(list(out.glob("data-*"))) == 1


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_a_failing_disk_leaves_the_old_bundle(task, whole, copy, world, monkeypatch, fails_at):
    x = world[1][:20]
    new = plain_build(task, mapper(task.d), storage="pq")
    calls = 0
    real = os.fsync

    def fsync(handle):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(amips.BundleError, match=r"cannot be written: No space left on device$"):
        new.save(copy[0])
    monkeypatch.undo()
    np.testing.assert_array_equal(amips.load(copy[0]).search(x, probes=8)[1], whole[0].search(x, probes=8)[1])
    new.save(copy[0])
    np.testing.assert_array_equal(amips.load(copy[0]).search(x, probes=8)[1], new.search(x, probes=8)[1])
    assert len(list(copy[0].glob("data-*"))) == 1


def test_two_saves_at_a_time_wait_for_each_other(task, whole, tmp_path):
    other = plain_build(task, mapper(task.d), storage="sq8")
    other.save(tmp_path / "other")  # where it lives: what others replace, it would not save over
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: (whole[0], other)[i % 2].save(tmp_path / "b"), range(12)))
    assert amips.load(tmp_path / "b").store.storage in ("flat", "sq8")
    assert len(list((tmp_path / "b").glob("data-*"))) == 1


def test_a_bundle_replaced_while_it_is_read(task, whole, tmp_path):
    whole[0].save(tmp_path / "b")
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(lambda: [whole[0].save(tmp_path / "b") for _ in range(15)])
        while not saving.done():
            assert amips.load(tmp_path / "b").n == whole[0].n
        saving.result()


def test_an_interrupted_first_save_can_be_repeated(whole, world, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "bundle"

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("amips.search.bundle_directory.write_manifest", stop)
        with pytest.raises(KeyboardInterrupt):
            whole[0].save(out)
    refused(out, str(out), "manifest.json")
    whole[0].save(out)
    assert len(list(out.glob("data-*"))) == 1
    np.testing.assert_array_equal(
        amips.load(out).search(world[1], probes=8)[1], whole[0].search(world[1], probes=8)[1]
    )


# Names of keys


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (range(599), "one for each of the 600"),
        ([0] * 600, "same id"),
        (np.linspace(0, 1, 600), "whole numbers or strings"),
        ([None] * 600, "whole numbers or strings"),
        (range(-1, 599), "-1 means"),
        (["", *map(str, range(599))], "'' means"),
    ],
)
def test_ids_that_cannot_be_used(task, ids, match):
    with pytest.raises(amips.AmipsError, match=match):
        plain_build(task, None, ids=ids)
