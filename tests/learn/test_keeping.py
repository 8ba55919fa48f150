"""What training hands back: the best weights on val, the first ones among them, and when it stops."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import amips
from amips.learn import evaluate, loop
from amips.learn.budget import Budget
from amips.learn.checkpoint import Progress, State
from amips.nets import initial_model, load_model, spec_of
from helpers import make_world

torch.set_num_threads(1)

SCAN = "scan@0.95"
PLAIN = amips.Recipe(batch=64, rate=3e-3, anchor=0.0, patience=0)  # nothing that keeps it from overfitting


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Fewer training queries than a router can learn from: 60 for 24 cells."""
    keys, queries = make_world(1500, 660, 32, seed=3)
    options = {"cells": 24, "val": 300, "test": 300, "query_aware": 0.0}
    return amips.label(keys, queries, out=tmp_path_factory.mktemp("few") / "task", **options)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Enough of them."""
    keys, queries = make_world(4000, 8600, 32, seed=3)
    options = {"cells": 64, "val": 300, "test": 300, "query_aware": 0.0}
    return amips.label(keys, queries, out=tmp_path_factory.mktemp("many") / "task", **options)


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def scan(model, task, split="val"):
    return evaluate(model, task, getattr(task, split))[SCAN]


class TestNeverWorse:
    def test_with_few_queries_plain_training_overfits_and_train_does_not(self, few, tmp_path):
        network = amips.Linear(rank=0)
        start = scan(initial_model(few, network), few)
        model = amips.train(few, network, recipe=PLAIN, samples=40_000, out=tmp_path / "run")
        lines = log(tmp_path / "run")
        assert lines[0]["val"][SCAN] == start
        assert lines[-1]["val"][SCAN] > 1.05 * start  # the last weights
        assert lines[-1]["train"]["loss"] < lines[1]["train"]["loss"]
        assert scan(model, few) <= start
        assert model.about["val"][SCAN] == scan(model, few)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("network", [amips.Linear(), amips.MaxAffine(rank=0)], ids=str)
    def test_whatever_the_recipe(self, few, network, seed):
        start = scan(initial_model(few, network, seed), few)
        for recipe in (PLAIN, amips.Recipe(batch=64)):
            model = amips.train(few, network, recipe=recipe, samples=6400, seed=seed)
            assert scan(model, few) <= start
            assert model.about["start"][SCAN] == start

    def test_where_nothing_is_gained_the_start_itself_is_returned(self, few, tmp_path):
        network, wild = amips.Linear(bias=True), amips.Recipe(batch=64, rate=3.0, anchor=0.0, warmup=0.0)
        model = amips.train(few, network, recipe=wild, samples=6400, out=tmp_path / "run")
        begin = initial_model(few, network)
        assert model.about["best_step"] == model.about["blend"] == 0
        assert model.about["val"] == model.about["start"]
        for name in ("W", "b", "A"):
            if name in begin.weights:
                np.testing.assert_array_equal(model.weights[name], begin.weights[name])

    def test_with_enough_queries_it_gains_on_test_too(self, many):
        model = amips.train(many, recipe=amips.Recipe(batch=256), samples=100_000)
        assert model.about["val"][SCAN] < 0.95 * model.about["start"][SCAN]
        assert scan(model, many, "test") < 0.97 * scan(initial_model(many, amips.Linear()), many, "test")
        assert spec_of(model) == amips.Linear()

    def test_the_anchor_keeps_near_the_start(self, few, tmp_path):
        apart = []
        for anchor in (0.0, 20.0, 1e4):
            recipe, out = amips.Recipe(batch=60, rate=3e-3, anchor=anchor, patience=0), tmp_path / f"{anchor}"
            amips.train(few, amips.Linear(rank=0), recipe=recipe, samples=30_000, out=out)
            end = load_file(out / "checkpoint.safetensors")["averages/W"]
            apart.append(float(np.linalg.norm(end - few.cells.centroids)))
            moved = log(out)[-1]["train"].get("moved")  # the mean over the last steps
            assert moved is None if anchor == 0 else moved == pytest.approx(apart[-1] ** 2, rel=0.1)
        assert apart[0] > 1.5 * apart[1]
        assert apart[1] > 10 * apart[2]

    def test_of_a_network_with_random_weights_the_best_are_kept(self, task1, tmp_path):
        recipe = amips.Recipe(batch=64, rate=0.03, patience=0)
        network = amips.KeyNet(width=16, depth=2)
        model = amips.train(task1, network, recipe=recipe, samples=20_000, out=tmp_path / "run")
        erels = [line["val"]["erel"] for line in log(tmp_path / "run")]
        assert model.about["val"]["erel"] == min(erels) == evaluate(model, task1, task1.val)["erel"]
        assert "centroid" not in model.about
        assert model.about["blend"] == 1.0

    def test_a_mapper_that_is_trained_to_route_is_chosen_by_that(self, task, tmp_path):
        recipe = amips.Recipe(batch=64, route_weight=1.0, patience=0)
        network = amips.KeyNet(width=16, depth=2, mapper=True)
        model = amips.train(task, network, recipe=recipe, samples=10_000, out=tmp_path / "run")
        lines = log(tmp_path / "run")
        assert model.c == 1
        assert model.about["val"][SCAN] == min(line["val"][SCAN] for line in lines)
        assert "erel" in model.about["val"]
        assert set(model.about["centroid"]) >= {SCAN, "routing@1"}


class TestStopping:
    def test_it_stops_when_val_stops_improving(self, few, tmp_path):
        recipe = amips.Recipe(batch=64, rate=3e-3, anchor=0.0, patience=3)
        model = amips.train(few, recipe=recipe, samples=64_000, out=tmp_path / "run")
        lines = log(tmp_path / "run")
        assert model.about["samples"] < 64_000
        values = [line["val"][SCAN] for line in lines]
        best = int(np.argmin(values))
        assert len(lines) == best + 1 + 3
        assert lines[best]["step"] == model.about["best_step"]

    def test_without_patience_it_goes_on(self, few, tmp_path):
        model = amips.train(few, recipe=PLAIN, samples=6400, out=tmp_path / "run")
        assert model.about["samples"] == 6400
        assert log(tmp_path / "run")[-1]["samples"] == 6400

    def test_random_weights_get_a_quarter_of_the_budget_first(self, task, tmp_path):
        # Next to nothing is learned with this rate, so val cannot improve.
        recipe = amips.Recipe(batch=32, rate=1e-12, patience=1)
        model = amips.train(task, amips.SupportNet(width=8, depth=2), recipe=recipe, samples=3200)
        assert 800 <= model.about["samples"] < 3200
        fixed = amips.train(task, amips.Linear(), recipe=recipe, samples=3200)
        assert fixed.about["samples"] < 800

    def test_a_budget_in_time_leaves_out_evaluations_it_cannot_afford(self):
        by_time, by_samples = Budget(None, 1.0, 20), Budget(1000, None, 20)
        slow = Progress(seconds=10.0, evaluating=3.0, evaluations=3)
        quick = Progress(seconds=10.0, evaluating=0.3, evaluations=3)
        assert (by_time.affords(slow), by_time.affords(quick)) == (False, True)
        assert by_samples.affords(slow)
        assert [by_time.evaluations_due(done) for done in (0.0, 0.0024, 0.0025, 0.25, 1.0)] == [
            0,
            0,
            1,
            10,
            20,
        ]


class TestBlend:
    def test_the_way_from_the_start_to_the_best(self, few, tmp_path, monkeypatch):
        """Of three quarters, a half and a quarter of the way that is taken which val likes best."""
        seen = []
        real = loop.evaluate

        def noted(net, *rest):
            metrics = real(net, *rest)
            seen.append((net.weights["W"], metrics[SCAN]))
            return metrics

        monkeypatch.setattr(loop, "evaluate", noted)
        recipe = amips.Recipe(batch=64, rate=3e-3, anchor=0.0, patience=0)
        model = amips.train(few, amips.Linear(rank=0), recipe=recipe, samples=2000, out=tmp_path / "run")
        state = load_file(tmp_path / "run" / "checkpoint.safetensors")
        begin, best = few.cells.centroids, state["best/W"]
        assert model.about["best_step"] > 0
        for (weights, _), part in zip(seen[-3:], (0.75, 0.5, 0.25), strict=True):
            np.testing.assert_allclose(weights, begin + part * (best - begin), atol=1e-6)
        assert model.about["val"][SCAN] == min(value for _, value in seen)
        expected = begin + model.about["blend"] * (best - begin)
        np.testing.assert_allclose(model.weights["W"], expected, atol=1e-6)

    def test_a_part_of_the_way_is_taken_where_it_is_better(self, few, monkeypatch):
        monkeypatch.setattr(loop, "criterion", lambda metrics: metrics["wanted"])
        real = loop.evaluate

        def half_way(net, task, split, through, device):
            moved = np.abs(net.weights["W"] - task.cells.centroids).max()
            furthest.append(moved)
            return real(net, task, split, through, device) | {
                "wanted": float(abs(moved / max(furthest) - 0.5)) if moved else 9.0
            }

        furthest = [1e-9]
        monkeypatch.setattr(loop, "evaluate", half_way)
        recipe = amips.Recipe(batch=64, rate=3e-3, patience=0)
        model = amips.train(few, amips.Linear(rank=0), recipe=recipe, samples=640, evaluations=1)
        assert model.about["blend"] == 0.5


class TestCheckpoint:
    RECIPE = amips.Recipe(batch=64, rate=3e-3, anchor=0.0, patience=4)

    @pytest.mark.parametrize("step", [1, 12, 30])
    def test_the_best_weights_and_the_patience_are_resumed_bit_for_bit(
        self, few, tmp_path, monkeypatch, step
    ):
        network = amips.Linear(bias=True)
        options = {"recipe": self.RECIPE, "samples": 64_000}
        whole = amips.train(few, network, out=tmp_path / "whole", **options)
        assert whole.about["samples"] > 64 * 30  # it stops early, but later than it is interrupted
        real = loop.Run.step

        def interrupted(self, done):
            losses = real(self, done)
            if self.state.progress.step == step:
                os.kill(os.getpid(), signal.SIGINT)
            return losses

        with monkeypatch.context() as patch:
            patch.setattr(loop.Run, "step", interrupted)
            with pytest.raises(amips.TrainingInterrupted):
                amips.train(few, network, out=tmp_path / "run", **options)
        resumed = amips.train(few, network, out=tmp_path / "run", resume=True, **options)
        for file in ("model.safetensors", "checkpoint.safetensors"):
            one, two = (load_file(tmp_path / run / file) for run in ("whole", "run"))
            assert one.keys() == two.keys()
            assert all(one[name].tobytes() == two[name].tobytes() for name in one), file
        clock = ("seconds", "evaluating")
        one, two = (
            [{k: v for k, v in line.items() if k not in clock} for line in log(tmp_path / run)]
            for run in ("whole", "run")
        )
        assert one == two
        about = [{k: v for k, v in model.about.items() if k != "seconds"} for model in (whole, resumed)]
        assert about[0] == about[1]

    def test_a_run_killed_after_its_last_evaluation_ends_there(self, few, tmp_path, monkeypatch):
        options = {"recipe": self.RECIPE, "samples": 64_000, "out": tmp_path / "run"}
        with monkeypatch.context() as patch:
            patch.setattr(
                amips.nets.AffineNet, "save", lambda *_: (_ for _ in ()).throw(OSError("power cut"))
            )
            with pytest.raises(OSError, match="power cut"):
                amips.train(few, **options)
        monkeypatch.setattr(loop.Run, "step", lambda *_: pytest.fail("it trained on"))
        model = amips.train(few, resume=True, **options)
        assert model.about["val"][SCAN] <= model.about["start"][SCAN]
        assert load_model(tmp_path / "run").about == model.about

    def test_what_is_kept(self):
        state = State.beginning({"W": torch.zeros(2)})
        for step, (value, weight) in enumerate([(3.0, 0.0), (2.0, 1.0), (2.5, 2.0), (2.0, 3.0)]):
            state.progress.step = step
            state.averages["W"].fill_(weight)
            state.keep_if_best(value, {"value": value})
        at = state.progress
        assert (at.best, at.best_step, at.stale, at.evaluations) == (2.0, 1, 2, 4)
        assert (at.best_val, at.start_val) == ({"value": 2.0}, {"value": 3.0})
        assert state.best["W"].tolist() == [1.0, 1.0]


class TestDefaults:
    def test_without_options(self, many, monkeypatch):
        """A linear router of about a quarter of the dimensions; nothing of the run is left."""
        monkeypatch.setattr(loop, "DEFAULT_MINUTES", 0.02)
        model = amips.train(many)
        assert model.architecture.kind == "linear"
        assert model.architecture.rank == 16
        assert model.about["recipe"] == amips.Recipe().to_json()
        assert model.about["seconds"] < 3
        assert model.about["val"][SCAN] <= model.about["start"][SCAN]

    def test_nothing_can_be_resumed_without_a_directory(self, many):
        with pytest.raises(amips.RunError, match="give the directory of the run"):
            amips.train(many, resume=True)

    def test_without_cells(self, task1):
        with pytest.raises(amips.RunError, match="needs a task with cells"):
            amips.train(task1)
