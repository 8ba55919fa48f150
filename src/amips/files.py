"""Directories that are either whole or visibly unfinished: atomic writes and manifests.

A directory of amips is finished when its manifest is there. The manifest is written last, names every
file with its size and SHA-256, and is put in place by one rename, so that a crash at any moment leaves
either no manifest (unfinished, can be resumed) or a true one.
"""

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from amips.errors import AmipsError

CHUNK = 1 << 22


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_directory(prefix: str) -> Path:
    """A new directory that is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The names in which two sets of settings differ, for an error message."""
    names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    return ", ".join(names)


@contextmanager
def locked(path: Path, busy: AmipsError | None = None) -> Iterator[None]:
    """Hold a lock on `path` against other processes and threads; a killed process lets go of its own.

    With `busy`, do not wait for another holder but raise that.
    """
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy is not None else 0))
        except BlockingIOError:
            assert busy is not None
            raise busy from None
        yield


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part."""
    write_atomically(path, lambda file: file.write(data))


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """As `write_atomic`, for what is written piece by piece into a file that `write` is given."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path, error: type[AmipsError]) -> dict[str, Any]:
    """Read a JSON object; a missing or damaged file becomes one line of `error`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except (ValueError, OSError, RecursionError) as problem:
        raise error(f"{path} is damaged or not readable: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{path} is damaged: expected a JSON object")
    return value


def sha256(path: Path) -> str:
    """SHA-256 of a file, streamed."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as f:
        while size := f.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def write_manifest(directory: Path, name: str, fields: dict[str, Any], files: Iterable[str]) -> None:
    """Declare `directory` finished: `fields` plus the size and SHA-256 of each file, written last."""
    listed = {}
    for file in files:
        path = directory / file
        with path.open("rb") as f:
            os.fsync(f.fileno())
        listed[file] = {"size": path.stat().st_size, "sha256": sha256(path)}
    write_json(directory / name, {**fields, "files": listed})


def read_manifest(
    directory: Path, name: str, kind: str, version: int, error: type[AmipsError], verify: bool = False
) -> dict[str, Any]:
    """Read and check a manifest: kind, format version, every file's size; with `verify` its SHA-256 too."""
    if not directory.is_dir():
        raise error(f"{directory} is not a directory: expected a finished {kind}")
    if not (directory / name).exists():
        raise error(f"{directory} is not a finished {kind}: it has no {name}")
    manifest = read_json(directory / name, error)
    if manifest.get("kind") != kind:
        raise error(f"{directory / name} describes {manifest.get('kind')!r}, expected {kind!r}")
    if manifest.get("format") != version:
        raise error(
            f"{directory / name} has format {manifest.get('format')!r}, this version of amips reads {version}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise error(f"{directory / name} is damaged: it lists no files")
    for file, facts in files.items():
        if not isinstance(facts, dict) or not {"size", "sha256"} <= facts.keys():
            raise error(f"{directory / name} is damaged: it does not give the size and SHA-256 of {file}")
        path = directory / file
        if not path.is_file():
            raise error(f"{path} is missing")
        size = path.stat().st_size
        if size != facts["size"]:
            raise error(f"{path} has {size} bytes, expected {facts['size']}")
        if verify and sha256(path) != facts["sha256"]:
            raise error(f"{path} does not have the SHA-256 of the manifest: its content has changed")
    return manifest
