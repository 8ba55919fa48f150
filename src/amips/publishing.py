"""Finished directories at an address, wherever pyarrow's file systems write: S3, GCS, file://.

    ADDRESS/amips.json         what is published: its version, and name, size and SHA-256 of every file
    ADDRESS/VERSION/...        the files, as they lie in the directory
    ADDRESS/PREVIOUS/...       those of the version before, for whoever is fetching it

`amips.json` is written last, as one object, so that a crash at any moment leaves what was published before,
or nothing. What is there already of a version is read and compared, and not sent again. A version is named by
its content, so that two publishers cannot mix theirs; one removes only the version that its own put out of
use, and what nobody finished within a day.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from amips.arguments import check_path
from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.files import (
    ADVICE,
    CHUNK,
    check_output,
    digest_of,
    fsync_directory,
    is_address,
    local,
    partial,
    read_json,
    sha256,
    whole_address,
    write_atomic,
)
from amips.locks import locked
from amips.progress import Bar
from amips.untrusted import inside, open_regular, parse_json

LISTING, LOCK = "amips.json", ".lock"
KIND, FORMAT = "publication", 1
LARGEST_LISTING = 1 << 26  # bytes
ABANDONED = 24 * 3600.0  # seconds after which nobody is at work on what was not finished
_VERSION = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def publish(directory: str | Path, address: str, *, progress: bool = False) -> str:
    """Send a finished directory (a task, a bundle, shards, ...) to an address, to be what is found there.

    The same call again continues: files that are there already are compared by their SHA-256, and sent where
    they are missing or damaged. Whoever fetches sees the version before, or this one, whole.

    Returns:
        The version: 16 letters that depend on the content alone.
    """
    directory = Path(check_path("directory", directory))
    manifests = _manifests(directory)
    system, root = _opened(address)
    place = _on_disk(system, root)
    if place is not None and place.resolve().is_relative_to(directory.resolve()):
        raise AmipsError(f"{address} lies in {directory}, which is published: give an address outside of it")
    files = {name: _facts(directory / name) for name in _names(directory)}
    for name, facts in ((name, facts) for one in manifests for name, facts in one["files"].items()):
        if files.get(name, {}).get("sha256") != facts["sha256"]:
            raise AmipsError(f"{directory / name} is not what it was when {directory} was finished")
    version = _version_of(files)
    total = sum(facts["size"] for facts in files.values())
    with (
        _one_line(f"{address} cannot be written"),
        _alone(system, root, address),
        Bar(total, "published", "bytes", progress) as bar,
    ):
        for name, facts in files.items():
            source = inside(directory, name, AmipsError)
            _send(system, f"{root}/{version}/{name}", source, facts, bar)
        before = _repairable(system, root, address)
        if before is not None and before["version"] == version:
            return version
        previous, retired = (None, None) if before is None else (before["version"], before["previous"])
        listing = {"kind": KIND, "format": FORMAT, "version": version, "previous": previous, "files": files}
        _replace(system, f"{root}/{LISTING}", json.dumps(listing, indent=1).encode())
        for name, facts in files.items():  # another may have put this very version out of use meanwhile
            if system.get_file_info(f"{root}/{version}/{name}").size != facts["size"]:
                raise AmipsError(
                    f"{address}/{version}/{name} was removed by another publisher: publish again"
                )
        _remove_others(system, root, {version, previous}, retired)
    return version


def fetch(address: str, out: str | Path, *, progress: bool = False) -> Path:
    """Bring what is published at an address to this machine; every file is checked by its SHA-256.

    Args:
        out: the directory to make. If it holds what is published already, nothing is fetched.

    Returns:
        The directory.
    """
    system, root = _opened(address)
    listing = _listing(system, root, address)
    if listing is None:
        raise AmipsError(f"nothing is published at {address}: it has no {LISTING}")
    version, path = listing["version"], local(out, AmipsError)
    if path.is_dir() and _same(path, listing["files"]):
        return path
    path = check_output(path, AmipsError, what="a fetched directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    total = sum(facts["size"] for facts in listing["files"].values())
    with partial(path) as temporary, Bar(total, "fetched", "bytes", progress) as bar:
        temporary.mkdir()
        for name, facts in listing["files"].items():
            target = inside(temporary, name, AmipsError)
            target.parent.mkdir(parents=True, exist_ok=True)
            with _one_line(f"{address}/{version}/{name} cannot be read"):
                source = system.open_input_stream(f"{root}/{version}/{name}")
            _receive(source, target, facts, f"{address}/{version}/{name}", bar)
    return path


def _manifests(directory: Path) -> list[dict[str, Any]]:
    """Of what was finished in a directory; AmipsError if nothing was."""
    manifests = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        value = read_json(inside(directory, path.name, AmipsError), AmipsError)
        if value.get("files") and "kind" in value and value.get("digest") == digest_of(value):
            manifests.append(value)
    if not manifests:
        raise AmipsError(f"{directory} is nothing that amips finished: there is nothing to publish")
    return manifests


def _names(directory: Path) -> Iterator[str]:
    """Files of a directory; hidden ones are locks and what was not finished."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if not any(part.startswith(".") for part in name.parts) and not path.is_dir():
            yield name.as_posix()


