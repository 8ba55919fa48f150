"""What does a service carry: requests searched together, and each alone; and how long does one take?

    python benchmarks/serve.py DATA [--keys 30000 --queries 10000] [--seconds 5] [--work DIR]
        [--chroma EXECUTABLE]

DATA holds `keys` and `queries`. An index of cells and one of a graph at recall@10 0.95, and FAISS's HNSW at
the same recall, each behind the same service on this machine, with batching and without. wrk sends one query
a request from 64 connections, as fast as it is answered: requests a second, the systems in turns, the median
of the rounds. Then it sends about half as many at random times: the median and the 99th of 100 latencies.

`--chroma` names the program `chroma` of an environment with chromadb: this server of the field is measured
beside them, with queries in JSON, and so is the graph.

wrk is a package of Debian. The table goes to results/serve.md.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import httpx
import numpy as np
from chroma_server import Collection, chroma, query
from common import sample, write

import amips
from amips import backends, exact
from amips.design import Design
from amips.nets import Linear
from amips.search import recalls
from amips.serving import Service, Settings, serve
from amips.vectors import Floats

RECALL, TOP, HELD_OUT, CONNECTIONS, ROUNDS = 0.95, 10, 2000, 64, 3
BUDGETS = [10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320]  # of HNSW: efSearch
RAW, JSON = "application/octet-stream", "application/json"
SYSTEMS = {"cells": "amips, cells", "graph": "amips, a graph", "hnsw": "FAISS HNSW"}
IN_JSON = {"graph_json": "amips, a graph; JSON", "chroma": "Chroma; JSON"}
SCRIPT = """
local file = io.open(os.getenv("BODIES"), "rb")
local data, size = file:read("*a"), tonumber(os.getenv("BODY_BYTES"))
file:close()
local count = #data / size
local headers = {["content-type"] = os.getenv("KIND"), ["accept"] = os.getenv("KIND")}
local row = 0
request = function()
  row = row % count + 1
  return wrk.format("POST", os.getenv("TARGET"), headers, data:sub((row - 1) * size + 1, row * size))
end
local pause = tonumber(os.getenv("PAUSE"))
if pause > 0 then
  delay = function() return -pause * math.log(1 - math.random()) end
end
"""


def make(work: Path, keys: Floats, queries: Floats, x: Floats, executable: Path | None) -> dict[str, str]:
    """The indexes, those that are not there yet; the recall of each, with the effort of HNSW and Chroma."""
    if not (work / "graph").exists():
        task = amips.label(keys, queries, out=work / "task", cells=max(2, round(4 * len(keys) ** 0.5)))
        design = Design(task.c, router=Linear(), recipe=None, storage="lean")
        amips.build(task, design=design, out=work / "cells", recall=RECALL)
        amips.build(task, structure="graph", out=work / "graph", recall=RECALL)
    if not (work / "hnsw").exists():
        backends.build("hnsw", keys, work / "hnsw")
    top = exact.top_k(keys, x, TOP)[1]
    hnsw = backends.load(work / "hnsw")
    reached = {budget: recalls(hnsw.find(x, TOP, budget)[1], top, TOP).mean() for budget in BUDGETS}
    budget = next(budget for budget in BUDGETS if reached[budget] >= RECALL)
    facts = {"hnsw": f"{reached[budget]:.3f} (efSearch {budget})"}
    for name in ("cells", "graph"):
        index = amips.load(work / name, watch=False)
        facts[name] = f"{recalls(index.search(x)[1], top, TOP).mean():.3f}"
    (work / "budget").write_text(f"{budget}")
    if executable is not None:
        facts |= {"graph_json": facts["graph"], "chroma": chroma_effort(executable, work, keys, x, top)}
    return facts


def chroma_effort(executable: Path, work: Path, keys: Floats, x: Floats, top: Any) -> str:
    """The first effort at which Chroma has the recall, set; both in words."""
    for budget in BUDGETS:
        with chroma(executable, work / "chroma", free_port()) as address:
            Collection(address, keys).set_effort(budget)
        with chroma(executable, work / "chroma", free_port()) as address:
            recall = recalls(Collection(address, keys).search(x, TOP), top, TOP).mean()
        if recall >= RECALL:
            break
    return f"{recall:.3f} (efSearch {budget})"


class Hnsw:
    """FAISS's HNSW with the face of an index, at one effort."""

    def __init__(self, work: Path) -> None:
        self._index, self._budget = backends.load(work / "hnsw"), int((work / "budget").read_text())
        self.n, self.d = self._index.n, self._index.d
        faiss.omp_set_num_threads(1)

    def search(self, x: Floats, k: int = TOP, threads: int | None = None) -> Any:
        """Scores and ids, [m, k] each."""
        return self._index.find(x, k, self._budget)


