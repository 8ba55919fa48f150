"""Sets of vectors: opening files, reading blocks as float32, checking, fingerprinting.

A `Vectors` is a read-only [n, d] table. It lives in memory or in a file; either way `rows(a, b)` gives
float32 rows and nothing larger than the block asked for is ever converted or copied.
"""

from amips.vectors.checks import Facts, first_equal, inspect, row_norms, unit_rows
from amips.vectors.formats import open_vectors
from amips.vectors.ids import read_ids
from amips.vectors.remote_rows import reopened, shared_source
from amips.vectors.vectors import Floats, Source, Vectors, gather, mapped_file, rows_of

__all__ = [
    "Facts",
    "Floats",
    "Source",
    "Vectors",
    "first_equal",
    "gather",
    "inspect",
    "mapped_file",
    "open_vectors",
    "read_ids",
    "reopened",
    "row_norms",
    "rows_of",
    "shared_source",
    "unit_rows",
]
