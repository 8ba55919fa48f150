"""The directory of a bundle, whatever it holds: replaced in one step, checked before it is read.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, and what was measured
      data-<id>/               everything else
      changes-<id>.log         what was changed since, if anything was (`amips.search.changes`)
      text.json, text-<id>/    the same for the texts of the keys, if there are any
      previous-<id>.json       of the data directory data-<id>: the manifest before its refit, whose data stay

A new version is written into a data directory of its own, and then the manifest is replaced by one
rename. Before that moment the old bundle is whole, after it the new one is; what is left over of the
other is removed.
"""

import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from amips import version
from amips.errors import BundleError
from amips.files import (
    ADVICE,
    check_output,
    fsync_directory,
    read_json,
    read_manifest,
    write_atomic,
    write_manifest,
)
from amips.locks import locked
from amips.signing import SIGNATURE, Trusted, approval
from amips.untrusted import read_bounded

MANIFEST, TEXT_MANIFEST = "manifest.json", "text.json"
FORMAT = 4
LOCK = ".lock"
WRITER = ".writer"  # held by who changes the bundle
DATA = re.compile(r"data-[0-9a-f]{12}")
FILE = re.compile(r"[a-z]+\.(npy|json|safetensors|arrow)")  # what may be in it
_PREVIOUS = r"previous-[0-9a-f]{12}\.json"
_NAMES = "|".join([_PREVIOUS, *(re.escape(name) for name in (MANIFEST, TEXT_MANIFEST, SIGNATURE))])
_PARTIAL = rf"\.({_NAMES})\.\d+\.tmp"
OWN = re.compile(
    rf"{DATA.pattern}|changes-[0-9a-f]{{12}}\.log|{_PARTIAL}|\.lock|\.writer|{_PREVIOUS}"
    rf"|{re.escape(SIGNATURE)}"  # the signature of the manifest before
)  # what a save may leave behind
TEXT_OWN = re.compile(rf"text-[0-9a-f]{{12}}|{_PARTIAL}")  # what adding texts may

NOTHING = re.compile("")

Write = Callable[[Path], tuple[dict[str, Any], list[str]]]
Previous = Literal["keep", "this", "drop"]


def replace_bundle(
    out: str | Path, write: Write, *, writing: bool = False, previous: Previous | None = None
) -> None:
    """Write a bundle, or replace one.

    Args:
        write: puts files into the data directory that it is called with; returns what the manifest is to say,
            and the names of the files.
        writing: whether the caller is the one who changes the bundle; otherwise it is refused while another
            does: its changes would be lost.
        previous: of the version to go back to: "keep" it, make it "this" one, or "drop" it; by default
            whoever changes a bundle keeps it, and whoever writes another drops it.
    """
    out = check_bundle_place(out)
    fields = {"kind": "bundle", "format": FORMAT, "amips": version.__version__}
    # Two saves at a time would clear away each other's data.
    with (
        locked(out / LOCK, make=True),
        nullcontext() if writing else locked(out / WRITER, busy_writer(out)),
    ):
        previous = previous or ("keep" if writing else "drop")
        data, before = out / f"data-{_new_id()}", None
        if previous == "this":
            before = MANIFEST
        elif previous == "keep" and has_previous(out):
            before = previous_manifest(out)
        if before is None:
            _replace(out, MANIFEST, data, fields, write, OWN)
            return
        manifest, name = read_bounded(out / before, BundleError), data_name(out, before)

        def write_both(folder: Path) -> tuple[dict[str, Any], list[str]]:
            result = write(folder)
            write_atomic(out / _previous_of(folder.name), manifest)
            return result

        stays = rf"{_previous_of(data.name)}|{name}|changes-{name.removeprefix('data-')}\.log"
        _replace(out, MANIFEST, data, fields, write_both, OWN, re.compile(stays))


def _previous_of(data: str) -> str:
    """The name of the manifest before that of a data directory: both become valid by the same rename."""
    return f"previous-{data.removeprefix('data-')}.json"


def has_previous(path: Path) -> bool:
    """Whether there is a version to go back to."""
    return (path / _previous_of(data_name(path))).exists()


def previous_manifest(path: Path) -> str:
    """The name of the manifest of the version to go back to; BundleError if there is none."""
    if not has_previous(path):
        raise BundleError(f"{path} was not refitted: there is nothing to go back to")
    return _previous_of(data_name(path))


