"""Refits: a better index in the place of the one before, and the way back.

What makes the better index is `amips.fitting.refitting`, which trains, and searching does without that:
it puts itself here when amips is imported.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from amips.arguments import check_number, check_seed
from amips.errors import AmipsError
from amips.resources import plain_resource_errors
from amips.search.applying import compacted
from amips.search.bundle import read_index
from amips.search.bundle_directory import data_name, previous_manifest
from amips.search.bundle_state import Opened, replayed
from amips.search.changes import START, Place
from amips.search.changing import State
from amips.search.memory_searcher import Snapshot, plain_index, with_facts
from amips.search.since import with_changes_of
from amips.search.watching import WatchedIndex
from amips.search.wrapped import WrappedIndex

REFIT_MINUTES = 1.0
LOST = 0.02  # of the recall of the log's queries, from which on it is pointed out


@dataclass(frozen=True)
class Refit:
    """What a refit changed.

    Args:
        queries: new ones that it learned from; `older` of the log; `held_out` that all was chosen on.
        what: what is new, in words.
        recall, cost: recall@10 and FLOPs, as a share of a full scan, of a query of those held out, at the
            point that the index before serves the target with.
        cost_recalibrated: FLOPs of the index before at the point that has the target on them.
        cost_now: FLOPs at the target now.
        target: the recall@10 asked for.
        of_log: recall@10 of held-out queries of the log, before and now; None if there was no time for it.
        tried: FLOPs at the target of everything that was tried, by name.
        index: the new index.
    """

    queries: int
    older: int
    held_out: int
    what: str
    recall: float
    cost: float
    cost_recalibrated: float
    cost_now: float
    target: float
    of_log: tuple[float, float] | None
    tried: dict[str, float]
    index: Snapshot = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: value for name, value in vars(self).items() if name != "index"}

    def __str__(self) -> str:
        lines = [
            f"learned from {self.queries:,} new queries and {self.older:,} of the log; "
            f"chosen on the newest {self.held_out:,}",
            f"before: recall@10 {self.recall:.3f} at {self.cost:.2%} of a full scan; "
            f"{self.cost_recalibrated:.2%} for {self.target:g}, 95 % sure",
            f"now: {self.cost_now:.2%} for {self.target:g}, 95 % sure ({self.what})",
        ]
        if self.of_log is not None:
            before, now = self.of_log
            lost = now < self.target - LOST and now < before - LOST
            lines.append(
                f"held-out queries of the log: recall@10 {before:.3f} before, {now:.3f} now"
                + ("; if they are still asked, mix them into the new ones, or roll back" if lost else "")
            )
        return "\n".join(lines)


Refitter = Callable[[Snapshot, Any, float, int], Refit]
_refitters: list[Refitter] = []


def register_refitter(refitter: Refitter) -> None:
    """Let `Index.refit` call this: a snapshot without removed keys, queries, minutes and a seed to a `Refit`.

    It raises AmipsError if nothing that it tries is better.
    """
    _refitters[:] = [refitter]


class RefittableIndex(WatchedIndex):
    """An index that learns from new queries; `amips.search.Index` is what a user holds."""

    _before: Snapshot | None = None  # the last refit, of an index in memory

    def __init__(self, snapshot: Snapshot, opened: Opened | None = None, place: Place | None = None) -> None:
        super().__init__(snapshot, opened, place)
        self._refitting = threading.Lock()

    def renew_locks(self) -> None:
        """In a forked child: a lock that another thread of the parent held is nobody's to let go of."""
        super().renew_locks()
        self._refitting = threading.Lock()

    @plain_resource_errors()
    def refit(self, new_queries: Any, minutes: float = REFIT_MINUTES, *, seed: int = 0) -> Refit:
        """Learn from new queries, in about so many minutes, and put what is better in place, in one step.

        It begins with what is there: cells and router, or the edges of a graph. Keys stay where they are
        unless moving them pays. New queries and the sample of the log are mixed, newer ones count more, and
        all is chosen on the newest fifth of the new ones. Others go on searching and changing meanwhile: keys
        that come and go are so in what is put in place. AmipsError, and nothing is changed, if nothing is
        better on those; `rollback` undoes it.

        Args:
            new_queries: [m, d], an array or a file, in the order of time.
            minutes: how long it may take, roughly; with little time, fewer queries are used.
            seed: of what is drawn.
        """
        minutes = check_number("minutes", minutes, above=0)
        check_seed(seed)
        if not _refitters:
            raise AmipsError("nothing is here that refits: import amips")
        if not self._refitting.acquire(blocking=False):
            raise AmipsError("this index is being refitted already: wait for that")
        try:
            with self._writing():
                begun, before = self._state.snapshot, self._whole()
            result = _refitters[0](before, new_queries, minutes, seed)
            with self._writing():
                if self._state.snapshot is not begun:
                    result = replace(result, index=self._caught_up(result.index, before))
                if self._state.opened is None:
                    self._before = before
                    self._put(State(result.index))
                else:
                    self._replace(result.index, "this")
                self._adaptation = None
                return result
        finally:
            self._refitting.release()

    def _caught_up(self, better: Snapshot, before: Snapshot) -> Snapshot:
        """What a refit made of an index, with the keys that have come and gone since."""
        now = self._whole()
        if now.origin.events != before.origin.events:
            raise AmipsError("this index was refitted, rolled back or adopted meanwhile: refit it again")
        better = with_changes_of(better, now)
        return with_facts(better, origin=replace(better.origin, next_id=now.origin.next_id))

    @plain_resource_errors()
    def rollback(self) -> None:
        """Go back to the index before the last refit, also after a restart; keys changed since stay changed.

        AmipsError if there was no refit, or it was undone already.
        """
        with self._writing():
            opened = self._state.opened
            if opened is None:
                if self._before is None:
                    raise AmipsError("this index was not refitted: there is nothing to go back to")
                before = self._before
            else:
                manifest = previous_manifest(opened.path)
                data = data_name(opened.path, manifest)
                options = {name: value for name, value in opened.options.items() if name == "model"}
                index = read_index(opened.path, manifest=manifest, **options)
                assert not isinstance(index, WrappedIndex)
                before, _ = replayed(index, Opened(opened.path, None, data).changes, START)
            now = self._whole()
            snapshot = with_changes_of(before, now)
            origin = snapshot.origin.after("rolled back", next_id=now.origin.next_id)
            snapshot = with_facts(snapshot, origin=origin)
            if opened is None:
                self._put(State(snapshot))
                self._before = None
            else:
                self._replace(snapshot, "drop")
            self._adaptation = None

    def _whole(self) -> Snapshot:
        """The present snapshot, without keys that were removed."""
        opened = self._state.opened
        removed = plain_index(self.snapshot).alive is not None
        if opened is not None and opened.has_texts and removed:
            raise AmipsError(
                f"{opened.path} has texts, which are known by the number of their key: build it again "
                "without the keys that were removed"
            )
        return compacted(self.snapshot) if self._changed else self.snapshot
