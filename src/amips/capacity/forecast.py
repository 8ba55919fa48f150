"""The cost model: what labelling, cells, training, building and serving take, from a machine's rates.

Every phase is counted as it is done: FLOPs and bytes from shapes, divided by what the machine does in a
second (`amips.capacity.rates`). Keys are spread evenly over the machines, and each does its part of every
phase; what goes over a network between them is left aside but for serving.

Two figures are of the data, not of the machine, and no model knows them: what share of the keys a query scans
at the recall asked for, and how many shards it asks. The share is taken from `scanned`, which the report of
a fit states, or else from what was measured on generated keys. The shards follow from it: of one part nothing
can be left out, of c cells all but the share s; between them the share falls as a power of the number of
parts, s^(log S / log c) of S shards.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from amips.arguments import check_number, check_whole
from amips.capacity.rates import Rates, load_rates
from amips.cells import ITERATIONS, POINTS_PER_CELL, default_count
from amips.design import SPILL_FRACTION
from amips.errors import AmipsError
from amips.index import REFINE, cell_bytes
from amips.lean import RANK_FRACTION, reduced_dimension
from amips.metrics import TOP

MOST_KEYS = (1 << 31) - 1  # of one index
LEAN = 0.4  # of the dimensions that codes have, usually
KEYS_SCANNED, GROWTH = 3.3, 0.55  # keys that a query scans: 3.3 n^0.55, on generated data
EPOCHS = 20  # passes over the log, of training
DEPTH = 10  # top keys kept of each query
FEWEST_KEYS = 10_000  # of a machine: with fewer, it is the log that takes the memory
WORKING = 10**9  # bytes of exact search, at most; half of the memory, if that is less
EACH_KEY = 50  # bytes that sorting out equal keys takes
HELD_OUT, POINTS = 1000, 110  # queries that an index is measured on, and at how many efforts
MOST_JUDGED = 1 << 18  # queries of the log that second cells are chosen by
HOP = 5e-4  # seconds to ask another machine and be answered
MEMORY_USED = 0.8  # of the memory of a machine, by what is held for serving


@dataclass(frozen=True)
class Phase:
    """What a phase takes on each machine, all working at once.

    Args:
        seconds: from its beginning to its end.
        memory, disk: bytes, on each machine.
    """

    name: str
    seconds: float
    memory: float
    disk: float


@dataclass(frozen=True)
class Serving:
    """What answering queries takes.

    Args:
        memory, disk: bytes on each machine: codes, and float32 keys.
        scanned: share of the keys of the shards that are asked.
        shards_contacted: of a query, on average.
        latency: seconds of a query alone, codes in memory and float32 keys in the page cache.
        latency_on_disk: the same if the float32 keys of its candidates are read from disk.
        queries_a_second: of all machines together, keys in the page cache, one thread each.
    """

    memory: float
    disk: float
    scanned: float
    shards_contacted: float
    latency: float
    latency_on_disk: float
    queries_a_second: float


@dataclass(frozen=True)
class Forecast:
    """What was asked, and what it will take."""

    keys: int
    dim: int
    queries: int
    machines: int
    shards: int
    cells: int
    dimensions: int
    phases: list[Phase]
    serving: Serving
    rates: str

    @property
    def seconds(self) -> float:
        """All phases, one after the other."""
        return sum(phase.seconds for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "seconds": self.seconds}


def plan(
    keys: float,
    dim: int,
    queries: float,
    *,
    machines: int | None = None,
    memory: float | None = None,
    shards: int | None = None,
    scanned: float | None = None,
    rates: Any = None,
) -> Forecast:
    """What labelling, training, building and serving so many keys take: time, memory, disk, machines.

    Args:
        keys, queries: how many; of the queries, those that are learned from.
        dim: their dimension.
        machines: how many there are; as few as the memory allows, if None.
        memory: bytes of memory of each machine; without it one machine is thought to have enough.
        shards: parts of the keys, each an index of its own; one a machine if None.
        scanned: share of the keys that a query scans in one index of all keys, as the report of a fit states.
        rates: `Rates`, or a file of them; of this machine if None, as `amips plan --calibrate` has measured
            them, or else those that are shipped.
    """
    n, m = (int(check_number(name, value, least=1)) for name, value in (("keys", keys), ("queries", queries)))
    d = check_whole("dim", dim, 1)
    rates, source = (rates, "as they were given") if isinstance(rates, Rates) else load_rates(rates)
    r = d if d < 32 else reduced_dimension(d, LEAN)
    held_bytes = cell_bytes("lean", 1, d, r, 0, SPILL_FRACTION)  # of one key, the most it takes
    fits = math.inf if memory is None else MEMORY_USED * check_number("memory", memory, above=0)
    if fits < held_bytes + EACH_KEY:
        raise AmipsError(f"memory={memory}: not even one key fits; give the bytes of a machine")
    count = math.ceil(max(n * held_bytes / fits, n / MOST_KEYS)) if machines is None else machines
    count, wanted = check_whole("machines", count, 1), shards
    while True:
        shards = count if wanted is None else check_whole("shards", wanted, 1)
        if n / shards > MOST_KEYS:
            raise AmipsError(f"shards={shards}: an index holds {MOST_KEYS:,} keys at most; take more shards")
        part, shard = math.ceil(n / count), math.ceil(n / shards)  # keys of a machine, of a shard
        c = default_count(shard)
        phases = _phases(n, part, shard, d, m, c, r, min(WORKING, fits / 2), rates)
        serving = _serving(n, part, shard, d, r, c, shards, count, scanned, rates)
        needed = max(serving.memory, *(phase.memory for phase in phases))
        if memory is None or needed <= memory:
            return Forecast(n, d, m, count, shards, c, r, phases, serving, source)
        if machines is not None or part <= FEWEST_KEYS:
            number = f"machines={count}" if machines is not None else "however many machines there are"
            raise AmipsError(
                f"{number}: each would need {needed:.3g} bytes of memory, and has {memory:.3g}; "
                "give more of either, or fewer queries"
            )
        count = math.ceil(1.1 * count)


def _phases(
    n: int, part: int, shard: int, d: int, m: int, c: int, r: int, working: float, rates: Rates
) -> list[Phase]:
    raw = 4.0 * part * d
    log = m * (4.0 * d + 8.0 * DEPTH)
    shards_each = part / shard
    labelling = raw / rates.passes + 2.0 * part * d * m / rates.exact
    points = min(shard, POINTS_PER_CELL * c)
    cells = 2.0 * ITERATIONS * points * c * d / rates.kmeans + 2.0 * shard * c * d / rates.assign
    rank = reduced_dimension(d, RANK_FRACTION)
    weights = rank * (d + c)
    # Queries are asked of a shard if its keys are among their top keys: on average of one shard or two.
    train = EPOCHS * min(m, 2.0 * m * shard / n) * 6 * weights / rates.train
    coding = code_seconds_of((1 + SPILL_FRACTION) * shard, d, r, rates)
    second = second_seconds_of(shard, d, c, m, rates)
    measure = HELD_OUT * POINTS * _query_seconds(shard, d, r, c, scanned_share(shard), rates)
    on_disk = cell_bytes("lean", shard, d, r, 0, SPILL_FRACTION) / 2 + 4.0 * shard * d
    save = on_disk / rates.save
    codes = cell_bytes("lean", shard, d, r, 0, SPILL_FRACTION)
    return [
        Phase("label", labelling, working + EACH_KEY * part, raw + log),
        Phase("cells", cells * shards_each, 2 * 4.0 * min(points * d, 1 << 28) + 8.0 * shard, 8.0 * part),
        Phase("train", train * shards_each, log + 16.0 * 4 * weights, 4.0 * weights * shards_each),
        Phase("build", (second + coding + measure + save) * shards_each, codes, on_disk * shards_each),
    ]


def code_seconds_of(n: float, d: int, r: int, rates: Rates) -> float:
    """Learning codes of r dimensions, and putting n keys into their cells."""
    return r * rates.learn_code + n * r / rates.code + 4.0 * n * d / rates.read


def second_seconds_of(n: int, d: int, c: int, m: int, rates: Rates) -> float:
    """Seeing what the log misses, and finding a second cell for every key."""
    return min(m, MOST_JUDGED) * c / rates.judge + 4.0 * n * c * d / rates.second


def scanned_share(n: int) -> float:
    """The share of n keys that a query scans at recall@10 0.95, where nothing is known of the data."""
    return float(min(1.0, KEYS_SCANNED * n**GROWTH / n))


def _query_seconds(n: int, d: int, r: int, c: int, scanned: float, rates: Rates) -> float:
    """One query in one index, alone, everything in memory."""
    rank = reduced_dimension(d, RANK_FRACTION)
    route = 2.0 * rank * (d + c) / rates.route
    candidates = min(n, REFINE * TOP)
    return (
        rates.query
        + route
        + (1 + SPILL_FRACTION) * scanned * n * r / rates.scan
        + candidates * d / rates.rescore
    )


def _serving(
    n: int,
    part: int,
    shard: int,
    d: int,
    r: int,
    c: int,
    shards: int,
    machines: int,
    scanned: float | None,
    rates: Rates,
) -> Serving:
    share = scanned_share(n) if scanned is None else check_number("scanned", scanned, above=0, most=1)
    # In all cells of all shards together; s^(log S / log cells) of the shards hold what is looked for.
    cells = max(2, default_count(n))
    contacted = max(1.0, shards * share ** (math.log(shards) / math.log(max(cells, shards))))
    within = min(1.0, share * n / (contacted * shard))
    alone = _query_seconds(shard, d, r, c, within, rates)
    candidates = min(shard, REFINE * TOP)
    hop = HOP if machines > 1 else 0.0
    return Serving(
        memory=part / shard * cell_bytes("lean", shard, d, r, 0, SPILL_FRACTION),
        disk=4.0 * part * d + part / shard * cell_bytes("lean", shard, d, r, 0, SPILL_FRACTION) / 2,
        scanned=within,
        shards_contacted=contacted,
        latency=alone + hop,
        latency_on_disk=alone + hop + candidates * rates.random_read,
        queries_a_second=machines / (contacted * alone),
    )
