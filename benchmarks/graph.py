"""The graph: what each part of it gives, keys of different norms, and how its cost grows with the keys.

    python benchmarks/graph.py parts TASK        # each part switched off alone, on the test queries of a task
    python benchmarks/graph.py norms             # generated keys of norms from 0.1 to 10, and factors
    python benchmarks/graph.py growth DATA       # 10,000 to 1,000,000 keys, a log of 20,000 queries

TASK is labelled with k of at least 16. DATA holds keys.i8.npy and queries.i8.npy; beyond its own keys there
are mixtures of two of them. Tables go to results/graph_NAME.md. FLOPs are shares of a full scan.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import RESULTS, sample, unit

import amips
from amips.bench import describe_machine
from amips.builder import Builder
from amips.design import Design
from amips.graph import DEGREE, Graph, entry_points, make_graph, near_lists
from amips.index import GraphStore
from amips.metrics import TOP, cost_at
from amips.search import GraphSearcher, Point, margin_ladder, measure, measure_margins, recalls
from amips.tables import markdown_table
from amips.task import Split, Task, load_task
from amips.vectors import Floats

TARGETS = (0.90, 0.95, 0.98)
SIZES = (10_000, 31_623, 100_000, 316_228, 1_000_000)
LOG = 20_000  # training queries of growth

Walk = Callable[[Floats, float], tuple[np.ndarray, np.ndarray]]  # queries, effort -> ids, counts


def by_margin(store: GraphStore) -> tuple[Walk, list[float]]:
    """As far as each query needs."""
    margins = margin_ladder(GraphSearcher(store))
    return lambda x, margin: store.search(x, TOP, margin, 1)[1:], margins


def by_width(store: GraphStore) -> tuple[Walk, list[float]]:
    """The same number of keys kept for every query, as in HNSW; all of them are visited."""
    widths = [float(round(12 * 1.15**step)) for step in range(30)]
    return lambda x, width: store.search(x, TOP, math.inf, 1, int(width))[1:], widths


def curve(store: GraphStore, walk: Walk, efforts: list[float], split: Split) -> list[tuple[float, ...]]:
    """(recall@10, visited, FLOPs, effort) for efforts up to a recall of 0.99."""
    x, top = np.ascontiguousarray(split.queries), np.asarray(split.top_ids)[:, :TOP]
    full, points = 2 * store.n * store.d, []
    for effort in efforts:
        ids, counts = walk(x, effort)
        recall = float(recalls(ids, top, TOP).mean())
        points.append((recall, float(counts[:, 0].mean()), float(store.flops(counts).mean()) / full, effort))
        if recall >= 0.99:
            break
    return points


def parts(task: Task) -> str:
    """Each part of the graph switched off alone."""
    builder = Builder(task)
    design = builder.resolved(Design.graph())
    assert design.dimensions is not None
    projection, top = builder.projection(design.dimensions), np.asarray(task.train.top_ids)
    keys = projection.of_keys(task.key_vectors).load()
    queries = np.asarray(task.train.queries) @ projection.queries.T
    near = near_lists(keys, progress=True)
    learned = make_graph(keys, queries, top, near=near)
    plain = make_graph(keys, None, None, near=near)
    starts = entry_points(keys, queries, design.cells), entry_points(keys, None, design.cells)
    few = len(task.train) // 10
    graphs = {
        "all": (learned, top),
        "edges of the keys alone": (Graph(plain.neighbours, starts[0]), top),
        "entries of the keys alone": (Graph(learned.neighbours, starts[1]), top),
        "codes for keys in general, not those that are asked for": (learned, None),
        "without the log": (plain, None),
        "a tenth of the log": (make_graph(keys, queries[:few], top[:few], near=near), top[:few]),
        f"degree {2 * DEGREE}": (make_graph(keys, queries, top, near=near, degree=2 * DEGREE), top),
    }
    systems = {}
    for name, (graph, wanted) in graphs.items():
        store = GraphStore.build(task.key_vectors, graph, "lean", projection, wanted)
        systems[name] = (store, *by_margin(store))
        if name == "all":
            systems["the same effort for every query"] = (store, *by_width(store))
            for storage in ("sq8", "flat"):
                rows = GraphStore.build(task.key_vectors, graph, storage)
                systems[f"{storage} storage"] = (rows, *by_margin(rows))
    curves = {name: curve(*system, task.test) for name, system in systems.items()}
    table = []
    for name, points in curves.items():
        row = [f"{at(points, 1, t):.0f}" for t in TARGETS] + [f"{at(points, 2, t):.2%}" for t in TARGETS]
        table.append([name, *row])
    return markdown_table(
        ["", *(f"{what}, {t:.2f}" for what in ("visited", "FLOPs") for t in TARGETS)], table
    )


def at(points: list[tuple[float, ...]], column: int, target: float) -> float:
    """A cost at a recall, between points."""
    recall = np.array([point[0] for point in points])
    return float(cost_at(np.array([point[column] for point in points]), recall, target))


def share_at(points: list[Point], target: float, full: float) -> float:
    """FLOPs of operating points at a recall, as a share of a full scan."""
    flops, recall = (np.array([getattr(point, name) for point in points]) for name in ("flops", "recall10"))
    return float(cost_at(flops, recall, target)) / full


def topics(n: int, m: int, d: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Keys about topics, queries that say less, in a style of their own."""
    weight = 1 / np.sqrt(1 + np.arange(d))
    centres = rng.standard_normal((n // 50, d))
    keys = unit((centres[rng.integers(0, len(centres), n)] + 0.8 * rng.standard_normal((n, d))) * weight)
    asked = keys[rng.integers(0, n, m)] * np.where(np.arange(d) < d // 3, 1.0, 0.4)
    style = unit(rng.standard_normal((1, d)) * weight)
    noise = rng.standard_normal((m, d)) * weight / np.linalg.norm(weight)
    return keys, unit(asked + 0.7 * style + 0.5 * noise)


def factors(n: int, m: int, d: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Items and users of a recommender: tastes, and popularity in the norm of an item."""
    weight = 1 / np.sqrt(1 + np.arange(d))
    tastes = rng.standard_normal((40, d)) * weight
    items = 0.6 * (tastes[rng.integers(0, 40, n)] + rng.standard_normal((n, d)) * weight)
    users = 0.5 * tastes[rng.integers(0, 40, m)] + 0.7 * rng.standard_normal((m, d)) * weight
    return (items * rng.lognormal(0, 0.5, (n, 1))).astype(np.float32), users.astype(np.float32)


def norms() -> str:
    """The graph and the best plain IVF where norms are one, differ by a hundred, and follow popularity."""
    n, m, d = 20_000, 22_000, 96
    rng = np.random.default_rng(0)
    keys, queries = topics(n, m, d, rng)
    sizes = np.exp(rng.uniform(math.log(0.1), math.log(10), (n, 1))).astype(np.float32)
    sets = {
        "norm 1": (keys, queries),
        "norms from 0.1 to 10": (keys * sizes, queries),
        "factors of a recommender": factors(n, m, d, rng),
    }
    rows = []
    for name, (keys, queries) in sets.items():
        task = amips.label(keys, queries, cells=1, k=16, val=1000, test=1000)
        builder, full = Builder(task), 2.0 * n * d
        plain = [measure(builder.searcher(Design.plain(c)), task.test) for c in (71, 141, 283, 566, 1131)]
        lines = {"best FAISS IVF": [min(share_at(p, t, full) for p in plain) for t in TARGETS]}
        for words, learned in (("graph", True), ("graph without the log", False)):
            index = amips.build(task, design=Design.graph(learned=learned))
            assert isinstance(index, GraphSearcher)
            points = measure_margins(index, task.test)
            lines[words] = [share_at(points, t, full) for t in TARGETS]
            ids = index.search(np.asarray(task.test.queries))[1]
            served = float(recalls(ids, np.asarray(task.test.top_ids), TOP).mean())
            rows.append([name, words, *(f"{v:.2%}" for v in lines[words]), f"{served:.3f}"])
        rows.append([name, "best FAISS IVF", *(f"{v:.2%}" for v in lines["best FAISS IVF"]), ""])
    return markdown_table(["keys", "", *(f"FLOPs, {t:.2f}" for t in TARGETS), "served for 0.95"], rows)


def growth(data: Path, most: int) -> str:
    """FLOPs and visited keys at a recall for more and more keys, with the same log."""
    own, queries = sample(data, "keys", SIZES[-1]), sample(data, "queries", LOG + 2000)
    rng = np.random.default_rng(0)
    rows, costs = [], []
    sizes = [n for n in SIZES if n <= most]
    for n in sizes:
        keys = own[rng.permutation(len(own))[:n]]
        if n > len(own):
            keys = np.concatenate([own, mixtures(own, n - len(own), rng)])
        began = time.perf_counter()
        task = amips.label(keys, queries, cells=1, k=16, val=1000, test=1000, progress=True)
        labelling, began = time.perf_counter() - began, time.perf_counter()
        index = amips.build(task, structure="graph", progress=True)
        building = time.perf_counter() - began
        assert isinstance(index, GraphSearcher)
        assert index.design is not None
        points = measure_margins(index, task.test)
        cost = share_at(points, 0.95, 1.0)
        visited = at([(point.recall10, point.probes) for point in points], 1, 0.95)
        costs.append(cost)
        line = [f"{n:,}", f"{index.design.dimensions}", f"{visited:.0f}", f"{cost / 1e6:.2f}"]
        line.append(f"{cost / (2 * n * task.d):.3%}")
        rows.append([*line, f"{labelling:.0f}", f"{building:.0f}"])
        print(rows[-1], flush=True)
    power = np.polyfit(np.log(sizes), np.log(costs), 1)[0]
    head = ["keys", "dimensions", "visited", "MFLOP", "of a full scan"]
    table = markdown_table([*head, "s to label", "s to build"], rows)
    return f"{table}\n\nThe cost at recall@10 0.95 grows like n^{power:.2f}."


def mixtures(own: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Keys that lie between two others."""
    out = np.empty((count, own.shape[1]), np.float32)
    for low in range(0, count, 1 << 16):
        size = min(1 << 16, count - low)
        first, second = own[rng.integers(0, len(own), (2, size))]
        share = rng.uniform(0.3, 0.7, (size, 1)).astype(np.float32)
        out[low : low + size] = unit(share * first + (1 - share) * second)
    return out


def main() -> None:
    """Measure one thing, print it, write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["parts", "norms", "growth"])
    parser.add_argument("where", type=Path, nargs="?", help="TASK of parts, DATA of growth.")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="Keys of growth, at most.")
    o = parser.parse_args()
    if (o.where is None) != (o.what == "norms"):
        parser.error("parts needs a TASK, growth needs DATA, norms needs neither")
    if o.what == "parts":
        text = parts(load_task(o.where))
    else:
        text = norms() if o.what == "norms" else growth(o.where, o.most)
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    argument = {"parts": " TASK", "growth": f" DATA --most {o.most}", "norms": ""}[o.what]
    text = f"# The graph: {o.what}\n\n`python benchmarks/graph.py {o.what}{argument}`; {machine}.\n\n{text}\n"
    print(text)
    (RESULTS / f"graph_{o.what}.md").write_text(text)


if __name__ == "__main__":
    main()
