"""Exact top keys and per-cell maxima: the labeller."""

from amips.exact.sweep import MEMORY, cell_maxima, ranks, top_k

__all__ = ["MEMORY", "cell_maxima", "ranks", "top_k"]
