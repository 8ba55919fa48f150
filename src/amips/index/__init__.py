"""Cell stores: hold the keys by cell, and scan the cells they are told to."""

from amips.index.cell_files import FILES, SECOND, read_array
from amips.index.cell_store import CellStore
from amips.index.costs import scan_flops
from amips.index.faiss_store import REFINE, FaissCellStore
from amips.index.fill import check_enough_keys, pq_parts
from amips.index.top_keys import score_candidates, top_of_rows

__all__ = [
    "FILES",
    "REFINE",
    "SECOND",
    "CellStore",
    "FaissCellStore",
    "check_enough_keys",
    "pq_parts",
    "read_array",
    "scan_flops",
    "score_candidates",
    "top_of_rows",
]
