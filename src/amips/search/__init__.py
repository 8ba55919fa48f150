"""Learned search: the object a user holds, what is known of its recall, and the bundle it is saved in."""

from amips.search.auditing import Audit, Recall, audit, effort_in_words
from amips.search.bundle import load, save
from amips.search.bundle_directory import TEXT_MANIFEST, bundle_stamp, check_bundle_place, read_bundle
from amips.search.bundle_texts import TEXTS, read_texts, write_texts
from amips.search.cost import Cost
from amips.search.effort import effort_for
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import (
    check_labels,
    checked_k,
    checked_probes,
    checked_queries,
    restore_norms,
    split_norms,
)
from amips.search.measuring import (
    MARGINS,
    calibrated,
    calibrated_graph,
    estimate_routing,
    margin_ladder,
    measure,
    measure_margins,
    measure_masses,
)
from amips.search.memory import DIMENSIONS, Memory
from amips.search.memory_measuring import measure_index, measure_memory, with_memory
from amips.search.memory_searcher import Index, MemorySearcher, plain_index, with_facts
from amips.search.points import (
    Point,
    all_found,
    assured_recalls,
    ladder,
    mass_bounds,
    point_for,
    recalls,
    surest_point,
)
from amips.search.report import Objective, Report, Row, Trial, cost_in_words
from amips.search.searcher import DROP_IN_CANDIDATES, Searcher
from amips.search.signatures import Verified, sign, verify
from amips.search.spill import checked_second, first_of, ranked, second_cells
from amips.search.wrapped import WrappedIndex
from amips.search.wrapping import wrap

__all__ = [
    "DIMENSIONS",
    "DROP_IN_CANDIDATES",
    "MARGINS",
    "TEXTS",
    "TEXT_MANIFEST",
    "Audit",
    "Cost",
    "GraphSearcher",
    "Index",
    "Memory",
    "MemorySearcher",
    "Objective",
    "Point",
    "Recall",
    "Report",
    "Row",
    "Searcher",
    "Trial",
    "Verified",
    "WrappedIndex",
    "all_found",
    "assured_recalls",
    "audit",
    "bundle_stamp",
    "calibrated",
    "calibrated_graph",
    "check_bundle_place",
    "check_labels",
    "checked_k",
    "checked_probes",
    "checked_queries",
    "checked_second",
    "cost_in_words",
    "effort_for",
    "effort_in_words",
    "estimate_routing",
    "first_of",
    "ladder",
    "load",
    "margin_ladder",
    "mass_bounds",
    "measure",
    "measure_index",
    "measure_margins",
    "measure_masses",
    "measure_memory",
    "plain_index",
    "point_for",
    "ranked",
    "read_bundle",
    "read_texts",
    "recalls",
    "restore_norms",
    "save",
    "second_cells",
    "sign",
    "split_norms",
    "surest_point",
    "verify",
    "with_facts",
    "with_memory",
    "wrap",
    "write_texts",
]
