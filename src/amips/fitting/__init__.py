"""From keys and queries to a bundle in one call: a search over designs on held-out queries."""

from amips.fitting.call import fit
from amips.fitting.settings import FIT_MINUTES

__all__ = ["FIT_MINUTES", "fit"]
