"""What a cell store is."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from amips.vectors import Floats


class CellStore(Protocol):
    """Keys in cells, on which chosen cells can be scanned."""

    @property
    def n(self) -> int:
        """The number of keys."""
        ...

    @property
    def d(self) -> int:
        """The dimension."""
        ...

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Keys in each cell, [c]."""
        ...

    @property
    def centroids(self) -> Floats:
        """One vector for each cell, [c, d]."""
        ...

    @property
    def assignment(self) -> NDArray[np.int32]:
        """The cell of each key, [n]."""
        ...

    @property
    def second(self) -> NDArray[np.int32] | None:
        """Another cell that a key is in, too, or -1, [n]; None if no key is."""
        ...

    @property
    def storage(self) -> str:
        """How keys are kept."""
        ...

    @property
    def refine(self) -> int:
        """Candidates looked at for each result asked for."""
        ...

    def score_again(
        self, x: Floats, candidates: NDArray[np.int64], k: int
    ) -> tuple[Floats, NDArray[np.int64]]:
        """True inner products of the candidates [m, r] (-1 skips), and the k best of them."""
        ...

    def scan(self, x: Floats, cells: NDArray[np.int64], k: int) -> tuple[Floats, NDArray[np.int64]]:
        """The k best keys by <x, y> within cells [m, p] (-1 skips): scores [m, k] and ids [m, k].

        Best first; id -1 and score -inf where the cells hold fewer than k keys.
        """
        ...

    def scan_flops(self, keys: NDArray[np.int64], k: int) -> NDArray[np.int64]:
        """FLOPs for scanning so many keys, for each query."""
        ...

    def save(self, directory: Path) -> list[str]:
        """Write files; their names, relative to the directory."""
        ...
