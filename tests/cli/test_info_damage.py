"""`amips info`, and what is built, of directories whose manifests say what cannot be: one line each."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import amips
from amips.bench import load_summary
from amips.bench.summary import Chart, Panel, Series, Summary, Table
from amips.cli import cli
from amips.errors import AmipsError, ResultsError, RunError, TaskError
from amips.nets import load_model
from chaos.mutations import reseal


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("info")
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((m, 8)).astype(np.float32) for m in (200, 120))
    task = amips.label(keys, queries, cells=6, val=20, test=20, query_aware=0, out=folder / "task")
    amips.train(task, amips.Linear(rank=2), samples=128, out=folder / "run")
    return folder


def changed(path, file, *where, value):
    """One value of a JSON file replaced, and every hash made true again."""
    stated = json.loads((path / file).read_text())
    inner = stated
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    (path / file).write_text(json.dumps(stated))
    reseal(path)


def told(path):
    return CliRunner().invoke(cli, ["info", str(path)])


def refused(path, error, match):
    with pytest.raises(error, match=match) as caught:
        raise told(path).exception
    assert "\n" not in str(caught.value)


def test_what_is_whole(folder):
    for name in ("task", "run"):
        assert told(folder / name).exit_code == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("query_aware", value) for value in ("x", -1, [], None, float("nan"), True)),
        *(("spherical", value) for value in ("x", 3)),
        *(("runs", value) for value in ("x", 0, 1.5)),
        *(("cells", value) for value in (None, [6], {})),
    ],
)
def test_options_of_a_task(folder, tmp_path, name, value):
    task = shutil.copytree(folder / "task", tmp_path / "task")
    changed(task, "task.json", "options", name, value=value)
    refused(task, TaskError, r"task\.json is damaged: ")
    with pytest.raises(TaskError, match="is damaged"):
        amips.build(task, None)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *((("about", "samples"), value) for value in ("x", None, [], True)),
        *((("about", "seconds"), value) for value in ("x", None)),
        *((("about", "val"), value) for value in ([], "x", {"erel": "x"}, {"erel": None}, 5)),
        *((("about", "centroid"), value) for value in ([], {"a": []})),
        (("about",), {}),
    ],
)
def test_figures_of_a_run(folder, tmp_path, where, value):
    run = shutil.copytree(folder / "run", tmp_path / "run")
    changed(run, "model.json", *where, value=value)
    refused(run, RunError, r"model\.json is damaged: about\.\w+ is not what training measures")
    with pytest.raises(RunError, match="is damaged"):
        load_model(run)


def test_a_model_that_was_put_together_needs_no_figures(folder, tmp_path):
    model = load_model(folder / "run")
    type(model)(model.architecture, model.weights, {}).save(tmp_path / "model")
    assert told(tmp_path / "model").exit_code == 0


def test_links_out_of_the_directory(folder, tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "task.json").symlink_to(folder / "task" / "task.json")
    refused(tmp_path / "task", AmipsError, "is a link to a place outside")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("verdict",), [1]),
        (("verdict",), "x"),
        (("tables", 0, "rows"), [[1]]),
        (("tables", 0, "head"), None),
        (("tables", 0), {}),
        (("charts", 0, "panels", 0, "series", 0, "x"), ["a"]),
        (("charts", 0, "panels", 0, "series", 0, "group"), "other"),
        (("charts", 0, "panels", 0, "log_x"), 1),
        (("facts",), [["a"]]),
        (("facts",), [["a", 2]]),
        (("machine",), {"cpu": 3}),
        (("more",), 3),
    ],
)
def test_a_summary(tmp_path, where, value):
    panel = Panel("p", "x", "y", [Series("s", [1, 2.5], [0, 1])], marks=[("m", 1.0)])
    summary = Summary("bench", "t", ["v"], [Table("t", ["h"], [["r"]])], [Chart("c", "t", [panel])])
    summary.save(tmp_path)
    assert load_summary(tmp_path) == summary
    assert told(tmp_path).exit_code == 0
    changed(tmp_path, "summary.json", *where, value=value)
    refused(tmp_path, ResultsError, r"summary\.json is damaged: ")
