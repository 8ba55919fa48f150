"""The service over HTTP, within this process: answers, limits, tokens, changes, whatever clients send."""

import asyncio
import base64
import gzip
import io
import json
import re
import shutil
import threading
import time
import zlib

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import amips
from amips.serving import Tokens
from amips.serving.app import give_up
from amips.serving.logs import JsonFormatter
from amips.serving.requests import wants_raw
from amips.text import asking, attach, embed
from serving_helpers import READ, WRITE, application, described, running, talk

RAW, NPY = "application/octet-stream", "application/x-npy"


@pytest.fixture
def app(bundle):
    return application(bundle)


def headers(token):
    return {"authorization": f"Bearer {token}"}


def test_answers_are_those_of_the_index_in_every_format(app, bundle, x):
    scores, ids = amips.load(bundle).search(x[:5], 7, recall=0.8)
    npy = io.BytesIO()
    np.save(npy, x[:5].astype(np.float64))

    async def conversation(client):
        body = {"queries": x[:5].tolist(), "k": 7, "recall": 0.8}
        address = "/search?k=7&recall=0.8"
        raw = x[:5].tobytes()
        return [
            await client.post("/search", json=body),
            await client.post(address, content=raw, headers={"content-type": RAW}),
            await client.post(address, content=npy.getvalue(), headers={"content-type": NPY}),
            await client.post(address, content=raw, headers={"content-type": RAW, "accept": RAW}),
        ]

    *plain, binary = talk(app, conversation)
    for answer in plain:
        assert answer.status_code == 200
        np.testing.assert_allclose(answer.json()["scores"], scores, rtol=1e-5)
        assert answer.json()["ids"] == ids.tolist()
    assert len(binary.content) == 12 * 5 * 7
    np.testing.assert_allclose(np.frombuffer(binary.content, "<f4", 35), scores.ravel(), rtol=1e-5)
    assert np.frombuffer(binary.content, "<i8", 35, 140).tolist() == ids.ravel().tolist()


def test_concurrent_requests_get_their_own_answers_in_fewer_searches(app, bundle, x):
    scores, ids = amips.load(bundle).search(x)

    async def conversation(client):
        calls = [client.post("/search", json={"queries": [row.tolist()]}) for row in x]
        answers = await asyncio.gather(*calls)
        return answers, (await client.get("/metrics")).text

    answers, metrics = talk(app, conversation)
    np.testing.assert_allclose([a.json()["scores"][0] for a in answers], scores, rtol=1e-5)
    assert [a.json()["ids"][0] for a in answers] == ids.tolist()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["amips_batch_rows_sum"]) == len(x)
    assert float(values["amips_batch_rows_count"]) < len(x) / 2
    assert float(values['amips_requests_total{path="/search",status="200"}']) == len(x)
    assert float(values["amips_scanned_fraction_count"]) >= 1
    assert 0 < float(values["amips_probability_mass_sum"]) <= float(values["amips_probability_mass_count"])
    assert float(values["amips_keys"]) == 600


def test_filters_and_conditions(app, bundle, x):
    index = amips.load(bundle)

    async def conversation(client):
        by_id = await client.post("/search", json={"queries": x[:2].tolist(), "filter": [3, 5, 8], "k": 5})
        mask = await client.post("/search", json={"queries": x[0].tolist(), "filter": [True] + [False] * 599})
        bits = base64.b64encode(np.packbits(np.arange(600) == 0).tobytes()).decode()
        packed = {"queries": x[0].tolist(), "filter": {"n": 600, "bits": bits}}
        answer = await client.post("/search", json=packed)
        assert described(answer) == 200
        assert answer.json() == mask.json()
        where = await client.post(
            "/search", params={"where": "price < 40"}, content=x[:2].tobytes(), headers={"content-type": RAW}
        )
        return by_id.json(), mask.json(), where.json()

    by_id, mask, where = talk(app, conversation)
    assert {i for row in by_id["ids"] for i in row} == {3, 5, 8, -1}
    assert by_id["scores"][0][3:] == [None, None]
    assert mask["ids"][0] == [0] + [-1] * 9
    assert where["ids"] == index.search(x[:2], where="price < 40")[1].tolist()


