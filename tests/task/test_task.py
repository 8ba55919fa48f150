"""The task: split before noise, exact targets for every copy, whole or visibly unfinished."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import amips
from amips import TaskError, VectorError
from amips import cells as partition
from amips import exact as labeller
from amips.builder import Builder
from amips.cells import Cells
from amips.files import sha256
from amips.locks import locked
from amips.vectors import inspect, open_vectors, unit_rows
from helpers import journal_rows, kill_when, make_world, reseal

SPLITS = ("train", "val", "test")
SMALL = {"val": 20, "test": 30, "k": 5}
TARGETS = {**SMALL, "cell_targets": True}
FULL = {"cells": 8, "copies": 1, "cell_targets": True, "val": 100, "test": 100, "k": 10}


@pytest.fixture(scope="module")
def task(world, tmp_path_factory):
    """One noisy copy of each training query, and the top key of every cell."""
    return amips.label(*world, **FULL, out=tmp_path_factory.mktemp("full") / "task")


def splits(task):
    return {name: getattr(task, name) for name in SPLITS}


def content(folder):
    """Every file of a directory with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def manifest(task):
    return json.loads((task.path / "task.json").read_text())


def check_targets(task):
    """Top keys and cell maxima of every row of every split, against float64 brute force."""
    keys = np.asarray(task.keys, np.float64)
    for split in splits(task).values():
        scores = np.asarray(split.queries, np.float64) @ keys.T
        m = len(split)
        k = split.top_ids.shape[1]
        size = np.abs(scores).max()
        assert np.allclose(split.top_scores, -np.sort(-scores, axis=1)[:, :k], atol=2e-6 * size)
        assert np.allclose(
            np.take_along_axis(scores, split.top_ids.astype(int), axis=1), split.top_scores, atol=2e-6 * size
        )
        assert split.cell_scores.shape == split.cell_ids.shape == (m, task.c)
        for j in range(task.c):
            members = np.flatnonzero(task.cells.assignment == j)
            assert np.allclose(split.cell_scores[:, j], scores[:, members].max(axis=1), atol=2e-6 * size)
            assert (task.cells.assignment[split.cell_ids[:, j]] == j).all()


