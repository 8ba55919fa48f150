"""One directory of shards for all tests of the room."""

import pytest

import amips
from helpers import generate


@pytest.fixture(scope="session")
def shard_task(tmp_path_factory):
    """1,500 keys in topics, 1,200 queries."""
    keys, queries = generate(1500, 1200, 16)
    out = tmp_path_factory.mktemp("sharding") / "task"
    return amips.label(keys, queries, val=200, test=200, out=out)


@pytest.fixture(scope="session")
def sharded(shard_task, tmp_path_factory):
    """The directory of 4 shards, a fifth of the keys in two of them."""
    out = tmp_path_factory.mktemp("sharding") / "shards"
    amips.shard(shard_task, shards=4, out=out, minutes=0.02)
    return out
