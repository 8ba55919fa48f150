"""Signing a bundle, and checking all that can be checked of one."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amips.errors import BundleError
from amips.files import read_manifest
from amips.locks import locked
from amips.search.bundle_directory import (
    FORMAT,
    LOCK,
    MANIFEST,
    TEXT_MANIFEST,
    WRITER,
    bundle_stamp,
    busy_writer,
    data_name,
)
from amips.search.bundle_texts import read_texts
from amips.search.changes import changes_file, read_changes
from amips.signing import Key, Trusted, approval, read_signature, write_signature

Approve = Callable[[bytes], None] | None


@dataclass(frozen=True)
class Verified:
    """What was checked of a bundle.

    Attributes:
        files: how many files have the SHA-256 that the manifests list.
        texts: whether those of the texts are among them.
        changes: how many changes there are since it was written, each whole.
        signed_by: the public key that the signature names, as hex; None without a signature. It proves
            nothing unless keys to trust were named.
    """

    files: int
    texts: bool
    changes: int
    signed_by: str | None


def sign(bundle: str | Path, key: Key) -> str:
    """Sign a bundle, with its texts, after every file of it was verified; returns the public key as hex.

    What is signed is one statement, of the SHA-256 of both manifests, and by the SHA-256 in them of every
    file: texts of another bundle do not go with it. A bundle that is replaced afterwards is unsigned again.

    One with changes is refused: they are in no manifest.

    Args:
        bundle: the bundle directory.
        key: the private key (Ed25519), a file or PEM as bytes.
    """
    bundle = Path(bundle)
    if bundle_stamp(bundle) is None:
        raise BundleError(f"{bundle} is not a finished bundle: it has no {MANIFEST}")
    contents: dict[str, bytes] = {}
    # Against changes, and against a save, which would replace what was verified.
    with locked(bundle / WRITER, busy_writer(bundle)), locked(bundle / LOCK):
        if os.path.lexists(changes_file(bundle, data_name(bundle))):
            raise BundleError(f"{bundle} has changes, which a signature leaves out: compact it, then sign it")

        def keep(name: str) -> Approve:
            return lambda data: contents.update({name: data})

        _read_manifests(bundle, keep)
        return write_signature(bundle, key, contents, BundleError)


def verify(bundle: str | Path, trusted: Trusted | None = None) -> Verified:
    """Check every file of a bundle and of its texts; BundleError if one has changed.

    Args:
        bundle: the bundle directory.
        trusted: public keys, as in `load`: what none of them signed is an error too.
    """
    bundle = Path(bundle)
    while True:
        before = _stamps(bundle)
        try:
            manifests = _read_manifests(bundle, lambda name: approval(bundle, name, trusted, BundleError))
            signature = read_signature(bundle, BundleError)
            changes = sum(1 for _ in read_changes(changes_file(bundle, data_name(bundle))))
        except BundleError:
            if _stamps(bundle) != before:
                continue  # it was replaced meanwhile
            raise
        files = sum(len(manifest["files"]) for manifest in manifests)
        return Verified(files, len(manifests) > 1, changes, None if signature is None else signature.key)


def _stamps(bundle: Path) -> list[tuple[int, int] | None]:
    return [bundle_stamp(bundle, name) for name in (MANIFEST, TEXT_MANIFEST)]


def _read_manifests(bundle: Path, approve: Callable[[str], Approve]) -> list[dict[str, Any]]:
    """The manifests of a bundle and of its texts, every file verified; `approve` is called with each name."""
    manifests = [read_manifest(bundle, MANIFEST, "bundle", FORMAT, BundleError, True, approve(MANIFEST))]
    if os.path.lexists(bundle / TEXT_MANIFEST):
        manifests.append(read_texts(bundle, approve(TEXT_MANIFEST))[0])
    return manifests
