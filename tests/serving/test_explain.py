"""Searches explained, and the page that shows them, over HTTP within this process."""

import asyncio
import gc
import json
import re
import threading
import weakref

import numpy as np
import pytest

import amips
from amips.serving import Application, Service, Tokens
from amips.serving.answers import json_answer
from amips.serving.explanations import Explainer
from serving_helpers import READ, WRITE, application, talk


def test_an_explanation_has_results_methods_cells_and_a_map(bundle, x):
    _, ids = amips.load(bundle).search(x[:1], 5, recall=0.9)

    async def conversation(client):
        return await client.post("/explain", json={"query": x[0].tolist(), "k": 5, "recall": 0.9})

    answer = talk(application(bundle), conversation)
    value = answer.json()
    assert answer.status_code == 200
    assert [one["id"] for one in value["results"]] == ids[0].tolist()
    assert value["methods"][0]["name"] == "amips"
    assert value["methods"][-1] == {**value["methods"][-1], "name": "exact search", "scanned": 600, "hits": 5}
    assert value["way"] == "cells"
    assert 1 <= len(value["cells"]) <= value["c"]
    drawn = value["map"]
    assert drawn["what"] == "cells"
    assert len(drawn["background"]) == value["c"]
    assert len(drawn["probed"]) == len(value["cells"])
    assert len(drawn["results"]) == 5
    assert np.isfinite(drawn["query"]).all()
    assert 0 < drawn["variance"] <= 1


def test_a_condition_holds(bundle, x):
    async def conversation(client):
        return await client.post("/explain", json={"query": x[0].tolist(), "k": 5, "where": "price < 20"})

    value = talk(application(bundle), conversation).json()
    assert value["n"] == 20
    assert all(one["id"] < 20 for one in value["results"])


def test_a_graph_is_compared_with_plain_cells_that_are_made_meanwhile(task, tmp_path, x):
    amips.build(task, structure="graph", out=tmp_path / "graph", recall=0.9).close()
    app = application(tmp_path / "graph")

    async def conversation(client):
        first = (await client.post("/explain", json={"query": x[0].tolist()})).json()
        while app.service._explainer._making.is_alive():
            await asyncio.sleep(0.01)
        return first, (await client.post("/explain", json={"query": x[0].tolist()})).json()

    first, second = talk(app, conversation)
    assert (first["way"], first["cells"], first["map"]["what"]) == ("graph", [], "keys")
    assert any("ask again" in note for note in first["notes"])
    assert not any("not compared" in note for note in first["notes"])
    assert "plain IVF" in second["methods"][1]["name"]


class Plain:
    """An index of which nothing is known, such as shards."""

    n, d = 3, 2

    def search(self, x, k=10, **_):
        return np.array([[2.0, 1.0, -np.inf]]), np.array([[1, 0, -1]])


def test_an_index_that_says_little_is_answered_with_less():
    async def conversation(client):
        return (await client.post("/explain", json={"query": [1, 2]})).json()

    value = talk(Application(Service(Plain)), conversation)
    assert [one["id"] for one in value["results"]] == [1, 0]
    assert value["map"] is None
    assert value["methods"][0]["scanned"] is None
    assert "does not say" in value["notes"][0]


def test_after_a_reload_nothing_keeps_the_index_that_was_explained(own_bundle, task, x):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        body, head = {"query": x[0].tolist()}, {"authorization": f"Bearer {WRITE}"}
        assert (await client.post("/explain", json=body)).json()["map"] is not None
        before = weakref.ref(app.service.index.snapshot.store)
        amips.build(task, out=own_bundle, recall=0.8).close()
        assert (await client.post("/reload", headers=head)).json()["changed"] is True
        gc.collect()
        return before(), (await client.post("/explain", json=body)).status_code

    assert talk(app, conversation) == (None, 200)


def test_an_answer_has_no_infinite_numbers():
    answer = json_answer({"scores": [np.inf, (1.0, -np.inf)], "one": {"more": np.nan}})
    assert json.loads(answer.body) == {"scores": [None, [1.0, None]], "one": {"more": None}}


def test_one_at_a_time_and_searches_go_on(bundle, x, monkeypatch):
    app = application(bundle)
    begun, go_on = threading.Event(), threading.Event()
    explain = Explainer.explain

    def slow(*arguments):
        begun.set()
        go_on.wait(20)
        return explain(*arguments)

    monkeypatch.setattr(Explainer, "explain", slow)

    async def conversation(client):
        body = {"query": x[0].tolist()}
        first = asyncio.create_task(client.post("/explain", json=body))
        await asyncio.to_thread(begun.wait, 20)
        second = await client.post("/explain", json=body)
        search = await client.post("/search", json={"queries": [body["query"]]})
        go_on.set()
        return await first, second, search

    first, second, search = talk(app, conversation)
    assert (first.status_code, second.status_code, search.status_code) == (200, 503, 200)
    assert "retry-after" in second.headers


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "one of them"),
        ({"query": [1.0]}, 400, "16"),
        ({"query": [[1.0] * 16] * 2}, 400, "one at a time"),
        ({"query": [1.0] * 16, "question": "a"}, 400, "one of them"),
        ({"query": [1.0] * 16, "k": 101}, 400, "k"),
        ({"query": [1.0] * 16, "recall": 2}, 400, "recall"),
        ({"query": [1.0] * 16, "where": "nothing = 1"}, 400, "nothing"),
        ({"question": "a"}, 404, "no texts"),
    ],
    ids=["nothing", "dimension", "two", "both", "many", "recall", "column", "no-texts"],
)
def test_bad_requests(bundle, body, status, words):
    async def conversation(client):
        return await client.post("/explain", json=body)

    answer = talk(application(bundle), conversation)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_an_explanation_needs_the_token_and_the_page_does_not(bundle, x):
    app = application(bundle, tokens=Tokens.of(READ, WRITE))

    async def conversation(client):
        body = {"query": x[0].tolist()}
        allowed = {"authorization": f"Bearer {READ}"}
        return [
            await client.get("/"),
            await client.post("/explain", json=body),
            await client.post("/explain", json=body, headers=allowed),
        ]

    assert [answer.status_code for answer in talk(app, conversation)] == [200, 401, 200]


def test_the_page_is_one_file_under_a_strict_policy(bundle):
    async def conversation(client):
        return await client.get("/")

    page = talk(application(bundle), conversation)
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("'sha256-[^']+'", policy)) == 2
    assert not re.search(r"https?://|\son\w+=|style=|innerHTML|localStorage", page.text)
