"""The losses of a run, summed where they are computed: to read a number is to wait for the device."""

import torch
from torch import Tensor

SELDOM = 50  # steps between two readings on a device that is waited for


class Meter:
    """Sums of the losses since the last evaluation, and the first step at which one was not finite.

    Reading waits until the device has done all it was told, so on a GPU it happens every 50 steps and when a
    number is needed, never in every step. On the CPU there is nothing to wait for.

    Args:
        sums: those of a checkpoint, by name, with the number of steps as "steps".
    """

    def __init__(self, device: torch.device, sums: dict[str, float]) -> None:
        self.device, self.every = device, 1 if device.type == "cpu" else SELDOM
        # Python's floats have 64 bits, and the sums of a checkpoint go on as they were.
        self.exact = torch.float32 if device.type == "mps" else torch.float64
        self.loss = 0.0  # of the last step that was read
        self.restart(sums)

    def restart(self, sums: dict[str, float] | None = None) -> None:
        """Begin anew, or with these sums."""
        self.names = [name for name in sums or {} if name != "steps"]
        self.steps = (sums or {}).get("steps", 0.0)
        values = [(sums or {})[name] for name in self.names]
        self.total = torch.tensor(values, dtype=self.exact, device=self.device)
        self.last = self.total
        self.diverged = torch.full((), -1, dtype=torch.int64, device=self.device)

    def add(self, names: list[str], losses: Tensor, norm: Tensor, step: int) -> None:
        """The losses [names] of step number `step`, the total first, and the norm of the gradient."""
        if not self.names:
            self.names, self.total = names, torch.zeros_like(losses, dtype=self.exact)
        self.total = self.total + losses
        self.steps += 1.0
        self.last = losses
        broken = ~(torch.isfinite(losses[0]) & torch.isfinite(norm))
        self.diverged = torch.where(broken & (self.diverged < 0), step, self.diverged)

    def due(self, step: int) -> bool:
        """Whether to read after this step; the same in every process."""
        return step % self.every == 0

    def first_broken(self) -> int | None:
        """The first step whose loss or gradient was not finite, None if there was none; reads `loss`, too."""
        self.loss = float(self.last[0]) if len(self.last) else 0.0
        step = int(self.diverged)
        return None if step < 0 else step

    def sums(self) -> dict[str, float]:
        """The sums so far, by name, as a checkpoint has them."""
        if not self.names:
            return {}
        return {**dict(zip(self.names, self.total.tolist(), strict=True)), "steps": self.steps}
