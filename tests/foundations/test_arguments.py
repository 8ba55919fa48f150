"""Arguments of the public functions: what is of a wrong type is refused in one line, before any work."""

import inspect
import json
import math
from dataclasses import asdict, fields

import numpy as np
import pytest

import amips
from amips import Design, KeyNet, Linear, MaxAffine, Recipe, SupportNet
from amips.arguments import check_choice, check_flag, check_number, check_path, check_recall, check_whole

faiss = pytest.importorskip("faiss")

WRONG = [object(), "x\ny", 2.5, True, b"\xff", [1, [2]], {"a": 1}, math.nan, -1, np.zeros((2, 2, 2)), 1j]
# The arguments that take some of what is wrong elsewhere.
FLAGS = {"spherical", "cell_targets", "progress", "resume", "quiet", "mmap", "verify", "keep_log", "watch"}
FLAGS |= {"residual", "mapper", "bias", "smooth", "decay_warmup", "keep_best", "compile", "tensorboard"}
NUMBERS = {"query_aware", "noise", "minutes", "beta"}
NUMBERS |= {field.name for field in fields(Recipe) if type(field.default) is float} - {
    "warmup",
    "decay",
    "listwise",
}
FREE = {("train", "out"), ("label", "out"), ("build", "out"), ("fit", "out")}  # a name like any other


@pytest.fixture(scope="module")
def ivf(world):
    """A small FAISS index of the task's keys."""
    index = faiss.index_factory(16, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(world[0])
    index.add(world[0])
    return index


@pytest.fixture(scope="module")
def calls(world, task, ivf, tmp_path_factory):
    """A right call of every public function and class, as (function, arguments)."""
    keys, queries = world
    bundle = tmp_path_factory.mktemp("bundle") / "b"
    amips.build(task, storage="flat", spill_fraction=0, out=bundle)
    return {
        "fit": (amips.fit, {"keys": keys, "queries": queries, "cells": 8, "minutes": 0.001, "quiet": True}),
        "label": (amips.label, {"keys": keys, "queries": queries, "cells": 8}),
        "train": (amips.train, {"task": task, "samples": 64, "batch": 64}),
        "build": (amips.build, {"task": task}),
        "load": (amips.load, {"path": bundle}),
        "wrap": (amips.wrap, {"index": ivf, "model": None, "task": task}),
        **{kind.__name__: (kind, {}) for kind in (Linear, MaxAffine, SupportNet, KeyNet, Recipe)},
        "Design": (Design, {"cells": 8}),
    }


def parameters():
    for function in (amips.fit, amips.label, amips.train, amips.build, amips.load, amips.wrap):
        for name in inspect.signature(function).parameters:
            yield function.__name__, name
    for kind in (Linear, MaxAffine, SupportNet, KeyNet, Recipe, Design):
        yield from ((kind.__name__, field.name) for field in fields(kind) if field.init)


def is_right(function, name, value):
    """Whether a value of `WRONG` is one that this argument takes."""
    if isinstance(value, bool):
        return name in FLAGS
    if isinstance(value, float) and value == 2.5:
        return name in NUMBERS
    return isinstance(value, str) and (function, name) in FREE


@pytest.mark.parametrize(("function", "name"), list(parameters()), ids=str)
def test_a_wrong_type_is_refused_in_one_line(calls, tmp_path, monkeypatch, function, name):
    monkeypatch.chdir(tmp_path)
    call, arguments = calls[function]
    for value in WRONG:
        if is_right(function, name, value):
            continue
        with pytest.raises(amips.AmipsError) as caught:
            call(**{**arguments, name: value})
        assert "\n" not in str(caught.value), value
        assert str(caught.value), value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Linear, MaxAffine, SupportNet, KeyNet])
@pytest.mark.parametrize("value", [*WRONG[1:6], [], None], ids=repr)
def test_a_design_file_with_a_wrong_type_anywhere(kind, value):
    """In every field of it, of its router and of its recipe."""
    right = json.loads(json.dumps(Design(8, router=kind()).to_json()))
    assert Design.from_json(right) == Design(8, router=kind())
    allowed_none = {"query_aware", "router", "recipe", "dimensions", "rank", "width"}
    for path in [(name,) for name in right] + [(p, n) for p in ("router", "recipe") for n in right[p]]:
        takes = value is None and path[-1] in allowed_none
        takes = takes and not (path[-1] == "recipe" and kind in (SupportNet, KeyNet))
        if takes or is_right("Design", path[-1], value) or path[-1] == "kind":
            continue
        wrong = json.loads(json.dumps(right))
        inner = wrong if len(path) == 1 else wrong[path[0]]
        inner[path[-1]] = value
        with pytest.raises(amips.AmipsError, match="not a design: ") as caught:
            Design.from_json(wrong)
        assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    recipe = Recipe(
        batch=np.int64(8), rate=np.float32(0.5), patience=np.uint8(3), decay_warmup=np.bool_(False)
    )
    design = Design(
        np.int32(8), np.float64(1), Linear(rank=np.int16(4)), recipe, spill_fraction=np.float32(0.5)
    )
    again = Design(8, 1.0, Linear(rank=4), Recipe(batch=8, rate=0.5, patience=3, decay_warmup=False))
    assert design == again
    assert design.fingerprint() == again.fingerprint()
    assert json.loads(json.dumps(asdict(recipe)))["patience"] == 3
    assert Design(8, 3).fingerprint() == Design(8, 3.0).fingerprint()
    assert KeyNet(size=np.float64(0.1), depth=np.int64(3), inject=np.int8(1)) == KeyNet(0.1, 3, 1)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_whole("k", 0, 1), "k=0: expected a whole number, at least 1"),
        (lambda: check_whole("k", 3.0, 1, 5), "k=3.0: expected a whole number from 1 to 5"),
        (lambda: check_whole("k", 9, most=5), "k=9: expected a whole number, at most 5"),
        (lambda: check_number("rate", "x", above=0), "rate='x': expected a number above 0"),
        (lambda: check_number("w", 1, least=0, below=1), "w=1: expected a number, at least 0 and below 1"),
        (lambda: check_number("w", 10**400), "w=1000.*: expected a number$"),
        (lambda: check_number("w", math.inf), "w=inf: expected a number"),
        (
            lambda: check_recall(1.01),
            "recall=1.01: expected a share of the true top keys, above 0 and up to 1",
        ),
        (lambda: check_flag("quiet", 1), "quiet=1: expected True or False"),
        (lambda: check_choice("stop", ["mass"], ("mass",)), r"stop=\['mass'\]: expected one of mass"),
        (lambda: check_path("out", 5), "out=5: expected a path"),
    ],
)
def test_what_is_said(check, message):
    with pytest.raises(amips.AmipsError, match=message) as caught:
        check()
    assert len(str(caught.value)) < 150
