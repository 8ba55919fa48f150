"""Progress bars: on a terminal only, and never in the way of output that is piped."""

import sys
from typing import Any

from tqdm import tqdm


def bar(total: int, what: str, unit: str, show: bool, start: int = 0) -> "tqdm[Any]":
    """A bar over `total` units; silent unless `show` and standard error is a terminal."""
    return tqdm(
        total=total,
        initial=start,
        desc=what,
        unit=unit,
        unit_scale=True,
        disable=not (show and sys.stderr.isatty()),
        dynamic_ncols=True,
        leave=False,
    )
