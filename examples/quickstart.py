"""Label, train, build, search: the whole way on vectors made here, in a minute or two on two cores.

Keys are topics with variation, in directions of falling weight, as embeddings have them. Queries ask for
keys but say less, and say it in a style of their own. Two routers learn from them which of 128 cells to
scan: a linear one, and a SupportNet that predicts how good the best key of every cell will be.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import amips
from amips.search import measure
from amips.tables import text_table

Floats = NDArray[np.float32]


def unit(x: Floats) -> Floats:
    """Rows scaled to norm 1."""
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def generate(n: int, m: int, d: int, seed: int = 0) -> tuple[Floats, Floats]:
    """n keys and m queries, of unit norm; the inner product with the best key is about 0.7."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape, np.float32)

    weight = (1 / np.sqrt(1 + np.arange(d))).astype(np.float32)
    topics = normal(n // 50, d)
    passages = (topics[rng.integers(0, len(topics), n)] + 0.8 * normal(n, d)) * weight
    keys = unit(passages)
    asked = keys[rng.integers(0, n, m)] * np.where(np.arange(d) < d // 3, 1.0, 0.4)
    style = unit(normal(1, d) * weight)
    noise = normal(m, d) * weight / np.linalg.norm(weight)
    return keys, unit((asked + 0.7 * style + 0.5 * noise).astype(np.float32))


def main() -> None:
    """Run the example; what is already there is not done again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("quickstart"))
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=60_000)
    parser.add_argument("--samples", type=int, default=1_000_000, help="Training samples of each router.")
    options = parser.parse_args()
    out, show = options.out, sys.stderr.isatty()
    keys, queries = generate(options.keys, options.queries, 64)
    print(
        f"{len(keys):,} keys, {len(queries):,} queries, dimension {keys.shape[1]}: finding exact targets ..."
    )
    task = amips.label(keys, queries, cells=128, copies=0, k=10, out=out / "task", progress=show)

    budget = {"samples": options.samples, "progress": show}
    print("training a linear router ...")
    recipe = amips.Recipe(route_top=10)
    linear = amips.train(task, amips.Linear(), recipe=recipe, out=out / "linear", **budget)
    print("training a SupportNet (XS) ...")
    support = amips.train(task, amips.SupportNet(size="XS", depth=4), out=out / "support", **budget)

    index = amips.build(task, linear, out=out / "bundle")
    ladder = [1, 2, 4, 8, 16, 32]
    routers = {"centroid": None, "linear": linear, "SupportNet": support}
    points = {name: measure(index.with_model(model), task.test, ladder) for name, model in routers.items()}
    rows = [
        [
            f"{probes}",
            f"{points['linear'][i].scanned:.1%}",
            *(f"{p[i].recall10:.3f}" for p in points.values()),
        ]
        for i, probes in enumerate(ladder)
    ]
    print(f"\nrecall@10 on {len(task.test):,} held-out queries, by what chooses the cells:\n")
    print(text_table(["cells scanned", "keys scanned", *points], rows))

    best = max(points, key=lambda name: points[name][2].recall10)
    print(f"\nwith {ladder[2]} cells the best of them is {best}; the bundle has the linear router")
    scores, ids = index.search(task.test.queries[:1], k=3, recall=0.95)
    print(
        f"\nthe three best keys of one query, at recall 0.95: {ids[0].tolist()}, scores {scores[0].round(3)}"
    )
    print(f"the bundle: amips info {out / 'bundle'}")


if __name__ == "__main__":
    main()
