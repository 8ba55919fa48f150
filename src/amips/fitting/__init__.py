"""From keys and queries to a bundle in one call: a search over designs on held-out queries."""

from amips.fitting.call import fit
from amips.fitting.refitting import refitted
from amips.fitting.settings import FIT_MINUTES
from amips.search import register_refitter

__all__ = ["FIT_MINUTES", "fit", "refitted"]

register_refitter(refitted)
