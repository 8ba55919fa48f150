"""`amips build`, `search`, `info` and `fit` as a user types them, after `label` and `train`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import amips
from amips.cli import main
from helpers import make_world

AMIPS = shutil.which("amips", path=str(Path(sys.executable).parent)) or shutil.which("amips")
N, D, C = 800, 12, 10
STEPS = {
    "label": "label keys.npy queries.npy --out task --cells 10 --val 80 --test 60 -k 10",
    "train": "train task --net linear --samples 40000 --evaluations 2 --out run",
    "build": "build task run --out bundle",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    keys, queries = make_world(N, 600, D, seed=4)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries[:500])
    np.save(folder / "fresh.npy", queries[500:])
    np.save(folder / "narrow.npy", queries[:, :5])
    bad = queries[500:].copy()
    bad[7, 1] = np.nan
    np.save(folder / "nan.npy", bad)
    (folder / "names.txt").write_text("".join(f"Straße {i}\n" for i in range(N)), "utf-8")
    np.save(folder / "numbers.npy", np.arange(N) * 5 + 10**12)
    return folder


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """The command without a new process, which would take most of the time; (exit code, stdout, stderr)."""

    def call(line, *more):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["amips", *line.split(), *map(str, more)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def made(folder):
    """What each step printed, each in a process of its own."""
    printed = {}
    for name, line in STEPS.items():
        done = subprocess.run(
            [AMIPS, *line.split()], cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        printed[name] = done.stdout
    return printed


def wrong(result, match, code=1):
    """One line on stderr, no traceback, nothing on stdout."""
    got, out, err = result
    assert got == code, err
    assert out == ""
    assert "Traceback" not in err
    if code == 1:
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    assert re.search(match, err), err


def rows_of(text):
    """The numbers in a table of operating points."""
    lines = [line.split() for line in text.splitlines()]
    return [[float(cell.rstrip("%")) for cell in line] for line in lines if line and line[0].isdigit()]


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_from_files_to_a_bundle(folder, made):
    assert "800 keys, 10 cells, routed by linear" in made["build"]
    found = amips.load(folder / "bundle", keys=folder / "keys.npy")
    rows = rows_of(made["build"])
    assert [int(row[0]) for row in rows] == [p.probes for p in found.points]
    for row, point in zip(rows, found.points, strict=True):
        # A bound on the share is in a column of its own, empty where there is none.
        assert row[1:-4] == ([pytest.approx(point.share, rel=0.05)] if point.share else [])
        assert row[-4:-2] == pytest.approx([point.recall1, point.recall10], abs=6e-4)
        assert row[-2] == pytest.approx(100 * point.scanned, abs=6e-3)
    fixed = [row for row, point in zip(rows, found.points, strict=True) if not point.share]
    assert fixed[-1] == [C, 1, 1, 100, fixed[-1][-1]]
    assert len(fixed) < len(rows)


# info


def test_info_of_a_task(made, run):
    code, out, _ = run("info task")
    assert code == 0
    facts = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines()[2:])
    assert facts["keys"] == "800"
    assert facts["dimension"] == "12"
    assert facts["cells"] == "10"
    assert facts["val queries"] == "80"
    assert facts["top keys a query"] == "10"


def test_info_of_a_run(made, run):
    code, out, _ = run("info run")
    assert code == 0
    assert re.search(r"kind +linear", out)
    assert re.search(r"parameters +120\b", out)
    assert re.search(r"samples +4\d,\d+", out)
    assert "val " in out


def test_info_of_a_bundle(made, run, folder):
    code, out, _ = run("info bundle")
    assert code == 0
    assert re.search(r"routed by +linear", out)
    assert re.search(r"storage +flat", out)
    assert amips.load(folder / "bundle").fingerprint[:16] in out
    assert rows_of(out)[-len(rows_of(made["build"])) :] == rows_of(made["build"])


def test_info_of_an_unfinished_run(made, run, folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "stopped")
    (tmp_path / "stopped" / "model.json").unlink()
    code, out, _ = run("info", tmp_path / "stopped")
    assert code == 0
    assert "unfinished run" in out
    assert "--resume" in out


def test_info_of_something_else(made, run, folder, tmp_path):
    wrong(run("info", tmp_path), "not a finished task, a run or a bundle")
    wrong(run("info", tmp_path / "nowhere"), "nowhere")
    wrong(run("info keys.npy"), r"keys\.npy")
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    wrong(run("info", tmp_path), r"manifest\.json")
    wrong(run("info"), "Missing argument", code=2)


# search


def test_search_to_a_file(made, run, folder, tmp_path):
    code, out, err = run("search bundle fresh.npy -k 5 --probes 3 --out", tmp_path / "hits.npz")
    assert (code, err) == (0, "")
    assert "100 x 5" in out
    with np.load(tmp_path / "hits.npz") as hits:
        expected = amips.load(folder / "bundle").search(np.load(folder / "fresh.npy"), 5, 3)
        np.testing.assert_array_equal(hits["ids"], expected[1])
        np.testing.assert_allclose(hits["scores"], expected[0], atol=1e-6)


def test_search_to_standard_output(made, run, folder):
    code, out, err = run("search bundle fresh.npy -k 5 --probes 3")
    assert (code, err) == (0, "")
    lines = json_lines(out)
    assert [line["query"] for line in lines] == list(range(100))
    scores, ids = amips.load(folder / "bundle").search(np.load(folder / "fresh.npy"), 5, 3)
    assert [[hit["id"] for hit in line["hits"]] for line in lines] == ids.tolist()
    got = [[hit["score"] for hit in line["hits"]] for line in lines]
    np.testing.assert_allclose(got, scores, atol=1e-6)


def test_what_was_not_found_is_left_out(made, run, folder):
    """One cell holds fewer than 800 keys; JSON has no word for minus infinity."""
    _, out, _ = run("search bundle fresh.npy -k 800 --probes 1")
    assert "-1" not in re.findall(r'"id": (-?\d+)', out)
    assert "Infinity" not in out
    index = amips.load(folder / "bundle")
    sizes = np.bincount(index.cells, minlength=C)
    probed = index.route(np.load(folder / "fresh.npy"), 1)[:, 0]
    assert [len(line["hits"]) for line in json_lines(out)] == sizes[probed].tolist()


def test_a_recall_chooses_the_probes(made, run, folder):
    """The cheapest way that had it, be it a number of probes or a bound on the share."""
    index = amips.load(folder / "bundle")
    point = min((p for p in index.points if p.recall10 >= 0.95), key=lambda p: p.flops)
    assert 1 < point.probes < C
    code, out, _ = run("search bundle fresh.npy --recall 0.95")
    options = {"share": point.share} if point.share else {"probes": point.probes}
    ids = index.search(np.load(folder / "fresh.npy"), **options)[1]
    assert code == 0
    assert [[hit["id"] for hit in line["hits"]] for line in json_lines(out)] == ids.tolist()


def test_a_share_chooses_the_cells_of_each_query(made, run, folder):
    code, out, _ = run("search bundle fresh.npy --share 0.2")
    ids = amips.load(folder / "bundle").search(np.load(folder / "fresh.npy"), share=0.2)[1]
    assert code == 0
    assert [[hit["id"] for hit in line["hits"]] for line in json_lines(out)] == ids.tolist()
    wrong(run("search bundle fresh.npy --share 2"), "share=2.0: expected a share between 0 and 1")


def test_mmap_and_threads_change_nothing(made, run):
    expected = run("search bundle fresh.npy")
    got = run("search bundle fresh.npy --mmap --threads 1")
    assert got[0] == expected[0] == 0
    for one, other in zip(json_lines(got[1]), json_lines(expected[1]), strict=True):
        assert [hit["id"] for hit in one["hits"]] == [hit["id"] for hit in other["hits"]]


@pytest.mark.parametrize("storage", ["flat", "sq8", "pq", "lean"])
def test_names_from_a_text_file(made, run, folder, tmp_path, storage):
    out = tmp_path / "b"
    code, text, _ = run(f"build task run --ids names.txt --storage {storage} --out", out)
    assert code == 0
    assert rows_of(text)[-1][-3] > 0.9  # recall is of keys, whatever they are called
    _, text, _ = run("search", out, "fresh.npy", "-k", 3, "--probes", C)
    keys, fresh = np.load(folder / "keys.npy"), np.load(folder / "fresh.npy")
    top = (fresh @ keys.T).argmax(axis=1)
    assert [line["hits"][0]["id"] for line in json_lines(text)] == [f"Straße {i}" for i in top]
    _, text, _ = run("search", out, "fresh.npy", "-k", N, "--probes", 1)
    assert all(hit["id"] for line in json_lines(text) for hit in line["hits"])


def test_numbers_from_an_npy_file(made, run, tmp_path):
    assert run("build task run --ids numbers.npy --out", tmp_path / "b")[0] == 0
    _, text, _ = run("search", tmp_path / "b", "fresh.npy", "-k", 1)
    assert all(line["hits"][0]["id"] >= 10**12 for line in json_lines(text))


def test_without_a_run_it_routes_by_centroid(made, run, folder, tmp_path):
    code, out, _ = run("build task --out", tmp_path / "b")
    assert code == 0
    assert "routed by centroid" in out
    assert amips.load(tmp_path / "b").model is None
    assert re.search(r"routed by +centroid", run("info", tmp_path / "b")[1])


# fit


def test_fit(made, run, folder, tmp_path):
    out = tmp_path / "b"
    code, text, _ = run("fit keys.npy queries.npy --minutes 0.01 --cells 8 --ids names.txt --out", out)
    assert code == 0
    assert "recall@10" in text
    assert f"saved {out}" in text
    found = amips.load(out, keys=folder / "keys.npy")
    assert found.c == 8
    assert found.labels[3] == "Straße 3"
    assert list(tmp_path.iterdir()) == [out]


# What goes wrong


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("search bundle narrow.npy", "narrow.npy has dimension 5, bundle needs 12"),
        ("search bundle nan.npy", "query 7 is not finite|row 7"),
        ("search bundle nothing.npy", r"nothing\.npy"),
        ("search nothing fresh.npy", "nothing"),
        ("search task fresh.npy", "task is not a finished bundle"),
        ("search run fresh.npy", "run is not a finished bundle"),
        ("search bundle fresh.npy --probes 2 --recall 0.9", "give one of probes, recall and share"),
        ("search bundle fresh.npy --probes 0", "at least 1"),
        ("search bundle fresh.npy -k 0", "at least 1"),
        ("search bundle fresh.npy --recall 1.5", "between 0 and 1"),
        ("search bundle fresh.npy --out no/such/directory/hits.npz", "is not a directory"),
        ("build task nothing --out new", "nothing"),
        ("build nothing run --out new", "nothing"),
        ("build task run --out task", "not a bundle"),
        ("build task run --out keys.npy", "not a bundle"),
        ("build task run --out new --ids nothing.txt", r"nothing\.txt"),
        ("build task run --out new --ids keys.npy", "whole numbers or strings"),
        ("build task run --out new --ids bundle/manifest.json", "one for each of the 800 keys"),
        ("build task run --out new --ids run/model.safetensors", "UTF-8|one for each"),
        ("fit keys.npy narrow.npy --out new", "dimension 12 but queries have dimension 5"),
        ("fit keys.npy queries.npy --minutes 0 --out new", "minutes"),
        ("fit keys.npy nothing.npy --out new", r"nothing\.npy"),
        ("fit keys.npy queries.npy --out task", "not a bundle"),
    ],
)
def test_errors_are_one_line(made, run, folder, line, match):
    before = sorted(p.name for p in folder.iterdir())
    wrong(run(line), match)
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.parametrize(
    "line",
    [
        "build",
        "build task run",
        "build task run --out new --storage gold",
        "search bundle",
        "search bundle fresh.npy --probes many",
        "search bundle fresh.npy --colour",
        "fit keys.npy --out new",
        "fit keys.npy queries.npy",
        "info a b",
    ],
)
def test_usage_errors(made, run, line):
    wrong(run(line), "Usage|Error|Missing", code=2)


def test_a_run_of_another_task(made, run, folder, tmp_path):
    label = STEPS["label"].replace("--out task", f"--out {tmp_path}/task")
    keys, _ = make_world(N, 1, D, seed=77)
    np.save(tmp_path / "keys.npy", keys)
    assert run(label.replace("keys.npy", f"{tmp_path}/keys.npy"))[0] == 0
    wrong(run("build", tmp_path / "task", "run", "--out", tmp_path / "b"), "trained on other keys")
    shutil.rmtree(tmp_path / "task")
    assert run(label + " --seed 5")[0] == 0
    wrong(run("build", tmp_path / "task", "run", "--out", tmp_path / "b"), "trained on other cells")
    shutil.rmtree(tmp_path / "task")
    assert run(label + " --cells 7")[0] == 0
    wrong(run("build", tmp_path / "task", "run", "--out", tmp_path / "b"), "10 cells.* 7|other cells")
    assert not (tmp_path / "b").exists()


def test_a_damaged_bundle(made, run, folder, tmp_path):
    shutil.copytree(folder / "bundle", tmp_path / "b")
    (index,) = (tmp_path / "b").glob("data-*/index.faiss")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 4
    index.write_bytes(data)
    wrong(run("search", tmp_path / "b", "fresh.npy"), r"index\.faiss .*SHA-256")
    index.write_bytes(data[:-5])
    wrong(run("search", tmp_path / "b", "fresh.npy"), r"index\.faiss has \d+ bytes, expected")
    wrong(run("info", tmp_path / "b"), r"index\.faiss has \d+ bytes, expected")


def test_a_recall_out_of_reach_is_said(made, run, folder, tmp_path):
    """In one line, and what could be had is given."""
    index = amips.load(folder / "bundle")
    points = [p for p in index.points if p.probes <= 3 and not p.share]
    amips.save(amips.Searcher(index.engine, index.model, points, None, index.fingerprint), tmp_path / "b")
    done = subprocess.run(
        [AMIPS, "search", tmp_path / "b", "fresh.npy", "--recall", "1", "-k", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    assert len(json_lines(done.stdout)) == 100
    assert re.fullmatch(r"warning: recall 1\.0 is out of reach: .* with 3 probes\n", done.stderr)
