"""The directory of a bundle, whatever it holds: replaced in one step, checked before it is read.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, and what was measured
      data-<id>/               everything else
      text.json, text-<id>/    the same for the texts of the keys, if there are any

A new version is written into a data directory of its own, and then the manifest is replaced by one
rename. Before that moment the old bundle is whole, after it the new one is; what is left over of the
other is removed.
"""

import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amips import version
from amips.errors import BundleError
from amips.files import (
    ADVICE,
    check_output,
    fsync_directory,
    read_json,
    read_manifest,
    write_manifest,
)
from amips.locks import locked
from amips.signing import SIGNATURE, Trusted, approval
from amips.untrusted import read_bounded

MANIFEST, TEXT_MANIFEST = "manifest.json", "text.json"
FORMAT = 3
LOCK = ".lock"
DATA = re.compile(r"data-[0-9a-f]{12}")
FILE = re.compile(r"[a-z]+\.(npy|json|safetensors)")  # what may be in it
_NAMES = "|".join(re.escape(name) for name in (MANIFEST, TEXT_MANIFEST, SIGNATURE))
_PARTIAL = rf"\.({_NAMES})\.\d+\.tmp"
OWN = re.compile(
    rf"{DATA.pattern}|{_PARTIAL}|\.lock|{re.escape(SIGNATURE)}"  # the signature of the manifest before
)  # what a save may leave behind
TEXT_OWN = re.compile(rf"text-[0-9a-f]{{12}}|{_PARTIAL}")  # what adding texts may

Write = Callable[[Path], tuple[dict[str, Any], list[str]]]


def replace_bundle(out: str | Path, write: Write) -> None:
    """Write a bundle, or replace one.

    Args:
        write: puts files into the data directory that it is called with; returns what the manifest is to say,
            and the names of the files.
    """
    out = check_bundle_place(out)
    fields = {"kind": "bundle", "format": FORMAT, "amips": version.__version__}
    with locked(out / LOCK, make=True):  # two saves at a time would clear away each other's data
        _replace(out, MANIFEST, out / f"data-{_new_id()}", fields, write, OWN)


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
    out: Path, manifest: str, data: Path, fields: dict[str, Any], write: Write, own: "re.Pattern[str]"
) -> None:
    """Write a data directory, then the manifest that names it, then remove what else is its `own`."""
    try:
        data.mkdir()
        stated, files = write(data)
        fsync_directory(data)  # its names must be on disk before the manifest that relies on them
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
        if left != data and own.fullmatch(left.name) and left.name != LOCK:
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
    path: Path, verify: bool, trusted: Trusted | None = None
) -> tuple[dict[str, Any], Path, set[str]]:
    """The manifest, checked against itself and the files; the data directory; the names of its files.

    With `trusted`, a manifest that none of these keys signed is an error, and every file is verified.
    """
    approve = approval(path, MANIFEST, trusted, BundleError)
    verify = verify or trusted is not None
    manifest = read_manifest(path, MANIFEST, "bundle", FORMAT, BundleError, verify, approve)
    name = manifest.get("data")
    if not isinstance(name, str) or not DATA.fullmatch(name):
        raise BundleError(f"{path / MANIFEST} is damaged: data={name!r}, expected data-<12 digits>")
    data, listed = path / name, set()
    for file in manifest["files"]:
        folder, _, plain = str(file).partition("/")
        if folder != name or not FILE.fullmatch(plain):
            raise BundleError(f"{path / MANIFEST} is damaged: {file!r} is not the name of a file in {name}")
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
