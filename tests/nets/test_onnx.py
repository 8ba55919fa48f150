"""Models as ONNX files: the same numbers from onnxruntime as from the numpy runtime, for every kind."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

import amips
from amips.cli import cli
from amips.nets import AffineArchitecture, AffineNet, Architecture, load_model, onnx_export, to_onnx
from reference import architecture, queries, random_net

D, C = 12, 7

AFFINE = {
    "linear": {},
    "bias": {"bias": True},
    "rank": {"rank": 5},
    "rank and bias": {"rank": 5, "bias": True},
    "pieces": {"pieces": 3, "kind": "max-affine"},
    "pieces and rank": {"pieces": 3, "rank": 5, "kind": "max-affine"},
    "pieces, rank and bias": {"pieces": 2, "rank": 5, "bias": True, "kind": "max-affine"},
}
DEEP = {
    "plain": {"injected": ()},
    "injected": {"injected": (1, 2)},
    "sparse": {"injected": (2,)},
    "residual": {"residual": True},
    "one cell": {"c": 1},
    "one layer": {"depth": 1, "injected": ()},
    "leaky relu": {"beta": math.inf},
    "sharp": {"beta": 200.0, "alpha": 0.0},
    "no activation": {"alpha": 1.0},
}
RELU = {
    "relu": {"homogeneous": "relu"},
    "relu residual": {"homogeneous": "relu", "residual": True, "injected": (1,)},
}


def affine(d=D, c=C, pieces=1, bias=False, rank=0, kind="linear"):
    rng = np.random.default_rng([c, pieces, rank])
    a = AffineArchitecture(d, c, pieces, bias, kind, rank)
    weights = {"W": rng.standard_normal((c * pieces, a.inner), np.float32)}
    weights |= {"b": rng.standard_normal(c * pieces, np.float32)} if bias else {}
    weights |= {"A": rng.standard_normal((rank, d), np.float32)} if rank else {}
    return AffineNet(a, weights, {"keys": "0123", "cells": "4567"})


def models():
    cases = {f"affine, {name}": affine(**more) for name, more in AFFINE.items()}
    for kind, shapes in (("support", DEEP | RELU), ("key", DEEP)):
        for name, more in shapes.items():
            cases[f"{kind}, {name}"] = random_net(architecture(kind, D, **more), seed=len(name))
    return cases


MODELS = models()


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return MODELS[request.param]


def run(path, x):
    """Everything that onnxruntime gives for queries x, by name."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"queries": x}), strict=True))


class TestParity:
    @pytest.mark.parametrize("m", [1, 2, 33])
    def test_scores_and_keys(self, model, tmp_path, m):
        x = queries(m, D, seed=m)
        out = run(to_onnx(model, tmp_path / "model.onnx"), x)
        want = {"scores": model.scores(x)}
        if model.architecture.kind == "key":
            want["keys"] = model.keys(x)
        assert out.keys() == want.keys()
        for name, values in want.items():
            assert out[name].dtype == np.float32
            assert out[name].shape == values.shape
            np.testing.assert_allclose(out[name], values, rtol=1e-4, atol=1e-5 * np.abs(values).max())

    def test_queries_of_any_length(self, model, tmp_path):
        """0, and so long that their squares overflow float32."""
        x = queries(3, D) * np.float32([[0], [1e25], [1e-12]])
        out = run(to_onnx(model, tmp_path / "model.onnx"), x)["scores"]
        want = model.scores(x)
        for row in range(3):
            np.testing.assert_allclose(
                out[row], want[row], rtol=1e-4, atol=1e-5 * float(np.abs(want[row]).max()) + 1e-30
            )

    def test_a_trained_model(self, task, tmp_path):
        trained = amips.train(task, samples=2048, batch=256, out=tmp_path / "run")
        x = np.asarray(task.val.queries)
        out = run(to_onnx(load_model(tmp_path / "run"), tmp_path / "model.onnx"), x)["scores"]
        np.testing.assert_allclose(out, trained.scores(x), rtol=1e-4, atol=1e-5)


class TestFile:
    def test_it_says_what_it_is(self, model, tmp_path):
        file = onnx.load(to_onnx(model, tmp_path / "model.onnx"))
        onnx.checker.check_model(file, full_check=True)
        known = {prop.key: prop.value for prop in file.metadata_props}
        described = json.loads(known["architecture"])
        kind = AffineArchitecture if isinstance(model, AffineNet) else Architecture
        assert kind.from_json(described) == model.architecture
        assert ("keys" in known) == isinstance(model, AffineNet)  # where the model knows of them
        assert file.producer_name == "amips"

    def test_what_cannot_be_exported(self, tmp_path):
        with pytest.raises(amips.RunError, match="a SimpleNamespace cannot be exported"):
            to_onnx(SimpleNamespace(scores=None), tmp_path / "model.onnx")

    def test_nowhere_to_write(self, tmp_path):
        with pytest.raises(amips.RunError, match="none is not a directory"):
            to_onnx(affine(), tmp_path / "none" / "model.onnx")

    def test_too_large(self, tmp_path, monkeypatch):
        monkeypatch.setattr(onnx_export, "LARGEST", 100)
        with pytest.raises(amips.RunError, match="larger than 2 GB"):
            to_onnx(affine(), tmp_path / "model.onnx")

    def test_without_the_extra(self, tmp_path):
        affine().save(tmp_path / "run")
        code = (
            "import sys; sys.modules['onnx'] = None\n"
            f"sys.argv = {['amips', 'export', str(tmp_path / 'run'), '--out', str(tmp_path / 'x.onnx')]!r}\n"
            "from amips.cli import main\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr == "error: an export to ONNX needs onnx; pip install 'amips[onnx]'\n"


class TestCommand:
    def test_export(self, tmp_path):
        keynet = MODELS["key, injected"]
        keynet.save(tmp_path / "run")
        words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.onnx")]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert f"queries [m, {D}] to scores [m, {keynet.c}] and keys" in done.output
        x = queries(4, D)
        np.testing.assert_allclose(
            run(tmp_path / "model.onnx", x)["scores"], keynet.scores(x), rtol=1e-4, atol=1e-5
        )

    def test_not_a_run(self, tmp_path):
        words = ["export", str(tmp_path), "--out", str(tmp_path / "model.onnx")]
        with pytest.raises(amips.RunError, match=r"model.json does not exist"):
            CliRunner().invoke(cli, words, catch_exceptions=False)
