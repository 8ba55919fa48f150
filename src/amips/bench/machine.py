"""What a figure was measured on."""

import os
import platform
from pathlib import Path

import numpy as np

from amips.blas import faiss
from amips.version import __version__


def describe() -> dict[str, str]:
    """The processor, its threads, and the versions that matter."""
    return {
        "cpu": _processor(),
        "threads": str(threads()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "amips": __version__,
    }


def threads() -> int:
    """How many threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if "model name" in line:
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
