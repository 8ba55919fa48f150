"""Stores of keys: by cell, to scan the cells they are told to; at the nodes of a graph, to walk it."""

from amips.index.cell_files import FILES, SECOND, read_array
from amips.index.cell_store import CellStore
from amips.index.costs import cell_bytes, graph_bytes, scan_flops
from amips.index.faiss_store import REFINE, FaissCellStore
from amips.index.few_search import FewSearch
from amips.index.fill import FEWEST_KEYS, check_enough_keys, pq_parts
from amips.index.graph_filter import MOST_IN_ORDER
from amips.index.graph_store import CODING, GRAPH_FILES, MOST_VALUES, GraphStore, check_graph_size
from amips.index.key_mask import KeyMask
from amips.index.listed import ListedKeys
from amips.index.living_cells import OwnCells, kept_cells, parts_of, scan_allowed, with_added
from amips.index.matches import Matches, best_behind, best_matches
from amips.index.top_keys import score_candidates, top_of_rows

__all__ = [
    "CODING",
    "FEWEST_KEYS",
    "FILES",
    "GRAPH_FILES",
    "MOST_IN_ORDER",
    "MOST_VALUES",
    "REFINE",
    "SECOND",
    "CellStore",
    "FaissCellStore",
    "FewSearch",
    "GraphStore",
    "KeyMask",
    "ListedKeys",
    "Matches",
    "OwnCells",
    "best_behind",
    "best_matches",
    "cell_bytes",
    "check_enough_keys",
    "check_graph_size",
    "graph_bytes",
    "kept_cells",
    "parts_of",
    "pq_parts",
    "read_array",
    "scan_allowed",
    "scan_flops",
    "score_candidates",
    "top_of_rows",
    "with_added",
]
