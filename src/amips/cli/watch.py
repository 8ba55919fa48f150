"""drift, refit, rollback: bundles and the queries of now."""

import json
import sys
from pathlib import Path

import click

from amips.cli.options import TRUSTED_HELP, cli, echo, path, plain_warnings
from amips.search import REFIT_MINUTES, load

DRIFTED = 3  # how a comparison ends that finds drift: other than an error


@cli.command()
@click.argument("bundle", type=path)
@click.argument("queries")
@click.option("--seed", default=0)
@click.option("--mmap", is_flag=True, help="Leave the keys on disk.")
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON, for a monitor.")
def drift(
    bundle: Path, queries: str, seed: int, mmap: bool, trusted: tuple[Path, ...], as_json: bool
) -> None:
    """Say whether QUERIES of now look like the log that BUNDLE was fitted on.

    Ends with 3 if they do not, so that a monitor notices; an error ends with 1. Queries like the log are
    called drift in at most 1 % of the looks.
    """
    index = load(bundle, mmap=mmap, trusted=list(trusted) or None, watch=False)
    with plain_warnings():
        result = index.drift(queries, seed=seed)
    echo(json.dumps(result.to_json()) if as_json else str(result))
    if result.drifted:
        sys.exit(DRIFTED)


@cli.command()
@click.argument("bundle", type=path)
@click.argument("queries")
@click.option("--minutes", default=REFIT_MINUTES, help="How long it may take, roughly.")
@click.option("--seed", default=0)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def refit(bundle: Path, queries: str, minutes: float, seed: int, as_json: bool) -> None:
    """Let BUNDLE learn from new QUERIES, in the order of time.

    BUNDLE is replaced in one step, if that is better on the newest of them; amips rollback undoes it.
    """
    with load(bundle, watch=False) as index, plain_warnings():
        result = index.refit(queries, minutes, seed=seed)
    echo(json.dumps(result.to_json()) if as_json else f"{result}\namips rollback {bundle} undoes it")


@cli.command()
@click.argument("bundle", type=path)
def rollback(bundle: Path) -> None:
    """Go back to BUNDLE as it was before the last refit.

    Keys that were added or removed since stay so.
    """
    with load(bundle, watch=False) as index:
        index.rollback()
    echo(f"{bundle}: as before its last refit")
