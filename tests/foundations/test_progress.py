"""Progress: a bar on a terminal, plain lines with an estimate in a log, nothing when it is not asked for."""

import sys

import pytest

from amips import progress
from amips.progress import Bar, clock


@pytest.fixture
def now(monkeypatch):
    """A clock that the test turns."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


def test_a_log_gets_a_line_every_half_minute_with_an_estimate(now, capsys):
    with Bar(20_000, "label", " queries", True) as shown:
        for _ in range(7):
            now[0] += 10
            shown.update(1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "label: 15 % of 20,000 queries, 0:30 elapsed, about 2:50 left",
        "label: 30 % of 20,000 queries, 1:00 elapsed, about 2:20 left",
        "label: 7,000 queries done in 1:10",
    ]


def test_a_short_step_says_nothing(now, capsys):
    with Bar(10, "label", " queries", True) as shown:
        now[0] += 29
        shown.update(10)
    assert capsys.readouterr() == ("", "")


def test_silent_when_not_shown(now, capsys):
    with Bar(10, "label", " queries", False) as shown:
        now[0] += 3600
        shown.update(10)
    assert shown.n == 10
    assert capsys.readouterr() == ("", "")


def test_what_was_done_before_is_not_part_of_the_pace(now, capsys):
    with Bar(1000, "embed", " texts", True, start=900) as shown:
        now[0] += 60
        shown.update(50)
    assert (
        capsys.readouterr().err.splitlines()[0] == "embed: 95 % of 1,000 texts, 1:00 elapsed, about 1:00 left"
    )


def test_without_a_total_it_counts(now, capsys):
    with Bar(0, "corpus", "lines", True) as shown:
        now[0] += 31
        shown.set_postfix_str("part 2")
        shown.update(5000)
        shown.total = 10_000
        now[0] += 31
        shown.set_postfix(loss="0.5")
        shown.update(1000)
    assert capsys.readouterr().err.splitlines()[:2] == [
        "corpus: 5,000 lines, 0:31 elapsed, part 2",
        "corpus: 60 % of 10,000 lines, 1:02 elapsed, about 0:41 left, loss=0.5",
    ]


def test_a_failure_does_not_say_that_it_is_done(now, capsys):
    def fail():
        with Bar(10, "label", "queries", True) as shown:
            now[0] += 31
            shown.update()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "done" not in capsys.readouterr().err


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Bar(10, "label", " queries", True) as shown:
        shown.update(4)
        shown.total = 20
        shown.set_postfix(loss="0.5")
    error = capsys.readouterr().err
    assert "label:   0%|" in error
    assert "queries" in error
    assert "elapsed" not in error


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert clock(seconds) == text
