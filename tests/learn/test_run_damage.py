"""A run whose files were damaged is refused or, where nothing depends on them, read without them."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import amips
from amips import RunError
from amips.bench.facts import training_summary
from amips.learn import train
from amips.learn.checkpoint import CHECKPOINT
from amips.locks import locked
from amips.nets import is_unfinished_run, load_model, read_run_log
from helpers import make_world, reseal

OPTIONS = {"samples": 3000, "batch": 100, "evaluations": 4}


@pytest.fixture(scope="module")
def task():
    return amips.label(*make_world(300, 300, 8, seed=1), cells=4, val=40, test=40)


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    train(task, out=run, **OPTIONS)
    return run


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def unfinished(copy):
    """As it is when it is killed after its last checkpoint."""
    (copy / "model.json").unlink()
    (copy / "model.safetensors").unlink()
    reseal(copy / "config.json", files={})
    return copy


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestModel:
    @pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
    def test_a_changed_bit(self, task, copy, name):
        flip(copy / name, -20)
        with pytest.raises(RunError, match=rf"{name} does not have the SHA-256"):
            load_model(copy)
        with pytest.raises(RunError, match=rf"{name} does not have the SHA-256"):
            train(task, out=copy, **OPTIONS)

    @pytest.mark.parametrize("field", ["seed", "samples", "keys"])
    def test_changed_settings(self, copy, field):
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, field: 1}))
        with pytest.raises(RunError, match=r"config\.json does not have the digest"):
            load_model(copy)

    def test_killed_between_the_model_and_the_seal(self, task, finished, copy):
        """The run counts as unfinished; the same call comes to the same end."""
        reseal(copy / "config.json", files={})
        assert is_unfinished_run(copy)
        with pytest.raises(RunError, match="unfinished run"):
            load_model(copy)
        train(task, out=copy, resume=True, **OPTIONS)
        assert not is_unfinished_run(copy)
        assert (copy / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


class TestCheckpoint:
    def test_a_changed_bit_is_not_trained_on(self, task, unfinished):
        flip(unfinished / CHECKPOINT, -7)
        with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged .* SHA-256"):
            train(task, out=unfinished, resume=True, **OPTIONS)

    @pytest.mark.parametrize("change", ["shape", "lacking", "metadata"])
    def test_a_state_of_something_else(self, task, unfinished, change):
        tensors = load_file(unfinished / CHECKPOINT)
        name = sorted(tensors)[0]
        if change == "shape":
            tensors[name] = np.zeros((1,), np.float32)
        elif change == "lacking":
            del tensors[name]
        save_file(tensors, unfinished / CHECKPOINT, {} if change == "metadata" else {"progress": "{}"})
        with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged") as caught:
            train(task, out=unfinished, resume=True, **OPTIONS)
        assert "\n" not in str(caught.value)

    def test_it_is_resumed(self, task, finished, unfinished):
        train(task, out=unfinished, resume=True, **OPTIONS)
        assert (unfinished / "model.safetensors").read_bytes() == (
            finished / "model.safetensors"
        ).read_bytes()


TORN = [b'{"step": 3', b"\0\0\0\0", b"\xff\xfe"]


class TestLog:
    @pytest.mark.parametrize("torn", TORN)
    def test_a_torn_last_line_is_left_out(self, finished, copy, torn):
        with (copy / "log.jsonl").open("ab") as file:
            file.write(torn)
        assert read_run_log(copy) == read_run_log(finished)
        assert training_summary(copy).values == training_summary(finished).values

    @pytest.mark.parametrize("line", [*TORN, b"[]", b'{"step": 1}', b"[" * 10_000])
    def test_a_damaged_line_is_named_and_left_out(self, finished, copy, line):
        lines = (copy / "log.jsonl").read_bytes().split(b"\n")
        (copy / "log.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[1:]]))
        with pytest.warns(UserWarning, match=r"log\.jsonl is damaged: left out line 2$"):
            assert read_run_log(copy) == read_run_log(finished)

    def test_a_damaged_log_does_not_stop_a_run(self, task, finished, unfinished):
        with (unfinished / "log.jsonl").open("ab") as file:
            file.write(b'{"step": 3')
        train(task, out=unfinished, resume=True, **OPTIONS)
        assert read_run_log(unfinished) == read_run_log(finished)


def test_two_at_once(task, unfinished):
    with locked(unfinished / ".lock"), pytest.raises(RunError, match="another process is training there"):
        train(task, out=unfinished, resume=True, **OPTIONS)


def test_without_a_place_nothing_is_left(task, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    train(task, **OPTIONS)
    assert list(tmp_path.iterdir()) == []
