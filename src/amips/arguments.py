"""Checks of arguments: one line that names the argument, its value and what was expected of it.

Each function returns the value as a plain Python object, so that numpy's numbers can be written to JSON and
equal values have equal fingerprints. A bool is no number.
"""

import math
import os
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError

Error = type[AmipsError]
LONGEST = 60  # characters of a value that a message repeats
LARGEST = 2**63 - 1  # of whole numbers


def check_whole(
    name: str, value: Any, least: int | None = None, most: int | None = None, *, error: Error = AmipsError
) -> int:
    """`value` as an int; `error` unless it is a whole number from `least` to `most`, both included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refused(name, value, _whole(least, most), error)
    whole = int(value)
    if not -LARGEST <= whole <= LARGEST:
        raise refused(name, value, "a whole number of 64 bits", error)
    if (least is not None and whole < least) or (most is not None and whole > most):
        raise refused(name, value, _whole(least, most), error)
    return whole


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    below: float | None = None,
    least: float | None = None,
    most: float | None = None,
    infinite: bool = False,
    what: str = "a number",
    error: Error = AmipsError,
) -> float:
    """`value` as a float; `error` unless it is a number within the bounds.

    Args:
        above, below: bounds that are excluded.
        least, most: bounds that are included.
        infinite: whether infinity is a number here.
        what: is expected, before the bounds: "a fraction of the keys".
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refused(name, value, what + _bounds(above, below, least, most), error)
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.nan
    within = (
        (above is None or number > above)
        and (below is None or number < below)
        and (least is None or number >= least)
        and (most is None or number <= most)
    )
    if math.isnan(number) or not within or (math.isinf(number) and not infinite):
        raise refused(name, value, what + _bounds(above, below, least, most), error)
    return number


def check_recall(value: Any, name: str = "recall", *, error: Error = AmipsError) -> float:
    """A recall that is asked for, as a float; `error` unless it is above 0 and up to 1."""
    return check_number(name, value, above=0, most=1, what="a share of the true top keys,", error=error)


def check_seed(value: Any, *, error: Error = AmipsError) -> int:
    """A seed of random numbers as an int; `error` on anything but a whole number, not negative."""
    return check_whole("seed", value, 0, error=error)


def check_flag(name: str, value: Any, *, error: Error = AmipsError) -> bool:
    """`value` as a bool, numpy's included; `error` on anything else."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise refused(name, value, "True or False", error)
    return bool(value)


def check_flag_or(name: str, value: Any, word: str, *, error: Error = AmipsError) -> Any:
    """`value` as a bool, or the one word that stands for a third way; `error` on anything else."""
    return word if isinstance(value, str) and value == word else check_flag(name, value, error=error)


def check_choice(name: str, value: Any, choices: Any, *, error: Error = AmipsError) -> Any:
    """`value`, if it is one of these words, or of a `Literal` of them."""
    words: Iterable[str] = get_args(choices) or choices
    if not isinstance(value, str) or value not in words:
        raise refused(name, value, f"one of {', '.join(words)}", error)
    return value


def check_array(name: str, value: Any, *, error: Error = AmipsError) -> NDArray[Any]:
    """`value` as numpy reads it; `error` if its rows have different lengths, or it is no array at all."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise refused(name, value, "an array", error) from None


def check_path(name: str, value: Any, *, error: Error = AmipsError) -> Path:
    """`value` as a `Path`; `error` unless it is text or a path."""
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if isinstance(path, str) and "\0" not in path:
            return Path(path)
    raise refused(name, value, "a path", error)


def refused(name: str, value: Any, expected: str, error: Error = AmipsError) -> AmipsError:
    """The error that says in one line what an argument is and what it should be."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python prints no whole number of thousands of digits, and a repr may be anyone's
        text = f"a {type(value).__name__}"
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return error(f"{name}={text}: expected {expected}")


def _whole(least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f"a whole number from {least} to {most}"
    if least is not None:
        return f"a whole number, at least {least}"
    return "a whole number" if most is None else f"a whole number, at most {most}"


def _bounds(above: float | None, below: float | None, least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}"
    if above is not None and below is not None:
        return f" between {above:g} and {below:g}"
    bounds = {"above": above, "at least": least, "below": below, "up to": most}
    words = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    if not words:
        return ""
    return f"{' ' if above is not None else ', '}{' and '.join(words)}"
