"""The time of a fit, and how its parts share it."""

import pytest

from amips.fitting.clock import BUILD_END, MOMENT, Clock


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
