"""Too much at a time, and clients that leave: others are answered."""

import asyncio
import json
import threading
import time

import numpy as np

from amips.serving.app import give_up
from serving_helpers import application, running, talk


def test_overload_is_503_with_retry_after(bundle, x):
    app = application(bundle, rows=2, queue=2)

    async def conversation(client):
        calls = [client.post("/search", json={"queries": x[:2].tolist(), "k": 1 + i}) for i in range(40)]
        return await asyncio.gather(*calls)

    answers = talk(app, conversation)
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert "too many" in answer.json()["error"]


def test_results_that_are_asked_for_at_a_time_are_bounded(bundle, x, monkeypatch):
    monkeypatch.setattr("amips.serving.app.MOST_RESULTS", 100)
    app = application(bundle)

    async def conversation(client):
        bodies = [{"queries": x[:1].tolist(), "k": k, "probes": 8} for k in (200, 90, 90, 90)]
        first = await client.post("/search", json=bodies[0])  # alone it may have more
        return [first, *await asyncio.gather(*(client.post("/search", json=body) for body in bodies[1:]))]

    answers = talk(app, conversation)
    assert [answer.status_code for answer in answers] == [200, 200, 503, 503]
    assert "too many results" in answers[2].json()["error"]
    assert app._results == 0


def test_a_client_that_leaves_in_its_body_is_no_error(app):
    async def run():
        messages = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            messages.append(message)

        async with running(app):
            scope = {"type": "http", "method": "POST", "path": "/search", "query_string": b""}
            await app({**scope, "headers": [(b"host", b"localhost")]}, receive, send)
        return messages

    assert asyncio.run(run()) == []


def test_a_client_that_leaves_before_its_answer_is_not_searched_for(app, x):
    searching, go = threading.Event(), threading.Event()

    async def run():
        async with running(app) as client:
            search = app.service.index.search

            def slow(*arguments, **options):
                searching.set()
                assert go.wait(30)
                return search(*arguments, **options)

            app.service.index.search = slow
            first = asyncio.create_task(client.post("/search", json={"queries": x[:1].tolist()}))
            await asyncio.to_thread(searching.wait, 30)
            body = json.dumps({"queries": x[:3].tolist()}).encode()
            scope = {"type": "http", "method": "POST", "path": "/search", "query_string": b""}
            scope["headers"] = [(b"host", b"localhost")]
            messages = []

            async def receive():
                return {"type": "http.request", "body": body}

            leaving = asyncio.create_task(app(scope, receive, messages.append))
            while app.service._batcher.rows != 3:
                await asyncio.sleep(0.001)
            give_up(scope)  # as the connection does when it is lost
            await leaving
            rows = app.service._batcher.rows
            go.set()
            return messages, rows, (await first).status_code, (await client.get("/metrics")).text

    messages, rows, status, metrics = asyncio.run(run())
    assert (messages, rows, status) == ([], 0, 200)
    assert 'amips_requests_total{path="/search",status="499"} 1.0' in metrics
    assert "amips_batch_rows_sum 1.0" in metrics


def test_a_large_request_does_not_keep_others_waiting(bundle, x):
    app = application(bundle, rows=60_000, queue=60_000, k=600)
    body = json.dumps({"queries": np.tile(x, (220, 1)).tolist(), "k": 1, "timeout": 10}).encode()
    assert len(body) > 7 << 20

    async def conversation(client):
        pauses = []

        async def watch():
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                pauses.append(time.perf_counter() - before)

        watching = asyncio.create_task(watch())
        large = await client.post("/search", content=body)
        many = await client.post(
            "/search", json={"queries": np.tile(x, (20, 1)).tolist(), "k": 200, "probes": 2}
        )
        watching.cancel()
        return large, many, pauses

    large, many, pauses = talk(app, conversation)
    assert large.status_code == many.status_code == 200
    assert len(large.json()["ids"]) == 22_000
    assert np.shape(many.json()["scores"]) == (2000, 200)
    start = time.perf_counter()
    json.loads(body)
    many.json()
    assert max(pauses) < 0.5 * (time.perf_counter() - start) + 0.1


def test_too_many_large_requests_are_refused(app, x):
    body = json.dumps({"queries": np.tile(x, (4, 1)).tolist()}).encode()
    assert len(body) > 1 << 16

    async def conversation(client):
        return await asyncio.gather(*(client.post("/search", content=body) for _ in range(40)))

    answers = talk(app, conversation)
    assert {answer.status_code for answer in answers} == {200, 503}
    assert all("large" in a.json()["error"] for a in answers if a.status_code == 503)
