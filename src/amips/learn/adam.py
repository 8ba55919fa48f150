"""What one step does to the state of a run: Adam, and the running averages of the parameters.

Each is one call for all parameters. Adam's kernel is called directly because its moments are part of the
checkpoint as plain tensors; torch.optim keeps a state of its own, which is made for pickle.
"""

import torch
from torch import Tensor

from amips.learn.checkpoint import State

BETAS, EPSILON = (0.9, 0.999), 1e-8


@torch.no_grad()
def adam_step(state: State, grads: list[Tensor], rate: float) -> None:
    """Adam with bias correction: parameters and moments change; `state.progress` counts this step already."""
    parameters = list(state.parameters.values())
    # Filled on the device: a number that is copied there is waited for.
    step = torch.full((), float(state.progress.step), device=parameters[0].device)
    torch._fused_adam_(
        parameters,
        grads,
        list(state.first.values()),
        list(state.second.values()),
        [],
        [step] * len(parameters),
        lr=rate,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=0.0,
        eps=EPSILON,
        amsgrad=False,
        maximize=False,
    )


@torch.no_grad()
def average_step(state: State, decay: float) -> None:
    """Averages become decay averages + (1 - decay) parameters."""
    torch._foreach_lerp_(list(state.averages.values()), list(state.parameters.values()), 1 - decay)
