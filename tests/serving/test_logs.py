"""Lines of requests have the format of all other lines, and are written together."""

import asyncio
import json
import logging
import subprocess
import sys

from amips.serving import RequestLog
from amips.serving.logs import JsonFormatter

FACTS = {"method": "POST", "path": "/search", "status": 200, "ms": 1.25, "rows": 3}


def lines_of(log, *requests):
    async def note():
        for facts in requests:
            log.note(facts)
        await asyncio.sleep(0)

    asyncio.run(note())


def test_a_line_of_a_request_is_like_any_other_line(capsys):
    lines_of(RequestLog(), FACTS)
    line = json.loads(capsys.readouterr().err)
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "facts": FACTS})
    other = json.loads(JsonFormatter().format(record))
    assert list(line) == list(other)
    assert {**line, "time": 0} == {**other, "time": 0}
    assert len(line["time"]) == len(other["time"]) == len("2026-01-31T12:00:00.000Z")


def test_lines_of_one_moment_are_written_at_once(capsys, monkeypatch):
    writes = []
    monkeypatch.setattr("sys.stderr.write", writes.append)
    lines_of(RequestLog(), *(FACTS | {"rows": rows} for rows in range(5)))
    assert len(writes) == 1
    assert [json.loads(line)["rows"] for line in writes[0].splitlines()] == list(range(5))


def test_failures_only(capsys):
    lines_of(RequestLog(failures_only=True), FACTS, FACTS | {"status": 503})
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["status"] == 503


THREADS = """
import threading
from amips.serving.logs import log, log_as_json

class Broken:
    def __del__(self):
        raise ValueError("a secret")

def fail():
    raise ValueError("a secret")

log_as_json()
Broken()
threads = [threading.Thread(target=fail)]
threads += [threading.Thread(target=lambda: [log.info("word " * 50) for _ in range(500)]) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_whatever_is_written_is_a_line_of_json():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(lines) == 2002
    assert [line["problem"] for line in lines if line["event"] == "defect"] == ["ValueError"] * 2
    assert "secret" not in done.stderr
