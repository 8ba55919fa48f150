"""What a client gets: results as JSON, and one line for whatever went wrong."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import orjson
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.responses import Response

from amips.errors import AmipsError
from amips.serving.refusals import refusal
from amips.vectors import Floats

BROKEN = 500  # a defect of amips
MANY = 1 << 14  # scores, from which on they are written in a thread

log = logging.getLogger("amips.serving")


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON; null in the place of numbers that are not finite, which JSON does not have."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value))
    return Response(text, status, headers, "application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def timed(answer: Response, search: float, wait: float) -> Response:
    """The answer, which says how many seconds were searched and waited: Server-Timing, in ms."""
    # Appended: as an argument of Response it would cost the shortest requests 1 % of their time.
    value = b"search;dur=%.3f, wait;dur=%.3f" % (1e3 * search, 1e3 * wait)
    answer.raw_headers.append((b"server-timing", value))
    return answer


def results_json(scores: Floats, ids: NDArray[Any], missing: Floats | None = None) -> bytes:
    """Scores and ids [m, k] as JSON, which has no infinite numbers: null where there is no result.

    Row by row: between two of them another thread may go on. With `missing`, what shards did not tell [m].
    """
    score_rows, id_rows = (b", ".join(orjson.dumps(row.tolist()) for row in rows) for rows in (scores, ids))
    more = b"" if missing is None else b', "missing": ' + orjson.dumps(missing.tolist())
    return b'{"scores": [%b], "ids": [%b]%b}' % (score_rows, id_rows, more)


def failure(problem: Exception, bundle: Path | None = None) -> Response:
    """The answer to a request that failed; of the path of the bundle it says the name alone."""
    if isinstance(problem, HTTPException):
        headers = dict(problem.headers or {})
        words = {404: "there is nothing here: see /openapi.json", 405: "another method is needed here"}
        error = words.get(problem.status_code, problem.detail)
        return json_answer({"error": error}, problem.status_code, headers)
    if isinstance(problem, AmipsError | MemoryError):
        answer = refusal(problem)
        # The body may not have been read to its end: no other request can follow it.
        closing = {"connection": "close"} if answer.status in (401, 403, 413, 415) else {}
        text = str(answer)
        if bundle is not None:
            for path in {str(bundle.resolve()), str(bundle.absolute())}:
                text = text.replace(path, bundle.absolute().name)
        return json_answer({"error": text}, answer.status, {**answer.headers, **closing})
    log.error("defect", exc_info=problem)
    return json_answer({"error": "a defect of amips: it is in the log of the service"}, BROKEN)
