"""The one place that makes indexes: cells, router and index of a design, from a task."""

from amips.builder.builder import Builder, at_start
from amips.builder.building import build, default_design
from amips.builder.graphs import graph_design, graph_searcher
from amips.builder.memories import memory_of
from amips.builder.reduced import LEAN_FRACTIONS, fewest_dimensions

__all__ = [
    "LEAN_FRACTIONS",
    "Builder",
    "at_start",
    "build",
    "default_design",
    "fewest_dimensions",
    "graph_design",
    "graph_searcher",
    "memory_of",
]