class TestLabel:
    def test_shapes_and_facts(self, task, world):
        keys, _ = world
        assert (task.n, task.d, task.c) == (600, 16, 8)
        assert {name: len(split) for name, split in splits(task).items()} == {
            "train": 1000,
            "val": 100,
            "test": 100,
        }
        assert np.array_equal(task.keys, keys)
        assert task.fingerprint == inspect(open_vectors(keys)).fingerprint
        assert task.facts == {"unit_norm": True, "duplicate_queries": 0}
        assert manifest(task)["imbalance"] == task.cells.imbalance
        assert task.has_cell_targets
        assert task.train.top_ids.shape == (1000, 10)
        assert "600 keys, d = 16, 8 cells; queries: 1,000 train, 100 val, 100 test" in repr(task)

    def test_everything_is_memory_mapped(self, task):
        for split in splits(task).values():
            for name in ("queries", "source", "top_scores", "top_ids", "cell_scores", "cell_ids"):
                assert isinstance(getattr(split, name), np.memmap)
                assert not getattr(split, name).flags.writeable
        assert isinstance(task.keys, np.memmap)

    def test_targets_are_exact_for_every_copy(self, task):
        check_targets(task)

    def test_without_cells_the_only_cell_holds_the_top_key(self, task1):
        assert task1.c == 1
        check_targets(task1)
        assert np.array_equal(task1.val.cell_ids, task1.val.top_ids[:, :1])
        assert not (task1.path / "val" / "cells").exists()

    def test_top_keys_agree_with_cell_maxima(self, task):
        for split in splits(task).values():
            best = split.cell_scores.argmax(axis=1)
            assert np.array_equal(split.cell_ids[np.arange(len(split)), best], split.top_ids[:, 0])

    def test_sources_are_in_one_split_only_and_all_there(self, task, world):
        sources = {name: set(split.source.tolist()) for name, split in splits(task).items()}
        assert {name: len(ids) for name, ids in sources.items()} == {
            "train": 500,
            "val": 100,
            "test": 100,
        }
        assert set().union(*sources.values()) == set(range(len(world[1])))

    def test_originals_are_the_queries_given_at_norm_1(self, task, world):
        queries = unit_rows(world[1])[0]
        assert np.array_equal(task.val.queries, queries[task.val.source])
        assert np.array_equal(task.test.queries, queries[task.test.source])
        assert np.array_equal(task.train.queries[::2], queries[task.train.source[::2]])

    def test_the_split_is_at_random(self, task):
        """Not the head or the tail of the log."""
        assert 250 < task.test.source.mean() < 450
        assert (np.diff(np.sort(task.test.source)) > 1).any()

    def test_copies_are_noisy_at_norm_1(self, world, tmp_path):
        keys, queries = world
        scaled = queries * np.linspace(0.5, 4, len(queries), dtype=np.float32)[:, None]
        task = amips.label(keys, scaled, copies=3, noise=0.05, out=tmp_path / "t", **TARGETS)
        x, source = np.asarray(task.train.queries), task.train.source
        assert x.shape == (4 * 650, 16)
        assert (source.reshape(-1, 4) == source[::4, None]).all()
        original = unit_rows(scaled)[0][source]
        assert np.allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-5)
        assert np.array_equal(x[::4], original[::4])
        away = np.linalg.norm(x - original, axis=1)
        # 0.05 for each of 16 coordinates is 0.2, less what rescaling takes away along the query.
        assert away.reshape(-1, 4)[:, 1:].mean() == pytest.approx(0.05 * np.sqrt(15), rel=0.05)
        assert len(np.unique(x, axis=0)) == len(x)
        assert not task.facts["unit_norm"]
        check_targets(task)

    def test_noise_in_other_splits_on_request(self, world, tmp_path):
        task = amips.label(*world, copies=2, noisy_splits=("val", "train"), out=tmp_path / "t", **TARGETS)
        assert {name: len(split) for name, split in splits(task).items()} == {
            "train": 1950,
            "val": 60,
            "test": 30,
        }
        check_targets(task)

    def test_no_copies(self, world, tmp_path):
        task = amips.label(*world, copies=0, out=tmp_path / "t", **SMALL)
        assert np.array_equal(task.train.queries, unit_rows(world[1])[0][task.train.source])

    def test_noise_is_made_in_blocks_with_numbers_of_their_own(self, tmp_path):
        keys, _ = make_world(20, 1, 256, seed=1)
        queries = np.random.default_rng(2).standard_normal((9000, 256)).astype(np.float32)
        task = amips.label(keys, queries, copies=1, noise=0.1, out=tmp_path / "t", val=1, test=1, k=1)
        noise = np.asarray(task.train.queries)[1::2] - np.asarray(task.train.queries)[::2]
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        block = (1 << 22) // (256 * 2)
        assert len(noise) > block + 500
        assert np.abs((noise[:500] * noise[block : block + 500]).sum(axis=1)).max() < 0.5

    def test_duplicates_are_removed_before_the_split(self, world, tmp_path):
        keys, queries = world
        log = np.concatenate([queries[:300], queries[100:300], queries[:300] * 1.0, queries[250:]])
        log[600:700, 0] += 0.0
        task = amips.label(keys, log, copies=0, out=tmp_path / "t", **SMALL)
        assert task.facts["duplicate_queries"] == len(log) - 700
        rows = np.concatenate([np.asarray(split.queries) for split in splits(task).values()])
        assert len(rows) == len(np.unique(rows, axis=0)) == 700
        sources = np.concatenate([split.source for split in splits(task).values()])
        log = unit_rows(log)[0]
        assert np.array_equal(rows, log[sources])
        first = {row.tobytes(): i for i, row in reversed(list(enumerate(log)))}
        assert all(first[row.tobytes()] == source for row, source in zip(rows, sources, strict=True))

    def test_minus_zero_is_a_duplicate_of_zero(self, world, tmp_path):
        keys, queries = world
        queries = queries.copy()
        queries[:, 3] = 0
        double = queries.copy()
        double[:, 3] = -0.0
        task = amips.label(keys, np.concatenate([queries, double]), out=tmp_path / "t", **SMALL)
        assert task.facts["duplicate_queries"] == 700

    def test_a_query_of_another_norm_is_a_duplicate(self, world, tmp_path):
        """At norm 1 it is the same row: in another split it would be a test query that is trained on."""
        keys, queries = world
        log = np.concatenate([queries, queries * np.float32(2), queries[:50] * np.float32(2.0**80)])
        task = amips.label(keys, log, out=tmp_path / "t", **SMALL)
        assert task.facts["duplicate_queries"] == 750
        sources = np.concatenate([split.source for split in splits(task).values()])
        assert np.sort(sources).tolist() == list(range(700))

    def test_unnormalised_keys_and_queries(self, tmp_path):
        """Inner products, not angles: the longest keys win most queries."""
        keys, queries = make_world(400, 300, 12, seed=3)
        keys *= np.exp(np.random.default_rng(4).standard_normal((400, 1))).astype(np.float32)
        queries *= 7
        task = amips.label(keys, queries, cells=5, out=tmp_path / "t", **TARGETS)
        check_targets(task)
        norms = np.linalg.norm(keys, axis=1)
        assert norms[task.train.top_ids[:, 0]].mean() > 2 * norms.mean()

    def test_fewer_keys_than_k(self, tmp_path):
        keys, queries = make_world(4, 60, 8, seed=5)
        task = amips.label(keys, queries, val=5, test=5, k=100, out=tmp_path / "t")
        assert task.val.top_ids.shape == (5, 4)
        assert (np.sort(task.val.top_ids, axis=1) == np.arange(4)).all()

    def test_duplicate_keys_are_labelled_with_the_lowest_id(self, world, tmp_path):
        keys, queries = world
        task = amips.label(np.concatenate([keys, keys]), queries, cells=4, out=tmp_path / "t", **SMALL)
        assert (task.train.top_ids[:, 0] < 600).all()
        assert (task.train.top_ids[:, 1] == task.train.top_ids[:, 0] + 600).all()

    def test_a_given_partition(self, world, tmp_path):
        keys, queries = world
        cells = Cells((np.arange(600) % 3).astype(np.int64), np.ones((3, 16), np.float32))
        task = amips.label(keys, queries, cells=cells, out=tmp_path / "t", **TARGETS)
        assert np.array_equal(task.cells.assignment, cells.assignment)
        assert task.cells.assignment.dtype == np.int32
        check_targets(task)
        assert amips.label(keys, queries, cells=cells, out=tmp_path / "t", **TARGETS).c == 3
        other = Cells((np.arange(600) // 200).astype(np.int32), np.ones((3, 16), np.float32))
        with pytest.raises(TaskError, match="other inputs or options"):
            amips.label(keys, queries, cells=other, out=tmp_path / "t", **SMALL)

    def test_any_format_gives_the_same_task(self, world, tmp_path):
        keys, queries = world
        np.save(tmp_path / "keys.npy", keys.astype(np.float64))
        (tmp_path / "queries.fbin").write_bytes(np.array(queries.shape, "<u4").tobytes() + queries.tobytes())
        a = amips.label(keys, queries, cells=4, out=tmp_path / "a", **SMALL)
        b = amips.label(
            tmp_path / "keys.npy", tmp_path / "queries.fbin", cells=4, out=tmp_path / "b", **SMALL
        )
        assert content(a.path) == content(b.path)

    def test_numbers_of_numpy_are_numbers(self, world, tmp_path):
        options = {"cells": np.int64(3), "val": np.int32(20), "test": np.int64(30), "k": np.int16(5)}
        a = amips.label(
            *world,
            **options,
            noise=np.float64(0.02),
            memory=np.int64(50_000_000),
            seed=np.uint8(1),
            out=tmp_path / "a",
        )
        b = amips.label(*world, cells=3, **SMALL, memory=50_000_000, seed=1, out=tmp_path / "b")
        assert content(a.path) == content(b.path)


class TestQueryAware:
    def test_cells_are_those_of_the_training_queries(self, world, tmp_path):
        options = {"cells": 9, "val": 100, "test": 100, "k": 15, "seed": 3, "cell_targets": True}
        task = amips.label(*world, query_aware=1.5, out=tmp_path / "aware", **options)
        plain = amips.label(*world, query_aware=0, out=tmp_path / "plain", **options)
        top = np.asarray(task.train.top_ids)[:, :10]
        want = partition.query_aware(task.keys, np.asarray(task.train.queries), top, 9, strength=1.5, seed=3)
        np.testing.assert_array_equal(task.cells.assignment, want.assignment)
        np.testing.assert_array_equal(task.cells.centroids, want.centroids)
        assert (task.query_aware, plain.query_aware) == (1.5, 0.0)
        assert (task.cells.assignment != plain.cells.assignment).any()
        np.testing.assert_array_equal(task.test.top_ids, plain.test.top_ids)
        check_targets(task)
        with pytest.raises(TaskError, match="query_aware"):
            amips.label(*world, query_aware=3, out=tmp_path / "aware", **options)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"cells": 1}, "^query_aware is for a number of cells, spherical, one run$"),
            ({"runs": 3}, "^query_aware is for a number of cells"),
            ({"spherical": False}, "^query_aware is for a number of cells"),
            ({"query_aware": -1.0}, r"^query_aware=-1\.0: expected a number, at least 0$"),
            ({"query_aware": np.nan}, "^query_aware=nan"),
        ],
        ids=str,
    )
    def test_what_cannot_be(self, world, tmp_path, options, match):
        options = {"cells": 9, "query_aware": 1.5, **SMALL, **options}
        with pytest.raises(VectorError, match=match):
            amips.label(*world, out=tmp_path / "t", **options)
        assert not (tmp_path / "t").exists()


