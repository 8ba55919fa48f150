"""Reading files that someone else may have written: regular files alone, bounded, inside their directory.

A file that came with a download can be a pipe that never ends, a device, or a link to another place. Every
reader of such files opens them here, so that none of them can hang, fill the memory or lead elsewhere.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from amips.errors import AmipsError

# Of a manifest or a description: that of a bundle with a hundred operating points has 30 kB, the summary of a
# large bench 300 kB. Python objects take up to 30 times the bytes of their JSON.
JSON_BYTES = 1 << 22


def open_regular(path: Path, error: type[AmipsError], *, follow: bool = True) -> BinaryIO:
    """A regular file, opened to be read; anything else (a pipe, a device, a directory) is `error`, at once.

    Args:
        follow: whether a symbolic link is followed.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise error(f"{path} cannot be read: {_reason(problem)}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{path} cannot be read: it is not a regular file")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, error: type[AmipsError], most: int = JSON_BYTES) -> bytes:
    """The content of a regular file of at most so many bytes; a larger one is `error`."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise error(f"{path} is damaged: it has {size:,} bytes, expected at most {most:,}")
        try:
            return file.read(size)  # a larger number would be set aside in memory at once
        except OSError as problem:
            raise error(f"{path} cannot be read: {_reason(problem)}") from None


def parse_json(data: bytes, name: object, error: type[AmipsError]) -> dict[str, Any]:
    """The JSON object in `data`; anything else becomes one line of `error` that names it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise error(f"{name} is damaged: {_reason(problem)}") from None
    if not isinstance(value, dict):
        raise error(f"{name} is damaged: expected a JSON object")
    return value


def read_toml(path: Path, error: type[AmipsError]) -> dict[str, Any]:
    """Read a TOML file; a missing or damaged one becomes one line of `error`."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
    try:
        return tomllib.loads(read_bounded(path, error).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise error(f"{path} is not TOML: {problem}") from None


def inside(directory: Path, name: Any, error: type[AmipsError]) -> Path:
    """The path of what a manifest in `directory` calls `name`; `error` if that is outside of the directory.

    A name is plain parts with slashes between. Links that lead out of the directory are refused too.
    """
    plain = isinstance(name, str) and "\0" not in name and "\\" not in name
    if not plain or any(part in ("", ".", "..") for part in name.split("/")):
        raise error(f"{directory}: {name!r} is not the name of a file in this directory")
    path = directory / str(name)
    try:
        outside = not path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError) as problem:  # links in a circle, a name that is too long
        raise error(f"{path} cannot be read: {_reason(problem)}") from None
    if outside:
        raise error(f"{path} is a link to a place outside of {directory}; replace it by the file itself")
    return path


def open_lock(path: Path, error: type[AmipsError]) -> int:
    """A handle of the lock file at `path`, made if it is not there; never what a link there leads to."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO):
            raise error(f"{path} is not a lock file but a link or the like; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{path} is not a lock file; remove it")
    return handle


def _reason(problem: BaseException) -> str:
    """What an error says, in one line, without the path that the message has already."""
    text = (isinstance(problem, OSError) and problem.strerror) or str(problem) or type(problem).__name__
    return " ".join(str(text).split())
