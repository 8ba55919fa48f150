"""How far a long step has come: a bar on a terminal, a plain line now and then in a log.

top keys: 35 % of 20,000 queries, 0:40 elapsed, about 1:10 left
"""

import sys
import time
from types import TracebackType
from typing import Any, Literal

from tqdm import tqdm

from amips.terminal import one_line

Progress = bool | Literal["bar"]  # nothing, everything there is to say, or only how far it is
SECONDS = 30.0  # from the begin to the first line of a log, and from a line to the next


class Bar:
    """Counts units. Silent unless `show`; a bar where standard error is a terminal, and otherwise lines.

    Args:
        total: units there are; 0 if that is not known.
        what: is being done, in a word or two.
        unit: what is counted, in the plural.
        start: units that were done before, and are not part of the pace.
    """

    def __init__(self, total: int, what: str, unit: str, show: bool, start: int = 0) -> None:
        self.what, self.unit, self.start = one_line(what), unit.strip(), start
        self.n = start
        self._total = total
        self._note = ""
        self._began = self._last = time.monotonic()
        self._lines = show and not sys.stderr.isatty()
        self._said = False
        self._bar: tqdm[Any] | None = None
        if show and not self._lines:
            self._bar = tqdm(
                total=total or None,
                initial=start,
                desc=self.what,
                unit=f" {self.unit}",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
            )

    @property
    def total(self) -> int:
        """How many units there are; may be set when it becomes known."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total
        if self._bar is not None:
            self._bar.total = total

    def update(self, count: int = 1) -> None:
        """So many units more are done."""
        self.n += count
        if self._bar is not None:
            self._bar.update(count)
        now = time.monotonic()
        if self._lines and now - self._last >= SECONDS:
            self._last = now
            self._say(self.line(now - self._began))

    def set_postfix_str(self, text: str) -> None:
        """Show a few words beside the figures, as tqdm does: what is at work."""
        self._note = one_line(text)  # names of designs and systems, out of a file
        if self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)

    def set_postfix(self, refresh: bool = False, **values: str) -> None:
        """Show values beside the figures, as tqdm does: how well it goes."""
        self.set_postfix_str(", ".join(f"{name}={value}" for name, value in values.items()))

    def line(self, seconds: float) -> str:
        """How far it has come after so many seconds, in one line."""
        part = f"{self.n:,} {self.unit}"
        if self._total:
            part = f"{self.n / self._total:.0%} of {self._total:,} {self.unit}".replace("%", " %", 1)
        parts = [part, f"{clock(seconds)} elapsed"]
        if self._total and self.n > self.start:
            remaining = seconds * max(0, self._total - self.n) / (self.n - self.start)
            parts.append(f"about {clock(remaining)} left")
        return f"{self.what}: {', '.join([*parts, self._note] if self._note else parts)}"

    def _say(self, text: str) -> None:
        self._said = True
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._said and kind is None:  # a log that shows a begin shows the end
            elapsed = clock(time.monotonic() - self._began)
            self._say(f"{self.what}: {self.n:,} {self.unit} done in {elapsed}")


def clock(seconds: float) -> str:
    """A duration as 0:40, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
