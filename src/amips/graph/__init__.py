"""Graphs over the keys: edges from what is near and from what the log asks for together, entry points."""

from amips.graph.edges import connect, prune, reached, reverse, together
from amips.graph.making import (
    DEGREE,
    ENTRIES,
    LOG_DEPTH,
    Graph,
    entry_points,
    log_edges,
    make_graph,
    near_lists,
)
from amips.graph.near import EXACT_KEYS, PROBES, nearest_keys

__all__ = [
    "DEGREE",
    "ENTRIES",
    "EXACT_KEYS",
    "LOG_DEPTH",
    "PROBES",
    "Graph",
    "connect",
    "entry_points",
    "log_edges",
    "make_graph",
    "near_lists",
    "nearest_keys",
    "prune",
    "reached",
    "reverse",
    "together",
]
