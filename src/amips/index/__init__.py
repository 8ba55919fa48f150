"""Engines: hold the keys by cell, and scan the cells they are told to."""

from amips.index.engine import Engine
from amips.index.faiss_ivf import FaissIVF
from amips.index.filling import Storage

__all__ = ["Engine", "FaissIVF", "Storage"]
