"""The numpy runtime at batch 1 against the bare matrix-vector products it needs, in turns on one thread."""

import argparse
import time

import numpy as np
from common import write

from amips import KeyNet, SupportNet
from amips.blas import threads
from amips.nets import Net, weight_shapes


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("n", 100_000), ("d", 384), ("calls", 5000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    rng = np.random.default_rng(0)
    cases = {
        "SupportNet XS, c = 10": (SupportNet(), 10),
        "SupportNet XS, c = 316": (SupportNet(), 316),
        "SupportNet XS, c = 1024": (SupportNet(), 1024),
        "SupportNet XS, c = 1024, no injection": (SupportNet(inject=0), 1024),
        "KeyNet XS, c = 1": (KeyNet(), 1),
    }
    rows, raw = [], {}
    for name, (spec, c) in cases.items():
        a = spec.architecture(o.n, o.d, c)
        weights = {k: 0.05 * rng.standard_normal(s, np.float32) for k, s in weight_shapes(a).items()}
        net = Net(a, weights, {})
        x = rng.standard_normal((1, o.d), np.float32)
        products = [(W, rng.standard_normal(W.shape[1], np.float32)) for W in weights.values() if W.ndim == 2]

        def bare(products: list[tuple[np.ndarray, np.ndarray]] = products) -> None:
            for W, v in products:
                W.dot(v)

        run = net.keys if a.kind == "key" else net.scores
        times: dict[str, list[int]] = {"bare": [], "net": []}
        with threads(1):
            for _ in range(o.calls):
                t0 = time.perf_counter_ns()
                bare()
                t1 = time.perf_counter_ns()
                run(x)
                t2 = time.perf_counter_ns()
                times["bare"].append(t1 - t0)
                times["net"].append(t2 - t1)
        medians = {k: float(np.median(v)) / 1e3 for k, v in times.items()}
        raw[name] = medians
        ratio = medians["net"] / medians["bare"]
        rows.append([name, f"{a.width}", f"{medians['bare']:.1f}", f"{medians['net']:.1f}", f"{ratio:.2f}"])
    title = f"Runtime, batch 1, one thread: n = {o.n:,}, d = {o.d}"
    head = ["network", "width", "bare products, us", "network, us", "ratio"]
    write("runtime", title, "python benchmarks/runtime.py", head, rows, raw)


if __name__ == "__main__":
    main()
