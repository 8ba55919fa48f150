"""Devices by name, and how exactly they multiply."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from amips.arguments import refused
from amips.errors import AmipsError


def device_named(name: Any, error: type[AmipsError]) -> torch.device:
    """The device of this name; by default this process's own GPU, or the CPU. `error` if it has none."""
    if name is not None and not isinstance(name, str):
        raise refused("device", name, "a name such as 'cpu' or 'cuda'", error)
    own_gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name or (own_gpu if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()  # "meta" has no numbers
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as problem:
        raise error(f"device={name!r} cannot be used: {str(problem).splitlines()[0]}") from None
    return device


@contextmanager
def full_precision() -> Iterator[None]:
    """Products inside are of float32 as it is: TF32 and bfloat16, where the caller allows them, are not."""
    of_torch: Any = torch.backends
    backends = [of_torch.cuda.matmul, of_torch.mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    # torch has an older setting of the same thing, and minds if the two disagree. It cannot be read where the
    # caller has set the newer one alone; then it is as it should be.
    older = None
    with suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
