"""Router specs by name: to JSON and back, and from what a trained model says of itself."""

from dataclasses import fields
from typing import Any

from amips.arguments import check_choice, refused
from amips.errors import RunError
from amips.nets.affine import AffineArchitecture, Linear, MaxAffine
from amips.nets.model import Model
from amips.nets.spec import Architecture, KeyNet, SupportNet

SPECS: dict[str, Any] = {"linear": Linear, "max-affine": MaxAffine, "support": SupportNet, "key": KeyNet}


def spec_to_json(spec: Linear | MaxAffine | SupportNet | KeyNet) -> dict[str, Any]:
    """Plain values for a JSON file; an infinite beta is the word."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {name: "inf" if value == float("inf") else value for name, value in values.items()}


def spec_from_json(values: Any) -> Linear | MaxAffine | SupportNet | KeyNet:
    """The inverse of `spec_to_json`; raises RunError on anything else."""
    if not isinstance(values, dict):
        raise refused("network", values, "a kind and its fields", RunError)
    settings = dict(values)
    kind = check_choice("kind", settings.pop("kind", None), tuple(SPECS), error=RunError)
    if settings.get("beta") == "inf":
        settings["beta"] = float("inf")
    names = network_fields(kind)
    for name in settings:
        if name not in names:
            raise RunError(f"a {kind} network has no field {name!r}; its fields are {', '.join(names)}")
    spec: Linear | MaxAffine | SupportNet | KeyNet = SPECS[kind](**settings)
    return spec


def network_fields(kind: str) -> dict[str, Any]:
    """The fields of a kind of network, with their defaults."""
    return {field.name: field.default for field in fields(SPECS[kind]) if field.init}


def spec_of(model: Model) -> Linear | MaxAffine | SupportNet | KeyNet:
    """The spec that a model was trained from; of one that does not say, one with the same architecture."""
    if isinstance(stated := model.about.get("network"), dict):
        return spec_from_json(stated)
    a = model.architecture
    if isinstance(a, AffineArchitecture):
        if a.kind == "linear":
            return Linear(bias=a.bias, rank=a.rank)
        return MaxAffine(pieces=a.pieces, rank=a.rank)
    assert isinstance(a, Architecture)
    shape: dict[str, Any] = {"depth": a.depth, "inject": len(a.injected), "residual": a.residual}
    shape |= {"alpha": a.alpha, "beta": a.beta, "width": a.width}
    if a.kind == "key":
        return KeyNet(**shape, mapper=a.c == 1)
    return SupportNet(**shape, homogeneous=a.homogeneous, nonnegative=a.nonnegative)
