"""The description of the service for other programs: OpenAPI 3.1, written by hand."""

from typing import Any

from amips.serving.limits import Limits
from amips.version import __version__

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_ROWS = {"type": "array", "items": _NUMBERS}
_ROW_OR_ROWS = {"anyOf": [_ROWS, _NUMBERS]}
_SCORE = {"type": ["number", "null"], "description": "null: there is no result, or the score is not finite"}
_SCORES = {"type": "array", "items": {"type": "array", "items": _SCORE}}
_ID = {"type": ["integer", "string"]}
_IDS = {"type": "array", "items": _ID}
_ID_OR_FLAG = {"type": ["integer", "string", "boolean"]}
_BITS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}, "bits": {"type": "string", "format": "byte"}},
    "required": ["n", "bits"],
    "description": "a bit for each of n keys, in base64, that of the first key the highest of the first byte",
}
_RAW = {"schema": {"type": "string", "format": "binary", "description": "float32 rows, little-endian"}}
_NPY = {"schema": {"type": "string", "format": "binary", "description": "a .npy file of rows"}}
_RESULTS_RAW = {"schema": {"type": "string", "format": "binary", "description": "float32 scores, int64 ids"}}
_PUBLIC: list[dict[str, Any]] = [{}]  # as a security requirement: none


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
        {
            "queries": _ROW_OR_ROWS,
            **options,
            "filter": {"anyOf": [{"type": "array", "items": _ID_OR_FLAG}, _BITS]},
        },
        required=["queries"],
    )
    keys = {"keys": _ROW_OR_ROWS, "ids": _IDS, "attributes": {"type": "object"}}
    n = {"n": {"type": "integer"}}
    words = {"title": {"type": "string"}, "text": {"type": "string"}}
    hit = _answer({"score": _SCORE, "id": _ID, **words})
    results = _answer({"scores": _SCORES, "ids": {"type": "array", "items": _IDS}}, {"missing": _NUMBERS})
    costs = {"probes": {"type": "integer"}, "scanned": {"type": "integer"}}
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
                {"application/octet-stream": _RESULTS_RAW},
            ),
            "/ask": _post(
                "The texts that answer a question.",
                _object({"question": {"type": "string"}, **effort}, required=["question"]),
                _answer({"hits": {"type": "array", "items": hit}, **costs, **n}),
            ),
            "/explain": _post(
                "How one query, or one question, is answered: cells, keys scanned and time, beside exact "
                "search and plain IVF, and a map. One at a time: 503 while another is explained.",
                _object(
                    {
                        "query": _ROW_OR_ROWS,
                        "question": {"type": "string"},
                        **effort,
                        "where": options["where"],
                    },
                    required=[],
                ),
                _explanation(hit),
            ),
            "/add": _post(
                "Add keys. Needs the token for changes.",
                _object(keys, required=["keys"]),
                _answer({"ids": _IDS, **n}),
                {"application/octet-stream": _RAW, "application/x-npy": _NPY},
            ),
            "/remove": _post(
                "Remove keys. Needs the token for changes.",
                _object({"ids": _IDS}, required=["ids"]),
                _answer({"removed": {"type": "integer"}, **n}),
            ),
            "/update": _post(
                "Put other keys in the place of those with these ids. Needs the token for changes.",
                _object(keys, required=["keys", "ids"]),
                _answer(n),
            ),
            "/reload": _post(
                "Take in what others changed in the bundle. Needs the token for changes.",
                None,
                _answer({"changed": {"type": "boolean"}, **n}),
            ),
            "/": _get("A page to try it.", "text/html", {"type": "string"}, public=True),
            "/info": _get("What is served, and its limits.", "application/json", _info()),
            "/health": _get(
                "Whether it is ready.",
                "application/json",
                _answer({"status": {"const": "ready"}}),
                public=True,
            ),
            "/metrics": _get("Counters, for Prometheus.", "text/plain", {"type": "string"}),
            "/openapi.json": _get("This document.", "application/json", {"type": "object"}),
        },
    }


def _explanation(hit: dict[str, Any]) -> dict[str, Any]:
    """Of `Explainer.explain`."""
    number, count = {"type": "number"}, {"type": ["integer", "null"]}
    point = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
    points = {"type": "array", "items": point}
    properties = hit["properties"]
    shown = {name: properties[name] for name in ("id", "score")}
    words = {name: properties[name] for name in ("title", "text")} | {"true": {"type": "boolean"}}
    results = {"type": "array", "items": _answer(shown, words)}
    costs = dict.fromkeys(("scanned", "probed", "hits"), count)
    method = _answer({"name": {"type": "string"}, "seconds": number, **costs})
    places = dict.fromkeys(("background", "probed", "results"), points)
    drawn = _answer({"what": {"enum": ["cells", "keys"]}, "variance": number, "query": point, **places})
    return _answer(
        {
            "way": {"type": "string"},
            "n": {"type": "integer"},
            "c": {"type": "integer"},
            "cells": {"type": "array", "items": {"type": "integer"}},
            "results": results,
            "missed": results,
            "of": count,
            "methods": {"type": "array", "items": method},
            "notes": {"type": "array", "items": {"type": "string"}},
            "map": {"anyOf": [drawn, {"type": "null"}]},
        }
    )


def _info() -> dict[str, Any]:
    """Of `Service.info`; there is more of an index of amips, and of shards."""
    text, flag = {"type": ["string", "null"]}, {"type": "boolean"}
    sizes = {
        "n": {"type": "integer"},
        "d": {"type": "integer"},
        "target_recall": {"type": ["number", "null"]},
    }
    limits = {"limits": {"type": "object", "additionalProperties": {"type": "number"}}}
    own = {"design": text, "ids": text, "advice": text, "adapted": flag}
    objects = {"attributes": {"type": "object"}, "shards": {"type": "object"}}
    flags = {"texts": flag, "changes": flag}
    return _answer({"amips": text, "bundle": text, **sizes, **flags, **limits}, {**own, **objects})


def _answer(properties: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object that has all of these, and may have more: what is answered is described as a whole."""
    schema = _object({**properties, **(more or {})})
    return {**schema, "required": list(properties), "additionalProperties": False}


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema if required is None else {**schema, "required": required, "additionalProperties": False}


def _answers(good: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": _answer({"error": {"type": "string"}})}}
    return {
        "200": good,
        "4XX": {"description": "What is wrong with the request, in one line.", "content": error},
        "500": {"description": "A defect of amips.", "content": error},
        "507": {"description": "The disk of the service is full.", "content": error},
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
    answers_too: dict[str, Any] | None = None,
) -> dict[str, Any]:
    content = {"application/json": {"schema": body}, **(bytes_too or {})}
    good = {
        "description": "Done.",
        "content": {"application/json": {"schema": answer}, **(answers_too or {})},
    }
    operation: dict[str, Any] = {"summary": summary, "responses": _answers(good)}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": content}
    return {"post": {**operation, **({} if query is None else {"parameters": query})}}


def _get(summary: str, kind: str, answer: dict[str, Any], *, public: bool = False) -> dict[str, Any]:
    good = {"description": summary, "content": {kind: {"schema": answer}}}
    operation = {"summary": summary, "responses": _answers(good)}
    return {"get": {**operation, **({"security": _PUBLIC} if public else {})}}
