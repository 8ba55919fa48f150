"""What do the defaults give? FLOPs at recall@10 0.95, on queries that nothing has seen, of every way in.

    python benchmarks/defaults.py DATA [--keys 20000 --queries 20000 --minutes 2]

DATA holds `keys` and `queries`. Compared are the best plain FAISS IVF over numbers of cells; label, train
and build without options; `fit` for --minutes; the Python block of README.md as it is printed; and the steps
with routers of other ranks. All learn from the same log and are measured on the same other queries. The table
goes to results/defaults.md.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import sample, write
from numpy.typing import NDArray

import amips
from amips import exact
from amips.bench import sweep
from amips.builder import Builder
from amips.metrics import TOP, cost_at
from amips.search import GraphSearcher, Index, Snapshot, ladder, margin_ladder, mass_bounds, recalls
from amips.task import Task
from amips.vectors import Floats, open_vectors

README = Path(__file__).parent.parent / "README.md"
RECALL = 0.95
HELD_OUT = 2000  # queries to measure on, at most; a tenth of the data if there are few
ENOUGH = 0.99  # ladders end at this recall


@dataclass(frozen=True)
class HeldOut:
    """Queries x [m, d] that nothing has seen, their true top keys [m, 10], and the FLOPs of a full scan."""

    x: Floats
    top: NDArray[np.int64]
    full: float

    @classmethod
    def of(cls, keys: Floats, x: Floats) -> "HeldOut":
        """Exact top keys of x."""
        return cls(x, exact.top_k(open_vectors(keys), x, TOP)[1], 2.0 * keys.size)

    def points(self, index: Index | Snapshot) -> list[tuple[float, float]]:
        """(share of a full scan, recall@10) over a ladder of probes, and of bounds if it stops by mass.

        Of a graph over a ladder of margins.
        """
        snapshot = index.snapshot if isinstance(index, Index) else index
        if isinstance(snapshot, GraphSearcher):
            efforts: list[list[dict[str, float]]] = [[{"margin": m} for m in margin_ladder(index)]]
        else:
            efforts = [[{"probes": p} for p in ladder(index.c)]]
        if index.design is None or index.design.stop == "mass":
            efforts.append([{"min_mass": bound} for bound in mass_bounds()])
        points = []
        for steps in efforts:
            for effort in steps:
                points.append(self.point(index, **effort))
                if points[-1][1] >= ENOUGH:
                    break
        return points

    def point(self, index: Index | Snapshot, **effort: float) -> tuple[float, float]:
        """(share of a full scan, recall@10) of one effort; of `search(x)` if none is named."""
        recall = recalls(index.search(self.x, TOP, **effort)[1], self.top, TOP).mean()
        return float(index.cost(self.x, TOP, **effort).flops.mean() / self.full), float(recall)


@dataclass(frozen=True)
class Row:
    """One way in: what it made, what recall@10 0.95 costs, and what `search(x)` costs and finds."""

    name: str
    index: str
    cost: float
    served: tuple[float, float] | None = None

    def cells(self, baseline: float) -> list[str]:
        """The row of the table."""
        served = ["-", "-"] if self.served is None else [f"{self.served[1]:.3f}", f"{self.served[0]:.2%}"]
        return [self.name, self.index, f"{self.cost:.2%}", f"{baseline / self.cost:.2f}", *served]


def at(points: Sequence[tuple[float, float]]) -> float:
    """What recall@10 0.95 costs along the front of these points."""
    cost, recall = np.array(points).T
    return cost_at(cost, recall, RECALL)


def plain(task: Task, held_out: HeldOut) -> Row:
    """The best plain IVF: the front over all numbers of cells, on the queries that are measured on."""
    builder = Builder(task)
    by_count = {c: held_out.points(builder.searcher(amips.Design.plain(c))) for c in sweep(task.n)}
    costs = {count: at(points) for count, points in by_count.items()}
    cheapest = min(costs, key=lambda count: np.nan_to_num(costs[count], nan=np.inf))
    every = [point for points in by_count.values() for point in points]
    counts = f"{min(costs):,} to {max(costs):,} cells, {cheapest:,} the cheapest"
    return Row("FAISS IVF, the best", counts, at(every))


def measured(name: str, index: Index, held_out: HeldOut) -> Row:
    """A row of an index that amips made."""
    assert index.design is not None
    return Row(name, index.design.describe(), at(held_out.points(index)), held_out.point(index))


def steps(task: Task, rank: int | None = None) -> Index:
    """Train and build without options, or with a router of this rank."""
    model = amips.train(task, progress=True) if rank is None else amips.train(task, amips.Linear(rank=rank))
    return amips.build(task, model)


def readme_block() -> str:
    """The Python block of README.md."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    if len(blocks) != 1:
        raise SystemExit(f"README.md has {len(blocks)} Python blocks, expected one")
    return str(blocks[0])


def readme(keys: Floats, log: Floats, x: Floats) -> Index:
    """The index that README's block ends with, run where the files are that it speaks of."""
    names = {"x": x}
    with somewhere():
        np.save("keys.npy", keys)
        np.save("queries.npy", log)
        exec(compile(readme_block(), README.name, "exec"), names)
    index = names["index"]
    assert isinstance(index, Index)
    return index


@contextmanager
def somewhere() -> Iterator[None]:
    """A directory to work in that is gone afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)


def split(queries: Floats, log: int) -> tuple[Floats, Floats]:
    """The log, and others to measure on: no query of these is in the log."""
    queries = queries[np.sort(np.unique(queries, axis=0, return_index=True)[1])]
    order = np.random.default_rng(1).permutation(len(queries))
    held_out = min(HELD_OUT, len(queries) // 10)
    return queries[order[held_out:][:log]], queries[order[:held_out]]


def compare(keys: Floats, log: Floats, x: Floats, minutes: float) -> list[Row]:
    """Every way in, the baseline first."""
    held_out, d = HeldOut.of(keys, x), keys.shape[1]
    task = amips.label(keys, log, progress=True)
    rows = [plain(task, held_out), measured("label, train, build", steps(task), held_out)]
    fitted = amips.fit(keys, log, minutes=minutes)
    rows.append(measured(f"fit, {minutes:g} minutes", fitted, held_out))
    rows.append(measured("README's Python block", readme(keys, log, x), held_out))
    for name, rank in (("d / 3", round(d / 3)), ("d / 2", d // 2), ("d, no projection", 0)):
        rows.append(measured(f"label, train, build; rank {name}", steps(task, rank), held_out))
    return rows


def main() -> None:
    """Read, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=2.0)
    o = parser.parse_args()
    keys = sample(o.data, "keys", o.keys)
    log, x = split(sample(o.data, "queries", o.queries + 2 * HELD_OUT), o.queries)
    rows = compare(keys, log, x, o.minutes)
    head = ["", "index", "FLOPs at recall@10 0.95", "times fewer", "recall@10 of `search(x)`", "its FLOPs"]
    title = f"What the defaults give: {len(keys):,} keys, d = {keys.shape[1]}, a log of {len(log):,} queries"
    about = (
        f"On {len(x):,} other queries. FLOPs are a share of scanning every key, and include the router. The "
        "front of plain IVF is over all its numbers of cells and on these very queries: the best it can be."
    )
    command = (
        f"python benchmarks/defaults.py DATA --keys {o.keys} --queries {o.queries} --minutes {o.minutes:g}"
    )
    raw = [vars(row) for row in rows]
    write("defaults", title, command, head, [row.cells(rows[0].cost) for row in rows], raw, about)


if __name__ == "__main__":
    main()
