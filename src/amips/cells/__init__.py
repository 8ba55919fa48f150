"""Partitions of the keys into cells: by k-means, by where their queries are, or taken from a FAISS index."""

from amips.cells.aware import STRENGTH, TOP, check_top, query_aware, towards_queries, wanted_by
from amips.cells.clustering import (
    POINTS_PER_CELL,
    Cells,
    assign,
    check,
    default_count,
    fill_empty,
    fingerprint_of,
    kmeans,
    trivial,
)
from amips.cells.outside import cells_of_faiss, faiss_ivf_inside, from_faiss

__all__ = [
    "POINTS_PER_CELL",
    "STRENGTH",
    "TOP",
    "Cells",
    "assign",
    "cells_of_faiss",
    "check",
    "check_top",
    "default_count",
    "faiss_ivf_inside",
    "fill_empty",
    "fingerprint_of",
    "from_faiss",
    "kmeans",
    "query_aware",
    "towards_queries",
    "trivial",
    "wanted_by",
]
