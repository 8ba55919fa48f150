"""Vectors for the workers of a cluster: opened where they are if every node sees the same file."""

from functools import lru_cache
from typing import Any

from amips.cluster import Cluster
from amips.errors import AmipsError, VectorError
from amips.vectors.formats import open_vectors
from amips.vectors.vectors import Source, Vectors


def shared_source(vectors: Vectors, cluster: Cluster) -> Source | None:
    """The file that vectors are in, if every node of the cluster sees that file; otherwise None.

    None says that rows have to be handed to the workers: they are in memory, or on a disk of this machine.
    """
    source = vectors.source
    if source is None or not all(cluster.everywhere(_sees, source).values()):
        return None
    return source


def _sees(source: Source) -> bool:
    """Whether this process finds the file."""
    try:
        reopened(source)
    except AmipsError:
        return False
    return True


@lru_cache(maxsize=4)
def reopened(source: Source) -> Vectors:
    """The vectors in a file, in another process; VectorError if it is not the file that it was."""
    vectors = open_vectors(source.name, source.role)
    present: Any = vectors.source
    if present.stamp != source.stamp:
        raise VectorError(f"{source.name} is another file on a node of the Ray cluster, or has changed")
    return vectors
