"""Bodies of requests: read within limits, and parsed without keeping others waiting.

Python's JSON parser lets no other thread go on while it is at work, which for megabytes is longer than a
request may take. Large bodies are therefore parsed in a thread, with functions of Python for the numbers: in
each of them another thread may go on. What has more values than any request needs is not parsed at all.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson

from amips.serving.refusals import BAD_REQUEST, TOO_LARGE, ClientGone, Refused, busy

Receive = Callable[[], Awaitable[Any]]
Result = TypeVar("Result")

LARGE = 1 << 16  # bytes, from which on a body is parsed in a thread
MOST_ASIDE = 8  # large bodies that wait for that thread
FIELDS = 64  # values and lists that a search may have beside its queries and its filter


class Bodies:
    """Reads bodies; all that are being read, or wait for an answer, take so many bytes, at most."""

    def __init__(self, limit: int, together: int | None = None) -> None:
        self._limit, self._together, self._bytes = limit, together or 32 * limit, 0

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """The body of a request; `Refused` as soon as it is known to be too large, however it is sent."""
        stated = headers.get("content-length", "0")
        if stated.isdecimal() and len(stated) < 20 and int(stated) > self._limit:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                self._bytes += len(part)
                if size > self._limit:
                    raise self._too_large()
                if self._bytes > self._together:
                    raise busy("too many large requests at a time: try again later")
                parts.append(part)
                if not message.get("more_body", False):
                    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        finally:
            self._bytes -= size

    @contextmanager
    def counted(self, size: int) -> Iterator[None]:
        """Count what came of a body that was read, for as long as it waits."""
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size

    def _too_large(self) -> Refused:
        return Refused(TOO_LARGE, f"the body is too large: at most {self._limit:,} bytes are taken at a time")


class Aside:
    """A thread for what would hold up the loop that reads requests: parsing large ones, and their answers."""

    def __init__(self, most: int = MOST_ASIDE) -> None:
        self._most, self._waiting, self._thread = most, 0, ThreadPoolExecutor(1, "amips-json")

    async def run(self, call: Callable[[], Result], *, refuse: bool = True) -> Result:
        """What a call returns; `Refused` (503) if many wait already, unless it is not to be refused."""
        if refuse and self._waiting >= self._most:
            raise busy("too many large requests at a time: try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def json_object(body: bytes, names: "set[str] | frozenset[str]") -> dict[str, Any]:
    """The JSON object of a body, with these fields alone."""
    try:
        value = _parsed(body)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise Refused(BAD_REQUEST, f"the body is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise Refused(BAD_REQUEST, f"expected a JSON object with {in_words(names)}")
    if unknown := value.keys() - names:
        raise Refused(BAD_REQUEST, f"unknown field {min(unknown)[:60]!r}: expected {in_words(names)}")
    return value


def _parsed(body: bytes) -> Any:
    if len(body) < LARGE:
        try:
            return orjson.loads(body)  # twelve times as fast as Python's own
        except orjson.JSONDecodeError:
            return json.loads(body)  # which takes NaN, so that a better line can be said of it
    # Functions of Python, in place of float and int, which the parser would call without a pause.
    return json.loads(body, parse_float=_float, parse_int=_int)


def check_values(body: bytes, rows: int, values: int) -> None:
    """`Refused` if a JSON body has more lists or values than so many rows and values can need.

    Signs are counted, also those inside of strings: where there are strings, there may be as many more.
    """
    more = FIELDS + body.count(b'"')
    if body.count(b"[") > rows + more or body.count(b",") > values + more:
        raise Refused(TOO_LARGE, f"too many values: at most {values:,} in {rows:,} rows are taken at a time")


def in_words(names: Iterable[str]) -> str:
    """Names, one after the other."""
    return ", ".join(sorted(names))


def _float(digits: str) -> float:
    return float(digits)


def _int(digits: str) -> int:
    return int(digits)
