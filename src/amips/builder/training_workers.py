"""How many workers of a Ray cluster train a router."""

import os
from pathlib import Path

from amips.cluster import connected

MOST = 8  # beyond, a step of a router takes less than telling each other its gradients


def workers_for(ray: str, directory: Path) -> int | None:
    """A worker for each node, a power of two; None if nodes do not see `directory`, or there is one alone.

    A power of two divides the batch of every recipe, so that the workers together learn from the batches that
    one process would have.
    """
    with connected(ray) as cluster:
        assert cluster is not None
        seen = cluster.everywhere(os.path.isdir, str(directory.resolve()))
        if len(seen) < 2 or not all(seen.values()):
            return None
        return 1 << (min(MOST, len(seen)).bit_length() - 1)
