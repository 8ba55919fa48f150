"""The networks: their architectures, how they are trained (as numbers), and a runtime that needs numpy alone."""

from amips.nets.affine import AFFINE_KINDS, AffineArchitecture, AffineNet, Linear, MaxAffine
from amips.nets.load import load_model
from amips.nets.model import DESCRIPTION, WEIGHTS, Model
from amips.nets.recipe import PAPER_SAMPLES, RECIPES, Recipe, recipe_named
from amips.nets.spec_json import SPECS, spec_from_json, spec_of, spec_to_json
from amips.nets.runtime import Net, weight_shapes
from amips.nets.spec import SIZES, Architecture, KeyNet, SupportNet, hidden_width, injected_layers

__all__ = [
    "AFFINE_KINDS",
    "DESCRIPTION",
    "PAPER_SAMPLES",
    "RECIPES",
    "SIZES",
    "SPECS",
    "WEIGHTS",
    "AffineArchitecture",
    "AffineNet",
    "Architecture",
    "KeyNet",
    "Linear",
    "MaxAffine",
    "Model",
    "Net",
    "Recipe",
    "SupportNet",
    "hidden_width",
    "injected_layers",
    "load_model",
    "recipe_named",
    "spec_from_json",
    "spec_of",
    "spec_to_json",
    "weight_shapes",
]
