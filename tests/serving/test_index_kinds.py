"""Another library's index is served, or any object with a `search`: what it cannot have is a 400."""

import faiss
import numpy as np
import pytest

import amips
from amips.serving import Application, Service
from serving_helpers import described, talk


@pytest.fixture(scope="module")
def wrapped():
    """A FAISS index of 60 keys in 4 cells, of which one search probes one."""
    keys = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    index = faiss.index_factory(8, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(keys)
    index.add(keys)
    return amips.wrap(index, None)


class Few:
    """An object that takes nothing but k."""

    n, d = 1, 8

    def search(self, x, k=10):
        return np.zeros((len(x), k), np.float32), np.zeros((len(x), k), np.int64)


@pytest.mark.parametrize(
    ("path", "query", "options"),
    [
        ("/search", "queries", {"where": "price < 3"}),
        ("/search", "queries", {"margin": 0.1}),
        ("/explain", "query", {"where": "price < 3"}),
    ],
)
def test_an_option_that_an_index_does_not_have_is_refused(wrapped, path, query, options):

    async def conversation(client):
        body = {query: [1.0] * 8, "k": 1}
        return await client.post(path, json=body), await client.post(path, json={**body, **options})

    for index in (wrapped, Few()):
        good, bad = talk(Application(Service(lambda index=index: index)), conversation)
        assert good.status_code == 200
        assert bad.status_code == 400
        assert bad.json()["error"].startswith(f"{next(iter(options))}: this index")


def test_where_faiss_has_no_result_there_is_null(wrapped):
    async def conversation(client):
        body = {"queries": [1.0] * 8, "k": 50, "probes": 1}
        answers = [await client.post("/search", json=body), await client.get("/info")]
        explained = await client.post("/explain", json={"query": [1.0] * 8})
        assert [described(one) for one in (*answers, explained)] == [200] * 3
        return answers[0].json()

    answer = talk(Application(Service(lambda: wrapped)), conversation)
    missing = [one == -1 for one in answer["ids"][0]]
    assert any(missing)
    assert [one is None for one in answer["scores"][0]] == missing
