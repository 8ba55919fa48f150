"""shard: from a task or a bundle to shards."""

from pathlib import Path
from typing import Any

import click

import amips
from amips.cli.options import cli, echo, output, path
from amips.metrics import TARGET_RECALL
from amips.nets import DEFAULT_MINUTES
from amips.sharding import COPIES, KINDS, SLACK


@cli.command()
@click.argument("source", metavar="BUNDLE_OR_TASK", type=path)
@click.option("--shards", default=16, help="How many.")
@click.option("--out", required=True, type=output, help="The directory to make.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    type=click.Choice(KINDS),
    default=("centroid", "linear"),
    help="A candidate for the router of shards; may be repeated. The best on val is taken.",
)
@click.option("--copies", default=COPIES, help="Fraction of the keys with a copy in a second shard.")
@click.option("--slack", default=SLACK, help="How much larger than the mean a shard may be.")
@click.option("--recall", default=TARGET_RECALL, help="The recall@10 that a search serves by default.")
@click.option("--minutes", default=DEFAULT_MINUTES, help="Training time of each router, at most.")
@click.option("--seed", default=0)
def shard(source: Path, out: Path, **options: Any) -> None:
    """Divide the keys of BUNDLE_OR_TASK into shards, such that a query needs few of them.

    Each shard is a bundle. The same command continues what was interrupted.
    """
    index = amips.shard(source, out=out, progress=True, **options)
    sizes = index.sizes
    echo(f"{out}: {index.n:,} keys in {len(sizes)} shards of {sizes.min():,} to {sizes.max():,}")
    for kind, contacted in index.about["contacted_on_val"].items():
        note = ", taken" if kind == index.about["chosen"] else ""
        echo(f"{kind} router: {contacted:.2f} shards a query on val, before copies{note}")
    asked = index.about["asked_on_val"]
    echo(
        f"a search for recall@10 {index.target_recall:g} asks {asked:.2f} of {len(index.sizes)} shards on val"
    )
