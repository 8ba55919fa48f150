"""What do queries from elsewhere cost? Adaptation and refit, with a source that the log did not have.

    python benchmarks/drift.py DATA [--source 12 --keys 100000 --structure cells --work DIR]

DATA holds `keys`, `queries` and query_source.npy, which says where each query is from. An index is built with
20,000 queries of the other sources. It is then served with those of `--source`: as it is, adapted to 1,000 of
them, refitted with 5,000 of them in a minute, and, to compare with, built anew with these in its log. All is
measured on 2,000 more, beside the best plain cells with centroid routing. The table goes to
results/drift-STRUCTURE.md; what is labelled and trained stays in --work.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import data_file, sample, unit, write
from numpy.typing import NDArray

import amips
from amips import exact
from amips.builder import Builder
from amips.cells import default_count
from amips.errors import AmipsError
from amips.metrics import TOP, cost_at
from amips.search import GraphSearcher, Index, Searcher, ladder, margin_ladder, mass_bounds, recalls
from amips.task import Task
from amips.vectors import Floats, open_vectors

RECALL = 0.95
LOG, NEW, TEST, RECENT = 20_000, 5_000, 2_000, 1_000
FACTORS = (1.0, 2.0, 4.0)  # of plain cells, in units of the square root of the keys
FROM, TO = 0.85, 0.975  # recalls between which a ladder is gone through


class Data:
    """Keys, and queries of the log and of the source that it did not have, in disjoint parts."""

    def __init__(self, folder: Path, source: int, keys: int) -> None:
        self.keys = sample(folder, "keys", keys)
        vectors, sources = data_file(folder, "queries"), np.load(folder / "query_source.npy")
        rng = np.random.default_rng(1)
        new, old = (rng.permutation(np.flatnonzero(part)) for part in (sources == source, sources != source))
        if len(new) < NEW + TEST + RECENT:
            raise AmipsError(f"source {source} has {len(new):,} queries, fewer than {NEW + TEST + RECENT:,}")

        def queries(rows: NDArray[np.int64]) -> Floats:
            return unit(vectors.take(np.sort(rows)))

        self.log, self.same = queries(old[:LOG]), queries(old[LOG : LOG + RECENT])
        self.new, self.test = queries(new[:NEW]), queries(new[NEW : NEW + TEST])
        self.recent = queries(new[NEW + TEST : NEW + TEST + RECENT])
        self.top = exact.top_k(open_vectors(self.keys), self.test, TOP)[1]
        self.full = 2.0 * self.keys.size

    def served(self, index: Any) -> tuple[float, float]:
        """Recall@10 of `search(x)` on the test queries, and FLOPs as a share of a full scan."""
        ids = index.search(self.test, TOP)[1]
        return float(recalls(ids, self.top, TOP).mean()), float(
            index.cost(self.test, TOP).flops.mean()
        ) / self.full

    def cost(self, index: Any) -> float:
        """FLOPs at recall@10 0.95 on the test queries, as a share of a full scan."""
        if isinstance(index, GraphSearcher):
            efforts: list[dict[str, Any]] = [{"margin": margin} for margin in margin_ladder(index)]
        elif index.temperature:
            efforts = [{"min_mass": bound} for bound in mass_bounds()]
        else:
            efforts = [{"probes": probes} for probes in ladder(index.c)]
        points: list[tuple[float, float]] = []
        for effort in efforts:
            recall = float(recalls(index.search(self.test, TOP, **effort)[1], self.top, TOP).mean())
            points.append((float(index.cost(self.test, TOP, **effort).flops.mean()) / self.full, recall))
            if recall > TO:
                break
        cost, recall10 = np.array([point for point in points if point[1] > FROM]).T
        return float(cost_at(cost, recall10, RECALL))


def labelled(data: Data, log: Floats, place: Path) -> Task:
    """The task of a log, in query-aware cells."""
    return amips.label(
        data.keys,
        log,
        out=place,
        cells=int(4 * len(data.keys) ** 0.5),
        query_aware=3.0,
        k=16,
        progress=True,
    )


def built(task: Task, structure: str, work: Path, name: str) -> Index:
    """The index that is served: flat cells with a trained router, or a graph."""
    if structure == "graph":
        return amips.build(task, structure="graph", recall=RECALL)
    model = amips.train(task, minutes=0.5, out=work / f"run-{name}", resume="auto")
    return amips.build(task, model, storage="flat", recall=RECALL)


def plain(data: Data, task: Task) -> float:
    """What the best plain cells with centroid routing cost on the test queries."""
    builder, costs = Builder(task), list[float]()
    for factor in FACTORS:
        searcher = builder.searcher(amips.Design.plain(default_count(task.n, factor)))
        assert isinstance(searcher, Searcher)
        costs.append(data.cost(searcher))
    return min(costs)


def rows_of(data: Data, structure: str, work: Path) -> tuple[list[list[str]], dict[str, Any]]:
    """The rows of the table, and the figures."""
    task = labelled(data, data.log, work / "task-old")
    index = built(task, structure, work, "old")
    raw: dict[str, Any] = {"drift_same": index.drift(data.same).p, "drift": index.drift(data.recent).p}
    raw["as_fitted"], raw["cost_before"] = data.served(index), data.cost(index.snapshot)
    started = time.monotonic()
    adaptation = index.adapt(data.recent)
    assert adaptation is not None
    raw["adapting_seconds"], raw["by_centroids"] = time.monotonic() - started, adaptation.by_centroids
    raw["adapted"] = data.served(index)
    index.watch(False)
    started = time.monotonic()
    try:
        what = f"refitted ({index.refit(data.new, minutes=1).what})"
    except AmipsError as refusal:  # nothing was better than what is there
        what = f"refit {str(refusal).partition(':')[0]}"
    raw["refit_seconds"], raw["refit"] = time.monotonic() - started, what
    raw["refitted"], raw["cost_refitted"] = data.served(index), data.cost(index.snapshot)
    everything = labelled(data, np.concatenate([data.log, data.new]), work / "task-full")
    anew = built(everything, structure, work, "full")
    raw["built_anew"], raw["cost_anew"] = data.served(anew), data.cost(anew.snapshot)
    raw["cost_plain"] = plain(data, task)
    raw["cost_against_plain"] = raw["adapted"][1] / raw["cost_plain"]
    table = [
        ["as it was built", *_served(raw["as_fitted"]), f"{raw['cost_before']:.2%}"],
        ["adapted", *_served(raw["adapted"]), "-"],
        [what, *_served(raw["refitted"]), f"{raw['cost_refitted']:.2%}"],
        ["built anew with the new queries", *_served(raw["built_anew"]), f"{raw['cost_anew']:.2%}"],
        ["best plain cells, routed by centroids", "-", "-", f"{raw['cost_plain']:.2%}"],
    ]
    return table, raw


def _served(pair: tuple[float, float]) -> list[str]:
    return [f"{pair[0]:.3f}", f"{pair[1]:.2%}"]


def main() -> None:
    """Read, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--source", type=int, default=12)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--structure", choices=["cells", "graph"], default="cells")
    parser.add_argument("--work", type=Path, required=True)
    o = parser.parse_args()
    data = Data(o.data, o.source, o.keys)
    table, raw = rows_of(data, o.structure, o.work)
    head = ["", "recall@10 of `search(x)`", "its FLOPs", "FLOPs at recall@10 0.95"]
    title = f"Queries of a source that the log did not have: {o.structure}, {len(data.keys):,} keys"
    more = (
        f"On {TEST:,} queries of source {o.source}; FLOPs are a share of a full scan. "
        f"Adaptation took {raw['adapting_seconds']:.0f} s and costs {raw['cost_against_plain']:.2f} times "
        f"the best plain cells; the refit took {raw['refit_seconds']:.0f} s. The test calls these "
        f"queries drift with p = {raw['drift']:.1g}, queries like the log with p = {raw['drift_same']:.2g}."
    )
    command = f"python benchmarks/drift.py DATA --source {o.source} --keys {o.keys} --structure {o.structure}"
    write(f"drift-{o.structure}", title, f"{command} --work DIR", head, table, raw, more)


if __name__ == "__main__":
    main()
