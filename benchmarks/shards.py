"""How many shards must a query ask? 16 and 64 shards, recall@10 0.95, on held-out queries.

    python benchmarks/shards.py DATA --work DIR [--keys 100000] [--queries 200000] [--minutes 1]

Shards by plain k-means with centroid routing are the baseline, with as many shards for every query (as
FAISS's nprobe) and with the same bound on the mass that ours have. Bounds and numbers of shards are chosen on
val, what is reported is on test. A shard that is asked is taken to return the best of what it has: the recall
is that of the routing alone.
"""

import argparse
from pathlib import Path

import numpy as np
from common import sample, write
from numpy.typing import NDArray

import amips
from amips.cells import kmeans
from amips.routers import CentroidRouter, RoutingEstimate
from amips.search import first_of, ranked
from amips.sharding import SLACK, Partition, divide
from amips.task import Split, Task

RECALL = 0.95
FRACTIONS = (0.0, 0.1, 0.2, 0.5)


def estimate(
    task: Task, split: Split, router: object, cells: NDArray[np.int64], second: NDArray[np.int32] | None
) -> RoutingEstimate:
    """Routing between shards for the queries of a split."""
    sizes = np.bincount(cells)
    x, top = np.asarray(split.queries), np.asarray(split.top_ids)[:, :10]
    return RoutingEstimate.by(router, x, top, cells, sizes, second=second)  # type: ignore[arg-type]


def figures(val: RoutingEstimate, test: RoutingEstimate) -> dict[str, float]:
    """Shards asked on test with what val chose: by a bound on the mass, and the same number for all."""
    known = RoutingEstimate(test.scores, test.top_cells, test.sizes, val.temperature, test.second)
    by_mass = known.at_mass(val.min_mass_for(RECALL))
    same = known.at_probes(val.probes_for(RECALL))
    return {
        "mass": float(by_mass.probes.mean()),
        "mass_recall": by_mass.recall,
        "same": float(same.probes.mean()),
        "same_recall": same.recall,
    }


def of_partition(task: Task, partition: Partition) -> dict[str, float]:
    """The figures of our shards."""
    return figures(partition.estimate(task.val), partition.estimate(task.test))


def _largest(cells: NDArray[np.int32], second: NDArray[np.int32] | None, shards: int) -> float:
    """The largest shard in units of the mean, copies counted."""
    both = cells if second is None else np.append(cells, second[second >= 0])
    sizes = np.bincount(both, minlength=shards)
    return float(sizes.max() / sizes.mean())


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=1.0)
    options = parser.parse_args()
    held_out = min(2000, options.queries // 20)
    keys, queries = (sample(options.data, n, getattr(options, n)) for n in ("keys", "queries"))
    task = amips.label(keys, queries, out=options.work / "task", val=held_out, test=held_out, progress=True)
    rows, raw = [], {}

    def add(shards: int, name: str, largest: float, values: dict[str, float], base: dict[str, float]) -> None:
        raw[f"{shards} {name}"] = {**values, "largest": largest}
        cells = [f"{values['mass']:.2f} ({values['mass_recall']:.3f})"]
        cells += [f"{values['same']:.0f} ({values['same_recall']:.3f})"]
        ratios = [f"{values['mass'] / base[kind]:.2f}" for kind in ("mass", "same")]
        rows.append([f"{shards}", name, f"{largest:.2f}", *cells, *ratios])
        print(rows[-1], flush=True)

    for shards in (16, 64):
        plain = kmeans(task.key_vectors, shards)
        router = CentroidRouter(plain.centroids)
        celled = task.with_cells(plain)
        second, order = ranked(celled, router, RECALL, saved=1.0)
        base = {}
        for fraction in FRACTIONS:
            chosen = first_of(second, order, fraction) if fraction else None
            both = [estimate(task, s, router, plain.assignment, chosen) for s in (task.val, task.test)]
            values = figures(*both)
            base = base or values
            largest = _largest(plain.assignment, chosen, shards)
            name = "plain k-means, centroids" + (f", {fraction:.0%} copies" if fraction else "")
            add(shards, name, largest, values, base)
        for kind in ("centroid", "linear"):
            for fraction in FRACTIONS if kind == "linear" else (0.0, 0.2):
                partition = divide(
                    task, shards, kinds=(kind,), copies=fraction, recall=RECALL, minutes=options.minutes,
                    work=options.work / "builder",
                )  # fmt: skip
                largest = partition.sizes.max() / partition.sizes.mean()
                name = f"ours, {kind} over cells" + (f", {fraction:.0%} copies" if fraction else "")
                add(shards, name, largest, of_partition(task, partition), base)
        all_of_them = {"mass": shards, "mass_recall": 1.0, "same": shards, "same_recall": 1.0}
        add(shards, "asking all", 1.0, all_of_them, base)
    head = ["shards", "partition and router", "largest / mean", "asked, by mass (recall)"]
    head += [
        "asked, same for all (recall)",
        "by mass / centroids by mass",
        "by mass / centroids same for all",
    ]
    more = (
        f"{task.n:,} keys, {len(task.train):,} training queries, {len(task.test):,} test queries; recall@10 "
        f"{RECALL} on val. Ours: cells grouped with shards at most {SLACK:.0%} above the mean before copies. "
        "The plain baseline has no bound on its largest shard, which makes it easier."
    )
    command = f"python benchmarks/shards.py DATA --work DIR --keys {options.keys} --queries {options.queries}"
    write("shards", "Shards asked at recall@10 0.95", command, head, rows, raw, more)


if __name__ == "__main__":
    main()
