"""shard: from a task or a bundle to shards; what search does with them."""

from pathlib import Path
from typing import Any

import click

import amips
from amips.cli.hits import writing_hits
from amips.cli.options import cli, echo, output, path, plain_warnings
from amips.metrics import TARGET_RECALL
from amips.nets import DEFAULT_MINUTES
from amips.sharding import COPIES, EFFORT, KINDS, SLACK
from amips.vectors import inspect, open_vectors


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


def search_shards(
    directory: Path,
    queries: str,
    k: int,
    out: Path | None,
    mmap: bool,
    partial: bool,
    options: dict[str, Any],
) -> None:
    """Search a directory of shards and write the results; say what is missing where shards are.

    Args:
        partial: go on although shards are missing or damaged.
        options: of the command, those that were given; AmipsError if one is not of shards.
    """
    if others := options.keys() - EFFORT:
        name = min(others).replace("_", "-")
        raise amips.AmipsError(f"--{name}: {directory} is in shards, which cannot have that; leave it out")
    index = amips.load_shards(directory, mmap=mmap, partial=partial)
    x = open_vectors(queries, "queries", single=True)
    if x.d != index.d:
        raise amips.VectorError(f"{x.name} has dimension {x.d}, {directory} needs {index.d}")
    inspect(x, zero="keep", any_norm=True)
    silent: dict[int, str] = {}
    total, most = 0.0, 0.0
    with plain_warnings(), writing_hits(out) as write:
        for first, block in x.blocks():
            answer = index.ask(block, k, **options)
            write(first, answer.scores, answer.ids)
            silent |= answer.silent
            total, most = total + float(answer.missing.sum()), max(most, float(answer.missing.max()))
    for shard, reason in sorted(silent.items()):
        echo(f"warning: shard {shard} did not answer: {reason}", err=True)
    if silent:
        share = f"{total / x.n:.1%} of the expected top keys, up to {max(most, 0.001):.1%} of a query's"
        echo(f"warning: {share}, lie in shards that did not answer and are missing", err=True)
    if out is not None:
        echo(f"{out}: the best {k} keys of {x.n:,} {'query' if x.n == 1 else 'queries'}")
