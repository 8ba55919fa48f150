"""The directory of a bundle, whatever it holds: replaced in one step, checked before it is read.

    bundle/
      manifest.json            what is here: versions, sizes, SHA-256, and what was measured
      data-<id>/               everything else

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
    locked,
    read_json,
    read_manifest,
    write_manifest,
)
from amips.signing import SIGNATURE, Trusted, approval

MANIFEST = "manifest.json"
FORMAT = 3
LOCK = ".lock"
DATA = re.compile(r"data-[0-9a-f]{12}")
FILE = re.compile(r"[a-z]+\.(npy|json|safetensors)")  # what may be in it
OWN = re.compile(
    rf"{DATA.pattern}|\.({re.escape(MANIFEST)}|{re.escape(SIGNATURE)})\.\d+\.tmp|\.lock"
    rf"|{re.escape(SIGNATURE)}"  # of the manifest before
)  # what a save may leave behind


def replace_bundle(out: str | Path, write: Callable[[Path], tuple[dict[str, Any], list[str]]]) -> None:
    """Write a bundle, or replace one.

    Args:
        write: puts files into the data directory that it is called with; returns what the manifest is to say,
            and the names of the files.
    """
    out = check_bundle_place(out)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK):  # two saves at a time would clear away each other's data
        data = out / f"data-{uuid.uuid4().hex[:12]}"
        try:
            _write(out, data, write)
        except BaseException as problem:
            # The last step can fail after its rename: what the manifest names stays.
            if not (out / MANIFEST).exists() or data.name not in (out / MANIFEST).read_text():
                shutil.rmtree(data, ignore_errors=True)
            if isinstance(problem, OSError):
                raise BundleError(f"{out} cannot be written: {problem.strerror or problem}") from None
            raise
        for left in out.iterdir():
            if left != data and OWN.fullmatch(left.name) and left.name != LOCK:
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _write(out: Path, data: Path, write: Callable[[Path], tuple[dict[str, Any], list[str]]]) -> None:
    data.mkdir()
    stated, files = write(data)
    fields = {
        "kind": "bundle",
        "format": FORMAT,
        "amips": version.__version__,
        "data": data.name,
        **stated,
    }
    fsync_directory(data)  # its names must be on disk before the manifest that relies on them
    write_manifest(out, MANIFEST, fields, [f"{data.name}/{file}" for file in files])


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


def bundle_stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a bundle is replaced; None where there is none."""
    try:
        stat = (path / MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
