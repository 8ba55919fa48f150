"""Whatever clients send is answered, in one line."""

import asyncio
import gzip
import json

import faiss
import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import amips
from amips.serving import Application, Service, Tokens
from amips.serving.requests import NPY, RAW
from serving_helpers import WRITE, application, headers, talk

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


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=17) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)
# A search, or keys, that can be had, but for an option.
OPTION = st.sampled_from(["k", "recall", "probes", "min_mass", "margin", "best_effort", "where", "filter"])
VALUE = (
    st.integers(0, 20)
    | st.floats(0, 1)
    | st.booleans()
    | st.sampled_from(["price < 3", "nothing"])
    | st.lists(st.integers(-1, 5), max_size=3)
)
NEARLY = st.builds(
    lambda name, row, options: {name: row, **options},
    st.sampled_from(["queries", "query", "keys"]),
    st.lists(st.floats(-1, 1, width=16), min_size=16, max_size=16),
    st.dictionaries(OPTION, VALUE, max_size=2),
)


def as_json(value):
    return json.dumps(value).encode()


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


@pytest.fixture
def served_kind(request, own_bundle, task, tmp_path):
    """A service of an index of each kind."""
    if request.param == "graph":
        amips.build(task, structure="graph", out=tmp_path / "graph", recall=0.9).close()
    elif request.param == "shards":
        amips.shard(task, shards=2, out=tmp_path / "shards", routers="centroid")
    elif request.param == "wrapped":
        keys = np.random.default_rng(0).standard_normal((60, 16)).astype(np.float32)
        index = faiss.index_factory(16, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
        index.train(keys)
        index.add(keys)
        return Application(Service(lambda: amips.wrap(index, None)), Tokens.of(None, WRITE))
    place = own_bundle if request.param == "cells" else tmp_path / request.param
    return application(place, tokens=Tokens.of(None, WRITE))


@pytest.mark.filterwarnings("ignore:recall is known of")
@pytest.mark.parametrize("served_kind", ["cells", "graph", "shards", "wrapped"], indirect=True)
def test_whatever_is_sent_is_answered_with_200_or_4xx(served_kind):
    app = served_kind
    loop = asyncio.new_event_loop()
    loop.run_until_complete(app.service.start())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    @settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.binary(max_size=200)
        | (st.dictionaries(FIELD, JSONS) | NEARLY).map(lambda value: json.dumps(value).encode()),
        st.sampled_from(["/search", "/ask", "/explain", "/add", "/remove", "/update", "/reload"]),
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