def busy_writer(path: Path) -> BundleError:
    """What is raised where somebody else changes the bundle."""
    return BundleError(
        f"{path} is being changed by another process, or another index of this one: close that first, or wait"
    )


def data_name(path: Path, manifest: str = MANIFEST) -> str:
    """The name of the data directory of a bundle."""
    return _checked_data(path, read_json(path / manifest, BundleError))


def _checked_data(path: Path, manifest: dict[str, Any]) -> str:
    name = manifest.get("data")
    if not isinstance(name, str) or not DATA.fullmatch(name):
        raise BundleError(f"{path / MANIFEST} is damaged: data={name!r}, expected data-<12 digits>")
    return name


def replace_texts(bundle: Path, fields: dict[str, Any], write: Write) -> None:
    """Write the texts of a bundle, or replace them; arguments as of `replace_bundle`.

    Args:
        fields: kind and format of their manifest.
    """
    with locked(bundle / LOCK):
        _replace(bundle, TEXT_MANIFEST, bundle / f"text-{_new_id()}", fields, write, TEXT_OWN)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _replace(
    out: Path,
    manifest: str,
    data: Path,
    fields: dict[str, Any],
    write: Write,
    own: "re.Pattern[str]",
    stays: "re.Pattern[str]" = NOTHING,
) -> None:
    """Write a data directory, then the manifest that names it, then remove what else is its `own`.

    What `stays` names stays.
    """
    try:
        data.mkdir()
        stated, files = write(data)
        for folder in (
            data,
            out,
            out.parent,
        ):  # names must be on disk before the manifest that relies on them
            fsync_directory(folder)
        listed = [f"{data.name}/{file}" for file in files]
        write_manifest(out, manifest, {**fields, "data": data.name, **stated}, listed)
    except BaseException as problem:
        # The last step can fail after its rename: what the manifest names stays.
        if not _names(out / manifest, data):
            shutil.rmtree(data, ignore_errors=True)
        if isinstance(problem, OSError):
            raise BundleError(f"{out} cannot be written: {problem.strerror or problem}") from None
        raise
    for left in out.iterdir():
        if left == data or stays.fullmatch(left.name):
            continue
        if own.fullmatch(left.name) and left.name not in (LOCK, WRITER):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _names(manifest: Path, data: Path) -> bool:
    """Whether a manifest is that of this data directory; one that cannot be read is of none."""
    try:
        return f'"{data.name}"'.encode() in read_bounded(manifest, BundleError)
    except BundleError:
        return False


def check_bundle_place(out: str | Path) -> Path:
    """The path of a bundle to be; BundleError if writing it there could harm anything else."""
    out = check_output(out, BundleError, what="a bundle", marks=[MANIFEST], own=OWN)
    if (out / MANIFEST).exists() and read_json(out / MANIFEST, BundleError).get("kind") != "bundle":
        raise BundleError(f"{out} exists and is not a bundle; {ADVICE}")
    return out


def read_bundle(
    path: Path, verify: bool, trusted: Trusted | None = None, name: str = MANIFEST
) -> tuple[dict[str, Any], Path, set[str]]:
    """The manifest, checked against itself and the files; the data directory; the names of its files.

    With `trusted`, a manifest that none of these keys signed is an error, and every file is verified.
    """
    approve = approval(path, name, trusted, BundleError)
    verify = verify or trusted is not None
    manifest = read_manifest(path, name, "bundle", FORMAT, BundleError, verify, approve)
    folder_name = _checked_data(path, manifest)
    data, listed = path / folder_name, set()
    for file in manifest["files"]:
        folder, _, plain = str(file).partition("/")
        if folder != folder_name or not FILE.fullmatch(plain):
            wrong = f"{file!r} is not the name of a file in {folder_name}"
            raise BundleError(f"{path / MANIFEST} is damaged: {wrong}")
        if data.is_symlink() or (data / plain).is_symlink():
            raise BundleError(f"{path / file} is a link; replace it by the file itself")
        listed.add(plain)
    return manifest, data, listed


def bundle_stamp(path: Path, manifest: str = MANIFEST) -> tuple[int, int] | None:
    """What changes when a bundle (or its texts, by their manifest) is replaced; None where there is none."""
    try:
        stat = (path / manifest).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
