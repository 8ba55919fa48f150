"""A directory of shards in the place of a bundle: load, audit, serve, and what is refused."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

import amips
from amips.cli import cli
from amips.serving import Service, Settings
from amips.sharding import ShardedIndex, connect_shards, load_shards
from amips.sharding.deployment import RayShards
from serving_helpers import WRITE, application, served, talk

RAW = "application/octet-stream"


@pytest.fixture
def x(shard_task):
    return np.asarray(shard_task.test.queries)


@pytest.fixture
def without_one(sharded, tmp_path):
    """The same directory, from which shard 1 is gone."""
    copy = shutil.copytree(sharded, tmp_path / "shards")
    shutil.rmtree(copy / "shard-001")
    return copy


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_load_opens_shards(sharded, x):
    with amips.load(sharded, mmap=True) as index:
        assert isinstance(index, ShardedIndex)
        assert (index.search(x)[1] == load_shards(sharded).search(x)[1]).all()
    with pytest.raises(amips.BundleError, match=r"trusted=: .* is in shards"):
        amips.load(sharded, trusted=b"a key")


def test_load_does_not_pass_over_a_shard_that_is_gone(without_one):
    with pytest.raises(amips.BundleError, match="partial=True"):
        amips.load(without_one)


@pytest.mark.parametrize("change", ["add", "remove", "update"])
def test_shards_are_not_changed(sharded, x, change):
    with pytest.raises(amips.BundleError, match="amips shard again"):
        getattr(amips.load(sharded), change)(x[:2], [1, 2])
    more = {"add": ["keys.npy"], "remove": ["3"], "update": ["keys.npy", "--ids", "ids.npy"]}
    problem = run(change, sharded, *more[change]).exception
    assert isinstance(problem, amips.BundleError)
    assert "amips shard again" in str(problem)


def test_drift_takes_a_bundle(sharded, tmp_path, x):
    np.save(tmp_path / "x.npy", x)
    assert "expected 'bundle'" in str(run("drift", sharded, tmp_path / "x.npy").exception)


def test_an_audit_knows_the_true_recall(sharded, shard_task, tmp_path, x):
    np.save(tmp_path / "x.npy", x)
    done = run("audit", sharded, tmp_path / "x.npy", "--json", "--recall", "0.9")
    assert done.exit_code in (0, 3), done.output
    told = json.loads(done.output)
    index = amips.load(sharded)
    ids, true = index.search(x, recall=0.9)[1], np.asarray(shard_task.test.top_ids)[:, :10]
    recall = (true[:, :, None] == ids[:, None, :]).any(axis=2).mean()
    assert told["recall10"]["mean"] == pytest.approx(recall)
    assert told["queries"] == len(x)
    assert told["needed"]["flops"] > 0
    shown = run("audit", sharded, tmp_path / "x.npy")
    assert "searched exactly" in shown.output
    assert "every key scored" in shown.output or "min_mass=" in shown.output


def test_an_audit_gives_an_index_that_keeps_the_recall(sharded, x):
    index = amips.load(sharded)
    audit = index.audit(x, recall=0.97, threads=1)
    assert audit.index.audit(x, recall=0.97).recall10.mean >= 0.97


def test_an_audit_of_shards_adopts_nothing_and_misses_none(sharded, without_one, tmp_path, x):
    np.save(tmp_path / "x.npy", x)
    assert "--adopt" in str(run("audit", sharded, tmp_path / "x.npy", "--adopt").exception)
    assert isinstance(run("audit", without_one, tmp_path / "x.npy").exception, amips.BundleError)
    with pytest.raises(amips.ShardsMissingError):
        load_shards(without_one, partial=True).audit(x)


def test_an_audit_of_string_ids(shard_task, tmp_path, x):
    amips.build(shard_task, out=tmp_path / "b", ids=[f"key {i}" for i in range(shard_task.n)]).close()
    index = amips.shard(tmp_path / "b", shards=2, out=tmp_path / "s", routers="centroid")
    assert index.audit(x).recall10.mean > 0.8


def test_a_service_of_shards(sharded, x):
    index = amips.load(sharded)

    async def conversation(client):
        found = await client.post("/search", json={"queries": x[:20].tolist(), "k": 5, "recall": 0.9})
        whole = await client.post("/search", json={"queries": x[:2].tolist(), "partial": True})
        refused = await client.post("/search", json={"queries": x[:2].tolist(), "where": "a = 1"})
        explained = await client.post("/explain", json={"query": x[0].tolist()})
        return found, whole, refused, explained, await client.get("/info"), await client.get("/metrics")

    found, whole, refused, explained, info, metrics = talk(application(sharded), conversation)
    assert found.json()["ids"] == index.search(x[:20], 5, recall=0.9)[1].tolist()
    assert "missing" not in found.json()
    assert whole.json()["missing"] == [0, 0]
    assert refused.status_code == 400
    assert "where: this index is in shards" in refused.json()["error"]
    assert explained.status_code == 200
    facts = info.json()
    assert facts["shards"]["sizes"] == index.sizes.tolist()
    assert facts["shards"]["missing"] == []
    assert facts["changes"] is False
    assert facts["n"] == 1500
    assert "amips_missing_shards 0.0" in metrics.text


def test_a_service_without_a_shard_says_so(without_one, x):
    index = load_shards(without_one, partial=True)
    answer = index.ask(x)
    whole, lacking = np.flatnonzero(answer.missing == 0), np.flatnonzero(answer.missing)
    assert len(whole)
    assert len(lacking)
    app = application(without_one)
    app.service = Service.of(Settings(without_one, partial=True))

    async def conversation(client):
        bodies = [{"queries": [x[row].tolist()]} for row in (whole[0], lacking[0])]
        together = await asyncio.gather(*(client.post("/search", json=body) for body in bodies))
        partial = await client.post("/search", json={"queries": x.tolist(), "partial": True})
        raw = await client.post(
            "/search?partial=true", content=x.tobytes(), headers={"content-type": RAW, "accept": RAW}
        )
        return *together, partial, raw, await client.get("/info"), await client.get("/metrics")

    good, bad, partial, raw, info, metrics = talk(app, conversation)
    assert good.status_code == 200, "a query that needs no missing shard is not hurt by another's"
    assert bad.status_code == 503
    assert f"up to {answer.missing[lacking[0]]:.1%} of a query's expected top keys" in bad.json()["error"]
    for one in (partial, raw):
        assert one.status_code == 200
        np.testing.assert_allclose(one.json()["missing"], answer.missing, rtol=1e-5)
        assert one.json()["ids"] == answer.ids.tolist()
    assert info.json()["shards"]["missing"] == [1]
    assert "amips_missing_shards 1.0" in metrics.text


def test_mass_that_is_rounded_to_nothing_is_missing_all_the_same(without_one, x):
    whole = load_shards(without_one, partial=True)
    index = replace(whole, temperature=1e-4)  # all mass but that of the best shard is 0 in float32
    answer = index.ask(x, probes=4)
    assert (answer.missing > 0).all()
    row = np.argmin(answer.missing)
    with pytest.raises(amips.ShardsMissingError, match=r"up to 0\.1% of a query's"):
        index.search(x[row], probes=4)
    app = application(without_one)
    app.service = Service(lambda: index)

    async def conversation(client):
        return await client.post("/search", json={"queries": x[row : row + 1].tolist(), "probes": 4})

    assert talk(app, conversation).status_code == 503


@pytest.mark.filterwarnings("ignore")  # of what Ray Serve imports
@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_cluster_that_does_not_answer_is_one_line_at_once(sharded, monkeypatch, address):
    pytest.importorskip("ray").shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # what "auto" means
    with pytest.raises(amips.AmipsError, match=rf"^no Ray cluster can be joined at {address}: "):
        connect_shards(sharded, address=address)


def test_a_process_that_has_left_its_cluster_gets_no_answer(sharded, x):
    pytest.importorskip("ray").shutdown()
    index = load_shards(sharded)
    away = replace(index, shards=RayShards("amips", 1.0, index.digests))
    assert set(away.ask(x).silent.values()) == {"this process has left the Ray cluster"}


def test_partial_of_an_index_in_one_piece(shard_task, tmp_path, x):
    amips.build(shard_task, out=tmp_path / "b").close()

    async def conversation(client):
        return await client.post("/search", json={"queries": x[:3].tolist(), "partial": True})

    assert talk(application(tmp_path / "b"), conversation).json()["missing"] == [0, 0, 0]
    with pytest.raises(amips.BundleError, match="--partial is of shards"):
        Service.of(Settings(tmp_path / "b", partial=True)).open()


def test_serve_as_it_is_typed(sharded, without_one, x):
    index = amips.load(sharded)
    with (
        served(sharded, AMIPS_WRITE_TOKEN=WRITE) as server,
        amips.connect(server.address, write_token=WRITE) as client,
    ):
        assert (client.search(x, recall=0.9)[1] == index.search(x, recall=0.9)[1]).all()
        with pytest.raises(amips.AmipsError, match=r"409: shards are not changed: .* amips shard again"):
            client.add(x[:1])
        assert client.reload()
        assert server.end() == 0
    command = [sys.executable, "-m", "amips", "serve", str(without_one), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "shard-001 is not a directory" in done.stderr
    with served(without_one, "--partial") as server:
        answer = httpx.post(f"{server.address}/search", json={"queries": x.tolist(), "partial": True})
        assert max(answer.json()["missing"]) > 0
        assert httpx.post(f"{server.address}/search", json={"queries": x.tolist()}).status_code == 503
        server.end()
        assert any("shard 1 is not served" in str(line) for line in server.log)