@pytest.mark.parametrize(
    ("accept", "raw"),
    [
        (RAW, True),
        (f"{RAW}, */*", True),
        (f"text/html, {RAW};q=0.9, application/json", True),
        (f"application/json, {RAW}", False),
        (f"*/*, {RAW}", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_who_accepts_bytes_gets_bytes(accept, raw):
    assert wants_raw({"accept": accept}) is raw


BAD = [
    (b"", "application/json", 400, "not JSON"),
    (b"{", "application/json", 400, "not JSON"),
    (b"\xff\xfe", "application/json", 400, "not JSON"),
    (b"[" * 60_000, "application/json", 400, "nested"),
    (b"[" * 100_000, "application/json", 413, "too many values"),
    (b'{"queries": [[' + b"0," * 50_000 + b"0]]}", "application/json", 413, "at most 16,984 in 1,024 rows"),
    (b"[]", "application/json", 400, "expected a JSON object"),
    (b"{}", "application/json", 400, '"queries" is missing'),
    (b'{"queries": [1, 2]}', "application/json", 400, "this index needs numbers [m, 16]"),
    (b'{"queries": [[1], [2, 3]]}', "application/json", 400, "not a table"),
    (b'{"queries": "/etc/passwd"}', "application/json", 400, "this index needs numbers"),
    (b'{"queries": []}', "application/json", 400, "this index needs numbers"),
    (b'{"queries": [[' + b"NaN," * 15 + b"1]]}", "application/json", 400, "not finite"),
    (b'{"queries": [[' + b"1e999," * 15 + b"1]]}", "application/json", 400, "not finite"),
    (b'{"queries": [[' + b"9" * 5000 + b"]]}", "application/json", 400, "not JSON"),
    (b'{"queries": [], "colour": 1}', "application/json", 400, "unknown field 'colour'"),
    (b"abc", RAW, 400, "a body of 3 bytes"),
    (b"", RAW, 400, "a body of 0 bytes"),
    (b"\x00\x00\xc0\x7f" * 16, RAW, 400, "not finite"),
    (b"\x93NUMPY", NPY, 400, "not a readable .npy"),
    (b"x", "text/html", 415, "expected application/json"),
    (b"\0" * (64 * 1025), RAW, 413, "1 to 1,024 at a time"),
]


@pytest.mark.parametrize(("body", "kind", "status", "words"), BAD, ids=range(len(BAD)))
def test_bad_bodies(app, body, kind, status, words):
    async def conversation(client):
        return await client.post("/search", content=body, headers={"content-type": kind})

    answer = talk(app, conversation)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 1001}, "from 1 to 1000"),
        ({"k": True}, "k=True"),
        ({"k": 2.5}, "k=2.5"),
        ({"k": 10**30}, "k="),
        ({"recall": 1.5}, "recall=1.5"),
        ({"recall": "high"}, "recall='high'"),
        ({"recall": 0.9, "probes": 3}, "give one of recall, probes"),
        ({"probes": [1]}, "probes="),
        ({"margin": 0.1}, "not a graph"),
        ({"where": "colour = 1"}, "no column 'colour'"),
        ({"where": "price <"}, "where"),
        ({"where": 7}, "where=7"),
        ({"where": "x" * 20_000}, "20,000 characters"),
        ({"where": "price = '\ud800'"}, "do not exist"),
        ({"filter": "/etc/passwd"}, "a list of ids"),
        ({"filter": ["a"]}, "whole numbers"),
        ({"filter": [1, "a"]}, "of one kind"),
        ({"filter": [2**80]}, "int64"),
        ({"filter": [True, False]}, "a mask of shape"),
        ({"filter": {"n": 600, "bits": "?"}}, "base64"),
        ({"filter": {"n": 600, "bits": 7}}, "base64"),
        ({"filter": {"n": 600, "bits": "AAAA"}}, "3 bytes of bits for n=600"),
        ({"filter": {"n": 24, "bits": "AAAA"}}, "a mask of shape"),
        ({"filter": {"n": -1, "bits": "AAAA"}}, "n=-1"),
        ({"filter": {"n": 1}}, "a list of ids"),
        ({"filter": ["x" * 100_000, *["y"] * 1000]}, "too long ones"),
        ({"timeout": -1}, "timeout=-1"),
        ({"best_effort": 1}, "best_effort=1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options(app, x, options, words):
    async def conversation(client):
        body = json.dumps({"queries": x[0].tolist(), **options})
        return await client.post("/search", content=body, headers={"content-type": "application/json"})

    answer = talk(app, conversation)
    assert 400 <= answer.status_code < 500
    assert words in answer.json()["error"]


def test_bad_addresses(app, x):
    async def conversation(client):
        raw = {"content": x[0].tobytes(), "headers": {"content-type": RAW}}
        return [
            await client.post("/search?k=many", **raw),
            await client.post("/search?filter=1", **raw),
            await client.post("/search?k=3", json={"queries": x[0].tolist()}),
            await client.get("/search"),
            await client.get("/nowhere"),
            await client.post("/ask", json={"question": "why?"}),
            await client.post("/ask", json={"question": 3}),
            await client.post("/search?k=3&k=4", **raw),
            *[await client.post("/search", params={"k": k}, **raw) for k in ("1_0", " 5", "\u0665")],
        ]

    answers = talk(app, conversation)
    assert [answer.status_code for answer in answers] == [400, 400, 400, 405, 404, 404, 400] + [400] * 4
    assert all(set(answer.json()) == {"error"} for answer in answers)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"content-encoding": "gzip"}, "content-encoding"),
        ({"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c"}, "HTTP/1.1"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_by_name(app, x, head, words):
    async def conversation(client):
        return await client.post("/search", content=gzip.compress(x.tobytes()), headers=head)

    answer = talk(app, conversation)
    assert answer.status_code == 415
    assert words in answer.json()["error"]


def test_what_is_said_of_a_bad_row_is_what_a_client_can_do(own_bundle):
    app, row = application(own_bundle, tokens=Tokens.of(None, WRITE)), [1e39] * 16

    async def conversation(client):
        return [
            await client.post(path, json=body, headers=headers(WRITE))
            for path, body in (
                ("/search", {"queries": row}),
                ("/add", {"keys": [[1.0]]}),
                ("/update", {"keys": [[1.0] * 16]}),
            )
        ]

    search, add, update = (answer.json()["error"] for answer in talk(app, conversation))
    assert "not finite" in search
    assert "on_bad" not in search
    assert add.startswith("keys of type")
    assert update == '"ids" is missing'


def test_a_body_that_is_too_large_is_refused_while_it_comes(bundle):
    app = application(bundle, body=10_000)
    sent = []

    async def endless():
        while True:
            sent.append(1)
            yield b"x" * 1000

    async def conversation(client):
        stated = await client.post("/search", content=b"x" * 10_001)
        chunked = await client.post("/search", content=endless())
        return stated, chunked

    stated, chunked = talk(app, conversation)
    assert stated.status_code == chunked.status_code == 413
    assert stated.headers["connection"] == "close"
    assert len(sent) <= 12


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


def test_an_error_names_the_bundle_without_its_path(own_bundle):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        (own_bundle / "manifest.json").write_text("{}")
        return await client.post("/reload", headers=headers(WRITE))

    answer = talk(app, conversation)
    assert answer.status_code == 409
    assert own_bundle.name in answer.json()["error"]
    assert str(own_bundle.parent) not in answer.text


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


def test_an_answer_says_how_long_the_search_took(app, x):
    async def conversation(client):
        raw = {"content": x[0].tobytes(), "headers": {"content-type": RAW, "accept": RAW}}
        return await client.post("/search", json={"queries": x[0].tolist()}), await client.post(
            "/search", **raw
        )

    for answer in talk(app, conversation):
        times = re.fullmatch(r"search;dur=([\d.]+), wait;dur=([\d.]+)", answer.headers["server-timing"])
        assert all(0 <= float(time) < 60_000 for time in times.groups())


def test_a_defect_is_one_line_and_says_nothing_of_the_query(app, x, caplog):
    async def conversation(client):
        app.service.index = type("Broken", (), {"d": 16, "search": lambda *_, **__: 1 / 0})()
        return await client.post("/search", json={"queries": x[0].tolist()})

    answer = talk(app, conversation)
    assert answer.status_code == 500
    assert "defect" in answer.json()["error"]
    (record,) = [one for one in caplog.records if one.getMessage() == "defect"]
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["problem"] == "ZeroDivisionError"
    assert not any(f"{value:.4f}" in line for value in x[0].tolist())


def test_tokens(own_bundle, x):
    app = application(own_bundle, tokens=Tokens.of(READ, WRITE), local=False)
    body = {"queries": x[0].tolist()}

    async def conversation(client):
        return (
            [
                (await client.post("/search", json=body, headers=head)).status_code
                for head in ({}, headers("wrong"), headers(READ), headers(WRITE), {"authorization": READ})
            ]
            + [
                (await client.post("/remove", json={"ids": [1]}, headers=head)).status_code
                for head in ({}, headers("wrong"), headers(READ), headers(WRITE))
            ]
            + [(await client.get(path)).status_code for path in ("/health", "/info", "/metrics", "/nowhere")]
        )

    statuses = talk(app, conversation)
    assert statuses[:5] == [401, 401, 200, 200, 401]
    assert statuses[5:9] == [401, 401, 403, 200]
    assert statuses[9:] == [200, 401, 401, 401]


@pytest.mark.parametrize("path", ["/remove", "/add", "/update", "/reload"])
@pytest.mark.parametrize("ending", ["%0A", "%0a", "/", "%00", "%20", "//"])
def test_no_other_spelling_of_a_path_changes_anything(own_bundle, path, ending):
    before = amips.load(own_bundle).n
    for tokens in (Tokens(), Tokens.of(READ, WRITE)):

        async def ask(client, tokens=tokens):
            head = {} if tokens == Tokens() else {"authorization": f"Bearer {READ}"}
            return await client.post(f"{path}{ending}", json={"ids": [1]}, headers=head)

        answer = talk(application(own_bundle, tokens=tokens), ask)
        assert answer.status_code in (401, 403, 404)
    assert amips.load(own_bundle).n == before


def test_changes_are_off_without_a_token_for_them(app):
    async def conversation(client):
        return await client.post("/add", json={"keys": [[0.0] * 16]})

    answer = talk(app, conversation)
    assert answer.status_code == 403
    assert "AMIPS_WRITE_TOKEN" in answer.json()["error"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://localhost:8000", 200), ("http://[::1]:80", 200)],
)
def test_a_page_of_another_host_does_not_use_a_local_service_without_a_token(bundle, x, origin, status):
    async def conversation(client):
        body = {"queries": x[:1].tolist()}
        return (await client.post("/search", json=body, headers={"origin": origin})).status_code

    assert talk(application(bundle), conversation) == status
    with_token = application(bundle, tokens=Tokens.of(READ, None))  # which a page of another host has not

    async def ask(client):
        return (await client.get("/info", headers={**headers(READ), "origin": origin})).status_code

    assert talk(with_token, ask) == 200


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example:80", "", "localhost.evil"])
def test_a_local_service_without_a_token_has_no_other_name(app, name):
    async def conversation(client):
        good = [
            (await client.get("/info", headers={"host": host})).status_code
            for host in ("localhost:80", "[::1]:80")
        ]
        return good, (await client.get("/info", headers={"host": name})).status_code

    assert talk(app, conversation) == ([200, 200], 403)


def test_keys_come_and_go(own_bundle, x):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))
    head = headers(WRITE)
    key = (3 * x[0]).tolist()

    async def conversation(client):
        added = await client.post(
            "/add",
            json={"keys": [key, key], "ids": [700, 701], "attributes": {"price": [1, 2]}},
            headers=head,
        )
        more = await client.post("/add", content=x[:1].tobytes(), headers={**head, "content-type": RAW})
        first = (await client.post("/search", json={"queries": x[0].tolist()})).json()
        removed = await client.post("/remove", json={"ids": [700]}, headers=head)
        updated = await client.post("/update", json={"ids": [701], "keys": [x[1].tolist()]}, headers=head)
        second = (await client.post("/search", json={"queries": x[0].tolist()})).json()
        with amips.load(own_bundle) as other:  # another process may change it, too
            other.remove([0])
        reload = await client.post("/reload", headers=head)
        again = await client.post("/reload", headers=head)
        bad = [
            await client.post(path, json=body, headers=head)
            for path, body in (
                ("/remove", {"ids": [700]}),
                ("/remove", {"ids": []}),
                ("/remove", {"ids": "keys.npy"}),
                ("/remove", {}),
                ("/add", {"keys": [[1.0]]}),
                ("/add", {"keys": "keys.npy"}),
                ("/add", {"keys": [key], "ids": [5]}),
                ("/add", {"keys": [key], "ids": ["a"]}),
                ("/add", {"keys": [key], "attributes": "keys.parquet"}),
                ("/add", {"keys": [key], "attributes": {"price": ["dear"]}}),
                ("/add", {"keys": [key], "attributes": {"price": [1, 2]}}),
                ("/update", {"keys": [key]}),
                ("/update", {"keys": [key], "ids": [9999]}),
            )
        ]
        return added, more, first, removed, updated, second, reload, again, bad

    added, more, first, removed, updated, second, reload, again, bad = talk(app, conversation)
    assert added.json() == {"ids": [700, 701], "n": 602}
    assert more.json()["n"] == 603
    assert set(first["ids"][0][:2]) == {700, 701}
    assert removed.json() == {"removed": 1, "n": 602}
    assert updated.json() == {"n": 602}
    assert 700 not in second["ids"][0]
    assert reload.json() == {"changed": True, "n": 601}
    assert again.json() == {"changed": False, "n": 601}
    assert [answer.status_code for answer in bad] == [400] * len(bad), [a.text for a in bad]
    index = amips.load(own_bundle)
    assert index.n == 601
    assert index.search(3 * x[1], where="price = 2")[1][0, 0] == 701


