"""Speed of a training step as a share of the machine's sgemm peak, and where the rest goes."""

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from machine import write

from amips import KeyNet, SupportNet
from amips.learn.batches import Batches
from amips.learn.distributed import Group
from amips.learn.loop import Run
from amips.nets import Recipe
from amips.nets import Architecture


def random_task(folder: Path, n: int, m: int, d: int) -> SimpleNamespace:
    """The files a training run reads, with random content: speed does not depend on it."""
    rng = np.random.default_rng(0)
    (folder / "train" / "top").mkdir(parents=True)
    np.save(folder / "keys.npy", rng.standard_normal((n, d), np.float32))
    np.save(folder / "train" / "queries.npy", rng.standard_normal((m, d), np.float32))
    np.save(folder / "train" / "top" / "ids.npy", rng.integers(0, n, (m, 1), np.int32))
    np.save(folder / "train" / "top" / "scores.npy", rng.standard_normal((m, 1), np.float32))
    return SimpleNamespace(path=folder, n=n, d=d, c=1, fingerprint="", manifest={"options": {}})


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
    for name, value in (("n", 100_000), ("d", 384), ("batch", 4096), ("steps", 11)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", default="XS,S,M")
    parser.add_argument("--depths", default="4,8")
    o = parser.parse_args()
    rows, raw = [], []
    recipe = Recipe(batch=o.batch)
    with tempfile.TemporaryDirectory() as folder:
        task = random_task(Path(folder), o.n, 200_000, o.d)
        cpu = torch.device("cpu")
        for depth in map(int, o.depths.split(",")):
            for size in o.sizes.split(","):
                seconds = {}
                for spec in (KeyNet(size=size, depth=depth), SupportNet(size=size, depth=depth, inject=0)):
                    run = Run(task, spec, Path(folder) / "run", recipe, 1 << 40, None, 0, 1, cpu, Group(cpu))
                    batches = Batches(task, recipe, 0, 0, 1, cpu)
                    whole, other, shares = [], [], []
                    parameters = list(run.state.parameters.values())
                    run.step(0.5)
                    for i in range(o.steps):
                        peak = peak_rate()
                        t0 = time.perf_counter()
                        run.step(0.5)
                        t1 = time.perf_counter()
                        batches(i)
                        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
                        run.update(parameters, [p.grad for p in parameters], 0.5)
                        t2 = time.perf_counter()
                        whole.append(t1 - t0)
                        other.append((t2 - t1) / (t1 - t0))
                        shares.append(step_flops(run.architecture, o.batch) / (t1 - t0) / peak)
                    kind = "KeyNet" if run.architecture.kind == "key" else "SupportNet"
                    seconds[kind] = step = float(np.median(whole))
                    against = f"{step / seconds['KeyNet']:.2f}" if kind == "SupportNet" else ""
                    rows.append(
                        [
                            f"{kind} {size}, L = {depth}",
                            f"{run.architecture.width}",
                            f"{o.batch / step:,.0f}",
                            f"{np.median(shares):.2f}",
                            f"{np.median(other):.0%}",
                            against,
                        ]
                    )
                    raw.append({"row": rows[-1], "step": whole, "other": other, "share": shares})
                    print(" | ".join(rows[-1]), flush=True)
    peak = f"peak here: {peak_rate() / 1e9:.0f} GFLOP/s"
    title = f"Training steps: n = {o.n:,}, d = {o.d}, c = 1, batch {o.batch:,}; {peak}"
    head = ["network", "width", "samples/s", "share of sgemm peak", "data, optimiser, averages", "x KeyNet"]
    write("training", title, "python benchmarks/training.py", head, rows, raw)


if __name__ == "__main__":
    main()
