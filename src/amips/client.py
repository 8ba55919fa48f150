"""A client of `amips serve`: an object that is searched like an index."""

import os
import random
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_flag, check_number, check_whole, refused
from amips.errors import AmipsError, VectorError
from amips.vectors import Floats

RAW = "application/octet-stream"
AGAIN = (429, 502, 503, 504)  # statuses after which a request that changes nothing may be sent again
LONGEST_IN_ADDRESS = 4000  # characters of a condition
LONGEST_WAIT = 30.0  # seconds between two tries, whatever the service says


def connect(
    address: str,
    *,
    token: str | None = None,
    write_token: str | None = None,
    timeout: float = 30.0,
    retries: int = 4,
    transport: httpx.BaseTransport | None = None,
) -> "RemoteIndex":
    """An index that a service has: `search` as of `amips.search.Index`.

    Args:
        address: of the service, such as http://127.0.0.1:8000.
        token, write_token: for searches, for changes; by default AMIPS_TOKEN and AMIPS_WRITE_TOKEN are asked.
        timeout: seconds for one try of a request.
        retries: tries after the first, of what changes nothing: searches, and what is only looked up.
        transport: of httpx, in place of its own.
    """
    if not _is_address(address):
        raise refused("address", address, "one such as http://127.0.0.1:8000")
    token = _token("token", os.environ.get("AMIPS_TOKEN") if token is None else token)
    changing = os.environ.get("AMIPS_WRITE_TOKEN") if write_token is None else write_token
    return RemoteIndex(
        httpx.Client(
            base_url=address,
            timeout=check_number("timeout", timeout, above=0),
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        ),
        token,
        _token("write_token", changing),
        check_whole("retries", retries, 0),
    )


