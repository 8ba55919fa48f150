"""The one place that makes indexes: cells, router and index of a design, from a task."""

from amips.builder.builder import Builder, at_start, fewest_dimensions
from amips.builder.building import build, default_design

__all__ = ["Builder", "at_start", "build", "default_design", "fewest_dimensions"]
