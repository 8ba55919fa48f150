"""An index that walks a graph, as a user holds it: the recall asked for, what may be asked, what it costs."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips import exact, native
from amips.design import Design
from amips.graph import Graph
from amips.index import GraphStore
from amips.lean import learn_projection
from amips.search import GraphSearcher, measure_margins, recalls
from amips.vectors import open_vectors
from helpers import generate, make_world

N, D, FRESH = 3000, 32, 1000
STORAGES = ("flat", "sq8", "lean")


@pytest.fixture(scope="module")
def data():
    """Keys, a log, fresh queries and the exact top 50 of those."""
    keys, queries = generate(N, 3000 + FRESH, D)
    return keys, queries[:3000], queries[3000:], exact.top_k(keys, queries[3000:], 50)[1]


@pytest.fixture(scope="module")
def task(data):
    return amips.label(data[0], data[1], k=16)


@pytest.fixture(scope="module")
def indexes(task):
    """One of each storage, made for recall 0.9."""
    built = {
        storage: amips.build(task, structure="graph", storage=storage, recall=0.9) for storage in STORAGES
    }
    return {**built, None: amips.build(task, structure="graph")}


def refused(call, *words):
    """One line of AmipsError with these words."""
    with pytest.raises(amips.AmipsError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    return text


def test_build_makes_a_graph_of_keys_and_log(indexes):
    index = indexes[None]
    assert isinstance(index.snapshot, GraphSearcher)
    assert index.design.structure == "graph"
    assert index.design.learned
    assert (index.design.storage, index.store.storage) == ("lean", "lean")
    assert "graph of degree 32 from keys and log" in repr(index)
    assert index.target_recall == 0.95


def test_a_structure_that_is_not_that_of_the_design(task):
    refused(lambda: amips.build(task, design=Design.graph(), structure="cells"), "structure")
    refused(lambda: Design.graph(entries=0), "entries=0")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        *(
            ({"storage": "pq"}, "storage"),
            ({"spill_fraction": 0.5}, "spill_fraction"),
            ({"stop": "mass"}, "stop"),
        ),
        *(({"second_cells": "cells"}, "second_cells"), ({"dimensions": D + 1}, "dimensions")),
        *(
            ({"design": Design.graph(), "second_cells": "cells"}, "second_cells"),
            ({"structure": "tree"}, "tree"),
        ),
        ({"design": Design.plain(8)}, "structure"),
    ],
    ids=["pq", "spill", "stop", "second", "dimensions", "design and second", "tree", "cells"],
)
def test_what_a_graph_has_not(task, options, word):
    if "second_cells" in options:
        options = {**options, "second_cells": (task.cells.assignment + 1) % task.c}
    refused(lambda: amips.build(task, **{"structure": "graph", **options}), word)


# Recall


@pytest.mark.parametrize("storage", [*STORAGES, None])
def test_what_it_was_made_for_is_kept_on_fresh_queries(indexes, data, storage):
    index = indexes[storage]
    kept = recalls(index.search(data[2])[1], data[3], 10).mean()
    assert index.target_recall - 0.01 < kept < 0.999
    assert index.cost(data[2]).flops.mean() < 0.6 * 2 * N * D


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("target", [0.8, 0.9, 0.99])
def test_the_recall_asked_for_is_kept(indexes, data, storage, target):
    for k in (1, 3, 10):
        kept = recalls(indexes[storage].search(data[2], k, recall=target)[1], data[3], k).mean()
        assert kept > target - 0.015, (k, kept)
    cheap, dear = (indexes[storage].cost(data[2], recall=recall).flops.mean() for recall in (0.8, 0.99))
    assert cheap < dear


@pytest.mark.parametrize("storage", STORAGES)
def test_all_of_it_is_exact(indexes, data, storage):
    index = indexes[storage]
    scores, ids = index.search(data[2], 10, recall=1.0)
    best, true = exact.top_k(data[0], data[2], 10)
    np.testing.assert_array_equal(ids, true)
    np.testing.assert_allclose(scores, best, atol=1e-6)
    cost = index.cost(data[2][:20], recall=1.0)
    assert (cost.scanned == N).all()
    assert (cost.flops == 2 * N * D).all()


def test_more_results_than_recall_is_known_of(indexes, data):
    index = indexes["lean"]
    with pytest.warns(UserWarning, match="recall is known of the top 10: of the top 50") as caught:
        ids = index.search(data[2], 50)[1]
    assert recalls(ids, data[3], 50).mean() > 0.85
    assert "margin" in str(caught[0].message)  # what else there is to ask for
    scores, ids = index.search(data[2][:50], 50, margin=0.3)
    assert recalls(ids, data[3][:50], 50).mean() > 0.95
    true = np.einsum("mkd,md->mk", data[0][ids], data[2][:50])
    np.testing.assert_allclose(scores, true, atol=1e-5)


def test_more_results_than_there_are_keys(indexes, data):
    scores, ids = indexes["lean"].search(data[2][:3], N + 5, margin=0.1)
    np.testing.assert_array_equal(np.sort(ids[:, :N]), np.tile(np.arange(N), (3, 1)))
    assert (ids[:, N:] == -1).all()
    assert np.isneginf(scores[:, N:]).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_larger_margin_finds_more(indexes, data, storage):
    index, reached, flops = indexes[storage], [], []
    for margin in (0, 0.05, 0.1, 0.2):
        reached.append(recalls(index.search(data[2], margin=margin)[1], data[3], 10).mean())
        flops.append(index.cost(data[2], margin=margin).flops.mean())
    assert (np.diff(reached) > 0).all()
    assert (np.diff(flops) > 0).all()
    assert reached[-1] > 0.95


def test_the_log_pays(data, task):
    """At equal FLOPs, the recall of the learned graph is that of the plain one or more."""
    known = amips.label(data[0], data[2], cells=1, val=FRESH - 2, test=1).val  # fresh queries with their top
    curves = []
    for learned in (True, False):
        index = amips.build(task, design=Design.graph(learned=learned, storage="sq8", degree=12))
        points = measure_margins(index, known)
        flops, recall = (np.array([getattr(p, name) for p in points]) for name in ("flops", "recall10"))
        curves.append((flops, recall))
    grid = np.geomspace(max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves), 20)
    learned, plain = (np.interp(np.log(grid), np.log(flops), recall) for flops, recall in curves)
    assert (learned > plain - 0.003).all(), learned - plain
    assert learned[0] > plain[0] + 0.01, learned - plain


def test_a_log_that_is_too_short_is_left_out(data):
    short = amips.label(data[0][:800], data[1][:700], cells=1)
    assert len(short.train) < 640
    index, plain = (amips.build(short, design=Design.graph(learned=learned)) for learned in (True, False))
    assert index.design == plain.design
    assert "from keys alone" in index.design.describe()
    np.testing.assert_array_equal(index.store.neighbours, plain.store.neighbours)
    np.testing.assert_array_equal(index.store.codes, plain.store.codes)
    np.testing.assert_array_equal(index.store.entries, plain.store.entries)


# What is asked


@pytest.mark.parametrize("effort", [{"probes": 3}, {"min_mass": 0.1}, {"probes": 3, "margin": 0.1}])
def test_what_only_cells_have(indexes, data, effort):
    for call in (indexes["lean"].search, indexes["lean"].cost):
        refused(lambda call=call: call(data[2][:3], **effort), "recall", "margin", "graph")
    refused(lambda: indexes["lean"].search(data[2][0], **effort), "recall", "margin")


def test_one_effort_at_a_time(indexes, data):
    refused(lambda: indexes["lean"].search(data[2][:3], recall=0.9, margin=0.1), "recall", "margin")
    for wrong in (-0.1, np.nan, np.inf, "0.1", True, [0.1]):
        text = refused(lambda wrong=wrong: indexes["lean"].search(data[2][:3], margin=wrong), "margin=")
        assert ",," not in text
    for wrong in (0, 1.5, "all"):
        refused(lambda wrong=wrong: indexes["lean"].search(data[2][:3], recall=wrong), "recall=")
    bare = replace(indexes["lean"].snapshot, points=[], target_recall=None)
    refused(lambda: bare.search(data[2][:3]), "margin")
    assert "probes" not in refused(lambda: bare.search(data[2][:3], recall=0.9))
    assert bare.search(data[2][:3], margin=0.1)[1].shape == (3, 10)


@pytest.mark.parametrize(
    "labels", [np.arange(N) * 7 - 10**12, [f"§{i}" for i in range(N)]], ids=["int", "str"]
)
def test_ids_of_the_user(task, indexes, data, labels):
    index = amips.build(task, structure="graph", recall=0.9, ids=labels)
    want = indexes["lean"].search(data[2][:50])[1]
    for x in (data[2][:50], 3 * data[2][:50]):
        np.testing.assert_array_equal(index.search(x)[1], np.asarray(labels)[want])
    np.testing.assert_array_equal(index.search(data[2][0])[1], np.asarray(labels)[want[:1]])
    nothing = -1 if np.asarray(labels).dtype.kind == "i" else ""
    assert (index.search(np.full((2, D), np.nan), on_bad="skip")[1] == nothing).all()


def test_queries_that_are_not_finite(indexes, data):
    index, x = indexes["lean"], data[2][:6].copy()
    x[2, 5], x[4, 0] = np.nan, np.inf
    refused(lambda: index.search(x), "query 2 is not finite", "on_bad")
    for bad in (x[2], np.full(D, 1e300), np.full((1, D), -np.inf), np.full(D, np.nan).tolist()):
        refused(lambda bad=bad: index.search(bad), "query 0 is not finite")
    scores, ids = index.search(x, on_bad="skip")
    assert (ids[[2, 4]] == -1).all()
    assert np.isneginf(scores[[2, 4]]).all()
    good = [0, 1, 3, 5]
    np.testing.assert_array_equal(ids[good], index.search(data[2][good])[1])
    for x in (data[2][:2], data[2][0]):
        refused(lambda x=x: index.search(x, on_bad="ignore"), "on_bad")


def test_a_few_queries_have_the_answers_of_each_alone(indexes, data, monkeypatch):
    """Without what is done for many, whatever their norms."""
    x = (data[2][:20] * 3.0 ** (np.arange(20) % 7 - 3)[:, None]).astype(np.float32)
    monkeypatch.setattr(GraphSearcher, "search_with", None)
    for storage in STORAGES:
        index = indexes[storage]
        each = [index.search(row) for row in x]
        scores, ids = index.search(x, threads=1)
        np.testing.assert_array_equal(ids, np.concatenate([one[1] for one in each]))
        np.testing.assert_array_equal(scores, np.concatenate([one[0] for one in each]))


def test_queries_of_any_form(indexes, data):
    index, x = indexes["lean"], data[2][:4]
    scores, ids = index.search(x)
    np.testing.assert_array_equal(index.search(x.astype(np.float64))[1], ids)
    np.testing.assert_array_equal(index.search(x.tolist())[1], ids)
    np.testing.assert_array_equal(index.search(np.asfortranarray(x))[1], ids)
    np.testing.assert_array_equal(np.concatenate([index.search(row)[1] for row in x]), ids)
    assert index.search(x[:0])[1].shape == (0, 10)
    np.testing.assert_array_equal(index.search(np.float32(1e-30) * x)[1], ids)
    more, same = index.search(np.ldexp(x, 100))
    np.testing.assert_array_equal(same, ids)
    np.testing.assert_array_equal(more, np.ldexp(scores, 100))
    for wrong in (x[:, :5], x[0][:, None], x[None], "words", x[0, 0]):
        refused(lambda wrong=wrong: index.search(wrong), f"[m, {D}]")
    for k in (0, -1, 2.5, "3"):
        refused(lambda k=k: index.search(x, k), "k=")
    for threads in (1, 3):
        np.testing.assert_array_equal(index.search(data[2], threads=threads)[1], index.search(data[2])[1])
    for threads in (0, -1, "two", 2.5):
        refused(lambda threads=threads: index.search(data[2], threads=threads), "threads")


# Cost

CHAIN = 40  # keys on an arc, each with the two beside it as neighbours; a walk begins at the best


def chain(storage):
    angles = np.linspace(0, 1.5, CHAIN)
    keys = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    neighbours = np.stack([np.arange(CHAIN) - 1, np.arange(CHAIN) + 1], axis=1).astype(np.int32)
    neighbours[0], neighbours[-1] = [1, -1], [CHAIN - 2, -1]
    vectors = open_vectors(keys)
    projection = learn_projection(vectors, vectors, 2) if storage == "lean" else None
    return GraphSearcher(GraphStore.build(vectors, Graph(neighbours, np.int32([0])), storage, projection))


@pytest.mark.parametrize(("storage", "flops"), [("flat", 80), ("sq8", 80 + 40), ("lean", 16 + 160 + 40)])
def test_cost_by_hand(storage, flops):
    """Keys 0 to 9 are visited: then ten are known, and key 10, which 9 leads to, is worse than the tenth.

    The entry, one neighbour of key 0 and two of each of the others are scored: 20 keys of two values, or four
    of lean codes. Codes have ten keys scored again, and lean ones the query multiplied by a matrix of 4 x 2.
    """
    cost = chain(storage).cost(np.float32([[1, 0]]), margin=0.0)
    assert cost.probed.tolist() == [10]
    assert cost.scanned.tolist() == [20]
    assert cost.flops.tolist() == [flops]


def test_cost_is_counted_from_shapes(task, data):
    index = amips.build(task, design=Design.graph(storage="lean", dimensions=16, degree=8))
    x = data[2][:100]
    counts = index.store.search(x, 10, 0.1)[2]
    cost = index.cost(x, margin=0.1)
    np.testing.assert_array_equal(cost.probed, counts[:, 0])
    np.testing.assert_array_equal(cost.scanned, counts[:, 1])
    np.testing.assert_array_equal(cost.flops, 2 * 16 * D + 2 * 16 * counts[:, 1] + 2 * D * counts[:, 2])
    assert (counts[:, 1] <= 64 + 8 * counts[:, 0]).all()
    for point in index.points[:-1]:
        assert point.probes < N
        assert point.margin > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_where_every_key_is_scored_that_is_what_it_costs(indexes, data, storage):
    """More than a fourth of the keys: no walk would be shorter."""
    cost = indexes[storage].cost(data[2][:5], N // 2, margin=0.1)
    assert (cost.scanned == N).all()
    assert (cost.flops == 2 * N * D).all()


# Without compiled code

SCRIPT = """
import sys, numpy as np, amips
from amips import native
assert native.compiled is None
folder = sys.argv[1]
keys, log, x = (np.load(f"{folder}/{name}.npy") for name in ("keys", "log", "x"))
task = amips.label(keys, log, cells=1, val=40, test=10)
for storage in ("flat", "sq8", "lean"):
    amips.build(task, structure="graph", storage=storage, recall=0.8, out=f"{folder}/{storage}")
    for name in ("", "-compiled"):
        index = amips.load(f"{folder}/{storage}{name}")
        np.save(f"{folder}/{storage}{name}-ids.npy", index.search(x, margin=0.1)[1])
"""


@pytest.mark.skipif(native.compiled is None, reason="not compiled")
def test_without_compiled_code(tmp_path):
    """AMIPS_NATIVE=0 builds, saves, loads and searches: nearly the same ids, each of what the other saved."""
    keys, queries = make_world(400, 800, 16, seed=5)
    log, x = queries[:750], queries[750:]
    for name, array in (("keys", keys), ("log", log), ("x", x)):
        np.save(tmp_path / f"{name}.npy", array)
    task, ids = amips.label(keys, log, cells=1, val=40, test=10), {}
    for storage in STORAGES:
        out = tmp_path / f"{storage}-compiled"
        index = amips.build(task, structure="graph", storage=storage, recall=0.8, out=out)
        ids[storage] = index.search(x, margin=0.1)[1]
    environment = {**os.environ, "AMIPS_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, check=True, timeout=120)
    for storage in STORAGES:
        for name in (storage, f"{storage}-compiled"):
            assert (np.load(tmp_path / f"{name}-ids.npy") == ids[storage]).mean() > 0.98, name
            assert (amips.load(tmp_path / name).search(x, margin=0.1)[1] == ids[storage]).mean() > 0.98, name
