"""Bundles by someone who means harm, with hashes that fit; and saves and readers when the disk does."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import amips
from amips.files import digest_of, sha256
from amips.nets import AffineArchitecture, AffineNet, Architecture, Net, weight_shapes
from helpers import plain_build

STORAGES = ("flat", "sq8", "pq", "lean")
pytestmark = pytest.mark.timeout(120)  # nothing here may hang


@pytest.fixture(scope="module")
def bundles(task, tmp_path_factory):
    """A bundle of each storage, with a linear router and names of keys."""
    root = tmp_path_factory.mktemp("hostile")
    model = AffineNet(AffineArchitecture(task.d, task.c), {"W": task.cells.centroids}, {})
    for storage in STORAGES:
        options = {"dimensions": 6} if storage == "lean" else {}
        names = [f"§{i}" for i in range(task.n)]
        plain_build(task, model, out=root / storage, storage=storage, ids=names, **options)
    return root


@pytest.fixture
def copy(bundles, tmp_path):
    """The bundle of sq8 to forge, and its data."""
    return copied(bundles, tmp_path, "sq8")


def copied(bundles, tmp_path, storage):
    bundle = tmp_path / storage
    shutil.copytree(bundles / storage, bundle)
    (data,) = bundle.glob("data-*")
    return bundle, data


def forge(bundle, **changes):
    """Change the manifest, and state the hashes that fit."""
    path = bundle / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    for file, facts in manifest["files"].items():
        if (bundle / file).is_file() and not (bundle / file).is_symlink():
            facts |= {"size": (bundle / file).stat().st_size, "sha256": sha256(bundle / file)}
    path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))


def refused(bundle, *words, **options):
    """One line of BundleError, soon, whether hashes are verified or not and files mapped or not."""
    for verify in (True, False):
        for mmap in (True, False):
            start = time.monotonic()
            with pytest.raises(amips.BundleError) as caught:
                amips.load(bundle, verify=verify, mmap=mmap, **options)
            assert time.monotonic() - start < 20
            text = str(caught.value)
            assert "\n" not in text
            for word in words:
                assert word in text, text


# What a manifest names


def test_forging_alone_is_no_error(copy):
    forge(copy[0])
    assert amips.load(copy[0]).n == 600


@pytest.mark.parametrize(
    "name", ["../evil/{}", "{}/", "./{}", "/{}", "", "data-XYZ", "data-0123456789AB", 7, None]
)
def test_data_from_elsewhere(copy, tmp_path, name):
    """Decoys are verified, others would be loaded."""
    (tmp_path / "evil").mkdir()
    shutil.copytree(copy[1], tmp_path / "evil" / copy[1].name)
    stated = name.format(copy[1].name) if isinstance(name, str) else name
    if name == "/{}":
        stated = str(tmp_path / "evil" / copy[1].name)
    forge(copy[0], data=stated)
    refused(copy[0], "manifest.json", "data=", "expected data-<12 digits>")


@pytest.mark.parametrize(
    "name", ["../evil.npy", "data-000000000000/keys.npy", "{}/../evil.npy", "{}/a/b.npy", "{}/x.py"]
)
def test_a_listed_file_from_elsewhere(copy, tmp_path, name):
    manifest = json.loads((copy[0] / "manifest.json").read_text())
    listed = name.format(copy[1].name)
    (copy[0] / listed).parent.mkdir(parents=True, exist_ok=True)
    (copy[0] / listed).write_bytes(b"x")
    forge(copy[0], files={**manifest["files"], listed: {}})
    refused(copy[0], str(copy[0]), "is not the name of a file in")


@pytest.mark.parametrize("inside", [True, False])
def test_links_are_not_followed(copy, tmp_path, inside):
    place = copy[0] / "aside" if inside else tmp_path / "aside"
    place.mkdir()
    for name in ("keys.npy", "sizes.npy", "model.json"):
        kept = (copy[1] / name).rename(place / name)
        (copy[1] / name).symlink_to(kept)
        refused(copy[0], name, "is a link")
        (copy[1] / name).unlink()
        kept.rename(copy[1] / name)
    kept = copy[1].rename(place / copy[1].name)
    copy[1].symlink_to(kept)
    refused(copy[0], "is a link")


def test_what_is_no_file(copy):
    """A pipe, a directory, a device: at once, without a byte of it."""
    paths = [copy[0] / "manifest.json", *sorted(copy[1].iterdir())]
    assert len(paths) == 14
    for path in paths:
        kept = path.rename(copy[0] / "kept")
        os.mkfifo(path)
        refused(copy[0], path.name)
        path.unlink()
        path.mkdir()
        refused(copy[0], path.name)
        path.rmdir()
        path.symlink_to("/dev/zero")
        refused(copy[0], path.name)
        path.unlink()
        kept.rename(path)
    assert amips.load(copy[0]).n == 600


def test_a_manifest_without_end(copy):
    os.truncate(copy[0] / "manifest.json", 1 << 40)  # a file of holes
    refused(copy[0], "manifest.json", "at most")


def test_a_file_that_only_looks_long(copy):
    """Holes again: as many keys as nobody has, the header says so too."""
    header = repr({"descr": "<f4", "fortran_order": False, "shape": (1 << 34, 16)}).ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    (copy[1] / "keys.npy").write_bytes(data)
    os.truncate(copy[1] / "keys.npy", len(data) + (1 << 34) * 64)
    path = copy[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][f"{copy[1].name}/keys.npy"]["size"] = len(data) + (1 << 34) * 64
    path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))
    with pytest.raises(amips.BundleError, match=r"keys\.npy is damaged: shape"):
        amips.load(copy[0], verify=False)


POINT = {"probes": 1, "recall1": 0.5, "recall10": 0.5, "scanned": 0.1, "flops": 10.0, "assured": [0.4] * 10}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        {"n": True},
        {"n": 10**30},
        {"n": -600},
        {"n": 600.0},
        {"c": "8"},
        {"storage": ["sq8"]},
        {"storage": "flat"},
        {"router": "nonsense"},
        {"router": ["own"]},
        {"keys": 7},
        {"keys": "\u001b[31m"},
        *({"temperature": value} for value in (NAN, INF, -1, "1", True, 10**400)),
        *({"target_recall": value} for value in (NAN, INF, 0, 1.5, -1, "0.9", True)),
        *({"points": [{**POINT, name: NAN}]} for name in POINT),
        *({"points": [{**POINT, name: -1}]} for name in POINT),
        *({"points": [{**POINT, name: "1"}]} for name in POINT),
        {"points": [{**POINT, "more": 1}]},
        {"points": [7]},
        {"points": {"a": 1}},
        {"points": [{**POINT, "refine": 10**9}]},
        {"points": [{**POINT, "assured": [NAN]}]},
        {"design": 7},
        {"design": {"cells": 8, "router": {"kind": "support", "depth": 10**8}}},
        {"design": {"cells": NAN}},
        {"report": 7},
        {"report": {"recall": "x"}},
        {"files": 7},
    ],
    ids=str,
)
def test_what_a_manifest_cannot_say(copy, changes):
    path = copy[0] / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))
    refused(copy[0], str(copy[0]))


def test_points_of_codes_where_there_are_none(bundles, tmp_path):
    bundle, _ = copied(bundles, tmp_path, "flat")
    forge(bundle, points=[{**POINT, "refine": 0}])
    refused(bundle, "there are no codes")


def test_characters_that_do_not_exist(copy):
    for code in (0x110000, 0xFFFFFFFF, 0xD800):
        labels = np.load(copy[1] / "labels.npy")
        labels.view(np.uint32)[0] = code
        np.save(copy[1] / "labels.npy", labels)
        forge(copy[0])
        refused(copy[0], "labels.npy", "characters that do not exist")


# Models


def describe(data, **changes):
    path = data / "model.json"
    described = json.loads(path.read_text())
    described["architecture"] |= changes
    path.write_text(json.dumps(described))


def deep(d, c):
    a = Architecture("support", d, c, 12, 3, (1, 2))
    rng = np.random.default_rng(0)
    return Net(a, {n: rng.standard_normal(s).astype(np.float32) for n, s in weight_shapes(a).items()}, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 10**8},
        {"depth": 10**8, "injected": []},
        {"depth": 10**400},
        {"depth": 999},
        {"depth": 2, "injected": [1]},
        {"width": 10**12},
        {"width": 2**31},
        {"c": 10**12},
        {"d": 10**12},
        {"injected": [1, 2, 3]},
        {"injected": list(range(1, 10**5))},
        {"alpha": NAN},
        {"beta": NAN},
        {"beta": -1},
        {"depth": 3.0},
        {"residual": "yes"},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_network_that_its_weights_are_not_of(copy, task, changes):
    deep(task.d, task.c).save(copy[1])
    forge(copy[0])
    assert amips.load(copy[0]).model.c == task.c
    describe(copy[1], **changes)
    forge(copy[0])
    refused(copy[0], str(copy[1]))


@pytest.mark.parametrize(
    "changes", [{"pieces": 10**12}, {"rank": 16}, {"rank": 2}, {"c": 10**12}, {"bias": True}]
)
def test_a_linear_router_that_its_weights_are_not_of(copy, changes):
    describe(copy[1], **changes)
    forge(copy[0])
    refused(copy[0], str(copy[1]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_weights_that_are_not_finite(copy, task, bad):
    for model in (deep(task.d, task.c), amips.load(copy[0]).model):
        for name in model.weights:
            weights = {key: array.copy() for key, array in model.weights.items()}
            weights[name].reshape(-1)[-1] = bad
            replace(model, weights=weights).save(copy[1])
            forge(copy[0])
            refused(copy[0], "model.safetensors", f"weight {name} has values that are not finite")


def tensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


W = {"dtype": "F32", "shape": [8, 16], "data_offsets": [0, 512]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        tensors(b"[" * 10**5),
        tensors({}),
        tensors({"W": W}, bytes(511)),
        tensors({"W": W}, bytes(513)),
        tensors({"W": {**W, "dtype": "BF16", "data_offsets": [0, 256]}}, bytes(256)),
        tensors({"W": {**W, "dtype": "F64", "data_offsets": [0, 1024]}}, bytes(1024)),
        tensors({"W": {**W, "shape": [16, 8]}}, bytes(512)),
        tensors({"W": {**W, "shape": [1 << 40, 16]}}, bytes(512)),
        tensors({"W": {**W, "data_offsets": [0, 1 << 60]}}, bytes(512)),
        tensors({"W": {**W, "data_offsets": [0, math.inf]}}, bytes(512)),
        tensors({"W": {**W, "data_offsets": [512, 0]}}, bytes(512)),
        tensors({"W": {**W, "data_offsets": [-512, 0]}}, bytes(512)),
        tensors({"W": {**W, "data_offsets": [4, 516]}}, bytes(516)),
        tensors({"W": W, "more": {**W, "data_offsets": [512, 1024]}}, bytes(1024)),
        tensors({"W": W, "more": {**W, "shape": [], "data_offsets": [0, 4]}}, bytes(512)),
        tensors({"W": 7}, bytes(512)),
        tensors({"W": {}}, bytes(512)),
    ],
    ids=lambda content: str(content[:60]),
)
def test_weights_that_cannot_be(copy, content):
    (copy[1] / "model.safetensors").write_bytes(tensors({"W": W}, bytes(512)))
    forge(copy[0])
    amips.load(copy[0])  # this is how it is done
    (copy[1] / "model.safetensors").write_bytes(content)
    forge(copy[0])
    refused(copy[0], str(copy[1]))


# Disks

LIMITED = """
import resource, sys
import amips
source, out, limit = sys.argv[1:]
searcher = amips.load(source)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    searcher.save(out)
except amips.BundleError as problem:
    print(problem)
