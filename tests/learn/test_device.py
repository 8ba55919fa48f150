"""What a GPU needs of training, on the CPU: nothing that waits in a step, batches gathered ahead, evaluation
by torch, bfloat16, compiled losses.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amips
from amips.device import Ahead
from amips.learn import Budget, Group, Run, evaluate, loop, meter, set_up
from amips.learn.compute import Compute
from amips.nets import read_run_config

torch.set_num_threads(1)
CPU = torch.device("cpu")
SUPPORT, KEY = amips.SupportNet(width=16, depth=3), amips.KeyNet(width=16, depth=3)
MAPPER = amips.KeyNet(width=16, depth=2, mapper=True)
NETWORKS = [
    (amips.Linear(bias=True), {}),
    (amips.MaxAffine(smooth=True), {"listwise": 0.5}),
    (SUPPORT, {"route_weight": 0.5}),
    (amips.SupportNet(width=16, depth=2, nonnegative="softplus", homogeneous="relu"), {}),
    (KEY, {}),
    (MAPPER, {"route_weight": 1.0}),
]
kinds = pytest.mark.parametrize(("network", "recipe"), NETWORKS, ids=lambda value: str(value)[:40])


def train(task, network=SUPPORT, samples=1280, batch=32, **options):
    return amips.train(task, network, samples=samples, batch=batch, evaluations=4, **options)


def content(run):
    """What a run leaves, without what depends on the clock."""
    tensors = [load_file(run / name) for name in ("model.safetensors", "checkpoint.safetensors")]
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kept = [
        {name: value for name, value in line.items() if name not in ("seconds", "evaluating")}
        for line in lines
    ]
    return [{name: value.tobytes() for name, value in group.items()} for group in tensors], kept


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Batches come from a thread, and losses are read every seventh step."""
    begin, real = meter.Meter.__init__, loop.set_up

    def seldom(self, device, sums):
        begin(self, device, sums)
        self.every = 7

    def with_thread(*arguments):
        setup = real(*arguments)
        setup.batches.ahead = Ahead(setup.batches._pinned)
        return setup

    monkeypatch.setattr(meter.Meter, "__init__", seldom)
    monkeypatch.setattr(loop, "set_up", with_thread)


class NoReading(TorchDispatchMode):
    """Refuses what makes a number of Python's out of a tensor, which waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        assert func is not torch.ops.aten.is_nonzero.default, "a tensor was read"
        assert func is not torch.ops.aten.equal.default, "tensors were compared"
        return func(*args, **(kwargs or {}))


class OneDevice(TorchDispatchMode):
    """Refuses what copies from one device to another, which is waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        assert len({leaf.device for leaf in leaves}) < 2, f"between devices: {func}"
        return out


