"""A design is one value: JSON in and out, one line to print, refusals in one line."""

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import amips
from amips import Design, KeyNet, Linear, MaxAffine, Recipe, SupportNet
from amips.design import checked_fraction

OF_GRAPHS = ("structure", "degree")
ROUTERS = [
    None,
    "own",
    Linear(),
    Linear(rank=0),
    Linear(rank=128, bias=True),
    MaxAffine(pieces=3, smooth=False),
    SupportNet(size="S", depth=8, inject="every 4", beta=math.inf),
    SupportNet(homogeneous="relu"),
    KeyNet(size=0.02, width=64, mapper=True),
]


@settings(max_examples=200)
@given(
    cells=st.integers(1, 10**6),
    query_aware=st.one_of(st.none(), st.floats(0, 10)),
    router=st.sampled_from(ROUTERS),
    rate=st.floats(1e-6, 1),
    stop=st.sampled_from(["mass", "probes"]),
    spill_fraction=st.floats(0, 1),
    storage=st.sampled_from(["flat", "sq8", "pq", "lean"]),
    dimensions=st.one_of(st.none(), st.integers(1, 2000)),
)
def test_json_and_back(storage, dimensions, rate, **values):
    dimensions = dimensions if storage == "lean" else None
    design = Design(**values, recipe=Recipe(rate=rate), storage=storage, dimensions=dimensions)
    again = Design.from_json(json.loads(json.dumps(design.to_json(), allow_nan=False)))
    assert again == design
    assert again.fingerprint() == design.fingerprint()
    assert "\n" not in repr(design)


def test_what_an_index_is_made_of_is_in_one_line():
    design = Design(1265, router=Linear(rank=128), dimensions=160)
    assert repr(design) == (
        "Design(1,265 query-aware cells (strength 1.5); linear router of rank 128, trained; as many probes "
        "as each query needs; 50% of the keys in a second cell; lean storage in 160 dimensions)"
    )
    assert repr(Design.plain(316)) == (
        "Design(316 plain cells; centroids; the same probes for every query; flat storage)"
    )
    assert replace(design, recipe=None).router_name == "linear router of rank 128, untrained"
    assert (
        Design(4, None, KeyNet(width=8))
        .describe()
        .startswith("4 given cells; KeyNet width 8, depth 4, trained;")
    )


@pytest.mark.parametrize("name", [field.name for field in fields(Design) if field.name not in OF_GRAPHS])
def test_every_field_counts(name):
    """Two designs that differ in anything differ in repr, JSON and fingerprint."""
    design = Design(100, router=Linear(rank=16), dimensions=32)
    others = {
        "cells": 101,
        "query_aware": 3.0,
        "router": Linear(rank=32),
        "recipe": None,
        "stop": "probes",
        "spill_fraction": 0.25,
        "storage": "flat",
        "dimensions": 48,
        "memory": 64,
    }
    change = {name: others[name], **({"dimensions": None} if name == "storage" else {})}
    other = replace(design, **change)
    assert other != design
    assert other.to_json() != design.to_json()
    assert other.fingerprint() != design.fingerprint()
    assert repr(other) != repr(design)


@pytest.mark.parametrize("spec", [Linear(), MaxAffine(), SupportNet(), KeyNet(), Recipe()], ids=str)
def test_the_line_says_all_of_the_router_and_its_recipe(spec):
    """Whatever is changed of them, the line differs, and is one line still."""
    others = {"size": "S", "inject": 1, "width": 7, "rank": 3, "listwise": 0.5}
    others |= {"homogeneous": "relu", "nonnegative": "clip", "reduction": "mean"}

    def line(value):
        return repr(Design(100, **{"recipe" if isinstance(value, Recipe) else "router": value}))

    def changed(field):
        if field.name in others:
            return others[field.name]
        if isinstance(field.default, bool):
            return not field.default
        return field.default + 1 if isinstance(field.default, int) else field.default / 2 + 1e-3

    names = [field for field in fields(spec) if field.init]
    lines = {line(replace(spec, **{field.name: changed(field)})) for field in names}
    assert len(lines | {line(spec)}) == len(names) + 1
    assert not any("\n" in one for one in lines)


def test_what_is_cached_depends_on_what_it_is_made_of():
    design = Design(100, dimensions=32)
    other = replace(design, storage="flat", dimensions=None)
    assert design.fingerprint("cells", "query_aware") == other.fingerprint("cells", "query_aware")
    assert design.fingerprint() != other.fingerprint()


def test_plain_is_not_learned():
    assert not Design.plain(10).learned
    assert not Design.plain(10, "lean", 8).learned
    assert Design(10, 0.0, None, None, "mass", 0.0, "flat").learned  # its stopping rule comes from queries
    assert Design(10).learned


