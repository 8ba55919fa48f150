"""The `amips` command: one command for each verb of the Python API."""

import sys
from pathlib import Path
from typing import Any

import click

import amips
from amips.table import table

_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    """Bytes, written like 500M or 2G."""
    number = text.upper().removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        return int(float(number.removesuffix(unit)) * _BYTES[unit])
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a size; write it like 500M or 2G") from None


def number_or_word(text: str) -> int | float | str:
    """A number where one is given, otherwise the word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


_directory = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(amips.__version__, prog_name="amips")
def cli() -> None:
    """Learned maximum-inner-product search: learn from your queries, scan fewer keys."""


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=_directory, help="The task directory to make.")
@click.option("--cells", default=1, help="Cells to partition the keys into; 1 means none.")
@click.option("--plain", is_flag=True, help="Plain k-means instead of spherical.")
@click.option("--runs", default=1, help="k-means runs; the most even one is kept.")
@click.option("--copies", default=1, help="Noisy copies of each training query, beside the original.")
@click.option("--noise", default=0.02, help="Standard deviation of the noise, relative to the norm.")
@click.option("--val", default=1000, help="Distinct queries held out for choosing.")
@click.option("--test", default=1000, help="Distinct queries held out for reporting.")
@click.option("-k", default=100, help="Top keys to store for each query.")
@click.option("--seed", default=0)
@click.option("--keep-zero", is_flag=True, help="Allow keys that are all zero.")
@click.option("--memory", type=size, default="1G", help="Bound on the working set.")
def label(out: Path, keys: str, queries: str, plain: bool, keep_zero: bool, **options: Any) -> None:
    """Make a task: split QUERIES, add noise, and find the exact top KEYS of every one.

    KEYS and QUERIES are vector files: .npy, .fvecs, .fbin, .hdf5, .parquet, ... An interrupted run
    continues when the same command is given again.
    """
    options |= {"spherical": not plain, "zero": "keep" if keep_zero else "error"}
    task = amips.label(keys, queries, out=out, progress=True, **options)
    rows = [[split, f"{len(getattr(task, split)):,}"] for split in ("train", "val", "test")]
    click.echo(f"{task.path}: {task.n:,} keys, d = {task.d}, {task.c:,} cells")
    click.echo(f"imbalance {task.cells.imbalance:.2f}, duplicates {task.manifest['duplicate_queries']:,}")
    click.echo(table(["queries", "rows"], rows))


@cli.command()
@click.argument("task", type=_directory)
@click.option("--out", required=True, type=_directory, help="The run directory to make.")
@click.option("--net", type=click.Choice(["support", "key"]), default="support")
@click.option("--size", type=number_or_word, default="XS", help="XS S M L XL XXL, or a share of n d.")
@click.option("--depth", default=4, help="Hidden layers.")
@click.option(
    "--inject", type=number_or_word, help="Later layers that see the input: a count, all, 'every R'."
)
@click.option("--residual", is_flag=True, help="Residual hidden layers.")
@click.option("--homogeneous", type=click.Choice(["wrapper", "relu"]), help="SupportNet only.")
@click.option("--nonnegative", type=click.Choice(["penalty", "clip", "softplus"]), help="SupportNet only.")
@click.option("--recipe", type=click.Choice(["default", "paper"]), default="default")
@click.option("--samples", type=int, help="Budget in samples.")
@click.option("--minutes", type=float, help="Budget in minutes.")
@click.option("--batch", type=int, help="Rows in a batch, for each process.")
@click.option("--evaluations", default=10, help="How often to evaluate and save.")
@click.option("--seed", default=0)
@click.option("--device", help="cpu, cuda, ...")
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
def train(task: Path, out: Path, net: str, **options: Any) -> None:
    """Train a SupportNet or KeyNet on TASK."""
    names = ("size", "depth", "inject", "residual", "homogeneous", "nonnegative")
    shape = {name: value for name in names if (value := options.pop(name)) is not None}
    if net == "key" and (wrong := {"homogeneous", "nonnegative"} & set(shape)):
        raise click.UsageError(f"--{sorted(wrong)[0]} is for --net support only")
    spec = amips.SupportNet(**shape) if net == "support" else amips.KeyNet(**shape)
    model = amips.train(task, spec, out=out, progress=True, **options)
    a = model.architecture
    click.echo(
        f"{out}: {type(spec).__name__}, {a.depth} x {a.width}, {a.parameters:,} parameters, "
        f"{model.about['samples']:,} samples in {model.about['seconds']:.0f} s"
    )
    rows = [[name, f"{value:.4f}"] for name, value in model.about["val"].items()]
    click.echo(table(["on val", ""], rows))


def main() -> None:
    """Run the command; what goes wrong is one line."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped; the same command continues where it stopped", err=True)
        sys.exit(130)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except amips.TrainingInterrupted as stop:
        click.echo(str(stop), err=True)
        sys.exit(130)
    except (amips.AmipsError, OSError, MemoryError) as problem:
        click.echo(f"error: {problem or type(problem).__name__}", err=True)
        sys.exit(1)