class TestSteps:
    @kinds
    def test_a_step_reads_nothing(self, task, tmp_path, monkeypatch, network, recipe):
        recipe, group = amips.Recipe(batch=32, **recipe), Group(CPU)
        setup = set_up(task, network, recipe, 0, CPU, group)
        run = Run(setup, tmp_path, recipe, Budget(10_000, None, 1), 0, group)
        run.meter.every = meter.SELDOM
        batches = [setup.batches(step) for step in range(6)]  # in host memory: they may be looked at
        monkeypatch.setattr(run, "batches", batches.__getitem__)
        run.step(0.1)  # the first one looks whether the loss is finite
        for name in ("tolist", "numpy", "cpu", "item"):
            monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} in a step"))
        with NoReading():
            for _ in range(5):
                run.step(0.1)
        monkeypatch.undo()
        assert run.meter.sums()["steps"] == 6
        with NoReading(), pytest.raises(AssertionError, match="a tensor was read"):
            run.meter.first_broken()

    @kinds
    def test_a_step_moves_nothing_to_or_from_the_device(self, task, tmp_path, network, recipe):
        """On "meta", where tensors have no numbers: to read one fails, and so does to mix devices."""
        meta, recipe, group = torch.device("meta"), amips.Recipe(batch=32, **recipe), Group(CPU)
        setup = set_up(task, network, recipe, 0, meta, group)
        run = Run(setup, tmp_path, recipe, Budget(10_000, None, 1), 0, group)
        run.state.progress.step = 1  # at step 0 the loss is looked at
        batches = [setup.batches(step) for step in range(4)]
        setup.batches.close()
        run.batches = batches.__getitem__
        with OneDevice():
            for _ in range(3):
                run.step(0.1)
        assert run.meter.steps == 3
        with OneDevice(), pytest.raises(AssertionError, match="between devices"):
            torch.ones(()).to(meta)

    def test_a_gpu_is_read_seldom_and_the_cpu_always(self):
        every = {name: meter.Meter(torch.device(name), {}).every for name in ("cpu", "meta")}
        assert every == {"cpu": 1, "meta": meter.SELDOM}

    @kinds
    def test_what_is_learned_is_the_same(self, task, tmp_path, request, network, recipe):
        options = {"recipe": amips.Recipe(**recipe)}
        train(task, network, out=tmp_path / "cpu", **options)
        request.getfixturevalue("as_on_a_gpu")
        train(task, network, out=tmp_path / "gpu", **options)
        assert content(tmp_path / "cpu") == content(tmp_path / "gpu")

    def test_resumed_bit_for_bit(self, task, tmp_path, monkeypatch, as_on_a_gpu):
        train(task, out=tmp_path / "whole")
        real = Run.step

        def interrupted(self, done):
            real(self, done)
            if self.state.progress.step == 17:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "step", interrupted)
            with pytest.raises(amips.TrainingInterrupted):
                train(task, out=tmp_path / "run")
        train(task, out=tmp_path / "run", resume=True)
        assert content(tmp_path / "whole") == content(tmp_path / "run")

    def test_a_loss_that_is_not_finite_is_noticed_later_and_named(
        self, task, tmp_path, monkeypatch, as_on_a_gpu
    ):
        real, calls = loop.total_loss, []

        def broken(network, batch, recipe):
            calls.append(1)
            total, parts = real(network, batch, recipe)
            return (total * float("nan") if len(calls) == 17 else total), parts

        monkeypatch.setattr(loop, "total_loss", broken)
        with pytest.raises(amips.TrainingDivergedError, match=r"step 16 \(512 samples\); the last good"):
            train(task, out=tmp_path / "run")
        assert 17 < len(calls) <= 24
        state = load_file(tmp_path / "run" / "checkpoint.safetensors")
        assert all(np.isfinite(value).all() for value in state.values())

    def test_batches_ahead_are_those_asked_for(self, task):
        batches = set_up(task, KEY, amips.Recipe(batch=32), 0, CPU, Group(CPU)).batches
        expected = [batches.gathered(step) for step in (0, 1, 2, 7, 8, 3)]
        batches.ahead = Ahead(batches._pinned)
        for step, batch in zip((0, 1, 2, 7, 8, 3), expected, strict=True):
            assert all(
                a is b is None or torch.equal(a, b)
                for a, b in zip(vars(batch).values(), vars(batches(step)).values(), strict=True)
            )
        batches.close()

    def test_what_goes_wrong_in_the_thread_is_raised(self):
        ahead = Ahead(lambda number: 1 // (3 - number))
        assert [ahead(0), ahead(1), ahead(2)] == [0, 0, 1]
        with pytest.raises(ZeroDivisionError):
            ahead(3)
        ahead.close()


class TestEvaluation:
    @kinds
    def test_by_torch_as_by_numpy(self, task, network, recipe):
        model = train(task, network, samples=640, recipe=amips.Recipe(**recipe))
        through = None
        split = task
        if network is MAPPER:
            split, through = task.with_cells(amips.cells.trivial(task.key_vectors)), task
        by_numpy = evaluate(model, split, split.val, through)
        by_torch = evaluate(model, split, split.val, through, "cpu")
        assert by_numpy.keys() == by_torch.keys()
        for name, value in by_numpy.items():
            assert by_torch[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name

    def test_a_device_that_is_not_there(self, task):
        model = train(task, amips.Linear(), samples=64)
        with pytest.raises(amips.RunError, match="device='cuda:99' cannot be used"):
            evaluate(model, task, task.val, device="cuda:99")
        with pytest.raises(amips.RunError, match="device='meta' cannot be used"):
            train(task, device="meta")


class TestPrecision:
    @kinds
    def test_bfloat16_learns_nearly_the_same(self, task, tmp_path, network, recipe):
        recipe = amips.Recipe(rate=3e-3, **recipe)
        plain = train(task, network, samples=6400, recipe=recipe)
        half = train(task, network, samples=6400, recipe=recipe, precision="bf16", out=tmp_path / "run")
        assert all(value.dtype == np.float32 for value in half.weights.values())
        assert any(half.weights[name].tobytes() != plain.weights[name].tobytes() for name in half.weights)
        for name in ("erel", "scan@0.95", "routing@1"):
            if name in plain.about["val"]:
                assert half.about["val"][name] == pytest.approx(plain.about["val"][name], abs=0.06), name
        state = load_file(tmp_path / "run" / "checkpoint.safetensors")
        assert {value.dtype for value in state.values()} == {np.dtype(np.float32)}

    def test_it_belongs_to_the_settings_of_a_run(self, task, tmp_path):
        out = tmp_path / "run"
        train(task, samples=64, precision="bf16", out=out)
        assert read_run_config(out)["precision"] == "bf16"
        with pytest.raises(amips.RunError, match="precision"):
            train(task, samples=64, out=out)
        train(task, samples=64, out=tmp_path / "plain")
        assert not {"precision", "compile"} & read_run_config(tmp_path / "plain").keys()

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"precision": "fp8"}, "precision='fp8': expected one of float32, bf16"),
            ({"compile": "yes"}, "compile='yes': expected True or False"),
            ({"tensorboard": 1}, "tensorboard=1: expected True or False"),
            ({"tensorboard": True}, "tensorboard: give the directory of the run"),
        ],
    )
    def test_options_that_cannot_be(self, task, options, match):
        with pytest.raises(amips.RunError, match=match):
            train(task, **options)


