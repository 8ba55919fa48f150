"""What a graph can learn from new queries: edges between keys that they want together, and where to begin."""

from dataclasses import replace

import numpy as np

from amips.graph import connect, entry_points, log_edges, prune
from amips.search import GraphSearcher
from amips.task import Task
from amips.vectors import unit_rows

OLD_FIRST = 2  # of the edges of a key, one in so many stays before those of the log are looked at


def with_log_edges(index: GraphSearcher, task: Task, seed: int = 0) -> GraphSearcher:
    """The graph with edges from the log of a task at the keys which that names; the others keep theirs.

    Codes, and so the number of dimensions, stay as they are.
    """
    store = index.store
    unit = unit_rows(np.asarray(store.keys, np.float32))[0]
    old, top = store.neighbours, np.asarray(task.train.top_ids)
    degree = old.shape[1]
    new = log_edges(unit, top, degree // 2)
    first = degree // OLD_FIRST
    candidates = np.concatenate([old[:, :first], new, old[:, first:]], axis=1)
    candidates[(new < 0).all(axis=1)] = -1
    pruned = prune(unit, candidates, degree, fill=True, ordered=True)
    changed = (pruned >= 0).any(axis=1, keepdims=True)
    neighbours = np.where(changed, pruned, old).astype(np.int32)
    queries = task.train.vectors.load()
    entries = entry_points(np.asarray(store.keys), queries, len(store.entries), seed=seed)
    entries = np.union1d(store.entries, entries).astype(np.int32)[: 2 * len(store.entries)]
    neighbours = connect(neighbours, old, entries)
    other = replace(store, neighbours=neighbours, entries=entries)
    other.prepare()
    return replace(index, store=other)
