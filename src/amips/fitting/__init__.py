"""From keys and queries to a bundle in one call: a search over designs on held-out queries."""

from amips.fitting.call import fit

__all__ = ["fit"]
