"""How many cells there is time and memory to try."""

from pathlib import Path

from amips import exact
from amips.cells import POINTS_PER_CELL
from amips.errors import AmipsError, VectorError
from amips.files import read_json, write_json
from amips.fitting.candidates import check_index_memory, counts
from amips.fitting.clock import PARTITIONS_END, Clock
from amips.fitting.rate import partition_seconds
from amips.fitting.settings import Settings
from amips.task import Task
from amips.vectors import Vectors

ITERATIONS = 10  # of k-means
TRIALS, FEWEST_POINTS = 4, 16  # k-means looks at fewer points a cell, if so many trials would take too long
VAL_BYTES = 24  # working memory of a held-out query for each cell, while a router is judged
EXACT_SHARE = 2  # exact search takes this part of the memory: sorting out equal keys takes some, too


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
        most = settings.memory // (EXACT_SHARE * VAL_BYTES * len(task.val))
        numbers = [count for count in numbers if count <= most] or [min(numbers)]

    def partition(count: int, points: int) -> float:
        return partition_seconds(task.n, task.d, count, points, ITERATIONS, rate)

    # Two at least: one that follows the queries, and a plain one.
    numbers = [one for one in numbers if 2 * partition(one, FEWEST_POINTS) <= seconds] or [min(numbers)]
    fixed, each = partition(numbers[0], 0), partition(numbers[0], 1) - partition(numbers[0], 0)
    points = int((seconds / TRIALS - fixed) / max(1e-12, each))
    points = max(FEWEST_POINTS, min(POINTS_PER_CELL, points))
    write_json(kept, {"numbers": [int(count) for count in numbers], "points": points})
    return numbers, points
