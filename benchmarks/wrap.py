"""A FAISS index with a learned router around it, against the index itself: time of one query, and recall.

    python benchmarks/wrap.py DATA

DATA holds `keys` and `queries`. All indexes share one quantizer, so one router serves them all; it is trained
with the defaults on a part of the queries. Both sides scan the same number of cells, one query at a time, on
one thread, by turns. The table goes to results/wrap.md.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import sample, write
from numpy.typing import NDArray

import amips
from amips.blas import faiss, threads
from amips.cells import default_count, ivf_parts
from amips.search import WrappedIndex, recalls
from amips.vectors import Floats

ROUNDS = 3  # over all queries; the median of each query's times counts


def indexes(keys: Floats, cells: int) -> dict[str, Any]:
    """FAISS indexes over the same cells, by name: float32, codes, and the ways to have ids of one's own."""
    d, names = keys.shape[1], 10**9 + np.arange(len(keys))
    flat = faiss.index_factory(d, f"IVF{cells},Flat", faiss.METRIC_INNER_PRODUCT)
    flat.train(keys)

    def empty() -> Any:
        return faiss.IndexIVFFlat(flat.quantizer, d, cells, faiss.METRIC_INNER_PRODUCT)

    mapped = faiss.IndexIDMap(empty())
    native = empty()
    codes = faiss.IndexIVFPQ(flat.quantizer, d, cells, d // 8, 8, faiss.METRIC_INNER_PRODUCT)
    codes.train(keys)
    for index in (flat, codes):
        index.add(keys)
    for index in (mapped, native):
        index.add_with_ids(keys, names)
    return {
        "IndexIVFFlat": flat,
        "IndexIDMap(IndexIVFFlat)": mapped,
        "IndexIVFFlat, add_with_ids": native,
        f"IndexIVFPQ, {d // 8} bytes": codes,
    }


def times(calls: list[Callable[[Floats], object]], queries: Floats) -> NDArray[np.float64]:
    """Seconds of each call for one query: the median over queries and rounds, calls by turns."""
    seconds = np.empty((len(calls), ROUNDS, len(queries)))
    with threads(1):
        for round_ in range(ROUNDS):
            for i in range(len(queries)):
                for j, call in enumerate(calls):
                    start = time.perf_counter()
                    call(queries[i : i + 1])
                    seconds[j, round_, i] = time.perf_counter() - start
    return np.median(seconds, axis=(1, 2))


def measure(name: str, index: Any, wrapped: WrappedIndex, task: amips.task.Task, probes: int) -> list[Any]:
    """Name, microseconds of both, their ratio, recall@10 of both."""
    x, top = np.asarray(task.test.queries), np.asarray(task.test.top_ids)
    first = int(wrapped.index.search(np.asarray(task.keys[:1]), 1)[1][0, 0])  # ids begin at 0 or elsewhere
    shift = first if first >= 10**9 else 0
    own, learned = times([lambda q: index.search(q, 10), lambda q: wrapped.search(q, 10, probes=probes)], x)
    answers = (index.search(x, 10)[1], wrapped.search(x, 10, probes=probes)[1])
    recall = [float(recalls(ids - shift, top, 10).mean()) for ids in answers]
    return [name, 1e6 * own, 1e6 * learned, learned / own, *recall]


def main() -> None:
    """Build, label, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=60_000)
    parser.add_argument("--probes", type=int, default=16)
    o = parser.parse_args()
    keys, queries = (sample(o.data, name, getattr(o, name)) for name in ("keys", "queries"))
    cells = default_count(len(keys))
    by_name = indexes(keys, cells)
    task = amips.label(keys, queries, cells=by_name["IndexIVFFlat"], progress=True)
    model = amips.train(task, progress=True)
    raw = []
    for name, index in by_name.items():
        ivf_parts(index).ivf.nprobe = o.probes
        raw.append(measure(name, index, amips.wrap(index, model), task, o.probes))
    rows = [
        [name, f"{own:.0f}", f"{learned:.0f}", f"{ratio:.2f}", f"{a:.3f}", f"{b:.3f}"]
        for name, own, learned, ratio, a, b in raw
    ]
    head = ["index", "FAISS, us", "wrapped, us", "ratio", "recall@10 of FAISS", "recall@10 wrapped"]
    title = (
        f"One query through `amips.wrap`: {len(keys):,} keys, d = {keys.shape[1]}, {cells:,} cells, "
        f"{o.probes} probes, one thread"
    )
    about = (
        f"Router: {model.architecture.kind}, trained with the defaults on {len(task.train):,} queries; "
        f"recall is of {len(task.test):,} others. Times by turns, median of {ROUNDS} rounds over these."
    )
    write("wrap", title, "python benchmarks/wrap.py DATA", head, rows, raw, about)


if __name__ == "__main__":
    main()
