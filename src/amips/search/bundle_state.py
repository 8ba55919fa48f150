"""A bundle as it was opened, how far its changes were read, and the right to change it."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from amips.errors import BundleError
from amips.locks import locked
from amips.search.applying import applied
from amips.search.bundle import read_index
from amips.search.bundle_directory import (
    TEXT_MANIFEST,
    WRITER,
    bundle_stamp,
    busy_writer,
    data_name,
)
from amips.search.changes import START, Change, ChangeWriter, Place, changes_file, read_changes
from amips.search.memory_searcher import Snapshot
from amips.search.wrapped import WrappedIndex
from amips.signing import SIGNATURE

TOGETHER = 1 << 14  # keys of several changes that are added in one step


@dataclass(frozen=True)
class Opened:
    """A bundle as it was opened.

    Args:
        stamp: what changes when it is replaced.
        data: the name of its data directory.
        options: with which it was opened, by the names of `amips.load`.
    """

    path: Path
    stamp: tuple[int, int] | None
    data: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path, options: dict[str, Any] | None = None) -> "Opened":
        """The bundle at a path as it is now."""
        while True:
            stamp = bundle_stamp(path)
            data = data_name(path)
            if bundle_stamp(path) == stamp:
                return cls(path.absolute(), stamp, data, options or {})

    @property
    def changes(self) -> Path:
        """The file of its changes, if there are any."""
        return changes_file(self.path, self.data)

    @property
    def signed(self) -> bool:
        """Whether someone has signed it."""
        return os.path.lexists(self.path / SIGNATURE)

    @property
    def has_texts(self) -> bool:
        """Whether its keys have texts, which are known by the numbers of the keys."""
        return os.path.lexists(self.path / TEXT_MANIFEST)

    def check_trusted(self) -> None:
        """BundleError if only signed content is trusted, and there are changes, which nobody has signed."""
        if self.options.get("trusted") is not None and os.path.lexists(self.changes):
            raise BundleError(
                f"{self.path} has changes that nobody signed: remove {self.changes.name}, and it is as signed"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "stamp": self.stamp, "data": self.data, "options": self.options}


def open_bundle(
    path: Path, **options: Any
) -> "tuple[Snapshot, Opened, Place] | tuple[WrappedIndex, None, None]":
    """What a bundle holds with its changes, the bundle as it was opened, and how far its changes go.

    Args:
        options: of `amips.load`.
    """
    while True:
        before = bundle_stamp(path)
        try:
            index = read_index(path, **options)
            if isinstance(index, WrappedIndex):
                return index, None, None
            opened = Opened.at(path, {name: value for name, value in options.items() if name != "keys"})
            if opened.stamp != before:
                continue
            opened.check_trusted()
            snapshot, place = replayed(index, opened.changes, START)
            if bundle_stamp(path) == before:  # otherwise its changes may have gone before they were read
                return snapshot, opened, place
        except (BundleError, FileNotFoundError) as problem:
            if bundle_stamp(path) != before:
                continue  # it was replaced while it was being read, and its old files are gone
            if isinstance(problem, BundleError):
                raise
            raise BundleError(f"{problem.filename} is missing") from None


def replayed(snapshot: Snapshot, changes: Path, since: Place) -> tuple[Snapshot, Place]:
    """The snapshot with the changes of a file after a place, and the place behind the last of them."""
    place = since
    for change, place in _together(read_changes(changes, since)):
        try:
            snapshot = applied(snapshot, change)
        except BundleError as problem:
            raise BundleError(f"{changes}: record {place.number} is damaged: {problem}") from None
    return snapshot, place


def followed(snapshot: Snapshot, opened: Opened, place: Place) -> tuple[Snapshot, Place] | None:
    """The snapshot with what was changed in its bundle since, and the place behind that.

    None if the bundle must be opened again: it was replaced, or the last record that was read was not
    acknowledged, and is another now.
    """
    if bundle_stamp(opened.path) != opened.stamp:
        return None
    opened.check_trusted()
    try:
        result = replayed(snapshot, opened.changes, place)
    except BundleError:
        if place.stands(opened.changes):
            raise
        return None
    return result if place.stands(opened.changes) else None


def _together(changes: Iterable[tuple[Change, Place]]) -> Iterator[tuple[Change, Place]]:
    """The same changes, with keys that are added one after the other in one step: each step has its cost."""
    waiting: list[Change] = []
    behind = START
    for change, place in changes:
        if waiting and (not _alike(waiting[0], change) or _keys(waiting) >= TOGETHER):
            yield _joined(waiting), behind
            waiting = []
        waiting.append(change)
        behind = place
    if waiting:
        yield _joined(waiting), behind


def _alike(one: Change, other: Change) -> bool:
    """Whether two changes can be one: both add keys, and say the same of them."""
    if one.kind != "add" or other.kind != "add" or one.arrays.keys() != other.arrays.keys():
        return False
    ids = one.arrays.get("ids"), other.arrays.get("ids")
    return ids[0] is None or ids[1] is None or ids[0].dtype.kind == ids[1].dtype.kind


def _keys(changes: list[Change]) -> int:
    return sum(len(change.arrays["keys"]) for change in changes if "keys" in change.arrays)


def _joined(changes: list[Change]) -> Change:
    if len(changes) == 1:
        return changes[0]
    try:
        names = changes[0].arrays
        arrays = {name: np.concatenate([change.arrays[name] for change in changes]) for name in names}
    except ValueError as problem:
        raise BundleError(f"changes that do not fit each other: {problem}") from None
    return Change(changes[0].kind, arrays)


class Writer:
    """The right to change a bundle, held against all other processes, and the file that changes go to."""

    def __init__(self, path: Path) -> None:
        self._process = os.getpid()
        self._held = ExitStack()
        try:
            self._held.enter_context(locked(path / WRITER, busy_writer(path)))
        except PermissionError:
            raise BundleError(
                f"{path} may not be changed by you: give yourself the right to write there, or save a copy"
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(f"{path} is not there any more: save the index elsewhere") from None
        except OSError as problem:
            if problem.errno != errno.EROFS:
                raise
            raise BundleError(
                f"{path} is on a disk that is only read: save a copy, and change that"
            ) from None
        self._lock = (path / WRITER).stat()
        self._file: ChangeWriter | None = None
        finalize(self, self._held.close)

    @property
    def mine(self) -> bool:
        """Whether this process holds it: a forked child does not."""
        return os.getpid() == self._process

    def holds(self, opened: Opened) -> bool:
        """Whether it is the right to change what stands there: the bundle may have been replaced."""
        try:
            lock = (opened.path / WRITER).stat()
        except OSError:
            return False
        same = bundle_stamp(opened.path) == opened.stamp and os.path.samestat(lock, self._lock)
        return same and self.mine

    def append(self, change: Change, opened: Opened, place: Place) -> Place:
        """Write a change behind a place; it is on disk when this returns."""
        self._check(opened)
        changes = opened.changes
        # Behind what is known: a record that was written when its call was interrupted was not acknowledged.
        if self._file is None or self._file.path != changes or self._file.place != place:
            self.close_file()
            self._file = ChangeWriter(changes, place)
        place = self._file.append(change)
        self._check(opened)  # what went into a file that nobody will read is not acknowledged
        return place

    def _check(self, opened: Opened) -> None:
        if not self.holds(opened):
            raise BundleError(f"{opened.path} was replaced while it was changed: make this change again")

    def close_file(self) -> None:
        """Close the file of changes: another bundle has another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Let others change the bundle."""
        self.close_file()
        if self.mine:
            self._held.close()