def serve_hnsw(work: Path, port: int, batching: bool) -> None:
    """Serve it, in this process."""
    service = Service(lambda: Hnsw(work), batching=batching, threads=1)
    serve(Settings(work / "hnsw", port=port), print, service)


@contextmanager
def service(work: Path, name: str, batching: bool) -> Iterator[str]:
    """A service in a process of its own; its address."""
    port = free_port()
    word = "--batching" if batching else "--no-batching"
    command = [sys.executable, "-m", "amips", "serve", str(work / name), "--port", str(port), word]
    if name == "hnsw":
        command = [sys.executable, __file__, str(work), "--serve-hnsw", str(port), word]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdout=silent, stderr=silent, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Requests:
    """What a client sends: to where, of which kind, and a file with bodies of one size."""

    target: str
    kind: str
    bodies: Path
    size: int

    @classmethod
    def written(cls, target: str, kind: str, bodies: Path, texts: list[bytes]) -> "Requests":
        """With bodies that are filled up to the size of the longest, which JSON allows."""
        size = max(map(len, texts))
        bodies.write_bytes(b"".join(text.ljust(size) for text in texts))
        return cls(target, kind, bodies, size)


def load(address: str, requests: Requests, seconds: float, pause: float = 0.0) -> dict[str, float]:
    """Requests a second, and latencies in ms, of 64 clients; with `pause` ms between requests, about."""
    script = requests.bodies.with_suffix(".lua")
    script.write_text(SCRIPT)
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "--latency", "-s", str(script), address]
    sent = {"BODIES": str(requests.bodies), "BODY_BYTES": str(requests.size), "PAUSE": f"{pause}"}
    environment = {**os.environ, **sent, "TARGET": requests.target, "KIND": requests.kind}
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    values = {"rate": float(re.findall(r"Requests/sec:\s+([\d.]+)", text)[0])}
    for share, name in ((50, "p50"), (99, "p99")):
        number, unit = re.findall(rf"^\s+{share}%\s+([\d.]+)(us|ms|s)", text, re.MULTILINE)[0]
        values[name] = float(number) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit]
    errors = re.findall(r"(?:Non-2xx or 3xx responses: |connect |read |write |timeout )(\d+)", text)
    values["errors"] = sum(map(int, errors))
    return values


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(work: Path, x: Floats, seconds: float, executable: Path | None) -> dict[str, Any]:
    """Every system with batching and without, in turns; then with batching at half of its load."""
    raw = Requests.written(f"/search?k={TOP}", RAW, work / "bodies", [row.tobytes() for row in x])
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        systems = {
            (name, batching): (stack.enter_context(service(work, name, batching)), raw)
            for name in SYSTEMS
            for batching in (True, False)
        }
        if executable is not None:
            texts = [json.dumps({"queries": row.tolist(), "k": TOP}).encode() for row in x]
            own = Requests.written("/search", JSON, work / "json", texts)
            for batching in (True, False):
                systems["graph_json", batching] = systems["graph", batching][0], own
            address = stack.enter_context(chroma(executable, work / "chroma", free_port()))
            target = f"{Collection(address, x[:0]).path}/query"
            texts = [json.dumps(query(row[None], TOP)).encode() for row in x]
            systems["chroma", True] = address, Requests.written(target, JSON, work / "chroma_json", texts)
        for system in systems.values():
            load(*system, 1)
        runs: dict[Any, list[dict[str, float]]] = {key: [] for key in systems}
        for _ in range(ROUNDS):
            for key, system in systems.items():
                runs[key].append(load(*system, seconds))
        for name in dict.fromkeys(name for name, _ in systems):
            results[name] = {"together": runs[name, True], "alone": runs.get((name, False), []), "half": []}
            rate = statistics.median(run["rate"] for run in runs[name, True])
            pause = 1e3 * 2 * CONNECTIONS / rate
            for _ in range(ROUNDS):
                results[name]["half"].append(load(*systems[name, True], seconds, pause))
    return results


