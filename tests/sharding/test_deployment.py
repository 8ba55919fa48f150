import shutil
import time

import numpy as np
import pytest

import amips
from amips.sharding import connect_shards, deploy_shards, load_shards, remove_shards
from amips.sharding.deployment import shard_name
from ray_helpers import two_nodes

pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and files to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, with room for all replicas on either."""
    with two_nodes(cpus=2) as nodes:
        from ray import serve

        yield nodes
        serve.shutdown()


@pytest.fixture(scope="module")
def pair(shard_task, tmp_path_factory):
    """Two shards: each replica is a process that must start."""
    out = tmp_path_factory.mktemp("sharding") / "pair"
    amips.shard(shard_task, shards=2, out=out, routers="centroid")
    return out


@pytest.fixture(scope="module")
def deployed(cluster, pair):
    """Two replicas of both."""
    return deploy_shards(pair, replicas=2, cpus=0.1, timeout=60)


def replicas_of(shard):
    """The actors that serve a shard."""
    import ray

    mark = f"{shard_name('amips', shard)}#"
    return [actor for actor in ray.util.list_named_actors(all_namespaces=True) if mark in actor["name"]]


def test_the_answers_are_those_of_one_process(deployed, pair, shard_task):
    x = np.asarray(shard_task.test.queries)
    scores, ids = deployed.search(x)
    local = load_shards(pair)
    assert (ids == local.search(x)[1]).all()
    assert scores == pytest.approx(local.search(x)[0])
    again = connect_shards(pair, timeout=30)
    assert (again.search(x, recall=1.0)[1] == np.asarray(shard_task.test.top_ids)).all()


def test_another_replica_takes_over_when_one_is_killed(deployed, pair, shard_task):
    import ray

    x = np.asarray(shard_task.test.queries)
    whole = load_shards(pair).search(x)[1]
    for shard in range(2):
        replicas = replicas_of(shard)
        assert len(replicas) == 2
        ray.kill(ray.get_actor(replicas[0]["name"], namespace=replicas[0]["namespace"]), no_restart=True)
        answer = deployed.ask(x)
        assert answer.complete
        assert (answer.missing == 0).all()
        assert (answer.ids == whole).all()


def test_a_shard_that_is_slow_is_missing_after_the_timeout(deployed, pair, shard_task):
    x = np.asarray(shard_task.test.queries)
    started = time.monotonic()
    answer = connect_shards(pair, timeout=1e-4).ask(x)
    assert time.monotonic() - started < 20
    assert not answer.complete
    assert any("no answer in 0.0001 s" in reason for reason in answer.silent.values())


def until(condition, seconds=40):
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_replicas_take_over_when_a_node_is_killed(cluster, deployed, pair, shard_task):
    import ray
    from ray._private.state import actors

    x = np.asarray(shard_task.test.queries)
    whole = load_shards(pair).search(x)[1]
    (lost,) = cluster.worker_nodes

    def serving():
        """The nodes of the replicas that live."""
        alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
        return [actor["Address"]["NodeID"] for actor in alive if "amips-00" in actor["Name"]]

    until(lambda: len(serving()) == 4)  # those that were killed before are back
    assert lost.node_id in serving()
    cluster.remove_node(lost, allow_graceful=False)

    def missed():
        answer = deployed.ask(x)  # while the node is being missed, too
        assert answer.complete, answer.silent
        assert (answer.missing == 0).all()
        assert (answer.ids == whole).all()
        return sum(node["Alive"] for node in ray.nodes()) == 1

    until(missed)
    assert (connect_shards(pair, timeout=60).search(x)[1] == whole).all()


def test_a_shard_that_is_wholly_gone_is_missing_and_said_to_be(deployed, shard_task):
    from ray import serve

    x = np.asarray(shard_task.test.queries)
    serve.delete(shard_name("amips", 1))
    answer = deployed.ask(x)
    asked = deployed.choose_shards(x)[:, 1]
    assert list(answer.silent) == [1]
    assert ((answer.missing > 0) == asked).all()
    with pytest.raises(amips.ShardsMissingError, match="shard 1 did not answer"):
        deployed.search(x)
    remove_shards(deployed)
    assert sorted(deployed.ask(x[:5], probes=2).silent) == [0, 1]


def test_a_replica_is_of_the_shard_that_is_asked(cluster, pair, tmp_path, shard_task):
    """Other bundles under the directory's path do not start; shards of another directory do not answer."""
    import ray

    swapped = shutil.copytree(pair, tmp_path / "swapped")
    (swapped / "shard-000").rename(swapped / "aside")
    (swapped / "shard-001").rename(swapped / "shard-000")
    (swapped / "aside").rename(swapped / "shard-001")
    with pytest.raises(amips.AmipsError, match=r"^shards of .* not the bundle that was made for this shard"):
        deploy_shards(swapped, name="swapped", cpus=0.1)
    with pytest.raises(amips.AmipsError, match="2 of 2 have no replica for want of time"):
        deploy_shards(pair, name="large", cpus=100, starting=0.5)
    other = amips.shard(shard_task, shards=2, out=tmp_path / "other", routers="centroid", seed=1)
    assert other.digests != load_shards(pair).digests
    index = deploy_shards(pair, name="one", cpus=0.1, mmap=True)
    x = np.asarray(shard_task.test.queries)
    reasons = set(connect_shards(tmp_path / "other", name="one").ask(x).silent.values())
    assert len(reasons) == 1
    assert "other shards are deployed under this name" in reasons.pop()
    assert index.ask(x).complete
    remove_shards(index)
    assert ray.is_initialized()


def test_what_cannot_be_deployed_is_refused(cluster, tmp_path):
    with pytest.raises(amips.BundleError, match="not a finished shards"):
        deploy_shards(tmp_path)
    with pytest.raises(amips.AmipsError, match="replicas=0"):
        deploy_shards(tmp_path, replicas=0)
