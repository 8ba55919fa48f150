"""Reading a saved model, whatever its kind; its files may be damaged or made to do harm."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from amips.errors import AmipsError, RunError
from amips.files import read_json
from amips.nets.affine import AFFINE_KINDS, AffineArchitecture, AffineNet, affine_shapes
from amips.nets.model import DESCRIPTION, WEIGHTS, Model, check_weights
from amips.nets.run_files import check_run, is_run
from amips.nets.runtime import Net, weight_shapes
from amips.nets.spec import Architecture
from amips.untrusted import inside, open_regular

HEADER_BYTES = 1 << 20  # of the names and shapes of weights: those of a thousand layers take a fifth of it
NUMBERS, METRICS = ("samples", "seconds"), ("val", "start", "centroid")  # figures of a run, in `about`
TYPES = {"F16": "float16", "F32": "float32", "F64": "float64"}  # by the names of the format


def load_model(directory: str | Path, error: type[AmipsError] = RunError) -> Model:
    """Read what `Model.save` wrote, checking every weight's name, type and shape before any is read.

    In the directory of a run the size and SHA-256 of its files are checked first.
    """
    directory = Path(directory)
    if is_run(directory) and (directory / DESCRIPTION).exists():
        check_run(directory, error)
    described = read_json(inside(directory, DESCRIPTION, error), error)
    weights = inside(directory, WEIGHTS, error)
    values, about = described.get("architecture"), described.get("about", {})
    if not isinstance(values, dict) or not isinstance(about, dict):
        raise error(f"{directory / DESCRIPTION}: not a description of an architecture")
    if wrong := _wrong_figure(about, required=is_run(directory)):
        raise error(f"{directory / DESCRIPTION} is damaged: about.{wrong} is not what training measures")
    try:
        if values.get("kind") in AFFINE_KINDS:
            affine = AffineArchitecture.from_json(values)
            return AffineNet(affine, _read_weights(weights, affine_shapes(affine), error), about)
        network = Architecture.from_json(values)
        return Net(network, _read_weights(weights, weight_shapes(network), error), about)
    except RunError as problem:
        raise error(f"{directory}: {problem}") from None


def _wrong_figure(about: dict[str, Any], required: bool) -> str:
    """The name of a figure that is not one, or is missing where it is `required`; "" where all are right."""

    def is_number(value: Any) -> bool:
        return type(value) in (int, float)

    for name in (*NUMBERS, *METRICS):
        value = about.get(name)
        if name not in about:
            right = not required or name not in (*NUMBERS, "val")
        elif name in NUMBERS:
            right = is_number(value)
        else:
            right = isinstance(value, dict) and all(is_number(number) for number in value.values())
        if not right:
            return name
    return ""


def _read_weights(path: Path, wanted: dict[str, tuple[int, ...]], error: type[AmipsError]) -> dict[str, Any]:
    """The weights of a file, if they are those that are wanted, and nothing else is in it."""
    with open_regular(path, error) as file:
        try:
            shapes, size = _header(file)
            check_weights(wanted, shapes)
            if size != os.fstat(file.fileno()).st_size:
                raise ValueError("its size is not that of its weights")
            file.seek(0)
            weights: dict[str, Any] = load(file.read(size))
        except (OSError, ValueError, SafetensorError) as problem:
            raise error(f"{path} cannot be read: {' '.join(str(problem).split())}") from None
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise error(f"{path} is damaged: weight {name} has values that are not finite")
    return weights


def _header(file: BinaryIO) -> tuple[dict[str, tuple[str, tuple[int, ...]]], int]:
    """The type and shape of each weight of a safetensors file, and how long the file must be; ValueError."""
    length = int.from_bytes(file.read(8), "little")
    if length > HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        shapes = {name: (str(facts["dtype"]), tuple(facts["shape"])) for name, facts in header.items()}
        ends = [int(facts["data_offsets"][1]) for facts in header.values()]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        raise ValueError("its header is damaged") from None
    known = {name: (TYPES.get(dtype, dtype), shape) for name, (dtype, shape) in shapes.items()}
    return known, 8 + length + max(ends, default=0)