def test_a_reload_takes_the_newest_bundle_and_a_broken_one_changes_nothing(own_bundle, task, x):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        searching = [client.post("/search", json={"queries": x[:4].tolist()}) for _ in range(20)]
        amips.build(task, out=own_bundle, recall=0.8).close()
        *answers, changed = await asyncio.gather(*searching, client.post("/reload", headers=headers(WRITE)))
        info = (await client.get("/info")).json()
        for path in own_bundle.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        broken = await client.post("/reload", headers=headers(WRITE))
        after = await client.post("/search", json={"queries": x[0].tolist()})
        return answers, changed.json(), info, broken, after

    answers, changed, info, broken, after = talk(app, conversation)
    assert {answer.status_code for answer in answers} == {200}
    assert changed["changed"] is True
    assert info["target_recall"] == 0.8
    assert broken.status_code == 409
    assert after.status_code == 200


def test_info_says_whether_this_client_can_change_anything(bundle):
    async def conversation(client):
        return (await client.get("/info")).json()["changes"]

    assert talk(application(bundle), conversation) is False  # there is no token for changes
    assert talk(application(bundle, tokens=Tokens.of(None, WRITE)), conversation) is True


def test_a_change_does_not_move_the_time_of_loading(own_bundle, x):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        times = []
        for path, body in (("/add", {"keys": x[:1].tolist()}), ("/reload", {})):
            app.service.counters.loaded.set(1)
            await client.post(path, json=body, headers=headers(WRITE))
            if path == "/add":
                with amips.load(own_bundle) as other:
                    other.remove([0])
            metrics = (await client.get("/metrics")).text
            times.append(float(re.search(r"^amips_loaded_timestamp_seconds (.*)$", metrics, re.M)[1]))
        return times

    added, reloaded = talk(app, conversation)
    assert added == 1
    assert reloaded > 1


