"""What a machine has: its processor; and memory and disks that end, of which any error becomes one line.

numpy, torch, faiss and the operating system each say it in their own way: as MemoryError, as an OSError, or
as a RuntimeError with a page of text. What was on disk before is whole in every case: it is replaced last.
"""

import errno
import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from amips.errors import AmipsError, DiskFullError, MemoryLimitError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|os error (28|122|27)\b"
    r"|\d+ requested and \d+ written"  # numpy's words
)
_MEMORY = re.compile(
    r"bad_alloc|cannot allocate memory|can't allocate memory|out of memory|DefaultCPUAllocator"
    r"|can't start new thread|unable to allocate|failed to map segment|std::length_error|Error in mmap",
    re.IGNORECASE,
)


CGROUPS = ("memory.max", "memory/memory.limit_in_bytes")  # the limit of a container, of version 2 and 1
WORKING = 160 << 20  # bytes of address space without which no work is begun


def check_address_space(needed: int = WORKING) -> None:
    """MemoryLimitError if a limit on address space (`ulimit -v`) leaves less than `needed` bytes.

    Below that, OpenBLAS and OpenMP end the process with a signal when they cannot allocate their buffers.
    """
    limit = address_space_limit()
    if limit is None:
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        return
    if limit - used < needed:
        raise MemoryLimitError(
            f"not enough memory: the limit on address space is {limit >> 20:,} MB, and "
            f"{(used + needed) >> 20:,} MB are needed at least; raise it (ulimit -v)"
        )


def address_space_limit() -> int | None:
    """The limit on the address space of this process in bytes; None if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def available_memory() -> int | None:
    """Bytes that the machine has left, or that a container has; None where that is not known."""
    left = []
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        left.append(int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, ValueError, KeyError):  # not Linux
        return None
    for name in CGROUPS:
        with suppress(OSError, ValueError):  # there is no such limit ("max")
            left.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(left)


@contextmanager
def plain_resource_errors() -> Iterator[None]:
    """Also a decorator: what is raised inside for want of memory or disk becomes one line of AmipsError."""
    try:
        check_address_space()
        yield
    except AmipsError:
        raise
    except Exception as problem:
        if (line := resource_error(problem)) is None:
            raise
        raise line from problem


def resource_error(problem: BaseException) -> AmipsError | None:
    """The error in one line, if `problem` is that memory or disk did not suffice; otherwise None."""
    text = " ".join(str(problem).split())
    if (isinstance(problem, OSError) and problem.errno in DISK) or _DISK.search(text):
        where = getattr(problem, "filename", None)
        reason = getattr(problem, "strerror", None) or (_DISK.search(text) or [text])[0]
        what = f"cannot write {where}: {reason}" if where else f"cannot write: {reason}"
        return DiskFullError(f"{what}; what was there before is unchanged: make room and give the call again")
    no_memory = isinstance(problem, MemoryError) or getattr(problem, "errno", None) == errno.ENOMEM
    if no_memory or _MEMORY.search(text):
        return MemoryLimitError(f"not enough memory: {text[:160] or 'an allocation failed'}")
    return None


def processor() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if "model name" in line:
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def threads() -> int:
    """How many threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
