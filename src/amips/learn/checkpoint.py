"""The full state of a run in one safetensors file, replaced atomically."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from amips.errors import RunError
from amips.files import fsync_directory

CHECKPOINT = "checkpoint.safetensors"


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # spent training, over all sittings
    sums: dict[str, float] = field(default_factory=dict)  # of the losses since the last evaluation


@dataclass
class State:
    """Everything that training changes: parameters, their averages, and Adam's two moments."""

    parameters: Mapping[str, Tensor]
    averages: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    progress: Progress

    def finite(self) -> bool:
        """Whether this state is worth keeping."""
        return all(bool(torch.isfinite(p).all()) for p in self.parameters.values())

    def save(self, directory: Path) -> None:
        """Write the checkpoint; a crash leaves the one before."""
        tensors = {
            f"{group}/{name}": value.detach().cpu().contiguous()
            for group in ("parameters", "averages", "first", "second")
            for name, value in getattr(self, group).items()
        }
        temporary = directory / f".{CHECKPOINT}.{os.getpid()}.tmp"
        try:
            save_file(tensors, temporary, {"progress": json.dumps(asdict(self.progress))})
            with temporary.open("rb") as f:
                os.fsync(f.fileno())
            temporary.replace(directory / CHECKPOINT)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(directory)

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Read a checkpoint into the tensors of this state, in place."""
        path = directory / CHECKPOINT
        try:
            with safe_open(path, framework="pt") as file:
                saved = Progress(**json.loads(file.metadata()["progress"]))
                for group in ("parameters", "averages", "first", "second"):
                    for name, value in getattr(self, group).items():
                        value.copy_(file.get_tensor(f"{group}/{name}"))
        except FileNotFoundError:
            raise RunError(f"{path} does not exist: there is nothing to resume") from None
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as problem:
            raise RunError(f"{path} is damaged or of another network: {problem}") from None
        self.progress.__dict__.update(asdict(saved))
