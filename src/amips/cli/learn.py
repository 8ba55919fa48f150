"""train: from a task to a model."""

import os
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

import amips
from amips.cli.options import RAY_HELP, cli, echo, number_or_word, output, path
from amips.extras import needs_extra
from amips.nets import (
    PAPER_SAMPLES,
    RECIPES,
    Precision,
    Recipe,
    read_recipe,
    read_settings,
    recipe_named,
    spec_from_json,
)
from amips.tables import text_table

DEEP = ("size", "depth", "inject", "residual")
SHAPES = {
    "linear": ("rank",),
    "max-affine": ("rank", "pieces"),
    "support": (*DEEP, "homogeneous", "nonnegative"),
    "key": (*DEEP, "mapper"),
}


@cli.command()
@click.argument("task", type=path)
@click.option("--out", required=True, type=output, help="The run directory to make.")
@click.option("--net", type=click.Choice(list(SHAPES)), help="[default: linear]")
@click.option(
    "--rank", type=int, help="linear, max-affine: project queries to so many dimensions first; 0: do not."
)
@click.option("--pieces", type=int, help="max-affine: for each cell.  [default: 2]")
@click.option("--size", type=number_or_word, help="XS S M L XL XXL, or a fraction of n d.  [default: XS]")
@click.option("--depth", type=int, help="Hidden layers.  [default: 4]")
@click.option(
    "--inject", type=number_or_word, help="Later layers that see the input: a count, all, 'every R'."
)
@click.option("--residual", is_flag=True, default=None, help="Residual hidden layers.")
@click.option("--homogeneous", type=click.Choice(["wrapper", "relu"]), help="SupportNet only.")
@click.option("--nonnegative", type=click.Choice(["penalty", "clip", "softplus"]), help="SupportNet only.")
@click.option("--mapper", is_flag=True, default=None, help="KeyNet: one key, whatever cells the task has.")
@click.option("--recipe", default="default", help="default, paper, or a TOML file.")
@click.option(
    "--set", "settings", multiple=True, help="NAME=VALUE of the recipe or the network; may be repeated."
)
@click.option("--samples", type=int, help="Budget in samples.")
@click.option("--minutes", type=float, help="Budget in minutes, at most.  [default: 1]")
@click.option("--batch", type=int, help="Rows in a batch, for each process.")
@click.option("--evaluations", default=20, help="How often to evaluate and save, at most.")
@click.option("--seed", default=0)
@click.option("--seeds", help="One run for each, in OUT/seed-0 and so on: how many, or which (0,1,2).")
@click.option("--device", help="cpu, cuda, ...")
@click.option("--ray", help=RAY_HELP)
@click.option("--workers", type=int, help="--ray: processes.  [default: one a node]")
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="float32",
    help="bf16: products in bfloat16; weights stay float32.",
)
@click.option("--compile", is_flag=True, help="torch.compile the loss.")
@click.option("--tensorboard", is_flag=True, help="Log for TensorBoard, too, in OUT/tensorboard.")
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
def train(
    task: Path,
    out: Path,
    net: str | None,
    recipe: str,
    settings: tuple[str, ...],
    seeds: str | None,
    **options: Any,
) -> None:
    """Train a linear or max-affine router, a SupportNet or a KeyNet on TASK.

    Any field of the recipe and of the network can be set: --set rate=3e-4 --set route_top=1. A TOML file has
    the same names, and those of the network in a table [network] with its kind. The best weights on the val
    queries are kept, those that training began with among them.
    """
    names = dict.fromkeys(name for allowed in SHAPES.values() for name in allowed)
    shape = {name: value for name in names if (value := options.pop(name)) is not None}
    chosen, network = _recipe(recipe)
    if network is not None and (net is not None or shape):
        raise click.UsageError(f"the network is described in {recipe}: leave --net and its options out")
    kind = net or "linear"
    if network is None:
        if wrong := [name for name in shape if name not in SHAPES[kind]]:
            raise click.UsageError(f"--{wrong[0]} is not for --net {kind}")
        network = {"kind": kind, **shape}
    spec = spec_from_json(network)
    of_recipe, of_network = read_settings(settings, spec.kind)
    spec = spec_from_json({**network, **of_network})
    if recipe == "paper" and options["samples"] is options["minutes"] is None:
        options["samples"] = PAPER_SAMPLES
    options |= {"recipe": chosen.changed(of_recipe), "out": out, "progress": True}
    if seeds is not None:
        _train_seeds(task, spec, seeds, options)
        return
    model = amips.train(task, spec, **options)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks
    echo(
        f"{out}: {type(spec).__name__}, {model.architecture.parameters:,} parameters, "
        f"{model.about['samples']:,} samples in {model.about['seconds']:.0f} s"
    )
    rows = [[name, f"{value:.4f}"] for name, value in model.about["val"].items()]
    echo(text_table(["on val", ""], rows))


def _train_seeds(task: Path, spec: Any, seeds: str, options: dict[str, Any]) -> None:
    """A run for each seed, and a table of what they have on val."""
    if click.get_current_context().get_parameter_source("seed") is not ParameterSource.DEFAULT:
        raise click.UsageError("give --seed or --seeds, not both")
    del options["seed"]
    with needs_extra("amips train", "train", "torch"):
        from amips.learn import train_seeds
    runs = train_seeds(task, spec, seeds=_seeds(seeds), **options)
    if os.environ.get("RANK", "0") != "0":
        return
    numbers = list(runs.models)
    echo(f"{options['out']}: {type(spec).__name__}, seeds {', '.join(map(str, numbers))}")
    mean, spread = runs.mean, runs.spread
    rows = [
        [name, *(f"{value:.4f}" for value in (mean[name], spread[name], *values))]
        for name, values in runs.val.items()
    ]
    echo(text_table(["on val", "mean", "spread", *(f"seed {seed}" for seed in numbers)], rows))


def _seeds(text: str) -> int | list[int]:
    """How many seeds, or which: 3 is 0, 1 and 2, and so is 0,1,2; 7, is 7 alone."""
    try:
        return [int(word) for word in text.split(",") if word.strip()] if "," in text else int(text)
    except ValueError:
        raise click.UsageError(f"--seeds {text}: expected a number of seeds, or some like 0,1,2") from None


def _recipe(name: str) -> tuple[Recipe, dict[str, Any] | None]:
    """A recipe by name or from a TOML file, and the network that the file describes, if it does."""
    if name in RECIPES:
        return recipe_named(name), None
    if not name.endswith(".toml"):
        raise click.UsageError(f"--recipe {name}: expected {', '.join(RECIPES)} or a file that ends in .toml")
    return read_recipe(name)
