"""Routers: a query in, one score for each cell out; and which cells to probe, given the scores."""

from amips.routers.estimate import Probing, RoutingEstimate
from amips.routers.routers import (
    CellRouter,
    CentroidRouter,
    MapperRouter,
    OwnRouter,
    Router,
    check_fits,
    router_for,
)
from amips.routers.stopping import (
    best_cells,
    cells_above,
    fit_temperature,
    holds_mass,
    least_keys,
    limit_probes,
    masses,
)

__all__ = [
    "CellRouter",
    "CentroidRouter",
    "MapperRouter",
    "OwnRouter",
    "Probing",
    "Router",
    "RoutingEstimate",
    "best_cells",
    "cells_above",
    "check_fits",
    "fit_temperature",
    "holds_mass",
    "least_keys",
    "limit_probes",
    "masses",
    "router_for",
]
