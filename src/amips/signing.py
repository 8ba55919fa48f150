"""Signatures of directories: who vouches for a manifest, and so for every file whose SHA-256 it lists.

A hash in a manifest finds damage; whoever changes a file on purpose changes the hash too. A signature
(Ed25519) can be made only with a private key. `signature.json` stands beside the manifests and has one
signature of the SHA-256 of all of them, so that those of two signed directories cannot be mixed:

    {"kind": "signature", "format": 2, "key": <public key>, "files": {"manifest.json": <SHA-256>, ...},
     "signature": <signature>}

What is signed is `statement(files)`: a line that says what it is, then "SHA-256  name" in lines. The public
key in the file says who claims to have signed, and proves nothing: it is checked with the keys that a caller
trusts.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.files import check_output_file, write_json
from amips.untrusted import inside, parse_json, read_bounded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "signature.json"
KIND, FORMAT = "signature", 2
DOMAIN = "amips signature 2"  # a signature of anything else cannot be taken for one of these
KEY_BYTES = SIGNATURE_BYTES = 1 << 14  # more than such a file has: a PEM of Ed25519 has 120
PUBLIC = ".pub"
_LINE = re.compile(r"[0-9a-f]{64}  [\w./-]+", re.ASCII)  # of a statement: no name can look like two of them


@dataclass(frozen=True)
class Signature:
    """What `signature.json` says: the public key of who claims to have signed, SHA-256 by file, signature."""

    key: str
    files: dict[str, str]
    signature: bytes


Key = str | Path | bytes  # a file, or what stands in one: PEM
Trusted = Key | Sequence[Key]


def new_key(path: str | Path) -> tuple[Path, Path]:
    """Make a pair of keys: the private one at `path`, for its owner alone; the public one at `path`.pub.

    Returns both paths. A file that is there is never replaced: a private key that is gone cannot sign again.
    """
    with needs_extra("signing", "sign", "cryptography"):
        from cryptography.hazmat.primitives import serialization as s
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = check_output_file(path, AmipsError)
    public = private.with_name(private.name + PUBLIC)
    for file in (private, public):
        if os.path.lexists(file):
            raise AmipsError(f"{file} exists; choose another name for the new key")
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    shown = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    _write_new(private, secret, 0o600)
    _write_new(public, shown, 0o644)
    return private, public


def _write_new(path: Path, data: bytes, mode: int) -> None:
    # From the first moment with its mode, and never through a link or over a file that appeared meanwhile.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_signature(directory: Path, key: Key, contents: Mapping[str, bytes], error: type[AmipsError]) -> str:
    """Sign what is in files of `directory`, in place of the signature before; returns the public key as hex.

    Args:
        key: the private key, a file or PEM.
        contents: the bytes of each file that is signed, by its name.
    """
    private = _private_key(key, error)
    files = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    stated = {
        "kind": KIND,
        "format": FORMAT,
        "key": private.public_key().public_bytes_raw().hex(),
        "files": files,
        "signature": private.sign(statement(files)).hex(),
    }
    write_json(directory / SIGNATURE, stated)
    return str(stated["key"])


def statement(files: Mapping[str, str]) -> bytes:
    """What is signed: the SHA-256 of every file by its name, in the order of the names."""
    return "".join([f"{DOMAIN}\n", *(f"{files[name]}  {name}\n" for name in sorted(files))]).encode()


def approval(
    directory: Path, name: str, trusted: Trusted | None, error: type[AmipsError]
) -> Callable[[bytes], None] | None:
    """A function that raises `error` unless its bytes are signed, as the file `name`, by a trusted key.

    None where nobody is to be trusted in particular.
    """
    if trusted is None:
        return None
    keys = _public_keys(trusted, error)

    def approve(data: bytes) -> None:
        check_signature(directory, name, data, keys, error)

    return approve


def check_signature(
    directory: Path,
    name: str,
    data: bytes,
    keys: "Iterable[Ed25519PublicKey]",
    error: type[AmipsError],
) -> None:
    """Raise `error` unless one of the keys signed `data` as the file `name` of `directory`."""
    from cryptography.exceptions import InvalidSignature

    stated = read_signature(directory, error)
    if stated is None:
        raise error(f"{directory} is not signed; ask who made it to run amips sign, or do not demand it")
    # Each trusted key is tried on the statement itself: what the file says about the signer proves nothing.
    for key in keys:
        try:
            key.verify(stated.signature, statement(stated.files))
        except InvalidSignature:
            continue
        break
    else:
        raise error(f"{directory} is not signed by a trusted key: it was signed by another, or changed")
    if name not in stated.files:
        raise error(f"{directory / name} is not signed: it came after the signature")
    if stated.files[name] != hashlib.sha256(data).hexdigest():
        raise error(f"{directory / name} is not the one that was signed: it was changed after that")


def read_signature(directory: Path, error: type[AmipsError]) -> Signature | None:
    """What `signature.json` of a directory says; None if there is none. Nothing of it is checked yet."""
    if not os.path.lexists(directory / SIGNATURE):
        return None
    path = inside(directory, SIGNATURE, error)
    try:
        data = read_bounded(path, error, SIGNATURE_BYTES)
    except error:
        if os.path.lexists(path):
            raise
        return None  # the directory was replaced just now
    stated = parse_json(data, path, error)
    if (stated.get("kind"), stated.get("format")) != (KIND, FORMAT):
        raise error(f"{path} is not a signature of format {FORMAT}")
    try:
        files = dict(stated["files"])
        if not all(_LINE.fullmatch(f"{value}  {name}") for name, value in files.items()):
            raise ValueError
        return Signature(bytes.fromhex(stated["key"]).hex(), files, bytes.fromhex(stated["signature"]))
    except (KeyError, TypeError, ValueError):
        raise error(f"{path} is damaged: expected a key, files and a signature, in hexadecimal") from None


def _private_key(key: Key, error: type[AmipsError]) -> "Ed25519PrivateKey":
    with needs_extra("signing", "sign", "cryptography"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

    name, pem = _pem(key, error)
    try:
        private = load_pem_private_key(pem, password=None)
    except TypeError:
        raise error(f"{name} has a password, which cannot be asked for; save the key without one") from None
    except Exception:  # ValueError, and UnsupportedAlgorithm, which is none
        raise error(f"{name} is not a private key; make one with amips sign --new-key FILE") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise error(f"{name} is a key of another kind than Ed25519; make one with amips sign --new-key FILE")
    return private


def _public_keys(trusted: Trusted, error: type[AmipsError]) -> "list[Ed25519PublicKey]":
    with needs_extra("checking a signature", "sign", "cryptography"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if not isinstance(trusted, str | Path | bytes | list | tuple):
        stated = type(trusted).__name__
        raise error(f"trusted: expected public keys, each a file or PEM as bytes, got {stated}")
    keys = []
    for key in [trusted] if isinstance(trusted, (str, Path, bytes)) else trusted:
        name, pem = _pem(key, error)
        try:
            public = load_pem_public_key(pem)
        except Exception:  # ValueError, and UnsupportedAlgorithm, which is none
            raise error(f"{name} is not a public key; name the file that ends in {PUBLIC}") from None
        if not isinstance(public, Ed25519PublicKey):
            raise error(f"{name} is a key of another kind than Ed25519")
        keys.append(public)
    if not keys:
        raise error("no key to trust was named: trusted is empty")
    return keys


def _pem(key: Key, error: type[AmipsError]) -> tuple[str, bytes]:
    """A name for messages (never the key itself), and what stands in the file."""
    if isinstance(key, bytes):
        return "the key", key
    if not isinstance(key, (str, Path)):
        raise error(f"a key is a file or PEM as bytes, got {type(key).__name__}")
    return str(key), read_bounded(Path(key), error, KEY_BYTES)
