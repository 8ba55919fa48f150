"""What a collection will take, in time, memory, disk and machines, before anything is made of it."""

from amips.capacity.calibration import calibrate
from amips.capacity.forecast import (
    Forecast,
    Phase,
    Serving,
    code_seconds_of,
    plan,
    second_seconds_of,
    so_many,
)
from amips.capacity.rates import Rates, load_rates, rates_file

__all__ = [
    "Forecast",
    "Phase",
    "Rates",
    "Serving",
    "calibrate",
    "code_seconds_of",
    "load_rates",
    "plan",
    "rates_file",
    "second_seconds_of",
    "so_many",
]
