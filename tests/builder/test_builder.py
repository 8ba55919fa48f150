"""The builder: one design in, one index out, nothing made twice."""

import gc
import json
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips import Design, Linear, MaxAffine, Recipe
from amips import learn as learning
from amips.builder import Builder, build, builder, default_design, fewest_dimensions
from amips.cells import query_aware
from amips.nets import AffineArchitecture, AffineNet, initial_model
from amips.search import recalls
from helpers import make_world, parameter_id

FLAT = {"storage": "flat", "spill_fraction": 0.0}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """3,000 keys of dimension 64: large enough for lean storage."""
    keys, queries = make_world(3000, 3000, 64, seed=4)
    task = amips.label(keys, queries[:2500], cells=40, out=tmp_path_factory.mktemp("big") / "task")
    return task, queries[2500:]


@pytest.fixture
def fast(monkeypatch):
    """Instead of training: centroids with a little noise."""
    calls = []

    def train(task, network, **options):
        calls.append(options["out"])
        rng = np.random.default_rng(0)
        weights = {
            "W": (task.cells.centroids + 0.01 * rng.standard_normal((task.c, task.d))).astype(np.float32)
        }
        about = {"keys": task.fingerprint, "network": {"kind": "linear", "rank": 0, "bias": False}}
        return AffineNet(AffineArchitecture(task.d, task.c), weights, about)

    monkeypatch.setattr(learning, "train", train)
    return calls


def exact_top(task, x):
    return np.argsort(-(x @ np.asarray(task.keys).T), axis=1, kind="stable")[:, :10]


class TestDefaults:
    def test_they_are_the_measured_recipe(self, big):
        task, _ = big
        design = default_design(task, None)
        assert (design.cells, design.query_aware, design.stop) == (40, 1.5, "mass")
        assert (design.storage, design.spill_fraction) == ("lean", 0.5)
        assert design.dimensions == Builder(task).lean_dimensions()

    def test_lean_dimensions_keep_the_top_keys(self, big):
        task, _ = big
        made = Builder(task)
        r = fewest_dimensions(task, made.projection)
        projection = made.projection(r)
        x, top = np.asarray(task.val.queries), np.asarray(task.val.top_ids)
        reduced = (x @ projection.queries.T) @ (np.asarray(task.keys) @ projection.keys.T).T
        near = np.argsort(-reduced, axis=1)[:, :100]
        assert (top[:, :, None] == near[:, None, :]).any(axis=2).mean() > 0.985
        assert r % 16 == 0

    def test_few_keys_are_kept_as_they_are(self, task):
        """600 keys of 16 dimensions: nothing is saved by fewer."""
        assert default_design(task).storage == "flat"

    def test_search_serves_the_recall_it_was_built_for(self, big):
        task, fresh = big
        for target in (0.8, 0.95):
            index = build(task, recall=target)
            ids = index.search(fresh)[1]
            np.testing.assert_array_equal(ids, index.search(fresh, recall=target)[1])
            assert recalls(ids, exact_top(task, fresh), 10).mean() > target - 0.03
        assert index.target_recall == 0.95

    def test_the_point_that_is_served_is_near_the_target(self, big):
        """A step of the ladder is up to half as much again: at the target there are finer ones."""
        task, _ = big
        index = build(task, None, recall=0.97, **FLAT)
        reached = min(p.recall10 for p in index.points if p.min_mass and p.recall10 >= 0.97)
        assert reached < 0.975


