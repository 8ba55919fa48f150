"""A trained network computed by torch on a device, with the face of its numpy runtime."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amips.device import as_tensor, device_named, full_precision
from amips.errors import RunError
from amips.learn.affine_network import AffineNetwork
from amips.learn.modules import Network
from amips.nets import AffineNet, Model, Net
from amips.vectors import Floats


class OnDevice:
    """Scores and keys of a model: numpy arrays in and out, torch between."""

    def __init__(self, model: Model, device: str) -> None:
        self.device = device_named(device, RunError)
        self.module: Network | AffineNetwork
        values: dict[str, Floats]
        if isinstance(model, AffineNet):
            self.module = AffineNetwork(model.architecture, model.weights["W"], model.weights.get("A"))
            values = {name: value for name, value in model.weights.items() if name != "A"}
        else:
            assert isinstance(model, Net)
            # The weights of a model are those that are used: nothing is to be rectified again.
            self.module = Network(replace(model.architecture, nonnegative="clip"))
            values = {f"free.{name.replace('.', '_')}": value for name, value in model.weights.items()}
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(as_tensor(value))
        self.module.to(self.device)

    def scores(self, x: Floats) -> Floats:
        """[m, d] -> [m, c]."""
        with torch.no_grad(), full_precision():
            inputs = self._moved(x)
            out = self.module(inputs)
            if isinstance(self.module, Network) and self.module.architecture.kind == "key":
                out = torch.einsum("mcd,md->mc", out, inputs)
        return _array(out)

    def keys(self, x: Floats, cells: NDArray[np.integer[Any]] | None = None) -> Floats:
        """[m, d] -> [m, c, d], or [m, 1, d] for one chosen cell [m, 1]."""
        assert isinstance(self.module, Network)
        with torch.no_grad(), full_precision():
            inputs = self._moved(x)
            chosen = None if cells is None else as_tensor(cells).long().to(self.device)
            if self.module.architecture.kind == "key":
                keys = self.module(inputs)
                return _array(keys if chosen is None else torch.take_along_dim(keys, chosen[:, :, None], 1))
            combine = None
            if chosen is not None:
                combine = torch.zeros(len(x), self.module.architecture.c, device=self.device)
                combine.scatter_(1, chosen, 1.0)
            return _array(self.module.scores_and_gradient(inputs, combine)[1])

    def _moved(self, x: Floats) -> Tensor:
        return as_tensor(x).to(self.device)


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.float().cpu().numpy()
    return array
