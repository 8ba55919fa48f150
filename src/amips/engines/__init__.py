"""Engines that find keys by themselves: libraries and databases that people run, behind one protocol."""

from amips.engines.finder import Finder
from amips.engines.mapped import Mapped
from amips.engines.opening import ENGINES, build, engine_class, load, missing

__all__ = ["ENGINES", "Finder", "Mapped", "build", "engine_class", "load", "missing"]
