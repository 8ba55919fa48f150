"""Training as a whole: quality, budgets, interruption, resuming, several processes, the command."""

import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import amips
from amips.learn import evaluate, evaluation, loop
from amips.learn.modules import Network
from amips.metrics import rank_metrics, routing_accuracy, transport_error
from amips.nets import load_model, spec_of
from amips.nets.recipe import PAPER_SAMPLES, RECIPES
from amips.routers import fit_temperature
from helpers import make_world
from reference import architecture, random_net

torch.set_num_threads(1)

SMALL = amips.SupportNet(width=8, depth=2)
# One thread everywhere, so that a run in a process of its own gives the same bytes as one in here.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def train(task, out, network=SMALL, samples=640, batch=32, evaluations=4, **options):
    return amips.train(
        task, network, out=out, samples=samples, batch=batch, evaluations=evaluations, **options
    )


def command(task, out, *options, samples=640, evaluations=4):
    """The same run as `train`, as a user types it."""
    return [
        *(sys.executable, "-m", "amips", "train", str(task.path), "--out", str(out)),
        *("--net", "support", "--size", "0.014", "--depth", "2", "--batch", "32"),
        *("--samples", str(samples), "--evaluations", str(evaluations), *options),
    ]


COMMANDED = amips.SupportNet(size=0.014, depth=2)


