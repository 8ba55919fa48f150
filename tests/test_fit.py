"""`amips.fit`: keys and queries in, a bundle out, in one call."""

import subprocess
import sys

import numpy as np
import pytest

import amips
from amips import learn
from amips.fit import cost_at
from amips.nets import AffineArchitecture, AffineNet
from amips.search import recalls
from conftest import make_world

MINUTES = 0.02
CELLS = 24


@pytest.fixture(scope="module")
def data():
    """2,000 keys, 1,500 queries to fit and 500 fresh ones."""
    keys, queries = make_world(2000, 2000, 16, seed=8)
    return keys, queries[:1500], queries[1500:]


@pytest.fixture(scope="module")
def fitted(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "bundle"
    return amips.fit(data[0], data[1], minutes=MINUTES, cells=CELLS, out=out, quiet=True), out


@pytest.fixture
def fast(monkeypatch):
    """Instead of training: a good router at once, or the one that is set here."""
    calls = []

    def train(task, network, **options):
        calls.append(options)
        weights = {"W": train.weights(task)}
        about = {"keys": task.fingerprint, "samples": 1, "seconds": 0.0}
        return AffineNet(AffineArchitecture(task.d, task.c), weights, about)

    train.weights = lambda task: np.array(task.cells.centroids)
    train.calls = calls
    monkeypatch.setattr(learn, "train", train)
    return train


def exact_top(keys, x, k=10):
    return np.argsort(-(x @ keys.T), axis=1)[:, :k]


def test_the_bundle_is_what_was_returned(fitted, data):
    searcher, out = fitted
    loaded = amips.load(out, keys=data[0])
    assert loaded.points == searcher.points
    assert loaded.c == CELLS
    assert loaded.router.name in ("linear", "centroid")
    expected, got = searcher.search(data[2], probes=3), loaded.search(data[2], probes=3)
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_allclose(got[0], expected[0], atol=1e-6)
    assert sorted(p.name for p in out.parent.iterdir()) == ["bundle"]  # the work is cleaned up


@pytest.mark.parametrize("target", [0.8, 0.9, 0.95])
def test_the_recall_asked_for_is_had_on_fresh_queries(fitted, data, target):
    keys, _, fresh = data
    ids = fitted[0].search(fresh, recall=target)[1]
    got = recalls(ids, exact_top(keys, fresh), 10).mean()
    stated = next(p.recall10 for p in fitted[0].points if p.recall10 >= target)
    assert abs(got - stated) < 0.04  # 300 and 500 queries


def test_it_learns_something(fitted, data):
    """These queries come from elsewhere than the keys, so the centroids can be beaten."""
    keys, _, fresh = data
    searcher = fitted[0]
    assert searcher.model is not None
    true = exact_top(keys, fresh)
    plain = searcher.with_model(None)
    learned, centroid = (recalls(s.search(fresh, probes=2)[1], true, 10).mean() for s in (searcher, plain))
    assert learned > centroid


def test_it_prints_what_was_gained(fast, data, tmp_path, capsys):
    found = amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b")
    text = capsys.readouterr().out
    for word in (
        "2,000 keys",
        "1,500 queries",
        "24 cells",
        "recall@10",
        "centroid",
        "learned",
        "fewer FLOPs",
        "0.95",
    ):
        assert word in text
    assert f"saved {tmp_path / 'b'}" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("0.")]
    assert [row[0] for row in rows] == ["0.80", "0.90", "0.95", "0.99"]
    # What it says is what the bundle has: the cost of the points, as a share of scanning all keys.
    for row in rows:
        point = cost_at(found.points, float(row[0]))
        assert row[2] == f"{point.flops / (2 * found.n * found.d):.2%}"
        assert row[4] == f"{point.scanned:.2%}"


def test_quiet_prints_nothing(fast, data, tmp_path, capfd):
    amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b", quiet=True)
    assert capfd.readouterr() == ("", "")


