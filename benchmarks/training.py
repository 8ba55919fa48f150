"""Speed of a training step as a fraction of the machine's sgemm peak, and where the rest goes."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import write

from amips import KeyNet, Recipe, SupportNet, label
from amips.learn import Budget, Group, Run, set_up
from amips.nets import Architecture
from amips.task import Task


def random_task(folder: Path, n: int, m: int, d: int) -> Task:
    """A task of random vectors: the speed of a step does not depend on what is in them."""
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((rows, d), np.float32) for rows in (n, m))
    return label(keys, queries, out=folder / "task", preset="paper", copies=0, val=100, test=100, k=1)


def step_flops(a: Architecture, batch: int) -> float:
    """Matrix products of one step, counted from shapes; element-wise work is not counted.

    M: weights of the forward pass, X: those that multiply the input (no gradient flows through them to
    it). KeyNet: forward, weight gradients, input gradients. SupportNet has a reverse pass R besides, and
    both kinds of gradients of that.
    """
    X = (1 + len(a.injected)) * a.d * a.width
    M = X + (a.depth - 1) * a.width**2 + a.width * a.outputs
    R = X + (a.depth - 1) * a.width**2
    return 2.0 * batch * ((3 * M - X) + (3 * R if a.kind == "support" else 0))


def peak_rate(side: int = 3072) -> float:
    """FLOP/s of torch's square matrix product."""
    left, right = torch.randn(2, side, side)
    left @ right
    started = time.perf_counter()
    for _ in range(4):
        left @ right
    return 8.0 * side**3 / (time.perf_counter() - started)


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("n", 100_000), ("queries", 20_000), ("d", 384), ("batch", 4096), ("steps", 11)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", default="XS,S,M")
    parser.add_argument("--depths", default="4,8")
    o = parser.parse_args()
    rows, raw = [], []
    recipe = Recipe(batch=o.batch)
    with tempfile.TemporaryDirectory() as folder:
        task = random_task(Path(folder), o.n, o.queries, o.d)
        cpu = torch.device("cpu")
        group, budget = Group(cpu), Budget(1 << 40, None, 1)
        for depth in map(int, o.depths.split(",")):
            for size in o.sizes.split(","):
                seconds = {}
                for spec in (KeyNet(size=size, depth=depth), SupportNet(size=size, depth=depth, inject=0)):
                    setup = set_up(task, spec, recipe, 0, cpu, group)
                    run, a = Run(setup, Path(folder) / "run", recipe, budget, 0, group), setup.architecture
                    assert isinstance(a, Architecture)
                    whole, other, of_peak = [], [], []
                    parameters = list(run.state.parameters.values())
                    run.step(0.5)
                    for i in range(o.steps):
                        peak = peak_rate()
                        t0 = time.perf_counter()
                        run.step(0.5)
                        t1 = time.perf_counter()
                        setup.batches(i)
                        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
                        run.update(parameters, [p.grad for p in parameters], 0.5)
                        t2 = time.perf_counter()
                        whole.append(t1 - t0)
                        other.append((t2 - t1) / (t1 - t0))
                        of_peak.append(step_flops(a, o.batch) / (t1 - t0) / peak)
                    kind = "KeyNet" if a.kind == "key" else "SupportNet"
                    seconds[kind] = step = float(np.median(whole))
                    against = f"{step / seconds['KeyNet']:.2f}" if kind == "SupportNet" else ""
                    rows.append(
                        [
                            f"{kind} {size}, L = {depth}",
                            f"{a.width}",
                            f"{o.batch / step:,.0f}",
                            f"{np.median(of_peak):.2f}",
                            f"{np.median(other):.0%}",
                            against,
                        ]
                    )
                    raw.append({"row": rows[-1], "step": whole, "other": other, "of_peak": of_peak})
                    print(" | ".join(rows[-1]), flush=True)
    peak = f"peak here: {peak_rate() / 1e9:.0f} GFLOP/s"
    title = f"Training steps: n = {o.n:,}, d = {o.d}, c = 1, batch {o.batch:,}; {peak}"
    head = ["network", "width", "samples/s", "of sgemm peak", "data, optimiser, averages", "x KeyNet"]
    write("training", title, "python benchmarks/training.py", head, rows, raw)


if __name__ == "__main__":
    main()
