"""What a search costs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Cost:
    """What searching costs, for each query."""

    network: int  # FLOPs of the model,
    coarse: int  # ... of scoring centroids,
    scan: NDArray[np.int64]  # ... and of scoring keys
    scanned: NDArray[np.int64]  # keys
    probed: NDArray[np.int64]  # cells

    @property
    def flops(self) -> NDArray[np.int64]:
        """All three together."""
        return self.network + self.coarse + self.scan
