"""label, train, fit: from vectors to a trained model."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import amips
from amips.cli.options import cli, number_or_word, path, read_ids, size
from amips.tables import text_table


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=path, help="The task directory to make.")
@click.option("--cells", default=1, help="Cells to partition the keys into; 1 means none.")
@click.option("--plain", is_flag=True, help="Plain k-means instead of spherical.")
@click.option("--runs", default=1, help="k-means runs; the most even one is kept.")
@click.option("--query-aware", default=0.0, help="Move keys towards the queries that want them: try 1.5.")
@click.option("--copies", default=1, help="Noisy copies of each training query, beside the original.")
@click.option("--noise", default=0.02, help="Standard deviation of the noise, relative to the norm.")
@click.option("--val", default=1000, help="Distinct queries held out for choosing.")
@click.option("--test", default=1000, help="Distinct queries held out for reporting.")
@click.option("--split", type=path, help="Your own split: an .npy of train, val, test, one a query.")
@click.option("-k", default=100, help="Top keys to store for each query.")
@click.option("--no-cell-targets", is_flag=True, help="Top keys only: enough for linear routers.")
@click.option("--seed", default=0)
@click.option("--keep-zero", is_flag=True, help="Allow keys that are all zero.")
@click.option("--memory", type=size, default="1G", help="Bound on the working set.")
def label(
    out: Path,
    keys: str,
    queries: str,
    plain: bool,
    keep_zero: bool,
    split: Path | None,
    no_cell_targets: bool,
    **options: Any,
) -> None:
    """Make a task: split QUERIES, add noise, and find the exact top KEYS of every one.

    KEYS and QUERIES are vector files: .npy, .fvecs, .fbin, .hdf5, .parquet, ... An interrupted run
    continues when the same command is given again.
    """
    options |= {"spherical": not plain, "zero": "keep" if keep_zero else "error"}
    options |= {"split": None if split is None else read_ids(split), "cell_targets": not no_cell_targets}
    task = amips.label(keys, queries, out=out, progress=True, **options)
    rows = [[split, f"{len(getattr(task, split)):,}"] for split in ("train", "val", "test")]
    click.echo(f"{task.path}: {task.n:,} keys, d = {task.d}, {task.c:,} cells")
    click.echo(f"imbalance {task.cells.imbalance:.2f}, duplicates {task.facts['duplicate_queries']:,}")
    click.echo(text_table(["queries", "rows"], rows))


@cli.command()
@click.argument("task", type=path)
@click.option("--out", required=True, type=path, help="The run directory to make.")
@click.option("--net", type=click.Choice(["support", "key", "linear", "max-affine"]), default="support")
@click.option("--size", type=number_or_word, help="XS S M L XL XXL, or a share of n d.  [default: XS]")
@click.option("--depth", type=int, help="Hidden layers.  [default: 4]")
@click.option(
    "--inject", type=number_or_word, help="Later layers that see the input: a count, all, 'every R'."
)
@click.option("--residual", is_flag=True, default=None, help="Residual hidden layers.")
@click.option("--homogeneous", type=click.Choice(["wrapper", "relu"]), help="SupportNet only.")
@click.option("--nonnegative", type=click.Choice(["penalty", "clip", "softplus"]), help="SupportNet only.")
@click.option("--mapper", is_flag=True, default=None, help="KeyNet: one key, whatever cells the task has.")
@click.option("--rank", type=int, help="linear, max-affine: project queries to so many dimensions first.")
@click.option("--pieces", type=int, help="max-affine: for each cell.  [default: 2]")
@click.option("--route", type=float, help="support, key: weight of the routing loss.")
@click.option("--route-top", type=int, help="Learn to find the cells of so many top keys.")
@click.option("--listwise", type=float, help="Share of the routing loss on the support values of all cells.")
@click.option("--recipe", type=click.Choice(["default", "paper"]), default="default")
@click.option("--samples", type=int, help="Budget in samples.")
@click.option("--minutes", type=float, help="Budget in minutes.  [default: 3]")
@click.option("--batch", type=int, help="Rows in a batch, for each process.")
@click.option("--evaluations", default=10, help="How often to evaluate and save.")
@click.option("--seed", default=0)
@click.option("--device", help="cpu, cuda, ...")
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
def train(task: Path, out: Path, net: str, **options: Any) -> None:
    """Train a SupportNet, a KeyNet, a linear or a max-affine router on TASK."""
    deep = ["size", "depth", "inject", "residual"]
    kinds: dict[str, tuple[Any, list[str]]] = {
        "support": (amips.SupportNet, [*deep, "homogeneous", "nonnegative"]),
        "key": (amips.KeyNet, [*deep, "mapper"]),
        "linear": (amips.Linear, ["rank"]),
        "max-affine": (amips.MaxAffine, ["rank", "pieces"]),
    }
    names = sorted({name for _, own in kinds.values() for name in own})
    shape = {name: value for name in names if (value := options.pop(name)) is not None}
    kind, allowed = kinds[net]
    if wrong := set(shape) - set(allowed):
        raise click.UsageError(f"--{sorted(wrong)[0]} is not for --net {net}")
    losses = ("route", "route_top", "listwise")
    weights = {name: value for name in losses if (value := options.pop(name)) is not None}
    if weights:
        from amips.learn.recipe import PAPER_SAMPLES, RECIPES

        if options["recipe"] == "paper" and options["samples"] is options["minutes"] is None:
            options["samples"] = PAPER_SAMPLES
        options["recipe"] = replace(RECIPES[options["recipe"]], **weights)
    model = amips.train(task, kind(**shape), out=out, progress=True, **options)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks
    click.echo(
        f"{out}: {kind.__name__}, {model.architecture.parameters:,} parameters, "
        f"{model.about['samples']:,} samples in {model.about['seconds']:.0f} s"
    )
    rows = [[name, f"{value:.4f}"] for name, value in model.about["val"].items()]
    click.echo(text_table(["on val", ""], rows))


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=path, help="The bundle to make or replace.")
@click.option("--minutes", default=5.0, help="How long it may take, roughly.")
@click.option("--cells", type=int, help="How many cells; several numbers are tried when not given.")
@click.option("--recall", default=0.95, help="The recall@10 at which cost is to be least.")
@click.option("--objective", type=click.Choice(["flops", "latency", "throughput"]), default="flops")
@click.option("--storage", type=click.Choice(["flat", "sq8", "pq", "lean"]), help="[default: the cheaper]")
@click.option("--spill", type=float, help="Share of keys in a second cell, too.  [default: what pays]")
@click.option("--regroup", default=0, help="Rounds of moving keys to where their queries are sent.")
@click.option("--ids", type=path, help="What to return for each key: .npy, or text with one a line.")
@click.option("--seed", default=0)
def fit(keys: str, queries: str, ids: Path | None, **options: Any) -> None:
    """Label, train and build in one go, and say what was gained over centroid routing."""
    amips.fit(keys, queries, ids=None if ids is None else read_ids(ids), **options)
