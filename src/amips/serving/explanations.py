"""One search, explained: the results, what was looked at, other ways to search, and a map of it.

The page at `/` shows it. It takes as long as exact search of one query, a few times over.
"""

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.search import (
    NOT_COMPARED,
    Explanation,
    GraphSearcher,
    Index,
    PlainIvf,
    Searcher,
    WrappedIndex,
    explain,
    keys_at,
    plain_index,
    split_norms,
)
from amips.text import Asker
from amips.vectors import Floats

MOST_CELLS = 200  # that are listed
MOST_POINTS = 1000  # of the background of a map
SAMPLE = 4096  # rows that say which directions a map has


@dataclass(frozen=True)
class Plane:
    """The two directions in which centroids, or keys of a graph, differ most.

    Args:
        store: of the index that it was made of.
        what: "cells" or "keys": what the points are.
        mean, axes: [d] and [d, 2].
        points: all cells, or a sample of the keys [p, 2].
        norm: the mean of those that were looked at: queries are drawn at this distance from the origin.
        variance: the share of it that the two directions have.
    """

    store: Any
    what: str
    mean: Floats
    axes: Floats
    points: Floats
    norm: float
    variance: float

    @classmethod
    def of(cls, index: Searcher | GraphSearcher) -> "Plane":
        """Of an index of cells, or a graph."""
        if isinstance(index, Searcher):
            what, rows = "cells", np.asarray(index.store.centroids, np.float32)
        else:
            numbers = np.unique(np.linspace(0, index.n - 1, min(SAMPLE, index.n)).astype(np.int64))
            what, rows = "keys", np.asarray(index.store.keys[numbers], np.float32)
        sample = rows[:: max(1, len(rows) // SAMPLE)]
        mean = sample.mean(axis=0)
        values, vectors = np.linalg.eigh(np.atleast_2d(np.cov((sample - mean).T.astype(np.float64), ddof=0)))
        axes = np.zeros((rows.shape[1], 2), np.float32)
        count = min(2, rows.shape[1])
        axes[:, :count] = vectors[:, ::-1][:, :count]
        variance = float(values[-count:].sum() / max(values.sum(), 1e-30))
        norm = float(np.linalg.norm(sample, axis=1).mean())
        return cls(index.store, what, mean, axes, (rows - mean) @ axes, norm, variance)

    def project(self, rows: Floats) -> Floats:
        """Rows [m, d] on the map, [m, 2]."""
        places: Floats = (rows - self.mean).astype(np.float32) @ self.axes
        return places


def store_of(index: Any) -> Any:
    """The store of an index, of which an explainer makes things; None of one that has none of amips."""
    return plain_index(index.snapshot).store if isinstance(index, Index) else None


class Explainer:
    """Explains searches, one at a time; what an index needs for it is made once.

    Args:
        store: as of `store_of`: with another one, take another explainer, or this one holds both in memory.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._plane: Plane | None = None
        self._plain: PlainIvf | None = None
        self._making: threading.Thread | None = None
        self._problem = ""

    def explain(
        self, index: Any, x: Floats, options: dict[str, Any], asker: Asker | None = None
    ) -> dict[str, Any]:
        """How a query [1, d] is answered, as plain values."""
        if isinstance(index, WrappedIndex):
            return {**_plain_values(explain(index, x, **options), None), "map": None}
        if not isinstance(index, Index):
            return _search_only(index, x, options)
        snapshot = index.snapshot
        behind, notes = plain_index(snapshot), list[str]()
        if isinstance(behind, GraphSearcher):
            self._make_plain(snapshot, notes)
        result = index.explain(x[0], plain=self._plain, **options)
        same = index.snapshot is snapshot
        if not same:
            notes.append("the index has changed meanwhile: no map is drawn")
        texts = asker.texts if same and asker is not None and len(asker.texts) == snapshot.n else None
        values = _plain_values(result, texts)
        # What becomes of plain IVF is noted here.
        values["notes"] = [note for note in values["notes"] if note != NOT_COMPARED] + notes
        has_keys = result.top_numbers is not None  # otherwise they are many, or with another library
        values["map"] = self._map(snapshot, x, result) if same and has_keys else None
        return values

    def _make_plain(self, snapshot: Any, notes: list[str]) -> None:
        """See to it that there are plain cells of a graph's keys: in a thread, which takes a while."""
        store = plain_index(snapshot).store
        if self._plain is not None and self._plain.store is store:
            return
        if self._problem:
            notes.append(self._problem)
            return
        if self._making is None or not self._making.is_alive():
            self._making = threading.Thread(target=self._cluster, args=(snapshot,), daemon=True)
            self._making.start()
        notes.append("plain cells are being made of these keys: ask again to compare with plain IVF")

    def _cluster(self, snapshot: Any) -> None:
        try:
            self._plain = PlainIvf.of(snapshot)
        except (AmipsError, MemoryError) as problem:
            self._problem = f"plain IVF is not compared: {problem}"

    def _map(self, snapshot: Any, x: Floats, result: Explanation) -> dict[str, Any]:
        behind = plain_index(snapshot)
        plane = self._plane
        if plane is None or plane.store is not behind.store:
            plane = self._plane = Plane.of(behind)
        background = plane.points[:: math.ceil(len(plane.points) / MOST_POINTS)]
        unit, _, _ = split_norms(x)
        numbers = np.empty(0, np.int64) if result.numbers is None else result.numbers
        keys = keys_at(snapshot, numbers) if len(numbers) else np.empty((0, snapshot.d), np.float32)
        return {
            "what": plane.what,
            "variance": plane.variance,
            "background": _points(background),
            "probed": _points(
                plane.points[result.cells[:MOST_CELLS]] if plane.what == "cells" else keys[:0, :2]
            ),
            "query": _points(plane.project(plane.norm * unit))[0],
            "results": _points(plane.project(keys)),
        }


def _points(rows: Floats) -> list[list[float]]:
    return [[round(float(a), 5), round(float(b), 5)] for a, b in np.asarray(rows).reshape(len(rows), 2)]


def _plain_values(result: Explanation, texts: Any) -> dict[str, Any]:
    """An explanation for JSON, with texts by key number where there are some."""
    top = result.top_numbers if result.top_numbers is not None else result.top_ids
    ours = result.numbers if result.numbers is not None else result.ids
    rows = _results(result.ids, result.scores, ours, result.numbers, texts)
    missed: list[dict[str, Any]] = []
    if top is not None and result.top_ids is not None and result.top_scores is not None:
        for row, number in zip(rows, ours.tolist(), strict=True):
            row["true"] = number in set(top.tolist())
        gone = ~np.isin(top, ours)
        numbers = None if result.top_numbers is None else result.top_numbers[gone]
        missed = _results(result.top_ids[gone], result.top_scores[gone], top[gone], numbers, texts)
    methods = [
        {
            "name": one.name,
            "seconds": one.seconds,
            "scanned": one.scanned,
            "probed": one.probed,
            "hits": result.hits(one),
        }
        for one in result.methods
    ]
    return {
        "way": result.way,
        "n": result.n,
        "c": result.c,
        "cells": result.cells[:MOST_CELLS].tolist(),
        "results": rows,
        "missed": missed,
        "of": None if top is None else len(top),
        "methods": methods,
        "notes": list(result.notes),
    }


def _results(
    ids: NDArray[Any], scores: Floats, places: NDArray[Any], numbers: NDArray[Any] | None, texts: Any
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(len(places)):
        row = {"id": ids[i].item() if isinstance(ids[i], np.generic) else ids[i], "score": float(scores[i])}
        if texts is not None and numbers is not None:
            text = texts[int(numbers[i])]
            row |= {"title": text.title, "text": text.text}
        rows.append(row)
    return rows


def _search_only(index: Any, x: Floats, options: dict[str, Any]) -> dict[str, Any]:
    """Of an index that does not say what it looks at: shards, or another object with a `search`."""
    start = time.perf_counter()
    scores, ids = index.search(x, **options)
    seconds = time.perf_counter() - start
    there = np.isfinite(scores[0])
    rows = _results(ids[0][there], scores[0][there], ids[0][there], None, None)
    method = {"name": "amips", "seconds": seconds, "scanned": None, "probed": None, "hits": None}
    note = "this index does not say what it looks at: there is nothing to compare with, and no map"
    facts = {"way": "unknown", "n": int(index.n), "c": 0, "cells": [], "results": rows, "missed": []}
    return {**facts, "of": None, "methods": [method], "notes": [note], "map": None}
