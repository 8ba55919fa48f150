"""Every learned router on the same cells, with the same minutes of training: which is best where.

    python benchmarks/routers.py TASK --out RUNS --minutes 1

TASK has cells and targets for each cell. Costs are FLOPs of router and scan, float32 keys, at a recall on the
test queries; every router probes as many cells as each query needs, with a temperature and a bound found on
val. The table goes to results/routers.md.
"""

import argparse
from pathlib import Path

import numpy as np

import amips
from amips.nets import SIZES, KeyNet, Linear, MaxAffine, Model, SupportNet
from amips.routers import Router, RoutingEstimate, router_for
from amips.tables import markdown_table
from amips.task import Split, Task, load_task

RECALLS = (0.80, 0.90, 0.95, 0.98)
KEYS_BATCH = 512  # of networks that predict c keys for each query: they and their targets are in memory


def routers(
    n: int, d: int, c: int
) -> dict[str, tuple[Linear | MaxAffine | SupportNet | KeyNet, amips.Recipe]]:
    """Networks and recipes by name.

    A KeyNet with a key for each cell has c d outputs, which the rule that gives a size its width leaves out:
    at 128 cells its head alone makes it tens of times as dear as its size says. So it is also there with the
    width at which the head alone costs what the size says.
    """
    routing = amips.Recipe()
    both = amips.Recipe(route_weight=0.1)
    listed = amips.Recipe(listwise=0.5)
    rank = amips.Linear().rank_for(d)
    width = max(1, round(SIZES["XS"] * n / c))
    keys, keys_both = amips.Recipe(batch=KEYS_BATCH), amips.Recipe(route_weight=0.1, batch=KEYS_BATCH)
    return {
        "linear": (amips.Linear(rank=0), routing),
        "linear, half of the loss listwise": (amips.Linear(rank=0), listed),
        f"linear, rank {rank}": (amips.Linear(rank=rank), routing),
        f"max-affine, 2 pieces, rank {rank}": (amips.MaxAffine(2, rank=rank), routing),
        f"max-affine, 4 pieces, rank {rank}": (amips.MaxAffine(4, rank=rank), routing),
        "SupportNet XS, the paper's losses": (amips.SupportNet("XS"), amips.Recipe()),
        "SupportNet XS, with the routing loss": (amips.SupportNet("XS"), both),
        "KeyNet XS, one key, the paper's losses": (amips.KeyNet("XS", mapper=True), amips.Recipe()),
        "KeyNet XS, one key, trained through the centroids": (amips.KeyNet("XS", mapper=True), both),
        "KeyNet XS, a key for each cell, the paper's losses": (amips.KeyNet("XS"), keys),
        f"KeyNet of width {width}, a key for each cell, the paper's losses": (
            amips.KeyNet(width=width),
            keys,
        ),
        f"KeyNet of width {width}, a key for each cell, with the routing loss": (
            amips.KeyNet(width=width),
            keys_both,
        ),
    }


def routing_of(task: Task, split: Split, router: Router, temperature: float = 0.0) -> RoutingEstimate:
    """What a router does on a split."""
    x, top, cells = np.asarray(split.queries), np.asarray(split.top_ids)[:, :10], task.cells
    return RoutingEstimate.by(router, x, top, cells.assignment, cells.sizes, temperature=temperature)


def main() -> None:
    """Train, derive, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "routers.md")
    o = parser.parse_args()
    task = load_task(o.task)
    full = 2 * task.n * task.d
    rows = []
    trained: dict[str, Model | None] = {"centroid": None}
    for name, (network, recipe) in routers(task.n, task.d, task.c).items():
        out = o.out / name.replace(" ", "-").replace(",", "").replace("'", "")
        trained[name] = amips.train(
            task,
            network,
            recipe=recipe,
            minutes=o.minutes,
            out=out,
            resume="auto",
            progress="bar",
        )
    for name, model in trained.items():
        router = router_for(model, task.cells.centroids)
        val = routing_of(task, task.val, router)
        test = routing_of(task, task.test, router, val.temperature)
        cells = []
        for recall in RECALLS:
            probing = test.at_mass(val.min_mass_for(recall))
            cost = router.flops + 2 * task.d * probing.scanned.mean()
            cells.append(f"{cost / full:.2%} ({probing.recall:.3f})")
        samples = "-" if model is None else f"{model.about['samples'] / 1e6:.1f} M"
        rows.append([name, f"{router.flops / full:.2%}", samples, *cells])
    head = ["router", "its own FLOPs", "samples", *(f"recall@10 {r:.2f}" for r in RECALLS)]
    text = "\n\n".join(
        [
            "# Every router on the same cells",
            f"`python benchmarks/routers.py TASK --out RUNS --minutes {o.minutes}`; {task.n:,} keys, "
            f"d = {task.d}, {task.c:,} cells, {len(task.train):,} training queries, {len(task.test):,} test "
            "queries. FLOPs of router and scan as a share of a full scan; the bound is chosen on val for the "
            "recall above, and the recall it has on test is in brackets.",
            markdown_table(head, rows),
        ]
    )
    print(text)
    o.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
