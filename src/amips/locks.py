"""Locks on directories: one process or thread at a time, and none is left of a process that ended."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from amips.errors import AmipsError
from amips.untrusted import open_lock

_handles: set[int] = set()  # of locks that this process holds


def _close_in_child() -> None:
    """A forked child does not hold the locks of its parent: while one of both does, nobody else gets it."""
    for handle in _handles:
        with suppress(OSError):
            os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(
    path: Path, busy: AmipsError | None = None, *, remove: bool = False, make: bool = False
) -> Iterator[None]:
    """Hold a lock on `path` against other processes and threads; a killed process lets go of its own.

    With `busy`, do not wait for another holder but raise that. A link at `path` is not followed. With
    `remove`, the file is gone afterwards. With `make`, so is its directory made where it is not there, also
    if the holder before removes it meanwhile.
    """
    error = AmipsError if busy is None else type(busy)
    while True:
        handle, owner = _open_lock_in(path, error) if make else open_lock(path, error), os.getpid()
        _handles.add(handle)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy is not None else 0))
            except BlockingIOError:
                assert busy is not None
                raise busy from None
            if not _is_still(handle, path):  # the holder before removed it: nobody else sees this lock
                continue
            try:
                yield
            finally:
                if remove and os.getpid() == owner:
                    path.unlink(missing_ok=True)
            return
        finally:
            if os.getpid() == owner:  # in a forked child this is the parent's
                _handles.discard(handle)
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked by other means may have a copy
                os.close(handle)


def _open_lock_in(path: Path, error: type[AmipsError], tries: int = 100) -> int:
    """`open_lock` in a directory that others may remove at any moment: then it is made again."""
    while True:
        tries -= 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open_lock(path, error)
        except (FileNotFoundError, FileExistsError):  # removed between the one and the other
            if tries == 0 or (os.path.lexists(path.parent) and not path.parent.is_dir()):
                raise


def _is_still(handle: int, path: Path) -> bool:
    """Whether `path` names the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False
