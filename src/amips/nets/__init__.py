"""The networks: their architectures, and a runtime that needs numpy alone."""

from amips.nets.affine import AFFINE_KINDS, AffineArchitecture, AffineNet, Linear, MaxAffine
from amips.nets.load import load_model
from amips.nets.model import Model
from amips.nets.runtime import Net, weight_shapes
from amips.nets.spec import SIZES, Architecture, KeyNet, SupportNet, hidden_width, injected_layers

__all__ = [
    "AFFINE_KINDS",
    "SIZES",
    "AffineArchitecture",
    "AffineNet",
    "Architecture",
    "KeyNet",
    "Linear",
    "MaxAffine",
    "Model",
    "Net",
    "SupportNet",
    "hidden_width",
    "injected_layers",
    "load_model",
    "weight_shapes",
]
