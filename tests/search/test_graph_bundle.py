"""Bundles of graphs: the same answers again, nothing forged is believed, and the commands that read them."""

import json
import pickle
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.builder import Builder
from amips.cli import main
from amips.design import MOST_DEGREE, Design
from amips.files import sha256
from amips.index.graph_store import MOST_VALUES
from amips.search import GraphSearcher, Index
from helpers import make_world, reseal

STORAGES = ("flat", "sq8", "lean")
N, D = 600, 16


@pytest.fixture(scope="module")
def queries():
    """200 that no index was measured with."""
    return make_world(N, 900, D, seed=0)[1][700:]


@pytest.fixture(scope="module")
def built(task, tmp_path_factory):
    """An index of each storage, and its bundle."""
    root = tmp_path_factory.mktemp("graphs")
    make = {storage: {"structure": "graph", "storage": storage, "recall": 0.8} for storage in STORAGES}
    return {
        storage: (amips.build(task, out=root / storage, **options), root / storage)
        for storage, options in make.items()
    }


@pytest.fixture
def copy(built, tmp_path):
    """A lean bundle to forge, and its data."""
    shutil.copytree(built["lean"][1], tmp_path / "bundle")
    (data,) = (tmp_path / "bundle").glob("data-*")
    return tmp_path / "bundle", data


def refused(bundle, *words, **options):
    """One line of BundleError with these words, however it is loaded."""
    for mmap in (False, True):
        for verify in (False, True):
            with pytest.raises(amips.BundleError) as caught:
                amips.load(bundle, mmap=mmap, verify=verify, **options)
            text = str(caught.value)
            assert "\n" not in text
            for word in words:
                assert word in text, text


def same_answers(index, other, x):
    for options in ({"margin": 0.1}, {"recall": 0.7}, {}, {"recall": 1.0}, {"margin": 0.0, "k": 3}):
        for part, expected in zip(index.search(x, **options), other.search(x, **options), strict=True):
            np.testing.assert_array_equal(part, expected)


# The same again


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_loaded_bundle_answers_as_the_built_one(built, world, queries, storage, mmap):
    index, bundle = built[storage]
    loaded = amips.load(bundle, mmap=mmap, keys=world[0])
    assert isinstance(loaded.snapshot, GraphSearcher)
    assert loaded.points == index.points
    assert sum(point.margin > 0 for point in loaded.points) > 5
    assert (loaded.n, loaded.d, loaded.c) == (index.n, index.d, index.c) == (N, D, len(index.store.entries))
    assert (loaded.fingerprint, loaded.design, loaded.target_recall) == (index.fingerprint, index.design, 0.8)
    same_answers(loaded, index, queries)
    same_answers(pickle.loads(pickle.dumps(loaded)), index, queries)
    np.testing.assert_array_equal(loaded.cost(queries).flops, index.cost(queries).flops)


@pytest.mark.parametrize(
    "labels", [np.arange(N) * 3 + 10**12, [f"§{i}" for i in range(N)]], ids=["int", "str"]
)
def test_ids_of_the_user_are_kept(built, queries, tmp_path, labels):
    index = Index(replace(built["lean"][0].snapshot, labels=np.asarray(labels)))
    index.save(tmp_path / "b")
    loaded = amips.load(tmp_path / "b")
    expected = np.asarray(labels)[built["lean"][0].search(queries)[1]]
    np.testing.assert_array_equal(loaded.search(queries)[1], expected)
    assert loaded.search(queries)[1].dtype == index.labels.dtype


def test_other_keys_are_refused(built, world, tmp_path):
    keys, bundle = world[0], built["lean"][1]
    other = keys.copy()
    other[3, 3] += 1e-3
    refused(bundle, str(bundle), "other keys", keys=other)
    refused(bundle, "other keys", keys=keys[:-1])
    np.save(tmp_path / "keys.npy", keys)
    assert amips.load(bundle, keys=tmp_path / "keys.npy").n == N


def test_a_graph_takes_the_place_of_cells_and_back(built, task, queries, tmp_path):
    out = tmp_path / "b"
    cells = amips.build(task, storage="flat", out=tmp_path / "cells")
    cells.save(out)
    built["lean"][0].save(out)
    open_still = amips.load(out, mmap=True)
    same_answers(open_still, built["lean"][0], queries)
    cells.save(out)
    (data,) = out.glob("data-*")
    assert not (data / "neighbours.npy").exists()
    assert type(amips.load(out)) is type(cells)
    same_answers(open_still, built["lean"][0], queries)  # its files are mapped, so they live on
    for mmap in (False, True):
        built["sq8"][0].save(out)
        amips.load(out, mmap=mmap).save(out)  # over itself
        same_answers(amips.load(out), built["sq8"][0], queries)


def test_scoring_every_key_looks_at_every_key(built):
    certain = [point for point in built["lean"][0].points if point.certain]
    assert [point.probes for point in certain] == [N]


def test_codes_that_could_not_be_loaded_are_not_made():
    d = MOST_VALUES + 4
    task = amips.label(*make_world(40, 30, d, seed=1), cells=1, val=5, test=5)
    with pytest.raises(amips.AmipsError, match="dimensions"):
        Builder(task).check(Design.graph(dimensions=d, entries=8))


# Forged


def forge(bundle, data, files=None, **changes):
    """Other arrays, other values in the manifest, and sizes and sums that fit."""
    for name, edit in (files or {}).items():
        np.save(data / f"{name}.npy", edit(np.load(data / f"{name}.npy")))
    manifest = json.loads((bundle / "manifest.json").read_text())
    listed = manifest["files"]
    for file, facts in listed.items():
        facts |= {"size": (bundle / file).stat().st_size, "sha256": sha256(bundle / file)}
    reseal(bundle / "manifest.json", files=listed, **changes)


