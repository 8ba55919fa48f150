"""Who may ask, and who may change: tokens, names, pages of other hosts."""

import pytest

import amips
from amips.serving import Tokens
from serving_helpers import READ, WRITE, application, headers, talk


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
