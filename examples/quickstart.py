"""Label, train, evaluate: the whole way on vectors made here, in about two minutes on two cores.

Keys come in clusters; queries are drawn near keys but shifted, as questions differ from the passages that
answer them. A SupportNet learns, for each of 16 cells, how good its best key will be.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import amips
from amips.metrics import routing_accuracy
from amips.table import table

Floats = NDArray[np.float32]


def unit(x: Floats) -> Floats:
    """Rows scaled to norm 1."""
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def generate(n: int, m: int, d: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Clustered keys, and queries that differ from them: turned by a fixed map, and noisy."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n // 100, d), np.float32)
    keys = unit(centres[rng.integers(0, len(centres), n)] + 0.7 * rng.standard_normal((n, d), np.float32))
    turn = np.eye(d, dtype=np.float32) + 0.6 / np.sqrt(d) * rng.standard_normal((d, d), np.float32)
    queries = unit(keys[rng.integers(0, n, m)] @ turn + 0.05 * rng.standard_normal((m, d), np.float32))
    return keys, queries


def main() -> None:
    """Run the example; what is already there is not done again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=40_000)
    parser.add_argument("--samples", type=int, default=1_500_000)
    options = parser.parse_args()
    keys, queries = generate(options.keys, options.queries, 64)
    show = sys.stderr.isatty()
    print(
        f"{len(keys):,} keys, {len(queries):,} queries, dimension {keys.shape[1]}; finding exact targets ..."
    )
    task = amips.label(keys, queries, cells=16, copies=0, k=10, out=options.out / "task", progress=show)
    print("training a SupportNet (XS) ...")
    network = amips.SupportNet(size="XS", depth=4)
    model = amips.train(task, network, samples=options.samples, out=options.out / "run", progress=show)

    test, top = task.test, task.test.top_ids[:, 0]
    cell = task.cells.assignment[top]
    learned = amips.evaluate(model, task, test)
    centroid = routing_accuracy(test.queries @ task.cells.centroids.T, cell)
    rows = [
        [
            f"top key is in the first {k} of {task.c} cells",
            f"{centroid[f'routing@{k}']:.3f}",
            f"{learned[f'routing@{k}']:.3f}",
        ]
        for k in (1, 2, 4)
    ]
    print(f"\nOn {len(test):,} held-out queries:\n")
    print(table(["", "centroids", "SupportNet"], rows))
    print(f"\nRelative transport error of the predicted keys: {learned['erel']:.2f} (the query itself: 0)")


if __name__ == "__main__":
    main()
