"""What `fit` is asked for."""

from dataclasses import dataclass
from typing import Literal

from amips import exact
from amips.design import Storage, Structure
from amips.search import Objective

Order = Literal["time"]
EXACT_SHARE = 2  # exact search takes this part of the memory: sorting out equal keys takes some, too
FIT_MINUTES = 5.0  # that a fit may take where nothing else is asked


@dataclass(frozen=True)
class Settings:
    """The options of a call of `fit` that decide what comes of it."""

    minutes: float
    cells: int | None
    recall: float
    objective: Objective
    storage: Storage | None
    spill_fraction: float | None
    structure: Structure | None
    order: Order | None
    seed: int
    keep_log: int
    memory: int | None = None

    @property
    def exact_memory(self) -> int:
        """Bytes that exact search may take."""
        return exact.MEMORY if self.memory is None else self.memory // EXACT_SHARE