class TestSeed:
    def test_the_same_seed_gives_the_same_bytes(self, world, tmp_path):
        a = amips.label(*world, cells=4, seed=3, out=tmp_path / "a", **SMALL)
        b = amips.label(*world, cells=4, seed=3, out=tmp_path / "b", **SMALL)
        assert content(a.path) == content(b.path)

    def test_another_seed_gives_another_split_and_other_noise(self, world, tmp_path):
        a = amips.label(*world, copies=1, seed=3, out=tmp_path / "a", **SMALL)
        b = amips.label(*world, copies=1, seed=4, out=tmp_path / "b", **SMALL)
        assert set(a.test.source) != set(b.test.source)
        noise = []
        for task in (a, b):
            x, source = np.asarray(task.train.queries), task.train.source
            noise.append(dict(zip(source[1::2].tolist(), x[1::2] - x[::2], strict=True)))
        common = set(noise[0]) & set(noise[1])
        assert len(common) > 400
        assert not any(np.allclose(noise[0][s], noise[1][s], atol=1e-4) for s in common)


class TestOutDirectory:
    def test_nothing_but_the_task_is_left(self, task):
        files = set(content(task.path))
        assert files == {"task.json", *manifest(task)["files"]}

    def test_a_finished_task_is_reused(self, world, task, monkeypatch):
        before = {p: p.stat().st_mtime_ns for p in task.path.rglob("*")}
        monkeypatch.setattr(labeller, "top_k", lambda *_, **__: pytest.fail("labelled again"))
        again = amips.label(*world, **FULL, out=task.path)
        assert (again.options, again.facts) == (task.options, task.facts)
        assert {p: p.stat().st_mtime_ns for p in task.path.rglob("*")} == before

    @pytest.mark.parametrize(
        "change",
        [
            {"cells": 7},
            {"copies": 2},
            {"noise": 0.03},
            {"val": 99},
            {"k": 11},
            {"seed": 1},
            {"runs": 2},
            {"spherical": False},
            {"noisy_splits": ("train", "val")},
            {"memory": 10**8},
        ],
    )
    def test_other_options_are_refused_and_nothing_is_touched(self, world, task, change):
        before = content(task.path)
        options = {**FULL, **change}
        with pytest.raises(TaskError, match="holds a task of other inputs or options"):
            amips.label(*world, out=task.path, **options)
        assert content(task.path) == before

    def test_other_inputs_are_refused(self, world, task):
        keys, queries = world
        changed = keys.copy()
        changed.view(np.uint32)[5, 5] ^= 1
        for inputs in ((changed, queries), (keys, queries[::-1])):
            with pytest.raises(TaskError, match="other inputs"):
                amips.label(*inputs, **FULL, out=task.path)

    def test_an_unfinished_task_of_other_options_is_refused(self, world, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(labeller, "cell_maxima", lambda *_, **__: 1 / 0)  # the cells are made by then
            with pytest.raises(ZeroDivisionError):
                amips.label(*world, cells=4, out=tmp_path / "t", **TARGETS)
        before = content(tmp_path / "t")
        with pytest.raises(TaskError, match="unfinished task of other inputs or options"):
            amips.label(*world, cells=4, out=tmp_path / "t", seed=9, **TARGETS)
        assert content(tmp_path / "t") == before
        with pytest.raises(TaskError, match="not a finished task"):
            amips.task.load_task(tmp_path / "t")
        monkeypatch.setattr(partition, "query_aware", lambda *_, **__: pytest.fail("cells made again"))
        amips.label(*world, cells=4, out=tmp_path / "t", **TARGETS)

    def test_a_directory_or_file_that_is_something_else(self, world, tmp_path):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "precious.txt").write_text("mine")
        (tmp_path / "file").write_text("mine")
        for name in ("full", "file"):
            with pytest.raises(TaskError, match="exists and is not a task"):
                amips.label(*world, out=tmp_path / name, **SMALL)
        assert content(tmp_path) == {"full/precious.txt": b"mine", "file": b"mine"}

    def test_an_empty_directory_and_missing_parents_are_fine(self, world, tmp_path):
        (tmp_path / "empty").mkdir()
        amips.label(*world, out=tmp_path / "empty", **SMALL)
        amips.label(*world, out=str(tmp_path / "a" / "b" / "c"), **SMALL)


