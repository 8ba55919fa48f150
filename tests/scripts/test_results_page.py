"""docs/results.md and the pages behind it say what the committed result files say, and nothing else."""

import json
import re
import shutil

import pytest

from amips.bench import load_summary
from helpers import ROOT
from paper import page
from paper.claims import Claim, claims_of

NAMES = ("bench", *page.published())
OVERVIEW = ROOT / "docs" / "results.md"


def test_the_pages_are_what_the_command_makes_of_the_committed_files():
    pages = page.pages()
    assert {ROOT / place for place in pages} == {OVERVIEW, *(ROOT / "docs" / "results").glob("*.md")}
    for place, text in pages.items():
        assert (ROOT / place).read_text() == text, f"{place}: write it with: python -m paper page"


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_its_page_with_figures(name):
    summary = load_summary(ROOT / "results" / name)
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    assert summary.name == name
    for sentence in summary.verdict:
        assert sentence in text
    for table in summary.tables[:1]:
        assert table.markdown() in text
    files = {path.name for path in (ROOT / "results" / name).iterdir()}
    assert files == {"summary.json", *(f"{chart.name}.png" for chart in summary.charts)}
    for chart in summary.charts:
        assert f"(../../results/{name}/{chart.name}.png)" in text
        assert (ROOT / "results" / name / f"{chart.name}.png").stat().st_size > 1000


@pytest.mark.parametrize("name", NAMES)
def test_no_place_of_a_machine_is_published(name):
    text = (ROOT / "results" / name / "summary.json").read_text()
    assert not re.search(r"(?<![\w.])/(tmp|home|work|root|usr|var)/", text)


@pytest.mark.parametrize("name", page.published())
def test_the_overview_has_a_row_for_each_claim(name):
    """Every experiment says which claims it tests: sentences of its verdict, and a row for each."""
    summary = load_summary(ROOT / "results" / name)
    claims = claims_of(summary)
    assert "claims" in summary.values
    assert claims
    assert {claim.sentence() for claim in claims} <= set(summary.verdict)
    rows = [
        line for line in OVERVIEW.read_text().splitlines() if line.endswith(f"[{name}](results/{name}.md) |")
    ]
    assert len(rows) == len({(claim.text, claim.where, claim.split) for claim in claims})
    for claim in claims:
        assert re.match(r"(Section|Appendix) ", claim.where)
        begin = f"| {claim.text} | {claim.where} | {claim.split} |"
        (row,) = [row for row in rows if row.startswith(begin)]
        assert claim.evidence in row


def test_the_headlines_that_did_not_hold_are_among_them():
    """Of routing and of searching, the paper's main claims: each is tested, and none held here."""
    for name in ("routing", "routing128", "ivf", "backends"):
        assert any(claim.held is False for claim in claims_of(load_summary(ROOT / "results" / name)))


@pytest.mark.parametrize(
    ("held", "word"),
    [
        ([True], "held"),
        ([False], "not held"),
        ([None], "not decided"),
        ([True, True], "held"),
        ([True, False], "held in 1 of 2"),
        ([None, False], "not held"),
        ([None, True], "held in 1 of 2"),
    ],
)
def test_the_outcome_of_a_claim_that_was_tested_several_times(held, word):
    assert page.outcome([Claim("a", "b", one, "c") for one in held]) == word


def test_the_reasons_are_the_sentences_of_the_experiments_that_show_them():
    text = OVERVIEW.read_text().split("## Why some did not hold")[1]
    for sentence in load_summary(ROOT / "results" / "leak").verdict:
        assert f"> - {sentence}" in text
    assert "A unit is" in text


def test_a_changed_result_is_noticed(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    path = tmp_path / "results" / "ood" / "summary.json"
    summary = json.loads(path.read_text())
    summary["values"]["claims"][0]["held"] = not summary["values"]["claims"][0]["held"]
    path.write_text(json.dumps(summary))
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    assert page.pages()[page.OVERVIEW] != OVERVIEW.read_text()


def test_what_is_collected_is_what_a_page_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    lines = page.collect(ROOT / "results")
    assert [line for line in lines if line.endswith(": copied")] == [
        f"{ROOT / 'results' / name}: copied" for name in NAMES
    ]
    for name in ("routing", "shift"):
        collected = {path.name for path in (tmp_path / "results" / name).iterdir()}
        assert collected == {path.name for path in (ROOT / "results" / name).iterdir()}
        assert claims_of(load_summary(tmp_path / "results" / name)) == claims_of(
            load_summary(ROOT / "results" / name)
        )
    assert page.collect(tmp_path / "nothing")[0].endswith("nothing/bench: nothing there")


def test_figures_of_the_tables_follow_from_the_values():
    """The cost table of the bench is what its values say, to the digits shown."""
    summary = load_summary(ROOT / "results" / "bench")
    costs = next(table for table in summary.tables if table.title == "What a recall costs")
    for row, cost in zip(costs.rows, summary.values["costs"], strict=True):
        assert row[:2] == [f"{cost['metric']} {cost['recall']:.2f}", cost["family"]]
        fractions = ["not reached" if v is None else f"{v:.2%}" for v in (cost["flops"], cost["scanned"])]
        assert row[2:4] == fractions
