"""What a figure was measured on, and taking times in turns."""

import ctypes
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from amips.blas import faiss
from amips.resources import processor, threads
from amips.version import __version__

K = TypeVar("K", bound=Hashable)


def describe_machine() -> dict[str, str]:
    """The processor, its threads, and the versions that matter."""
    return {
        "cpu": processor(),
        "threads": str(threads()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "amips": __version__,
    }


def in_turns(groups: Sequence[Mapping[K, Callable[[], object]]], rounds: int) -> dict[K, list[float]]:
    """Seconds of each contender, one after the other, round by round, after one warm round.

    The speed of a shared machine drifts: only times taken in turns can be compared. A group is what uses
    the same library: the threads of another wait busily for a while after its last call and slow down what
    comes next, so the first of a group runs once before it is timed.
    """
    times: dict[K, list[float]] = {name: [] for group in groups for name in group}
    for turn in range(rounds + 1):
        for group in groups:
            next(iter(group.values()))()
            for name, work in group.items():
                started = time.perf_counter()
                work()
                if turn:
                    times[name].append(time.perf_counter() - started)
    return times


def peak_memory(work: Callable[[], object]) -> int | None:
    """By how many bytes the memory of this process grew at most while `work` ran; None if unknown.

    Linux keeps the peak of a process and lets it be reset. What was freed before is handed back first, or
    the work would be done in it.
    """
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        work()
        return None
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of the GNU C library
        trim(0)
    before = _bytes(status.read_text(), "VmRSS")
    work()
    return max(0, _bytes(status.read_text(), "VmHWM") - before)


def _bytes(status: str, name: str) -> int:
    """Of a line of /proc/self/status, which counts kilobytes."""
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))