class TestWrongRequests:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            (
                {"val": 350, "test": 350},
                "700 distinct queries are too few to hold out 350 for val and 350 for test",
            ),
            ({"val": 0}, "at least 1"),
            ({"test": 0}, "at least 1"),
            ({"k": 0}, "at least 1"),
            ({"copies": -1}, "copies=-1"),
            ({"noise": -0.1}, "noise=-0.1"),
            ({"noise": float("nan")}, "noise=nan"),
            ({"noisy_splits": ("train", "dev")}, "'dev'"),
            ({"cells": 0}, "cells=0"),
            ({"cells": 601}, "cells=601"),
            ({"cells": 2, "runs": 0}, "runs=0"),
            ({"cells": Cells(np.zeros(5, np.int32), np.ones((1, 16), np.float32))}, "do not fit 600 keys"),
            ({"seed": -1}, "seed=-1"),
            ({"memory": 1000}, "memory=1000 bytes is too little"),
            ({"zero": "maybe"}, "zero='maybe'"),
        ],
    )
    def test_an_option_is_refused_before_anything_is_written(self, world, tmp_path, options, match):
        """So that the corrected call does not find the remains of the wrong one."""
        with pytest.raises(VectorError, match=match) as caught:
            amips.label(*world, out=tmp_path / "t", **{**SMALL, **options})
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "t").exists()

    def test_vectors_are_refused_before_anything_is_written(self, world, tmp_path):
        keys, queries = world
        broken, zero = keys.copy(), keys.copy()
        broken[11, 2] = np.nan
        zero[12] = 0
        for inputs, match in (
            ((keys, queries[:, :8]), "keys have dimension 16 but queries have dimension 8"),
            ((broken, queries), "keys: row 11 has a value that is NaN"),
            ((keys, broken), "queries: row 11 has a value that is NaN"),
            ((zero, queries), "keys: row 12 is all zero"),
            ((keys, zero), "queries: row 12 is all zero"),
            ((keys * np.float32(1e25), queries), "keys: row 0 has a value that is too large"),
            ((tmp_path / "none.npy", queries), "does not exist"),
        ):
            with pytest.raises(VectorError, match=match):
                amips.label(*inputs, out=tmp_path / "t", **SMALL)
        assert not (tmp_path / "t").exists()

    def test_zero_keys_can_be_kept_but_zero_queries_cannot(self, world, tmp_path):
        keys, queries = world
        zero = keys.copy()
        zero[12] = 0
        task = amips.label(zero, queries, cells=3, zero="keep", out=tmp_path / "t", **TARGETS)
        check_targets(task)
        with pytest.raises(VectorError, match="queries: row 12 is all zero"):
            amips.label(keys, zero, zero="keep", out=tmp_path / "u", **SMALL)


@pytest.fixture
def copy(task, tmp_path):
    """A task that may be damaged."""
    return shutil.copytree(task.path, tmp_path / "copy")


def refused(path, match, verify=False):
    with pytest.raises(TaskError, match=match) as caught:
        amips.task.load_task(path, verify=verify)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def edit_manifest(path, change):
    manifest = json.loads((path / "task.json").read_text())
    change(manifest)
    (path / "task.json").write_text(json.dumps(manifest))
    reseal(path / "task.json")


def forge(path, name):
    """State the size and SHA-256 that a changed file has, as a forger would."""
    facts = {"size": (path / name).stat().st_size, "sha256": sha256(path / name)}
    edit_manifest(path, lambda manifest: manifest["files"].update({name: facts}))


EVERY_FILE = [
    "keys.npy",
    "cells.npy",
    "centroids.npy",
    *(
        f"{split}/{name}.npy"
        for split in SPLITS
        for name in ("queries", "source", "top/scores", "top/ids", "cells/scores", "cells/ids")
    ),
]


