"""Learned search: the object a user holds, what is known of its recall, and the bundle it is saved in."""

from amips.routers import Probing, RoutingEstimate
from amips.search.bundle import load, save
from amips.search.bundle_directory import check_bundle_place, read_bundle
from amips.search.inputs import check_labels, checked_k, checked_probes, checked_queries
from amips.search.measuring import calibrated, estimate_routing, measure, measure_masses
from amips.search.points import TOP, Point, ladder, mass_bounds, point_for, recalls
from amips.search.report import Report
from amips.search.searcher import DROP_IN_CANDIDATES, Cost, Searcher
from amips.search.spill import checked_second, first_of, ranked, second_cells
from amips.search.wrapped import WrappedIndex
from amips.search.wrapping import wrap

__all__ = [
    "DROP_IN_CANDIDATES",
    "TOP",
    "Cost",
    "Point",
    "Probing",
    "Report",
    "RoutingEstimate",
    "Searcher",
    "WrappedIndex",
    "calibrated",
    "check_bundle_place",
    "check_labels",
    "checked_k",
    "checked_probes",
    "checked_queries",
    "checked_second",
    "estimate_routing",
    "first_of",
    "ladder",
    "load",
    "mass_bounds",
    "measure",
    "measure_masses",
    "point_for",
    "ranked",
    "read_bundle",
    "recalls",
    "save",
    "second_cells",
    "wrap",
]
