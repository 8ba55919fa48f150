"""Exact top keys and per-cell maxima: the labeller."""

from amips.exact.engine import check_device
from amips.exact.reduce import keep_best
from amips.exact.sweep import MEMORY, cell_maxima, check_memory, least_memory, ranks, top_k

__all__ = [
    "MEMORY",
    "cell_maxima",
    "check_device",
    "check_memory",
    "keep_best",
    "least_memory",
    "ranks",
    "top_k",
]