class TestDamage:
    def test_a_whole_task_loads(self, copy):
        assert len(amips.task.load_task(str(copy), verify=True).train) == 1000

    @pytest.mark.parametrize("name", EVERY_FILE)
    def test_a_missing_cut_or_longer_file(self, copy, name):
        whole = (copy / name).read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"x"):
            (copy / name).write_bytes(damaged)
            refused(copy, f"{name} has {len(damaged)} bytes")
        (copy / name).unlink()
        refused(copy, f"{name} is missing")

    @pytest.mark.parametrize("name", EVERY_FILE)
    def test_a_changed_bit(self, copy, name):
        data = bytearray((copy / name).read_bytes())
        data[-3] ^= 4
        (copy / name).write_bytes(data)
        changed = "does not hold the keys" if name == "keys.npy" else "does not have the SHA-256"
        refused(copy, changed, verify=True)
        refused(copy, changed, verify=None)  # they are small

    @pytest.mark.parametrize("cell", [8, -1, 1 << 30])
    def test_a_cell_that_there_is_not_is_always_refused(self, copy, cell):
        """FAISS would write a key to a list that it does not have."""
        damaged = np.load(copy / "cells.npy")
        damaged[100] = cell
        np.save(copy / "cells.npy", damaged)
        refused(copy, r"cells\.npy is damaged: it names cells that there are not")

    @pytest.mark.parametrize("name", ["keys.npy", "centroids.npy", "val/queries.npy", "test/top/scores.npy"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_values_that_are_not_finite_under_a_true_hash(self, copy, name, value):
        damaged = np.load(copy / name)
        damaged.flat[7] = value
        np.save(copy / name, damaged)
        forge(copy, name)
        refused(copy, "NaN|infinite|not finite", verify=True)

    @pytest.mark.parametrize("name", ["train/top/ids.npy", "test/cells/ids.npy", "val/source.npy"])
    def test_numbers_out_of_range_under_a_true_hash(self, copy, name):
        damaged = np.load(copy / name)
        damaged.flat[3] = -2
        np.save(copy / name, damaged)
        forge(copy, name)
        refused(copy, f"{name} is damaged: it has numbers outside of 0", verify=True)

    def test_keys_under_the_fingerprint_of_others(self, copy):
        """The hash of the file is true, but it is not of the keys that models and bundles are known by."""
        np.save(copy / "keys.npy", np.load(copy / "keys.npy")[::-1].copy())
        forge(copy, "keys.npy")
        refused(copy, "does not hold the keys of this task", verify=True)

    @pytest.mark.parametrize(
        "name", ["../other/keys.npy", "/etc/hostname", "a/../keys.npy", "", "train//x", 7]
    )
    def test_a_file_elsewhere(self, copy, name):
        edit_manifest(copy, lambda m: m["files"].update({str(name): m["files"]["keys.npy"]}))
        if name == 7:
            refused(copy, "7 is missing")
        else:
            refused(copy, "is not the name of a file in this directory")

    def test_links_that_lead_out(self, copy, tmp_path):
        (copy / "keys.npy").rename(tmp_path / "elsewhere.npy")
        (copy / "keys.npy").symlink_to(tmp_path / "elsewhere.npy")
        refused(copy, r"keys\.npy is a link to a place outside")

    def test_a_pipe_in_place_of_a_file_is_not_waited_for(self, copy):
        for name in ("val/source.npy", "task.json"):
            (copy / name).unlink()
            os.mkfifo(copy / name)
            refused(copy, "not a regular file")

    def test_what_is_built_or_trained_reads_every_file_first(self, copy, monkeypatch):
        """Of a large task, what was not read on loading."""
        monkeypatch.setattr("amips.task.store.SMALL", 0)
        task = amips.task.load_task(copy)
        data = bytearray((copy / "keys.npy").read_bytes())
        data[-3] ^= 4
        (copy / "keys.npy").write_bytes(data)
        task = amips.task.load_task(copy)
        with pytest.raises(TaskError, match="does not hold the keys of this task"):
            Builder(task)
        with pytest.raises(TaskError, match="does not hold the keys of this task"):
            amips.train(task, samples=10)

    def test_a_file_is_read_once(self, copy, monkeypatch):
        task = amips.task.load_task(copy, verify=True)
        monkeypatch.setattr("amips.task.content.inspect", lambda *_, **__: 1 / 0)
        task.verify()
        os.utime(copy / "keys.npy")
        with pytest.raises(ZeroDivisionError):
            task.verify()

    def test_a_damaged_header_of_the_same_size(self, copy):
        path = copy / "val" / "source.npy"
        whole = path.read_bytes()
        for damaged in (
            b"\x00" + whole[1:],
            whole[:10] + b"((((" + whole[14:],
            whole[:20] + b"?" + whole[21:],
        ):
            path.write_bytes(damaged)
            refused(copy, r"source\.npy is (damaged|not a readable)")

    def test_a_source_in_two_splits(self, copy):
        """As it would be if noise came before the split."""
        test, train = (np.load(copy / split / "source.npy") for split in ("test", "train"))
        train[7] = test[3]
        np.save(copy / "train" / "source.npy", train)
        refused(copy, f"source query {test[3]} is in two splits")

    @pytest.mark.parametrize("text", ["", "{", "[]", "nonsense", '{"kind": "task"}'])
    def test_a_damaged_manifest(self, copy, text):
        (copy / "task.json").write_text(text)
        refused(copy, r"task\.json")

    @pytest.mark.parametrize("field", ["kind", "format", "files", "n", "d", "c"])
    def test_a_manifest_without_a_field(self, copy, field):
        edit_manifest(copy, lambda manifest: manifest.pop(field))
        refused(copy, r"task\.json")

    def test_a_manifest_that_does_not_list_a_file(self, copy):
        edit_manifest(copy, lambda manifest: manifest["files"].pop("val/source.npy"))
        refused(copy, "does not list val/source.npy")

    def test_another_format_or_kind(self, copy):
        edit_manifest(copy, lambda manifest: manifest.update(format=1))
        refused(copy, "has format 1, this version of amips reads 2")
        edit_manifest(copy, lambda manifest: manifest.update(format=2, kind="bundle"))
        refused(copy, "describes 'bundle', expected 'task'")

    def test_no_task(self, tmp_path):
        refused(tmp_path / "nowhere", "is not a directory")
        refused(tmp_path, r"is not a finished task: it has no task\.json")

    def test_labelling_into_a_damaged_task_does_not_pass_it_off_as_whole(self, copy, world):
        (copy / "val" / "queries.npy").unlink()
        with pytest.raises(TaskError, match="is missing"):
            amips.label(*world, **FULL, out=copy)


LABEL = """
import sys, amips
folder = sys.argv[1]
keys, queries = folder + "/keys.npy", folder + "/queries.npy"
amips.label(keys, queries, out=sys.argv[2], cells=24, copies=2, cell_targets=True,
            val=300, test=300, k=10, memory=4_000_000)
"""


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """Inputs in files, and the task that is made of them without interruption."""
    folder = tmp_path_factory.mktemp("inputs")
    keys, queries = make_world(6000, 2600, 16, seed=6)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries)
    subprocess.run([sys.executable, "-c", LABEL, str(folder), str(folder / "whole")], check=True)
    return folder


@pytest.mark.parametrize(
    "moment",
    [
        lambda out: (out / "plan.json").exists(),
        lambda out: (out / "cells.npy").exists(),
        lambda out: journal_rows(out / "train" / "top") > 0,
        lambda out: journal_rows(out / "train" / "cells") > 0,
        lambda out: journal_rows(out / "val") > 0,
    ],
    ids=["plan", "cells", "top keys", "cell maxima", "second split"],
)
def test_a_killed_run_resumes_with_the_same_bytes(on_disk, tmp_path, moment):
    out = tmp_path / "task"
    command = [sys.executable, "-c", LABEL, str(on_disk), str(out)]
    kill_when(subprocess.Popen(command), lambda: moment(out))
    assert not (out / "task.json").exists()
    with pytest.raises(TaskError):
        amips.task.load_task(out)
    subprocess.run(command, check=True)
    whole = content(on_disk / "whole")
    assert {name: data for name, data in content(out).items() if not name.endswith(".tmp")} == whole
    amips.task.load_task(out, verify=True)


class TestTwoAtOnce:
    def test_the_second_is_told_at_once(self, world, tmp_path):
        out = tmp_path / "task"
        out.mkdir()
        busy = f"^another amips label is at work in {out}; wait for it, or choose another out$"
        with locked(out / ".lock"), pytest.raises(TaskError, match=busy):
            amips.label(*world, cells=2, out=out, **SMALL)
        task = amips.label(*world, cells=2, out=out, **SMALL)
        assert task.c == 2
        assert not (out / ".lock").exists()

    def test_a_link_in_place_of_the_lock_is_not_followed(self, world, tmp_path):
        other = tmp_path / "precious"
        (tmp_path / "task").mkdir()
        (tmp_path / "task" / ".lock").symlink_to(other)
        with pytest.raises(TaskError, match=r"\.lock is not a lock file but a link"):
            amips.label(*world, cells=2, out=tmp_path / "task", **SMALL)
        assert not other.exists()

    def test_keys_that_changed_in_an_unfinished_task(self, on_disk, tmp_path):
        out = tmp_path / "task"
        command = [sys.executable, "-c", LABEL, str(on_disk), str(out)]
        kill_when(subprocess.Popen(command), lambda: journal_rows(out / "train" / "top") > 0)
        damaged = np.load(out / "keys.npy", mmap_mode="r+")
        damaged[17, 3] += 1
        damaged.flush()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "keys.npy has changed since this task was begun" in done.stderr

    def test_what_a_killed_call_left_is_cleared(self, on_disk, tmp_path):
        out = shutil.copytree(on_disk / "whole", tmp_path / "task")
        options = json.loads((out / "task.json").read_text())["options"]
        (out / "plan.json").write_text(json.dumps(options))  # killed right after the manifest
        (out / "val" / "progress.json").write_text("{}")
        (out / ".cells.npy.1234567.tmp").write_bytes(b"half")
        subprocess.run([sys.executable, "-c", LABEL, str(on_disk), str(out)], check=True)
        assert content(out) == content(on_disk / "whole")


class TestGivenSplit:
    def words(self, m):
        words = np.full(m, "train", "<U5")
        words[::5], words[1::5], words[2::5] = "val", "test", ""
        return words

    def test_it_is_kept(self, world, tmp_path):
        keys, queries = world
        words = self.words(len(queries))
        task = amips.label(keys, queries, split=words, copies=0, k=5, out=tmp_path / "t")
        for name in ("train", "val", "test"):
            assert (words[getattr(task, name).source] == name).all()
        assert len(task.train) + len(task.val) + len(task.test) == (words != "").sum()

    def test_the_first_of_equal_queries_counts(self, world, tmp_path):
        keys, queries = world
        queries = queries.copy()
        queries[3] = queries[0]  # a train query that is also a val query
        task = amips.label(keys, queries, split=self.words(len(queries)), copies=0, k=5, out=tmp_path / "t")
        assert 0 in task.val.source
        assert 3 not in task.train.source

    def test_another_split_is_another_task(self, world, tmp_path):
        keys, queries = world
        words = self.words(len(queries))
        amips.label(keys, queries, split=words, copies=0, k=5, out=tmp_path / "t")
        words[-1] = "" if words[-1] else "train"
        with pytest.raises(TaskError, match="other inputs or options"):
            amips.label(keys, queries, split=words, copies=0, k=5, out=tmp_path / "t")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda w: w[:-1], "one for each query"),
            (lambda w: np.zeros(len(w)), "words"),
            (lambda w: np.where(w == "val", "valid", w), "'valid' is not one of"),
            (lambda w: np.where(w == "val", "", w), "no distinct query is in 'val'"),
        ],
    )
    def test_mistakes(self, world, tmp_path, change, message):
        keys, queries = world
        with pytest.raises(VectorError, match=message):
            amips.label(keys, queries, split=change(self.words(len(queries))), out=tmp_path / "t")
        assert not (tmp_path / "t").exists()


