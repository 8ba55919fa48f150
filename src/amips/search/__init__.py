"""Learned search: the object a user holds, and the bundle it is saved in."""

from amips.search.build import build, measure
from amips.search.bundle import load, save
from amips.search.points import Point, recalls
from amips.search.searcher import Cost, Searcher
from amips.search.wrap import Wrapped, wrap

__all__ = ["Cost", "Point", "Searcher", "Wrapped", "build", "load", "measure", "recalls", "save", "wrap"]
