"""How many cells there is time and memory to try."""

from pathlib import Path

import numpy as np

from amips import exact
from amips.cells import POINTS_PER_CELL
from amips.errors import AmipsError, VectorError
from amips.files import read_json, write_json
from amips.fitting.candidates import INDEX_SHARE, IndexSizeError, check_index_memory, counts
from amips.fitting.clock import PARTITIONS_END, Clock
from amips.fitting.rate import partition_seconds
from amips.fitting.settings import EXACT_SHARE, Settings
from amips.graph import DEGREE
from amips.index import graph_bytes
from amips.resources import available_memory
from amips.task import Task
from amips.vectors import Vectors, rows_of

ITERATIONS = 10  # of k-means
TRIALS, FEWEST_POINTS = 4, 16  # k-means looks at fewer points a cell, if so many trials would take too long
VAL_BYTES = 24  # working memory of a held-out query for each cell, while a router is judged


def check_memory(settings: Settings, keys: Vectors, k: int) -> None:
    """AmipsError if the memory of a fit is too little to find the top k keys, or for any index of the keys.

    Before anything is done: what a label costs would be lost.
    """
    memory = settings.memory
    if memory is None:
        return
    least = EXACT_SHARE * exact.least_memory(keys.d, k)
    if memory < least:
        too_little = f"memory={memory} bytes is too little for d = {keys.d}"
        raise VectorError(f"{too_little}; at least {least} are needed")
    check_index_memory(settings, keys.n, keys.d)
    if settings.structure == "graph" and (needed := graph_needs(settings, keys.n, keys.d)) > memory:
        raise IndexSizeError(
            f"memory={memory}: a graph over these {keys.n:,} keys takes {needed:,} bytes; "
            "give more, or take cells"
        )


def no_room_for_graph(settings: Settings, n: int, d: int) -> str:
    """Why no graph is tried, if it would take more than the memory given, or than there is."""
    room = available_memory() if settings.memory is None else settings.memory
    if room is None or graph_needs(settings, n, d) <= room:
        return ""
    whose = "this machine has left" if settings.memory is None else "was given"
    return f"no graph is tried: it would take more memory than {whose}"


def graph_needs(settings: Settings, n: int, d: int) -> int:
    """The memory with which a graph over n keys can be tried: one is made, and the best index is held.

    How many dimensions lean codes need is not known before there are top keys: it is taken to be half.
    """
    dimensions = d // 2 if settings.storage in (None, "lean") else d
    return int(graph_bytes(n, DEGREE, dimensions) / (1 - INDEX_SHARE))


def part_of_log(queries: Vectors, count: int, settings: Settings) -> Vectors:
    """So many of the queries, drawn at random; of a log in the order of time the last.

    They are read where they are: a copy would be memory that nobody counts.
    """
    if settings.order is not None:  # with gaps, less would come again
        return rows_of(queries, np.arange(queries.n - count, queries.n))
    drawn = np.random.default_rng([settings.seed, 3]).choice(queries.n, count, replace=False)
    return rows_of(queries, np.sort(drawn))


def affordable_cells(
    task: Task, settings: Settings, clock: Clock, rate: float, kept: Path
) -> tuple[list[int], int]:
    """Numbers of cells that there is time and memory to try, the likeliest first, and points of k-means.

    The points a cell are such that some partitions of the likeliest number take their part of the time.

    Args:
        rate: FLOPs a second, of exact search.
        kept: a file that the answer is kept in: a call that continues has another clock, and must try the
            same to find what was made.
    """
    if kept.is_file():
        try:
            known = read_json(kept, AmipsError)
            return [int(count) for count in known["numbers"]], int(known["points"])
        except (KeyError, TypeError, ValueError):
            raise AmipsError(f"{kept} is damaged; remove {kept.parent}") from None
    seconds = max(1e-9, clock.until_of_cells(PARTITIONS_END))
    numbers = counts(task.n, settings.cells)
    if settings.memory is not None:
        of_cell = EXACT_SHARE * VAL_BYTES * len(task.val)
        most = settings.memory // of_cell
        if settings.cells is not None and settings.cells > most:
            raise IndexSizeError(
                f"memory={settings.memory}: a router of {settings.cells:,} cells is judged in "
                f"{of_cell * settings.cells:,} bytes; give more, or fewer cells"
            )
        numbers = [count for count in numbers if count <= most] or [max(2, most)]

    def partition(count: int, points: int) -> float:
        return partition_seconds(task.n, task.d, count, points, ITERATIONS, rate)

    # Two at least: one that follows the queries, and a plain one.
    numbers = [one for one in numbers if 2 * partition(one, FEWEST_POINTS) <= seconds] or [min(numbers)]
    fixed, each = partition(numbers[0], 0), partition(numbers[0], 1) - partition(numbers[0], 0)
    points = int((seconds / TRIALS - fixed) / max(1e-12, each))
    points = max(FEWEST_POINTS, min(POINTS_PER_CELL, points))
    write_json(kept, {"numbers": [int(count) for count in numbers], "points": points})
    return numbers, points