def test_the_options_that_differ_are_named(world, tmp_path):
    keys, queries = world
    amips.label(keys, queries, cells=3, out=tmp_path / "t", **SMALL)
    with pytest.raises(TaskError, match=r"other inputs or options \(cells\)"):
        amips.label(keys, queries, cells=4, out=tmp_path / "t", **SMALL)


class TestDefaults:
    def test_they_are_the_measured_recipe(self, world):
        keys, queries = world
        task = amips.label(keys, queries)
        assert task.c == partition.default_count(600) == 75  # 4 sqrt(n), but 8 keys a cell at least
        assert task.query_aware == 1.5
        assert not task.has_cell_targets
        assert [len(split) for split in splits(task).values()] == [420, 140, 140]  # a fifth each is held out
        assert task.train.top_ids.shape == (420, 10)

    def test_without_a_place_it_goes_with_the_last_who_uses_it(self, world):
        task = amips.label(*world, cells=2, **SMALL)
        path, keys = task.path, task.key_vectors
        other = task.with_cells(partition.kmeans(task.keys, 4))
        del task
        gc.collect()
        assert path.exists()
        del other
        gc.collect()
        assert not path.exists()
        assert keys.rows(0, 3).shape == (3, 16)  # what is open stays readable
        assert keys.take(np.array([5, 2])).shape == (2, 16)

    def test_without_a_place_it_is_kept_until_the_process_ends(self, world):
        program = (
            "import amips, numpy as np\n"
            "x = np.random.default_rng(0).standard_normal((50, 8))\n"
            "print(amips.label(x, x, cells=2).path)"
        )
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        assert "amips-task-" in done.stdout
        assert not Path(done.stdout.strip()).exists()

    def test_the_paper_is_a_preset(self, world):
        task = amips.label(*world, preset="paper", **SMALL)
        assert task.c == 1
        assert len(task.train) == 5 * 650
        more = amips.label(*world, preset="paper", cells=4, copies=1, **SMALL)
        assert (more.c, len(more.train), more.query_aware) == (4, 2 * 650, 0.0)
        assert more.has_cell_targets
        with pytest.raises(TaskError, match=r"^preset='thesis': expected one of paper$"):
            amips.label(*world, preset="thesis")

    def test_what_a_model_of_it_is_good_for(self, task):
        again = task.with_cells(partition.kmeans(task.keys, 8))
        assert task.fingerprints.keys() == {"keys", "cells", "quantizer"}
        assert again.fingerprints["keys"] == task.fingerprints["keys"]
        assert again.fingerprints["cells"] != task.fingerprints["cells"]
        assert again.fingerprints["quantizer"] != task.fingerprints["quantizer"]
        assert amips.task.load_task(task.path).fingerprints == task.fingerprints


