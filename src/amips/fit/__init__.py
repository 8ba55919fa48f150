"""From keys and queries to a bundle in one call."""

from amips.fit.call import fit

__all__ = ["fit"]
