"""The examples run from end to end, small: what they print is there, and a second run makes nothing again."""

import os
import re
import subprocess
import sys

import pytest

from helpers import ROOT

SMALL = ("--texts", "1500", "--minutes", "0.01", "--rounds", "1")


def run(script, *options):
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ)


def spoken(output):
    """What is said, without the steps and their times."""
    return [line for line in output.splitlines() if not line.startswith("[")]


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo"
    return out, run("demo.py", "--out", out, *SMALL)


@pytest.mark.slow
def test_the_demo_tells_what_search_costs_and_answers(demo):
    out, first = demo
    assert first.returncode == 0, first.stderr
    head = re.search(r"^recall@10 +search +keys scanned +FLOPs", first.stdout, re.M)
    assert head, first.stdout
    for name in ("FAISS IVF", "amips, float32 keys", "amips, lean", "HNSW", "exact, all keys"):
        assert len(re.findall(rf"^0\.9[05] +{re.escape(name)} .*%", first.stdout, re.M)) == 2
    assert re.search(r"^(Learning pays|Learning saves|On this data)", first.stdout, re.M)
    scanned = re.findall(r"\(([\d,]+) of 1,500 keys scanned\)", first.stdout)
    assert len(scanned) == 3
    assert all(0 < int(count.replace(",", "")) < 1500 for count in scanned)
    assert len(re.findall(r"^  0\.\d{3}  \S+: ", first.stdout, re.M)) == 9
    assert (out / "report.html").stat().st_size > 10_000
    assert "amips ask" in first.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_second_run_says_the_same_and_touches_nothing(demo):
    out, first = demo
    before = files(out)
    second = run("demo.py", "--out", out, *SMALL)
    assert second.returncode == 0, second.stderr
    assert spoken(second.stdout) == spoken(first.stdout)
    assert files(out) == before


@pytest.mark.slow
def test_what_is_missing_is_made_without_training_again(demo):
    out, first = demo
    (out / "report.html").unlink()
    (out / "bundle" / "text.json").unlink()
    trained = files(out / "results" / "work")
    again = run("demo.py", "--out", out, *SMALL)
    assert again.returncode == 0, again.stderr
    assert spoken(again.stdout) == spoken(first.stdout)
    assert files(out / "results" / "work") == trained


@pytest.mark.slow
def test_a_demo_of_other_settings_is_one_line(demo):
    out, _ = demo
    other = run("demo.py", "--out", out, "--texts", "1600")
    assert other.returncode == 1
    assert other.stderr.count("\n") == 1
    assert "other inputs or options (minutes, rounds, texts); choose another directory" in other.stderr


@pytest.mark.slow
def test_the_vectors_only_example_runs(tmp_path):
    options = ("--keys", 4000, "--queries", 12_000, "--minutes", 0.1)
    done = run("quickstart.py", "--out", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(plain IVF|amips) +(0\.\d\d) +(0\.\d+) +[\d.]+% +([\d.]+)%$", done.stdout, re.M)
    costs = {(name, asked): float(flops) for name, asked, _, flops in rows}
    assert len(costs) == 4
    for asked in ("0.90", "0.95"):
        assert costs["amips", asked] < 0.9 * costs["plain IVF", asked]  # it gains
    assert all(float(reached) > float(asked) - 0.03 for _, asked, reached, _ in rows)
    assert (tmp_path / "out" / "bundle" / "manifest.json").exists()