class TestOneDesign:
    def test_of_all_parts(self, big, fast, tmp_path):
        task, fresh = big
        design = Design(30, 1.5, Linear(rank=0), Recipe(), "mass", 0.1, "sq8")
        index = Builder(task, tmp_path).index(design)
        assert index.design == design
        assert (index.c, index.store.storage, index.spilled) == (30, "sq8", 300)
        assert recalls(index.search(fresh, recall=0.95)[1], exact_top(task, fresh), 10).mean() > 0.92
        # Cells as `query_aware` makes them.
        top = np.asarray(task.train.top_ids)
        cells = query_aware(task.key_vectors, task.train.vectors, top, 30)
        np.testing.assert_array_equal(index.cells, cells.assignment)

    def test_the_cells_of_the_task_are_its_own(self, big, monkeypatch):
        task, _ = big
        monkeypatch.setattr(builder, "make_cells", lambda *_, **__: pytest.fail("they are there"))
        np.testing.assert_array_equal(Builder(task).cells(Design(40)).assignment, task.cells.assignment)

    def test_nothing_is_made_twice(self, big, fast, tmp_path, monkeypatch):
        task, fresh = big
        design = Design(30, router=Linear(rank=0), spill_fraction=0.2, storage="flat")
        first = Builder(task, tmp_path).index(design)
        for name in ("make_cells", "second_cells"):
            monkeypatch.setattr(builder, name, lambda *_, **__: pytest.fail("it is there"))
        monkeypatch.setattr(learning, "train", lambda *_, **__: pytest.fail("it is there"))
        again = Builder(task, tmp_path).index(design)
        assert again.points == first.points
        assert again.design == first.design
        np.testing.assert_array_equal(again.search(fresh, probes=3)[1], first.search(fresh, probes=3)[1])

    def test_another_design_does_not_get_it(self, big, fast, tmp_path):
        task, _ = big
        made = Builder(task, tmp_path)
        one, other = (made.cells(Design(30, strength)) for strength in (1.5, 3.0))
        assert (one.assignment != other.assignment).any()
        runs = {made.run_directory(Design(c, a)) for c in (30, 31) for a in (0.0, 1.5)}
        assert len(runs) == 4
        second = [made.second_cells(Design(30, 0.0, None, spill_fraction=f), None) for f in (0.1, 0.2)]
        assert [int((some >= 0).sum()) for some in second] == [300, 600]

    def test_another_task_or_seed_in_the_same_directory_does_not_get_it(self, big, task, tmp_path):
        one = Builder(big[0], tmp_path)
        for other in (Builder(task, tmp_path), Builder(big[0], tmp_path, seed=5)):
            assert other.index(Design.plain(20)).n == other.task.n
            cells = other.cells(Design(20))
            assert len(cells.assignment) == other.task.n
            assert not np.array_equal(cells.assignment, one.cells(Design(20)).assignment)

    def test_untrained_is_where_training_begins(self, big):
        task, fresh = big
        made = Builder(task)
        linear = made.model(Design(40, router=Linear(rank=0), recipe=None))
        np.testing.assert_array_equal(linear.weights["W"], task.cells.centroids)
        reduced = made.model(Design(40, router=Linear(rank=16), recipe=None))
        started = initial_model(task, Linear(rank=16))
        np.testing.assert_allclose(reduced.scores(fresh), started.scores(fresh), atol=1e-4)
        pieces = made.model(Design(40, router=MaxAffine(rank=0), recipe=None))
        assert pieces.architecture.pieces == 2

    def test_a_damaged_file_is_made_again(self, big, tmp_path):
        task, _ = big
        whole = Builder(task, tmp_path).cells(Design(30))
        (path,) = tmp_path.glob("cells-*.npz")
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        beyond, short = whole.assignment.copy(), whole.assignment[1:]
        beyond[5] = 30  # FAISS would write a key to a list that it does not have
        for damaged in (data[:100], b"", bytes(flipped), {"assignment": beyond}, {"assignment": short}):
            if isinstance(damaged, dict):
                np.savez(path, centroids=whole.centroids, **damaged)
            else:
                path.write_bytes(damaged)
            again = Builder(task, tmp_path).cells(Design(30))
            np.testing.assert_array_equal(again.assignment, whole.assignment)
            assert path.read_bytes() == data

    def test_without_a_directory_what_it_keeps_goes_with_it(self, big):
        builder = Builder(big[0])
        builder.cells(Design(30))
        kept = builder.directory
        assert list(kept.glob("cells-*.npz"))
        del builder
        gc.collect()
        assert not kept.exists()

    def test_a_crash_while_writing_leaves_nothing_that_is_read(self, big, tmp_path, monkeypatch):
        task, _ = big
        real = np.savez

        def torn(file, **arrays):
            real(file, **arrays)
            raise OSError("no space left on device")

        monkeypatch.setattr(np, "savez", torn)
        with pytest.raises(OSError, match="no space"):
            Builder(task, tmp_path).cells(Design(30))
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == []
        assert Builder(task, tmp_path).cells(Design(30)).count == 30


