"""Shards: parts of a collection that queries are routed between, in one process or on a cluster."""

from amips.sharding.deployment import connect_shards, deploy_shards, remove_shards
from amips.sharding.directory import is_sharded, load_shards
from amips.sharding.grouping import Wants, expected_shards, group_cells
from amips.sharding.load_any import load, refuse_options
from amips.sharding.partition import CELLS_PER_SHARD, COPIES, KINDS, SLACK, Partition, divide
from amips.sharding.router import ShardRouter
from amips.sharding.shard_call import FEWEST_QUERIES, SHARD_QUERIES, shard
from amips.sharding.sharded import (
    EFFORT,
    UNCHANGED,
    Answer,
    LocalShards,
    Question,
    ShardedIndex,
    Shards,
    share_missing,
)

__all__ = [
    "CELLS_PER_SHARD",
    "COPIES",
    "EFFORT",
    "FEWEST_QUERIES",
    "KINDS",
    "SHARD_QUERIES",
    "SLACK",
    "UNCHANGED",
    "Answer",
    "LocalShards",
    "Partition",
    "Question",
    "ShardRouter",
    "ShardedIndex",
    "Shards",
    "Wants",
    "connect_shards",
    "deploy_shards",
    "divide",
    "expected_shards",
    "group_cells",
    "is_sharded",
    "load",
    "load_shards",
    "refuse_options",
    "remove_shards",
    "shard",
    "share_missing",
]
