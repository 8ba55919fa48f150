"""How an index changes: keys come and go, in memory and on disk, while others search.

At every moment an index is one immutable snapshot. A change makes the next snapshot, writes the change to
disk if the index lives there, and then puts the snapshot in place, by one assignment: whoever searches
meanwhile goes on with the one that was there, sees all of a change or nothing, and waits for nobody.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError, BundleError
from amips.resources import plain_resource_errors
from amips.search.applying import applied, compacted, live_keys, own_cells
from amips.search.attributes import encoded, read_table, rows_like, spread
from amips.search.bundle import save, write_snapshot
from amips.search.bundle_directory import Previous, bundle_stamp, replace_bundle
from amips.search.bundle_state import Opened, Writer, followed, open_bundle
from amips.search.changes import START, Change, Place
from amips.search.filters import Filters
from amips.search.inputs import checked_keys
from amips.search.key_ids import KeyIds
from amips.search.key_order import live_numbers
from amips.search.memory_searcher import Snapshot, plain_index
from amips.search.placing import Placer
from amips.search.searcher import Searcher
from amips.search.wrapped import WrappedIndex
from amips.vectors import Floats


@dataclass(frozen=True)
class State:
    """What an index is at one moment.

    Args:
        snapshot: what is searched.
        opened: the bundle as it was opened; None of an index that lives in memory.
        place: how far its changes were read.
    """

    snapshot: Snapshot
    opened: Opened | None = None
    place: Place = START

    @cached_property
    def filters(self) -> Filters:
        """Of the snapshot; what was worked out is kept as long as it."""
        return Filters(self.snapshot)


_indexes: "weakref.WeakSet[ChangingIndex]" = weakref.WeakSet()


def _renew_locks() -> None:
    for index in list(_indexes):
        index.renew_locks()


os.register_at_fork(after_in_child=_renew_locks)


class ChangingIndex:
    """What an index is now, and how it becomes another; `amips.search.Index` is what a user holds."""

    def __init__(self, snapshot: Snapshot, opened: Opened | None = None, place: Place | None = None) -> None:
        self._state = State(snapshot, opened, place or START)
        self._changing = threading.RLock()
        self._writer: Writer | None = None
        self._ids: KeyIds | None = None
        self._placer: Placer | None = None
        _indexes.add(self)

    def renew_locks(self) -> None:
        """In a forked child: a lock that another thread of the parent held is nobody's to let go of."""
        self._changing = threading.RLock()

    @property
    def snapshot(self) -> Snapshot:
        """What the index is now: it does not change, and goes on working when the index has changed."""
        return self._state.snapshot

    @property
    def path(self) -> Path | None:
        """The bundle that it lives in, where changes are kept; None of an index in memory."""
        opened = self._state.opened
        return None if opened is None else opened.path

    @property
    def d(self) -> int:
        """The dimension."""
        return self.snapshot.d

    @property
    def n(self) -> int:
        """The number of keys that can be found."""
        return live_keys(self.snapshot)

    @property
    def has_string_ids(self) -> bool:
        """Whether ids are strings, not whole numbers."""
        labels = plain_index(self.snapshot).labels
        return labels is not None and labels.dtype.kind == "U"

    @plain_resource_errors()
    def add(self, keys: Any, ids: Any = None, *, attributes: Any = None) -> NDArray[Any]:
        """Add keys, which can be found when this returns, and are on disk if the index lives there.

        Args:
            keys: [m, d], or one key [d]: an array or a file, as in `fit`.
            ids: one for each key, of the kind that the index has; by default the numbers that follow.
            attributes: a row for each key, as of `set_attributes`; columns that are left out have no values.

        Returns the ids. All keys are added, or none: a bad key, an id that is taken or one that comes twice
        is an error, and changes nothing. A memory of the log is not asked any more: it knows no new keys.
        """
        with self._writing():
            rows = checked_keys(keys, self.d)
            labels = self._key_ids().new(ids, len(rows))
            more = self._attribute_rows(attributes, len(rows))
            first = self.snapshot.n
            if not len(rows):
                return np.empty(0, np.int64) if labels is None else labels
            self._make(Change("add", {**self._arrays(rows, labels), **more}))
            self._note_added(labels, first, len(rows))
            return np.arange(first, first + len(rows)) if labels is None else labels

    @plain_resource_errors()
    def remove(self, ids: Any) -> int:
        """Remove keys by their ids: they are never found again. Returns how many there were.

        All are removed, or none: an id that is not there is an error. The space that they took is free when
        the index is compacted.
        """
        with self._writing():
            values, numbers = self._key_ids().known(ids)
            if len(values):
                self._make(Change("remove", {"numbers": numbers}))
                self._key_ids().removed(values)
            return len(values)

    @plain_resource_errors()
    def update(self, ids: Any, keys: Any, *, attributes: Any = None) -> None:
        """Put other keys in the place of those with these ids, in one step; all of them, or none.

        Args:
            ids: of keys that are there.
            keys: [m, d], in the order of the ids.
            attributes: a row for each key; without them, a key has those of the one before.
        """
        with self._writing():
            values, numbers = self._key_ids().known(ids)
            rows = checked_keys(keys, self.d)
            if len(rows) != len(values):
                raise AmipsError(f"{len(rows):,} keys for {len(values):,} ids: give one for each")
            if not len(values):
                return
            known = plain_index(self.snapshot).attributes
            if attributes is None and known is not None:
                attributes = known.table.take(numbers)
            more, first = self._attribute_rows(attributes, len(rows)), self.snapshot.n
            self._make(Change("update", {"numbers": numbers, **self._arrays(rows, values), **more}))
            self._note_added(values, first, len(rows))

    @plain_resource_errors()
    def set_attributes(self, table: Any) -> None:
        """Give the keys attributes that `where` can ask for, in the place of those they had, if any.

        Args:
            table: an Arrow table or record batch, a pandas data frame, or a Parquet or Arrow file: one row a
                key, in the order in which keys were given and added, without those that were removed; an
                updated key has the place of the one before.
        """
        with self._writing():
            rows = spread(read_table(table, self.n), live_numbers(self.snapshot), self.snapshot.n)
            self._make(Change("attributes", {"attributes": encoded(rows)}))

    @plain_resource_errors()
    def compact(self) -> None:
        """Fold all changes in: what was removed goes, what was added becomes part of the rest.

        A bundle is replaced in one step; whoever reads it goes on, and sees it with `refresh`. Ids stay.
        """
        with self._writing():
            self._fold(self._state.snapshot)

    def _fold(self, before: Snapshot) -> None:
        """Put a snapshot in place with its changes folded in, and write the bundle anew, if there is one."""
        opened = self._state.opened
        if opened is not None and opened.has_texts and plain_index(before).alive is not None:
            raise AmipsError(
                f"{opened.path} has texts, which are known by the number of their key: build it again "
                "without the keys that were removed"
            )
        snapshot = compacted(before) if self._changed else before
        snapshot.prepare()
        if opened is None:
            self._put(State(snapshot))
        else:
            self._replace(snapshot)

    def _replace(self, snapshot: Snapshot, previous: Previous | None = None) -> None:
        """Write the bundle anew, in one step, and go on with it: who calls this is the one who changes it."""
        opened = self._state.opened
        assert opened is not None and self._writer is not None  # noqa: PT018
        replace_bundle(opened.path, partial(write_snapshot, snapshot), writing=True, previous=previous)
        self._writer.close_file()
        self._put(State(snapshot, Opened.at(opened.path, opened.options)))

    def refresh(self) -> bool:
        """Take in what other processes have changed in the bundle; whether there was anything."""
        with self._changing:
            return self._refresh()

    def save(self, path: str | Path) -> None:
        """Write a bundle of what the index is now, changes folded in, or replace one.

        An index that lived in memory lives there from then on; another goes on where it lives.
        """
        with self._changing:
            opened = self._state.opened
            own = opened if opened is not None and Path(path).resolve() == opened.path.resolve() else None
            there = bundle_stamp(Path(path))
            if own is not None and there is not None:
                if there != own.stamp:
                    raise BundleError(f"{path} was replaced since it was opened: refresh, or save elsewhere")
                if not own.signed:
                    self.compact()  # what others have changed stays
                    return
            snapshot = compacted(self.snapshot) if self._changed else self.snapshot
            save(snapshot, path)
            if opened is None or own is not None:
                self._put(State(snapshot, Opened.at(Path(path), {} if opened is None else opened.options)))

    def close(self) -> None:
        """Let another process change the bundle. The index can be used further; it then asks again."""
        with self._changing:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    @property
    def _changed(self) -> bool:
        plain = plain_index(self.snapshot)
        return plain.alive is not None or not plain.fingerprint

    def _make(self, change: Change) -> None:
        """The next snapshot: made, written, put in place."""
        state = self._state
        snapshot = applied(state.snapshot, change)
        snapshot.prepare()  # whoever searches must not wait for it
        place = state.place
        try:
            if state.opened is not None:
                assert self._writer is not None
                place = self._writer.append(change, state.opened, place)
            self._show(replace(state, snapshot=snapshot, place=place))
        except BaseException:  # interrupted: what ids there are is looked up again
            self._ids = None
            raise

    def _arrays(self, rows: Floats, labels: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """What a change says of keys that are added."""
        arrays: dict[str, NDArray[Any]] = {"keys": rows}
        if labels is not None:
            arrays["ids"] = labels
        plain = plain_index(self.snapshot)
        if isinstance(plain, Searcher):
            if self._placer is None:
                self._placer = Placer.of(plain.placement, own_cells(plain), plain.router)
            arrays["first"], second = self._placer(rows)
            if second is not None:
                arrays["second"] = second
        return arrays

    def _attribute_rows(self, attributes: Any, m: int) -> dict[str, NDArray[Any]]:
        """What a change says of the attributes of keys that are added."""
        if attributes is None:
            return {}
        known = plain_index(self.snapshot).attributes
        if known is None:
            raise AmipsError("this index has no attributes: give all keys some first, with set_attributes")
        return {"attributes": encoded(rows_like(attributes, m, known.table.schema))}

    def _key_ids(self) -> KeyIds:
        if self._ids is None:
            plain = plain_index(self.snapshot)
            self._ids = KeyIds(plain.labels, plain.n, plain.alive, plain.origin.next_id)
        return self._ids

    def _note_added(self, labels: NDArray[Any] | None, first: int, m: int) -> None:
        if labels is not None and self._key_ids().numbered:
            self._ids = None  # from now on every key has an id of its own
        else:
            self._key_ids().added(labels, first, m)

    def _put(self, state: State) -> None:
        self._ids = self._placer = None
        self._show(state)

    def _show(self, state: State) -> None:
        """What the index is from now on."""
        self._state = state

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the one who changes the index: within this process, and of its bundle."""
        with self._changing:
            opened = self._state.opened
            # It may have been replaced since: by a call of its own that was interrupted, or from outside.
            if opened is not None and (self._writer is None or not self._writer.holds(opened)):
                self.close()
                if opened.signed:
                    raise AmipsError(f"{opened.path} is signed: save it elsewhere, change that, and sign it")
                self._writer = Writer(opened.path)
                try:
                    self._refresh()
                except BaseException:
                    self.close()
                    raise
            yield

    def _refresh(self) -> bool:
        state = self._state
        if state.opened is None:
            return False
        newer = followed(state.snapshot, state.opened, state.place)
        if newer is None:
            snapshot, opened, place = open_bundle(state.opened.path, **state.opened.options)
            assert not isinstance(snapshot, WrappedIndex)
            assert place is not None
            self._put(State(snapshot, opened, place))
            return True
        snapshot, place = newer
        if place == state.place:
            return False
        snapshot.prepare()
        self._put(State(snapshot, state.opened, place))
        return True
