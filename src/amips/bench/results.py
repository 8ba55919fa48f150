"""Raw runs on disk: what each query was answered, what that cost, how long it took.

    results/
      results.json            what is compared: the task, its queries, k
      runs/NAME.npz           ids, scores, rank, scanned, scan: one row a query, val first, then test
      runs/NAME.json          the system, its budget, FLOPs of network and coarse step, versions, and the size
                              and SHA-256 of NAME.npz; written last
      runs/NAME.times.npz     seconds by way, batch and threads, beside those of a yardstick taken in turns
      runs/NAME.times.json    size and SHA-256 of it; written last
      work/                   partitions, trained routers, graphs: may be deleted when the bench is done

A run that is stored is not run again. Metrics, fronts, plots and sentences are derived from these files
alone, so that a new metric costs nothing and any figure can be traced.
"""

import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.bench.machine import describe_machine
from amips.bench.systems import System
from amips.errors import ResultsError
from amips.files import begin_output, read_json, read_manifest, write_atomic, write_manifest
from amips.untrusted import inside, read_bounded

RESULTS, RUNS, WORK = "results.json", "runs", "work"
FORMAT = 3
TIMES = ".times"  # in the names of its files
MOST_BYTES = 1 << 32  # of the arrays of a run: a damaged archive may say any size


@dataclass(frozen=True)
class Run:
    """One system with one budget, on the val and the test queries.

    Args:
        ids, scores: [m, k].
        rank: [m], where the true top key is among the keys returned, from 1; 0 if it is not.
        scanned, scan: [m], keys scored and FLOPs of that.
        network, coarse: FLOPs for each query.
        times: seconds a query, [rounds] or (batch 1) [rounds, queries], by "way/batch/threads"; under the
            same name with "yardstick/" before it, what the yardstick took just before, of the same shape.
    """

    system: System
    budget: int
    ids: NDArray[np.int32]
    scores: NDArray[np.float32]
    rank: NDArray[np.int32]
    scanned: NDArray[np.int64]
    scan: NDArray[np.int64]
    network: int
    coarse: int
    times: dict[str, NDArray[np.float64]]