class RemoteIndex:
    """An index in another process, or on another machine. Threads may share it."""

    def __init__(
        self,
        http: httpx.Client,
        token: str | None,
        write_token: str | None,
        retries: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._retries, self._sleep = http, retries, sleep
        self._token, self._write_token = token, write_token
        self._facts: dict[str, Any] | None = None

    def __enter__(self) -> "RemoteIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def info(self) -> dict[str, Any]:
        """What is served now: n, d, the recall, limits, and so on."""
        self._facts = self._json(self._send("GET", "/info"))
        return self._facts

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self._value(self._known, "d"))

    @property
    def n(self) -> int:
        """The number of keys that can be found now."""
        return int(self._value(self.info, "n"))

    def __len__(self) -> int:
        return self.n

    @property
    def _known(self) -> dict[str, Any]:
        return self._facts if self._facts is not None else self.info

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        filter: Any = None,
        where: str | None = None,
        recall: float | None = None,
        probes: int | None = None,
        min_mass: float | None = None,
        margin: float | None = None,
        best_effort: bool = False,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids [m, k], best first.

        As `amips.search.Index.search`, which explains the arguments; `filter` is a mask or ids, `where` a
        condition as text. `threads` are the service's, and a query that is not finite is always an error.
        What is too much for one request is sent in several.
        """
        rows = _rows(x)
        options: dict[str, Any] = {"k": check_whole("k", k, 1), "recall": recall, "probes": probes}
        if where is not None and not isinstance(where, str):
            raise refused("where", where, "a condition as text")
        options |= {"min_mass": min_mass, "margin": margin, "where": where}
        if check_flag("best_effort", best_effort):
            options["best_effort"] = True
        options = {name: _plain(value) for name, value in options.items() if value is not None}
        if filter is not None:
            options["filter"] = _chosen(filter)
        if not len(rows):
            return np.empty((0, options["k"]), np.float32), np.empty((0, options["k"]), np.int64)
        limits = self._value(self._known, "limits")
        step = max(1, min(int(limits["rows"]), int(limits["body"]) // max(1, 4 * rows.shape[1])))
        if _in_json(options):  # in which a number takes 20 bytes or so
            step = max(1, step // 8)
        parts = [self._search(rows[low : low + step], options) for low in range(0, len(rows), step)]
        scores, ids = zip(*parts, strict=True)
        return np.concatenate(scores), np.concatenate(ids)

    def _search(self, rows: Floats, options: dict[str, Any]) -> tuple[Floats, NDArray[Any]]:
        if _in_json(options):
            answer = self._send(
                "POST", "/search", json={**options, "queries": rows.tolist()}, headers={"accept": RAW}
            )
        else:
            answer = self._send(
                "POST",
                "/search",
                content=rows.astype("<f4", copy=False).tobytes(),
                params=options,
                headers={"content-type": RAW, "accept": RAW},
            )
        shape = (len(rows), options["k"])
        if answer.headers.get("content-type", "").startswith(RAW):
            return _from_bytes(answer.content, shape)
        values = self._json(answer)
        try:
            scores = np.array(values["scores"], np.float32).reshape(shape)
            ids = np.array(values["ids"]).reshape(shape)
        except (KeyError, TypeError, ValueError):
            raise AmipsError("the service answered something else than scores and ids") from None
        return np.where(np.isnan(scores), np.float32(-np.inf), scores), ids  # null: there is no result

    def ask(self, question: str, k: int = 5, **options: Any) -> list[dict[str, Any]]:
        """The texts that answer a question, best first: score, id, title, text."""
        answer = self._send("POST", "/ask", json={"question": question, "k": k, **options})
        hits: list[dict[str, Any]] = self._value(self._json(answer), "hits")
        return hits

    def add(self, keys: Any, ids: Any = None, *, attributes: Any = None) -> NDArray[Any]:
        """Add keys [m, d]; their ids. `attributes` is a list of values by the name of a column.

        What changes something is sent once: after an error nobody knows whether it was done, look it up.
        """
        rows = _rows(keys)
        if ids is None and attributes is None:
            body: dict[str, Any] = {"content": rows.astype("<f4", copy=False).tobytes()}
            body["headers"] = {"content-type": RAW}
        else:
            body = {"json": self._change(rows, ids, attributes)}
        return np.array(self._value(self._json(self._send("POST", "/add", write=True, **body)), "ids"))

    def remove(self, ids: Any) -> int:
        """Remove keys by their ids; how many there were."""
        answer = self._send("POST", "/remove", write=True, json=self._change(None, ids, None))
        return int(self._value(self._json(answer), "removed"))

    def update(self, ids: Any, keys: Any, *, attributes: Any = None) -> None:
        """Put other keys in the place of those with these ids."""
        self._send("POST", "/update", write=True, json=self._change(_rows(keys), ids, attributes))

    def reload(self) -> bool:
        """Have the service take in what others changed in its bundle; whether there was anything."""
        changed = bool(self._value(self._json(self._send("POST", "/reload", write=True)), "changed"))
        self._facts = None
        return changed

    @staticmethod
    def _change(keys: Floats | None, ids: Any, attributes: Any) -> dict[str, Any]:
        if keys is not None and not np.isfinite(keys).all():  # which JSON has no words for
            raise VectorError(f"key {int(np.argmin(np.isfinite(keys).all(axis=1)))} is not finite; repair it")
        body: dict[str, Any] = {} if keys is None else {"keys": keys.tolist()}
        if ids is not None:
            body["ids"] = np.atleast_1d(np.asarray(ids)).tolist()
        if attributes is not None:
            body["attributes"] = _columns(attributes)
        return body

    def _send(self, method: str, path: str, *, write: bool = False, **content: Any) -> httpx.Response:
        """An answer of status 200; AmipsError in one line of anything else."""
        if self._http.is_closed:
            raise AmipsError(f"the connection to {self._http.base_url} is closed: amips.connect again")
        token = self._write_token if write else self._token
        headers = content.pop("headers", {}) | ({} if token is None else {"authorization": f"Bearer {token}"})
        for left in range(self._retries, -1, -1):
            wait = min(LONGEST_WAIT, 0.1 * 2.0 ** (self._retries - left)) * (0.5 + random.random())
            try:
                answer = self._http.request(method, path, headers=headers, **content)
            except httpx.TransportError as problem:
                # One that was not sent for want of a connection can be sent again, whatever it is. One whose
                # answer does not come in time may still be worked at: another would be more of the same.
                unsent = isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)
                if left and (unsent or not (write or isinstance(problem, httpx.TimeoutException))):
                    self._sleep(wait)
                    continue
                raise self._unreachable(problem) from None
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError) as problem:
                raise AmipsError(f"{self._http.base_url}: {problem or type(problem).__name__}") from None
            if answer.status_code == 200:
                return answer
            if write or not left or answer.status_code not in AGAIN:
                break
            self._sleep(max(wait, _retry_after(answer)))
        raise self._error(answer)

    def _unreachable(self, problem: Exception) -> AmipsError:
        return AmipsError(f"{self._http.base_url} does not answer: {str(problem) or type(problem).__name__}")

    def _error(self, answer: httpx.Response) -> AmipsError:
        try:
            reason = str(answer.json()["error"])
        except (ValueError, KeyError, TypeError):
            reason = answer.reason_phrase or "no reason"
        kind = VectorError if answer.status_code == 400 else AmipsError
        return kind(f"{self._http.base_url} answered {answer.status_code}: {reason}")

    def _json(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            values = answer.json()
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise AmipsError(f"{self._http.base_url} is not a service of amips: it answered no JSON object")
        return values

    def _value(self, values: dict[str, Any], name: str) -> Any:
        if name not in values:
            raise AmipsError(f"{self._http.base_url} is not a service of amips: it answered without {name!r}")
        return values[name]

    def __repr__(self) -> str:
        return f"<RemoteIndex at {self._http.base_url}>"


def _rows(x: Any) -> Floats:
    """Queries or keys as float32 [m, d]; the service checks their values."""
    try:
        with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is refused
            rows = np.ascontiguousarray(x, np.float32)
    except (TypeError, ValueError):
        raise VectorError("vectors are not a table of numbers [m, d]") from None
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not rows.shape[1]:
        raise VectorError(f"vectors of shape {list(rows.shape)}: expected [m, d]")
    return rows


def _is_address(address: Any) -> bool:
    try:
        parts = urlsplit(address)
        plain = parts.port is None or parts.port > 0  # of a wrong port, ValueError
    except (ValueError, TypeError, AttributeError):
        return False
    known = isinstance(address, str) and parts.scheme in ("http", "https") and bool(parts.hostname)
    return known and plain and not parts.query and not parts.fragment


def _token(name: str, token: Any) -> str | None:
    """A token that a header can have; what is wrong is said without it."""
    if token is None:
        return None
    if not isinstance(token, str) or not token.strip().isascii() or not token.strip().isprintable():
        raise AmipsError(f"{name}: expected one word, without accents")
    return token.strip() or None


def _chosen(chosen: Any) -> Any:
    """A filter as a list of ids; a mask as its bits, of which JSON would take 6 bytes each."""
    try:
        values = np.asarray(chosen)
    except ValueError:
        values = np.empty((0, 0))
    if values.dtype == bool and values.ndim == 1:
        return {"n": len(values), "bits": b64encode(np.packbits(values).tobytes()).decode()}
    plain: list[Any] = values.tolist() if values.ndim == 1 else [None]
    if not all(isinstance(value, int | str) for value in plain):
        raise AmipsError("filter: expected a mask, or ids, all whole numbers or all strings")
    return plain


def _columns(attributes: Any) -> dict[str, list[Any]]:
    """Attributes as lists; those of an Arrow table, too."""
    if hasattr(attributes, "to_pydict"):
        attributes = attributes.to_pydict()
    if not isinstance(attributes, Mapping):
        raise refused("attributes", attributes, "a list of values by the name of a column")
    return {str(name): [_plain(value) for value in values] for name, values in attributes.items()}


def _in_json(options: dict[str, Any]) -> bool:
    """Whether the options are too many for an address."""
    return "filter" in options or len(options.get("where", "")) > LONGEST_IN_ADDRESS


def _from_bytes(content: bytes, shape: tuple[int, int]) -> tuple[Floats, NDArray[Any]]:
    count = shape[0] * shape[1]
    if len(content) != 12 * count:
        raise AmipsError(f"the service answered {len(content):,} bytes: expected {12 * count:,}")
    scores = np.frombuffer(content, "<f4", count).astype(np.float32).reshape(shape)
    return scores, np.frombuffer(content, "<i8", count, 4 * count).astype(np.int64).reshape(shape)


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that the service asks to wait; 0 if it does not say."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(answer.headers.get("retry-after", "0"))))
    except ValueError:  # a date
        return 0.0
