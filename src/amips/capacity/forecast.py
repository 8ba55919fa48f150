"""The cost model: what labelling, cells, training, building and serving take, from a machine's rates.

Every phase is counted as it is done: FLOPs and bytes from shapes, divided by what the machine does in a
second (`amips.capacity.rates`). Top keys and cells are found by all machines together (`label --ray`), each
with its part of the keys; passes over the keys, the training of the router, and `amips shard`, which makes
one shard after the other, are the work of one. What goes over a network is left aside but for serving.

Two figures are of the data, not of the machine, and no model knows them: what share of the keys a query scans
at the recall asked for, and how many shards it asks. The share is taken from `scanned`, which the report of
a fit states, or else it is that of generated keys with a log of 20,000 queries. The shards follow from it:
of one part nothing can be left out, of c cells all but the share s; between them the share falls as a power
of the number of parts, s^(log S / log c) of S shards.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from amips.arguments import check_number, check_whole
from amips.capacity.rates import Rates, load_rates
from amips.cells import ITERATIONS, POINT_BYTES, POINT_SHARE, POINTS_PER_CELL, default_count
from amips.design import SPILL_FRACTION
from amips.errors import AmipsError
from amips.index import REFINE, cell_bytes
from amips.lean import RANK_FRACTION, reduced_dimension
from amips.metrics import TOP
from amips.sharding import CELLS_PER_SHARD, COPIES, FEWEST_QUERIES, SHARD_QUERIES

MOST_KEYS = (1 << 31) - 1  # that can be labelled; and entries of one index, keys of two cells twice
MOST, MOST_MACHINES = 1e12, 100_000  # queries, and machines, of which anything is said
LEAN = 0.4  # of the dimensions that codes have, usually
SCANNED = 0.033  # of the keys, by a query: at 100,000 and at 1,000,000 (benchmarks/results/scaling_n.md)
EPOCHS = 20  # passes over the log, of training
DEPTH = 10  # top keys kept of each query
FEWEST_KEYS = 10_000  # of a machine: with fewer, it is the log that takes the memory
WORKING = 10**9  # bytes of exact search, at most; half of the memory, if that is less
EACH_KEY = 50  # bytes that sorting out equal keys takes
DIVIDING = 88  # bytes a key that grouping keys into shards, and choosing copies, takes
TRAINING = 12  # bytes a key that training takes: cells, and their order
HELD_OUT, POINTS = 1000, 110  # queries that an index is measured on, and at how many efforts
MOST_JUDGED = 1 << 18  # queries of the log that second cells are chosen by
HOP = 5e-4  # seconds to ask another machine and be answered
MEMORY_USED = 0.8  # of the memory of a machine, by what is held for serving


@dataclass(frozen=True)
class Phase:
    """What a phase takes.

    Args:
        seconds: from its beginning to its end.
        memory, disk: bytes, on the machine that needs most.
    """

    name: str
    seconds: float
    memory: float
    disk: float


@dataclass(frozen=True)
class Serving:
    """What answering queries takes.

    Args:
        memory, disk: bytes on the machine with most shards: codes, and float32 keys.
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
    n = int(check_number("keys", keys, least=1, most=MOST))
    if n > MOST_KEYS:
        raise AmipsError(
            f"{n:,} keys: `label` and `shard` take {MOST_KEYS:,} at most; divide the collection before that"
        )
    m = int(check_number("queries", queries, least=1, most=MOST))
    d = check_whole("dim", dim, 1)
    rates, source = (rates, "as they were given") if isinstance(rates, Rates) else load_rates(rates)
    r = d if d < 32 else reduced_dimension(d, LEAN)
    held_bytes = cell_bytes("lean", 1, d, r, 0, SPILL_FRACTION)  # of one key, the most it takes
    fits = math.inf if memory is None else MEMORY_USED * check_number("memory", memory, above=0)
    if fits < held_bytes + EACH_KEY:
        raise AmipsError(f"memory={memory}: not even one key fits; give the bytes of a machine")
    if machines is not None:
        machines = check_whole("machines", machines, 1, MOST_MACHINES)
    most_shards = max(1, n // FEWEST_QUERIES)
    if shards is not None and check_whole("shards", shards, 1) > most_shards:
        raise AmipsError(f"shards={shards}: {n:,} keys are too few; ask for {most_shards:,} at most")
    wanted, count = shards, machines
    if count is None:
        load = n * held_bytes / fits  # 1 is a machine that is full
        load *= 1 if load <= 1 else 1 + COPIES
        entries = (1 + SPILL_FRACTION) * n / MOST_KEYS
        count = math.ceil(max(load, 1 if entries <= 1 else (1 + COPIES) * entries))
    while True:
        shards = min(count, most_shards) if wanted is None else wanted
        split = _Split(n, d, m, r, count, shards, min(POINT_BYTES, fits / POINT_SHARE))
        if (1 + SPILL_FRACTION) * split.shard > MOST_KEYS:
            raise AmipsError(
                f"{n:,} keys in {so_many(split.shards, 'shard')}: an index holds {MOST_KEYS:,} entries at "
                "most, copies and second cells among them; take more shards"
            )
        phases = _phases(split, min(WORKING, fits / 2), rates)
        serving = _serving(split, scanned, rates)
        needed = max(serving.memory / MEMORY_USED, *(phase.memory for phase in phases))
        if memory is None or needed <= memory:
            return Forecast(n, d, m, count, split.shards, split.c, r, phases, serving, source)
        no_help = wanted is not None and count >= wanted
        if machines is not None or no_help or n <= FEWEST_KEYS * count or count >= MOST_MACHINES:
            number = "however many machines there are" if machines is None else f"machines={count}"
            number = f"shards={wanted}" if machines is None and no_help else number
            raise AmipsError(
                f"{number}: each would need {needed:.3g} bytes of memory, and has {memory:.3g}; "
                "give more of either, or fewer queries"
            )
        count = min(MOST_MACHINES, math.ceil(1.1 * count))


def so_many(count: int, word: str) -> str:
    """A count with its word, in the plural where there is not one."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


@dataclass(frozen=True)
class _Split:
    """n keys of dimension d, m queries, codes of r dimensions; in shards, on machines.

    `point_bytes` bounds what k-means learns from.
    """

    n: int
    d: int
    m: int
    r: int
    machines: int
    shards: int
    point_bytes: float

    @property
    def part(self) -> int:
        """Keys of a machine, where all work at once."""
        return math.ceil(self.n / self.machines)

    @property
    def shard(self) -> int:
        """Keys of a shard, copies of others' among them."""
        return self.n if self.shards == 1 else math.ceil((1 + COPIES) * self.n / self.shards)

    @property
    def shards_each(self) -> int:
        """Shards of the machine that has most of them; where there are fewer than machines, each has one."""
        return math.ceil(self.shards / self.machines)

    @property
    def c(self) -> int:
        """Cells of a shard."""
        return default_count(self.shard)

    @property
    def all_cells(self) -> int:
        """Cells of all keys: of the only index, or those that are grouped into shards."""
        count = default_count(self.n)
        return count if self.shards == 1 else max(count, min(CELLS_PER_SHARD * self.shards, self.n // 4))

    @property
    def log_of_shard(self) -> int:
        """Training queries of a shard: on average those of one shard or two want its keys."""
        return self.m if self.shards == 1 else min(SHARD_QUERIES, math.ceil(2 * self.m / self.shards))

    def points(self, n: int, c: int) -> float:
        """Of n keys those that k-means learns c cells from."""
        return min(n, max(c, min(POINTS_PER_CELL * c, self.point_bytes / (4 * self.d))))


def _phases(split: _Split, working: float, rates: Rates) -> list[Phase]:
    n, d, m, c = split.n, split.d, split.m, split.all_cells
    log = m * (4.0 * d + 8.0 * DEPTH)
    labelling = 4.0 * n * d / rates.passes + 2.0 * split.part * d * m / rates.exact
    # Cells that are made with the labels are found by all machines, more of them by the one that shards.
    together = split.machines if c == default_count(n) else 1
    weights = reduced_dimension(d, RANK_FRACTION) * (d + c)
    train = EPOCHS * m * 6.0 * weights / rates.train
    codes = cell_bytes("lean", split.shard, d, split.r, 0, SPILL_FRACTION)
    on_disk = codes / 2 + 4.0 * split.shard * d
    build, build_memory = _build_seconds(split, on_disk, rates), float(codes)
    if split.shards > 1:  # one after the other, each labelled with queries of its own, and copies before
        own = 4.0 * split.shard * d / rates.passes + 2.0 * split.shard * d * split.log_of_shard / rates.exact
        build = split.shards * (own + _cell_seconds(split, split.shard, split.c, rates) + build)
        build += second_seconds_of(n, d, split.shards, m, rates)
        build_memory = max(codes + 4.0 * n, working + EACH_KEY * split.shard + 4.0 * n, DIVIDING * n)
    points = 2 * 4.0 * split.points(n, c) * d
    return [
        Phase("label", labelling, working + EACH_KEY * n, 4.0 * n * d + log),  # the task has all keys
        Phase("cells", _cell_seconds(split, n, c, rates) / together, points + 8.0 * n, 8.0 * n),
        Phase("train", train, log + 16.0 * 4 * weights + TRAINING * n, 4.0 * weights),
        Phase("build", build, build_memory, split.shards * on_disk),
    ]


def _cell_seconds(split: _Split, n: int, c: int, rates: Rates) -> float:
    """k-means, and the cell of every key, by one machine."""
    d = split.d
    return 2.0 * ITERATIONS * split.points(n, c) * c * d / rates.kmeans + 2.0 * n * c * d / rates.assign


def _build_seconds(split: _Split, on_disk: float, rates: Rates) -> float:
    """One index: second cells, codes, its operating points, its files."""
    n, d, r, c = split.shard, split.d, split.r, split.c
    coding = code_seconds_of((1 + SPILL_FRACTION) * n, d, r, rates)
    measure = HELD_OUT * POINTS * _query_seconds(n, d, r, c, SCANNED, rates)
    return second_seconds_of(n, d, c, split.log_of_shard, rates) + coding + measure + on_disk / rates.save


def code_seconds_of(n: float, d: int, r: int, rates: Rates) -> float:
    """Learning codes of r dimensions, and putting n keys into their cells."""
    return r * rates.learn_code + n * r / rates.code + 4.0 * n * d / rates.read


def second_seconds_of(n: int, d: int, c: int, m: int, rates: Rates) -> float:
    """Seeing what the log misses, and finding a second cell for every key."""
    return min(m, MOST_JUDGED) * c / rates.judge + 4.0 * n * c * d / rates.second


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


def _serving(split: _Split, scanned: float | None, rates: Rates) -> Serving:
    n, d, r, shard, shards, machines = split.n, split.d, split.r, split.shard, split.shards, split.machines
    share = SCANNED if scanned is None else check_number("scanned", scanned, above=0, most=1)
    # In all cells of all shards together; s^(log S / log cells) of the shards hold what is looked for.
    cells = max(2, default_count(n))
    contacted = max(1.0, shards * share ** (math.log(shards) / math.log(max(cells, shards))))
    within = min(1.0, share * n / (contacted * shard))
    alone = _query_seconds(shard, d, r, split.c, within, rates)
    candidates = min(shard, REFINE * TOP)
    hop = HOP if machines > 1 else 0.0
    codes = cell_bytes("lean", shard, d, r, 0, SPILL_FRACTION)
    return Serving(
        memory=split.shards_each * codes,
        disk=split.shards_each * (4.0 * shard * d + codes / 2),
        scanned=within,
        shards_contacted=contacted,
        latency=alone + hop,
        latency_on_disk=alone + hop + candidates * rates.random_read,
        queries_a_second=machines / (contacted * alone),
    )