def _facts(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def _version_of(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _opened(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    if not is_address(check_path("address", address)):
        raise AmipsError(f"{address} is not an address: expected s3://bucket/name, gs://... or file:///...")
    with needs_extra(f"publishing at {address}", "formats", "pyarrow"):
        from pyarrow import fs
    with _one_line(f"{address} cannot be opened"):
        system, root = fs.FileSystem.from_uri(whole_address(address))
    return system, str(root).rstrip("/")


@contextmanager
def _alone(system: Any, root: str, address: str) -> Iterator[None]:
    """Keep other publishers away, where locks are: on this machine's file systems."""
    if (place := _on_disk(system, root)) is None:
        yield
        return
    busy = AmipsError(f"another process is publishing at {address}: wait until it ends")
    with locked(place / LOCK, busy, remove=True, make=True):
        yield


def _on_disk(system: Any, path: str) -> Path | None:
    """The path of what is on a file system of this machine; None of a store."""
    from pyarrow import fs

    return Path(path) if isinstance(system, fs.LocalFileSystem) else None


class _DamagedError(AmipsError):
    """What is published cannot be read, and may be published again."""


def _repairable(system: Any, root: str, address: str) -> dict[str, Any] | None:
    """What is published; None also where the list of it is damaged."""
    try:
        return _listing(system, root, address)
    except _DamagedError:
        return None


def _listing(system: Any, root: str, address: str) -> dict[str, Any] | None:
    """What is published, checked; None if nothing is."""
    from pyarrow import fs

    path, name = f"{root}/{LISTING}", f"{address}/{LISTING}"
    with _one_line(f"{name} cannot be read"):
        facts = system.get_file_info(path)
        if facts.type != fs.FileType.File:
            return None
        if facts.size > LARGEST_LISTING:
            raise AmipsError(f"{name} has {facts.size:,} bytes: it is no list of files")
        with system.open_input_stream(path) as file:
            data = bytes(file.read(LARGEST_LISTING))
    listing = parse_json(data, name, _DamagedError)
    if listing.get("kind") != KIND or listing.get("format") != FORMAT:
        raise AmipsError(f"{name} was not written by `amips publish` of this version")
    files, version = listing.get("files"), str(listing.get("version"))
    whole = isinstance(files, dict) and all(_is_facts(one) for one in files.values()) and _is_tree(files)
    previous = listing.get("previous")
    whole &= previous is None or (isinstance(previous, str) and bool(_VERSION.fullmatch(previous)))
    if not whole or not _VERSION.fullmatch(version) or _version_of(files) != version:  # type: ignore[arg-type]
        raise _DamagedError(f"{name} is damaged: publish again")
    return {"previous": None, **listing}


def _is_tree(names: Iterable[str]) -> bool:
    """Whether these can be files of one directory: none lies in another."""
    folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    return folders.isdisjoint(PurePosixPath(name).as_posix() for name in names)


def _is_facts(facts: Any) -> bool:
    return (
        isinstance(facts, dict)
        and type(facts.get("size")) is int
        and facts["size"] >= 0
        and bool(_DIGEST.fullmatch(str(facts.get("sha256"))))
    )


def _send(system: Any, path: str, source: Path, facts: dict[str, Any], bar: Bar) -> None:
    """Send a file, unless it is there; AmipsError if it is not what it was when the files were listed."""
    if system.get_file_info(path).size == facts["size"] and _digest_there(system, path) == facts["sha256"]:
        bar.update(facts["size"])
        return
    digest = hashlib.sha256()
    with open_regular(source, AmipsError) as file, _writing(system, path) as target:
        while block := file.read(CHUNK):
            digest.update(block)
            target.write(block)
            bar.update(len(block))
    if digest.hexdigest() != facts["sha256"]:
        system.delete_file(path)
        raise AmipsError(f"{source} has changed while it was published: publish again")


def _digest_there(system: Any, path: str) -> str:
    """SHA-256 of what is at a path of a file system."""
    digest = hashlib.sha256()
    with system.open_input_stream(path) as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _writing(system: Any, path: str) -> Iterator[Any]:
    """A file to write that is there whole, and on the disk, or not at all: stores do so by themselves."""
    if (place := _on_disk(system, path)) is None:
        system.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with system.open_output_stream(path) as target:
            yield target
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with partial(place) as temporary, temporary.open("wb") as target:
        yield target


def _replace(system: Any, path: str, data: bytes) -> None:
    """Write the listing, after all that it names is on the disk: a reader sees the old one or the new."""
    if (place := _on_disk(system, path)) is None:
        with system.open_output_stream(path) as target:
            target.write(data)
        return
    for folder in (*place.parent.rglob("*"), place.parent, place.parent.parent):
        if folder.is_dir():
            fsync_directory(folder)
    write_atomic(place, data)


def _remove_others(system: Any, root: str, keep: set[str | None], retired: str | None) -> None:
    """Remove the version that is out of use, and what nobody finished; another may be sending his own."""
    from pyarrow import fs

    for facts in system.get_file_info(fs.FileSelector(root)):
        name = facts.base_name
        if facts.type == fs.FileType.Directory and _VERSION.fullmatch(name) and name not in keep:
            sent = system.get_file_info(fs.FileSelector(facts.path, recursive=True))
            newest = max((one.mtime.timestamp() for one in sent if one.mtime is not None), default=0.0)
            if name == retired or newest < time.time() - ABANDONED:
                system.delete_dir(facts.path)


def _receive(source: Any, target: Path, facts: dict[str, Any], name: str, bar: Bar) -> None:
    digest, size = hashlib.sha256(), 0
    with source, target.open("wb") as file:
        while size <= facts["size"]:
            with _one_line(f"{name} cannot be read"):
                block = source.read(CHUNK)
            if not block:
                break
            digest.update(block)
            file.write(block)
            size += len(block)
            bar.update(len(block))
    if size != facts["size"] or digest.hexdigest() != facts["sha256"]:
        raise AmipsError(f"{name} is not what was published: publish again")


def _same(path: Path, files: dict[str, Any]) -> bool:
    """Whether these files are in a directory, by name and content; AmipsError if other ones are."""
    have = {name: _facts(path / name) for name in _names(path)}
    if have and have != {name: {"size": one["size"], "sha256": one["sha256"]} for name, one in files.items()}:
        raise AmipsError(f"{path} holds something else than is published; {ADVICE}")
    return bool(have)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Errors of file systems as one line."""
    try:
        yield
    except AmipsError:
        raise
    except Exception as problem:
        reason = " ".join(str(problem).split())
        raise AmipsError(f"{what}: {reason or type(problem).__name__}") from None
