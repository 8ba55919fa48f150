"""Several seeds in one call, and the log for TensorBoard."""

import json
import math

import numpy as np
import pytest
import torch

import amips
from amips.learn import Run, train_seeds
from amips.learn.seeds import checked_seeds

torch.set_num_threads(1)
SMALL = amips.SupportNet(width=8, depth=2)
OPTIONS = {"samples": 640, "batch": 32, "evaluations": 4}


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


class TestSeeds:
    def test_each_is_the_run_of_its_seed(self, task, tmp_path):
        runs = train_seeds(task, SMALL, seeds=(2, 0), out=tmp_path / "runs", **OPTIONS)
        assert list(runs.models) == [2, 0]
        for seed, model in runs.models.items():
            alone = amips.train(task, SMALL, seed=seed, **OPTIONS)
            saved = (tmp_path / "runs" / f"seed-{seed}" / "model.safetensors").stat().st_size
            assert saved > 0
            assert all(np.array_equal(model.weights[name], alone.weights[name]) for name in alone.weights)
        values = [runs.models[seed].about["val"]["scan@0.95"] for seed in (2, 0)]
        assert runs.val["scan@0.95"] == values
        assert runs.mean["scan@0.95"] == pytest.approx(sum(values) / 2)
        assert runs.spread["scan@0.95"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert runs.mean.keys() == runs.spread.keys() == runs.models[0].about["val"].keys()

    def test_one_seed_has_no_spread(self, task):
        runs = train_seeds(task, SMALL, seeds=1, samples=64, batch=32)
        assert all(math.isnan(value) for value in runs.spread.values())
        assert runs.mean == runs.models[0].about["val"]

    def test_an_interrupted_call_is_resumed(self, task, tmp_path, monkeypatch):
        out, real, seen = tmp_path / "runs", Run.step, []

        def interrupted(self, done):
            real(self, done)
            seen.append(self.out.name)
            if seen.count("seed-1") == 7:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Run, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_seeds(task, SMALL, seeds=3, out=out, **OPTIONS)
        assert sorted(path.name for path in out.iterdir()) == ["seed-0", "seed-1"]
        with pytest.raises(amips.RunError, match="seed-1 holds an unfinished run"):
            train_seeds(task, SMALL, seeds=3, out=out, **OPTIONS)
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Run, "step", lambda self, done: (seen.append(self.out.name), real(self, done)))
            runs = train_seeds(task, SMALL, seeds=3, out=out, resume=True, **OPTIONS)
        assert set(seen) == {"seed-1", "seed-2"}
        assert seen.count("seed-1") < 20 == seen.count("seed-2")
        monkeypatch.setattr(Run, "step", lambda *_: pytest.fail("it trained again"))
        again = train_seeds(task, SMALL, seeds=3, out=out, **OPTIONS)
        assert again.val == runs.val

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"seeds": 0}, "seeds=0: expected a whole number, at least 1"),
            ({"seeds": ()}, "different seeds, at least one"),
            ({"seeds": (1, 1)}, "different seeds, at least one"),
            ({"seeds": (0, -1)}, "seed=-1"),
            ({"seeds": "3"}, "seeds='3': expected a whole number"),
            ({"seed": 3}, "give either seed, to train, or seeds"),
            ({"resume": True}, "give the directory of the runs"),
            ({"resume": 3}, "resume=3"),
        ],
    )
    def test_what_cannot_be(self, task, options, match):
        with pytest.raises(amips.RunError, match=match):
            train_seeds(task, SMALL, **options)

    def test_a_run_is_no_place_for_runs(self, task, tmp_path):
        amips.train(task, SMALL, out=tmp_path / "run", samples=64, batch=32)
        with pytest.raises(amips.RunError, match="holds a run of its own"):
            train_seeds(task, SMALL, out=tmp_path / "run", samples=64, batch=32)

    def test_numbers(self):
        assert checked_seeds(3) == checked_seeds(np.arange(3)) == checked_seeds(range(3)) == [0, 1, 2]


class TestTensorBoard:
    @staticmethod
    def scalars(run):
        event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    @staticmethod
    def expected(run):
        series = {}
        for line in log(run):
            for group in ("train", "val", "centroid"):
                for name, value in line.get(group, {}).items():
                    series.setdefault(f"{group}/{name}", []).append((line["samples"], np.float32(value)))
        return series

    def test_it_has_what_the_log_has(self, task, tmp_path):
        amips.train(task, SMALL, out=tmp_path / "run", tensorboard=True, **OPTIONS)
        scalars = self.scalars(tmp_path / "run")
        assert scalars == self.expected(tmp_path / "run")
        assert {"train/loss", "train/grad", "val/scan@0.95", "centroid/scan@0.95"} <= scalars.keys()
        assert [step for step, _ in scalars["val/scan@0.95"]] == [0, 64, 160, 384, 640]

    def test_after_a_resume_nothing_is_there_twice(self, task, tmp_path, monkeypatch):
        real, out = Run.step, tmp_path / "run"

        def killed(self, done):
            real(self, done)
            if self.state.progress.step == 9:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Run, "step", killed)
            with pytest.raises(KeyboardInterrupt):
                amips.train(task, SMALL, out=out, tensorboard=True, **OPTIONS)
        amips.train(task, SMALL, out=out, tensorboard=True, resume=True, **OPTIONS)
        assert self.scalars(out) == self.expected(out)

    def test_it_changes_nothing_else(self, task, tmp_path):
        for name, wanted in (("with", True), ("without", False)):
            amips.train(task, SMALL, out=tmp_path / name, tensorboard=wanted, **OPTIONS)
        one, two = (tmp_path / name / "model.safetensors" for name in ("with", "without"))
        assert one.read_bytes() == two.read_bytes()
        assert not (tmp_path / "without" / "tensorboard").exists()
        # A run is the same run with and without it.
        amips.train(task, SMALL, out=tmp_path / "with", **OPTIONS)

    def test_without_the_package(self, task, tmp_path, monkeypatch):
        monkeypatch.setattr(
            amips.extras.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else name
        )
        with pytest.raises(amips.AmipsError, match=r"needs tensorboard; pip install 'amips\[tensorboard\]'"):
            amips.train(task, SMALL, out=tmp_path / "run", tensorboard=True, **OPTIONS)
        assert not (tmp_path / "run").exists()
