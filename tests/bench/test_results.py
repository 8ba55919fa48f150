"""Raw runs on disk: whole or not there, of one task, and never mistaken for those of another system."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from amips.bench.results import ResultsStore, Run
from amips.bench.systems import System
from amips.design import Design
from amips.errors import ResultsError
from chaos.mutations import reseal
from helpers import reseal as resealed
from helpers import with_linear
from reference import architecture, random_net

ABOUT = {"kind": "results", "keys": "abc", "task": "def", "k": 10, "batch": 32}
SYSTEM = System(Design.plain(4))


def a_run(system=SYSTEM, budget=3, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 100, (20, 10)).astype(np.int32)
    scores = rng.standard_normal((20, 10)).astype(np.float32)
    scores[0, 5:] = -np.inf
    rank = rng.integers(0, 10, 20).astype(np.int32)
    scanned = rng.integers(0, 1 << 40, 20)
    return Run(system, budget, ids, scores, rank, scanned, 2 * scanned, 123, 456, {})


def same(one, two):
    """Bit for bit."""
    for name, value in vars(one).items():
        other = getattr(two, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
            assert value.tobytes() == other.tobytes(), name
        elif name == "times":
            assert {k: v.tobytes() for k, v in value.items()} == {k: v.tobytes() for k, v in other.items()}
        else:
            assert value == other, name


@pytest.fixture
def store(tmp_path):
    return ResultsStore(tmp_path / "results", ABOUT)


def files(store):
    return sorted(path.name for path in (store.path / "runs").iterdir())


def test_a_run_comes_back_bit_for_bit(store):
    run = a_run()
    assert not store.has(SYSTEM, 3)
    store.put(run, seed=5)
    assert store.has(SYSTEM, 3)
    assert not store.has(SYSTEM, 4)
    assert not store.has_times(SYSTEM, 3)
    same(store.get(SYSTEM, 3), run)
    times = {
        "amips/single/1": np.random.default_rng(1).random((3, 8)),
        "yardstick/amips/single/1": np.random.default_rng(2).random((3, 8)),
    }
    store.put_times(SYSTEM, 3, times)
    assert store.has_times(SYSTEM, 3)
    same(ResultsStore(store.path).get(SYSTEM, 3), replace(run, times=times))
    described = json.loads((store.path / "runs" / f"{SYSTEM.slug}-b3.json").read_text())
    assert described["system"] == SYSTEM.to_json()
    assert described["seed"] == 5
    assert described["machine"]["faiss"]


def test_runs_are_those_of_the_systems_asked_for_by_budget(store):
    other = System(with_linear(4), label="linear")
    for budget in (16, 2, 1, 4):
        store.put(a_run(budget=budget, seed=budget), seed=0)
    store.put(a_run(other), seed=0)
    assert [(r.system, r.budget) for r in store.runs([SYSTEM])] == [(SYSTEM, b) for b in (1, 2, 4, 16)]
    assert [r.system for r in store.runs([other, SYSTEM])] == [other] + 4 * [SYSTEM]
    assert store.runs([System(Design.plain(5))]) == []


def test_a_run_without_its_description_does_not_count(store):
    store.put(a_run(), seed=0)
    (store.path / "runs" / f"{SYSTEM.slug}-b3.json").unlink()
    assert not store.has(SYSTEM, 3)
    assert store.runs([SYSTEM]) == []
    with pytest.raises(ResultsError, match=r"it has no .*-b3\.json"):
        store.get(SYSTEM, 3)


def test_a_crash_before_the_description_leaves_no_run(store, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("amips.bench.results.write_manifest", crash)
        with pytest.raises(KeyboardInterrupt):
            store.put(a_run(seed=1), seed=0)
    assert files(store) == [f"{SYSTEM.slug}-b3.npz"]
    again = ResultsStore(store.path, ABOUT)
    assert not again.has(SYSTEM, 3)
    again.put(a_run(seed=2), seed=0)
    same(again.get(SYSTEM, 3), a_run(seed=2))


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def garble(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 3 + 60] = bytes(60)
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def missing(path):
    path.unlink()


def foreign(path):
    np.savez(path, ids=np.zeros(3))


@pytest.mark.parametrize("harm", [cut, garble, empty, missing, foreign])
def test_damaged_arrays_are_named_in_one_line(store, harm):
    store.put(a_run(), seed=0)
    harm(store.path / "runs" / f"{SYSTEM.slug}-b3.npz")
    changed = r"-b3\.npz (is missing|has \d+ bytes, expected|does not have the SHA-256)"
    for match in (changed, r"-b3\.npz is (damaged: \S|missing)"):
        with pytest.raises(ResultsError, match=match) as caught:
            store.get(SYSTEM, 3)
        assert "\n" not in str(caught.value)
        reseal(store.path)  # as somebody who means harm would


def test_any_damage_to_arrays_is_one_line(store):
    """Zeros over 30 bytes at each place of the file, with a true SHA-256: read as it was, or refused."""
    run = a_run()
    store.put(run, seed=0)
    path = store.path / "runs" / f"{SYSTEM.slug}-b3.npz"
    whole = path.read_bytes()
    problems = []
    for low in range(0, len(whole), 23):
        path.write_bytes(whole[:low] + bytes(min(30, len(whole) - low)) + whole[low + 30 :])
        reseal(store.path)
        try:
            same(store.get(SYSTEM, 3), run)
        except ResultsError as problem:
            problems.append(str(problem))
    assert len(problems) > 20
    assert not any("\n" in problem for problem in problems)


@pytest.mark.parametrize("problem", [EOFError(), ValueError("first\nsecond")])
def test_whatever_numpy_says_is_one_line(store, monkeypatch, problem):
    """zipfile raises EOFError without a word."""

    def fail(*_, **__):
        raise problem

    store.put(a_run(), seed=0)
    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(ResultsError, match=r"-b3\.npz is damaged: (EOFError|first second)$"):
        store.get(SYSTEM, 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "\x00\xff",
        '{"kind": "run", "format": 99}',
        '{"kind": "run", "format": 2}',
        '{"kind": "run", "format": 3}',
        '{"kind": "run", "format": 3, "digest": "x", "files": {}}',
    ],
)
def test_damaged_descriptions_are_named_in_one_line(store, text):
    store.put(a_run(), seed=0)
    (store.path / "runs" / f"{SYSTEM.slug}-b3.json").write_text(text)
    with pytest.raises(ResultsError, match=r"-b3\.json (is|has|does|describes) ") as caught:
        store.runs([SYSTEM])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["budget", "network", "coarse", "files"])
@pytest.mark.parametrize("value", ["x", -1, None, True, 1.5, [], {}])
def test_a_description_with_another_value(store, field, value):
    store.put(a_run(), seed=0)
    resealed(store.path / "runs" / f"{SYSTEM.slug}-b3.json", **{field: value})
    with pytest.raises(ResultsError, match=r"-b3\.json is damaged: ") as caught:
        store.get(SYSTEM, 3)
    assert "\n" not in str(caught.value)


def test_arrays_that_do_not_fit_together(store):
    store.put(a_run(), seed=0)
    path = store.path / "runs" / f"{SYSTEM.slug}-b3.npz"
    with np.load(path) as stored:
        whole = {name: stored[name] for name in stored.files}
    for changed in (
        {"ids": whole["ids"][:-1]},
        {"ids": whole["ids"].astype(np.float32)},
        {"ids": np.full_like(whole["ids"], -2)},
        {"rank": whole["rank"][:, None]},
        {"scores": np.zeros(whole["scores"].shape, np.int32)},
        {"more": whole["rank"]},
        {"scores": np.full_like(whole["scores"], np.nan)},
        {"scores": np.full_like(whole["scores"], np.inf)},
        *({name: np.full_like(whole[name], -2)} for name in ("rank", "scanned", "scan")),
    ):
        np.savez(path, **{**whole, **changed})
        reseal(store.path)
        with pytest.raises(ResultsError, match=r"-b3\.npz is damaged: (it does not hold|its numbers)"):
            store.get(SYSTEM, 3)


def test_an_archive_that_says_it_is_huge_is_not_unpacked(store, monkeypatch):
    store.put(a_run(), seed=0)
    monkeypatch.setattr("amips.bench.results.MOST_BYTES", 1500)
    with pytest.raises(ResultsError, match=r"-b3\.npz is damaged: .*(larger than|at most)"):
        store.get(SYSTEM, 3)


def test_damaged_times_are_named(store):
    store.put(a_run(), seed=0)
    store.put_times(SYSTEM, 3, {"a": np.ones(3)})
    cut(store.path / "runs" / f"{SYSTEM.slug}-b3.times.npz")
    with pytest.raises(ResultsError, match=r"times\.npz has 163 bytes, expected 203"):
        store.get(SYSTEM, 3)
    reseal(store.path)
    with pytest.raises(ResultsError, match=r"times\.npz is damaged"):
        store.get(SYSTEM, 3)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_times_that_are_none(store, value):
    store.put(a_run(), seed=0)
    store.put_times(SYSTEM, 3, {name: np.full(3, value) for name in ("a", "yardstick/a")})
    with pytest.raises(ResultsError, match=r"times\.npz is damaged: a holds no times"):
        store.get(SYSTEM, 3)


def test_times_of_a_killed_call_are_taken_again(store, monkeypatch):
    """Killed before the description of the times: there are none, also where there were others before."""
    store.put(a_run(), seed=0)
    times = {name: np.ones(3) for name in ("a", "yardstick/a")}
    store.put_times(SYSTEM, 3, times)
    with monkeypatch.context() as patched:
        patched.setattr("amips.bench.results.write_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.put_times(SYSTEM, 3, {name: 2 * values for name, values in times.items()})
    assert not store.has_times(SYSTEM, 3)
    assert store.get(SYSTEM, 3).times == {}
    store.put_times(SYSTEM, 3, times)
    assert set(store.get(SYSTEM, 3).times) == set(times)


def test_times_without_their_yardstick_are_named_in_one_line(store):
    store.put(a_run(), seed=0)
    times = {
        f"{before}{way}/batch/1": np.ones(3) for before in ("", "yardstick/") for way in ("amips", "faiss")
    }
    store.put_times(SYSTEM, 3, times)
    assert set(store.get(SYSTEM, 3).times) == set(times)
    del times["yardstick/faiss/batch/1"]
    store.put_times(SYSTEM, 3, times)
    for read in (lambda: store.get(SYSTEM, 3), lambda: store.runs([SYSTEM])):
        with pytest.raises(
            ResultsError, match=r"-b3\.times\.npz is damaged: it lacks the yardstick of faiss/batch/1$"
        ) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_results_of_another_task_are_refused_naming_what_differs(store):
    ResultsStore(store.path, dict(ABOUT))
    with pytest.raises(ResultsError, match=r"other inputs or options \(batch, keys\); choose another"):
        ResultsStore(store.path, {**ABOUT, "keys": "xyz", "batch": 64})
    assert ResultsStore(store.path).about == ABOUT  # and nothing was changed


def test_a_place_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ResultsError, match="exists and is not the results of a bench; choose another"):
            ResultsStore(place, ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ResultsError, match=r"holds no results\.json"):
        ResultsStore(tmp_path)
    (tmp_path / "empty").mkdir()
    ResultsStore(tmp_path / "empty", ABOUT)


def test_a_place_that_was_begun_is_taken_up(tmp_path, monkeypatch):
    """A crash at any moment of the first call leaves a place that the second one accepts."""
    out = tmp_path / "deep" / "results"
    with monkeypatch.context() as patched:
        patched.setattr("amips.files.write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ResultsStore(out, ABOUT)
    (out / ".results.json.123.tmp").write_text("{")  # what kill -9 leaves
    ResultsStore(out, ABOUT)
    shutil.rmtree(out / "runs")
    shutil.rmtree(out / "work")
    assert ResultsStore(out, ABOUT).runs([SYSTEM]) == []


def test_damaged_results_are_refused(store):
    (store.path / "results.json").write_text("{")
    for about in (None, ABOUT):
        with pytest.raises(ResultsError, match=r"results\.json is damaged"):
            ResultsStore(store.path, about)


def test_runs_of_a_router_follow_its_weights(store, tmp_path):
    """Moved, it keeps its runs; trained anew in the same place, it has none; removed, it hurts no other."""
    model = random_net(architecture("key", d=6, c=1))
    model.save(tmp_path / "old" / "run")
    system = System(Design.plain(4), run=str(tmp_path / "old" / "run"), label="first")
    store.put(a_run(system), seed=0)
    store.put(a_run(), seed=0)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    random_net(architecture("key", d=6, c=1), seed=1).save(tmp_path / "old" / "run")
    assert not store.has(system, 3)
    assert store.runs([system]) == []
    moved = System(Design.plain(4), run=str(tmp_path / "new" / "run"), label="second")
    assert store.has(moved, 3)
    assert [run.system for run in store.runs([moved])] == [moved]
    shutil.rmtree(tmp_path / "old")
    assert [run.system for run in store.runs([moved, SYSTEM])] == [moved, SYSTEM]
