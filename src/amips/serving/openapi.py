"""The description of the service for other programs: OpenAPI 3.1, written by hand."""

from typing import Any

from amips.serving.limits import Limits
from amips.version import __version__

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_ROWS = {"type": "array", "items": _NUMBERS}
_ID = {"type": ["integer", "string"]}
_IDS = {"type": "array", "items": _ID}
_RAW = {"schema": {"type": "string", "format": "binary", "description": "float32 rows, little-endian"}}
_NPY = {"schema": {"type": "string", "format": "binary", "description": "a .npy file of rows"}}


def document(limits: Limits) -> dict[str, Any]:
    """The OpenAPI document of a service with these limits."""
    effort = {
        "k": {"type": "integer", "minimum": 1, "maximum": limits.k, "default": 10},
        "recall": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "probes": {"type": "integer", "minimum": 1},
        "best_effort": {"type": "boolean", "default": False},
    }
    options = {
        **effort,
        "min_mass": {"type": "number"},
        "margin": {"type": "number"},
        "where": {"type": "string", "description": "a condition: lang = 'en' and price < 20"},
        "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": limits.seconds},
    }
    options["partial"] = {
        "type": "boolean",
        "default": False,
        "description": "of shards: what there is, with the share of each query's top keys that is missing",
    }
    search = _object(
        {"queries": _ROWS, **options, "filter": {"type": "array", "items": {}}}, required=["queries"]
    )
    keys = {"keys": _ROWS, "ids": _IDS, "attributes": {"type": "object"}}
    n = {"n": {"type": "integer"}}
    hit = _object(
        {"score": {"type": "number"}, "id": _ID, "title": {"type": "string"}, "text": {"type": "string"}}
    )
    results = _object({"scores": _ROWS, "ids": {"type": "array", "items": _IDS}, "missing": _NUMBERS})
    query = [{"name": name, "in": "query", "schema": schema} for name, schema in options.items()]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "amips",
            "version": __version__,
            "description": "Learned maximum-inner-product search.",
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": {
            "/search": _post(
                "The best keys of each query; null and -1 where there is none. Options of bytes stand in the "
                "address. With Accept: application/octet-stream: float32 scores, then int64 ids.",
                search,
                {**results, "description": "scores and ids [m, k], best first"},
                {"application/octet-stream": _RAW, "application/x-npy": _NPY},
                query,
            ),
            "/ask": _post(
                "The texts that answer a question.",
                _object({"question": {"type": "string"}, **effort}, required=["question"]),
                _object({"hits": {"type": "array", "items": hit}, **n}),
            ),
            "/explain": _post(
                "How one query, or one question, is answered: cells, keys scanned and time, beside exact "
                "search and plain IVF, and a map. One at a time: 503 while another is explained.",
                _object(
                    {"query": _NUMBERS, "question": {"type": "string"}, **effort, "where": options["where"]},
                    required=[],
                ),
                {"type": "object"},
            ),
            "/add": _post(
                "Add keys. Needs the token for changes.",
                _object(keys, required=["keys"]),
                _object({"ids": _IDS, **n}),
                {"application/octet-stream": _RAW, "application/x-npy": _NPY},
            ),
            "/remove": _post(
                "Remove keys. Needs the token for changes.",
                _object({"ids": _IDS}, required=["ids"]),
                _object({"removed": {"type": "integer"}, **n}),
            ),
            "/update": _post(
                "Put other keys in the place of those with these ids. Needs the token for changes.",
                _object(keys, required=["keys", "ids"]),
                _object(n),
            ),
            "/reload": _post(
                "Take in what others changed in the bundle. Needs the token for changes.",
                None,
                _object({"changed": {"type": "boolean"}, **n}),
            ),
            "/": {**_get("A page to try it.", "text/html"), "security": []},
            "/info": _get("What is served, and its limits.", "application/json"),
            "/health": {**_get("Whether it is ready.", "application/json"), "security": []},
            "/metrics": _get("Counters, for Prometheus.", "text/plain"),
            "/openapi.json": _get("This document.", "application/json"),
        },
    }


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema if required is None else {**schema, "required": required, "additionalProperties": False}


def _answers(good: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": _object({"error": {"type": "string"}})}}
    return {
        "200": good,
        "4XX": {"description": "What is wrong with the request, in one line.", "content": error},
        "503": {
            "description": "Too much at the moment: again after Retry-After seconds.",
            "headers": {"Retry-After": {"schema": {"type": "integer"}}},
            "content": error,
        },
    }


def _post(
    summary: str,
    body: dict[str, Any] | None,
    answer: dict[str, Any],
    bytes_too: dict[str, Any] | None = None,
    query: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    content = {"application/json": {"schema": body}, **(bytes_too or {})}
    good = {"description": "Done.", "content": {"application/json": {"schema": answer}}}
    operation: dict[str, Any] = {"summary": summary, "responses": _answers(good)}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": content}
    return {"post": {**operation, **({} if query is None else {"parameters": query})}}


def _get(summary: str, kind: str) -> dict[str, Any]:
    good = {"description": summary, "content": {kind: {}}}
    return {"get": {"summary": summary, "responses": {"200": good}}}
