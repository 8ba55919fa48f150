"""Fits whose steps do not depend on how fast this machine is, or on what else it does."""

from functools import partial

import pytest

from amips.fitting import call, rate
from amips.fitting.clock import Clock
from helpers import RATE


@pytest.fixture(scope="module", autouse=True)
def time_stands_still():
    """Each step has all the time that it may have, and what it would take is the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "Clock", partial(Clock, now=lambda: 0.0))
        patch.setattr(rate, "labelling_rate", lambda *_, **__: RATE)
        yield
