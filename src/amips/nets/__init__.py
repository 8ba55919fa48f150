"""The networks of the paper: their architectures, and a runtime that needs numpy alone."""

from amips.nets.runtime import Net, load_net, weight_shapes
from amips.nets.spec import SIZES, Architecture, KeyNet, SupportNet, hidden_width, injected_layers

__all__ = [
    "SIZES",
    "Architecture",
    "KeyNet",
    "Net",
    "SupportNet",
    "hidden_width",
    "injected_layers",
    "load_net",
    "weight_shapes",
]
