"""Reading a saved model, whatever its kind."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load

from amips.errors import AmipsError, RunError
from amips.files import read_json
from amips.nets.affine import AFFINE_KINDS, AffineArchitecture, AffineNet
from amips.nets.model import DESCRIPTION, WEIGHTS, Model
from amips.nets.runtime import Net
from amips.nets.spec import Architecture


def load_model(directory: str | Path, error: type[AmipsError] = RunError) -> Model:
    """Read what `Model.save` wrote, checking every weight's name and shape."""
    directory = Path(directory)
    described = read_json(directory / DESCRIPTION, error)
    values, about = described.get("architecture"), described.get("about", {})
    if not isinstance(values, dict) or not isinstance(about, dict):
        raise error(f"{directory / DESCRIPTION}: not a description of an architecture")
    try:
        weights = load((directory / WEIGHTS).read_bytes())
        if values.get("kind") in AFFINE_KINDS:
            return AffineNet(AffineArchitecture.from_json(values), weights, about)
        return Net(Architecture.from_json(values), weights, about)
    except (OSError, SafetensorError) as problem:
        raise error(f"{directory / WEIGHTS} cannot be read: {problem}") from None
    except KeyError as problem:  # how safetensors says that numpy lacks a type, such as BF16
        raise error(f"{directory / WEIGHTS} cannot be read: weights of type {problem}") from None
    except RunError as problem:
        raise error(f"{directory}: {problem}") from None