class TestSplitByTime:
    """Traffic: rows as they came, what comes again is kept, the last are held out."""

    def log(self, world):
        keys, queries = world
        rows = np.random.default_rng(5).integers(len(queries) // 3, size=len(queries))
        return keys, queries[rows]

    def make(self, world, out, **options):
        return amips.label(*self.log(world), split="time", cells=1, val=60, test=50, k=5, out=out, **options)

    def test_parts_of_the_log_in_order_with_what_comes_again(self, world, tmp_path):
        task, (_, log) = self.make(world, tmp_path / "t"), self.log(world)
        m = len(log)
        np.testing.assert_array_equal(task.train.source, np.arange(m - 110))
        np.testing.assert_array_equal(task.val.source, np.arange(m - 110, m - 50))
        np.testing.assert_array_equal(task.test.source, np.arange(m - 50, m))
        unit = log / np.linalg.norm(log, axis=1, keepdims=True)
        for split in (task.train, task.val, task.test):
            np.testing.assert_allclose(np.asarray(split.queries), unit[split.source], atol=1e-6)
        known = {row.tobytes() for row in np.asarray(task.train.queries)}
        assert np.mean([row.tobytes() in known for row in np.asarray(task.test.queries)]) > 0.5
        assert task.facts["duplicate_queries"] > m / 2

    def test_the_task_says_so_and_loads(self, world, tmp_path):
        task = self.make(world, tmp_path / "t")
        assert task.by_time
        assert not task.shares_sources
        assert "the last of the log" in repr(task)
        assert amips.task.load_task(tmp_path / "t", verify=True).by_time
        with pytest.raises(TaskError, match="other inputs"):
            amips.label(*self.log(world), cells=1, val=60, test=50, k=5, out=tmp_path / "t")

    def test_what_comes_again_weighs_as_it_occurs(self, world, tmp_path):
        keys, queries = world
        log = np.concatenate([np.repeat(queries[:1], 90, axis=0), queries[:10]])
        task = amips.label(keys, log, split="time", cells=1, k=1)
        assert (len(task.train), len(task.val), len(task.test)) == (60, 20, 20)  # fifths of the rows

    def test_too_short_a_log_is_refused(self, world):
        with pytest.raises(VectorError, match="4 queries are too few to hold out 2 for val and 2 for test"):
            amips.label(world[0], world[1][:4], split="time", cells=1, val=2, test=2)


class TestSplitByRows:
    """The paper's way: noise first, then rows at random."""

    def make(self, world, out, **options):
        return amips.label(
            *world, split="rows", cells=1, copies=4, val=150, test=100, k=5, out=out, **options
        )

    def test_every_row_is_in_one_split_and_sources_in_several(self, world, tmp_path):
        task = self.make(world, tmp_path / "t")
        queries = world[1]
        assert (len(task.val), len(task.test)) == (150, 100)
        assert len(task.train) == 5 * len(queries) - 250
        sources = np.concatenate([task.train.source, task.val.source, task.test.source])
        np.testing.assert_array_equal(np.bincount(sources), 5)
        assert np.isin(task.val.source, task.train.source).mean() > 0.99
        assert task.shares_sources
        assert "have relatives in train" in repr(task)

    def test_one_row_of_each_query_is_the_query_itself(self, world, tmp_path):
        task = self.make(world, tmp_path / "t", noise=0.05)
        rows = np.concatenate([np.asarray(s.queries) for s in (task.train, task.val, task.test)])
        source = np.concatenate([s.source for s in (task.train, task.val, task.test)])
        unit = world[1] / np.linalg.norm(world[1], axis=1, keepdims=True)
        away = np.linalg.norm(rows - unit[source], axis=1)
        np.testing.assert_array_equal(np.bincount(source[away < 1e-6]), 1)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        spread = away[away >= 1e-6]
        assert 0.5 < np.median(spread) / (0.05 * np.sqrt(world[1].shape[1])) < 1.5
        assert len(np.unique(rows, axis=0)) == len(rows)  # no two copies have the same noise

    def test_targets_are_exact(self, world, tmp_path):
        task = self.make(world, tmp_path / "t")
        for split in (task.val, task.test):
            true = labeller.top_k(world[0], np.asarray(split.queries), 5)[1]
            np.testing.assert_array_equal(split.top_ids, true)

    def test_the_same_seed_gives_the_same_task_and_it_loads(self, world, tmp_path):
        a, b = self.make(world, tmp_path / "a"), self.make(world, tmp_path / "b")
        np.testing.assert_array_equal(np.asarray(a.train.queries), np.asarray(b.train.queries))
        np.testing.assert_array_equal(a.val.source, amips.task.load_task(tmp_path / "a").val.source)
        other = self.make(world, tmp_path / "c", seed=1)
        assert (np.asarray(other.val.source) != np.asarray(a.val.source)).any()
        with pytest.raises(TaskError, match="other inputs"):
            amips.label(*world, cells=1, copies=4, val=150, test=100, k=5, out=tmp_path / "a")

    def test_what_is_built_of_it_says_what_its_recall_is_of(self, world, tmp_path):
        task = amips.label(*world, split="rows", cells=8, copies=2, val=100, test=100, k=10)
        with pytest.warns(UserWarning, match="of queries that come again, not of new ones"):
            amips.build(task)

    def test_source_is_the_default(self, world, tmp_path):
        plain = amips.label(*world, cells=1, copies=1, out=tmp_path / "a", **SMALL)
        named = amips.label(*world, cells=1, copies=1, split="source", out=tmp_path / "a", **SMALL)
        assert plain.path == named.path
        assert not named.shares_sources

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"split": "row"}, "split='row'"),
            ({"split": "rows", "noisy_splits": ("val",)}, "noise comes first, and is in every split"),
            ({"split": "rows", "val": 10**6}, "too few to hold out"),
        ],
    )
    def test_one_line(self, world, tmp_path, options, words):
        with pytest.raises(amips.AmipsError, match=words) as caught:
            amips.label(*world, cells=1, copies=2, out=tmp_path / "t", **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "t").exists()


