"""Speed of the labeller as a share of a plain square matrix product, in one run on the same threads."""

import argparse

import numpy as np
from common import ratio, write

from amips.bench import in_turns
from amips.blas import faiss
from amips.exact import cell_maxima, top_k


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("n", 100_000), ("m", 20_000), ("d", 384), ("cells", 512), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((a.n, a.d), np.float32)
    queries = rng.standard_normal((a.m, a.d), np.float32)
    cells = rng.integers(0, a.cells, a.n)
    side = 4096
    left, right = rng.standard_normal((2, side, side), np.float32)

    def square() -> None:
        for _ in range(4):
            left @ right

    work = 2.0 * a.n * a.m * a.d
    flops = {"sgemm": 8.0 * side**3, "top_k": work, "cell_maxima": work, "faiss": work}
    contenders = {
        "sgemm": square,
        "top_k": lambda: top_k(keys, queries, 10),
        "cell_maxima": lambda: cell_maxima(keys, cells, queries),
        "faiss": lambda: faiss.knn(queries, keys, 10, metric=faiss.METRIC_INNER_PRODUCT),
    }
    times = in_turns([contenders], a.rounds)
    names = {
        "sgemm": f"numpy, {side} x {side} @ {side} x {side}",
        "top_k": "exact.top_k, k = 10",
        "cell_maxima": f"exact.cell_maxima, c = {a.cells}",
        "faiss": "faiss.knn, k = 10, for comparison",
    }
    rows = []
    for name, text in names.items():
        median = float(np.median(times[name]))
        relative = ratio(times, flops, name, "sgemm")
        rows.append([text, f"{median:.2f}", f"{flops[name] / median / 1e9:.0f}", f"{relative:.2f}"])
    title = f"Exact search: n = {a.n:,}, m = {a.m:,}, d = {a.d}"
    head = ["", "seconds", "GFLOP/s", "share of sgemm"]
    write("exact", title, "python benchmarks/exact.py", head, rows, {"times": times, "flops": flops})


if __name__ == "__main__":
    main()
