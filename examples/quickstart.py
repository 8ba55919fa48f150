"""Label, train, build, search: every step with its defaults, on vectors made here, in a minute or two.

Keys are topics with variation, in directions of falling weight, as embeddings have them. Queries ask for keys
but say less, and say it in a style of their own. What they want decides the cells, and a linear router learns
which of these to scan for each query. What that gains is measured on queries that nothing was learned from.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import amips
from amips.metrics import TARGET_RECALL
from amips.search import Searcher, recalls
from amips.tables import text_table
from amips.task import Task

Floats = NDArray[np.float32]
RECALLS = (0.90, TARGET_RECALL)


def unit(x: Floats) -> Floats:
    """Rows scaled to norm 1."""
    scaled: Floats = x / np.linalg.norm(x, axis=1, keepdims=True)
    return scaled


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


def row(name: str, index: Searcher, task: Task, recall: float) -> list[str]:
    """What a recall costs on the test queries, and the recall they then have."""
    x = np.asarray(task.test.queries)
    reached = recalls(index.search(x, 10, recall=recall)[1], np.asarray(task.test.top_ids), 10).mean()
    cost = index.cost(x, 10, recall=recall)
    scanned, flops = cost.scanned.mean() / task.n, cost.flops.mean() / (2 * task.n * task.d)
    return [name, f"{recall:.2f}", f"{reached:.3f}", f"{scanned:.1%}", f"{flops:.1%}"]


def main() -> None:
    """Run the example; what is already there is not done again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("quickstart"))
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=60_000)
    parser.add_argument("--minutes", type=float, default=1.0, help="Of training, at most.")
    o = parser.parse_args()
    keys, queries = generate(o.keys, o.queries, 64)
    print(f"{len(keys):,} keys, {len(queries):,} queries, dimension {keys.shape[1]}")

    task = amips.label(keys, queries, out=o.out / "task", progress=True)
    model = amips.train(task, minutes=o.minutes, out=o.out / "run", resume="auto", progress=True)
    index = amips.build(task, model, out=o.out / "bundle")
    scores, ids = index.search(task.test.queries[:1], k=3)  # at the recall it was made for

    print(f"\n{index}")
    plain = amips.build(task, design=amips.Design.plain(task.c))
    indexes = {"plain IVF": plain, "amips": index}
    rows = [row(name, one, task, recall) for recall in RECALLS for name, one in indexes.items()]
    print(f"\non {len(task.test):,} held-out queries, costs as a share of a full scan:\n")
    print(text_table(["", "recall@10 asked for", "reached", "keys scanned", "FLOPs"], rows))
    print(f"\nthe three best keys of one query: {ids[0].tolist()}, scores {scores[0].round(3)}")
    print(f"the bundle: amips info {o.out / 'bundle'}")


if __name__ == "__main__":
    main()
