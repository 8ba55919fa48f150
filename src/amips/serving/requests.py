"""What a client sent, read within limits and checked: every defect is one line, and ends here."""

from base64 import b64decode
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_flag, check_number, check_recall, check_whole, refused
from amips.errors import AmipsError, VectorError
from amips.extras import needs_extra
from amips.npy import parse_npy
from amips.search import checked_queries
from amips.serving.bodies import check_values, in_words, json_object
from amips.serving.limits import Limits
from amips.serving.refusals import BAD_REQUEST, TOO_LARGE, WRONG_TYPE, Refused
from amips.vectors import Floats

RAW, NPY, JSON = "application/octet-stream", "application/x-npy", "application/json"
LONGEST_WHERE = 1 << 14  # characters of a condition
LONGEST_QUESTION = 1 << 14
MOST_EXPLAINED = 100  # results of a search that is explained
ID_BYTES = 1 << 26  # that ids may take as an array, in which every string is as long as the longest


@dataclass(frozen=True)
class Options:
    """How to search: the arguments of `Index.search` that a request may have."""

    k: int = 10
    recall: float | None = None
    probes: int | None = None
    min_mass: float | None = None
    margin: float | None = None
    best_effort: bool = False
    where: str | None = None
    filter: NDArray[Any] | None = None

    @cached_property
    def key(self) -> Hashable:
        """The same of requests that can be searched together."""
        values = [getattr(self, field.name) for field in fields(self) if field.name != "filter"]
        chosen = self.filter
        return (*values, None if chosen is None else (chosen.dtype.str, blake2b(chosen.tobytes()).digest()))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """By the names of `Index.search`, those that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @cached_property
    def plain(self) -> bool:
        """Whether the recall that the index was made for, or another, is asked of all keys."""
        return self.arguments.keys() <= {"k", "recall"}


OPTIONS = {field.name for field in fields(Options)}
BESIDE = ("timeout", "partial")  # what a request may say beside them


@dataclass(frozen=True)
class SearchRequest:
    """A search: checked queries [m, d], its options, and what else the client says.

    Args:
        seconds: that it waits, at most.
        partial: it takes what there is where shards are silent, and wants to know what is missing.
    """

    x: Floats
    options: Options
    seconds: float
    partial: bool = False


def search_request(
    body: bytes, kind: str, query: bytes, d: int, limits: Limits, keys: int | None = None
) -> SearchRequest:
    """What a client wants to be searched.

    Args:
        body: JSON with `queries` and options, or queries as float32 rows or as a `.npy` file.
        kind: the content type.
        query: of the address: options, where the body has none.
        d: the dimension of the index.
        keys: of a large body, how many the index has, removed ones included: a filter names no more.
    """
    if kind == JSON:
        if keys is not None:
            check_values(body, limits.rows, limits.rows * d + keys)
        values = json_object(body, {"queries", *BESIDE, *OPTIONS})
        rows: Any = values.pop("queries", None)
        if rows is None:
            raise Refused(BAD_REQUEST, f'"queries" is missing: expected rows of {d} numbers')
        if query:
            raise Refused(BAD_REQUEST, "options of a search in JSON stand in its body, not in the address")
    else:
        rows, values = vectors(body, kind, d), {}
    x, _ = checked_queries(rows, d, None)
    if not 1 <= len(x) <= limits.rows:
        raise Refused(
            BAD_REQUEST if not len(x) else TOO_LARGE,
            f"{len(x):,} queries: expected 1 to {limits.rows:,} at a time",
        )
    return SearchRequest(x, *(_with_beside(values, limits) if kind == JSON else _from_query(query, limits)))


def _with_beside(values: dict[str, Any], limits: Limits) -> tuple[Options, float, bool]:
    """Options, how long the client waits, and whether it takes a part of the answer."""
    timeout, partial = (values.pop(name, None) for name in BESIDE)
    if partial is not None:
        partial = check_flag("partial", partial)
    seconds = limits.seconds
    if timeout is not None:
        seconds = min(seconds, check_number("timeout", timeout, above=0, what="seconds"))
    return _options(values, limits), seconds, bool(partial)


def _options(values: dict[str, Any], limits: Limits) -> Options:
    values = {name: value for name, value in values.items() if value is not None}
    checks: dict[str, Callable[[Any], Any]] = {
        "k": lambda value: check_whole("k", value, 1, limits.k),
        "recall": check_recall,
        "probes": lambda value: check_whole("probes", value, 1),
        "min_mass": lambda value: check_number("min_mass", value),
        "margin": lambda value: check_number("margin", value),
        "best_effort": lambda value: check_flag("best_effort", value),
        "where": lambda value: text("where", value, LONGEST_WHERE),
        "filter": chosen_keys,
    }
    return Options(**{name: checks[name](value) for name, value in values.items()})


def vectors(body: bytes, kind: str, d: int) -> NDArray[Any]:
    """Rows of a body of bytes: float32 [m, d], or what a `.npy` file holds."""
    if kind == NPY:
        return parse_npy(body, "the body", VectorError)
    if kind != RAW:
        raise Refused(WRONG_TYPE, f"content type {kind[:60]!r}: expected {JSON}, {RAW} or {NPY}")
    if len(body) % (4 * d) or not body:
        raise VectorError(
            f"a body of {len(body):,} bytes: expected rows of {d} float32, {4 * d:,} bytes each"
        )
    return np.frombuffer(body, "<f4").reshape(-1, d)


@dataclass(frozen=True)
class ChangeRequest:
    """Keys and ids to add, to remove or to update, and attributes as an Arrow table."""

    keys: NDArray[Any] | None
    ids: NDArray[Any] | None
    attributes: Any


def change_request(
    body: bytes, kind: str, names: frozenset[str], d: int, limits: Limits, *, needs_ids: bool = True
) -> ChangeRequest:
    """What a client wants to be changed.

    Args:
        names: of the fields that this change has.
        needs_ids: it is of keys that there are.
    """
    if kind != JSON:
        if "keys" not in names:
            raise Refused(WRONG_TYPE, f"content type {kind[:60]!r}: expected {JSON}")
        values: dict[str, Any] = {"keys": vectors(body, kind, d)}
    else:
        values = json_object(body, names)
    keys, ids = values.get("keys"), values.get("ids")
    if "keys" in names:
        keys, _ = checked_queries(_missing("keys", keys), d, None, "keys")
    if ids is not None or needs_ids:
        ids = key_ids("ids", _missing("ids", ids))
    count = len(ids if keys is None else keys)  # type: ignore[arg-type]
    if not 1 <= count <= limits.rows:
        status = TOO_LARGE if count else BAD_REQUEST
        raise Refused(status, f"{count:,} keys: expected 1 to {limits.rows:,} at a time")
    attributes = values.get("attributes")
    return ChangeRequest(keys, ids, None if attributes is None else _table(attributes))


def ask_request(body: bytes, kind: str, limits: Limits) -> tuple[str, dict[str, Any]]:
    """A question in words, and the options of `Asker.ask`."""
    if kind != JSON:
        raise Refused(WRONG_TYPE, f"content type {kind[:60]!r}: expected {JSON}")
    values = json_object(body, {"question", "k", "recall", "probes", "best_effort"})
    question = _question(_missing("question", values.pop("question", None)))
    return question, _options({"k": 5, **values}, limits).arguments


def explain_request(
    body: bytes, kind: str, d: int, limits: Limits
) -> tuple[str | None, Floats | None, dict[str, Any]]:
    """One question in words, or one query [1, d], and how to search for it."""
    if kind != JSON:
        raise Refused(WRONG_TYPE, f"content type {kind[:60]!r}: expected {JSON}")
    values = json_object(body, {"question", "query", "k", "recall", "probes", "best_effort", "where"})
    question, query = values.pop("question", None), values.pop("query", None)
    if (question is None) == (query is None):
        raise Refused(BAD_REQUEST, f'expected "question", or "query" with {d} numbers, one of them')
    options = _options({"k": 10, **values}, limits).arguments
    check_whole("k", options["k"], 1, MOST_EXPLAINED)
    if question is not None:
        return _question(question), None, options
    x, _ = checked_queries(query, d, None)
    if len(x) != 1:
        raise Refused(BAD_REQUEST, f"{len(x):,} queries: one at a time is explained")
    return None, x, options


def text(name: str, value: Any, longest: int) -> str:
    """Text of so many characters, at most, all of which exist."""
    if not isinstance(value, str):
        raise refused(name, value, "text")
    if len(value) > longest:
        raise AmipsError(f"{name} of {len(value):,} characters: expected at most {longest:,}")
    return _encodable(name, value)


def _question(value: Any) -> str:
    question = text("question", value, LONGEST_QUESTION)
    if not question.strip():
        raise AmipsError("the question is empty")
    return question


def key_ids(name: str, value: Any) -> NDArray[Any]:
    """A list of ids, all whole numbers or all strings, as an array. Never a file: clients name none."""
    if not isinstance(value, list):
        raise refused(name, value, "a list of ids")
    if all(type(one) is int for one in value):
        if not all(-(2**63) <= one < 2**63 for one in value):
            raise AmipsError(f"{name}: a number does not fit in int64")
        return np.array(value, np.int64)
    if not all(isinstance(one, str) for one in value):
        raise AmipsError(f"{name}: expected whole numbers of int64, or strings, of one kind")
    if 4 * len(value) * max(map(len, value)) > ID_BYTES:
        raise Refused(TOO_LARGE, f"{name}: too many strings, or too long ones, at a time")
    return np.array([_encodable(name, one) for one in value], np.str_)


def chosen_keys(value: Any) -> NDArray[Any]:
    """A filter: a list of ids, or of one truth value for each key, or the bits of these: {"n", "bits"}."""
    if isinstance(value, dict) and value.keys() == {"n", "bits"}:
        return _mask(value["n"], value["bits"])
    if isinstance(value, list) and value and all(isinstance(one, bool) for one in value):
        return np.array(value, np.bool_)
    return key_ids("filter", value)


def _mask(n: Any, bits: Any) -> NDArray[np.bool_]:
    """A mask of n keys in base64, the first key in the highest bit of the first byte."""
    check_whole("filter: n", n, 1)
    try:
        packed = np.frombuffer(b64decode(bits, validate=True), np.uint8)
    except (TypeError, ValueError):
        raise Refused(BAD_REQUEST, "filter: bits are not text in base64") from None
    if len(packed) != -(-n // 8):
        raise Refused(BAD_REQUEST, f"filter: {len(packed):,} bytes of bits for n={n:,} keys: expected n / 8")
    return np.unpackbits(packed, count=n).view(np.bool_)


def wants_raw(headers: Mapping[str, str]) -> bool:
    """Whether a client takes bytes rather than JSON: of what it accepts, what it names first counts."""
    accepted = headers.get("accept", "")
    if accepted == RAW:
        return True
    kinds = [one.partition(";")[0].strip().lower() for one in accepted.split(",")]
    return next((kind == RAW for kind in kinds if kind in (RAW, JSON, "*/*", "application/*")), False)


def content_type(headers: Mapping[str, str]) -> str:
    """Without its parameters; JSON if none is stated."""
    return headers.get("content-type", JSON).partition(";")[0].strip().lower()


@lru_cache(256)  # clients ask for the same again and again
def _from_query(query: bytes, limits: Limits) -> tuple[Options, float, bool]:
    """As `_with_beside`, of what stands in the address."""
    names = {*BESIDE, *OPTIONS} - {"filter"}
    try:
        pairs = parse_qsl(query.decode("latin1"), keep_blank_values=True, max_num_fields=len(names))
    except ValueError:
        raise Refused(BAD_REQUEST, f"too many options: expected {in_words(names)}") from None
    values = dict(pairs)
    if len(values) < len(pairs):
        raise Refused(BAD_REQUEST, "an option stands twice in the address: give it once")
    if unknown := set(values) - names:
        hint = "; a filter goes with queries in JSON" if "filter" in unknown else ""
        raise Refused(BAD_REQUEST, f"unknown option {min(unknown)[:60]!r}: expected {in_words(names)}{hint}")
    return _with_beside(
        {name: value if name == "where" else _value(value) for name, value in values.items()}, limits
    )


def _value(word: str) -> Any:
    """A number or a truth value in an address; what is neither stays text, which is refused later."""
    if word in ("true", "false"):
        return word == "true"
    if not word.isascii() or "_" in word or word != word.strip():  # which Python reads as numbers, too
        return word
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:  # also of thousands of digits
            pass
    return word


def _table(columns: Any) -> Any:
    """Attributes, a list of values by the name of a column, as an Arrow table."""
    if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
        raise Refused(BAD_REQUEST, "attributes: expected an object with a list of values for each column")
    with needs_extra("attributes", "filters", "pyarrow"):
        import pyarrow as pa
    try:
        return pa.table(columns)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as problem:
        line = (str(problem).splitlines() or [""])[0]
        raise Refused(BAD_REQUEST, f"attributes: {line or type(problem).__name__}") from None


def _missing(name: str, value: Any) -> Any:
    if value is None:
        raise Refused(BAD_REQUEST, f'"{name}" is missing')
    return value


def _encodable(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise AmipsError(f"{name}: it has characters that do not exist (half of a surrogate pair)") from None
    if "\0" in value:
        raise AmipsError(f"{name}: it has a null character")
    return value
