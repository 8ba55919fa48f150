"""The service over HTTP, within this process: answers in every format."""

import asyncio
import base64
import io
import json
import re

import httpx
import numpy as np
import pytest

import amips
from amips.serving.logs import JsonFormatter
from amips.serving.requests import NPY, RAW, wants_raw
from serving_helpers import described, talk


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


def test_methods(app):
    async def conversation(client):
        return await client.head("/health"), await client.get("/search"), await client.post("/info")

    head, get, post = talk(app, conversation)
    assert head.status_code == 200
    assert (get.status_code, get.headers["allow"]) == (405, "POST")
    assert (post.status_code, post.headers["allow"]) == (405, "GET, HEAD")
    assert "another method" in post.json()["error"]
