"""Keys that come and go over HTTP, and reloads."""

import asyncio
import re
import shutil

import amips
from amips.serving import Tokens
from amips.serving.requests import RAW
from serving_helpers import WRITE, application, headers, talk


def test_an_error_names_the_bundle_without_its_path(own_bundle):
    app = application(own_bundle, tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        (own_bundle / "manifest.json").write_text("{}")
        return await client.post("/reload", headers=headers(WRITE))

    answer = talk(app, conversation)
    assert answer.status_code == 409
    assert own_bundle.name in answer.json()["error"]
    assert str(own_bundle.parent) not in answer.text


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
