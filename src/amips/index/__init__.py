"""Cell stores: hold the keys by cell, and scan the cells they are told to."""

from amips.index.cell_store import CellStore
from amips.index.costs import scan_flops
from amips.index.faiss_store import BESIDE, INDEX, REFINE, SECOND, FaissCellStore
from amips.index.fill import FEWEST_KEYS, pq_parts
from amips.index.read import read_array
from amips.index.top_keys import score_candidates

__all__ = [
    "BESIDE",
    "FEWEST_KEYS",
    "INDEX",
    "REFINE",
    "SECOND",
    "CellStore",
    "FaissCellStore",
    "pq_parts",
    "read_array",
    "scan_flops",
    "score_candidates",
]
