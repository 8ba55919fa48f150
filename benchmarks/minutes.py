"""Does a fit keep to its minutes and its memory? Asked for and taken, from ten thousand keys on.

    python benchmarks/minutes.py WORK [--sizes 1e4 1e5 1e6] [--minutes 1 5] [--memory 0.5]
                                      [--dim 128] [--queries 20000]

Fits generated keys (see `common.generated`) in a process of its own for each size and number of minutes; with
`--memory`, within so much of the bytes of the keys. Prints the time from the call to the saved bundle, and
the most private memory at any moment (sampled; libraries among it). WORK keeps the keys. What was measured
before stays in results/minutes.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import generated, merged, write

FIT = """
import json, sys, threading, time
import amips

options, peak, over = json.loads(sys.argv[1]), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.05):
        with open("/proc/self/status") as file:
            peak = max(peak, next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon")))

watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
try:
    index = amips.fit(**options)
finally:
    over.set()
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "peak": peak, "design": index.design.describe()}))
"""
FIELDS = ("keys", "dim", "queries", "minutes", "memory")  # what was asked for


def measured(work: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What a fit took."""
    keys, queries = generated(work, asked["keys"], asked["queries"], asked["dim"])
    memory = int(asked["memory"] * 4 * asked["keys"] * asked["dim"]) or None
    options = {"keys": str(keys), "queries": str(queries), "out": str(work / "bundle"), "quiet": True}
    options |= {"minutes": asked["minutes"], "memory": memory}
    command = [sys.executable, "-c", FIT, json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {**asked, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e5, 1e6])
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 5])
    parser.add_argument(
        "--memory", type=float, default=0.0, help="part of the bytes of the keys; 0: no bound"
    )
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=20_000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    raw = list[dict[str, Any]]()
    for size in map(int, arguments.sizes):
        for minutes in arguments.minutes:
            values = (size, arguments.dim, arguments.queries, minutes, arguments.memory)
            raw.append(measured(arguments.work, dict(zip(FIELDS, values, strict=True))))
            print(raw[-1], flush=True)
    raw = merged("minutes", raw, FIELDS)
    rows = [
        [
            f"{one['keys']:,}",
            f"{one['queries']:,}",
            f"{one['minutes']:g} min",
            f"{one['seconds'] / 60:.2f} min",
            f"{one['seconds'] / 60 / one['minutes']:.2f}",
            f"{one['memory'] * 4 * one['keys'] * one['dim'] / 1e6:,.0f} MB" if one["memory"] else "",
            f"{one['peak'] / 1e6:,.0f} MB",
        ]
        for one in raw
    ]
    head = ["keys", "queries", "asked", "took", "ratio", "memory", "peak"]
    command = "python benchmarks/minutes.py WORK"
    write("minutes", "A fit beside the minutes and the memory it was given", command, head, rows, raw)


if __name__ == "__main__":
    main()