class TestDevice:
    def test_the_same_task_wherever_it_is_labelled(self, world, task, tmp_path):
        same = amips.label(*world, **FULL, out=tmp_path / "task", device="cpu")
        check_targets(same)
        assert same.fingerprints == task.fingerprints
        assert manifest(same)["options"] == manifest(task)["options"]
        for name, split in splits(same).items():
            assert np.array_equal(split.top_ids, getattr(task, name).top_ids)
            assert np.array_equal(split.cell_ids, getattr(task, name).cell_ids)

    def test_a_finished_task_is_not_made_again(self, world, task, monkeypatch):
        monkeypatch.setattr(labeller, "top_k", lambda *_, **__: pytest.fail("labelled again"))
        assert amips.label(*world, **FULL, out=task.path, device="cpu").path == task.path

    def test_what_is_unfinished_is_continued_on_a_device(self, world, task, tmp_path, monkeypatch):
        real, devices = labeller.top_k, []

        def noted(*arguments, **options):
            devices.append(options["device"])
            if len(devices) == 3 and options["device"] is None:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        monkeypatch.setattr(labeller, "top_k", noted)
        with pytest.raises(KeyboardInterrupt):
            amips.label(*world, **FULL, out=tmp_path / "task")
        same = amips.label(*world, **FULL, out=tmp_path / "task", device="cpu")
        assert devices == [None] * 3 + ["cpu"] * 3
        for name, split in splits(same).items():
            assert np.array_equal(split.top_ids, getattr(task, name).top_ids)
        # Its first splits were there already, to the last bit.
        assert np.array_equal(same.train.top_scores, task.train.top_scores)

    @pytest.mark.parametrize("device", ["cuda:99", "nonsense", 3])
    def test_a_device_that_is_not_there_is_found_before_any_work(self, world, tmp_path, device):
        with pytest.raises(VectorError, match="device=") as caught:
            amips.label(*world, **SMALL, out=tmp_path / "task", device=device)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "task").exists()

    def test_without_torch(self, world, monkeypatch):
        monkeypatch.setitem(sys.modules, "amips.device", None)
        monkeypatch.setitem(sys.modules, "torch", None)
        for name in [name for name in sys.modules if name.startswith("amips.device.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "amips.device")
        with pytest.raises(amips.AmipsError, match=r"needs torch; pip install 'amips\[train\]'"):
            amips.label(*world, **SMALL, device="cpu")
