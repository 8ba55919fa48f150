"""Logs as lines of JSON, without a word of what was asked."""

import json
import logging
import sys
import time
import traceback
from typing import Any


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record: time, level, event, and the facts that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
        }
        line["event"] = " ".join(record.getMessage().split())
        line |= getattr(record, "facts", {})
        if record.exc_info and record.exc_info[1] is not None:
            problem = record.exc_info[1]
            # Where, not what: a message may quote a query.
            frames = traceback.extract_tb(problem.__traceback__)
            line["problem"] = type(problem).__name__
            line["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
        return json.dumps(line)


def log_as_json() -> None:
    """Send the logs of this process to standard error, a line of JSON each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
