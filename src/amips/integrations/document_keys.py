"""The keys of documents, by number: all of them scored, or in an index that was fitted; in line with them."""

import threading
from pathlib import Path

import numpy as np

from amips.errors import AmipsError, BundleError
from amips.files import remove_directory
from amips.integrations.documents import BEHIND, FITTED, Documents, Written
from amips.integrations.exact_keys import ExactKeys, Numbers
from amips.search import Index, load, plain_index
from amips.vectors import Floats, unit_rows


class DocumentKeys:
    """What is searched.

    Args:
        documents: whose keys they are.
        bundle: where a fitted index is kept; None of a store in memory.
        cosine: whether keys and queries are brought to norm 1.
    """

    def __init__(self, documents: Documents, bundle: Path | None, cosine: bool) -> None:
        self.documents, self.bundle, self.cosine = documents, bundle, cosine
        self.current: ExactKeys | Index = ExactKeys()
        self._fitted = 0  # as of the keys that are here
        self._seen: int | None = None  # what others had done to the documents when they were in line
        self._taking_in = threading.RLock()

    def prepared(self, rows: Floats) -> Floats:
        """Vectors [m, d] as they are searched."""
        return unit_rows(rows)[0] if self.cosine else rows

    def everything(self) -> tuple[Numbers, Floats]:
        """All keys of the documents, with their numbers."""
        blocks = list(self.documents.keys(self.documents.numbers(keyed=True)))
        if not blocks:
            return np.empty(0, np.int64), np.empty((0, 0), np.float32)
        numbers, rows = zip(*blocks, strict=True)
        return np.concatenate(numbers), self.prepared(np.concatenate(rows))

    @property
    def in_line(self) -> bool:
        """Whether the last change reached the keys; if not, `open` brings them in line."""
        return self._seen is not None

    def refresh(self) -> None:
        """Take in what other processes have changed, if they have."""
        if self._seen == self.documents.version_of_others:
            return
        with self._taking_in:
            version = self.documents.version_of_others
            if self._seen != version:
                self._take_in()
                self._seen = version

    def catch_up(self) -> None:
        """The same for who writes, who brings in line what one who was cut off has left."""
        if self.in_line and not self.documents.fact(BEHIND, 0):
            self.refresh()
        else:
            self.open()

    def _take_in(self) -> None:
        fitted = int(self.documents.fact(FITTED, 0))
        if fitted != self._fitted:
            self.current = self._load() if fitted else ExactKeys()
            self._fitted = fitted
        if isinstance(self.current, Index):
            self.current.refresh()
        else:
            self.align(self.current)

    def open(self) -> None:
        """Bring what there is in line with the documents; for who writes."""
        if self.bundle is not None:
            fitted = int(self.documents.fact(FITTED, 0))
            if fitted and not self.bundle.exists():
                self.documents.set_fact(FITTED, 0)  # lost: all keys are scored until it is fitted again
            elif not fitted:
                remove_directory(self.bundle)  # of a fit that was cut off, or of documents that are gone
            self.current, self._fitted = ExactKeys(), 0
            self._take_in()
        self.align(self.current)
        if self.documents.fact(BEHIND, 0):
            self.documents.set_fact(BEHIND, 0)
        self._seen = self.documents.version_of_others

    def _load(self) -> ExactKeys | Index:
        assert self.bundle is not None
        try:
            index = load(self.bundle)
        except BundleError as problem:
            raise BundleError(f"{problem}; without {self.bundle} all keys are scored: remove it") from None
        return index

    def align(self, keys: ExactKeys | Index) -> None:
        """Give keys the numbers that the documents have."""
        wanted, there = self.documents.numbers(keyed=True), numbers_in(keys)
        removed, missing = np.setdiff1d(there, wanted), np.setdiff1d(wanted, there)
        if isinstance(keys, ExactKeys) and len(missing) and (not len(there) or missing[0] < there[-1]):
            keys.replace(*self.everything())
            return
        if len(removed):
            keys.remove(removed)
        for numbers, rows in self.documents.keys(missing):
            keys.add(self.prepared(rows), numbers)
        _let_go(keys)

    def follow(self, written: Written) -> None:
        """Do to the keys what was done to the documents."""
        try:
            if len(written.removed):
                self.current.remove(written.removed)
            if len(written.added):
                self.current.add(self.prepared(np.stack(written.keys)), written.added)
            if isinstance(self.current, Index) and (len(written.removed) or len(written.added)):
                # Another process may have looked before the keys were there: this makes it look again.
                self.documents.set_fact(BEHIND, 0)
        except BaseException:
            self._seen = None  # who writes next brings it in line
            raise
        finally:
            _let_go(self.current)

    def put(self, index: Index) -> None:
        """Make this the index, in line with the documents of now, on disk if the store is there."""
        seen, self._seen = self._seen, None  # what goes wrong on the way is looked at by who writes next
        self.align(index)
        if not index.n:
            raise AmipsError("every document was deleted meanwhile: there is nothing to search")
        if self.bundle is not None:
            index.save(self.bundle)
            _let_go(index)
        fitted = int(self.documents.fact(FITTED, 0)) + 1
        self.documents.set_fact(FITTED, fitted)
        self.current, self._fitted, self._seen = index, fitted, seen

    def forget(self) -> None:
        """After all documents were deleted: no keys, no index."""
        self._fitted, self.current = 0, ExactKeys()
        if self.bundle is not None:
            remove_directory(self.bundle)


def numbers_in(keys: ExactKeys | Index) -> Numbers:
    """The numbers of the keys that can be found, ascending."""
    if isinstance(keys, ExactKeys):
        return keys.numbers
    plain = plain_index(keys.snapshot)
    labels = np.arange(plain.n) if plain.labels is None else plain.labels
    return np.sort(labels if plain.alive is None else labels[plain.alive.keys])


def _let_go(keys: ExactKeys | Index) -> None:
    """Between two changes another process may write."""
    if isinstance(keys, Index):
        keys.close()
