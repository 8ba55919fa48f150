"""Learned search: the object a user holds, what is known of its recall, and the bundle it is saved in."""

from amips.search.adapting import Adaptation, safer
from amips.search.applying import compacted, live_keys
from amips.search.attributes import Attributes, read_table
from amips.search.auditing import SAMPLE, Audit, Recall, audit, draw_queries, effort_in_words
from amips.search.bundle import read_index, save
from amips.search.bundle_directory import TEXT_MANIFEST, bundle_stamp, check_bundle_place, read_bundle
from amips.search.bundle_state import Opened
from amips.search.bundle_texts import TEXTS, read_texts, write_texts
from amips.search.cost import Cost
from amips.search.drift import FALSE_ALARMS, Comparison, Drift, Reference, growth
from amips.search.drop_in_search import DROP_IN_CANDIDATES
from amips.search.effort import effort_for
from amips.search.explaining import NOT_COMPARED, Explanation, explain
from amips.search.graph_searcher import GraphSearcher
from amips.search.inputs import (
    check_labels,
    checked_k,
    checked_probes,
    checked_queries,
    restore_norms,
    split_norms,
)
from amips.search.key_order import live_numbers
from amips.search.living import Index
from amips.search.loading import load
from amips.search.measuring import (
    MARGINS,
    calibrated,
    calibrated_graph,
    estimate_routing,
    margin_ladder,
    measure,
    measure_about,
    measure_margins,
    measure_masses,
    near_target,
)
from amips.search.memory import DIMENSIONS, Memory
from amips.search.memory_measuring import measure_index, measure_memory, with_memory
from amips.search.memory_searcher import MemorySearcher, Snapshot, plain_index, with_facts
from amips.search.origin import Event, Origin
from amips.search.placing import Demand, Placement, learn_placement
from amips.search.plain_ivf import Method, PlainIvf
from amips.search.points import (
    Point,
    all_found,
    assured_recalls,
    ladder,
    mass_bounds,
    point_for,
    recalls,
    served_point,
    surest_point,
)
from amips.search.query_log import KEEP_LOG, QueryLog, checked_keep_log
from amips.search.refits import REFIT_MINUTES, Refit, register_refitter
from amips.search.report import MemoryCost, Objective, Report, Row, Trial, cost_in_words
from amips.search.searcher import Searcher
from amips.search.selectivity import DEPTH_QUERIES
from amips.search.signatures import Verified, sign, verify
from amips.search.since import keys_at
from amips.search.spill import checked_second, first_of, ranked, second_cells
from amips.search.traffic import Traffic
from amips.search.two_samples import holm, kolmogorov_smirnov
from amips.search.watching import Watch
from amips.search.wrapped import WrappedIndex
from amips.search.wrapping import wrap

__all__ = [
    "DEPTH_QUERIES",
    "DIMENSIONS",
    "DROP_IN_CANDIDATES",
    "FALSE_ALARMS",
    "KEEP_LOG",
    "MARGINS",
    "NOT_COMPARED",
    "REFIT_MINUTES",
    "SAMPLE",
    "TEXTS",
    "TEXT_MANIFEST",
    "Adaptation",
    "Attributes",
    "Audit",
    "Comparison",
    "Cost",
    "Demand",
    "Drift",
    "Event",
    "Explanation",
    "GraphSearcher",
    "Index",
    "Memory",
    "MemoryCost",
    "MemorySearcher",
    "Method",
    "Objective",
    "Opened",
    "Origin",
    "Placement",
    "PlainIvf",
    "Point",
    "QueryLog",
    "Recall",
    "Reference",
    "Refit",
    "Report",
    "Row",
    "Searcher",
    "Snapshot",
    "Traffic",
    "Trial",
    "Verified",
    "Watch",
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
    "checked_keep_log",
    "checked_probes",
    "checked_queries",
    "checked_second",
    "compacted",
    "cost_in_words",
    "draw_queries",
    "effort_for",
    "effort_in_words",
    "estimate_routing",
    "explain",
    "first_of",
    "growth",
    "holm",
    "keys_at",
    "kolmogorov_smirnov",
    "ladder",
    "learn_placement",
    "live_keys",
    "live_numbers",
    "load",
    "margin_ladder",
    "mass_bounds",
    "measure",
    "measure_about",
    "measure_index",
    "measure_margins",
    "measure_masses",
    "measure_memory",
    "near_target",
    "plain_index",
    "point_for",
    "ranked",
    "read_bundle",
    "read_index",
    "read_table",
    "read_texts",
    "recalls",
    "register_refitter",
    "restore_norms",
    "safer",
    "save",
    "second_cells",
    "served_point",
    "sign",
    "split_norms",
    "surest_point",
    "verify",
    "with_facts",
    "with_memory",
    "wrap",
    "write_texts",
]