class ResultsStore:
    """A results directory, of one task."""

    def __init__(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Open results; with `about`, make them or check that they are of the same task."""
        self.path = Path(path)
        if about is None:
            if not (self.path / RESULTS).exists():
                raise ResultsError(f"{path} holds no {RESULTS}: it is not the results of amips bench")
            self.about = read_json(inside(self.path, RESULTS, ResultsError), ResultsError)
            return
        begin_output(path, about, ResultsError, what="the results of a bench", mark=RESULTS)
        (self.path / RUNS).mkdir(exist_ok=True)
        (self.path / WORK).mkdir(exist_ok=True)
        self.about = about

    def _name(self, system: System, budget: int) -> str:
        return f"{system.slug}-b{budget}"

    def _has(self, name: str) -> bool:
        return all((self.path / RUNS / f"{name}.{ending}").exists() for ending in ("json", "npz"))

    def has(self, system: System, budget: int) -> bool:
        """Whether the answers of this run are stored."""
        return self._has(self._name(system, budget))

    def has_times(self, system: System, budget: int) -> bool:
        """Whether its times are."""
        return self._has(self._name(system, budget) + TIMES)

    def put(self, run: Run, seed: int) -> None:
        """Store the answers of a run; the description goes last and makes it count."""
        arrays = {name: getattr(run, name) for name in ("ids", "scores", "rank", "scanned", "scan")}
        described = {
            "kind": "run",
            "format": FORMAT,
            "system": run.system.to_json(),
            "name": run.system.name,
            "budget": run.budget,
            "network": run.network,
            "coarse": run.coarse,
            "seed": seed,
            "machine": describe_machine(),
        }
        self._put(self._name(run.system, run.budget), arrays, described)

    def put_times(self, system: System, budget: int, times: dict[str, NDArray[np.float64]]) -> None:
        """Store the times of a run."""
        self._put(self._name(system, budget) + TIMES, dict(times), {"kind": "times", "format": FORMAT})

    def _put(self, name: str, arrays: dict[str, NDArray[Any]], fields: dict[str, Any]) -> None:
        folder = self.path / RUNS
        (folder / f"{name}.json").unlink(missing_ok=True)  # which has the SHA-256 of the arrays before
        _write_arrays(folder / f"{name}.npz", arrays)
        write_manifest(folder, f"{name}.json", fields, [f"{name}.npz"])

    def get(self, system: System, budget: int) -> Run:
        """Read a run back."""
        return self._read(self._name(system, budget), system)

    def runs(self, systems: Iterable[System]) -> list[Run]:
        """The stored runs of these systems, by budget.

        They are known by their file names. What a description says of the system is for people: since then
        its router may have been moved, trained anew or removed.
        """
        stored = []
        for system in systems:
            names = [path.stem for path in (self.path / RUNS).glob(f"{system.slug}-b*.json")]
            runs = (self._read(name, system) for name in names if not name.endswith(TIMES))
            stored += sorted(runs, key=lambda run: run.budget)
        return stored

    def _read(self, name: str, system: System) -> Run:
        about, arrays = self._verified(name, "run")
        path = self.path / RUNS / f"{name}.npz"
        _check_arrays(arrays, path)
        numbers = {field: about.get(field) for field in ("budget", "network", "coarse")}
        for field, value in numbers.items():
            if type(value) is not int or value < 0:
                raise ResultsError(f"{path.with_suffix('.json')} is damaged: {field}={value!r}")
        times = self._verified(name + TIMES, "times")[1] if self._has(name + TIMES) else {}
        _check_times(times, self.path / RUNS / f"{name}{TIMES}.npz")
        return Run(system, times=times, **numbers, **arrays)  # type: ignore[arg-type]

    def _verified(self, name: str, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What a description says, and the arrays that it lists; ResultsError if either has changed."""
        folder = inside(self.path, RUNS, ResultsError)
        about = read_manifest(folder, f"{name}.json", kind, FORMAT, ResultsError, verify=True)
        if set(about["files"]) != {f"{name}.npz"}:
            raise ResultsError(f"{folder / name}.json is damaged: it does not list {name}.npz alone")
        return about, _read_arrays(folder / f"{name}.npz")


def _write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue())


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # From memory: numpy leaves a damaged file open.
        path = inside(path.parent, path.name, ResultsError)
        data = io.BytesIO(read_bounded(path, ResultsError, MOST_BYTES))
        with zipfile.ZipFile(data) as archive:
            if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                raise ValueError("its arrays are larger than those of any run")
        with np.load(data, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("it holds something else than arrays")
        return arrays
    except Exception as problem:  # a damaged archive makes numpy and zipfile raise nearly anything
        said = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise ResultsError(f"{path} is damaged: {said}") from None


def _check_arrays(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """ResultsError unless the arrays are those of a run: one row a query in each, ids that can be ids."""
    shape = arrays["ids"].shape if "ids" in arrays else ()
    expected = dict.fromkeys(("ids", "scores"), shape) | dict.fromkeys(("rank", "scanned", "scan"), shape[:1])
    if len(shape) != 2 or {name: array.shape for name, array in arrays.items()} != expected:
        raise ResultsError(f"{path} is damaged: it does not hold the arrays of a run")
    whole = all(arrays[name].dtype.kind in "iu" for name in ("ids", "rank", "scanned", "scan"))
    if not whole or arrays["scores"].dtype.kind != "f" or arrays["ids"].min(initial=-1) < -1:
        raise ResultsError(f"{path} is damaged: its numbers are not those of a run")
    # -1 keys scanned: the library does not tell. Minus infinity as a score: fewer keys than were asked for.
    least = {"rank": 0, "scanned": -1, "scan": -1}
    if (
        any(arrays[name].min(initial=0) < low for name, low in least.items())
        or not (arrays["scores"] < np.inf).all()
    ):
        raise ResultsError(f"{path} is damaged: its numbers are out of range")


def _check_times(times: dict[str, NDArray[Any]], path: Path) -> None:
    for name in times:
        finite = times[name].dtype.kind == "f" and np.isfinite(times[name]).all()
        if not finite or times[name].min(initial=0) < 0:
            raise ResultsError(f"{path} is damaged: {name} holds no times")
        if not name.startswith("yardstick/") and f"yardstick/{name}" not in times:
            raise ResultsError(f"{path} is damaged: it lacks the yardstick of {name}")
