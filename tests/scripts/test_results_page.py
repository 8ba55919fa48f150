"""docs/results.md says what the committed result files say, and nothing else."""

import json
import re
import shutil
from pathlib import Path

import pytest

from amips.bench import load_summary
from paper import STUDIES as ALL
from helpers import ROOT, load_script

STUDIES = ("bench", *ALL)


@pytest.fixture
def script():
    return load_script("results_page")


def test_the_page_is_what_the_command_makes_of_the_committed_files(script):
    assert (ROOT / "docs" / "results.md").read_text() == script.page()


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_there_with_its_figures(name):
    summary = load_summary(ROOT / "results" / name)
    page = (ROOT / "docs" / "results.md").read_text()
    assert summary.name == name
    for sentence in summary.verdict:
        assert sentence in page
    for table in summary.tables[:1]:
        assert table.markdown() in page
    for chart in [*summary.charts, *summary.curves]:
        assert (ROOT / "results" / name / f"{chart.name}.png").stat().st_size > 1000


@pytest.mark.parametrize("name", STUDIES)
def test_no_place_of_a_machine_is_published(name):
    text = (ROOT / "results" / name / "summary.json").read_text()
    assert not re.search(r"(?<![\w.])/(tmp|home|work|root|usr|var)/", text)


def test_every_study_has_a_place_on_the_page(script):
    assert set(script.ORDER) - {"bench"} == set(ALL)


def test_what_did_not_reproduce_is_gathered_with_the_reasons(script):
    summaries = {name: load_summary(ROOT / "results" / name) for name in STUDIES}
    text = script.not_reproduced(summaries)
    claims, *reasons = text.split("**The ")
    sentences = [said for summary in summaries.values() for said in summary.verdict]
    missing = [said for said in sentences if "not reproduced" in said]
    assert missing
    for said in missing:
        assert said.split("(the paper: ")[1].split(")")[0] in claims
        assert said not in text
    assert len(reasons) == 2
    assert all(said in reasons[0] for said in summaries["leak"].verdict)


def test_a_changed_result_is_noticed(script, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    path = tmp_path / "results" / "bench" / "summary.json"
    summary = json.loads(path.read_text())
    summary["verdict"][0] += " Ten times."
    path.write_text(json.dumps(summary))
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    assert script.page() != (ROOT / "docs" / "results.md").read_text()


def test_figures_of_the_tables_follow_from_the_values():
    """The cost table of the bench is what its values say, to the digits shown."""
    summary = load_summary(ROOT / "results" / "bench")
    costs = next(table for table in summary.tables if table.title == "What a recall costs")
    for row, cost in zip(costs.rows, summary.values["costs"], strict=True):
        assert row[:2] == [f"{cost['metric']} {cost['recall']:.2f}", cost["family"]]
        shares = ["not reached" if v is None else f"{v:.2%}" for v in (cost["flops"], cost["scanned"])]
        assert row[2:4] == shares
