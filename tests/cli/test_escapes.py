"""Escape sequences in ids, names and manifests: on a terminal they are visible text, in files they stay."""

import csv
import json
import sys

import numpy as np
import pytest

from amips.cli import main
from helpers import plain_build, reseal

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\x7f"


@pytest.fixture(scope="module")
def bundle(task, tmp_path_factory):
    """Every id of a key is hostile."""
    out = tmp_path_factory.mktemp("hostile") / "bundle"
    plain_build(task, None, out=out, storage="flat", ids=[f"{HOSTILE}{i}" for i in range(task.n)])
    np.save(out.parent / "x.npy", task.test.vectors.rows(0, 3))
    return out


@pytest.fixture
def run(bundle, monkeypatch, capfd):
    def call(*words):
        monkeypatch.chdir(bundle.parent)
        monkeypatch.setattr(sys, "argv", ["amips", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capfd.readouterr()
        assert not set("\x1b\x07\x9b\x7f\u202e\u2066\r") & set(out + err)
        assert "Traceback" not in err
        return code, out, err

    return call


def test_search_prints_the_same_ids_without_an_escape(run):
    code, out, _ = run("search", "bundle", "x.npy", "--probes", 2, "-k", 4)
    assert code == 0
    ids = [hit["id"] for line in out.splitlines() for hit in json.loads(line)["hits"]]
    assert len(ids) == 12
    assert all(name.startswith(HOSTILE) for name in ids)  # to a program, JSON says what it said


@pytest.mark.parametrize("ending", ["jsonl", "csv", "npz"])
def test_files_keep_the_ids(run, tmp_path, ending):
    out = tmp_path / f"hits.{ending}"
    assert run("search", "bundle", "x.npy", "--probes", 2, "-k", 4, "--out", out)[0] == 0
    if ending == "npz":
        names = np.load(out)["ids"].ravel().tolist()
    elif ending == "csv":
        with out.open(encoding="utf-8", newline="") as file:
            names = [row["id"] for row in csv.DictReader(file)]
    else:
        assert "\x9b31m\u202egnp" in out.read_text("utf-8")
        names = [
            hit["id"] for row in out.read_text("utf-8").split("\n")[:-1] for hit in json.loads(row)["hits"]
        ]
    assert len(names) == 12
    assert all(name.startswith(HOSTILE) for name in names)


def test_a_manifest_that_is_quoted(run, bundle, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    for fields in (
        {"kind": "bundle", "format": f"{HOSTILE}\nerror: no"},
        {"kind": f"bundle{HOSTILE}"},
        {"kind": "bundle", "format": 3, "files": {HOSTILE: {"size": 1, "sha256": ""}}},
    ):
        (bad / "manifest.json").write_text("{}")
        reseal(bad / "manifest.json", **fields)
        for command in ("info", "verify"):
            code, _, err = run(command, bad)
            assert code == 1
            assert err.count("\n") == 1


def test_a_path_that_is_quoted(run, tmp_path):
    """A name that a shell completed: nobody typed it."""
    for words in (["info", tmp_path / HOSTILE], ["search", tmp_path / HOSTILE, "x.npy"], [HOSTILE]):
        code, _, err = run(*words)
        assert code in (1, 2)
        assert "owned" in err
    (tmp_path / HOSTILE).mkdir()
    assert "owned" in run("info", tmp_path / HOSTILE)[2]


def test_info_of_a_run(run, tmp_path, monkeypatch):
    """Fields of a model are shown; none of them can be an escape, or look like another line."""
    from amips.cli import describe

    class Shown:
        class architecture:  # noqa: N801
            parameters = 1

            @staticmethod
            def to_json():
                return {f"kind{HOSTILE}": f"key{HOSTILE}\nkeys SHA-256  forged"}

        about = {}  # noqa: RUF012

    (tmp_path / "model.json").write_text("{}")
    monkeypatch.setattr(describe, "load_model", lambda path: Shown)
    code, out, _ = run("info", tmp_path)
    assert code == 0
    assert "owned" in out
    assert not any(line.startswith("keys SHA-256") for line in out.splitlines())
