"""Candidates: designs with what they are estimated to cost on the val queries, before any index is built.

A scan finds what is in the cells it looks at, so the cost of a design at a recall follows from the scores of
its router alone (`amips.routers.estimate`): for float32 keys exactly, for lean storage up to what its codes
lose, which is a little, and for which the target is raised. That makes a design cheap to judge as a whole:
cells, router, second cells and storage together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.builder import LEAN_FRACTIONS, Builder
from amips.cells import STRENGTH, default_count
from amips.design import Design, Storage
from amips.errors import AmipsError
from amips.fitting.settings import Settings
from amips.index import REFINE, cell_bytes, pq_parts, scan_flops
from amips.lean import reduced_dimension
from amips.metrics import TOP
from amips.nets import Linear, Recipe
from amips.routers import RoutingEstimate, router_for
from amips.search import first_of, ranked

# Cells tried, in units of sqrt(n): the likeliest first, as time may run out.
COUNTS = (4.0, 8.0, 2.0, 1.0, 16.0, 0.5)
STRENGTHS = (STRENGTH, 0.0, 2 * STRENGTH)  # of query-aware cells; 0 is plain k-means
SPILL_FRACTIONS = (0.1, 0.5)
RANK_FRACTIONS = (1 / 6, 1 / 3, 1 / 2)  # of the dimensions, beside the quarter that partitions are tried with
CODES_KEEP = (
    0.995  # of the top keys in the cells that are scanned: what lean codes leave among the candidates
)


# Of the memory, that an index may take while it is built: the best so far is held beside it.
INDEX_SHARE = 0.3


class IndexSizeError(AmipsError):
    """No index of the keys is within the memory: a call with more of it begins anew."""


@dataclass(frozen=True)
class Candidate:
    """A design, the router that was made for it, its second cells, and its estimated cost on val.

    Args:
        cost: FLOPs of a query at the recall asked for, as a share of a full scan.
    """

    design: Design
    model: Any
    second: NDArray[np.int32] | None
    cost: float


class Estimator:
    """Estimates costs of designs of one builder, for one call of `fit`."""

    def __init__(self, builder: Builder, settings: Settings) -> None:
        self.builder, self.settings = builder, settings
        self.full = 2 * builder.task.n * builder.task.d

    def storages(self) -> list[tuple[Storage, int | None]]:
        """The storage asked for, or float32 keys and, where that saves anything, lean storage.

        With a bound on the memory those that fit into it, and 8 bits a value where float32 keys do not.
        """
        lean, d = self.builder.lean_dimensions(), self.builder.task.d
        ways: list[tuple[Storage, int | None]] = [("flat", None)]
        ways += [] if lean is None else [("lean", lean)]
        if self.settings.storage is not None:
            ways = [(self.settings.storage, (lean or d) if self.settings.storage == "lean" else None)]
        elif not self.fits("flat", None):
            ways[0] = ("sq8", None)
        if fitting := [way for way in ways if self.fits(*way)]:
            return fitting
        if self.settings.storage is None and self.fits("pq", None):
            return [("pq", None)]
        raise _too_little(self.settings, self.builder.task.n, min(self._bytes(*way) for way in ways))

    def fits(self, storage: Storage, dimensions: int | None, spill: float = 0.0) -> bool:
        """Whether an index of such cells is within the bound on the memory, if there is one."""
        memory = self.settings.memory
        return memory is None or self._bytes(storage, dimensions, spill) <= INDEX_SHARE * memory

    def _bytes(self, storage: Storage, dimensions: int | None, spill: float = 0.0) -> int:
        task = self.builder.task
        return cell_bytes(storage, task.n, task.d, dimensions or 0, pq_parts(task.d), spill)

    def plain(self, count: int) -> float:
        """What plain IVF with so many cells costs: the same probes for every query, float32 keys."""
        design = Design.plain(count)
        routing = self._routing(design, None, None)
        scanned = routing.at_probes(routing.probes_for(self.settings.recall)).scanned
        return self._cost_of(design, None, scanned)

    def candidate(self, design: Design, model: Any, second: NDArray[np.int32] | None = None) -> Candidate:
        """The design with the storage that makes it cheapest."""
        routing = self._routing(design, model, second)
        ways = []
        for storage, dimensions in self.storages():
            chosen = replace(design, storage=storage, dimensions=dimensions)
            ways.append(Candidate(chosen, model, second, self._cost(chosen, model, routing)))
        return min(ways, key=lambda way: way.cost)

    def with_second_cells(self, candidate: Candidate, fractions: tuple[float, ...]) -> list[Candidate]:
        """The same candidate with these fractions of the keys in a second cell."""
        task = self.builder.task_of(candidate.design)
        router = router_for(candidate.model, task.cells.centroids)
        order = ranked(task, router, self.settings.recall, memory=self.builder.memory)
        ways = []
        for fraction in fractions:
            design = replace(candidate.design, spill_fraction=fraction)
            if not self.fits(design.storage, design.dimensions, fraction):
                continue
            ways.append(self.candidate(design, candidate.model, first_of(*order, fraction)))
        return ways

    def _cost(self, design: Design, model: Any, routing: RoutingEstimate) -> float:
        recall = self.settings.recall
        if design.storage != "flat":
            recall = min(recall / CODES_KEEP, (1 + recall) / 2)
        return self._cost_of(design, model, routing.at_mass(routing.min_mass_for(recall)).scanned)

    def _cost_of(self, design: Design, model: Any, scanned: NDArray[np.int64]) -> float:
        """FLOPs of choosing cells and of scanning so many keys [m], as a share of a full scan."""
        task = self.builder.task
        parts = pq_parts(task.d) if design.storage == "pq" else 0
        scan = scan_flops(design.storage, scanned, task.d, REFINE * TOP, design.dimensions or 0, parts)
        router = router_for(model, self.builder.cells(design).centroids)
        return float((router.flops + scan.mean()) / self.full)

    def _routing(self, design: Design, model: Any, second: NDArray[np.int32] | None) -> RoutingEstimate:
        cells, val = self.builder.cells(design), self.builder.task.val
        router, sizes = router_for(model, cells.centroids), cells.sizes
        if second is not None:
            sizes = sizes + np.bincount(second[second >= 0], minlength=cells.count)
        x, top = np.asarray(val.queries), np.asarray(val.top_ids)[:, :TOP]
        return RoutingEstimate.by(router, x, top, cells.assignment, sizes, second=second)


def check_index_memory(settings: Settings, n: int, d: int) -> None:
    """AmipsError if the memory is too little for the smallest index that n keys of dimension d may have.

    Which dimensions lean codes need is not known before there are top keys: it is taken to be the fewest.
    """
    fewest = reduced_dimension(d, min(LEAN_FRACTIONS))
    storages: Sequence[Storage] = ("sq8", "pq", "lean") if settings.storage is None else (settings.storage,)
    smallest = min(cell_bytes(one, n, d, fewest, pq_parts(d)) for one in storages)
    if settings.memory is not None and smallest > INDEX_SHARE * settings.memory:
        raise _too_little(settings, n, smallest)


def _too_little(settings: Settings, n: int, smallest: int) -> IndexSizeError:
    return IndexSizeError(
        f"memory={settings.memory}: an index of these {n:,} keys takes "
        f"{int(smallest / INDEX_SHARE):,} bytes at least; give more, or spread the keys over machines"
    )


def counts(n: int, wanted: int | None) -> list[int]:
    """Numbers of cells to try: the one asked for, or several, the likeliest first."""
    if wanted is not None:
        return [wanted]
    return list(dict.fromkeys(max(2, default_count(n, factor)) for factor in COUNTS))


def partitions(numbers: Sequence[int]) -> Iterator[Design]:
    """Designs that differ in their cells, untrained, the likeliest first; both kinds of cells come early."""
    # By turns: an aware and a plain partition of each number, the third strength last.
    early = [(count, strength) for count in numbers for strength in STRENGTHS[:2]]
    late = [(count, STRENGTHS[2]) for count in numbers]
    for count, strength in [*early, *late]:
        yield Design(count, strength, recipe=None, spill_fraction=0.0, storage="flat")


def ranks(design: Design, d: int) -> list[Design]:
    """The same design with routers of other ranks: with few keys the router is a large part of the cost."""
    assert isinstance(design.router, Linear)
    assert design.router.rank is not None
    numbers = dict.fromkeys(reduced_dimension(d, fraction) for fraction in RANK_FRACTIONS)
    return [
        replace(design, router=replace(design.router, rank=rank))
        for rank in numbers
        if rank < d and rank != design.router.rank
    ]


def trained(design: Design) -> Design:
    """The same design with its router trained."""
    return replace(design, recipe=Recipe())
