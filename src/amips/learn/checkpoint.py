"""The full state of a run in one safetensors file, replaced atomically."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from amips.errors import RunError
from amips.files import partial
from amips.untrusted import open_regular

CHECKPOINT = "checkpoint.safetensors"
GROUPS = ("parameters", "averages", "first", "second", "best")


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # spent training, over all sittings
    evaluating: float = 0.0  # seconds spent on val beside that
    sums: dict[str, float] = field(default_factory=dict)  # of the losses since the last evaluation
    evaluations: int = 0  # made so far, the one before the first step included
    stale: int = 0  # evaluations since the best one
    best: float = math.inf  # the criterion of the best weights so far, on val,
    best_step: int = 0  # ... the step they are of,
    best_val: dict[str, float] = field(default_factory=dict)  # ... and all that was measured of them
    start_val: dict[str, float] = field(
        default_factory=dict
    )  # the same of the weights that training began with


@dataclass
class State:
    """Everything that training changes: parameters, their averages, Adam's two moments, the best averages."""

    parameters: Mapping[str, Tensor]
    averages: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    best: dict[str, Tensor]
    progress: Progress

    @classmethod
    def beginning(cls, parameters: Mapping[str, Tensor]) -> "State":
        """The state before the first step: the parameters as they are, and no moments."""
        copies = [{name: p.detach().clone() for name, p in parameters.items()} for _ in range(2)]
        zeros = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2)]
        return cls(parameters, copies[0], zeros[0], zeros[1], copies[1], Progress())

    def finite(self) -> bool:
        """Whether this state is worth keeping."""
        return all(bool(torch.isfinite(p).all()) for p in self.parameters.values())

    @torch.no_grad()
    def keep_if_best(self, criterion: float, metrics: dict[str, float]) -> None:
        """Take note of an evaluation of the averages: a copy of them if they are the best so far."""
        at = self.progress
        at.evaluations += 1
        at.stale += 1
        if at.step == 0:
            at.start_val = metrics
        if criterion < at.best:
            at.best, at.best_step, at.best_val, at.stale = criterion, at.step, metrics, 0
            for name, value in self.averages.items():
                self.best[name].copy_(value)

    def save(self, directory: Path) -> None:
        """Write the checkpoint; a crash leaves the one before."""
        tensors = {
            f"{group}/{name}": value.detach().cpu().contiguous()
            for group in GROUPS
            for name, value in getattr(self, group).items()
        }
        with partial(directory / CHECKPOINT) as temporary:
            progress = json.dumps(asdict(self.progress))
            save_file(tensors, temporary, {"progress": progress, "sha256": _digest(progress, tensors)})

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Read a checkpoint into the tensors of this state, in place."""
        path = directory / CHECKPOINT
        try:
            open_regular(path, RunError).close()
            with safe_open(path, framework="pt") as file:
                said = file.metadata()
                saved = Progress(**json.loads(said["progress"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if said["sha256"] != _digest(said["progress"], tensors):
                raise ValueError("it does not have the SHA-256 that it states")
            for group in GROUPS:
                for name, value in getattr(self, group).items():
                    _copy(tensors[f"{group}/{name}"], value, name)
        except RunError as problem:
            raise RunError(f"{problem}: there is nothing to resume") from None
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as problem:
            raise RunError(f"{path} is damaged or of another network: {problem}; remove it") from None
        self.progress.__dict__.update(asdict(saved))


def _copy(saved: Tensor, value: Tensor, name: str) -> None:
    """Copy what was saved to its place; ValueError if it does not fit there: torch would repeat it."""
    if saved.shape != value.shape:
        raise ValueError(f"{name} has shape {list(saved.shape)}, expected {list(value.shape)}")
    value.copy_(saved)


def _digest(progress: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a state: a flipped bit would be trained on without a word."""
    digest = hashlib.sha256(progress.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
