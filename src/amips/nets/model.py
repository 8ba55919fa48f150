"""What every trained model is: an architecture, weights, and where it comes from."""

import errno
import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from amips.errors import RunError
from amips.files import local, write_atomic, write_json

Floats = NDArray[np.float32]

DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"


class AnyArchitecture(Protocol):
    """What the rest of amips needs to know of an architecture."""

    @property
    def kind(self) -> str:
        """In a word."""
        ...

    @property
    def d(self) -> int:
        """The dimension of queries and keys."""
        ...

    @property
    def c(self) -> int:
        """The number of cells."""
        ...

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        ...

    @property
    def score_flops(self) -> int:
        """FLOPs for all scores of one query."""
        ...

    def key_flops(self, cells: int | None = None) -> int:
        """FLOPs for the predicted keys of so many cells (all when None) of one query."""
        ...

    @property
    def floats(self) -> int:
        """About how many numbers are held at once for one query."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        ...


@dataclass(frozen=True)
class Model(ABC):
    """A trained network at run time.

    `about` carries what is known of its origin: the fingerprints of the keys and cells that it was
    trained for, the recipe, the metrics.
    """

    architecture: AnyArchitecture
    weights: dict[str, Floats]
    about: dict[str, Any]

    def __post_init__(self) -> None:
        shapes = {name: (str(array.dtype), tuple(array.shape)) for name, array in self.weights.items()}
        check_weights(self.weight_shapes(), shapes)

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every weight."""

    @abstractmethod
    def scores(self, x: Floats) -> Floats:
        """[m, d] -> [m, c]: the predicted support value of every cell."""

    @abstractmethod
    def keys(self, x: Floats, cells: NDArray[np.integer[Any]] | None = None) -> Floats:
        """[m, d] -> [m, c, d]: the predicted top key of every cell, or [m, p, d] for chosen cells [m, p]."""

    @property
    def factors(self) -> "tuple[Floats, Floats | None] | None":
        """W [c, r] and A [r, d], or None for A = 1, if the scores are W A x and no more; otherwise None."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A short digest of the weights."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode() + np.ascontiguousarray(self.weights[name]).tobytes())
        return digest.hexdigest()[:12]

    @property
    def c(self) -> int:
        """The number of cells it scores."""
        return self.architecture.c

    @property
    def d(self) -> int:
        """The dimension of queries and keys."""
        return self.architecture.d

    def save(self, directory: str | Path) -> None:
        """Write model.json and model.safetensors; the description goes last."""
        directory = local(directory, RunError)
        directory.mkdir(parents=True, exist_ok=True)
        data = save(dict(self.weights))
        write_atomic(directory / WEIGHTS, data)
        if (directory / WEIGHTS).read_bytes() != data:
            raise OSError(errno.EIO, "what was written is not what is there", str(directory / WEIGHTS))
        described = {"architecture": self.architecture.to_json(), "about": self.about}
        write_json(directory / DESCRIPTION, described)


def check_weights(
    wanted: dict[str, tuple[int, ...]], present: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    """RunError unless the weights, each a type and a shape, are those of the architecture, all of float32."""
    for name, shape in wanted.items():
        if present.get(name) != ("float32", shape):
            dtype, actual = present.get(name, ("nothing", ()))
            got = dtype if name not in present else f"{dtype} {list(actual)}"
            raise RunError(f"weight {name}: expected float32 {list(shape)}, got {got}")
    if more := sorted(set(present) - set(wanted)):
        raise RunError(f"weight {more[0]}: not a weight of this network")
