"""Documents and an index of their keys: what the stores of all frameworks share.

    store/
      documents.sqlite     ids, texts, metadata, vectors: what there is
      bundle/              the index, once it was fitted: made of the documents, and by a fit made again
      .lock                held by who writes

Documents are written first, in one transaction, and then their keys; a call returns when both are on disk. A
crash between the two leaves an index that has other keys than there are documents: opening the store, or the
next change, brings it in line. As long as nothing was fitted, all keys are in memory, and all are scored.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from amips.arguments import check_choice, check_recall, check_whole
from amips.errors import AmipsError, BundleError, VectorError
from amips.files import check_output, local, manifest_kinds
from amips.fitting import fit
from amips.integrations.conditions import Condition, is_everything
from amips.integrations.document_keys import DocumentKeys
from amips.integrations.documents import Documents, Duplicates
from amips.integrations.exact_keys import LEAST, Numbers
from amips.integrations.query_recorder import SIZE, QueryRecorder
from amips.integrations.stored_document import StoredDocument
from amips.locks import locked
from amips.resources import plain_resource_errors
from amips.search import REFIT_MINUTES, Index, Refit, Report, checked_queries, with_facts
from amips.vectors import Floats, inspect, open_vectors

Similarity = Literal["cosine", "dot"]

DOCUMENTS, BUNDLE, LOCK = "documents.sqlite", "bundle", ".lock"
KEPT = 16  # conditions whose documents are remembered
FIT_MINUTES = 5.0


@dataclass(frozen=True)
class Hit:
    """A document that was found, and its score: the inner product, which is the cosine if that was chosen."""

    score: float
    document: StoredDocument


class DocumentIndex:
    """Documents that are searched by their vectors, in a directory or in memory. Threads may share it.

    Args:
        path: the directory, made if it is not there; None keeps everything in memory. Processes may share it:
            they write one after the other, and see what others have written when they search.
        similarity: "cosine" brings keys and queries to norm 1; "dot" takes them as they are.
        log: a file .npy or .fvecs that queries are recorded in, for `fit`; None records nothing.
        log_size: the newest queries that it keeps, at least.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        similarity: Similarity = "cosine",
        log: str | Path | None = None,
        log_size: int = SIZE,
    ) -> None:
        self.similarity: Similarity = check_choice("similarity", similarity, Similarity)
        self.path = None if path is None else _checked_place(path)
        self.recorder = None if log is None else QueryRecorder(log, log_size)
        self._lock, self._fitting = threading.RLock(), threading.Lock()
        self._writers = 0  # calls of `_writing` that are inside each other
        with self._lock, self._alone():
            self.documents = Documents(None if self.path is None else self.path / DOCUMENTS)
            known = self.documents.fact("similarity")
            if known is None:
                self.documents.set_fact("similarity", similarity)
            elif known != similarity:
                raise BundleError(f"{self.path} was made with similarity={known!r}: open it with that")
            bundle = None if self.path is None else self.path / BUNDLE
            self.keys = DocumentKeys(self.documents, bundle, similarity == "cosine")
            self.keys.open()
        # By the version of the documents and a condition.
        self._keyed = lru_cache(KEPT)(lambda _, condition: self.documents.numbers(condition, keyed=True))

    @property
    def index(self) -> Index | None:
        """The index that was fitted, to look at: its report, an audit; None if nothing was fitted."""
        return self.keys.current if isinstance(self.keys.current, Index) else None

    def __len__(self) -> int:
        return self.documents.count()

    def __enter__(self) -> "DocumentIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @plain_resource_errors()
    def write(self, documents: Iterable[StoredDocument], duplicates: Duplicates = "overwrite") -> int:
        """Write documents, all or none; how many were written. They are found when this returns.

        Args:
            duplicates: what becomes of one whose id is there: it takes the place of that one ("overwrite"),
                is left out ("skip"), or is an error ("fail").
        """
        check_choice("duplicates", duplicates, Duplicates)
        rows = list(documents)
        with self._writing():
            self._check_vectors(rows)
            written = self.documents.write(rows, duplicates)
            self.keys.follow(written)
        return written.count

    @plain_resource_errors()
    def delete(self, ids: Iterable[str] | None = None, condition: Condition | None = None) -> int:
        """Delete documents by their ids, by a condition, or those that meet both; how many there were.

        AmipsError where neither says which: `clear` deletes all.
        """
        if ids is None and is_everything(condition):
            raise AmipsError("an empty filter would delete all documents: name some, or clear the store")
        with self._writing():
            written = self.documents.delete(self._numbers(ids, condition))
            self.keys.follow(written)
        return written.count

    @plain_resource_errors()
    def clear(self) -> None:
        """Delete all documents and forget the index: vectors may then have another dimension."""
        with self._writing():
            self.documents.clear()
            self.keys.forget()

    @plain_resource_errors()
    def set_metadata(self, condition: Condition | None, values: dict[str, Any]) -> int:
        """Give metadata to documents that meet a condition, beside what they have; how many there were."""
        with self._writing():
            documents = self.select(condition=condition, vectors=True)
            changed = [replace(one, metadata={**one.metadata, **values}) for one in documents]
            return self.documents.write(changed, "overwrite").count

    def select(
        self,
        ids: Iterable[str] | None = None,
        condition: Condition | None = None,
        *,
        vectors: bool = False,
    ) -> list[StoredDocument]:
        """Documents by their ids, in that order; those that meet a condition, oldest first; or both."""
        listed = None if ids is None else list(dict.fromkeys(ids))
        documents = self.documents.documents(self._numbers(listed, condition), vectors=vectors)
        if listed is None:
            return [document for _, document in sorted(documents.items())]
        known = {document.id: document for document in documents.values()}
        return [known[one] for one in listed if one in known]

    def count(self, condition: Condition | None = None) -> int:
        """How many documents meet a condition."""
        return self.documents.count(condition)

    def search(
        self,
        x: Any,
        k: int = 10,
        condition: Condition | None = None,
        *,
        ids: Iterable[str] | None = None,
        vectors: bool = False,
        recall: float | None = None,
    ) -> list[Hit]:
        """The k best documents for a query [d], best first.

        Args:
            condition, ids: which they meet, which they have.
            vectors: with the vectors of the documents.
            recall: as of `Index.search`; as long as nothing was fitted it is 1.
        """
        k = check_whole("k", k, 0)
        if recall is not None:
            check_recall(recall)
        self._refresh()
        keys, chosen = self.keys.current, None
        if ids is not None:
            chosen = self._numbers(ids, condition)
        elif condition is not None:
            chosen = self._keyed(self.documents.version, condition)
        if keys.d is None or not k or (chosen is not None and not len(chosen)):
            return []
        query = self.keys.prepared(checked_queries(x, keys.d, None)[0])
        if len(query) != 1:
            raise VectorError(f"{len(query)} queries: a store is asked one at a time")
        options: dict[str, Any] = {} if chosen is None else {"filter": chosen}
        if recall is not None and isinstance(keys, Index):
            options["recall"] = recall
        scores, numbers = (row[0] for row in keys.search(query, k, **options))
        documents = self.documents.documents(numbers[numbers >= 0], vectors=vectors)
        if self.recorder is not None:
            self.recorder.note(query)
        # One that was deleted meanwhile is not there any more.
        return [
            Hit(float(score), documents[number])
            for score, number in zip(scores, numbers.tolist(), strict=True)
            if number in documents
        ]

    @plain_resource_errors()
    def fit(
        self, queries: Any = None, *, minutes: float | None = None, anew: bool = False, **options: Any
    ) -> Report | Refit | None:
        """Learn from queries and put the index that comes of it in place, while others search and write.

        The first time it is `amips.fit`, later `Index.refit`, which begins with what is there; `amips.fit`
        again with `anew`, with options, and when keys have become half as many again. AmipsError, and nothing
        is changed, if a refit finds nothing better. Returns what was measured.

        Args:
            queries: [m, d], an array or a file; those that were recorded (`log`) when not given.
            minutes: how long it may take; 5 for a fit and 1 for a refit when not given.
            options: of `amips.fit`: recall, structure, seed, ...
        """
        if not self._fitting.acquire(blocking=False):
            raise AmipsError("this store is being fitted already: wait for that")
        try:
            self._refresh()
            x, before = self._queries(queries), self.index
            if before is not None and not anew and not options and before.growth is None:
                index = Index(before.snapshot)  # in memory: others go on with the one that is there
                result: Report | Refit | None = index.refit(x, REFIT_MINUTES if minutes is None else minutes)
            else:
                index = self._first_fit(x, FIT_MINUTES if minutes is None else minutes, options)
                result = index.report
            with self._writing():
                self.keys.put(index)
            return result
        finally:
            self._fitting.release()

    def close(self) -> None:
        """Close the files: the store cannot be used any more."""
        if self.index is not None:
            self.index.close()
        if self.recorder is not None:
            self.recorder.close()
        self.documents.close()

    @plain_resource_errors()
    def adopt(self, index: Index, documents: Sequence[StoredDocument]) -> None:
        """Have these documents, one for each key of an index, in that order, and a copy of that index.

        AmipsError if there are documents already.
        """
        with self._writing():
            if len(self):
                raise AmipsError(f"{self.path} has documents already: make a store of a bundle elsewhere")
            self.documents.write(documents, "fail")
            numbers = self.documents.numbers_of(one.id for one in documents)
            labels = np.array([numbers[one.id] for one in documents], np.int64)
            self.keys.put(Index(with_facts(index.snapshot, labels=labels, attributes=None)))

    def _first_fit(self, x: Floats, minutes: float, options: dict[str, Any]) -> Index:
        numbers, rows = self.keys.everything()
        if len(rows) < LEAST:
            raise AmipsError(
                f"{len(rows)} documents with vectors: all of them are scored as fast as any are found; "
                f"fit when there are {LEAST}"
            )
        return fit(rows, x, ids=numbers, minutes=minutes, **{"quiet": True, **options})

    def _queries(self, queries: Any) -> Floats:
        """Queries to learn from, as they are searched with."""
        if queries is None:
            if self.recorder is None:
                raise AmipsError("no queries to learn from: give some (queries=), or record them (log=)")
            queries = self.recorder.read()
        vectors, d = open_vectors(queries, "queries"), self.keys.current.d
        if d is not None and vectors.d != d:
            raise VectorError(f"queries have dimension {vectors.d}, the vectors of the documents {d}")
        return self.keys.prepared(vectors.load())

    def _numbers(self, ids: Iterable[str] | None, condition: Condition | None) -> Numbers:
        """Of the documents that have one of these ids and meet a condition."""
        if ids is None:
            return self.documents.numbers(condition)
        own = np.array(sorted(self.documents.numbers_of(ids).values()), np.int64)
        return own if condition is None else np.intersect1d(own, self.documents.numbers(condition))

    def _check_vectors(self, documents: Sequence[StoredDocument]) -> None:
        """VectorError if the vector of one of these documents is not like the others."""
        with_vectors = [(one.id, one.vector) for one in documents if one.vector is not None]
        if not with_vectors:
            return
        d = self.keys.current.d if self.keys.current.n or self.index is not None else None
        for own, vector in with_vectors:
            if vector.ndim != 1 or not vector.size or vector.size != (d := d or vector.size):
                raise VectorError(
                    f"the vector of document {own!r} has shape {list(vector.shape)}, those of others "
                    f"[{d or 'd'}]; nothing was written"
                )
        rows = np.stack([vector for _, vector in with_vectors])
        inspect(open_vectors(rows, "vectors of the documents"), zero="keep")

    def _refresh(self) -> None:
        """See what other processes have written."""
        if self.keys.in_line:
            self.keys.refresh()
        else:
            with self._writing():
                pass

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the one who writes: of the threads, and of the processes; with what others have written."""
        with self._lock, self._alone():
            self._writers += 1
            try:
                self.keys.catch_up()
                yield
            finally:
                self._writers -= 1

    def _alone(self) -> Any:
        inside = self._writers > 0
        return nullcontext() if self.path is None or inside else locked(self.path / LOCK, make=True)


def _checked_place(path: str | Path) -> Path:
    """The directory of a store, made if it is not there; BundleError if something else is in it."""
    place = local(path, BundleError)
    if place.is_dir() and "bundle" in manifest_kinds(place):
        raise BundleError(f"{place} is a bundle: from_bundle makes a store of it")
    check_output(place, BundleError, what="a store of documents", marks=[DOCUMENTS])
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BundleError(f"{place} cannot be made: {problem.strerror}") from None
    return place.absolute()
