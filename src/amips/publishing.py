"""Finished directories at an address, wherever pyarrow's file systems write: S3, GCS, file://.

    ADDRESS/amips.json         what is published: its version, and name, size and SHA-256 of every file
    ADDRESS/VERSION/...        the files, as they lie in the directory
    ADDRESS/PREVIOUS/...       those of the version before, for whoever is fetching it

`amips.json` is written last, as one object, so that a crash at any moment leaves what was published before,
or nothing. What was sent of a version that was not finished is not sent again.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amips.arguments import check_path
from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.files import (
    ADVICE,
    CHUNK,
    check_output,
    is_address,
    local,
    manifest_kinds,
    partial,
    sha256,
    whole_address,
)
from amips.progress import Bar
from amips.untrusted import inside, open_regular, parse_json

LISTING = "amips.json"
KIND, FORMAT = "publication", 1
LARGEST_LISTING = 1 << 26  # bytes
_VERSION = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def publish(directory: str | Path, address: str, *, progress: bool = False) -> str:
    """Send a finished directory (a task, a bundle, shards, ...) to an address, to be what is found there.

    The same call again continues. Whoever fetches sees the version before, or this one, whole.

    Returns:
        The version: 16 letters that depend on the content alone.
    """
    directory = Path(check_path("directory", directory))
    if not directory.is_dir() or not manifest_kinds(directory):
        raise AmipsError(f"{directory} is nothing that amips finished: there is nothing to publish")
    files = {name: _facts(directory / name) for name in _names(directory)}
    version = _version_of(files)
    system, root = _opened(address)
    before = _listing(system, root, address)
    if before is not None and before["version"] == version:
        return version
    total = sum(facts["size"] for facts in files.values())
    with _one_line(f"{address} cannot be written"), Bar(total, "published", "bytes", progress) as bar:
        for name, facts in files.items():
            _send(system, f"{root}/{version}/{name}", inside(directory, name, AmipsError), facts, bar)
        previous = None if before is None else before["version"]
        listing = {"kind": KIND, "format": FORMAT, "version": version, "previous": previous, "files": files}
        _replace(system, f"{root}/{LISTING}", json.dumps(listing, indent=1).encode())
        _remove_others(system, root, {version, previous})
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
    listing = parse_json(data, Path(name), AmipsError)
    if listing.get("kind") != KIND or listing.get("format") != FORMAT:
        raise AmipsError(f"{name} was not written by `amips publish` of this version")
    files, version = listing.get("files"), str(listing.get("version"))
    whole = isinstance(files, dict) and all(_is_facts(one) for one in files.values())
    if not whole or not _VERSION.fullmatch(version) or _version_of(files) != version:  # type: ignore[arg-type]
        raise AmipsError(f"{name} is damaged: publish again")
    return listing


def _is_facts(facts: Any) -> bool:
    return (
        isinstance(facts, dict)
        and type(facts.get("size")) is int
        and facts["size"] >= 0
        and bool(_DIGEST.fullmatch(str(facts.get("sha256"))))
    )


def _send(system: Any, path: str, source: Path, facts: dict[str, Any], bar: Bar) -> None:
    """Send a file, unless it is there; AmipsError if it is not what it was when the files were listed."""
    if system.get_file_info(path).size == facts["size"]:
        bar.update(facts["size"])
        return
    system.create_dir(path.rsplit("/", 1)[0], recursive=True)
    digest = hashlib.sha256()
    with open_regular(source, AmipsError) as file, system.open_output_stream(path) as target:
        while block := file.read(CHUNK):
            digest.update(block)
            target.write(block)
            bar.update(len(block))
    if digest.hexdigest() != facts["sha256"]:
        system.delete_file(path)
        raise AmipsError(f"{source} has changed while it was published: publish again")


def _replace(system: Any, path: str, data: bytes) -> None:
    """Write an object such that a reader sees the old or the new: stores do so, directories need a rename."""
    from pyarrow import fs

    renames = isinstance(system, fs.LocalFileSystem)
    with system.open_output_stream(f"{path}.new" if renames else path) as target:
        target.write(data)
    if renames:
        system.move(f"{path}.new", path)


def _remove_others(system: Any, root: str, keep: set[str | None]) -> None:
    from pyarrow import fs

    for facts in system.get_file_info(fs.FileSelector(root)):
        name = facts.base_name
        if facts.type == fs.FileType.Directory and _VERSION.fullmatch(name) and name not in keep:
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
    """Whether these files are in a directory, by name and size; AmipsError if other ones are."""
    have = {name: (path / name).stat().st_size for name in _names(path)}
    if have and have != {name: facts["size"] for name, facts in files.items()}:
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
