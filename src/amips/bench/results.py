"""Raw runs on disk: what each query was answered, what that cost, how long it took.

    results/
      results.json            what is compared: the task, its queries, k
      runs/NAME.npz           ids, scores, rank, scanned, scan: one row a query, val first, then test
      runs/NAME.json          the system, its budget, FLOPs of network and coarse step, versions; written last
      runs/NAME.times.npz     seconds by way, batch and threads, beside those of a yardstick taken in turns
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
from amips.files import begin_output, read_json, write_atomic, write_json
from amips.untrusted import inside, read_bounded

RESULTS, RUNS, WORK = "results.json", "runs", "work"
FORMAT = 2
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

    def _file(self, system: System, budget: int, suffix: str) -> Path:
        return self.path / RUNS / f"{system.slug}-b{budget}{suffix}"

    def has(self, system: System, budget: int) -> bool:
        """Whether the answers of this run are stored."""
        return all(self._file(system, budget, suffix).exists() for suffix in (".json", ".npz"))

    def has_times(self, system: System, budget: int) -> bool:
        """Whether its times are."""
        return self._file(system, budget, ".times.npz").exists()

    def put(self, run: Run, seed: int) -> None:
        """Store the answers of a run; the description goes last and makes it count."""
        arrays = {name: getattr(run, name) for name in ("ids", "scores", "rank", "scanned", "scan")}
        _write_arrays(self._file(run.system, run.budget, ".npz"), arrays)
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
        write_json(self._file(run.system, run.budget, ".json"), described)

    def put_times(self, system: System, budget: int, times: dict[str, NDArray[np.float64]]) -> None:
        """Store the times of a run."""
        _write_arrays(self._file(system, budget, ".times.npz"), dict(times))

    def get(self, system: System, budget: int) -> Run:
        """Read a run back."""
        return self._read(self._file(system, budget, ".json"), system)

    def runs(self, systems: Iterable[System]) -> list[Run]:
        """The stored runs of these systems, by budget.

        They are known by their file names. What a description says of the system is for people: since then
        its router may have been moved, trained anew or removed.
        """
        stored = []
        for system in systems:
            paths = (self.path / RUNS).glob(f"{system.slug}-b*.json")
            stored += sorted((self._read(path, system) for path in paths), key=lambda run: run.budget)
        return stored

    def _read(self, path: Path, system: System) -> Run:
        about = read_json(inside(self.path, f"{RUNS}/{path.name}", ResultsError), ResultsError)
        if about.get("kind") != "run" or about.get("format") != FORMAT:
            raise ResultsError(f"{path} is not a run that this version of amips reads")
        arrays = _read_arrays(path.with_suffix(".npz"))
        _check_arrays(arrays, path.with_suffix(".npz"))
        timed = path.with_suffix(".times.npz")
        try:
            return Run(
                system,
                int(about["budget"]),
                network=int(about["network"]),
                coarse=int(about["coarse"]),
                times=_read_times(timed) if timed.exists() else {},
                **arrays,
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise ResultsError(f"{path} is damaged: {problem}") from None


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


def _read_times(path: Path) -> dict[str, NDArray[Any]]:
    times = _read_arrays(path)
    for name in times:
        if times[name].dtype.kind != "f" or not (times[name] >= 0).all():
            raise ResultsError(f"{path} is damaged: {name} holds no times")
        if not name.startswith("yardstick/") and f"yardstick/{name}" not in times:
            raise ResultsError(f"{path} is damaged: it lacks the yardstick of {name}")
    return times
