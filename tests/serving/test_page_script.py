"""The script of the page outside of a browser, in Node, with a service that explains one query at a time."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT

HARNESS = Path(__file__).with_name("page_harness.js")


def test_a_slider_that_is_dragged_asks_when_it_rests_and_never_twice_at_a_time():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node runs the script of the page")
    page = ROOT / "src" / "amips" / "serving" / "page.html"
    done = subprocess.run([node, HARNESS, page], capture_output=True, text=True, timeout=30, check=True)
    value = json.loads(done.stdout)
    assert value["problem"] == ""
    assert value["disabled"] is False
    assert value["log"][0] == [503, 0.9]  # of somebody else, after which it is asked again
    statuses = [status for status, _ in value["log"][1:]]
    assert statuses == [200] * len(statuses)
    assert 3 <= len(statuses) <= 5
    assert value["log"][-1] == [200, 0.7]
