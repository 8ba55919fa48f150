"""SymphonyQG (rabitqlib): a graph whose edges hold the codes of their ends, 1 bit for each dimension.

The codes of 32 neighbours are scored at once; keys that the walk visits are scored in float32. The library
does not tell what it looked at, so there is only time.

It builds on 1 - <y, y'>, and its scores of codes have a part that does not grow with the query. So norms
decide how good it is: with keys of norm 16, or queries of norm 1/16, it finds one key in ten at most. Keys
are stored as y / 2 R, where R is the norm of the longest, and asked for with x / ||x||: on passages and on
random clusters no other pair of norms was clearly better.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_number, check_whole
from amips.backends.backend import (
    Backend,
    BuildInputs,
    Ids,
    Row,
    from_rows,
    library,
    one_line,
)
from amips.blas import threads_allowed
from amips.errors import AmipsError, BundleError
from amips.files import read_json, write_json
from amips.vectors import Floats, unit_rows

INDEX, SCALE = "index.symphonyqg", "scale.json"
BUDGETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
NARROWEST = 64  # dimensions, for the library's rotation
LANES = 32  # codes that are scored at once: degrees are multiples of it
SAFE_NORMS = (1e-15, 1e15)  # of queries whose squares fit float32
TOO_FEW = "could not produce k results"  # the library's words


class SymphonyQG(Backend):
    """Settings: `degree` of the graph, a multiple of 32; `construction`: its window while building."""

    title, budget, extra = "SymphonyQG", "search window", "symphonyqg"
    needs = ("rabitqlib",)

    def __init__(self, index: Any, d: int, longest: float) -> None:
        self.index, self.n, self.d = index, int(index.num_points), d
        self.longest = longest  # norm of a key, R

    @classmethod
    def settings(cls, n: int, d: int) -> dict[str, Any]:
        """As the library's authors have it."""
        return {"degree": 32, "construction": 200}

    @classmethod
    def make(cls, inputs: BuildInputs, directory: Path) -> list[str]:
        """Scale the keys, build the graph."""
        rabitqlib, keys = library(cls, "rabitqlib"), inputs.keys
        degree = check_whole("degree", inputs.settings["degree"], 1)
        construction = check_whole("construction", inputs.settings["construction"], 1)
        if degree % LANES:
            raise AmipsError(f"degree={degree}: expected a multiple of {LANES}")
        if keys.n <= degree:
            raise AmipsError(f"{cls.title} needs more keys than degree={degree}, got {keys.n}")
        norms = (np.linalg.norm(block.astype(np.float64), axis=1).max() for _, block in keys.blocks())
        longest = float(max(norms)) or 1.0
        rows = np.zeros((keys.n, max(keys.d, NARROWEST)), np.float32)
        for start, block in keys.blocks():
            rows[start : start + len(block), : keys.d] = block / np.float64(2 * longest)
        with one_line(cls.title, ValueError, RuntimeError):
            index = rabitqlib.SymqgIndex(rows.shape[1], degree, metric="ip")
            index.build(rows, construction, num_threads=threads_allowed())
            index.save(str(directory / INDEX))
        write_json(directory / SCALE, {"longest": longest})
        return [INDEX, SCALE]

    @classmethod
    def open(
        cls, directory: Path, n: int, d: int, settings: dict[str, Any], address: str | None
    ) -> "SymphonyQG":
        """Read the graph."""
        try:
            index = library(cls, "rabitqlib").SymqgIndex.load(str(directory / INDEX))
        except (ValueError, RuntimeError):
            raise BundleError(f"{directory / INDEX} is not a readable SymphonyQG index") from None
        longest = read_json(directory / SCALE, BundleError).get("longest")
        return cls(
            index, d, check_number(f"{directory / SCALE}: longest", longest, above=0, error=BundleError)
        )

    def budgets(self) -> list[int]:
        """Candidates kept while walking."""
        return list(BUDGETS)

    def find(self, x: Floats, k: int, budget: int) -> tuple[Floats, Ids]:
        """Walk the graph. Several threads may at once: the library lets them in one after the other.

        Its distances are 1 - <x, y> in 32 bits. With ||y|| <= 1/2 that is as exact as a product in float32:
        nothing is scored again.
        """
        unit, norms = _unit(x)
        unit, window = widened(unit, NARROWEST), max(k, budget)
        walked = self._walk(unit, k, window)
        if walked is None:
            walked = from_rows([self._reached(unit[i : i + 1], k, window) for i in range(len(x))], k)
        return (walked[0] * (2 * self.longest * norms)).astype(np.float32, copy=False), walked[1]

    def _walk(self, unit: Floats, k: int, window: int) -> tuple[Floats, Ids] | None:
        """Scores and ids, [m, k]; None if a query reaches fewer than k keys, which the library refuses."""
        try:
            ids, distances = self.index.search(unit, k, window, num_threads=threads_allowed())
        except RuntimeError as problem:
            if TOO_FEW in str(problem):
                return None
            raise
        return 1 - distances, ids.astype(np.int64)

    def _reached(self, unit: Floats, k: int, window: int) -> Row:
        """Scores and ids of one query [1, d], as many as the walk reaches: found by bisection."""
        row: Row = ([], [])
        low, high, count = 0, k, k
        while low < high:
            walked = self._walk(unit, count, window)
            if walked is None:
                high = count - 1
            else:
                low, row = count, (walked[0][0], walked[1][0])
            count = (low + high + 1) // 2
        return row


def widened(rows: Floats, width: int) -> Floats:
    """Rows [m, d] with zeros behind them up to `width` dimensions: no inner product changes."""
    if rows.shape[1] >= width:
        return np.ascontiguousarray(rows)
    wide = np.zeros((len(rows), width), np.float32)
    wide[:, : rows.shape[1]] = rows
    return wide


def _unit(x: Floats) -> tuple[Floats, Any]:
    """Queries [m, d] at norm 1, and their norms: [m, 1], or a number for one query."""
    norm = math.sqrt(float(np.vdot(x, x))) if len(x) == 1 else 0.0
    if SAFE_NORMS[0] < norm < SAFE_NORMS[1]:  # one query: the calls are what costs, so as few as can be
        return x * np.float32(1 / norm), norm
    unit, norms = unit_rows(x)
    return unit, norms[:, None].astype(np.float64)
