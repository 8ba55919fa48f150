"""Lines of requests have the format of all other lines, and are written together."""

import asyncio
import json
import logging

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
