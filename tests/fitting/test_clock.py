"""The time of a fit, and how its parts share it."""

from types import SimpleNamespace

import pytest

from amips.design import Design
from amips.fitting.candidates import Candidate
from amips.fitting.clock import BUILD_END, MOMENT, Clock
from amips.fitting.fitting import Fitting
from amips.fitting.settings import Settings


class Time:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def hand():
    hand = Time()
    return hand, Clock(200.0, hand)


def test_what_is_left(hand):
    time, clock = hand
    assert clock.until(0.5) == 100
    time.now += 30
    assert (clock.spent, clock.until(0.5)) == (30, 70)


def test_late_steps_have_a_moment(hand):
    time, clock = hand
    time.now += 500
    assert clock.until(0.5) == MOMENT
    assert Clock(1e-3, time).until(0.0) == 1e-3  # but no more than the whole


def test_what_labels_leave_over_goes_to_the_cells(hand):
    time, clock = hand
    time.now += 20
    clock.note_labelled()
    assert clock.until_of_cells(1.0) == pytest.approx(BUILD_END * 200 - 20)
    clock.cells_time = 0.5
    assert clock.until_of_cells(1.0) == pytest.approx((BUILD_END * 200 - 20) / 2)


def test_labels_that_were_late_leave_a_moment(hand):
    time, clock = hand
    time.now += 190
    clock.note_labelled()
    assert clock.until_of_cells(1.0) == MOMENT


def test_what_is_past(hand):
    time, clock = hand
    assert clock.past(0.0)
    assert not clock.past(0.5)
    time.now += 100
    assert clock.past(0.5)
    assert not clock.past(0.6)


@pytest.mark.parametrize(("each", "tried"), [(1.0, 6), (40.0, 2), (500.0, 1)])
def test_ranks_are_tried_while_there_is_time(hand, tmp_path, each, tried):
    """Of 200 seconds, routers have 96 until they are trained."""
    time, clock = hand
    clock.note_labelled()
    looks = []

    def candidate(design, model):
        time.now += each
        looks.append(design)
        return Candidate(design, model, None, 1.0)

    builder = SimpleNamespace(task=SimpleNamespace(d=96), model=lambda design: None)
    settings = Settings(1, None, 0.9, "flops", None, None, None, None, 0, 0)
    fitting = Fitting(tmp_path, settings, True, None, None, clock)
    designs = [Design(count, recipe=None).resolved(96) for count in (8, 16, 32)]
    partitions = [Candidate(design, None, None, 2.0) for design in designs]
    best = fitting._ranks(SimpleNamespace(builder=builder, candidate=candidate), partitions)
    assert len(best) == 3
    assert len(looks) == tried
