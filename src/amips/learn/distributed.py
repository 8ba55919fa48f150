"""Data-parallel training under torchrun: each process takes its part of every batch."""

import os

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """The processes of a run; one alone unless torchrun started several."""

    def __init__(self, device: torch.device) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.owns = self.world > 1 and not dist.is_initialized()
        if self.owns:
            # gloo beside nccl: `agree` speaks of numbers, which live on the CPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        """Whether this is the process that logs, evaluates and saves."""
        return self.rank == 0

    def average(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in one message."""
        if self.world == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.world
        parts = torch.split(flat, [t.numel() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def agree(self, value: float) -> float:
        """The first process's value, in every process."""
        if self.world == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared.item())

    def close(self) -> None:
        """Leave the group, if this run made it."""
        if self.owns:
            dist.destroy_process_group()
