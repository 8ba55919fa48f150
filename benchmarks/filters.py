"""Searching behind a filter: recall kept, time and FLOPs, against FAISS and LanceDB at equal recall.

    python benchmarks/filters.py DATA [--index BUNDLE ...] [--test FILE]

DATA holds `keys` and `queries`. Without --index, a graph and cells are built of a part of the queries.
Filters are drawn at random (a share of all keys), and one is a topic: the keys nearest to a key, so that for
most queries what matches lies elsewhere. Every other system is swept until it has the recall that amips has,
one thread for all, by turns, a query at a time and 256 together. LanceDB is measured if it is installed.
The table goes to results/filters.md.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import data_file, sample, unit, write
from numpy.typing import NDArray

import amips
from amips.blas import faiss, threads
from amips.metrics import TOP
from amips.search import Index, recalls
from amips.vectors import Floats

Bools = NDArray[np.bool_]
Ids = NDArray[np.int64]
Search = Callable[[Floats], Ids]

SHARES = (0.5, 0.1, 0.01, 0.001)
TOPIC = 0.1  # share of the keys about a topic
BATCH, SINGLES, ROUNDS = 256, 60, 3
LANCE_QUERIES = 40
PATIENCE = 60.0  # seconds of a sweep: behind a narrow filter a graph walks through all keys


@dataclass(frozen=True)
class System:
    """A library's index: `at` gives a search behind a mask at an effort, efforts from cheap to dear."""

    name: str
    at: Callable[[Bools, Any], Search]
    efforts: tuple[Any, ...]
    flops: Callable[[Bools, Any, Floats], float] | None = None


