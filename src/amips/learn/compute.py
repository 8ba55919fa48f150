"""How the loss is computed: in float32 or with bfloat16 products, as it is written or compiled."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amips.arguments import check_choice, check_flag
from amips.errors import RunError
from amips.nets import Precision

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Compute:
    """Options that make training faster on devices that are made for it; off by default.

    Both change the last bits of what is learned, so they are part of a run's settings: it is resumed with the
    ones it began with.

    Args:
        precision: "bf16" multiplies in bfloat16 (autocast); weights, averages and Adam stay float32.
        compile: `torch.compile` the loss and its gradients.
    """

    precision: Precision = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, Precision, error=RunError)
        object.__setattr__(self, "compile", check_flag("compile", self.compile, error=RunError))

    def settings(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(Compute, name)}

    def prepared(self, loss: Loss) -> Loss:
        """The loss function, compiled if that is wanted; compiling takes place in its first call."""
        return _one_line(torch.compile(loss, dynamic=False)) if self.compile else loss

    def autocast(self, device: torch.device) -> Any:
        """The context in which the loss is computed."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16)


def _one_line(compiled: Any) -> Loss:
    """The compiled function; what goes wrong in the compiler is said in one line."""

    def loss(*inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            result: tuple[Tensor, dict[str, Tensor]] = compiled(*inputs)
        except Exception as problem:
            if not type(problem).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = next((line.strip() for line in str(problem).splitlines() if line.strip()), "it failed")
            raise RunError(f"torch.compile: {reason}; train without compile=True (--compile)") from problem
        return result

    return loss
