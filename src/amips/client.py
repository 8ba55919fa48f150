"""A client of `amips serve`: an object that is searched like an index."""

import os
import random
import time
from collections.abc import Callable
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
        token, write_token: for searching and for changes; by default AMIPS_TOKEN and AMIPS_WRITE_TOKEN of the
            environment.
        timeout: seconds for one try of a request.
        retries: tries after the first, of what changes nothing: searches, and what is only looked up.
        transport: of httpx, in place of its own.
    """
    parts = urlsplit(address) if isinstance(address, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise refused("address", address, "one such as http://127.0.0.1:8000")
    return RemoteIndex(
        httpx.Client(
            base_url=address,
            timeout=check_number("timeout", timeout, above=0),
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        ),
        token if token is not None else os.environ.get("AMIPS_TOKEN"),
        write_token if write_token is not None else os.environ.get("AMIPS_WRITE_TOKEN"),
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
        self._token, self._write_token = token or write_token, write_token
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
        return int(self._known["d"])

    @property
    def n(self) -> int:
        """The number of keys that can be found now."""
        return int(self.info["n"])

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
        condition as text. What is too much for one request is sent in several.
        """
        rows = _rows(x)
        options: dict[str, Any] = {"k": check_whole("k", k, 1), "recall": recall, "probes": probes}
        options |= {"min_mass": min_mass, "margin": margin, "where": where}
        if check_flag("best_effort", best_effort):
            options["best_effort"] = True
        options = {name: _plain(value) for name, value in options.items() if value is not None}
        if filter is not None:
            options["filter"] = np.asarray(filter).tolist()
        if not len(rows):
            return np.empty((0, options["k"]), np.float32), np.empty((0, options["k"]), np.int64)
        limits = self._known["limits"]
        step = max(1, min(int(limits["rows"]), int(limits["body"]) // max(1, 4 * rows.shape[1])))
        if filter is not None:  # in JSON, in which a number takes 20 bytes or so
            step = max(1, step // 8)
        parts = [self._search(rows[low : low + step], options) for low in range(0, len(rows), step)]
        scores, ids = zip(*parts, strict=True)
        return np.concatenate(scores), np.concatenate(ids)

    def _search(self, rows: Floats, options: dict[str, Any]) -> tuple[Floats, NDArray[Any]]:
        if "filter" in options:
            answer = self._send(
                "POST", "/search", json={**options, "queries": rows.tolist()}, headers={"accept": RAW}
            )
        else:
            answer = self._send(
                "POST",
                "/search",
                content=rows.astype("<f4", copy=False).tobytes(),
                params={name: _word(value) for name, value in options.items()},
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
        hits: list[dict[str, Any]] = self._json(answer)["hits"]
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
        return np.array(self._json(self._send("POST", "/add", write=True, **body))["ids"])

    def remove(self, ids: Any) -> int:
        """Remove keys by their ids; how many there were."""
        answer = self._send("POST", "/remove", write=True, json=self._change(None, ids, None))
        return int(self._json(answer)["removed"])

    def update(self, ids: Any, keys: Any, *, attributes: Any = None) -> None:
        """Put other keys in the place of those with these ids."""
        self._send("POST", "/update", write=True, json=self._change(_rows(keys), ids, attributes))

    def reload(self) -> bool:
        """Have the service take in what others changed in its bundle; whether there was anything."""
        changed = bool(self._json(self._send("POST", "/reload", write=True))["changed"])
        self._facts = None
        return changed

    @staticmethod
    def _change(keys: Floats | None, ids: Any, attributes: Any) -> dict[str, Any]:
        body: dict[str, Any] = {} if keys is None else {"keys": keys.tolist()}
        if ids is not None:
            body["ids"] = np.atleast_1d(np.asarray(ids)).tolist()
        if attributes is not None:
            body["attributes"] = {name: list(values) for name, values in attributes.items()}
        return body

    def _send(self, method: str, path: str, *, write: bool = False, **content: Any) -> httpx.Response:
        """An answer of status 200; AmipsError in one line of anything else."""
        token = self._write_token if write else self._token
        headers = content.pop("headers", {}) | ({} if token is None else {"authorization": f"Bearer {token}"})
        for left in range(self._retries, -1, -1):
            wait = min(LONGEST_WAIT, 0.1 * 2.0 ** (self._retries - left)) * (0.5 + random.random())
            try:
                answer = self._http.request(method, path, headers=headers, **content)
            except httpx.TransportError as problem:
                # One that was not sent for want of a connection can be sent again, whatever it is.
                if left and (not write or isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)):
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


def _from_bytes(content: bytes, shape: tuple[int, int]) -> tuple[Floats, NDArray[Any]]:
    count = shape[0] * shape[1]
    if len(content) != 12 * count:
        raise AmipsError(f"the service answered {len(content):,} bytes: expected {12 * count:,}")
    scores = np.frombuffer(content, "<f4", count).astype(np.float32).reshape(shape)
    return scores, np.frombuffer(content, "<i8", count, 4 * count).astype(np.int64).reshape(shape)


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that the service asks to wait; 0 if it does not say."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(answer.headers.get("retry-after", "0"))))
    except ValueError:  # a date
        return 0.0
