"""What every benchmark here shares: describing the machine, timing in turns, writing results."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, object]:
    """The processor, its threads, and the versions that matter."""
    import faiss

    cpu = "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "threads": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "faiss": faiss.__version__,
    }


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender, one after the other, round by round, after one warm round.

    The speed of a shared machine drifts: only times taken in turns can be compared.
    """
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return times


def ratio(times: dict[str, list[float]], flops: dict[str, float], name: str, base: str) -> float:
    """Median over rounds of the FLOP rate of `name` as a share of that of `base` in the same round."""
    shares = [(flops[name] / a) / (flops[base] / b) for a, b in zip(times[name], times[base], strict=True)]
    return statistics.median(shares)


def write(name: str, title: str, command: str, head: list[str], rows: list[list[str]], raw: object) -> None:
    """Print a Markdown table and store it beside the raw figures."""
    lines = [f"# {title}", "", f"`{command}`", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    machine = describe()
    lines += ["", ", ".join(f"{k} {v}" for k, v in machine.items()) + ".", ""]
    text = "\n".join(lines)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "raw": raw}, indent=1) + "\n")
