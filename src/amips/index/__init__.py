"""Stores of keys: by cell, to scan the cells they are told to; at the nodes of a graph, to walk it."""

from amips.index.cell_files import FILES, SECOND, read_array
from amips.index.cell_store import CellStore
from amips.index.costs import scan_flops
from amips.index.faiss_store import REFINE, FaissCellStore
from amips.index.fill import FEWEST_KEYS, check_enough_keys, pq_parts
from amips.index.graph_store import GRAPH_FILES, MOST_VALUES, GraphStore, check_graph_size
from amips.index.single_search import MOST_SINGLE, SingleSearch
from amips.index.top_keys import score_candidates, top_of_rows

__all__ = [
    "FEWEST_KEYS",
    "FILES",
    "GRAPH_FILES",
    "MOST_SINGLE",
    "MOST_VALUES",
    "REFINE",
    "SECOND",
    "CellStore",
    "FaissCellStore",
    "GraphStore",
    "SingleSearch",
    "check_enough_keys",
    "check_graph_size",
    "pq_parts",
    "read_array",
    "scan_flops",
    "score_candidates",
    "top_of_rows",
]
