"""Engines that find keys by themselves: libraries and databases that people run, behind one protocol."""

from amips.backends.backend import Backend
from amips.backends.drop_in import DropIn
from amips.backends.registry import BACKENDS, backend_class, build, load, missing

__all__ = ["BACKENDS", "Backend", "Mapped", "build", "backend_class", "load", "missing"]