def test_when_learning_does_not_pay_it_says_so_and_routes_by_centroid(fast, data, tmp_path, capsys):
    fast.weights = lambda task: -np.array(task.cells.centroids)
    names = [f"key {i}" for i in range(2000)]
    found = amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b", ids=names)
    assert "learning does not pay here: the bundle routes by centroid" in capsys.readouterr().out
    loaded = amips.load(tmp_path / "b")
    for searcher in (found, loaded):
        assert searcher.model is None
        assert searcher.router.name == "centroid"
        assert searcher.search(data[2][:1])[1][0, 0].startswith("key ")
    # The points are those of centroid routing, not of the bad model.
    assert loaded.points[0].recall10 > 0.3
    hits = np.char.partition(loaded.search(data[2], recall=0.9)[1], " ")[..., 2].astype(int)
    assert abs(recalls(hits, exact_top(data[0], data[2]), 10).mean() - 0.9) < 0.08


def test_a_router_no_better_than_the_centroids_is_not_kept(fast, data, tmp_path, capsys):
    amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b")
    assert amips.load(tmp_path / "b").model is None
    assert "does not pay" in capsys.readouterr().out


def test_ids_do_not_change_what_is_measured(fitted, data, tmp_path):
    """Recall is of keys, whatever they are called."""
    names = [f"key {i}" for i in range(2000)]
    options = {"minutes": MINUTES, "cells": CELLS, "quiet": True}
    found = amips.fit(data[0], data[1], out=tmp_path / "b", ids=names, **options)
    assert found.model is not None
    got, expected = ([p.recall10 for p in s.points] for s in (found, fitted[0]))
    np.testing.assert_allclose(got, expected, atol=0.05)  # the budget is time, so the models differ a little
    assert got[-1] == 1


def test_ids_come_back(fast, data, tmp_path):
    ids = np.arange(2000) * 3 + 10**10
    found = amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b", ids=ids, quiet=True)
    got = amips.load(tmp_path / "b").search(data[2], probes=CELLS)[1]
    np.testing.assert_array_equal(got[:, 0], ids[exact_top(data[0], data[2], 1)[:, 0]])
    np.testing.assert_array_equal(found.search(data[2], probes=CELLS)[1], got)


def test_files_and_the_default_number_of_cells(fast, data, tmp_path):
    np.save(tmp_path / "keys.npy", data[0])
    np.save(tmp_path / "queries.npy", data[1])
    found = amips.fit(
        tmp_path / "keys.npy", str(tmp_path / "queries.npy"), minutes=1, out=str(tmp_path / "b"), quiet=True
    )
    assert found.c == round(3 * 2000**0.5)
    assert fast.calls[0]["minutes"] < 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "keys.npy", "queries.npy"]


def test_an_old_bundle_is_replaced(fast, data, tmp_path):
    for cells in (4, 6):
        amips.fit(data[0], data[1], minutes=1, cells=cells, out=tmp_path / "b", quiet=True)
    assert amips.load(tmp_path / "b").c == 6
    assert len(list((tmp_path / "b").glob("data-*"))) == 1


# Interrupted


@pytest.fixture
def interrupted(data, tmp_path, monkeypatch):
    """A call that is stopped while it trains, and how to make it again with other options."""

    def call(**options):
        options = {"minutes": MINUTES, "cells": CELLS, **options}
        return amips.fit(data[0], data[1], out=tmp_path / "b", quiet=True, **options)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(learn, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            call()
    return call


def test_interrupted_work_is_reused(interrupted, tmp_path, fast, monkeypatch):
    work = tmp_path / "b.work"
    assert amips.Task(next(work.iterdir()) / "task", verify=True).c == CELLS
    assert not (tmp_path / "b").exists()
    with monkeypatch.context() as patch:
        patch.setattr("amips.cells.kmeans", lambda *_, **__: pytest.fail("the cells were there already"))
        patch.setattr("amips.exact.top_k", lambda *_, **__: pytest.fail("the labels were there already"))
        interrupted()
    assert amips.load(tmp_path / "b").c == CELLS
    assert not work.exists()


@pytest.mark.parametrize("options", [{"cells": 10}, {"seed": 1}, {"minutes": 2 * MINUTES}])
def test_another_call_neither_waits_nor_destroys(interrupted, tmp_path, fast, options):
    (begun,) = (tmp_path / "b.work").iterdir()
    interrupted(**options)
    assert amips.load(tmp_path / "b").c == options.get("cells", CELLS)
    assert list((tmp_path / "b.work").iterdir()) == [begun]
    assert amips.Task(begun / "task").c == CELLS


def test_the_work_is_beside_the_bundle_however_its_path_is_written(fast, data, tmp_path):
    amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=f"{tmp_path}/b/", quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_part_of_the_queries_is_drawn_once(data, tmp_path, fast, monkeypatch, capsys):
    """How many can be afforded is measured; measured again it would be another task."""
    speed = iter([700, 650])
    module = sys.modules["amips.fit"]
    monkeypatch.setattr(module, "_affordable", lambda *_: next(speed))

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "build", stop)
        with pytest.raises(KeyboardInterrupt):
            amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b")
    assert "using 700 of 1,500 queries" in capsys.readouterr().out
    rows = amips.Task(next((tmp_path / "b.work").iterdir()) / "task").manifest["rows"]
    assert sum(rows.values()) == 700
    amips.fit(data[0], data[1], minutes=1, cells=CELLS, out=tmp_path / "b")
    assert "using 700 of 1,500 queries" in capsys.readouterr().out
    assert amips.load(tmp_path / "b").c == CELLS


