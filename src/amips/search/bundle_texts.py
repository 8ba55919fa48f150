"""The texts of a bundle's keys, in its directory: written in one step, checked before they are read.

- `text.json`: the encoder, the fingerprint of the keys, size and SHA-256; written last.
- `text-<id>/keys.jsonl`: line i is the text of key i.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amips.errors import BundleError
from amips.files import read_manifest, sha256
from amips.search.bundle_directory import TEXT_MANIFEST, read_bundle, replace_texts
from amips.untrusted import inside

KIND, FORMAT = "texts", 2
TEXTS = "keys.jsonl"
_LISTED = re.compile(rf"text-[0-9a-f]{{12}}/{re.escape(TEXTS)}")


def write_texts(bundle: Path, source: Path, digest: str, stated: dict[str, Any]) -> None:
    """Put a copy of the texts beside a bundle, in place of those before; BundleError if of other keys.

    Args:
        source: a .jsonl file, line i the text of key i.
        digest: the SHA-256 that it must have.
        stated: what the manifest is to say of them: the "encoder", and the fingerprint of the "keys".
    """

    def check_keys() -> None:
        if read_bundle(bundle, verify=False)[0].get("keys") != stated["keys"]:
            raise BundleError(f"{bundle} does not hold the keys of {source.parent}")

    def write(data: Path) -> tuple[dict[str, Any], list[str]]:
        check_keys()  # again: a save may have just let go of the bundle
        shutil.copyfile(source, data / TEXTS)
        if sha256(data / TEXTS) != digest:
            raise BundleError(f"{source} has changed since amips embed wrote it")
        return stated, [TEXTS]

    check_keys()  # and that there is a bundle
    replace_texts(bundle, {"kind": KIND, "format": FORMAT}, write)


def read_texts(bundle: Path, approve: Callable[[bytes], None] | None = None) -> tuple[dict[str, Any], Path]:
    """The manifest of a bundle's texts, checked, and the path of their file, verified."""
    manifest = read_manifest(bundle, TEXT_MANIFEST, KIND, FORMAT, BundleError, True, approve)
    listed = [str(name) for name in manifest["files"]]
    if len(listed) != 1 or not _LISTED.fullmatch(listed[0]):
        raise BundleError(f"{bundle / TEXT_MANIFEST} is damaged: it does not list {TEXTS} alone")
    return manifest, inside(bundle, listed[0], BundleError)
