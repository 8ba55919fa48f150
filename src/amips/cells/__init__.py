"""Partitions of the keys into cells: by k-means, by where their queries are, or taken from a FAISS index."""

from amips.cells.aware import STRENGTH, check_top, make_cells, query_aware, towards_queries, wanted_by
from amips.cells.clustering import (
    ITERATIONS,
    POINT_BYTES,
    POINT_SHARE,
    POINTS_PER_CELL,
    Cells,
    assign,
    cell_means,
    check,
    default_count,
    fill_empty,
    fingerprint_of,
    kmeans,
    points_for,
    trivial,
)
from amips.cells.outside import SAME_NORM, IVFParts, Placement, from_faiss, ivf_parts, place_keys

__all__ = [
    "ITERATIONS",
    "POINTS_PER_CELL",
    "POINT_BYTES",
    "POINT_SHARE",
    "SAME_NORM",
    "STRENGTH",
    "Cells",
    "IVFParts",
    "Placement",
    "assign",
    "cell_means",
    "check",
    "check_top",
    "default_count",
    "fill_empty",
    "fingerprint_of",
    "from_faiss",
    "ivf_parts",
    "kmeans",
    "make_cells",
    "place_keys",
    "points_for",
    "query_aware",
    "towards_queries",
    "trivial",
    "wanted_by",
]
