"""Directories that are either whole or visibly unfinished: places to write to, atomic writes, manifests.

Whoever writes output asks `check_output` (a directory) or `check_output_file` first: it must be on this
machine, and nothing else may be there. `begin_output` makes a directory that can be continued by the same
call and by no other. What is written appears by one rename (`partial`).

A directory of amips is finished when its manifest is there. The manifest is written last, names every
file with its size and SHA-256, and is put in place by one rename, so that a crash at any moment leaves
either no manifest (unfinished, can be resumed) or a true one.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from amips.arguments import check_path
from amips.errors import AmipsError
from amips.untrusted import inside, open_regular, parse_json, read_bounded

CHUNK = 1 << 22
ADVICE = "choose another directory, or remove this one"
# Two letters at least: one is a drive. A `Path` has only one of the two slashes left.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")
_PARTIAL = re.compile(r"\..+\.\d{7,}\.tmp")  # of `partial`


def is_address(path: str | Path) -> bool:
    """Whether this is a URL, such as s3://bucket/name, and not a path."""
    return _ADDRESS.match(str(path)) is not None


def whole_address(path: str | Path) -> str:
    """An address with its slashes: a `Path` has kept only one of those after the colon."""
    address = _ADDRESS.match(str(path))
    assert address is not None, "not an address"
    slashes = "///" if address[1].lower() == "file" else "//"
    return f"{address[1]}:{slashes}{address[2]}"


def local(path: str | Path, error: type[AmipsError], what: str = "directory") -> Path:
    """`path` as a `Path`; an address such as s3://bucket/name is an error, not a directory named "s3:"."""
    path = check_path("path", path, error=error)
    if is_address(path):
        sent = "`amips publish` it there" if what == "directory" else "copy it there"
        raise error(f"{whole_address(path)} is an address, not a {what}: write locally and {sent}")
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


def differing(before: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The names in which two sets of settings differ, for an error message."""
    names = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
    return ", ".join(names)


@contextmanager
def partial(path: Path) -> Iterator[Path]:
    """The name of a file or directory to write beside `path`; a block that ends well puts it in its place.

    A block that fails leaves what was there before. A directory never takes the place of another that holds
    something, because that takes two renames: write it under a new name, and then a file that names it.
    """
    temporary = _name_beside(path)
    try:
        yield temporary
        fsync_all(temporary)
        temporary.replace(path)
    except OSError as problem:
        if problem.errno and problem.filename is None:  # a write that fails does not say where
            problem.filename = str(path)
        raise
    finally:
        shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def _name_beside(path: Path) -> Path:
    """A name that nobody else has, by which `remove_partials` knows it."""
    return path.with_name(f".{path.name}.{os.getpid()}{secrets.randbelow(10**6):06d}.tmp")


def fsync_all(path: Path) -> None:
    """Make a file, or a directory with all that is in it, survive a power cut."""
    if path.is_dir():
        for inner in path.iterdir():
            fsync_all(inner)
        fsync_directory(path)
    else:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def remove_directory(path: Path) -> None:
    """Remove a directory such that it is whole or gone at every moment, also if the process is killed.

    What is left of one that was killed has the name of a partial file: `remove_partials` clears it.
    """
    aside = _name_beside(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def remove_partials(directory: Path) -> None:
    """Remove what calls that were killed left half-written or half-removed; only for who holds the lock."""
    for left in list(directory.rglob(".*")) if directory.is_dir() else []:
        if _PARTIAL.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


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
    """Read a JSON object; what is missing, damaged, too large or no regular file is one line of `error`."""
    return parse_json(read_bounded(path, error), path, error)


def manifest_kinds(directory: Path) -> set[str]:
    """What a directory says it is: the "kind" of each JSON file in it, its manifests among them."""
    kinds = set()
    for path in sorted(directory.glob("*.json")):
        value = read_json(inside(directory, path.name, AmipsError), AmipsError)
        if "kind" in value:
            kinds.add(str(value["kind"]))
    return kinds


def sha256(path: Path, error: type[AmipsError] = AmipsError) -> str:
    """SHA-256 of a regular file, streamed: 1.5 GB take about a second."""
    digest = hashlib.sha256()
    view = memoryview(bytearray(CHUNK))
    with open_regular(path, error) as file:
        while size := file.readinto(view):  # type: ignore[attr-defined]
            digest.update(view[:size])
    return digest.hexdigest()


def write_manifest(directory: Path, name: str, fields: dict[str, Any], files: Iterable[str]) -> None:
    """Declare `directory` finished: `fields` plus the size and SHA-256 of each file, written last.

    All that it relies on is on disk before it is: the files, and the names of them.
    """
    listed = {}
    for file in files:
        path = directory / file
        fsync_all(path)
        listed[file] = {"size": path.stat().st_size, "sha256": sha256(path)}
    for folder in sorted({(directory / file).parent for file in listed}):
        fsync_directory(folder)
    manifest = json.loads(json.dumps({**fields, "files": listed}))
    write_json(directory / name, {**manifest, "digest": digest_of(manifest)})


def digest_of(fields: dict[str, Any]) -> str:
    """SHA-256 of what a manifest says, but for the digest itself."""
    own = {name: value for name, value in fields.items() if name != "digest"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def read_manifest(
    directory: Path,
    name: str,
    kind: str,
    version: int,
    error: type[AmipsError],
    verify: bool = False,
    approve: Callable[[bytes], None] | None = None,
) -> dict[str, Any]:
    """Read and check a manifest: kind, format version, its own digest, every file's size.

    With `verify` the SHA-256 of every file too. A file that is named must be a regular one inside of the
    directory. `approve` is called with the bytes of the manifest before they are parsed, and raises if it
    does not trust them: they are read once.
    """
    if is_address(directory):
        raise error(
            f"{whole_address(directory)} is an address: `amips fetch` it to a directory, and open that"
        )
    if not directory.is_dir():
        raise error(f"{directory} is not a directory: expected a finished {kind}")
    if not os.path.lexists(directory / name):
        raise error(f"{directory} is not a finished {kind}: it has no {name}")
    data = read_bounded(inside(directory, name, error), error)
    if approve is not None:
        approve(data)
    manifest = parse_json(data, directory / name, error)
    if manifest.get("kind") != kind:
        raise error(f"{directory / name} describes {manifest.get('kind')!r}, expected {kind!r}")
    if manifest.get("format") != version:
        raise error(
            f"{directory / name} has format {manifest.get('format')!r}, this version of amips reads "
            f"{version}: make the {kind} again"
        )
    if manifest.get("digest") != digest_of(manifest):
        raise error(f"{directory / name} does not have the digest that it states: it has changed")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise error(f"{directory / name} is damaged: it lists no files")
    for file, facts in files.items():
        if not isinstance(facts, dict) or type(facts.get("size")) is not int or "sha256" not in facts:
            raise error(f"{directory / name} is damaged: it does not give the size and SHA-256 of {file}")
        check_file(directory, file, facts, error, verify)
    return manifest


def check_file(
    directory: Path, file: str, facts: dict[str, Any], error: type[AmipsError], verify: bool = True
) -> Path:
    """The path of a file that a manifest lists, after its size and (`verify`) its SHA-256 were checked."""
    path = inside(directory, file, error)
    if not path.exists():
        raise error(f"{path} is missing")
    with open_regular(path, error) as handle:
        size = os.fstat(handle.fileno()).st_size
    if size != facts["size"]:
        raise error(f"{path} has {size} bytes, expected {facts['size']}")
    if verify and sha256(path, error) != facts["sha256"]:
        raise error(f"{path} does not have the SHA-256 of the manifest: its content has changed")
    return path