"""


def limited(source, out, limit):
    command = [sys.executable, "-c", LIMITED, str(source), str(out), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("storage", ["flat", "lean"])
def test_a_file_limit_one_byte_short(bundles, tmp_path, storage, world):
    """The last byte of the largest file: no error may be lost, and the old bundle stays."""
    out, old = copied(bundles, tmp_path, "sq8")
    want = amips.load(out).search(world[1][:5], probes=8)
    largest = max(path.stat().st_size for path in (bundles / storage).rglob("*") if path.is_file())
    message = limited(bundles / storage, out, largest - 1)
    assert message == f"{out} cannot be written: File too large\n"
    assert [path for path in out.iterdir() if path.is_dir()] == [old]
    got = amips.load(out).search(world[1][:5], probes=8)
    np.testing.assert_array_equal(got[1], want[1])
    assert limited(bundles / storage, out, largest) == ""
    assert amips.load(out).store.storage == storage


TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
import amips
bundle, queries, answers = sys.argv[1:]
searcher = amips.load(bundle)
for path in Path(bundle).glob("data-*/*"):
    os.truncate(path, 0)
x = np.load(queries)
np.save(answers, np.stack([searcher.search(x, 5, probes=p)[1] for p in (1, 8)]))
"""


@pytest.mark.parametrize("storage", STORAGES)
def test_cut_short_while_it_is_read_from(bundles, tmp_path, storage, world):
    """Without mmap, nothing is left on disk: a file that is cut in place ends no process."""
    bundle, _ = copied(bundles, tmp_path, storage)
    np.save(tmp_path / "x.npy", world[1][:9])
    arguments = [str(path) for path in (bundle, tmp_path / "x.npy", tmp_path / "answers.npy")]
    subprocess.run([sys.executable, "-c", TRUNCATED, *arguments], check=True, timeout=100)
    searcher = amips.load(bundles / storage)
    want = np.stack([searcher.search(world[1][:9], 5, probes=p)[1] for p in (1, 8)])
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npy"), want)