class TestCompile:
    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it imports its compiler
    def test_compiled_losses_learn_the_same(self, task, tmp_path):
        network = amips.SupportNet(width=8, depth=2)
        plain = train(task, network, samples=640)
        compiled = train(task, network, samples=640, compile=True, out=tmp_path / "run")
        assert read_run_config(tmp_path / "run")["compile"] is True
        for name, value in plain.weights.items():
            np.testing.assert_allclose(compiled.weights[name], value, atol=1e-4)

    def test_the_loss_is_given_to_the_compiler_once(self, task, monkeypatch):
        compiled, calls = [], []

        def compiler(function, **options):
            compiled.append((function, options))
            return lambda *inputs: (calls.append(1), function(*inputs))[1]

        monkeypatch.setattr(torch, "compile", compiler)
        assert train(task, samples=320, compile=True).about["samples"] == 320
        assert compiled == [(loop.total_loss, {"dynamic": False})]
        assert len(calls) == 10

    def test_what_the_compiler_cannot_do_is_one_line(self, task, monkeypatch):
        problem = type("InductorError", (Exception,), {"__module__": "torch._inductor.exc"})

        def fails(*_):
            raise problem("\nno compiler was found\n\nSet TORCHDYNAMO_VERBOSE=1")

        monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
        with pytest.raises(amips.RunError) as caught:
            train(task, samples=64, compile=True)
        expected = "torch.compile: no compiler was found; train without compile=True (--compile)"
        assert str(caught.value) == expected

    def test_settings(self):
        assert Compute().settings() == {}
        assert Compute("bf16", True).settings() == {"precision": "bf16", "compile": True}
