"""What pages say of committed results that are older than the experiments."""

import pytest

from amips.bench import Summary, load_summary
from paper.page import RESULTS, page
from paper.stored import FEW_KEYS, LACKS, ONE_SIDED, older_than

TODAY = {
    "routing": {"samples": {"SupportNet XS, L = 4, n_x = 1": 1, "linear": 2}},
    "ivf": {"one index": {"recall@0.1%": {"place": {"XS": 0}}}},
    "backends": {"returned": {}},
    "ood": {"curves": {"0.00": {"original": {"seconds": []}}}},
    "encoders": {"encoders": {"one": {"seconds": {}}}},
    "losses": {"networks": {"KeyNet, both averaged": {}}},
    "horizon": {},
}
BEFORE = {
    "routing": {"samples": {"SupportNet XS, L = 4, n_x = 0": 1}},
    "ivf": {"recall": {}},
    "backends": {"recall": {}},
    "ood": {"curves": {"0.00": {"original": {"seconds": []}}, "0.01": {"original": {"flops": []}}}},
    "encoders": {"encoders": {"one": {"seconds": {}}, "two": {}}},
    "losses": {"networks": {"KeyNet, both": {}}},
}


def summary(values, method=()):
    return Summary(
        name="a",
        title="A",
        verdict=[],
        tables=[],
        charts=[],
        facts=[],
        method=list(method),
        command="",
        machine={},
        values=values,
    )


@pytest.mark.parametrize("name", TODAY)
def test_a_run_of_today_needs_no_note(name):
    assert older_than(name, summary(TODAY[name], ["Cells are spherical k-means on all keys."])) == []
    assert older_than(name, summary({"splits": {"rows": TODAY[name], "source": TODAY[name]}})) == []


@pytest.mark.parametrize("name", BEFORE)
def test_what_a_run_of_before_lacks_is_said(name):
    one_sided = [ONE_SIDED] if name == "ivf" else []
    assert older_than(name, summary(BEFORE[name])) == [*one_sided, LACKS[name]]
    assert older_than(name, summary({"splits": {"rows": TODAY[name], "source": BEFORE[name]}})) == [
        LACKS[name]
    ]
    cells = summary(TODAY[name], ["Chosen on val. Cells are spherical k-means. FLOPs"])
    assert older_than(name, cells) == [FEW_KEYS]


def test_it_stands_on_the_page():
    stored = {name: load_summary(RESULTS / name) for name in LACKS}
    notes = {name: own for name, one in stored.items() if (own := older_than(name, one))}
    assert notes  # where nothing is lacking, nothing is to be said, and paper/stored.py can go
    for name, own in notes.items():
        text = page(name, stored[name])
        assert all(note in text for note in own)
