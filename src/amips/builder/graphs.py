"""The graph of a design, and its index."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from amips.builder.kept_files import cached, read_arrays
from amips.builder.reduced import fewest_dimensions
from amips.design import Design, GraphStorage
from amips.errors import AmipsError, RunError
from amips.files import remove_directory
from amips.graph import ENTRIES, LOG_DEPTH, Graph, make_graph, near_lists
from amips.index import FEWEST_KEYS, MOST_VALUES, GraphStore
from amips.lean import STEP, Projection
from amips.locks import locked
from amips.metrics import TOP
from amips.search import GraphSearcher
from amips.task import Task
from amips.vectors import Vectors, open_vectors, rows_of

if TYPE_CHECKING:
    from amips.builder.builder import Builder

GRAPH_CANDIDATES = 3 * TOP  # among which codes of a graph must have nearly all of the top keys
LOG_PART = 8  # of a bound on the memory, that the log takes while entry points are looked for
LEAST_LOG = 10  # queries for each entry point, with fewer of which a log says nothing


def graph_design(
    task: Task,
    *,
    storage: GraphStorage | None = None,
    dimensions: int | None = None,
    entries: int = ENTRIES,
    learned: bool = True,
) -> Design:
    """A graph over the keys of a task: lean, unless so few dimensions or keys leave nothing to save."""
    if storage is None:
        lean = dimensions is not None or (task.d >= STEP and task.n >= FEWEST_KEYS["lean"])
        storage = "lean" if lean else "flat"
    return Design.graph(storage=storage, dimensions=dimensions, entries=entries, learned=learned)


def resolved_graph(builder: "Builder", design: Design) -> Design:
    """The design with the dimensions of its codes, and no more entries than there are keys.

    A log that is too short to learn from is left out: the graph is then the plain one.
    """
    task = builder.task
    if design.query_aware and len(task.train) < LEAST_LOG * design.cells:
        design = replace(design, query_aware=0.0)
    if design.storage == "lean" and design.dimensions is None:
        few = fewest_dimensions(task, builder.projection, GRAPH_CANDIDATES, builder.memory)
        design = replace(design, dimensions=min(few or task.d, MOST_VALUES))
    return replace(design, cells=min(design.cells, task.n))


def graph_searcher(builder: "Builder", design: Design) -> GraphSearcher:
    """The index of a design, with no operating points yet."""
    task, projection = builder.task, None
    if design.storage == "lean":
        assert design.dimensions is not None
        projection = builder.projection(design.dimensions)
    name = f"graph-{design.part('graph')}-{builder.inputs}.npz"
    read = partial(_read_graph, n=task.n)
    graph = cached(
        builder.directory / name, lambda: _graph_of(builder, design, projection), _write_graph, read
    )
    wanted = np.asarray(task.train.top_ids[:, :LOG_DEPTH]) if design.query_aware else None
    storage = cast(GraphStorage, design.storage)
    store = GraphStore.build(task.key_vectors, graph, storage, projection, wanted)
    return GraphSearcher(store, fingerprint=task.fingerprint, design=design)


def _graph_of(builder: "Builder", design: Design, projection: Projection | None) -> Graph:
    """The graph; of lean storage it is made in the dimensions that are walked."""
    task = builder.task
    keys, queries = task.key_vectors, _some(task.train.vectors, builder.memory, builder.seed)
    if projection is not None:
        keys = projection.of_keys(keys)
        queries = open_vectors(_projected(queries, projection), "queries")
    rows = keys.load()
    seed, progress = builder.seed, builder.progress
    # Graphs of one number of dimensions share these, whether they learn from the log or not.
    place = builder.directory / f"near-{projection.r if projection else 0}-{builder.inputs}"
    with locked(builder.directory / ".near.lock", RunError(f"another build is at work in {place}")):
        try:
            near = _checked_lists(near_lists(rows, seed=seed, progress=progress, out=place), task.n, place)
        except AmipsError:  # damaged, or made by other code: made once more
            remove_directory(place)
            near = near_lists(rows, seed=seed, progress=progress, out=place)
    return make_graph(
        rows,
        queries.load() if design.query_aware else None,
        np.asarray(task.train.top_ids) if design.query_aware else None,
        degree=design.degree,
        entries=design.cells,
        near=near,
        seed=seed,
    )


def _some(queries: Vectors, memory: int | None, seed: int) -> Vectors:
    """The log that entry points are looked for with; of a bound on the memory it takes an eighth."""
    most = queries.n if memory is None else memory // (LOG_PART * 4 * queries.d)
    if queries.n <= most:
        return queries
    return rows_of(queries, np.sort(np.random.default_rng(seed).choice(queries.n, most, replace=False)))


def _projected(queries: Any, projection: Projection) -> NDArray[np.float32]:
    out = np.empty((queries.n, projection.r), np.float32)
    for start, block in queries.blocks():
        out[start : start + len(block)] = block @ projection.queries.T
    return out


def _write_graph(file: Any, graph: Graph) -> None:
    np.savez(file, neighbours=graph.neighbours, entries=graph.entries)


def _read_graph(path: Path, n: int) -> Graph:
    """The graph; an error unless every number is one of a key."""
    arrays = read_arrays(path)
    entries = arrays["entries"].astype(np.int32)
    if entries.min() < 0 or entries.max() >= n:
        raise RunError(f"{path} is damaged")
    return Graph(_checked_lists(arrays["neighbours"], n, path), entries)


def _checked_lists(lists: NDArray[Any], n: int, path: Path) -> NDArray[np.int32]:
    """Lists of keys [n, width]; an error unless every number is one of a key, or -1."""
    lists = lists.astype(np.int32, copy=False)
    if len(lists) != n or lists.min(initial=0) < -1 or lists.max(initial=0) >= n:
        raise RunError(f"{path} is damaged")
    return lists
