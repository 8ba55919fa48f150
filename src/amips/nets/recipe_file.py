"""Recipes and networks as text: settings that a user types, and a TOML file of the same.

rate = 3e-4          # fields of `Recipe`; those left out are the default's
route_top = 1

[network]            # optional: a kind, and fields of `Linear`, `MaxAffine`, `SupportNet` or `KeyNet`
kind = "max-affine"
pieces = 4
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from amips.errors import RunError
from amips.nets.recipe import Recipe
from amips.nets.spec_json import network_fields
from amips.untrusted import read_toml


def read_recipe(path: str | Path) -> tuple[Recipe, dict[str, Any] | None]:
    """The recipe of a TOML file, and its network as `spec_from_json` reads it, if it has one."""
    values = read_toml(Path(path), RunError)
    network = values.pop("network", None)
    if network is not None and (not isinstance(network, dict) or "kind" not in network):
        raise RunError(f'{path}: [network] needs a kind, such as kind = "linear"')
    try:
        return Recipe().changed(values), network
    except RunError as problem:
        raise RunError(f"{path}: {problem}") from None


def read_settings(words: Sequence[str], kind: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Settings such as "rate=3e-4": those of a recipe, as text, and those of a network of this kind.

    Raises RunError with the names of all fields if neither has such a field.
    """
    of_recipe, of_network = {field.name for field in fields(Recipe)}, network_fields(kind)
    recipe: dict[str, str] = {}
    network: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise RunError(f"{word!r} is not a setting: write NAME=VALUE, such as rate=3e-4")
        if name in of_recipe:
            recipe[name] = value
        elif name in of_network:
            network[name] = _value(value, of_network[name])
        else:
            known = (
                f"{', '.join(field.name for field in fields(Recipe))}; of the network {', '.join(of_network)}"
            )
            raise RunError(f"there is no setting {name!r}; those of the recipe are {known}")
    return recipe, network


def _value(text: str, default: Any) -> Any:
    """A number where it is one, true and false where a field has such a value, otherwise the word."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text, text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
