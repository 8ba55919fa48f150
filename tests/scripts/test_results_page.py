"""docs/results.md and the pages behind it say what the committed result files say, and nothing else."""

import json
import re
import shutil

import pytest

from amips.bench import load_summary
from helpers import ROOT
from paper import EXPERIMENTS, page
from paper.claims import Claim, claims_of
from paper.reasons import REASONS
from paper.splits import outcome
from paper.workspace import SPLITS_BY

RESULTS = sorted(path.parent.name for path in (ROOT / "results").glob("*/summary.json"))
TESTED = [name for name in RESULTS if name != "bench"]
OVERVIEW = ROOT / "docs" / "results.md"


def test_the_pages_are_what_the_command_makes_of_the_committed_files():
    pages = page.pages()
    assert {ROOT / place for place in pages} == {OVERVIEW, *(ROOT / "docs" / "results").glob("*.md")}
    for place, text in pages.items():
        assert (ROOT / place).read_text() == text, f"{place}: write it with: python -m paper page"


def test_every_experiment_is_published():
    assert {"bench", *page.published()} == set(RESULTS)
    for name in TESTED:
        command = load_summary(ROOT / "results" / name).command
        assert page.published_as(page.experiment_of(name), command) == name


@pytest.mark.parametrize("name", RESULTS)
def test_every_experiment_has_its_page_with_figures(name):
    summary = load_summary(ROOT / "results" / name)
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    assert summary.name == page.experiment_of(name)
    for sentence in summary.verdict:
        assert sentence in text
    for table in summary.tables[:1]:
        assert table.markdown() in text
    files = {path.name for path in (ROOT / "results" / name).iterdir()}
    assert files == {"summary.json", *(f"{chart.name}.png" for chart in summary.charts)}
    for chart in summary.charts:
        assert f"(../../results/{name}/{chart.name}.png)" in text
        assert (ROOT / "results" / name / f"{chart.name}.png").stat().st_size > 1000


@pytest.mark.parametrize("name", RESULTS)
def test_no_place_of_a_machine_is_published(name):
    text = (ROOT / "results" / name / "summary.json").read_text()
    assert not re.search(r"(?<![\w.])/(tmp|home|work|root|usr|var)/", text)


@pytest.mark.parametrize("name", TESTED)
def test_the_overview_has_a_row_for_each_claim(name):
    """Every experiment says which claims it tests: sentences of its verdict, and a row for each."""
    summary = load_summary(ROOT / "results" / name)
    claims = claims_of(summary)
    assert "claims" in summary.values
    assert claims
    assert {claim.sentence() for claim in claims} <= set(summary.verdict)
    for claim in claims:
        if claim.split not in SPLITS_BY:
            continue
        assert re.match(r"(Section|Appendix) ", claim.where)
        begin = f"| {claim.text} | {claim.where} | "
        (row,) = [line for line in OVERVIEW.read_text().splitlines() if line.startswith(begin)]
        assert f"[{name}](results/{name}.md)" in row
        _, _, by_rows, by_source, _ = row.strip("| ").split(" | ")
        if EXPERIMENTS[page.experiment_of(name)].independent:  # said once, for both splits
            assert f"{claim.evidence_text} ({name})" in by_rows
            assert "whatever the split" in by_rows
            assert by_source == f"{outcome([claim])}, whatever the split"
        else:
            assert f"{claim.evidence_text} ({name})" in {"rows": by_rows, "source": by_source}[claim.split]


def test_the_headlines_come_first_and_what_was_not_run_says_so():
    rows = [line for line in OVERVIEW.read_text().splitlines() if line.startswith("| ")]
    assert rows[2].startswith("| mapped queries find more than x at small and middle budgets | Section 4.4")
    assert "(leak)" in rows[2]
    for row in rows:
        for cell in row.strip("| ").split(" | "):
            assert not cell.startswith("not run") or cell.startswith("not run. It "), row  # and says why
    first = [
        claim.text
        for name in ("leak", "routing")
        for claim in claims_of(load_summary(ROOT / "results" / name))
    ]
    assert all(row.split(" | ")[0].removeprefix("| ") in first for row in rows[2:6])


def test_what_was_tested_on_a_log_split_by_time_has_a_table_of_its_own():
    text = OVERVIEW.read_text().split("## Traffic, split by time")[1].split("## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    claims = claims_of(load_summary(ROOT / "results" / "repeats"))
    assert len(rows) == len(claims)
    for row, claim in zip(rows, claims, strict=True):
        assert row.startswith(
            f"| {claim.text} | {claim.where} | {outcome([claim])}. {claim.evidence_text} | "
        )


def test_every_claim_that_did_not_hold_has_a_reason_and_who_shows_it_exists():
    text = OVERVIEW.read_text().split("## Why some did not hold")[1].split("## Traffic, split by time")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    given = {(row[0], row[1]) for row in rows}
    failed = {
        (claim.text, claim.split)
        for name in TESTED
        for claim in claims_of(load_summary(ROOT / "results" / name))
        if claim.held is False and claim.split in SPLITS_BY
    }
    assert given == failed
    texts = {text for text, _ in failed}
    for reason in REASONS:
        assert set(reason.claims) <= texts  # no reason is left of a claim that is gone, or holds by now
        assert not reason.shown_by or reason.shown_by in RESULTS


@pytest.mark.parametrize(
    ("held", "word"),
    [
        ([True], "held"),
        ([False], "not held"),
        ([None], "not decided"),
        ([True, True], "held"),
        ([True, False], "held in 1, not held in 1 of 2"),
        ([None, False], "not held in 1, not decided in 1 of 2"),
        ([None, True], "held in 1, not decided in 1 of 2"),
    ],
)
def test_the_outcome_of_a_claim_that_was_tested_several_times(held, word):
    assert outcome([Claim("a", "b", one, "c") for one in held]) == word


def test_every_claim_is_counted_once_by_its_outcome():
    """Held, not held, not decided, not run, and what is mixed: together all of them, under each split."""
    lines = [line for line in OVERVIEW.read_text().splitlines() if re.match(r"Of \d+ claims under", line)]
    assert len(lines) == 2
    for line in lines:
        total, *counts = (int(number) for number in re.findall(r"\d+", line))
        assert sum(counts) == total
    assert all("not decided" in line for line in lines)


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
    there = [name for name in ("bench", *EXPERIMENTS) if name in RESULTS]
    assert [line for line in lines if line.endswith(": copied")] == [
        f"{ROOT / 'results' / name}: copied" for name in there
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