class TestBuild:
    def test_a_design_from_json(self, big, fast, tmp_path):
        task, _ = big
        design = Design(25, router=Linear(rank=0), **FLAT)
        again = Design.from_json(json.loads(json.dumps(design.to_json())))
        index = build(task, design=again, out=tmp_path / "b")
        assert index.design == design == amips.load(tmp_path / "b").design
        assert len(fast) == 1

    def test_a_model_says_what_it_is(self, big, fast):
        task, _ = big
        model = learning.train(task, Linear(rank=0), out=None)
        index = build(task, model, **FLAT)
        assert index.design.router == Linear(rank=0)
        assert index.design.query_aware == 1.5
        assert repr(index).startswith(
            "<Index: 3,000 keys, d = 64; 40 query-aware cells (strength 1.5); linear"
        )

    def test_a_router_that_training_did_not_improve_is_called_untrained(self, big, fast):
        task, _ = big
        model = learning.train(task, Linear(rank=0), out=None)
        kept = replace(model, about={**model.about, "blend": 0.0})
        assert "linear router of full rank, trained" in repr(build(task, model, **FLAT))
        assert "linear router of full rank, untrained" in repr(build(task, kept, **FLAT))

    def test_second_cells_of_ones_own(self, big):
        task, _ = big
        second = np.full(task.n, -1)
        second[:30] = (task.cells.assignment[:30] + 1) % task.c
        index = build(task, second_cells=second, storage="flat")
        assert index.spilled == 30
        assert index.design.spill_fraction == 0.01
        np.testing.assert_array_equal(index.store.second, second)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"design": Design(10), "storage": "flat"}, "storage is part of the design: give one of the two"),
            ({"recall": 1.1}, "recall=1.1: expected a share"),
            ({"storage": "zip"}, "storage='zip'"),
            ({"storage": "flat", "dimensions": 8}, "dimensions are for storage 'lean' only"),
            ({"dimensions": 65}, "there are only 64 dimensions"),
            ({"design": Design(3001)}, "cells=3001: there are only 3,000 keys"),
            ({"design": Design(39, None)}, "the cells that were given are 40, the design has 39"),
            ({"design": Design(40, router="own")}, "bring it"),
            ({"model": "nowhere"}, "nowhere.* does not exist"),
            ({"model": object()}, "it has no method scores"),
            ({"ids": [1]}, "one for each of the 3000 keys"),
        ],
        ids=parameter_id,
    )
    def test_what_cannot_be_built_says_so(self, big, options, message, tmp_path):
        task, _ = big
        with pytest.raises(amips.AmipsError, match=message) as caught:
            build(task, out=tmp_path / "b", **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "b").exists()

    def test_a_model_that_is_not_the_designs_router_is_refused(self, big, fast):
        task, _ = big
        model = learning.train(task, Linear(rank=0), out=None)
        for design, brought, words in (
            (Design(40, router=Linear(rank=16)), model, "linear router of rank 16, .* of full rank"),
            (Design(40, router=Linear(rank=0, bias=True)), model, "bias=True"),
            (Design(40, router=MaxAffine(rank=0)), model, "max-affine router .* the model is a linear"),
            (Design(40, router=None), model, "centroids, and there is a model"),
            (Design(40), Scores(task.cells.centroids), "set its router to 'own'"),
        ):
            with pytest.raises(amips.AmipsError, match=words) as caught:
                build(task, brought, design=design)
            assert "\n" not in str(caught.value)
        assert build(task, model, design=Design(40, router="own", **FLAT)).design.router == "own"

    def test_the_design_says_what_the_model_is(self, big, fast):
        task, _ = big
        model = learning.train(task, Linear(rank=0), out=None)
        recipe = Recipe(rate=3e-4)
        stated = replace(model, about={**model.about, "recipe": {"rate": 3e-4, "batch": 1024}})
        index = build(task, stated, design=Design(40, router=Linear(rank=0), **FLAT))
        assert index.design.recipe == recipe
        assert "trained (rate=0.0003)" in repr(index)
        untrained = Builder(task).model(Design(40, router=Linear(rank=0), recipe=None))
        assert build(task, untrained, **FLAT).design.recipe is None

    def test_a_model_of_other_cells_is_refused(self, big, fast):
        task, _ = big
        model = replace(
            learning.train(task, Linear(), out=None), about={"keys": task.fingerprint, "cells": "others"}
        )
        with pytest.raises(amips.RunError, match="trained on other cells"):
            build(task, model)


class Scores:
    """A router of one's own."""

    def __init__(self, centroids):
        self.centroids = centroids

    def scores(self, x):
        return x @ self.centroids.T


def test_a_router_of_ones_own(big, tmp_path):
    task, fresh = big
    own = build(task, Scores(task.cells.centroids), **FLAT)
    plain = build(task, None, **FLAT)
    np.testing.assert_array_equal(own.search(fresh, probes=3)[1], plain.search(fresh, probes=3)[1])
    assert own.design.router == "own"
    assert "a router of its own" in repr(own)
    build(task, Scores(task.cells.centroids), out=tmp_path / "b", **FLAT)
    again = amips.load(tmp_path / "b", model=Scores(task.cells.centroids))
    np.testing.assert_array_equal(again.search(fresh, probes=3)[1], plain.search(fresh, probes=3)[1])
