"""Where an index comes from: how many keys it was fitted for, a sample of its log, what was done since."""

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_choice, check_whole
from amips.errors import BundleError
from amips.search.query_log import QueryLog

Deed = Literal["adopted", "refitted", "rolled back"]

GROWN = 1.5  # times the keys of the fit, from which on another number of cells would be cheaper
MOST_EVENTS = 32  # that are kept, the last ones
MOST = 1 << 48


@dataclass(frozen=True)
class Event:
    """Something that was done to an index: what, when (UTC), and the round it was then in."""

    what: Deed
    when: str
    round: int

    def __str__(self) -> str:
        return f"{self.what} {self.when}, round {self.round}"


@dataclass(frozen=True)
class Origin:
    """What an index was fitted on, and what was done to it since.

    Args:
        n: keys at the fit; 0 if that is not known.
        log: a sample of its log; None if none was kept.
        round: how often it was fitted again.
        events: what was done since, oldest first.
        next_id: the numbers below it have been ids once, and no key gets one of them by itself again.
    """

    n: int = 0
    log: QueryLog | None = None
    round: int = 0
    events: tuple[Event, ...] = ()
    next_id: int = 0

    def after(self, what: Deed, **changes: Any) -> "Origin":
        """With one more event, now."""
        then = replace(self, **changes)
        when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return replace(then, events=(*self.events, Event(what, when, then.round))[-MOST_EVENTS:])

    def renumbered(self, kept: NDArray[np.int64], n: int) -> "Origin":
        """The same where of n keys these are left, numbered anew."""
        return self if self.log is None else replace(self, log=self.log.renumbered(kept, n))

    def growth(self, n: int, *, cells: bool) -> str | None:
        """What to do if the keys have become many more since the fit; None otherwise.

        Args:
            n: keys now.
            cells: whether the index has cells, or is a graph.
        """
        if not self.n or n < GROWN * self.n:
            return None
        now = f"{n:,} keys, {self.n:,} when it was fitted"
        cheaper = "more cells" if cells else "a graph made of all of them"
        return f"{now}: {cheaper} would be cheaper; run amips fit KEYS QUERIES --out BUNDLE with all of them"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a manifest; the log has files of its own."""
        events = [dict(vars(event)) for event in self.events]
        return {"n": self.n, "round": self.round, "events": events, "next_id": self.next_id}

    @classmethod
    def from_json(cls, values: Any, log: QueryLog | None) -> "Origin":
        """What `to_json` gave; an error of anything else. None is what older bundles have."""
        if values is None:
            return cls(log=log)
        n = check_whole("n of the fit", values["n"], 0, MOST, error=BundleError)
        number = check_whole("round", values["round"], 0, MOST, error=BundleError)
        events = tuple(_event(event) for event in values["events"])
        largest = np.iinfo(np.int64).max
        next_id = check_whole("next_id", values["next_id"], 0, int(largest), error=BundleError)
        return cls(n, log, number, events, next_id)


def _event(values: dict[str, Any]) -> Event:
    what = check_choice("event", values["what"], get_args(Deed), error=BundleError)
    when = datetime.strptime(values["when"], "%Y-%m-%dT%H:%M:%SZ")
    number = check_whole("round", values["round"], 0, MOST, error=BundleError)
    return Event(what, when.strftime("%Y-%m-%dT%H:%M:%SZ"), number)
