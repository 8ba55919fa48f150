"""label, fit: from vectors to a task, and all the way to a bundle."""

from pathlib import Path
from typing import Any

import click

import amips
from amips.cli.options import (
    ATTRIBUTES_HELP,
    IDS_HELP,
    KEEP_LOG_HELP,
    RAY_HELP,
    cli,
    echo,
    output,
    path,
    size,
)
from amips.fitting import FIT_MINUTES
from amips.metrics import TARGET_RECALL
from amips.search import KEEP_LOG
from amips.tables import text_table
from amips.task import BY_ROWS, BY_SOURCE, BY_TIME, SPLITS
from amips.vectors import read_ids


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=output, help="The task directory to make.")
@click.option("--preset", type=click.Choice(["paper"]), help="Begin with the paper's settings.")
@click.option("--cells", type=int, help="Cells (FAISS: nlist); 1 means none.  [default: about 4 sqrt(n)]")
@click.option(
    "--query-aware",
    type=float,
    help="How far keys move towards their queries before k-means; 0: plain cells.  [default: 1.5]",
)
@click.option("--plain", is_flag=True, help="k-means by Euclidean distance instead of spherical.")
@click.option("--runs", default=1, help="k-means runs; the most even one is kept.")
@click.option("--copies", type=int, help="Noisy copies of each training query.  [default: 0]")
@click.option("--noise", default=0.02, help="Standard deviation of the noise, relative to the norm.")
@click.option("--val", type=int, help="Distinct queries for choosing.  [default: 1000, a fifth at most]")
@click.option("--test", type=int, help="Distinct queries for reporting.  [default: 1000, a fifth at most]")
@click.option(
    "--split",
    help="time: keep what comes again and hold out the last of the log. rows: make copies first and split "
    "them, as the paper does. Or a file with train, val or test for each query: .npy, FILE.parquet:COLUMN, "
    "text.  [default: source]",
)
@click.option("-k", default=10, help="Top keys to store for each query.")
@click.option(
    "--cell-targets", is_flag=True, default=None, help="Also the top key of every cell of each query."
)
@click.option("--seed", default=0)
@click.option("--keep-zero", is_flag=True, help="Allow keys that are all zero.")
@click.option("--memory", type=size, default="1G", help="Bound on the working set of exact search.")
@click.option("--device", help="Where exact search multiplies: cuda, ...  [default: numpy, on the CPU]")
@click.option("--ray", help=RAY_HELP)
def label(
    out: Path, keys: str, queries: str, plain: bool, keep_zero: bool, split: str | None, **options: Any
) -> None:
    """Make a task of KEYS and QUERIES.

    Splits the queries, finds the exact top keys of every one, and partitions the keys into cells. Both are
    vector files: .npy, .fvecs, .fbin, .hdf5, .parquet (FILE.parquet:COLUMN), ... An interrupted command
    continues when it is given again. SupportNet and KeyNet need --cell-targets; linear and max-affine
    routers do not.
    """
    options |= {"spherical": not plain, "zero": "keep" if keep_zero else "error"}
    ways = (BY_SOURCE, BY_ROWS, BY_TIME)
    if split is not None and split not in ways and not Path(split.partition(":")[0]).exists():
        raise amips.AmipsError(f"--split {split}: expected {', '.join(ways)}, or a file that exists")
    if split is not None:
        options["split"] = split if split in ways else read_ids(split, unique=False)
    task = amips.label(keys, queries, out=out, progress=True, **options)
    rows = [[name, f"{len(getattr(task, name)):,}"] for name in SPLITS]
    echo(f"{task.path}: {task.n:,} keys, d = {task.d}, {task.c:,} cells")
    echo(f"imbalance {task.cells.imbalance:.2f}, duplicate queries {task.facts['duplicate_queries']:,}")
    echo(text_table(["queries", "rows"], rows))
    if task.by_time:
        echo("held-out rows are the last of the log; queries that came before are kept among them")
    if task.shares_sources:
        echo("held-out rows have relatives in train: this measures memory of the log, not new queries")


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=output, help="The bundle to make or replace.")
@click.option("--minutes", default=FIT_MINUTES, help="How long it may take.")
@click.option(
    "--memory", type=size, help="What it may take beside its inputs, such as 4G.  [default: no bound]"
)
@click.option("--recall", default=TARGET_RECALL, help="The recall@10 at which cost is to be least.")
@click.option(
    "--objective",
    type=click.Choice(["flops", "latency", "throughput"]),
    default="flops",
    help="What is to be least.",
)
@click.option("--cells", type=int, help="How many cells (FAISS: nlist).  [default: the best of several]")
@click.option(
    "--storage",
    type=click.Choice(["flat", "sq8", "pq", "lean"]),
    help="How keys are stored.  [default: the cheaper of flat and lean]",
)
@click.option(
    "--spill-fraction", type=float, help="Fraction of the keys that get a second cell.  [default: what pays]"
)
@click.option(
    "--structure",
    type=click.Choice(["cells", "graph"]),
    help="How keys are found.  [default: the cheaper of both]",
)
@click.option(
    "--order",
    type=click.Choice(["time"]),
    help="time: QUERIES are a log in the order of time. What comes again counts as often as it comes, and "
    "the last part is held out; a memory of the log is used where it pays.  [default: equal queries count "
    "once]",
)
@click.option("--ids", help=IDS_HELP)
@click.option("--attributes", type=path, help=ATTRIBUTES_HELP)
@click.option("--seed", default=0)
@click.option("--keep-log", default=KEEP_LOG, help=KEEP_LOG_HELP)
@click.option("--device", help="Where queries are labelled and routers trained: cuda, ...")
@click.option("--ray", help=RAY_HELP)
@click.option("--quiet", is_flag=True, help="Print nothing.")
def fit(keys: str, queries: str, **options: Any) -> None:
    """Choose and build the cheapest index of KEYS.

    Cheapest for queries like those in QUERIES, at a recall. Designs are compared on held-out queries, and
    what is gained over plain IVF is measured on others. An interrupted command continues when it is given
    again.
    """
    amips.fit(keys, queries, **options)