class Words:
    """A bag of words: every word is one random direction."""

    name, d = "words", 16

    def encode(self, texts):
        rows = np.zeros((len(texts), self.d), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(self.d)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_questions(tmp_path, monkeypatch):
    words = [f"word{i}" for i in range(40)]
    rng = np.random.default_rng(0)
    lines = [{"_id": f"doc{i}", "title": "", "text": " ".join(rng.choice(words, 4))} for i in range(300)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "queries.txt").write_text("".join(" ".join(rng.choice(words, 2)) + "\n" for _ in range(300)))
    embedded = embed(
        tmp_path / "corpus.jsonl", tmp_path / "queries.txt", encoder=Words(), out=tmp_path / "vectors"
    )
    task = amips.label(embedded.keys, embedded.queries, cells=4, k=10, val=60, test=40)
    amips.build(task, storage="flat", out=tmp_path / "bundle").close()
    attach(tmp_path / "bundle", embedded)
    batches = []

    class Counted(Words):
        def encode(self, texts):
            batches.append(len(texts))
            return super().encode(texts)

    monkeypatch.setattr(asking, "open_published", lambda name: Counted())
    app = application(tmp_path / "bundle", tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        answer = await client.post("/ask", json={"question": "word3 word5", "k": 3})
        empty = await client.post("/ask", json={"question": " "})
        explanation = await client.post("/explain", json={"question": "word3 word5", "k": 3})
        assert described(explanation) == 200
        explained = explanation.json()
        assert [hit["text"] for hit in explained["results"]] == [hit["text"] for hit in answer.json()["hits"]]
        texts = (await client.get("/info")).json()["texts"]
        several = [" ", *[f"word{i} word{i + 1}" for i in range(7)]]
        alone = [(await client.post("/ask", json={"question": one})).json() for one in several]
        batches.clear()
        calls = [client.post("/ask", json={"question": one}) for one in several]
        assert [one.json() for one in await asyncio.gather(*calls)] == alone
        await client.post("/add", json={"keys": [[1.0] * 16]}, headers=headers(WRITE))
        after = await client.post("/ask", json={"question": "word3 word5"})
        return answer, empty, texts, after

    answer, empty, texts, after = talk(app, conversation)
    assert max(batches) >= 6
    assert [described(one) for one in (answer, empty, after)] == [200, 400, 409]
    best = np.argsort(-(np.load(tmp_path / "vectors" / "keys.npy") @ Words().encode(["word3 word5"])[0]))
    rows = (tmp_path / "vectors" / "keys.jsonl").read_text().splitlines()
    assert answer.json()["hits"][0]["id"] == json.loads(rows[best[0]])["id"]
    assert len(answer.json()["hits"]) == 3
    assert texts is True
    assert "without texts" in after.json()["error"]


def test_info_health_and_openapi(app):
    async def conversation(client):
        return [(await client.get(path)).json() for path in ("/info", "/health", "/openapi.json")]

    info, health, document = talk(app, conversation)
    assert (info["n"], info["d"], info["target_recall"]) == (600, 16, 0.9)
    assert info["attributes"] == {"price": "int64"}
    assert info["limits"]["rows"] == 1024
    assert health == {"status": "ready"}
    assert set(document["paths"]) == set(app._calls)
    assert document["openapi"].startswith("3.1")


def test_health_is_503_until_the_index_is_loaded(app):
    async def run():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            before = await client.get("/health"), await client.post("/search", json={"queries": []})
            await app.service.start()
            after = await client.get("/health")
            await app.service.close()
            return *before, after

    health, search, after = asyncio.run(run())
    assert health.status_code == search.status_code == 503
    assert after.status_code == 200


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=17) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)
FIELD = st.sampled_from(
    [
        "queries",
        "k",
        "recall",
        "probes",
        "min_mass",
        "where",
        "filter",
        "keys",
        "ids",
        "attributes",
        "question",
    ]
)


def test_whatever_is_sent_is_answered_with_200_or_4xx(own_bundle):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(app.service.start())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    @settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.binary(max_size=200) | st.dictionaries(FIELD, JSONS).map(lambda value: json.dumps(value).encode()),
        st.sampled_from(["/search", "/ask", "/add", "/remove", "/update"]),
        st.sampled_from(["application/json", RAW, NPY, "", "\x80"]),
        st.text(alphabet="kprecal=&0.9%", max_size=12),
    )
    def check(body, path, kind, query):
        call = client.post(
            f"{path}?{query}",
            content=body,
            headers={**headers(WRITE), "content-type": kind.encode("latin1")},
        )
        answer = loop.run_until_complete(call)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert set(answer.json()) == {"error"}

    try:
        check()
    finally:
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(app.service.close())
        loop.close()


def test_methods(app):
    async def conversation(client):
        return await client.head("/health"), await client.get("/search"), await client.post("/info")

    head, get, post = talk(app, conversation)
    assert head.status_code == 200
    assert (get.status_code, get.headers["allow"]) == (405, "POST")
    assert (post.status_code, post.headers["allow"]) == (405, "GET, HEAD")
    assert "another method" in post.json()["error"]
