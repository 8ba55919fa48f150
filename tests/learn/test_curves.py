"""What is shown of a training run: its curves, centroid routing as a line, and the page of `amips report`."""

import json

import pytest
import torch
from click.testing import CliRunner

import amips
from amips.bench import load_summary, training_curves
from amips.bench.facts import training_summary
from amips.cli import cli
from amips.nets import read_run_config, write_run_config

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def linear(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("linear") / "run"
    return amips.train(task, samples=4096, batch=128, evaluations=8, out=out), out


@pytest.fixture(scope="module")
def mapper(task1, tmp_path_factory):
    out = tmp_path_factory.mktemp("mapper") / "run"
    network = amips.KeyNet(width=8, depth=2)
    return amips.train(task1, network, samples=2048, batch=128, evaluations=8, out=out), out


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


class TestCurves:
    def test_of_a_router(self, linear):
        model, run = linear
        charts = {chart.name: chart for chart in training_curves({str(run): "linear"})}
        assert list(charts) == ["training-scan", "training-routing"]  # 8 cells: routing@8 is always 1
        for name, metric in (("training-scan", "scan@0.95"), ("training-routing", "routing@1")):
            curve, line = charts[name].panels[0].series
            assert (curve.name, curve.group) == ("linear", "contender")
            assert curve.x == [entry["samples"] for entry in log(run)]
            assert curve.y == [entry["val"][metric] for entry in log(run)]
            assert (line.name, line.group) == ("centroid routing", "reference")
            assert line.x == [0.0, curve.x[-1]]
            assert line.y == [model.about["centroid"][metric]] * 2

    def test_of_a_mapper(self, mapper):
        (chart,) = training_curves({str(mapper[1]): "KeyNet"})
        assert chart.name == "training-erel"
        assert [series.name for series in chart.panels[0].series] == ["KeyNet"]

    def test_runs_with_other_cells_have_lines_of_their_own(self, linear, world, tmp_path):
        other = amips.label(*world, cells=12, val=100, test=100, query_aware=0.0)
        amips.train(other, samples=512, batch=128, out=tmp_path / "run")
        runs = {str(linear[1]): "8 cells", str(tmp_path / "run"): "12 cells"}
        names = [series.name for series in training_curves(runs)[0].panels[0].series]
        assert names == ["8 cells", "12 cells", "centroid routing, 8 cells", "centroid routing, 12 cells"]
        same = {str(linear[1]): "one", str(linear[1]) + "/.": "two"}
        assert [s.name for s in training_curves(same)[0].panels[0].series] == [
            "one",
            "two",
            "centroid routing",
        ]

    def test_where_nothing_was_logged(self, tmp_path):
        assert training_curves({str(tmp_path): "nothing"}) == []


class TestSummary:
    def test_of_a_router(self, linear):
        model, run = linear
        summary = training_summary(run)
        scans = {name: model.about[name]["scan@0.95"] for name in ("centroid", "start", "val")}
        assert summary.values == {
            "metric": "scan@0.95",
            "centroid routing": scans["centroid"],
            "untrained": scans["start"],
            "trained": scans["val"],
        }
        figures = ", ".join(
            f"{name} {100 * scans[key]:.1f} %"
            for name, key in (("centroid routing", "centroid"), ("untrained", "start"), ("trained", "val"))
        )
        assert summary.verdict[0] == f"keys scanned for recall@10 0.95, on val: {figures}"
        assert summary.tables[0].head == ["metric", "centroid routing", "untrained", "trained"]
        assert ("route_top", "10") in summary.facts
        assert load_summary(run) == summary  # what `amips report` reads

    def test_of_an_unfinished_run(self, linear, tmp_path):
        (tmp_path / "log.jsonl").write_bytes((linear[1] / "log.jsonl").read_bytes())
        write_run_config(tmp_path, read_run_config(linear[1]), finished=False)
        assert any("not finished" in sentence for sentence in training_summary(tmp_path).verdict)
        (tmp_path / "log.jsonl").write_text("")
        with pytest.raises(amips.ResultsError, match="no evaluations yet"):
            training_summary(tmp_path)

    @pytest.mark.parametrize("which", ["linear", "mapper"])
    def test_report(self, request, which, tmp_path):
        _, run = request.getfixturevalue(which)
        words = [
            "report",
            str(run),
            "--out",
            str(tmp_path / "page.html"),
            "--figures",
            str(tmp_path / "pictures"),
        ]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        page = (tmp_path / "page.html").read_text()
        assert "on val" in page
        assert ("centroid routing" in page) == (which == "linear")
        name = "training-scan" if which == "linear" else "training-erel"
        assert (tmp_path / "pictures" / f"{name}.png").stat().st_size > 1000
