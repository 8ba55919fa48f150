"""Who may ask, and who may change: bearer tokens, and the names under which a local service is called."""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from amips.errors import AmipsError
from amips.serving.limits import LOOPBACK, Settings
from amips.serving.refusals import FORBIDDEN, UNAUTHORIZED, Refused
from amips.untrusted import open_regular

TOKEN, WRITE_TOKEN = "AMIPS_TOKEN", "AMIPS_WRITE_TOKEN"  # variables of the environment
SHORTEST, LONGEST = 16, 1024  # characters of a token
_KEY = secrets.token_bytes(32)


@dataclass(frozen=True)
class Tokens:
    """Digests of the tokens of a service; None where there is no token.

    Digests of equal length are compared, in constant time: how long it takes says nothing of a token.
    """

    read: bytes | None = None
    write: bytes | None = None

    @classmethod
    def of(cls, read: str | None, write: str | None) -> "Tokens":
        """Of the tokens themselves."""
        if read is not None and read == write:
            raise AmipsError("the token for changes is that for searching: give it one of its own")
        return cls(*(None if token is None else _digest(token.encode()) for token in (read, write)))

    def check(self, authorization: bytes, *, write: bool) -> None:
        """`Refused` unless the Authorization header of a request allows it."""
        scheme, _, token = authorization.partition(b" ")
        digest = _digest(token.strip()) if scheme.lower() == b"bearer" else b""
        may_write = self.write is not None and hmac.compare_digest(digest, self.write)
        may_read = self.read is None or hmac.compare_digest(digest, self.read)
        if write and self.write is None:
            raise Refused(FORBIDDEN, f"changes are off: start the service with {WRITE_TOKEN} set")
        if write and not may_write:
            known = self.read is not None and may_read
            text = "changes need the token for changes, as Authorization: Bearer TOKEN"
            raise Refused(FORBIDDEN if known else UNAUTHORIZED, text)
        if not write and not may_read and not may_write:
            raise Refused(UNAUTHORIZED, "this service needs a token, as Authorization: Bearer TOKEN")


def read_tokens(settings: Settings) -> Tokens:
    """The tokens that files or the environment name; an error if there must be one and is not."""
    tokens = Tokens.of(
        _token(settings.token_file, TOKEN, "--token-file"),
        _token(settings.write_token_file, WRITE_TOKEN, "--write-token-file"),
    )
    if tokens.read is None and not settings.local and not settings.insecure:
        raise AmipsError(
            f"{settings.host} can be reached from other machines: set {TOKEN}, or give --token-file FILE; "
            "--insecure serves everybody"
        )
    return tokens


@lru_cache(64)  # clients name the same again and again; what is refused is not kept
def check_host(host: bytes) -> None:
    """`Refused` unless a request to a local service without a token names this machine.

    Otherwise a page in a browser could ask it, under a name of its own that leads here.
    """
    name = host.decode("latin1").rsplit(":", 1)[0] if not host.endswith(b"]") else host.decode("latin1")
    if name.strip("[]").lower() not in LOOPBACK:
        raise Refused(FORBIDDEN, "this service has no token, and answers to localhost and 127.0.0.1 only")


def _token(file: Path | None, variable: str, option: str) -> str | None:
    """A token; None if there is none."""
    if file is not None:
        with open_regular(file, AmipsError) as opened:
            text, where = opened.read(2 * LONGEST).decode("latin1").strip(), f"{option} {file}"
    elif variable in os.environ:
        text, where = os.environ[variable].strip(), variable
    else:
        return None
    if not SHORTEST <= len(text) <= LONGEST or not text.isascii() or not text.isprintable() or " " in text:
        raise AmipsError(f"{where}: expected one word of {SHORTEST} to {LONGEST} characters, without accents")
    return text


def _digest(token: bytes) -> bytes:
    return hmac.new(_KEY, token, hashlib.sha256).digest()
