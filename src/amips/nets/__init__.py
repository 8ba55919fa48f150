"""The networks: their architectures, recipes (as numbers), and a runtime that needs numpy alone."""

from amips.nets.affine import AFFINE_KINDS, AffineArchitecture, AffineNet, Linear, MaxAffine
from amips.nets.affine_start import initial_model
from amips.nets.load import load_model
from amips.nets.model import DESCRIPTION, WEIGHTS, Model
from amips.nets.onnx_export import to_onnx
from amips.nets.recipe import DEFAULT_MINUTES, PAPER_SAMPLES, RECIPES, Precision, Recipe, recipe_named
from amips.nets.recipe_file import read_recipe, read_settings
from amips.nets.run_files import (
    RUN_CONFIG,
    RUN_FORMAT,
    RUN_LOG,
    is_run,
    is_unfinished_run,
    read_run_config,
    read_run_log,
    write_run_config,
)
from amips.nets.runtime import Net, weight_shapes
from amips.nets.spec import SIZES, Architecture, KeyNet, SupportNet, hidden_width, injected_layers
from amips.nets.spec_json import SPECS, spec_from_json, spec_of, spec_to_json

__all__ = [
    "AFFINE_KINDS",
    "DEFAULT_MINUTES",
    "DESCRIPTION",
    "PAPER_SAMPLES",
    "RECIPES",
    "RUN_CONFIG",
    "RUN_FORMAT",
    "RUN_LOG",
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
    "Precision",
    "Recipe",
    "SupportNet",
    "hidden_width",
    "initial_model",
    "injected_layers",
    "is_run",
    "is_unfinished_run",
    "load_model",
    "read_recipe",
    "read_run_config",
    "read_run_log",
    "read_settings",
    "recipe_named",
    "spec_from_json",
    "spec_of",
    "spec_to_json",
    "to_onnx",
    "weight_shapes",
    "write_run_config",
]
