"""Keys beyond those that there are: mixtures of these."""

from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from amips.cells import default_count, kmeans
from amips.files import partial
from amips.vectors import Vectors, row_norms
from paper.workspace import Workspace, find

BLOCK = 1 << 14


def data_with_mixtures(workspace: Workspace, n: int) -> Path:
    """A data directory of n keys: the workspace's, and mixtures of two keys of one cell; the same queries.

    A mixture w a + (1 - w) b, w uniform, gets the norm w ||a|| + (1 - w) ||b||: it lies among the keys, where
    the queries look for them. Noise would lie beside them all and never be found.
    """
    folder = workspace.work / f"generated-{n}"
    folder.mkdir(exist_ok=True)
    source, _ = find(workspace.data, "queries")
    link = folder / source.name
    if not link.exists():
        link.unlink(missing_ok=True)  # one to data that were moved
        link.symlink_to(source.resolve())
    if not (folder / "keys.npy").exists():
        with partial(folder / "keys.npy") as temporary:
            _write_keys(temporary, workspace.keys, n, workspace.seed)
    return folder


def _write_keys(path: Path, keys: Vectors, n: int, seed: int) -> None:
    cells = kmeans(keys, default_count(keys.n, 1.0), seed=seed)
    members = np.argsort(cells.assignment, kind="stable")
    starts, sizes = np.concatenate([[0], np.cumsum(cells.sizes)]), cells.sizes
    place = np.empty(keys.n, np.int64)  # of each key among those of its cell
    place[members] = np.arange(keys.n) - starts[cells.assignment[members]]
    rng = np.random.default_rng([seed, 7])
    out = open_memmap(path, "w+", np.float32, (n, keys.d))
    for low, block in keys.blocks():
        out[low : low + len(block)] = block
    for low in range(keys.n, n, BLOCK):
        count = min(BLOCK, n - low)
        first = rng.integers(keys.n, size=count)
        cell = cells.assignment[first]
        # Another key of the cell, unless there is none.
        step = 1 + rng.integers(np.maximum(1, sizes[cell] - 1))
        second = members[starts[cell] + (place[first] + step) % sizes[cell]]
        weight = rng.random((count, 1), np.float32)
        a, b = keys.take(first), keys.take(second)
        mixed = weight * a + (1 - weight) * b
        norms = weight[:, 0] * row_norms(a) + (1 - weight[:, 0]) * row_norms(b)
        own = row_norms(mixed)
        mixed *= (norms / np.where(own > 0, own, 1))[:, None]
        out[low : low + count] = mixed
    out.flush()