def faiss_ivf(keys: Floats) -> System:
    """FAISS IVF, float32, 4 sqrt(n) cells, with an IDSelector."""
    n, d = keys.shape
    cells = round(4 * n**0.5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, cells, faiss.METRIC_INNER_PRODUCT)
    index.cp.spherical = True
    index.train(keys[np.random.default_rng(0).permutation(n)[: 40 * cells]])
    index.add(keys)
    selectors = dict[int, Any]()

    def parameters(mask: Bools, probes: int) -> Any:
        bits = selectors.setdefault(id(mask), faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little")))
        return faiss.SearchParametersIVF(nprobe=probes, sel=bits)

    def at(mask: Bools, probes: int) -> Search:
        options = parameters(mask, probes)
        return lambda x: index.search(x, TOP, params=options)[1]

    def flops(mask: Bools, probes: int, x: Floats) -> float:
        lists = index.quantizer.search(x, probes)[1]
        owner = np.empty(n, np.int64)
        for cell in range(cells):
            ids = faiss.rev_swig_ptr(index.invlists.get_ids(cell), index.invlists.list_size(cell))
            owner[ids] = cell
        matches = np.bincount(owner[mask], minlength=cells)
        return float(2 * d * (cells + matches[lists].sum(axis=1).mean()))

    efforts = sorted({min(cells, max(1, round(2 * 1.4**step))) for step in range(22)})
    return System("FAISS IVF, IDSelector", at, tuple(efforts), flops)


def faiss_hnsw(keys: Floats) -> System:
    """FAISS HNSW, M = 32, with an IDSelector."""
    n, d = keys.shape
    index = faiss.IndexHNSWFlat(d, 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 100
    index.add(keys)
    selectors = dict[int, Any]()

    def at(mask: Bools, width: int) -> Search:
        bits = selectors.setdefault(id(mask), faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little")))
        options = faiss.SearchParametersHNSW(efSearch=width, sel=bits)
        return lambda x: index.search(x, TOP, params=options)[1]

    def flops(mask: Bools, width: int, x: Floats) -> float:
        faiss.cvar.hnsw_stats.reset()
        at(mask, width)(x)
        return float(2 * d * faiss.cvar.hnsw_stats.ndis / len(x))

    efforts = sorted(
        {min(n, round(16 * 1.6**step)) for step in range(13)}
    )  # beyond, it takes seconds a query
    return System("FAISS HNSW, IDSelector", at, tuple(efforts), flops)


def lance(keys: Floats, masks: dict[str, Bools], directory: Path) -> System | None:
    """LanceDB, IVF with float32, a prefilter on a column for each mask; None if it is not installed."""
    if importlib.util.find_spec("lancedb") is None:
        print("LanceDB is not installed: left out")
        return None
    import lancedb
    import pyarrow as pa

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(keys.ravel()), keys.shape[1])
    columns = {f"m{i}": mask for i, mask in enumerate(masks.values())}
    table = lancedb.connect(directory).create_table(
        "keys", pa.table({"vector": vectors, "id": np.arange(len(keys)), **columns})
    )
    table.create_index(metric="dot", num_partitions=round(len(keys) ** 0.5), index_type="IVF_FLAT")
    for name in columns:
        table.create_scalar_index(name, index_type="BITMAP")
    names = {id(mask): name for mask, name in zip(masks.values(), columns, strict=True)}

    def at(mask: Bools, probes: int) -> Search:
        def search(x: Floats) -> Ids:
            out = np.full((len(x), TOP), -1, np.int64)
            for row, one in enumerate(x):
                asked = table.search(one).distance_type("dot").where(names[id(mask)], prefilter=True)
                ids = asked.nprobes(probes).select(["id"]).limit(TOP).to_arrow()["id"].to_numpy()
                out[row, : len(ids)] = ids
            return out

        return search

    efforts = sorted({min(round(len(keys) ** 0.5), round(4 * 1.8**step)) for step in range(9)})
    return System("LanceDB, prefilter", at, tuple(efforts))


def own(name: str, index: Index) -> System:
    """An index of amips, at the recall that it was made for."""

    def at(mask: Bools, _: Any) -> Search:
        return lambda x: index.search(x, TOP, filter=mask)[1]

    def flops(mask: Bools, _: Any, x: Floats) -> float:
        return float(index.cost(x, TOP, filter=mask).flops.mean())

    return System(name, at, (None,), flops)


def cheapest(system: System, mask: Bools, x: Floats, top: Ids, recall: float) -> tuple[Any, float]:
    """The least effort with a recall, or the dearest that is tried within `PATIENCE`, and its recall."""
    some = slice(0, LANCE_QUERIES if system.flops is None else None)
    best: tuple[Any, float] = (None, 0.0)
    end = time.perf_counter() + PATIENCE
    for effort in system.efforts:
        best = effort, float(recalls(system.at(mask, effort)(x[some]), top[some], TOP).mean())
        if best[1] >= recall or time.perf_counter() > end:
            break
    return best


def timed(searches: list[Search], x: Floats, size: int, count: int) -> NDArray[np.float64]:
    """Seconds a query, `size` at a time: the median over `count` calls and rounds, by turns, [systems]."""
    parts = [x[low : low + size] for low in range(0, min(len(x), size * count), size)]
    seconds = np.empty((len(searches), ROUNDS, len(parts)))
    for search in searches:
        search(parts[0])
    for turn in range(ROUNDS):
        for i, part in enumerate(parts):
            for j, search in enumerate(searches):
                start = time.perf_counter()
                search(part)
                seconds[j, turn, i] = (time.perf_counter() - start) / len(part)
    return np.median(seconds, axis=(1, 2))


def masks_of(keys: Floats) -> dict[str, Bools]:
    """Filters by name."""
    rng, n = np.random.default_rng(11), len(keys)
    masks = {f"{share:.1%}".replace(".0%", "%"): rng.random(n) < share for share in SHARES}
    near = keys @ keys[rng.integers(n)]
    masks[f"{TOPIC:.0%}, a topic"] = near >= np.quantile(near, 1 - TOPIC)
    return masks


def main() -> None:
    """Build, sweep, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--index", type=Path, action="append", default=[], help="A bundle of these keys.")
    parser.add_argument("--test", type=Path, help="Queries that no bundle has seen.")
    parser.add_argument(
        "--queries", type=int, default=40_000, help="To build with, where no bundle is named."
    )
    parser.add_argument("--tests", type=int, default=600, help="Queries to measure with.")
    parser.add_argument("--only", nargs="+", help="Filters by name, such as 1%%.")
    parser.add_argument("--skip", nargs="+", default=[], help="Systems: ivf, hnsw, lancedb.")
    o = parser.parse_args()
    keys = unit(data_file(o.data, "keys").load())
    queries = sample(o.data, "queries", o.queries + o.tests)
    x = unit(np.load(o.test)[-o.tests :]) if o.test else queries[o.queries :]
    if o.index:
        systems = [own(f"amips, {path.name}", amips.load(path)) for path in o.index]
    else:
        task = amips.label(keys, queries[: o.queries], k=16, progress=True)
        model = amips.train(task, progress=True)
        systems = [own("amips, cells", amips.build(task, model, progress=True))]
        systems += [own("amips, graph", amips.build(task, structure="graph", progress=True))]
    masks = {name: mask for name, mask in masks_of(keys).items() if o.only is None or name in o.only}
    full, raw = 2.0 * keys.size, list[list[Any]]()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        others: dict[str, Callable[[], System | None]] = {
            "ivf": lambda: faiss_ivf(keys),
            "hnsw": lambda: faiss_hnsw(keys),
            "lancedb": lambda: lance(keys, masks, place),
        }
        rivals = [make() for other, make in others.items() if other not in o.skip]
        systems += [system for system in rivals if system is not None]
        stack.enter_context(threads(1))
        for name, mask in masks.items():
            scores = np.where(mask, x @ keys.T, -np.inf)
            top = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
            reached = [
                cheapest(system, mask, x, top, 0.0) for system in systems if system.name[:5] == "amips"
            ]
            target = min(recall for _, recall in reached)
            points = [cheapest(system, mask, x, top, target) for system in systems]
            searches = [system.at(mask, point[0]) for system, point in zip(systems, points, strict=True)]
            one, many = timed(searches, x, 1, SINGLES), timed(searches, x, BATCH, 1)
            for j, (system, point) in enumerate(zip(systems, points, strict=True)):
                cost = None if system.flops is None else system.flops(mask, point[0], x) / full
                raw.append([name, system.name, point[1], cost, 1e6 * one[j], 1e6 * many[j], point[0]])
                print(raw[-1], flush=True)
    report(raw, keys.shape, len(x), f" --queries {o.queries}" if not o.index else "")


def report(raw: list[list[Any]], shape: tuple[int, ...], count: int, options: str) -> None:
    """Write the table of what was measured; times also as multiples of the faster index of amips."""
    rows = []
    for name, system, recall, cost, one, many, _ in raw:
        ours = [line for line in raw if line[0] == name and line[1].startswith("amips")]
        rates = [f"{value / min(line[at] for line in ours):.2f}" for at, value in ((4, one), (5, many))]
        shown = "" if cost is None else f"{cost:.3%}"
        rows.append([name, system, f"{recall:.3f}", shown, f"{one:.0f}", f"{many:.0f}", *rates])
    head = ["matches", "system", "recall@10", "FLOPs", "us, alone", f"us, of {BATCH}"]
    head += ["alone, times amips", f"of {BATCH}, times amips"]
    title = f"Behind a filter: {shape[0]:,} keys, d = {shape[1]}, recall 0.95 asked for, one thread"
    more = (
        f"{count:,} queries that nothing was chosen by. FLOPs as shares of a full scan. Others are swept to "
        f"the lower recall of the amips rows, for {PATIENCE:.0f} s at most: a lower recall is where a sweep "
        "had come to. Times by turns, also as multiples of the fastest amips."
    )
    write("filters", title, f"python benchmarks/filters.py DATA{options}", head, rows, raw, more)


if __name__ == "__main__":
    main()
