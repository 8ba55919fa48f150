"""Logs as lines of JSON, without a word of what was asked."""

import asyncio
import json
import logging
import sys
import threading
import time
import traceback
from functools import lru_cache
from typing import Any

import orjson

_writing = threading.RLock()  # a stream of text is not made for several threads: lines would be mixed

log = logging.getLogger("amips.serving")


def _write(lines: str) -> None:
    with _writing:
        sys.stderr.write(lines)
        sys.stderr.flush()


class JsonHandler(logging.Handler):
    """Writes records to standard error, where lines of requests go, too."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        try:
            _write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record: time, level, event, and the facts that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {"time": _stamp(record.created), "level": record.levelname.lower()}
        line["event"] = " ".join(record.getMessage().split())
        line |= getattr(record, "facts", {})
        if record.exc_info and record.exc_info[1] is not None:
            problem = record.exc_info[1]
            # Where, not what: a message may quote a query.
            frames = traceback.extract_tb(problem.__traceback__)
            line["problem"] = type(problem).__name__
            line["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
        return json.dumps(line)


class RequestLog:
    """A line for each request, in the format of the other lines; those of one moment are written together.

    By way of `logging` a line took a third of the time of a short request.

    Args:
        failures_only: no line for what was answered as it was asked.
    """

    def __init__(self, *, failures_only: bool = False) -> None:
        self._failures_only = failures_only
        self._lines: list[str] = []

    def note(self, facts: dict[str, Any]) -> None:
        """Write a line with these facts, `status` among them, when the loop has done what it is at."""
        if self._failures_only and facts["status"] < 400:
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._write)
        head = f'{{"time": "{_stamp(time.time())}", "level": "info", "event": "request", '
        self._lines.append(f"{head}{orjson.dumps(facts).decode()[1:]}\n")

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        _write("".join(lines))


def _stamp(seconds: float) -> str:
    """A time in UTC, to the millisecond."""
    whole = int(seconds)
    return f"{_to_the_second(whole)}.{int(1000 * (seconds - whole)):03d}Z"


@lru_cache(2)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def log_as_json() -> None:
    """Send the logs of this process to standard error, a line of JSON each."""
    handler = JsonHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.unraisablehook = _note_ignored  # Python would write several lines of its own
    threading.excepthook = _note_ignored
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)


def _note_ignored(problem: Any) -> None:
    """What went wrong where nobody could be told: in a thread, or while something was taken apart."""
    log.error("defect", exc_info=(problem.exc_type, problem.exc_value, problem.exc_traceback))
