"""What the commands share: the group, ways to read an option, tables for a person."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import amips
from amips.tables import text_table

_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    """Bytes, written like 500M or 2G."""
    number = text.upper().removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        return int(float(number.removesuffix(unit)) * _BYTES[unit])
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a size; write it like 500M or 2G") from None


def number_or_word(text: str) -> int | float | str:
    """A number where one is given, otherwise the word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


path = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(amips.__version__, prog_name="amips")
def cli() -> None:
    """Learned maximum-inner-product search: learn from your queries, scan fewer keys."""


def read_ids(path: Path) -> Any:
    """External ids from .npy, or from a text file with one a line."""
    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as problem:
            raise amips.AmipsError(f"{path} is not a readable .npy file: {problem}") from None
    try:
        return path.read_text("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise amips.AmipsError(f"{path} is not UTF-8 text with one id a line") from None


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """What is warned of meanwhile is said in a line each, and once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in said):
        click.echo(f"warning: {text}", err=True)


def points_table(points: list[amips.Point]) -> str:
    """Operating points, for a person."""
    rows = [
        [
            f"{p.probes}",
            f"{p.min_mass:.2g}" if p.min_mass else "",
            *(f"{value:.3f}" for value in (p.recall1, p.recall10)),
            f"{p.scanned:.2%}",
            f"{p.flops / 1e6:.2f}",
        ]
        for p in points
    ]
    return text_table(["probes", "share", "recall@1", "recall@10", "keys scanned", "MFLOP"], rows)


def told(summary: Any, results: Path) -> None:
    """The verdict, the first table, and where the rest is."""
    click.echo("\n".join(summary.verdict))
    for shown in summary.tables[:1]:
        click.echo(f"\n{shown.title}\n\n{text_table(shown.head, shown.rows)}")
        if shown.note:
            click.echo(f"\n{shown.note}")
    click.echo(f"\n{results}: everything is there; see it with: amips report {results}")