def test_numbers_that_follow_from_the_data():
    design = Design(100).resolved(384, 160)
    assert design.router == Linear(rank=96)
    assert design.dimensions == 160
    assert Design(100).resolved(12).router == Linear(rank=0)  # nothing to save
    assert design.resolved(384, 96) == design


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cells": 0}, "cells=0: expected a whole number, at least 1"),
        ({"cells": 2.5}, "cells=2.5"),
        ({"cells": True}, "cells=True"),
        ({"query_aware": -1.0}, "query_aware=-1.0: expected None for given cells, or a number, at least 0"),
        ({"query_aware": math.nan}, "query_aware=nan"),
        ({"query_aware": "x"}, "query_aware='x': expected None for given cells, or a number"),
        ({"recipe": "paper"}, "recipe='paper': expected a Recipe"),
        ({"storage": "zip"}, "storage='zip': expected one of flat, sq8, pq, lean"),
        ({"stop": "now"}, "stop='now': expected one of mass, probes"),
        ({"structure": "tree"}, "structure='tree': expected one of cells"),
        ({"router": "linear"}, "router='linear': expected Linear"),
        ({"router": SupportNet(), "recipe": None}, "nothing before it is trained"),
        ({"storage": "flat", "dimensions": 8}, "dimensions are for storage 'lean' only"),
        ({"dimensions": 0}, "dimensions=0"),
        ({"spill_fraction": 1.5}, "spill_fraction=1.5: expected a fraction of the keys"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(amips.AmipsError, match=message) as caught:
        Design(**{"cells": 10, **wrong})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"cells": 4, "colour": "red"},
        {"cells": 4, "router": {"kind": "oracle"}},
        {"cells": 4, "recipe": {"x": 1}},
    ],
)
def test_what_is_no_design_is_refused(values):
    with pytest.raises(amips.AmipsError):
        Design.from_json(values)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, "0.5", True, None, [0.5], math.nan])
def test_fractions(wrong):
    assert checked_fraction(0.5) == 0.5
    with pytest.raises(amips.AmipsError, match="expected a fraction"):
        checked_fraction(wrong)


class TestGraph:
    def test_json_one_line_and_fields_that_count(self):
        design = Design.graph(dimensions=192)
        assert Design.from_json(json.loads(json.dumps(design.to_json()))) == design
        assert repr(design) == (
            "Design(graph of degree 32 from keys and log; 64 entries; as far as each query needs; "
            "lean storage in 192 dimensions)"
        )
        others = [
            Design.graph(dimensions=160),
            Design.graph(degree=64, dimensions=192),
            Design.graph(entries=65, dimensions=192),
            Design.graph(learned=False, dimensions=192),
            Design.graph(storage="sq8"),
        ]
        assert len({repr(one) for one in [design, *others]}) == 6
        assert len({one.fingerprint() for one in [design, *others]}) == 6

    def test_learned_is_what_comes_from_queries(self):
        assert Design.graph().learned
        assert Design.graph(learned=False).learned  # the projection of lean storage
        assert not Design.graph(learned=False, storage="flat").learned

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"router": Linear()}, "a graph has no router"),
            ({"spill_fraction": 0.5}, "no second cells"),
            ({"stop": "mass"}, "stops by a margin"),
            ({"storage": "pq", "dimensions": None}, "storage="),
            ({"degree": 0}, "degree=0"),
            ({"degree": 5000}, "degree=5000"),
            ({"query_aware": 1.5}, "query_aware=1.5: expected 1 or 0 for a graph"),
            ({"structure": "cells"}, "are for structure 'graph' only"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, change, words):
        with pytest.raises(amips.AmipsError) as caught:
            replace(Design.graph(dimensions=8), **change)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_memory_is_part_of_a_design():
    plain = Design.graph(dimensions=16)
    remembering = replace(plain, memory=64)
    assert Design.from_json(json.loads(json.dumps(remembering.to_json()))) == remembering
    assert remembering.describe() == f"{plain.describe()}; a memory of the log with 64 top keys a query"
    assert remembering.fingerprint() != plain.fingerprint()
    assert remembering.part("graph") == plain.part("graph")  # the graph behind it is the same
    assert replace(Design.graph(learned=False, storage="flat"), memory=1).learned
    assert replace(Design.plain(8), memory=1).learned
    old = {name: value for name, value in plain.to_json().items() if name != "memory"}
    assert Design.from_json(old) == plain  # of a bundle from before there was one
    for wrong in (-1, 1.5, "64", 5000, None):
        with pytest.raises(amips.AmipsError, match="memory="):
            replace(plain, memory=wrong)
