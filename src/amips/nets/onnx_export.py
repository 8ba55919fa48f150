"""Trained models as ONNX files, built from their weights: neither torch nor a trace is needed.

The input is `queries` [m, d] float32, for any m. The output is `scores` [m, c] and, of a KeyNet, also `keys`
[m, c, d]: the same numbers as `model.scores(x)` and `model.keys(x)`. A SupportNet's keys are gradients of its
scores, which ONNX has no operator for; they are left out.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from amips.errors import RunError
from amips.extras import needs_extra
from amips.files import check_output_file, write_atomic
from amips.nets.affine import AffineNet
from amips.nets.model import Floats, Model
from amips.nets.runtime import Net
from amips.version import __version__

QUERIES, SCORES, KEYS = "queries", "scores", "keys"
OPSET, IR = 18, 8  # read by onnxruntime since 1.14
LARGEST = 2_000_000_000  # bytes: a protobuf message ends at 2 GiB


def to_onnx(model: Model, path: str | Path) -> Path:
    """Write a model as one ONNX file, see above, with its architecture in the metadata; returns the path."""
    if not isinstance(model, AffineNet | Net):
        raise RunError(f"a {type(model).__name__} cannot be exported: only models that amips trained can")
    if sum(weights.nbytes for weights in model.weights.values()) > LARGEST:
        raise RunError("this model is larger than 2 GB, which is more than one ONNX file can be")
    path = check_output_file(path, RunError)
    with needs_extra("an export to ONNX", "onnx", "onnx"):
        graph = _Graph()
    outputs = _affine(graph, model) if isinstance(model, AffineNet) else _deep(graph, model)
    write_atomic(path, graph.serialized(model, outputs))
    return path


class _Graph:
    """Nodes and weights, added one after the other."""

    def __init__(self) -> None:
        import onnx

        self.onnx = onnx
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def constant(self, value: Any, kind: Any = np.float32) -> str:
        """The name of a constant."""
        name = f"constant_{len(self.weights)}"
        array = np.ascontiguousarray(np.asarray(value, kind))
        self.weights.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """The name of the result of an operator."""
        output = output or f"value_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def norms(self) -> str:
        """||x|| as a column; in float64, because the squares of a long x overflow float32 before x does."""
        double, single = self.onnx.TensorProto.DOUBLE, self.onnx.TensorProto.FLOAT
        square = self.add(
            "ReduceL2", self.add("Cast", QUERIES, to=double), self.constant([1], np.int64), keepdims=1
        )
        return self.add("Cast", square, to=single)

    def serialized(self, model: Model, outputs: dict[str, list[Any]]) -> bytes:
        """The checked file."""
        helper, single = self.onnx.helper, self.onnx.TensorProto.FLOAT
        shapes = {name: helper.make_tensor_value_info(name, single, shape) for name, shape in outputs.items()}
        inputs = [helper.make_tensor_value_info(QUERIES, single, ["m", model.d])]
        graph = helper.make_graph(self.nodes, "amips", inputs, list(shapes.values()), self.weights)
        file = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR,
            producer_name="amips",
            producer_version=__version__,
        )
        known: dict[str, str] = {
            name: str(model.about[name]) for name in ("keys", "cells") if name in model.about
        }
        known["architecture"] = json.dumps(model.architecture.to_json())
        helper.set_model_props(file, known)
        self.onnx.checker.check_model(file, full_check=True)
        data: bytes = file.SerializeToString()
        return data


def _affine(graph: _Graph, model: AffineNet) -> dict[str, list[Any]]:
    """max_p <w_jp, A x> (+ b_jp ||x||)."""
    a, weights = model.architecture, model.weights
    inner = graph.add("MatMul", QUERIES, graph.constant(weights["A"].T)) if a.rank else QUERIES
    steps: list[tuple[str, list[str], dict[str, Any]]] = [("MatMul", [graph.constant(weights["W"].T)], {})]
    if a.bias:
        steps.append(("Add", [graph.add("Mul", graph.norms(), graph.constant(weights["b"]))], {}))
    if a.pieces > 1:
        steps.append(("Reshape", [graph.constant([-1, a.c, a.pieces], np.int64)], {}))
        steps.append(("ReduceMax", [graph.constant([2], np.int64)], {"keepdims": 0}))
    value = inner
    for place, (operator, others, attributes) in enumerate(steps, start=1):
        value = graph.add(
            operator, value, *others, output=SCORES if place == len(steps) else "", **attributes
        )
    return {SCORES: ["m", a.c]}


def _deep(graph: _Graph, model: Net) -> dict[str, list[Any]]:
    """The layers of a SupportNet or a KeyNet."""
    a, weights = model.architecture, model.weights
    wrapped = a.kind == "key" or a.homogeneous == "wrapper"
    u, norms = QUERIES, graph.norms()
    if wrapped:
        one, zero = graph.constant(1.0), graph.constant(0.0)
        u = graph.add("Div", QUERIES, graph.add("Where", graph.add("Greater", norms, zero), norms, one))
    z = ""
    for i in range(a.depth):
        pre = _linear(graph, z or u, weights[f"Wz.{i}" if z else "Wx.0"], weights.get(f"b.{i}"))
        if i in a.injected:
            pre = graph.add("Add", pre, graph.add("MatMul", u, graph.constant(weights[f"Wx.{i}"].T)))
        activated = _activation(graph, pre, a.alpha, a.beta)
        z = graph.add("Add", activated, z) if a.residual and z else activated
    out = _linear(graph, z, weights["W"], weights.get("b"))
    if a.kind == "support":
        graph.add(*(("Mul", out, norms) if wrapped else ("Identity", out)), output=SCORES)
        return {SCORES: ["m", a.c]}
    keys = graph.add("Reshape", out, graph.constant([-1, a.c, a.d], np.int64), output=KEYS)
    column = graph.add("Unsqueeze", QUERIES, graph.constant([2], np.int64))
    graph.add("Squeeze", graph.add("MatMul", keys, column), graph.constant([2], np.int64), output=SCORES)
    return {SCORES: ["m", a.c], KEYS: ["m", a.c, a.d]}


def _linear(graph: _Graph, value: str, W: Floats, b: Floats | None) -> str:
    bias = [] if b is None else [graph.constant(b)]
    return graph.add("Gemm", value, graph.constant(W), *bias, transB=1)


def _activation(graph: _Graph, x: str, alpha: float, beta: float) -> str:
    """alpha x + (1 - alpha) / beta log(1 + exp(beta x)); beta = inf is the leaky ReLU."""
    if math.isinf(beta):
        return graph.add("LeakyRelu", x, alpha=float(alpha))
    soft = graph.add("Softplus", graph.add("Mul", x, graph.constant(beta)))
    scaled = graph.add("Mul", soft, graph.constant((1 - alpha) / beta))
    return graph.add("Add", scaled, graph.add("Mul", x, graph.constant(alpha)))