def typed(*words, timeout=120):
    return subprocess.run(
        [sys.executable, "-m", "amips", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT,
        check=False,
    )


def log(run):
    """The log without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "evaluating")}
        for line in lines
    ]


def same_runs(one, two):
    """Bit for bit: the model, the last state, the log."""
    for file in ("model.safetensors", "checkpoint.safetensors"):
        a, b = load_file(one / file), load_file(two / file)
        assert a.keys() == b.keys()
        assert all(a[name].tobytes() == b[name].tobytes() for name in a), file
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert log(one) == log(two)
    about = [json.loads((run / "model.json").read_text())["about"] for run in (one, two)]
    assert about[0]["val"] == about[1]["val"] != {}
    assert about[0]["samples"] == about[1]["samples"]


@contextmanager
def at_step(monkeypatch, number, action):
    """Do something in the middle of step `number`, counted from 1."""
    real = loop.Run.step

    def step(self, done):
        losses = real(self, done)
        if self.state.progress.step == number:
            action()
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", step)
        yield


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def lines_of(path):
    return path.read_text().count("\n") if path.exists() else 0


class TestQuality:
    # These runs are short: averages with the usual decay would still be full of initial weights.
    RECIPE = amips.Recipe(rate=3e-3, decay=0.97)

    def test_keynet_finds_keys(self, task1, tmp_path):
        network = amips.KeyNet(width=48, depth=2)
        model = train(task1, tmp_path / "run", network, 100_000, 128, recipe=self.RECIPE)
        val = model.about["val"]
        # The query itself would have erel 0.
        assert val["erel"] < -0.8
        assert val["match"] > 0.4
        assert val["recall@10"] > 0.9
        _, first, *_, last = log(tmp_path / "run")
        assert val["erel"] == min(line["val"]["erel"] for line in log(tmp_path / "run"))
        assert last["train"]["loss"] < first["train"]["loss"] / 2

    def test_supportnet_routes_better_than_centroids(self, tmp_path):
        keys, asked = make_world(1000, 6000, 8, seed=1)
        options = {"query_aware": 0.0, "copies": 1, "cell_targets": True}
        task = amips.label(keys, asked, cells=8, val=500, test=500, out=tmp_path / "task", **options)
        network = amips.SupportNet(width=32, depth=2)
        model = train(task, tmp_path / "run", network, 80_000, 128, evaluations=1, recipe=self.RECIPE)
        cell = task.cells.assignment[task.test.top_ids[:, 0]]
        centroid = routing_accuracy(task.test.queries @ task.cells.centroids.T, cell)
        learned = evaluate(model, task, task.test)
        assert learned["routing@1"] > centroid["routing@1"] + 0.02
        assert learned["routing@2"] > centroid["routing@2"]
        assert learned["erel"] < -1.4


class TestRun:
    def test_two_do_not_train_in_one_place(self, task, tmp_path, monkeypatch):
        tried = []

        def again(*_):
            if not tried:
                tried.append(1)
                with pytest.raises(amips.RunError, match="another process is training there"):
                    train(task, tmp_path / "run", resume=True)

        step = loop.Run.step
        monkeypatch.setattr(loop.Run, "step", lambda self, done: again() or step(self, done))
        train(task, tmp_path / "run")
        assert tried

    def test_other_settings_are_named(self, task, tmp_path):
        train(task, tmp_path / "run")
        with pytest.raises(amips.RunError, match=r"other inputs or options \(seed\)"):
            train(task, tmp_path / "run", seed=5)

    def test_what_a_run_leaves(self, task, tmp_path):
        model = train(task, tmp_path / "run")
        names = sorted(p.name for p in (tmp_path / "run").iterdir())
        expected = ["checkpoint.safetensors", "config.json", "log.jsonl", "model.json", "model.safetensors"]
        assert names == [".lock", *expected]
        again = load_model(tmp_path / "run")
        assert again.architecture == model.architecture == SMALL.architecture(task.n, task.d, task.c)
        assert all((again.weights[name] == model.weights[name]).all() for name in model.weights)
        assert again.about == model.about
        assert model.about["keys"] == task.fingerprint
        assert model.about["samples"] == 640
        assert model.about["recipe"]["batch"] == 32
        assert spec_of(again) == SMALL
        lines = log(tmp_path / "run")
        assert [line["samples"] for line in lines] == [0, 64, 160, 384, 640]
        assert [line["step"] for line in lines] == [0, 2, 5, 12, 20]
        assert lines[0]["train"] == {}
        assert set(lines[1]["train"]) == {"loss", "score", "grad", "penalty"}
        routing = {"scan@0.95", "routing@1", "routing@2", "routing@4"}
        assert set(lines[0]["val"]) == routing | {
            *("score", "key", "erel", "erel_half", "match", "recall@10", "recall@100", "mrr"),
        }
        best = min(lines, key=lambda line: line["val"]["scan@0.95"])
        assert model.about["val"] == best["val"]
        assert model.about["best_step"] == best["step"]
        assert model.about["start"] == lines[0]["val"]
        assert all(line["centroid"] == model.about["centroid"] for line in lines)
        assert set(model.about["centroid"]) == routing

    def test_the_model_is_the_average(self, task, tmp_path):
        """Of the best step, which is the last one if every evaluation is better than those before."""
        model = train(
            task, tmp_path / "run", recipe=amips.Recipe(rate=3e-3, sampled_gradients=0), samples=3200
        )
        assert model.about["best_step"] == 100
        state = load_file(tmp_path / "run" / "checkpoint.safetensors")
        np.testing.assert_array_equal(model.weights["Wx.0"], state["averages/free.Wx_0"])
        np.testing.assert_array_equal(model.weights["Wx.0"], state["best/free.Wx_0"])
        assert (model.weights["Wx.0"] != state["parameters/free.Wx_0"]).any()

    def test_logged_losses_are_means_over_the_steps_between(self, task, tmp_path, monkeypatch):
        seen = []
        real = loop.Run.step

        def step(self, done):
            real(self, done)
            seen.append(dict(zip(self.meter.names, self.meter.last.tolist(), strict=True)))

        monkeypatch.setattr(loop.Run, "step", step)
        train(task, tmp_path / "run")
        second = log(tmp_path / "run")[2]["train"]
        for name, value in second.items():
            assert value == pytest.approx(np.mean([losses[name] for losses in seen[2:5]]))

    def test_seeds(self, task, tmp_path):
        recipe = amips.Recipe(rate=3e-3)
        one, two, other = (
            train(task, tmp_path / f"run{i}", recipe=recipe, seed=s) for i, s in enumerate((1, 1, 2))
        )
        assert all((one.weights[name] == two.weights[name]).all() for name in one.weights)
        assert all((one.weights[name] != other.weights[name]).any() for name in ("Wx.0", "Wz.1", "W"))

    def test_a_finished_run_is_returned_as_it_is(self, task, tmp_path, monkeypatch):
        first = train(task, tmp_path / "run")
        monkeypatch.setattr(loop.Run, "step", lambda *_: pytest.fail("it trained again"))
        for resume in (False, True):
            again = train(task.path, str(tmp_path / "run"), resume=resume)
            assert again.about == first.about
            assert all((again.weights[name] == first.weights[name]).all() for name in first.weights)

    @pytest.mark.parametrize(
        "options",
        [
            {"samples": 1280},
            {"batch": 64},
            {"seed": 1},
            {"network": amips.SupportNet(width=9, depth=2)},
            {"network": amips.SupportNet(width=8, depth=2, nonnegative="clip")},
            {"recipe": "paper"},
            {"recipe": amips.Recipe(reduction="mean")},
        ],
        ids=str,
    )
    def test_other_settings_are_refused(self, task, tmp_path, options):
        train(task, tmp_path / "run")
        before = (tmp_path / "run" / "model.safetensors").read_bytes()
        for resume in (False, True):
            with pytest.raises(amips.RunError, match="other inputs or options") as caught:
                train(task, tmp_path / "run", resume=resume, **options)
            assert "\n" not in str(caught.value)
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == before

    def test_another_task_is_refused(self, task, task1, tmp_path):
        train(task1, tmp_path / "run")
        with pytest.raises(amips.RunError, match=r"other inputs or options \(.*task\)"):
            train(task, tmp_path / "run")

    def test_a_directory_of_something_else(self, task, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(amips.RunError, match="not a run"):
            train(task, tmp_path)
        with pytest.raises(amips.RunError, match="not a run"):
            train(task, tmp_path / "notes.txt")
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert len(list(tmp_path.iterdir())) == 1

    def test_nothing_to_resume(self, task, tmp_path):
        with pytest.raises(amips.RunError, match="no run to resume"):
            train(task, tmp_path / "run", resume=True)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"samples": 0}, "samples=0"),
            ({"samples": None, "minutes": 0.0}, "minutes=0"),
            ({"samples": None, "minutes": math.nan}, "minutes=nan"),
            ({"samples": None, "minutes": math.inf}, "minutes=inf"),
            ({"minutes": 1.0}, "not both"),
            ({"evaluations": 0}, "evaluations=0"),
            ({"batch": 0}, "batch=0"),
            ({"recipe": "secret"}, "secret"),
            ({"seed": -1}, "seed=-1"),
            ({"device": "abacus"}, "abacus"),
        ],
        ids=str,
    )
    def test_settings_that_make_no_sense(self, task, tmp_path, options, match):
        with pytest.raises(amips.RunError, match=match) as caught:
            train(task, tmp_path / "run", **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    def test_without_a_task(self, tmp_path):
        with pytest.raises(amips.TaskError, match="nowhere"):
            train(tmp_path / "nowhere", tmp_path / "run")

    @pytest.mark.parametrize("budget", [{}, {"samples": None, "minutes": 0.01}], ids=str)
    def test_progress_bar(self, task, tmp_path, monkeypatch, budget):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
        train(task, tmp_path / "run", progress=True, **budget)
        assert "training" in terminal.getvalue()
        assert "samples/s" in terminal.getvalue()
        assert "loss=" in terminal.getvalue() or not budget  # the other is over before a second drawing
        quiet = Terminal()
        monkeypatch.setattr(sys, "stderr", quiet)
        train(task, tmp_path / "quiet", progress=False, **budget)
        assert quiet.getvalue() == ""

    def test_a_budget_in_minutes(self, task, tmp_path):
        started = time.monotonic()
        model = train(task, tmp_path / "run", samples=None, minutes=0.025)
        took = time.monotonic() - started
        assert 1.4 < took < 10
        assert 1.5 <= model.about["seconds"] < 6
        assert model.about["samples"] > 640
        assert len(log(tmp_path / "run")) <= 5
        assert log(tmp_path / "run")[-1]["samples"] == model.about["samples"]

    def test_evaluations_take_no_more_than_a_part_of_the_time(self, task, tmp_path, monkeypatch):
        def slowly(*asked):
            time.sleep(0.15)
            return evaluate(*asked)

        monkeypatch.setattr(loop, "evaluate", slowly)
        model = train(task, tmp_path / "run", samples=None, minutes=0.025, evaluations=1000)
        assert 1.5 <= model.about["seconds"] < 2
        # A fifth of 1.5 seconds is enough for two; the first weights and the last are always looked at.
        assert 2 <= len(log(tmp_path / "run")) <= 4

    def test_default_budgets(self, task, tmp_path, monkeypatch):
        asked = []

        class Asked(Exception):  # noqa: N818
            pass

        def run(setup, out, recipe, budget, seed, group, compute):
            asked.append((setup.spec, recipe, budget))
            raise Asked

        monkeypatch.setattr(loop, "Run", run)
        for recipe in ("default", "paper", RECIPES["paper"]):
            with pytest.raises(Asked):
                amips.train(task, out=tmp_path / "run", recipe=recipe, batch=512)
        assert [spec for spec, _, _ in asked] == [amips.Linear()] * 3
        assert [(budget.samples, budget.minutes) for _, _, budget in asked] == [
            (None, 1.0),
            (PAPER_SAMPLES, None),
            (None, 1.0),
        ]
        assert [recipe.rate for _, recipe, _ in asked] == [1e-3, 1e-4, 1e-4]
        assert [recipe.patience for _, recipe, _ in asked] == [5, 0, 0]
        assert asked[1][1].batch == 512

    def test_a_batch_larger_than_the_task(self, task1, tmp_path):
        model = train(task1, tmp_path / "run", amips.KeyNet(width=8), batch=3000, samples=6000)
        assert model.about["samples"] == 6000

    @pytest.mark.parametrize("evaluations", [1, 3, 7, 1000])
    def test_how_often_it_evaluates(self, task1, tmp_path, evaluations):
        recipe = amips.Recipe(patience=0)
        train(task1, tmp_path / "run", samples=320, evaluations=evaluations, recipe=recipe)
        steps = [line["step"] for line in log(tmp_path / "run")]
        # Before the first step, and evaluation i of E at (i / E)^2 of the 10 steps.
        due = {0} | {math.ceil(10 * (i / evaluations) ** 2 - 1e-6) for i in range(1, evaluations + 1)}
        assert steps == sorted(due)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The run of `train`, never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(task, out)
    return out


def test_evaluations_do_not_count_as_training_time(task, tmp_path, monkeypatch):
    """Half a second a step, a hundred seconds an evaluation: five seconds of training are ten steps."""
    clock = [0.0]
    step, look = loop.Run.step, loop.evaluate

    def passing(seconds, work):
        def timed(*args):
            clock[0] += seconds
            return work(*args)

        return timed

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: 0.0))
    monkeypatch.setattr(loop.Run, "step", passing(0.5, step))
    monkeypatch.setattr(loop, "evaluate", passing(100.0, look))
    model = amips.train(task, SMALL, out=tmp_path / "run", minutes=5 / 60, batch=32, evaluations=4)
    assert (model.about["samples"], model.about["seconds"]) == (320, 5.0)
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert (last["seconds"], last["evaluating"]) == (5.0, 200.0)  # before the first step, and at the end


class TestResume:
    # In the middle, at the very first step, just where an evaluation is due, and one step before the end.
    @pytest.mark.parametrize("step", [1, 7, 10, 19])
    def test_bit_for_bit(self, task, tmp_path, monkeypatch, whole, step):
        out = tmp_path / "run"
        interrupted = pytest.raises(amips.TrainingInterrupted, match="resume")
        with at_step(monkeypatch, step, ctrl_c), interrupted as caught:
            train(task, out)
        assert f"after {32 * step:,} samples" in str(caught.value)
        assert not (out / "model.json").exists()
        with pytest.raises(amips.RunError, match="unfinished"):
            train(task, out)
        train(task, out, resume=True)
        same_runs(out, whole)

    def test_a_run_of_before_a_field_was_there_continues(self, task, tmp_path, monkeypatch, whole):
        """Its config says nothing of `reduction`: it summed, which is what is still done by default."""
        out = tmp_path / "run"
        with at_step(monkeypatch, 7, ctrl_c), pytest.raises(amips.TrainingInterrupted):
            train(task, out)
        assert "reduction" not in json.loads((out / "config.json").read_text())["recipe"]
        with pytest.raises(amips.RunError, match=r"other inputs or options \(.*recipe"):
            train(task, out, resume=True, recipe=amips.Recipe(reduction="mean"))
        train(task, out, resume=True)
        same_runs(out, whole)

    def test_several_times(self, task, tmp_path, monkeypatch, whole):
        out = tmp_path / "run"
        for step in (3, 5, 6, 14):
            with at_step(monkeypatch, step, ctrl_c), pytest.raises(amips.TrainingInterrupted):
                train(task, out, resume=step > 3)
        train(task, out, resume=True)
        same_runs(out, whole)

    def test_with_sampled_cells_and_softplus(self, task, tmp_path, monkeypatch):
        options = {
            "network": amips.SupportNet(width=8, depth=3, nonnegative="softplus", residual=True),
            "recipe": amips.Recipe(sampled_gradients=3),
        }
        train(task, tmp_path / "whole", **options)
        with at_step(monkeypatch, 8, ctrl_c), pytest.raises(amips.TrainingInterrupted):
            train(task, tmp_path / "run", **options)
        train(task, tmp_path / "run", resume=True, **options)
        same_runs(tmp_path / "run", tmp_path / "whole")

    def test_an_interrupt_in_the_last_step_comes_too_late(self, task, tmp_path, monkeypatch, whole):
        with at_step(monkeypatch, 20, ctrl_c):
            train(task, tmp_path / "run")
        same_runs(tmp_path / "run", whole)

    def test_a_run_killed_before_its_model_was_written(self, task, tmp_path, monkeypatch, whole):
        with monkeypatch.context() as patch:
            patch.setattr(amips.nets.Net, "save", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
            with pytest.raises(OSError, match="power cut"):
                train(task, tmp_path / "run")
        train(task, tmp_path / "run", resume=True)
        same_runs(tmp_path / "run", whole)

    @pytest.mark.parametrize("part", ["log", "checkpoint"])
    def test_a_run_killed_while_writing(self, task, tmp_path, monkeypatch, whole, part):
        """In the middle of a line of the log, or after the line and before the checkpoint."""
        out = tmp_path / "run"
        saves = []

        def die_at_second(self, directory):
            saves.append(directory)
            if len(saves) == 2:
                raise KeyboardInterrupt
            real(self, directory)

        real = loop.State.save
        with monkeypatch.context() as patch:
            patch.setattr(loop.State, "save", die_at_second)
            with pytest.raises(KeyboardInterrupt):
                train(task, out)
        assert lines_of(out / "log.jsonl") == 3
        if part == "log":
            text = (out / "log.jsonl").read_text()
            (out / "log.jsonl").write_text(text[:-40])
        train(task, out, resume=True)
        same_runs(out, whole)

    def test_a_run_killed_before_any_checkpoint_begins_again(self, task, tmp_path, monkeypatch, whole):
        for resume in (False, True):
            out = tmp_path / str(resume)
            with monkeypatch.context() as patch:
                patch.setattr(loop.Run, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    train(task, out)
            train(task, out, resume=resume)
            same_runs(out, whole)

    @pytest.fixture
    def stopped(self, task, tmp_path, monkeypatch):
        with at_step(monkeypatch, 7, ctrl_c), pytest.raises(amips.TrainingInterrupted):
            train(task, tmp_path / "run")
        return tmp_path / "run"

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
    def test_a_damaged_checkpoint(self, task, stopped, share):
        path = stopped / "checkpoint.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(amips.RunError, match=r"checkpoint.safetensors is damaged") as caught:
            train(task, stopped, resume=True)
        assert "\n" not in str(caught.value)

    def test_a_checkpoint_of_another_network(self, task, stopped, tmp_path):
        train(task, tmp_path / "other", amips.SupportNet(width=9, depth=2))
        (tmp_path / "other" / "checkpoint.safetensors").replace(stopped / "checkpoint.safetensors")
        with pytest.raises(amips.RunError, match="another network"):
            train(task, stopped, resume=True)

    @pytest.mark.parametrize("text", ["", "{", "[]"])
    def test_a_damaged_config(self, task, stopped, text):
        (stopped / "config.json").write_text(text)
        with pytest.raises(amips.RunError, match=r"config.json is damaged"):
            train(task, stopped, resume=True)

    def test_a_damaged_model(self, task, tmp_path):
        train(task, tmp_path / "run")
        (tmp_path / "run" / "model.safetensors").write_bytes(b"")
        with pytest.raises(amips.RunError, match=r"model.safetensors"):
            train(task, tmp_path / "run")

    def test_the_handlers_are_put_back(self, task, tmp_path, monkeypatch):
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with at_step(monkeypatch, 2, ctrl_c), pytest.raises(amips.TrainingInterrupted):
            train(task, tmp_path / "run")
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class TestDivergence:
    def test_the_last_good_checkpoint_is_kept(self, task, tmp_path, monkeypatch):
        real, calls = loop.total_loss, itertools.count(1)

        def broken(network, batch, recipe):
            total, parts = real(network, batch, recipe)
            return (total * math.nan, parts) if next(calls) == 13 else (total, parts)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "total_loss", broken)
            with pytest.raises(amips.TrainingDivergedError, match="last good checkpoint is kept") as caught:
                train(task, tmp_path / "run")
        assert "step 12 (384 samples)" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert [line["step"] for line in log(tmp_path / "run")] == [0, 2, 5, 12]
        assert not (tmp_path / "run" / "model.json").exists()
        state = load_file(tmp_path / "run" / "checkpoint.safetensors")
        assert all(np.isfinite(value).all() for value in state.values())
        train(task, tmp_path / "run", resume=True)
        train(task, tmp_path / "whole")
        same_runs(tmp_path / "run", tmp_path / "whole")

    def test_a_rate_beyond_all_measure(self, task, tmp_path):
        recipe = amips.Recipe(rate=1e30, warmup=0.0)
        with pytest.raises(amips.TrainingDivergedError, match=r"nothing was saved.*lower rate"):
            train(task, tmp_path / "run", recipe=recipe, evaluations=1)
        assert not (tmp_path / "run" / "checkpoint.safetensors").exists()

    def test_a_gradient_that_is_not_finite(self, task, tmp_path, monkeypatch):
        real = loop.total_loss

        def steep(network, batch, recipe):
            total, parts = real(network, batch, recipe)
            zero = (network.free["W"] * 0).sum()
            return total + zero.abs().sqrt(), parts  # finite, with an infinite slope

        monkeypatch.setattr(loop, "total_loss", steep)
        with pytest.raises(amips.TrainingDivergedError, match="step 0"):
            train(task, tmp_path / "run")


def scan_slowly(scores, task):
    """The least mean share of the keys over all bounds on the mass that find 95 % of the top keys."""
    top = task.cells.assignment[task.val.top_ids]
    chances = np.exp((scores - scores.max(axis=1, keepdims=True)) / fit_temperature(scores, top))
    chances /= chances.sum(axis=1, keepdims=True)
    best = np.arange(task.c) == scores.argmax(axis=1)[:, None]
    shares = []
    for bound in np.unique(chances):
        probed = (chances >= bound) | best
        if np.take_along_axis(probed, top, axis=1).mean() >= 0.95:
            shares.append((probed * task.cells.sizes).sum(axis=1).mean() / task.n)
    return min(shares)


class TestEvaluate:
    @pytest.mark.parametrize("kind", ["support", "key"])
    @pytest.mark.parametrize("name", ["task", "task1"])
    def test_by_brute_force(self, request, name, kind, monkeypatch):
        task = request.getfixturevalue(name)
        net = Network(architecture(kind, task.d, task.c, 12, 2, (1,)), seed=3).export({})
        monkeypatch.setattr(evaluation, "BLOCK_FLOATS", 7 * 16 * 16)  # blocks of a few rows
        got = evaluate(net, task, task.val)
        keys = task.keys.astype(np.float64)
        cells = task.cells.assignment
        score, key, erel, ranks, places = [], [], [], [], []
        for x in task.val.queries:
            scores, predicted = net.scores(x[None])[0], net.keys(x[None])[0].astype(np.float64)
            products = keys @ x.astype(np.float64)
            best = [np.flatnonzero(cells == j)[products[cells == j].argmax()] for j in range(task.c)]
            score.append(np.mean((scores - products[best]) ** 2))
            key.append(np.mean([np.sum((p - keys[b]) ** 2) for p, b in zip(predicted, best, strict=True)]))
            erel.append(
                np.mean(
                    [
                        math.log(np.sum((p - keys[b]) ** 2) / np.sum((x - keys[b]) ** 2))
                        for p, b in zip(predicted, best, strict=True)
                    ]
                )
            )
            top, point = products.argmax(), predicted[scores.argmax()]
            distances = np.sum((keys - point) ** 2, axis=1)
            ranks.append(1 + np.count_nonzero(distances < distances[top] - 1e-5))
            places.append(np.count_nonzero(scores > scores[cells[top]]))
        ranks, places = np.array(ranks), np.array(places)
        expected = {
            "score": np.mean(score),
            "key": np.mean(key),
            "erel": np.mean(erel),
            "erel_half": np.mean(erel) / 2,
            "match": np.mean(ranks == 1),
            "recall@10": np.mean(ranks <= 10),
            "recall@100": np.mean(ranks <= 100),
            "mrr": np.mean(1 / ranks),
        }
        if task.c > 1:
            expected |= {f"routing@{k}": np.mean(places < k) for k in (1, 2, 4)}
            expected["scan@0.95"] = scan_slowly(net.scores(task.val.queries), task)
        assert got.keys() == expected.keys()
        for metric, value in expected.items():
            assert got[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric

    def test_with_many_cells_keys_are_measured_on_the_first_queries(self, task, monkeypatch):
        net = random_net(architecture("support", task.d, task.c, 12, 2, (1,)))
        full = evaluate(net, task, task.val)
        monkeypatch.setattr(evaluation, "MOST_PAIRS", 64 * task.c)
        monkeypatch.setattr(evaluation, "BLOCK_FLOATS", 16 * 12 * 16)  # blocks of 16 rows
        some = evaluate(net, task, task.val)
        x, ids = task.val.queries[:64], task.val.cell_ids[:64]
        errors = transport_error(net.keys(x), x[:, None], task.keys[ids])
        assert some["erel"] == pytest.approx(errors.mean(), rel=1e-5)
        assert some["erel"] != full["erel"]
        for metric in ("score", "match", "mrr", "routing@1"):
            assert some[metric] == pytest.approx(full[metric], rel=1e-5)

    def test_metrics_by_hand(self):
        x, y = np.float32([[1, 0], [0, 1]]), np.float32([[0, 0], [0, 0]])
        np.testing.assert_allclose(transport_error(x / 2, x, y), math.log(1 / 4))
        np.testing.assert_allclose(transport_error(x, x, y), 0)
        assert np.isfinite(transport_error(y, x, y)).all()
        assert rank_metrics(np.array([1, 2, 11, 200])) == {
            "match": 0.25,
            "recall@10": 0.5,
            "recall@100": 0.75,
            "mrr": pytest.approx((1 + 1 / 2 + 1 / 11 + 1 / 200) / 4),
        }
        scores = np.float32([[3, 2, 1, 0], [0, 1, 2, 3], [1, 1, 1, 1], [1, 1, 1, 1]])
        assert routing_accuracy(scores, np.array([0, 1, 0, 3])) == {"routing@1": 0.5, "routing@2": 0.5}
        assert routing_accuracy(scores, np.array([0, 1, 0, 3]), at=(3, 4)) == {
            "routing@3": 0.75,
            "routing@4": 1.0,
        }


class TestCommand:
    def test_as_a_user_types_it(self, task, tmp_path):
        out = tmp_path / "run"
        done = typed(
            *("train", task.path, "--out", out, "--net", "support", "--size", "S", "--depth", 4),
            *("--inject", "every 2", "--residual", "--homogeneous", "relu", "--nonnegative", "clip"),
            *("--samples", 640, "--batch", 64, "--evaluations", 2, "--seed", 3, "--device", "cpu"),
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        a = load_model(out).architecture
        assert (a.kind, a.depth, a.injected, a.residual) == ("support", 4, (2,), True)
        assert (a.homogeneous, a.nonnegative, a.c) == ("relu", "clip", task.c)
        assert f"SupportNet, {a.parameters:,} parameters, 640 samples" in done.stdout
        for metric in ("erel", "mrr", "routing@1"):
            assert metric in done.stdout
        assert len(log(out)) == 3
        assert "keys scanned for recall@10 0.95, on val: centroid routing " in done.stdout

    def test_it_is_the_python_function(self, task1, tmp_path):
        done = typed(
            *("train", task1.path, "--out", tmp_path / "typed", "--net", "key", "--size", "0.05"),
            *("--samples", 320, "--batch", 32, "--evaluations", 1, "--recipe", "paper"),
        )
        assert done.returncode == 0, done.stderr
        network = amips.KeyNet(size=0.05)
        train(task1, tmp_path / "called", network, samples=320, evaluations=1, recipe="paper")
        same_runs(tmp_path / "typed", tmp_path / "called")

    def test_without_a_network_it_is_a_linear_router(self, task, tmp_path):
        done = typed("train", task.path, "--out", tmp_path / "run", "--samples", 2048, "--batch", 256)
        assert done.returncode == 0, done.stderr
        model = load_model(tmp_path / "run")
        assert spec_of(model) == amips.Linear()
        scans = [model.about[name]["scan@0.95"] for name in ("centroid", "start", "val")]
        centroid, untrained, trained = (f"{100 * value:.1f} %" for value in scans)
        figures = f"centroid routing {centroid}, untrained {untrained}, trained {trained}"
        assert f"keys scanned for recall@10 0.95, on val: {figures}\n" in done.stdout

    def test_python_says_the_same(self, task, capsys):
        """With progress; without it, or with the bar alone, nothing is printed."""
        options = {"samples": 640, "batch": 32, "recipe": amips.Recipe(rate=30.0, warmup=0.0, anchor=0.0)}
        model = amips.train(task, amips.Linear(rank=0), progress=True, **options)
        scans = [model.about[name]["scan@0.95"] for name in ("centroid", "start", "val")]
        centroid, untrained, trained = (f"{100 * value:.1f} %" for value in scans)
        first, second = capsys.readouterr().out.splitlines()
        assert first.endswith(f"centroid routing {centroid}, untrained {untrained}, trained {trained}")
        assert second == "training did not improve on the start: the untrained network is kept"
        for progress in (False, "bar"):
            amips.train(task, amips.Linear(rank=0), progress=progress, **options)
            assert capsys.readouterr().out == ""
        with pytest.raises(amips.RunError, match="progress='line': expected"):
            amips.train(task, progress="line", **options)

    def test_where_nothing_is_gained_it_says_so(self, task, tmp_path):
        wild = ("--set", "rate=30", "--set", "warmup=0", "--set", "anchor=0", "--rank", 0)
        done = typed("train", task.path, "--out", tmp_path / "run", "--samples", 640, "--batch", 32, *wild)
        assert done.returncode == 0, done.stderr
        assert load_model(tmp_path / "run").about["best_step"] == 0
        assert "\ntraining did not improve on the start: the untrained network is kept\n" in done.stdout

    def test_of_a_mapper_it_says_the_transport_error(self, task1, tmp_path):
        words = ("--net", "key", "--samples", 640, "--batch", 32, "--set", "width=8")
        done = typed("train", task1.path, "--out", tmp_path / "run", *words)
        assert done.returncode == 0, done.stderr
        about = load_model(tmp_path / "run").about
        figures = f"untrained {about['start']['erel']:.3f}, trained {about['val']['erel']:.3f}"
        assert f"erel, on val: {figures}\n" in done.stdout

    def test_settings_of_the_recipe_and_the_network(self, task, tmp_path):
        words = ["--set", "rate=3e-4", "--set", "score=0.1", "--set", "width=8", "--set", "depth=2"]
        done = typed(
            *("train", task.path, "--out", tmp_path / "typed", "--net", "support"),
            *("--samples", 640, "--batch", 32, "--evaluations", 4, *words),
        )
        assert done.returncode == 0, done.stderr
        train(task, tmp_path / "called", SMALL, recipe=amips.Recipe(rate=3e-4, score=0.1))
        same_runs(tmp_path / "typed", tmp_path / "called")

    def test_a_file_with_a_recipe_and_a_network(self, task, tmp_path):
        file = tmp_path / "mine.toml"
        file.write_text('rate = 3e-4\nscore = 0.5\n[network]\nkind = "support"\nwidth = 8\ndepth = 2\n')
        words = ["--samples", 640, "--batch", 32, "--evaluations", 4, "--set", "score=0.1"]
        done = typed("train", task.path, "--out", tmp_path / "typed", "--recipe", file, *words)
        assert done.returncode == 0, done.stderr
        train(task, tmp_path / "called", SMALL, recipe=amips.Recipe(rate=3e-4, score=0.1))
        same_runs(tmp_path / "typed", tmp_path / "called")
        both = typed("train", task.path, "--out", tmp_path / "no", "--recipe", file, "--net", "linear")
        assert both.returncode == 2
        assert "mine.toml: leave --net and its options out" in both.stderr

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (["--set", "rte=1"], 1, "there is no setting 'rte'; those of the recipe are batch, rate, "),
            (["--set", "rate=fast"], 1, "rate=fast: expected a number"),
            (["--set", "batch=1.5"], 1, "batch=1.5: expected a whole number"),
            (["--set", "rate"], 1, "'rate' is not a setting: write NAME=VALUE"),
            (["--set", "pieces=3"], 1, "no setting 'pieces'"),
            (["--set", "rank=many"], 1, "rank='many': expected a whole number"),
            (["--set", "bias=maybe"], 1, "bias='maybe': expected True or False"),
            (["--recipe", "fast"], 2, "--recipe fast: expected default, paper or a file that ends in .toml"),
            (["--recipe", "nowhere.toml"], 1, "nowhere.toml does not exist"),
            (["--pieces", "3"], 2, "--pieces is not for --net linear"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else None,
    )
    def test_settings_that_are_wrong(self, task, tmp_path, options, code, message):
        done = typed("train", task.path, "--out", tmp_path / "run", *options)
        assert done.returncode == code
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        if code == 1:
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("option", ["--homogeneous relu", "--nonnegative clip"])
    def test_options_that_a_keynet_does_not_have(self, task, tmp_path, option):
        done = typed("train", task.path, "--out", tmp_path / "run", "--net", "key", *option.split())
        assert done.returncode == 2
        assert f"{option.split()[0]} is not for --net key" in done.stderr
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (["--net", "transformer"], 2, "transformer"),
            (["--depth", "many"], 2, "many"),
            (["--inject", "sometimes"], 1, "inject='sometimes'"),
            (["--inject", "1.5"], 1, "inject=1.5"),
            (["--inject", "7"], 1, "inject=7"),
            (["--size", "XXS"], 1, "XXS"),
            (["--size", "2"], 1, "size=2"),
            (["--depth", "0"], 1, "depth=0"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else None,
    )
    def test_mistakes(self, task, tmp_path, options, code, message):
        net = [] if "--net" in options else ["--net", "support"]
        done = typed("train", task.path, "--out", tmp_path / "run", *net, *options)
        assert done.returncode == code
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        if code == 1:
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()

    def test_a_wrong_path(self, tmp_path):
        done = typed("train", tmp_path / "nowhere", "--out", tmp_path / "run")
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "nowhere" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()

    def test_without_torch(self, task, tmp_path):
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "import amips\n"
            "try: amips.train\n"
            "except amips.AmipsError as problem: print(problem)\n"
            f"sys.argv = ['amips', 'train', {str(task.path)!r}, '--out', {str(tmp_path / 'run')!r}]\n"
            "from amips.cli import main\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "amips.train needs torch; pip install" in done.stdout
        assert done.stderr.startswith("error: ")
        assert "pip install" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()


LONG = {"samples": 32 * 600, "evaluations": 60}


@pytest.fixture(scope="module")
def long(task, tmp_path_factory):
    """A run that takes a few seconds, never interrupted."""
    out = tmp_path_factory.mktemp("long") / "run"
    train(task, out, COMMANDED, **LONG)
    return out


class TestInterruptedProcess:
    def begun(self, task, out):
        """A process that trains, has logged and has saved."""
        process = subprocess.Popen(
            command(task, out, **LONG),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        wait_for(lambda: lines_of(out / "log.jsonl") >= 3, process)
        return process

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ctrl_c_saves_and_says_how_to_resume(self, task, tmp_path, long, number):
        out = tmp_path / "run"
        process = self.begun(task, out)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "--resume" in stderr
        assert str(out) in stderr
        assert stderr.count("\n") == 1
        assert not (out / "model.json").exists()
        if number == signal.SIGTERM:
            return
        again = command(task, out, **LONG)
        refused = subprocess.run(again, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert refused.returncode == 1
        assert "--resume" in refused.stderr
        done = subprocess.run(
            [*again, "--resume"], capture_output=True, text=True, env=ENVIRONMENT, check=False
        )
        assert done.returncode == 0, done.stderr
        same_runs(out, long)

    @pytest.mark.slow
    def test_kill_leaves_a_checkpoint_to_go_on_from(self, task, tmp_path, long):
        out = tmp_path / "run"
        process = self.begun(task, out)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert not (out / "model.json").exists()
        train(task, out, COMMANDED, **LONG, resume=True)
        same_runs(out, long)


@pytest.fixture(scope="module")
def many(world, tmp_path_factory):
    """24 cells: enough for the gradient loss to draw some."""
    out = tmp_path_factory.mktemp("many") / "task"
    return amips.label(*world, cells=24, val=100, test=100, copies=1, cell_targets=True, out=out)


class TestSeveralProcesses:
    @pytest.mark.slow
    def test_two_processes_are_one_with_the_doubled_batch(self, many, tmp_path):
        options = ["--net", "support", "--size", "0.05", "--depth", "2", "--samples", "1920"]
        options += ["--evaluations", "2"]
        words = ["train", many.path, *options, "--batch", 32, "--out", tmp_path / "two"]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *("-m", "amips", *map(str, words)),
            ],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        network = amips.SupportNet(size=0.05, depth=2)
        shared = {"network": network, "samples": 1920, "evaluations": 2}
        train(many, tmp_path / "one", batch=64, **shared)
        train(many, tmp_path / "half", batch=32, **shared)
        one, two, half = (
            load_file(tmp_path / run / "checkpoint.safetensors") for run in ("one", "two", "half")
        )
        for name, value in one.items():
            np.testing.assert_allclose(two[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
        start = dict(Network(network.architecture(many.n, many.d, many.c)).named_parameters())
        moved, apart = (
            max(abs(one[f"parameters/{name}"] - other(name)).max() for name in start)
            for other in (lambda name: start[name].detach().numpy(), lambda name: half[f"parameters/{name}"])
        )
        assert moved > 1e-2
        assert apart > 1e-3
        for a, b in zip(log(tmp_path / "two"), log(tmp_path / "one"), strict=True):
            assert a["samples"] == b["samples"]
            assert a["train"] == pytest.approx(b["train"], rel=1e-3)
            assert a["val"]["score"] == pytest.approx(b["val"]["score"], rel=1e-3)