def test_in_no_time_at_all_some_queries_are_used(data, tmp_path, fast):
    found = amips.fit(data[0], data[1], minutes=1e-9, cells=CELLS, out=tmp_path / "b", quiet=True)
    assert found.points


def test_a_stranger_in_the_place_of_the_work_is_left_alone(fast, data, tmp_path):
    (tmp_path / "b.work").mkdir()
    (tmp_path / "b.work" / "thesis.txt").write_text("x")
    amips.fit(data[0], data[1], minutes=MINUTES, cells=CELLS, out=tmp_path / "b", quiet=True)
    assert (tmp_path / "b.work" / "thesis.txt").read_text() == "x"


# Errors


def bad_queries(queries):
    queries = queries.copy()
    queries[7, 3] = np.nan
    return queries


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"minutes": 0}, "minutes=0: must be positive"),
        ({"minutes": -1}, "minutes=-1: must be positive"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"minutes": float("inf")}, "minutes=inf"),
        ({"queries": lambda q: q[:, :5]}, "keys have dimension 16 but queries have dimension 5"),
        ({"queries": lambda q: q[:2]}, "too few"),
        ({"queries": lambda q: np.repeat(q[:1], 50, axis=0)}, "too few"),
        ({"queries": bad_queries}, "row 7"),
        ({"queries": lambda _: "nowhere.npy"}, r"nowhere\.npy"),
        ({"cells": 0}, "cells=0"),
        ({"cells": 2001}, "cells=2001"),
        ({"cells": 1}, "needs a task with cells"),
        ({"ids": [1, 2]}, "one for each of the 2000 keys"),
        ({"seed": -1}, "seed=-1"),
    ],
    ids=str,
)
def test_a_wrong_call_says_so_and_does_not_stand_in_the_way(data, tmp_path, change, match):
    options = {"minutes": MINUTES, "cells": CELLS, "queries": lambda q: q, **change}
    queries = options.pop("queries")(data[1])
    with pytest.raises(amips.AmipsError, match=match) as caught:
        amips.fit(data[0], queries, out=tmp_path / "b", quiet=True, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b").exists()
    quick = {"minutes": 1e-3, "cells": 8, "out": tmp_path / "b", "quiet": True}
    assert amips.fit(data[0], data[1], **quick).c == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


def test_a_place_that_is_taken_is_found_before_the_work(data, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("x")
    with pytest.raises(amips.BundleError, match="not a bundle"):
        amips.fit(data[0], data[1], minutes=MINUTES, out=tmp_path / "b", quiet=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["b", "thesis.txt"]


def test_without_torch_it_says_what_to_install(tmp_path):
    code = """if True:
        import sys
        sys.modules["torch"] = None
        import numpy as np, amips
        try:
            amips.fit(np.eye(40), np.eye(40), out=sys.argv[1])
        except amips.AmipsError as problem:
            print(problem)
    """
    out = tmp_path / "b"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "amips.fit needs torch; pip install 'amips[train]'\n"
    assert list(tmp_path.iterdir()) == []


def test_cost_lies_between_the_points():
    points = [amips.Point(p, r, r, 0, f) for p, r, f in ((1, 0.5, 10.0), (2, 0.8, 20.0), (4, 1.0, 40.0))]
    assert cost_at(points, 0.4).flops == 10
    assert cost_at(points, 0.8).flops == 20
    assert cost_at(points, 0.9).flops == pytest.approx(30)
    assert cost_at(points[:2], 0.9) is None