# Other processes

UNPICKLED = """
import pickle, sys
import numpy as np
with open(sys.argv[1], "rb") as file:
    searcher, x, want = pickle.load(file)
scores, ids = searcher.search(x, 5, recall=0.5)
np.testing.assert_array_equal(ids, want)
"""


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_pickled_to_another_process(bundles, tmp_path, storage, mmap, world):
    searcher = amips.load(bundles / storage, mmap=mmap)
    x = world[1][:9]
    want = searcher.search(x, 5, recall=0.5)[1]
    again = pickle.loads(pickle.dumps(searcher))
    assert (again.points, again.target_recall, again.design) == (
        searcher.points,
        searcher.target_recall,
        searcher.design,
    )
    np.testing.assert_array_equal(again.search(x, 5, recall=0.5)[1], want)
    (tmp_path / "pickle").write_bytes(pickle.dumps((searcher, x, want)))
    command = [sys.executable, "-c", UNPICKLED, str(tmp_path / "pickle")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr


def test_a_mapped_searcher_pickles_small_and_a_built_one_whole(bundles, task, world):
    assert len(pickle.dumps(amips.load(bundles / "flat", mmap=True).store)) < 1000
    built = plain_build(task, None, storage="sq8")
    again = pickle.loads(pickle.dumps(built))
    np.testing.assert_array_equal(again.search(world[1], probes=3)[1], built.search(world[1], probes=3)[1])


# A router of one's own


class OwnRouter:
    """By centroid, but for a little: neither the centroids nor a model."""

    def __init__(self, centroids):
        self.centroids = centroids + np.float32(0.01)

    def scores(self, x):
        return x @ self.centroids.T


def test_a_router_of_ones_own(task, tmp_path, world):
    router = OwnRouter(task.cells.centroids)
    built = plain_build(task, router)
    assert built.points
    assert built.temperature > 0
    built.save(tmp_path / "b")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert not any("model" in file for file in manifest["files"])
    refused(tmp_path / "b", str(tmp_path / "b"), "needs the router it was saved with", "load it with model=")
    refused(tmp_path / "b", "a int cannot route", model=7)
    again = amips.load(tmp_path / "b", model=router)
    assert (again.points, again.temperature, again.target_recall, again.design) == (
        built.points,
        built.temperature,
        built.target_recall,
        built.design,
    )
    for options in ({"probes": 2}, {"recall": 0.8}, {"min_mass": 0.05}):
        np.testing.assert_array_equal(
            again.search(world[1][:20], **options)[1], built.search(world[1][:20], **options)[1]
        )
    again.save(tmp_path / "b")
    assert amips.load(tmp_path / "b", model=router).points == built.points


def test_a_router_too_many(bundles, task):
    refused(bundles / "flat", "has a router: load it without model=", model=OwnRouter(task.cells.centroids))
