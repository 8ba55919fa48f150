"""publish, fetch: finished directories at an address."""

from pathlib import Path

import click

import amips
from amips.cli.options import cli, echo, output, path


@cli.command()
@click.argument("directory", type=path)
@click.argument("address")
def publish(directory: Path, address: str) -> None:
    """Send DIRECTORY (a task, a bundle, shards) to ADDRESS: s3://bucket/name, gs://..., file:///...

    Whoever fetches meanwhile gets what was there before, whole. The same command continues.
    """
    version = amips.publish(directory, address, progress=True)
    echo(f"{address}: version {version} of {directory}")


@cli.command()
@click.argument("address")
@click.argument("out", type=output)
def fetch(address: str, out: Path) -> None:
    """Bring what is published at ADDRESS to the directory OUT; every file is checked by its SHA-256."""
    amips.fetch(address, out, progress=True)
    echo(f"{out}: as published at {address}")
