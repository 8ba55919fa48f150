"""Claims as data: sentences follow from them, and they survive being stored."""

import ast
import re

import pytest

from amips.bench import Summary, load_summary
from amips.errors import ResultsError
from helpers import ROOT
from paper.claims import Claim, alike, all_of, claim_values, claims_of, decided, verdict
from paper.splits import outcome

HELD = Claim("larger is better", "Section 4, Figure 1", True, "XS 0.1, S 0.2")
FINDINGS = [
    HELD,
    "A sentence.",
    Claim("deeper, too", "Section 4", False, "no"),
    Claim("and so on", "A", None, "?"),
]


def test_sentences_follow_from_claims():
    assert verdict(FINDINGS) == [
        "XS 0.1, S 0.2: as in the paper (larger is better).",
        "A sentence.",
        "no: not reproduced (the paper: deeper, too).",
        "?: not decided (the paper: and so on).",
    ]


def test_claims_survive_being_stored(tmp_path):
    Summary("x", "X", verdict(FINDINGS), values=claim_values(FINDINGS)).save(tmp_path)
    assert claims_of(load_summary(tmp_path)) == [one for one in FINDINGS if isinstance(one, Claim)]


def test_a_summary_without_claims_has_none_and_a_damaged_one_says_so():
    assert claims_of(Summary("bench", "Bench", [])) == []
    with pytest.raises(ResultsError, match="the summary of x holds no readable claims") as caught:
        claims_of(Summary("x", "X", [], values={"claims": [{"text": "a"}]}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("low", "high", "held"), [(0.1, 0.2, True), (0.0, 0.2, None), (-0.1, 0.09, False), (0.0, 0.1, None)]
)
def test_an_interval_decides_or_leaves_it_open(low, high, held):
    assert decided(low, high, 0.1) is held


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((True, True), "held"),
        ((False,), "not held"),
        ((None, None), "not decided"),
        ((True, None), "held in 1, not decided in 1 of 2"),
        ((None, False, False), "not held in 2, not decided in 1 of 3"),
        ((False, None, True, True), "held in 2, not held in 1, not decided in 1 of 4"),
    ],
)
def test_what_is_open_is_neither_held_nor_not(ends, words):
    assert outcome([Claim("a", "b", end, "c") for end in ends]) == words


def test_all_of_several_things_hold_or_one_does_not():
    assert all_of([True, True]) is True
    assert all_of([True, None]) is None
    assert all_of([None, False]) is False


def test_what_changes_little_is_within_bounds_on_both_sides():
    assert alike(-0.005, 0.01, 0.01) is True
    assert alike(-0.02, 0.001, 0.01) is None  # it may fall by more
    assert alike(-0.05, -0.02, 0.01) is False
    assert alike(0.02, 0.05, 0.01) is False


def test_evidence_without_an_interval_says_so():
    assert Claim("a", "b", True, "c").evidence_text == "c; no interval"
    assert Claim("a", "b", None, "c").evidence_text == "c"
    assert Claim("a", "b", True, "c", intervals=True).evidence_text == "c"
    assert Claim("a", "b", True, "c", value=1.0, low=0.5, high=1.5).evidence_text == "c"


def test_what_a_series_is_is_never_read_off_its_name():
    """Ways are fields: nothing in paper/ looks at how a name begins or ends, or searches a sentence."""
    for path in sorted((ROOT / "paper").glob("*.py")):
        tree = ast.parse(path.read_text())
        asked = {
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        text = path.read_text()
        assert not re.search(r"\.name\.(ends|starts)with", text), path
        assert not re.search(r"^(import|from) re\b", text, re.MULTILINE), path  # no pattern is looked for
        assert not asked & {"endswith", "fullmatch"}, path