def test_more_neighbours_than_a_graph_may_have(copy):
    forge(*copy, {"neighbours": lambda lists: np.tile(lists[:, :1], (1, MOST_DEGREE + 1))})
    with pytest.raises(amips.BundleError, match=f"{MOST_DEGREE + 1} neighbours"):
        amips.load(copy[0])


def test_forging_alone_is_no_error(copy):
    forge(*copy)
    assert amips.load(copy[0]).n == N


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"storage": "pq"}, ["storage"]),
        ({"storage": "nothing"}, ["storage"]),
        ({"router": "model"}, ["a graph has no router"]),
        ({"router": "own"}, ["a graph has no router"]),
        ({"structure": "tree"}, ["structure='tree'"]),
        ({"structure": None}, ["structure"]),
        ({"structure": ["graph"]}, ["structure"]),
        ({"structure": "cells"}, ["does not list"]),
        ({"n": N + 1}, ["expected 601"]),
        ({"d": D - 1}, ["expected 600 of dimension 15"]),
        ({"c": 1}, ["in 1"]),
        ({"keys": "f" * 63}, ["fingerprint"]),
        ({"points": [{"margin": "wide"}]}, ["damaged"]),
        ({"design": {"cells": 3, "structure": "tree"}}, ["not a design"]),
    ],
)
def test_a_manifest_that_says_what_cannot_be(copy, changes, words):
    forge(*copy, **changes)
    refused(copy[0], *words)


@pytest.mark.parametrize("margin", [-0.1, "0.1", None, 10**400], ids=["below", "text", "null", "long"])
def test_points_with_a_margin_that_is_none(copy, margin):
    points = json.loads((copy[0] / "manifest.json").read_text())["points"]
    points[2]["margin"] = margin
    forge(*copy, points=points)
    refused(copy[0], "manifest.json", "damaged")


def test_arrays_with_sums_that_fit(copy):
    """Hashes are no help against who can write the manifest."""
    good = {path.name: path.read_bytes() for path in copy[1].iterdir()}
    for name, edit in {
        "neighbours": lambda a: np.where(a == a.max(), N, a).astype(np.int32),
        "entries": lambda a: a - N,
        "projection": lambda a: np.full_like(a, 127),
        "unit": lambda a: -a,
        "step": lambda a: a[:-1],
        "keys": lambda a: a[:, :-1],
    }.items():
        forge(*copy, files={name: edit})
        refused(copy[0], f"{copy[1].name}")
        for file, content in good.items():
            (copy[1] / file).write_bytes(content)


def test_a_file_that_is_not_listed(copy):
    for name in ("neighbours", "entries", "codes", "projection"):
        manifest = json.loads((copy[0] / "manifest.json").read_text())
        files = {
            file: facts for file, facts in manifest["files"].items() if not file.endswith(f"/{name}.npy")
        }
        reseal(copy[0] / "manifest.json", files=files)
        refused(copy[0], "does not list", f"{name}.npy")
        reseal(copy[0] / "manifest.json", files=manifest["files"])
    (copy[1] / "neighbours.npy").unlink()
    refused(copy[0], "neighbours.npy")


def test_a_bundle_of_a_graph_takes_no_model_and_no_index(copy):
    class Router:
        def scores(self, x):
            return x

    refused(copy[0], "model=", model=Router())
    refused(copy[0], "index", index=object())


# Commands


@pytest.fixture
def run(built, queries, tmp_path, monkeypatch, capfd):
    """A command in a folder with a bundle and queries; (exit code, stdout, stderr)."""
    np.save(tmp_path / "x.npy", queries[:20])
    shutil.copytree(built["lean"][1], tmp_path / "bundle")

    def call(line):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["amips", *line.split()])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capfd.readouterr()

    return call


def test_info(run, built):
    code, out, err = run("info bundle")
    assert (code, err) == (0, "")
    assert built["lean"][0].design.describe() in out
    assert re.search(r"walked by +(compiled code|numpy)\n", out)
    assert re.search(r"serves recall@10 +0\.8\n", out)
    assert re.search(r"^visited +margin +", out, re.MULTILINE)
    code, out, _ = run("info bundle --design")
    assert (code, Design.from_json(json.loads(out))) == (0, built["lean"][0].design)


def test_search(run, built, queries):
    for line, options in (
        ("--margin 0.1", {"margin": 0.1}),
        ("", {}),
        ("--recall 0.7 -k 3", {"recall": 0.7, "k": 3}),
    ):
        code, out, err = run(f"search bundle x.npy {line}")
        assert (code, err) == (0, "")
        scores, ids = built["lean"][0].search(queries[:20], **options)
        hits = [json.loads(text)["hits"] for text in out.splitlines()]
        assert [[hit["id"] for hit in row] for row in hits] == ids.tolist()
        np.testing.assert_allclose([[hit["score"] for hit in row] for row in hits], scores, rtol=1e-5)


def test_searches_that_are_refused(run):
    for line in ("--probes 3", "--min-mass 0.1", "--margin 0.1 --recall 0.9", "--margin -1"):
        code, out, err = run(f"search bundle x.npy {line}")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("error: ")
        assert "margin" in err


def test_build_by_command(task, run, queries):
    code, out, _ = run(f"build {task.path} --structure graph --storage sq8 --recall 0.8 --out made")
    assert code == 0
    assert "graph of degree 32" in out
    code, out, _ = run("search made x.npy --margin 0.1")
    assert code == 0
    assert len(out.splitlines()) == 20
    code, _, err = run(f"build {task.path} --structure graph --stop mass --out other")
    assert (code, err.count("\n")) == (1, 1)
