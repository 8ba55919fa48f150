"""How fast this machine finds top keys, and what follows from it."""

import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from amips import exact
from amips.blas import threads_allowed
from amips.cluster import connected
from amips.errors import AmipsError
from amips.files import read_json, write_json
from amips.fitting.clock import LABEL_TIME, Clock
from amips.fitting.settings import Settings
from amips.graph import EXACT_KEYS, PROBES
from amips.metrics import TOP
from amips.task import Task
from amips.vectors import Vectors

PILOT_TIME = 0.03  # of the time given, to find out how fast this machine is
LEAST = 100  # queries that are labelled, however short the time
FEW, PILOT = 64, 2048  # queries labelled to see how long that takes
KMEANS = 0.4  # of that rate, with which k-means and finding the cells of all keys go


def affordable_queries(
    keys: Vectors,
    queries: Vectors,
    settings: Settings,
    clock: Clock,
    kept: Path,
    device: str | None,
    ray: str | None,
) -> tuple[int, float]:
    """How many queries there is time to label, and FLOPs a second of exact search with numpy.

    Args:
        kept: a file that the answer is kept in: measured anew it would differ.
    """
    if kept.exists():
        known = read_json(kept, AmipsError)
        if type(known.get("labelled")) is not int or type(known.get("rate")) is not float:
            raise AmipsError(f"{kept} is damaged; remove {kept.parent}")
        return int(known["labelled"]), float(known["rate"])
    seconds, memory = PILOT_TIME * clock.seconds, settings.exact_memory
    pilot = partial(labelling_rate, keys, queries, seconds=seconds, memory=memory)
    rate = pilot()
    labelling = speed_up(ray) * (rate if device is None else pilot(device=device))
    affordable = int(labelling * clock.until(LABEL_TIME) / (2 * keys.n * keys.d))
    count = min(queries.n, max(LEAST, affordable))
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, {**asdict(settings), "labelled": count, "rate": rate})
    return count, rate


def labelling_rate(
    keys: Vectors,
    queries: Vectors,
    device: str | None = None,
    *,
    seconds: float = math.inf,
    memory: int = exact.MEMORY,
) -> float:
    """FLOPs a second of finding top keys, with numpy or on a device; found out in about so many seconds."""
    lengths, times = list[int](), list[float]()
    for few in (min(FEW, queries.n // 2), min(FEW + PILOT, queries.n)):
        if times:
            few = min(few, max(2 * FEW, int(seconds * lengths[0] / times[0])))
        x = queries.rows(0, max(1, few))
        started = time.perf_counter()
        exact.top_k(keys, x, TOP, device=device, memory=memory)
        times.append(time.perf_counter() - started)
        lengths.append(len(x))
    # Of the difference: what a call costs whatever it is asked is not part of a rate.
    took = times[1] - times[0] if times[1] > times[0] else times[1]
    return 2 * keys.n * keys.d * max(1, lengths[1] - lengths[0]) / max(took, 1e-9)


def graph_seconds(task: Task, rate: float) -> float:
    """What the nearest keys of every key take, which is most of a graph, at a rate in FLOPs a second."""
    pairs = task.n * (task.n if task.n <= EXACT_KEYS else PROBES * math.sqrt(task.n) / 4)
    return 2 * pairs * (task.d / 2) / rate  # in half of the dimensions, as lean storage usually has


def partition_seconds(n: int, d: int, cells: int, points: int, iterations: int, rate: float) -> float:
    """What k-means with so many points a cell takes, and finding the cell of every key."""
    products = cells * (iterations * min(n, points * cells) + n)
    return 2 * products * d / (KMEANS * rate)


def second_seconds(n: int, d: int, cells: int, rate: float) -> float:
    """What finding a second cell for every key takes."""
    return 4 * n * cells * d / (KMEANS * rate)


def speed_up(ray: str | None) -> int:
    """How many times faster than this process a cluster labels: by its processors; 1 without one."""
    if ray is None:
        return 1
    with connected(ray) as cluster:
        assert cluster is not None
        return max(1, cluster.processors() // threads_allowed())
