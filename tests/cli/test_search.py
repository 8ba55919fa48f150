"""`amips build`, `search` and `info` as a user types them, after `label` and `train`."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import amips
from amips.cli import main
from amips.design import Design
from amips.metrics import front
from amips.search import Report, Row, point_for, save, surest_point
from helpers import make_world

AMIPS = shutil.which("amips", path=str(Path(sys.executable).parent)) or shutil.which("amips")
N, D, C = 800, 12, 10
STEPS = {
    "label": "label keys.npy queries.npy --out task --cells 10 --query-aware 0 --copies 1 --val 80 --test 60",
    "train": "train task --net linear --rank 0 --samples 40000 --evaluations 2 --out run",
    "build": "build task run --storage flat --spill-fraction 0 --out bundle",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    keys, queries = make_world(N, 600, D, seed=4)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries[:500])
    np.save(folder / "fresh.npy", queries[500:])
    np.save(folder / "one.npy", queries[500])
    np.save(folder / "narrow.npy", queries[:, :5])
    bad = queries[500:].copy()
    bad[7, 1] = np.nan
    np.save(folder / "nan.npy", bad)
    (folder / "names.txt").write_text("".join(f"Straße {i}\n" for i in range(N)), "utf-8")
    (folder / "short.txt").write_text("a\nb\n")
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
def steps(folder):
    """What each step printed, each in a process of its own."""
    printed = {}
    for name, line in STEPS.items():
        done = subprocess.run(
            [AMIPS, *line.split()], cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        # Whether so short a training pays is not what is tested here.
        assert re.fullmatch(r"(warning: this model routes no better .*\n)?", done.stderr)
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
    numbers = [line for line in lines if line and all(cell[0].isdigit() for cell in line)]
    return [[float(cell.rstrip("%")) for cell in line] for line in numbers]


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def on_front(index):
    """The operating points that are shown: those that no cheaper one is as good as."""
    cost, recall = (np.array([getattr(p, name) for p in index.points]) for name in ("flops", "recall10"))
    return [index.points[i] for i in front(cost, recall)]


def test_from_files_to_a_bundle(folder, steps):
    assert "bundle: 800 keys, d = 12\n10 plain cells; linear router" in steps["build"]
    assert "a search serves recall@10 0.95 unless it is told otherwise" in steps["build"]
    index = amips.load(folder / "bundle", keys=folder / "keys.npy")
    rows, points = rows_of(steps["build"]), on_front(index)
    assert [int(row[0]) for row in rows] == [point.probes for point in points]
    for row, point in zip(rows, points, strict=True):
        # A bound on the mass is in a column of its own, empty where there is none.
        assert row[1:-5] == ([pytest.approx(point.min_mass, rel=0.06)] if point.min_mass else [])
        shares = [point.recall1, point.recall10, point.recall_assured(10)]
        assert row[-5:-2] == pytest.approx(shares, abs=6e-4)
        assert row[-2] == pytest.approx(100 * point.scanned, abs=6e-3)
    assert [row[-4] for row in rows] == sorted(row[-4] for row in rows)


# info


def facts_of(text):
    """What `info` prints before any table."""
    lines = text.split("\n\n")[0].splitlines()
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)


def test_info_of_a_task(steps, run):
    code, out, _ = run("info task")
    assert code == 0
    facts = facts_of(out)
    assert facts["task"] == "task"
    assert facts["keys"] == "800"
    assert facts["dimension"] == "12"
    assert facts["cells"] == "10 (plain k-means)"
    assert facts["val queries"] == "80"
    assert facts["top keys a query"] == "10"
    assert facts["targets of each cell"] == "no"


def test_info_of_a_run(steps, run):
    code, out, _ = run("info run")
    assert code == 0
    facts = facts_of(out)
    assert facts["kind"] == "linear"
    assert int(facts["parameters"].replace(",", "")) > 0
    assert "val " in out


def test_info_of_a_bundle(steps, run, folder):
    code, out, _ = run("info bundle")
    assert code == 0
    index, facts = amips.load(folder / "bundle"), facts_of(out)
    assert facts["design"] == index.design.describe()
    assert facts["serves recall@10"] == "0.95"
    assert facts["keys SHA-256"] == index.fingerprint[:16]
    assert rows_of(out)[-len(on_front(index)) :] == rows_of(steps["build"])


def test_info_of_a_bundle_with_a_report(steps, run, folder, tmp_path):
    rows = [Row("plain IVF", 0.95, 0.06, 0.05), Row("best design", 0.95, 0.03, 0.02, 1e-3, 1e-4)]
    report = Report(0.95, "flops", Design(8), 0.031, Design.plain(4), 0.062, rows, [4, 8], [16])
    save(replace(amips.load(folder / "bundle").snapshot, report=report), tmp_path / "b")
    code, out, _ = run("info", tmp_path / "b")
    assert code == 0
    assert str(report) in out


def test_the_design_of_a_bundle_can_be_built_again(steps, run, folder, tmp_path):
    code, out, _ = run("info --design bundle")
    assert code == 0
    (tmp_path / "design.json").write_text(out)
    assert run("build task run --design", tmp_path / "design.json", "--out", tmp_path / "b")[0] == 0
    assert amips.load(tmp_path / "b").design == amips.load(folder / "bundle").design
    (tmp_path / "design.json").write_text('{"cells": 5, "colour": "red"}')
    wrong(
        run("build task --design", tmp_path / "design.json", "--out", tmp_path / "c"),
        "not a design: .*colour",
    )
    wrong(run("info --design task"), "task is not a bundle: it has no design")


def test_info_of_a_wrapped_index(steps, run, folder, tmp_path):
    faiss = pytest.importorskip("faiss")
    keys = np.load(folder / "keys.npy")
    index = faiss.index_factory(D, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(keys)
    index.add(keys)
    faiss.write_index(index, str(tmp_path / "keys.faiss"))
    amips.wrap(tmp_path / "keys.faiss", None).save(tmp_path / "w")
    code, out, _ = run("info", tmp_path / "w")
    assert code == 0
    assert facts_of(out)["keys"] == "800"
    assert "keys.faiss" in out
    code, out, _ = run(
        "search", tmp_path / "w", "one.npy", "-k", 1, "--probes", 8, "--index", tmp_path / "keys.faiss"
    )
    assert code == 0
    best = int((keys @ np.load(folder / "one.npy")).argmax())
    assert json_lines(out)[0]["hits"][0]["id"] == best


def test_info_of_an_unfinished_run(steps, run, folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "stopped")
    (tmp_path / "stopped" / "model.json").unlink()
    code, out, _ = run("info", tmp_path / "stopped")
    assert code == 0
    assert "unfinished run" in out
    assert "--resume" in out


def test_an_unfinished_task(steps, run, folder, tmp_path):
    shutil.copytree(folder / "task", tmp_path / "begun")
    (tmp_path / "begun" / "task.json").rename(tmp_path / "begun" / "plan.json")
    plan = json.loads((tmp_path / "begun" / "plan.json").read_text())["options"]
    (tmp_path / "begun" / "plan.json").write_text(json.dumps(plan))
    code, out, _ = run("info", tmp_path / "begun")
    assert code == 0
    assert "an unfinished task; continue it with the same amips label" in out
    wrong(run("train", tmp_path / "begun", "--out", tmp_path / "run"), "the same amips label continues it")


def test_info_of_something_else(steps, run, folder, tmp_path):
    wrong(run("info", tmp_path), "is not a bundle, a task, a run or results of amips")
    wrong(run("info", tmp_path / "nowhere"), "nowhere")
    wrong(run("info keys.npy"), r"keys\.npy")
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    wrong(run("info", tmp_path), "is not a bundle")
    (tmp_path / "manifest.json").write_text('{"name": ')
    wrong(run("info", tmp_path), r"manifest\.json is damaged")
    wrong(run("info"), "Missing argument", code=2)


# search


def test_search_to_a_file(steps, run, folder, tmp_path):
    code, out, err = run("search bundle fresh.npy -k 5 --probes 3 --out", tmp_path / "hits.npz")
    assert (code, err) == (0, "")
    assert "the best 5 keys of 100 queries" in out
    with np.load(tmp_path / "hits.npz") as hits:
        expected = amips.load(folder / "bundle").search(np.load(folder / "fresh.npy"), 5, probes=3)
        np.testing.assert_array_equal(hits["ids"], expected[1])
        np.testing.assert_allclose(hits["scores"], expected[0], atol=1e-6)


def test_search_to_standard_output(steps, run, folder):
    code, out, err = run("search bundle fresh.npy -k 5 --probes 3")
    assert (code, err) == (0, "")
    lines = json_lines(out)
    assert [line["query"] for line in lines] == list(range(100))
    scores, ids = amips.load(folder / "bundle").search(np.load(folder / "fresh.npy"), 5, probes=3)
    assert [[hit["id"] for hit in line["hits"]] for line in lines] == ids.tolist()
    got = [[hit["score"] for hit in line["hits"]] for line in lines]
    np.testing.assert_allclose(got, scores, atol=1e-6)


def test_what_was_not_found_is_left_out(steps, run, folder):
    """One cell holds fewer than 800 keys; JSON has no word for minus infinity."""
    _, out, _ = run("search bundle fresh.npy -k 800 --probes 1")
    assert "-1" not in re.findall(r'"id": (-?\d+)', out)
    assert "Infinity" not in out
    index = amips.load(folder / "bundle")
    sizes = np.bincount(index.cells, minlength=C)
    probed = index.choose_cells(np.load(folder / "fresh.npy"), 1)[:, 0]
    assert [len(line["hits"]) for line in json_lines(out)] == sizes[probed].tolist()


def table_of(path):
    """The rows of a table of hits, in whatever format."""
    if path.suffix in (".csv", ".tsv"):
        lines = [
            line.split("," if path.suffix == ".csv" else "\t")
            for line in path.read_text("utf-8").splitlines()
        ]
        assert lines[0] == ["query", "rank", "id", "score"]
        return [(int(q), int(r), name, float(score)) for q, r, name, score in lines[1:]]
    table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.feather.read_table(path)
    assert table.column_names == ["query", "rank", "id", "score"]
    return [(row["query"], row["rank"], str(row["id"]), row["score"]) for row in table.to_pylist()]


@pytest.mark.parametrize("bundle", ["bundle", "named"])
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet", ".arrow", ".feather"])
def test_tables_of_hits(steps, named, run, folder, tmp_path, ending, bundle, monkeypatch):
    """A row for each result, block by block; what is not there has no row."""
    monkeypatch.setattr("amips.vectors.vectors.BLOCK_BYTES", 17 * 4 * D)
    out = tmp_path / f"hits{ending}"
    code, _, err = run(f"search {bundle} fresh.npy -k {N} --probes 2 --out", out)
    assert (code, err) == (0, "")
    scores, ids = amips.load(folder / bundle).search(np.load(folder / "fresh.npy"), N, probes=2)
    expected = [
        (query, rank, str(name), score)
        for query, (names, values) in enumerate(zip(ids.tolist(), scores.tolist(), strict=True))
        for rank, (name, score) in enumerate(zip(names, values, strict=True), 1)
        if name not in (-1, "")
    ]
    rows = table_of(out)
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    np.testing.assert_allclose([row[3] for row in rows], [row[3] for row in expected], atol=1e-6)
    assert list(tmp_path.iterdir()) == [out]


def test_json_lines_in_a_file_are_those_of_standard_output(steps, run, tmp_path):
    assert run("search bundle fresh.npy -k 3 --out", tmp_path / "hits.jsonl")[0] == 0
    assert (tmp_path / "hits.jsonl").read_text() == run("search bundle fresh.npy -k 3")[1]


@pytest.mark.parametrize(
    ("out", "match"),
    [
        ("hits.xlsx", r"hits\.xlsx: unknown ending '\.xlsx'; write one of \.npz \.csv \.tsv"),
        ("hits", "unknown ending ''"),
        ("s3://bucket/hits.csv", r"^error: s3://bucket/hits\.csv is an address, not a file: write locally"),
        ("no/such/hits.csv", "no/such is not a directory"),
        ("bundle", "is a directory; name a file"),
    ],
)
def test_where_hits_cannot_go_is_said_before_anything_is_read(steps, run, out, match):
    wrong(run("search nowhere fresh.npy --out", out), match)


def test_a_failed_search_leaves_no_file(steps, run, tmp_path):
    (tmp_path / "hits.csv").write_text("before")
    wrong(run("search bundle fresh.npy -k 0 --out", tmp_path / "hits.csv"), "at least 1")
    assert (tmp_path / "hits.csv").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_one_query(steps, run, folder):
    code, out, _ = run("search bundle one.npy -k 4 --probes 3")
    assert code == 0
    ids = amips.load(folder / "bundle").search(np.load(folder / "one.npy"), 4, probes=3)[1]
    assert [[hit["id"] for hit in line["hits"]] for line in json_lines(out)] == ids.tolist()


def ids_of(text):
    return [[hit["id"] for hit in line["hits"]] for line in json_lines(text)]


def test_a_recall_chooses_the_effort(steps, run, folder):
    """The cheapest way that is sure to have it, be it a number of probes or a bound on the mass."""
    index = amips.load(folder / "bundle")
    point = point_for(index.points, 0.95, 10)
    assert point.recall_assured(10) >= 0.95
    assert 1 < point.probes < C
    options = {"min_mass": point.min_mass} if point.min_mass else {"probes": point.probes}
    ids = index.search(np.load(folder / "fresh.npy"), **options)[1].tolist()
    code, out, _ = run("search bundle fresh.npy --recall 0.95")
    assert (code, ids_of(out)) == (0, ids)
    # Without options it serves the recall that it was made for.
    code, out, err = run("search bundle fresh.npy")
    assert (code, ids_of(out), err) == (0, ids, "")


def test_what_is_served_is_said_on_a_terminal(steps, run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, _, err = run("search bundle fresh.npy")
    assert err == "serving recall@10 0.95, which bundle was made for; --recall for another\n"
    assert run("search bundle fresh.npy --probes 2")[2] == ""


def test_a_mass_chooses_the_cells_of_each_query(steps, run, folder):
    code, out, _ = run("search bundle fresh.npy --min-mass 0.02")
    ids = amips.load(folder / "bundle").search(np.load(folder / "fresh.npy"), min_mass=0.02)[1]
    assert code == 0
    assert ids_of(out) == ids.tolist()
    wrong(run("search bundle fresh.npy --min-mass 2"), r"min_mass=2\.0: expected a share of the top keys")


def test_mmap_and_threads_change_nothing(steps, run):
    expected = run("search bundle fresh.npy")
    got = run("search bundle fresh.npy --mmap --threads 1")
    assert got[0] == expected[0] == 0
    for one, other in zip(json_lines(got[1]), json_lines(expected[1]), strict=True):
        assert [hit["id"] for hit in one["hits"]] == [hit["id"] for hit in other["hits"]]


@pytest.fixture(scope="module")
def named(steps, folder):
    """A bundle whose keys have names."""
    options = {"storage": "flat", "spill_fraction": 0.0, "out": folder / "named"}
    return amips.build(folder / "task", folder / "run", ids=folder / "names.txt", **options)


@pytest.mark.parametrize("storage", ["flat", "sq8", "pq", "lean"])
def test_names_from_a_text_file(steps, run, folder, tmp_path, storage):
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


def test_ids_from_a_column_of_a_parquet_file(steps, run, folder, tmp_path):
    names = [f"product {i}" for i in range(N)]
    pq.write_table(pa.table({"id": names, "price": np.arange(N)}), tmp_path / "keys.parquet")
    out = tmp_path / "b"
    assert run("build task run --ids", f"{tmp_path}/keys.parquet:id", "--out", out)[0] == 0
    assert amips.load(out).labels.tolist() == names
    pq.write_table(pa.table({"id": ["a", *names[:-1]][:1] * 2 + names[2:]}), tmp_path / "keys.parquet")
    line = run("build task run --ids", f"{tmp_path}/keys.parquet:id", "--out", tmp_path / "c")
    wrong(line, "rows 0 and 1 have the same id 'a'")


def test_numbers_from_an_npy_file(steps, run, tmp_path):
    assert run("build task run --ids numbers.npy --out", tmp_path / "b")[0] == 0
    _, text, _ = run("search", tmp_path / "b", "fresh.npy", "-k", 1)
    assert all(line["hits"][0]["id"] >= 10**12 for line in json_lines(text))


def test_without_a_run_it_routes_by_centroid(steps, run, folder, tmp_path):
    code, out, _ = run("build task --out", tmp_path / "b")
    assert code == 0
    assert "; centroids; " in out
    assert amips.load(tmp_path / "b").model is None
    assert "; centroids; " in run("info", tmp_path / "b")[1]


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
        ("search bundle fresh.npy --probes 2 --recall 0.9", "give one of recall, probes and min_mass"),
        ("search bundle fresh.npy --probes 0", "at least 1"),
        ("search bundle fresh.npy -k 0", "at least 1"),
        ("search bundle fresh.npy --recall 1.5", "above 0 and up to 1"),
        ("search bundle fresh.npy --out no/such/directory/hits.npz", "is not a directory"),
        ("build task nothing --out new", "nothing"),
        ("build nothing run --out new", "nothing"),
        ("build task run --out task", "not a bundle"),
        ("build task run --out keys.npy", "not a bundle"),
        ("build task run --out new --ids nothing.txt", r"nothing\.txt"),
        ("build task run --out new --ids keys.npy", "whole numbers or strings"),
        ("build task run --out new --ids short.txt", "one for each of the 800 keys"),
        ("build task run --out new --ids run/model.safetensors", "UTF-8|one for each"),
        (
            "build task run --out gs://bucket/b",
            r"^error: gs://bucket/b is an address, not a directory: write",
        ),
        ("build task run --out new --spill-fraction 2", "spill_fraction=2"),
        ("build task run --out new --recall 1.5", "recall=1.5"),
    ],
)
def test_errors_are_one_line(steps, run, folder, line, match):
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
        "info a b",
    ],
)
def test_usage_errors(steps, run, line):
    wrong(run(line), "Usage|Error|Missing", code=2)


def test_a_run_of_another_task(steps, run, folder, tmp_path):
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


def test_a_damaged_bundle(steps, run, folder, tmp_path):
    shutil.copytree(folder / "bundle", tmp_path / "b")
    (index,) = (tmp_path / "b").glob("data-*/codes.npy")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 4
    index.write_bytes(data)
    wrong(run("search", tmp_path / "b", "fresh.npy"), r"codes\.npy .*SHA-256")
    index.write_bytes(data[:-5])
    wrong(run("search", tmp_path / "b", "fresh.npy"), r"codes\.npy has \d+ bytes, expected")
    wrong(run("info", tmp_path / "b"), r"codes\.npy has \d+ bytes, expected")


def test_a_recall_out_of_reach_is_said(steps, run, folder, tmp_path):
    """In one line; what could be had is given to who asks for it."""
    index = amips.load(folder / "bundle")
    points = [p for p in index.points if p.probes <= 3 and not p.min_mass]
    save(replace(index.snapshot, points=points), tmp_path / "b")
    command = [AMIPS, "search", tmp_path / "b", "fresh.npy", "--recall", "1", "-k", "2"]
    options = {"cwd": folder, "capture_output": True, "text": True, "check": False, "timeout": 120}
    refused = subprocess.run(command, **options)
    highest = surest_point(points, 2).recall_assured(2)
    out_of_reach = f"recall 1.0 is out of reach: the highest recall@2 that can be relied on is {highest:.4f}"
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.fullmatch(rf"error: {re.escape(out_of_reach)}; .*--best-effort\)\n", refused.stderr)
    done = subprocess.run([*command, "--best-effort"], **options)
    assert (done.returncode, done.stderr) == (0, f"warning: {out_of_reach}\n")
    expected = index.search(np.load(folder / "fresh.npy"), 2, probes=3)[1]
    assert ids_of(done.stdout) == expected.tolist()
