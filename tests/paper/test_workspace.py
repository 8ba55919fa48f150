"""The place where experiments work: finding data, scales, and work that is made once and continues."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from amips import KeyNet
from amips.errors import AmipsError, ResultsError, TrainingInterrupted, VectorError
from amips.learn import loop
from amips.vectors import Vectors
from helpers import make_world
from paper.workspace import SCALES, Workspace, find

torch.set_num_threads(1)

TINY = replace(SCALES["smoke"], name="tiny", keys=300, queries=250, held_out=50)


def save(directory, keys, queries, name="{}.npy"):
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / name.format("keys"), keys)
    np.save(directory / name.format("queries"), queries)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save(tmp_path_factory.mktemp("workspace") / "data", *make_world(400, 500, 16, seed=3))


def in_one_line(caught):
    assert "\n" not in str(caught.value)


def test_find_names_what_is_missing(tmp_path):
    (tmp_path / "queries.npy").touch()
    with pytest.raises(AmipsError, match=r"holds no keys: expected keys\.npy") as caught:
        find(tmp_path, "keys")
    in_one_line(caught)


def test_find_refuses_two_files_of_one_kind(tmp_path):
    for file in ("keys.npy", "keys.fvecs", "queries.npy", "queries.i8.npy"):
        (tmp_path / file).touch()
    with pytest.raises(AmipsError, match=r"more than one file of keys: keys\.fvecs, keys\.npy") as caught:
        find(tmp_path, "keys")
    in_one_line(caught)
    with pytest.raises(AmipsError, match=r"more than one file of queries: queries\.i8\.npy, queries\.npy"):
        find(tmp_path, "queries")


def test_find_wants_a_directory(tmp_path):
    (tmp_path / "keys.npy").touch()
    with pytest.raises(AmipsError, match=r"is not a directory: expected one with keys\.npy") as caught:
        find(tmp_path / "keys.npy", "keys")
    in_one_line(caught)


def test_find_takes_one_format_and_does_not_mind_other_names(tmp_path):
    for file in ("keys.fvecs", "queries.i8.npy", "query_source.npy", "README.md"):
        (tmp_path / file).touch()
    assert find(tmp_path, "keys") == (tmp_path / "keys.fvecs", False)
    assert find(tmp_path, "queries") == (tmp_path / "queries.i8.npy", True)


def test_an_unknown_scale_is_named(data, tmp_path):
    with pytest.raises(
        AmipsError, match="scale='huge': expected one of smoke small replica replica100k full"
    ):
        Workspace(data, "huge", tmp_path / "out")


def test_int8_rows_are_normalised(tmp_path):
    rng = np.random.default_rng(0)
    keys, queries = (rng.integers(-127, 128, size=(rows, 16), dtype=np.int8) for rows in (40, 60))
    workspace = Workspace(save(tmp_path / "data", keys, queries, "{}.i8.npy"), TINY, tmp_path / "out")
    for vectors, stored in ((workspace.keys, keys), (workspace.queries, queries)):
        rows = stored.astype(np.float64)
        expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors.load(), expected, atol=1e-6)


def test_an_int8_row_of_zeros_is_named_by_label(tmp_path):
    keys = np.ones((40, 16), np.int8)
    keys[7] = 0
    queries = np.random.default_rng(1).integers(1, 127, size=(60, 16), dtype=np.int8)
    workspace = Workspace(save(tmp_path / "data", keys, queries, "{}.i8.npy"), TINY, tmp_path / "out")
    with pytest.raises(VectorError, match="row 7 is all zero"):
        workspace.task(1)


def test_other_rows_are_taken_as_they_are(tmp_path):
    keys, queries = (3 * rows for rows in make_world(40, 60, 16, seed=0))
    workspace = Workspace(save(tmp_path / "data", keys, queries), TINY, tmp_path / "out")
    np.testing.assert_array_equal(workspace.keys.load(), keys)
    np.testing.assert_array_equal(workspace.queries.load(), queries)


def test_a_scale_limits_keys_and_queries(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    assert (workspace.keys.n, workspace.queries.n) == (300, 250 + 2 * 50)
    everything = np.load(data / "keys.npy")
    kept = workspace.keys.load()
    found = {row.tobytes() for row in everything} & {row.tobytes() for row in kept}
    assert len(found) == 300  # rows of the data, none of them twice
    again = Workspace(data, TINY, tmp_path / "again")
    np.testing.assert_array_equal(again.keys.load(), kept)
    larger = Workspace(data, replace(TINY, keys=None, queries=None), tmp_path / "larger")
    assert (larger.keys.n, larger.queries.n) == (400, 500)


def test_a_place_belongs_to_its_data_scale_and_seed(data, tmp_path):
    out = tmp_path / "out"
    Workspace(data, TINY, out)
    Workspace(data, TINY, out)  # the same again is welcome
    other = save(tmp_path / "other", *make_world(400, 500, 16, seed=4))  # files of the same names and sizes
    for arguments, what in (
        ((other, TINY, out), "keys, queries"),
        ((data, "smoke", out), "scale"),
        ((data, TINY, out, 1), "seed"),
    ):
        with pytest.raises(ResultsError, match=rf"\({what}\); choose another directory") as caught:
            Workspace(*arguments)
        in_one_line(caught)


def test_the_split_is_stable_and_complete(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    assert {name: int((workspace.split == name).sum()) for name in ("train", "val", "test")} == {
        "train": 250,
        "val": 50,
        "test": 50,
    }
    np.testing.assert_array_equal(Workspace(data, TINY, tmp_path / "again").split, workspace.split)
    task = workspace.task(1)
    sources = [set(np.unique(split.source).tolist()) for split in (task.train, task.val, task.test)]
    assert len(set.union(*sources)) == sum(map(len, sources)) == 350
    assert sources[2] == set(np.flatnonzero(workspace.split == "test").tolist())


def test_few_queries_are_split_in_thirds(tmp_path):
    workspace = Workspace(save(tmp_path / "data", *make_world(40, 30, 16, seed=0)), TINY, tmp_path / "out")
    assert sorted(np.unique(workspace.split, return_counts=True)[1]) == [10, 10, 10]


def test_a_task_is_made_once_for_its_options(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    task = workspace.task(4)
    made = (task.path / "task.json").stat().st_mtime_ns
    assert workspace.task(4).path == task.path
    assert (task.path / "task.json").stat().st_mtime_ns == made
    assert len({workspace.task(4, copies=0).path, workspace.task(4, k=1).path, task.path}) == 3


def test_data_that_was_copied_in_part_is_copied_again(data, tmp_path, monkeypatch):
    workspace = Workspace(data, TINY, tmp_path / "out")

    def failing(self, ids):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Vectors, "take", failing)
        with pytest.raises(OSError, match="disk"):
            _ = workspace.keys
    assert [file.name for file in workspace.work.iterdir() if "keys" in file.name] == []
    assert workspace.keys.n == 300


def same(one, two):
    return all(one.weights[name].tobytes() == two.weights[name].tobytes() for name in one.weights)


def test_a_model_that_was_begun_is_continued(data, tmp_path, monkeypatch):
    whole = Workspace(data, TINY, tmp_path / "whole")
    expected = whole.model(whole.task(1), KeyNet(width=8), "net")
    assert same(whole.model(whole.task(1), KeyNet(width=8), "net"), expected)
    workspace = Workspace(data, TINY, tmp_path / "out")
    step = loop.Run.step

    def crashing(self, done):
        if self.state.progress.step == 2:
            raise OSError("the disk is full")
        return step(self, done)

    with monkeypatch.context() as patched:
        patched.setattr(loop.Run, "step", crashing)
        with pytest.raises(OSError, match="disk"):
            workspace.model(workspace.task(1), KeyNet(width=8), "net")
    taken = []
    monkeypatch.setattr(loop.Run, "step", lambda self, done: taken.append(done) or step(self, done))
    assert same(workspace.model(workspace.task(1), KeyNet(width=8), "net"), expected)
    assert len(taken) == 4096 // 1024 - 2  # what was done before the crash is not done again


def test_an_interrupt_says_how_to_continue(data, tmp_path, monkeypatch):
    workspace = Workspace(data, TINY, tmp_path / "out")
    step = loop.Run.step

    def interrupted(self, done):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, done)

    monkeypatch.setattr(loop.Run, "step", interrupted)
    with pytest.raises(TrainingInterrupted, match="the same command continues") as caught:
        workspace.model(workspace.task(1), KeyNet(width=8), "net")
    in_one_line(caught)


def test_a_run_is_where_the_workspace_says(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    one, four = workspace.task(1), workspace.task(4)
    workspace.model(one, KeyNet(width=8), "net")
    directory = workspace.run_directory("net", one)
    assert directory.parent == workspace.work
    assert (directory / "model.safetensors").exists()
    assert not workspace.run_directory("net", four).exists()  # of another task, or of another name
    assert not workspace.run_directory("other", one).exists()


def test_a_portion_is_of_the_budget(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    net = workspace.model(workspace.task(1), KeyNet(width=8), "half", portion=0.5)
    assert net.about["samples"] == 2048


def test_tasks_have_plain_cells_with_targets(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    task = workspace.task(4)
    assert (task.c, task.query_aware, task.has_cell_targets) == (4, 0.0, True)


def test_runs_do_not_end_early(data, tmp_path):
    """An experiment compares runs of a known budget."""
    workspace = Workspace(data, TINY, tmp_path / "out")
    assert (workspace.recipe().patience, workspace.recipe().keep_best) == (0, False)
    net = workspace.model(workspace.task(1), KeyNet(width=8), "net")
    assert net.about["recipe"]["patience"] == 0
    assert net.about["samples"] == 4096
    log = workspace.run_directory("net", workspace.task(1)) / "log.jsonl"
    assert (
        net.about["val"] == json.loads(log.read_text().splitlines()[-1])["val"]
    )  # what is there at the end, whatever was best before


def test_the_command_names_no_place_of_this_machine(data, tmp_path):
    workspace = Workspace(data, TINY, tmp_path / "out")
    assert workspace.command("ivf") == "python -m paper ivf --data DATA --scale tiny --out OUT"
    assert workspace.command("ivf", "--backend hnsw").startswith("python -m paper ivf --backend hnsw --data")
