"""add, update, remove, set-attributes, compact: bundles that change."""

from pathlib import Path

import click

import amips
from amips.cli.options import ATTRIBUTES_HELP, IDS_FILE, cli, echo, ids_like, path, plain_warnings
from amips.search import Index
from amips.sharding import UNCHANGED, is_sharded


def _opened(bundle: Path) -> Index:
    if is_sharded(bundle):
        raise amips.BundleError(f"{bundle}: {UNCHANGED}")
    index = amips.load(bundle)
    if not isinstance(index, Index):
        raise amips.AmipsError(f"{bundle} routes a FAISS index of your own: change that one")
    return index


def _count(number: int) -> str:
    return f"{number:,} {'key' if number == 1 else 'keys'}"


@cli.command()
@click.argument("bundle", type=path)
@click.argument("keys")
@click.option("--ids", help=f"{IDS_FILE}  [default: the numbers that follow]")
@click.option("--attributes", type=path, help=ATTRIBUTES_HELP)
def add(bundle: Path, keys: str, ids: str | None, attributes: Path | None) -> None:
    """Add KEYS to BUNDLE, all of them or none.

    They are found by every search that begins afterwards; programs that have the bundle open see them when
    they refresh it.
    """
    with plain_warnings(), _opened(bundle) as index:
        added = index.add(
            keys, None if ids is None else ids_like(ids, index.has_string_ids), attributes=attributes
        )
        echo(f"{bundle}: {_count(len(added))} added, {index.n:,} in all")


@cli.command()
@click.argument("bundle", type=path)
@click.argument("keys")
@click.option("--ids", required=True, help="The ids whose keys these are now: as for amips add.")
@click.option("--attributes", type=path, help=ATTRIBUTES_HELP)
def update(bundle: Path, keys: str, ids: str, attributes: Path | None) -> None:
    """Put KEYS in the place of those with the given ids in BUNDLE, all of them or none."""
    with plain_warnings(), _opened(bundle) as index:
        values = ids_like(ids, index.has_string_ids)
        index.update(values, keys, attributes=attributes)
        echo(f"{bundle}: {_count(len(values))} updated, {index.n:,} in all")


@cli.command()
@click.argument("bundle", type=path)
@click.argument("ids", nargs=-1)
@click.option("--ids", "file", help="A file of ids, instead: as for amips add.")
def remove(bundle: Path, ids: tuple[str, ...], file: str | None) -> None:
    """Remove the keys with the given IDS from BUNDLE, all of them or none."""
    if bool(ids) == (file is not None):
        raise amips.AmipsError("give ids, or a file of them with --ids")
    with _opened(bundle) as index:
        removed = index.remove(ids_like(list(ids) if file is None else file, index.has_string_ids))
        echo(f"{bundle}: {_count(removed)} removed, {index.n:,} left")


@cli.command()
@click.argument("bundle", type=path)
@click.argument("table", type=path)
def set_attributes(bundle: Path, table: Path) -> None:
    """Give the keys of BUNDLE the attributes in TABLE, in the place of those they had.

    TABLE is a Parquet or Arrow file: one row a key, in the order in which keys were given and added, without
    those that were removed; an updated key has the place of the one before.
    """
    with _opened(bundle) as index:
        index.set_attributes(table)
        columns = ", ".join(f"{name} {kind}" for name, kind in index.attributes.columns)
        echo(f"{bundle}: attributes of {_count(index.n)}: {columns}")


@cli.command()
@click.argument("bundle", type=path)
def compact(bundle: Path) -> None:
    """Fold what was changed in BUNDLE into its files.

    What was removed goes, what was added becomes part of the rest; programs that have the bundle open go on,
    and see it when they refresh it.
    """
    with _opened(bundle) as index:
        before = index.snapshot.n
        index.compact()
        echo(f"{bundle}: {_count(index.n)}, {before - index.n:,} removed ones gone")
