"""Temporary directories that go away with what uses them."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path


class Scratch:
    """A new temporary directory: removed by `remove`, with this object, or when the process ends.

    A forked child has a copy of this object but not the directory: it removes nothing.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def remove(self) -> None:
        """Remove it now. Files in it that are open or memory-mapped stay readable."""
        self._finalizer()


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
