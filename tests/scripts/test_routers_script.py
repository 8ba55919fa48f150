"""benchmarks/routers.py: what is compared."""

import sys

import pytest

import amips
from helpers import load_script


@pytest.fixture
def script():
    return load_script("routers")


def test_a_keynet_with_a_key_for_each_cell_is_there_at_its_size_and_at_its_cost(script):
    n, d, c = 100_000, 384, 128
    made = {
        name: network.architecture(n, d, c)
        for name, (network, _) in script.routers(n, d, c).items()
        if "a key for each cell" in name
    }
    assert {a.c for a in made.values()} == {c}
    assert {a.kind for a in made.values()} == {"key"}
    share = {name: a.score_flops / (2 * n * d) for name, a in made.items()}
    sized = "KeyNet XS, a key for each cell, the paper's losses"
    assert share.pop(sized) > 0.3
    assert len(share) == 2
    assert max(share.values()) < 0.02


def test_every_router_is_in_the_table(script, world, tmp_path, monkeypatch, capsys):
    task = amips.label(*world, cells=8, cell_targets=True, val=100, test=100, out=tmp_path / "task")
    page = tmp_path / "routers.md"
    words = ["routers.py", str(task.path), "--out", str(tmp_path / "runs"), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", [*words, "--minutes", "0.001"])
    script.main()
    rows = [line.split(" | ")[0][2:] for line in page.read_text().splitlines() if line.startswith("| ")]
    assert rows == ["router", "---", "centroid", *script.routers(task.n, task.d, task.c)]
    assert capsys.readouterr().out == page.read_text()
