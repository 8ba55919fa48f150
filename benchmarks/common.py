"""What every benchmark here shares: a sample of a data set, ratios of rates, writing results."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from amips.bench import describe_machine
from amips.errors import AmipsError
from amips.tables import markdown_table
from amips.vectors import Floats, Vectors, open_vectors

RESULTS = Path(__file__).parent / "results"
BLOCK = 1 << 16  # keys that are generated at a time


def data_file(data: Path, name: str) -> Vectors:
    """The vectors of `name` ("keys" or "queries") in a data directory, whatever their format."""
    files = sorted(p for p in data.glob(f"{name}.*") if p.is_file() and p.suffix != ".jsonl")
    if len(files) != 1:
        raise AmipsError(f"{data} holds {len(files)} files of {name}: expected one, such as {name}.npy")
    return open_vectors(files[0], name)


def sample(data: Path, name: str, most: int, seed: int = 0) -> Floats:
    """Unit float32 rows of a data directory's keys or queries, drawn at random: at most so many."""
    rows = data_file(data, name)
    drawn = np.random.default_rng([seed, len(name)]).permutation(rows.n)[:most]
    return unit(rows.take(np.sort(drawn)))


def unit(x: Floats) -> Floats:
    """Rows scaled to norm 1; a row of zeros stays one."""
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    scaled: Floats = (x / np.where(norms > 0, norms, 1)).astype(np.float32)
    return scaled


def generated(folder: Path, n: int, m: int, d: int, seed: int = 0) -> tuple[Path, Path]:
    """Files of n keys about topics and m queries that say less, in a style of their own; made once.

    Keys vary in directions of falling weight; there are 50 about each topic, so that more keys mean more
    topics, as a collection grows that is about more and more.
    """
    keys_file, queries_file = folder / f"keys-{n}-{d}-{seed}.npy", folder / f"queries-{n}-{m}-{d}-{seed}.npy"
    weight = (1 / np.sqrt(1 + np.arange(d))).astype(np.float32)
    if not keys_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([seed, n, d])
        topics = rng.standard_normal((max(2, n // 50), d), np.float32)
        partial = keys_file.with_suffix(".partial")
        keys = open_memmap(partial, "w+", np.float32, (n, d))
        for low in range(0, n, BLOCK):
            count = min(BLOCK, n - low)
            own = 0.8 * rng.standard_normal((count, d), np.float32)
            keys[low : low + count] = unit((topics[rng.integers(0, len(topics), count)] + own) * weight)
        keys.flush()
        partial.rename(keys_file)
    if not queries_file.exists():
        rng = np.random.default_rng([seed, n, d, 1])
        style = unit(rng.standard_normal((1, d)) * weight)
        said = np.where(np.arange(d) < d // 3, 1.0, 0.4)
        noise = rng.standard_normal((m, d)) * weight / np.linalg.norm(weight)
        asked = open_vectors(keys_file, "keys").take(rng.integers(0, n, m)) * said
        np.save(queries_file, unit(asked + 0.7 * style + 0.5 * noise))
    return keys_file, queries_file


def ratio(times: dict[str, list[float]], flops: dict[str, float], name: str, base: str) -> float:
    """Median over rounds of the FLOP rate of `name` divided by that of `base` in the same round."""
    pairs = zip(times[name], times[base], strict=True)
    return statistics.median((flops[name] / a) / (flops[base] / b) for a, b in pairs)


def merged(name: str, measured: list[dict[str, Any]], fields: Sequence[str]) -> list[dict[str, Any]]:
    """What was measured, and what the results of this name have of others: parts can be made anew.

    Args:
        fields: that tell measurements apart; what is returned is in their order.
    """

    def identity(one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(one[field] for field in fields)

    place = RESULTS / f"{name}.json"
    known = json.loads(place.read_text())["raw"] if place.exists() else []
    by_identity = {identity(one): one for one in [*known, *measured]}
    return [by_identity[key] for key in sorted(by_identity)]


def write(
    name: str,
    title: str,
    command: str,
    head: list[str],
    rows: list[list[str]],
    raw: object,
    more: str = "",
) -> None:
    """Print a Markdown table, and `more` text below it, and store both beside the raw figures."""
    machine = describe_machine()
    about = ", ".join(f"{k} {v}" for k, v in machine.items())
    text = f"# {title}\n\n`{command}`\n\n{markdown_table(head, rows)}\n\n" + (f"{more}\n\n" if more else "")
    text += f"{about}.\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "raw": raw}, indent=1) + "\n")