def rows(results: dict[str, Any], facts: dict[str, str]) -> list[list[str]]:
    """A row for each system."""
    table = []
    for name, of_system in results.items():
        middle = {
            kind: {value: statistics.median(run[value] for run in runs) for value in runs[0]}
            for kind, runs in of_system.items()
            if runs
        }
        pairs = list(zip(of_system["together"], of_system["alone"], strict=False))
        errors = sum(run["errors"] for runs in of_system.values() for run in runs)
        together, half = middle["together"], middle["half"]
        cells = [{**SYSTEMS, **IN_JSON}[name], facts[name], f"{together['rate']:,.0f}"]
        if pairs:
            ratio = statistics.median(one["rate"] / other["rate"] for one, other in pairs)
            cells += [f"{middle['alone']['rate']:,.0f}", f"{ratio:.2f}"]
        else:
            cells += ["", ""]
        cells += [f"{together['p50']:.1f} / {together['p99']:.1f}", f"{half['rate']:,.0f}"]
        cells += [f"{half['p50']:.2f} / {half['p99']:.2f}", f"{half['p99'] / half['p50']:.1f}"]
        table.append([*cells, f"{errors:.0f}"])
    return table


def main() -> None:
    """Make, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--keys", type=int, default=30_000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--work", type=Path, help="where indexes are kept")
    parser.add_argument("--chroma", type=Path, help="the program `chroma`, to measure it, too")
    parser.add_argument("--serve-hnsw", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--batching", action=argparse.BooleanOptionalAction, default=True, help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.serve_hnsw is not None:
        serve_hnsw(options.data, options.serve_hnsw, options.batching)
        return
    keys = sample(options.data, "keys", options.keys)
    queries = sample(options.data, "queries", options.queries + HELD_OUT)
    queries = queries[np.random.default_rng(5).permutation(len(queries))]
    x = queries[:HELD_OUT]
    with tempfile.TemporaryDirectory() as place:
        work = options.work or Path(place)
        work.mkdir(parents=True, exist_ok=True)
        facts = make(work, keys, queries[HELD_OUT:], x, options.chroma)
        results = measure(work, x, options.seconds, options.chroma)
    head = ["behind the service", "recall@10", "requests/s", "each alone", "times"]
    head += ["p50 / p99, ms", "half the load, requests/s", "p50 / p99, ms", "p99 / p50", "errors"]
    command = f"python benchmarks/serve.py DATA --keys {options.keys} --queries {options.queries}"
    command += f" --seconds {options.seconds:g}" + (" --chroma EXECUTABLE" if options.chroma else "")
    more = (
        f"{len(keys):,} keys, d = {keys.shape[1]}; one query a request, {CONNECTIONS} connections of wrk on "
        f"the same machine, {options.seconds:g} s a run, median of {ROUNDS} rounds in turns; one thread "
        "searches. `times`: requests a second together over those of each alone, by round. Half the load "
        "comes at random times. HNSW stands behind the same service."
    )
    write("serve", "What a service carries", command, head, rows(results, facts), results, more)


if __name__ == "__main__":
    main()
