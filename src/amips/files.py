"""Directories that are either whole or visibly unfinished: places to write to, atomic writes, manifests.

Whoever writes output asks `check_output` (a directory) or `check_output_file` first: it must be on this
machine, and nothing else may be there. `begin_output` makes a directory that can be continued by the same
call and by no other. What is written appears by one rename (`partial`).

A directory of amips is finished when its manifest is there. The manifest is written last, names every
file with its size and SHA-256, and is put in place by one rename, so that a crash at any moment leaves
either no manifest (unfinished, can be resumed) or a true one.
"""

import atexit
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from amips.errors import AmipsError

CHUNK = 1 << 22
ADVICE = "choose another directory, or remove this one"
# Two letters at least: one is a drive. A `Path` has only one of the two slashes left.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")


def is_address(path: str | Path) -> bool:
    """Whether this is a URL, such as s3://bucket/name, and not a path."""
    return _ADDRESS.match(str(path)) is not None


def local(path: str | Path, error: type[AmipsError], what: str = "directory") -> Path:
    """`path` as a `Path`; an address such as s3://bucket/name is an error, not a directory named "s3:"."""
    if address := _ADDRESS.match(str(path)):
        stated = f"{address[1]}://{address[2]}"
        raise error(f"{stated} is an address, not a {what}: write locally and copy it there")
    return Path(path)


def check_output(
    path: str | Path,
    error: type[AmipsError],
    *,
    what: str,
    marks: Sequence[str] = (),
    own: "re.Pattern[str] | None" = None,
) -> Path:
    """The path of an output directory to be; raises `error` if writing there could harm anything else.

    A place is free where nothing is, or an empty directory; hidden files do not count. What is inside a
    directory of its own is looked at by the caller.

    Args:
        what: is to be written, with its article: "a task".
        marks: files by which one of its own is known, finished or not.
        own: names of files that a killed call of its own may have left.
    """
    path = local(path, error)
    if not (path.exists() or path.is_symlink()):
        return path
    if path.is_dir():
        if any((path / mark).is_file() for mark in marks):
            return path
        if all(f.name[0] == "." or (own and own.fullmatch(f.name)) for f in path.iterdir()):
            return path
    raise error(f"{path} exists and is not {what}; {ADVICE}")


def check_output_file(path: str | Path, error: type[AmipsError]) -> Path:
    """The path of an output file; raises `error` unless it can be written into a directory that there is."""
    path = local(path, error, "file")
    if not path.parent.is_dir():
        raise error(f"cannot write {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise error(f"cannot write {path}: it is a directory; name a file")
    return path


def check_same(
    path: Path, before: dict[str, Any], wanted: dict[str, Any], error: type[AmipsError], what: str
) -> None:
    """Raise `error` if what is at `path` was made from something else than is wanted; name what differs."""
    if names := differing(before, wanted):
        raise error(f"{path} holds {what} of other inputs or options ({names}); {ADVICE}")


def begin_output(
    path: str | Path, plan: dict[str, Any], error: type[AmipsError], *, what: str, mark: str
) -> Path:
    """Make an output directory, or continue one that was begun with the same plan.

    Args:
        plan: all that the output depends on, as plain values: written to the file `mark`, before all else.
    """
    path = check_output(path, error, what=what, marks=[mark])
    if (path / mark).is_file():
        check_same(path, read_json(path / mark, error), json.loads(json.dumps(plan)), error, what)
    else:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / mark, plan)
    return path


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


def differing(before: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The names in which two sets of settings differ, for an error message."""
    names = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
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


@contextmanager
def partial(path: Path) -> Iterator[Path]:
    """The name of a file or directory to write beside `path`; a block that ends well puts it in its place.

    A block that fails leaves what was there before. A directory takes the place of the one before it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if temporary.is_dir():
            fsync_directory(temporary)
            shutil.rmtree(path, ignore_errors=True)
        else:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part."""
    write_atomically(path, lambda file: file.write(data))


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """As `write_atomic`, for what `write` puts piece by piece into the file that it is called with."""
    with partial(path) as temporary, temporary.open("wb") as file:
        write(file)


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


def stated_kinds(directory: Path) -> set[str]:
    """What a directory says it is: the "kind" of each JSON file in it, its manifests among them."""
    kinds = set()
    for path in sorted(directory.glob("*.json")):
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, OSError, RecursionError) as problem:
            raise AmipsError(f"{path} is damaged or not readable: {problem}") from None
        if isinstance(value, dict) and "kind" in value:
            kinds.add(str(value["kind"]))
    return kinds


def read_toml(path: Path, error: type[AmipsError]) -> dict[str, Any]:
    """Read a TOML file; a missing or damaged one becomes one line of `error`."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise error(f"{path} is not TOML: {problem}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from None


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
