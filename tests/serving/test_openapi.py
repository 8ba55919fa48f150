"""The description of the service is one, and its answers are as described."""

import asyncio

import httpx
from openapi_spec_validator import OpenAPIV31SpecValidator

from amips.serving import Tokens
from serving_helpers import DESCRIPTION, WRITE, application, described, talk


def test_it_is_openapi():
    assert [error.message for error in OpenAPIV31SpecValidator(DESCRIPTION).iter_errors()] == []


def test_answers_are_as_described(own_bundle, x):
    app, head = application(own_bundle, tokens=Tokens.of(None, WRITE)), {"authorization": f"Bearer {WRITE}"}
    one, row = [0.5] * 16, x[0].tolist()
    calls = [
        ("/search", {"queries": [row], "k": 3}, 200),
        ("/search", {"queries": row, "k": 3, "filter": [1, 2]}, 200),
        ("/search", {"queries": [row], "k": 3, "filter": [True] * 600, "partial": True}, 200),
        ("/search", {"queries": [row], "k": 3, "where": "price < 0", "timeout": 3}, 200),
        ("/search", {"queries": []}, 400),
        ("/search", {"queries": [row], "k": 10**6}, 400),
        ("/explain", {"query": row, "k": 3}, 200),
        ("/explain", {"query": [row], "k": 3, "where": "price < 2"}, 200),
        ("/explain", {"query": []}, 400),
        ("/ask", {"question": "why?"}, 404),
        ("/add", {"keys": [one], "attributes": {"price": ["dear"]}}, 400),
        ("/add", {"keys": [one], "attributes": {"price": [3]}}, 200),
        ("/update", {"keys": [row], "ids": [3]}, 200),
        ("/remove", {"ids": [600]}, 200),
        ("/remove", {"ids": [600]}, 400),
        ("/reload", None, 200),
    ]

    async def conversation(client):
        posted = [await client.post(path, json=body, headers=head) for path, body, _ in calls]
        gotten = [
            await client.get(path) for path in DESCRIPTION["paths"] if "get" in DESCRIPTION["paths"][path]
        ]
        return posted, gotten, await client.post("/remove", json={"ids": [1]})

    posted, gotten, unauthorized = talk(app, conversation)
    assert [described(answer) for answer in posted] == [status for _, _, status in calls]
    assert {described(answer) for answer in gotten} == {200}
    assert described(unauthorized) == 401


def test_answers_while_it_loads_are_as_described(bundle):
    app = application(bundle)

    async def run():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return [await client.get("/health"), await client.post("/search", json={"queries": [[1.0] * 16]})]

    assert [described(answer) for answer in asyncio.run(run())] == [503, 503]
