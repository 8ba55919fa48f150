"""amips drift, refit, rollback, and what info says of them."""

import json
import sys

import numpy as np
import pytest

import amips
from amips.cli import main
from helpers import make_world, unit

N, D = 1200, 16


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A bundle, a file of queries like its log, and one of others."""
    folder = tmp_path_factory.mktemp("watch")
    keys, queries = make_world(N, 3000, D, seed=9)
    amips.build(amips.label(keys, queries[:2000], cells=16), out=folder / "b", recall=0.9, storage="flat")
    rng = np.random.default_rng(0)
    np.save(folder / "same.npy", queries[2000:])
    np.save(folder / "other.npy", unit(keys + 0.4 * rng.standard_normal((N, D))))
    return folder


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["amips", *map(str, words)])
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_drift(place, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "drift", place / "b", place / "same.npy")
    assert code == 0
    assert "looks like the log" in out
    code, out, _ = run(monkeypatch, capsys, "drift", place / "b", place / "other.npy", "--json")
    assert code == 3
    assert json.loads(out)["verdict"] == "drifted"


def test_refit_and_rollback(place, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "rollback", place / "b")
    assert code == 1
    assert "nothing to go back to" in err
    code, out, _ = run(monkeypatch, capsys, "refit", place / "b", place / "other.npy", "--minutes", "0.05")
    assert code == 0
    assert "undoes it" in out
    _, out, _ = run(monkeypatch, capsys, "info", place / "b")
    assert "refitted" in out
    assert "(round 1)" in out
    assert "sample of the log" in out
    code, _, _ = run(monkeypatch, capsys, "rollback", place / "b")
    assert code == 0
    _, out, _ = run(monkeypatch, capsys, "info", place / "b")
    assert "rolled back" in out


def test_info_says_that_keys_have_grown(place, monkeypatch, capsys):
    index = amips.load(place / "b")
    rng = np.random.default_rng(3)
    index.add(unit(rng.standard_normal((N // 2, D))))
    index.close()
    _, out, _ = run(monkeypatch, capsys, "info", place / "b")
    assert "more cells would be cheaper" in out
    index.compact()
    index.close()
    _, out, _ = run(monkeypatch, capsys, "info", place / "b")
    assert "1,200 when it was fitted" in out
