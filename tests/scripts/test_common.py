"""benchmarks/common.py: a part of a table is measured anew, the rest of it stays."""

import json

from helpers import load_script


def test_what_others_measured_stays(tmp_path, monkeypatch):
    common = load_script("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    one, other, again = {"keys": 20, "s": 1.0}, {"keys": 3, "s": 2.0}, {"keys": 20, "s": 5.0}
    assert common.merged("table", [one], ["keys"]) == [one]  # there are no results yet
    (tmp_path / "table.json").write_text(json.dumps({"raw": [one]}))
    assert common.merged("table", [other], ["keys"]) == [other, one]
    assert common.merged("table", [again, other], ["keys"]) == [other, again]


def test_of_two_measurements_of_the_same_the_last_counts(tmp_path, monkeypatch):
    common = load_script("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    missed, reached = {"n": 1, "log": "fixed", "test": None}, {"n": 1, "log": "fixed", "test": 0.1}
    assert common.merged("table", [missed, reached], ["n", "log"]) == [reached]
