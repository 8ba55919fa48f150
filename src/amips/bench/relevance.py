"""Relevance: what was found against what people judged, by the measures of information retrieval.

Recall against exact search tells how faithful an index is to its vectors; these tell how useful the answers
are to those who asked. The measures are those of trec_eval, computed by ir-measures:

    nDCG@10 = sum over ranks i <= 10 of g_i / log2(i + 1), divided by the same sum in the best order,

with g_i the judgement of the i-th answer, and recall@100, the share of a query's relevant keys (judged 1 or
more) among the first 100 answers.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.extras import needs_extra

Doubles = NDArray[np.float64]
Qrels = Mapping[str, Mapping[str, int]]

MEASURES = {"nDCG@10": "nDCG@10", "recall@100": "R@100"}  # our name, that of ir-measures
DEPTH = 100
DRAWS = 1000


@dataclass(frozen=True)
class Relevance:
    """Measures by query: row i of every array belongs to `queries[i]`."""

    queries: list[str]
    values: dict[str, Doubles]

    @property
    def means(self) -> dict[str, float]:
        """Each measure over all judged queries."""
        return {name: float(values.mean()) for name, values in self.values.items()}


@dataclass(frozen=True)
class Difference:
    """A paired difference of means and its 95 % bootstrap interval over queries."""

    value: float
    low: float
    high: float


def read_qrels(path: str | Path) -> dict[str, dict[str, int]]:
    """Judgements by query and key: BEIR's three columns with a header, or TREC's four without."""
    path = Path(path)
    judged: dict[str, dict[str, int]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as f:
            for number, row in enumerate(csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                cells = row if len(row) > 1 else " ".join(row).split()
                if not cells or (number == 1 and cells[0] == "query-id"):
                    continue
                if len(cells) not in (3, 4):
                    raise AmipsError(
                        f"{path} line {number}: expected query-id, corpus-id, score, set apart by tabs"
                    )
                try:
                    judged.setdefault(cells[0], {})[cells[-2]] = int(cells[-1])
                except ValueError:
                    raise AmipsError(f"{path} line {number}: {cells[-1]!r} is not a whole score") from None
    except FileNotFoundError:
        raise AmipsError(f"{path} does not exist") from None
    except (UnicodeDecodeError, csv.Error) as problem:
        raise AmipsError(f"{path} is not a readable table: {problem}") from None
    if not judged:
        raise AmipsError(f"{path} holds no judgements")
    return judged


def measure(
    qrels: Qrels,
    query_ids: Sequence[str],
    key_ids: Sequence[str],
    ids: NDArray[np.integer[Any]],
    scores: NDArray[np.floating[Any]],
    *,
    drop_same_id: bool = False,
) -> Relevance:
    """Every measure of every query of `query_ids` that has a relevant key in `qrels`; others are left out.

    Args:
        qrels: Judgements, from `read_qrels`.
        query_ids: The id of each row of `ids`.
        key_ids: The id of each key.
        ids: [m, k] key numbers as search returns them, -1 where there is nothing; k is 100 or more, or n.
        scores: [m, k]. The order of the answers is that of the scores; equal ones by the lower number, as
            everywhere in amips (trec_eval would take the larger name).
        drop_same_id: Leave out an answer with the id of its query: for data whose queries are keys (Quora).
    """
    with needs_extra("relevance", "text", "ir_measures"):
        import ir_measures
    ids, scores = np.asarray(ids), np.asarray(scores)
    _check(query_ids, key_ids, ids, scores)
    judged = [
        (row, query)
        for row, query in enumerate(query_ids)
        if any(score > 0 for score in qrels.get(query, {}).values())
    ]
    if not judged:
        raise AmipsError(
            "none of the queries has a relevant key in the judgements: do the ids belong together?"
        )
    run = {
        query: dict(_ranked(query if drop_same_id else None, key_ids, ids[row], scores[row]))
        for row, query in judged
    }
    wanted = {ir_measures.parse_measure(theirs): ours for ours, theirs in MEASURES.items()}
    place = {query: i for i, (_, query) in enumerate(judged)}
    values = {ours: np.zeros(len(judged)) for ours in MEASURES}  # 0 for a query without answers
    truth = {query: dict(qrels[query]) for query in place}
    for metric in ir_measures.iter_calc(list(wanted), truth, run):
        values[wanted[metric.measure]][place[metric.query_id]] = metric.value
    return Relevance(list(place), values)


def difference(
    ours: Relevance, theirs: Relevance, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """Ours minus theirs for every measure, query by query, so that what is hard for both cancels."""
    if ours.queries != theirs.queries:
        raise AmipsError("two systems can be compared on the same queries only, in the same order")
    m = len(ours.queries)
    rng = np.random.default_rng(seed)
    gained = np.stack([ours.values[name] - theirs.values[name] for name in MEASURES], axis=1)
    # One draw at a time: all together would be draws x m numbers.
    drawn = np.stack([gained[rng.integers(m, size=m)].mean(axis=0) for _ in range(draws)])
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return {
        name: Difference(float(gained[:, i].mean()), float(low[i]), float(high[i]))
        for i, name in enumerate(MEASURES)
    }


def _ranked(
    itself: str | None,
    key_ids: Sequence[str],
    ids: NDArray[np.integer[Any]],
    scores: NDArray[np.floating[Any]],
) -> Iterator[tuple[str, float]]:
    """Names with scores that fall by one from rank to rank, so that no two are equal and none is rounded."""
    order = np.lexsort((ids, -scores))
    numbers = dict.fromkeys(int(i) for i in ids[order] if i >= 0)
    names = [name for name in (key_ids[i] for i in numbers) if name != itself]
    yield from zip(names, range(len(names), 0, -1), strict=True)


def _check(
    query_ids: Sequence[str],
    key_ids: Sequence[str],
    ids: NDArray[np.integer[Any]],
    scores: NDArray[np.floating[Any]],
) -> None:
    if ids.ndim != 2 or ids.shape != scores.shape or len(ids) != len(query_ids):
        raise AmipsError(
            f"ids {ids.shape} and scores {scores.shape} need one row for each of {len(query_ids):,} queries"
        )
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < len(key_ids):
        raise AmipsError(f"ids must be key numbers from 0 to {len(key_ids) - 1:,}, or -1")
    if ids.shape[1] < min(DEPTH, len(key_ids)):
        raise AmipsError(
            f"recall@{DEPTH} needs {DEPTH} answers to a query, not {ids.shape[1]}: search with k={DEPTH}"
        )
    if len(set(query_ids)) < len(query_ids):
        raise AmipsError("two queries have the same id")
