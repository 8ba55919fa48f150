"""What the commands share: the group, ways to read an option, tables for a person."""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.files import local
from amips.metrics import TOP, front
from amips.search import Point
from amips.tables import text_table
from amips.terminal import printable
from amips.vectors import read_ids
from amips.version import __version__

_WHOLE, _MOST = re.compile(r"\s*-?[0-9]{1,19}\s*"), 2**63 - 1  # of an id
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_AMOUNTS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
TRUSTED_HELP = "A public key: refuse a bundle that it did not sign. May be repeated."
KEEP_LOG_HELP = "Training queries that the bundle keeps for drift and refit, at most; 0 for none."
IDS_FILE = "Ids of the keys: .npy, FILE.parquet:COLUMN, or text with one a line."
IDS_HELP = f"{IDS_FILE}  [default: row numbers]"
RAY_HELP = "A Ray cluster to work on: auto, local or HOST:PORT.  [default: this process]"

ATTRIBUTES_HELP = "Attributes of the keys for search --where: a Parquet or Arrow file, one row a key."


def size(text: str) -> int:
    """Bytes, written like 500M or 2G."""
    number = text.upper().removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        return int(float(number.removesuffix(unit)) * _BYTES[unit])
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a size; write it like 500M or 2G") from None


def amount(text: str) -> float:
    """How many, written like 1e9, 200K, 10M or 2.5B (thousands, millions, thousands of millions)."""
    unit = text[-1:].upper() if text[-1:].upper() in _AMOUNTS else ""
    try:
        return float(text[: len(text) - len(unit)]) * _AMOUNTS[unit]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number; write it like 1e7, 200K, 10M or 2.5B") from None


def number_or_word(text: str) -> int | float | str:
    """A number where one is given, otherwise the word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def ids_like(source: Any, strings: bool, *, unique: bool = True) -> NDArray[Any]:
    """Ids that were typed, or stand in a file: as they are, or whole numbers where ids are no strings."""
    values = np.atleast_1d(read_ids(source, unique=unique))
    if strings or values.dtype.kind != "U":
        return values
    for word in values.ravel().tolist():
        if not _WHOLE.fullmatch(word) or not -_MOST - 1 <= int(word) <= _MOST:
            where = f"{source}: " if isinstance(source, str) else ""
            raise AmipsError(f"{where}{word!r} is not an id: the ids of this index are whole numbers")
    return values.astype(np.int64)


class Output(click.Path):
    """A place to write to; an address such as s3://bucket/name is refused before any work is done."""

    def __init__(self, what: str) -> None:
        super().__init__(path_type=Path)
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        return local(value, AmipsError, self.what)


def echo(text: str, err: bool = False) -> None:
    """Print for a person: control characters, which may come out of a file of someone else, made visible."""
    click.echo(printable(text), err=err)


path, output, output_file = click.Path(path_type=Path), Output("directory"), Output("file")


class Commands(click.Group):
    """The commands; a file that ends too early is an error, where click would see an interrupt."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except EOFError as problem:
            raise AmipsError(f"a file ended unexpectedly: {str(problem) or 'it is cut'}") from problem


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="amips")
def cli() -> None:
    """Learned maximum-inner-product search: learn from your queries, scan fewer keys.

    The shortest way is `amips fit KEYS QUERIES --out BUNDLE`, then `amips search BUNDLE QUERIES`.
    """


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings raised inside are printed in a line each, and once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        echo(f"warning: {text}", err=True)


def points_table(points: Sequence[Point], n: int, d: int) -> str:
    """Operating points of n keys, from cheap to dear: those whose recall@10 no cheaper one has."""
    cost, recall = (np.array([getattr(point, name) for point in points]) for name in ("flops", "recall10"))
    graph, remembers = any(p.margin for p in points), any(p.recognised for p in points)
    rows = [
        [
            f"{p.probes}",
            f"{p.margin:.3g}" if p.margin else f"{p.min_mass:.2g}" if p.min_mass else "",
            "" if p.refine is None else f"{p.refine} a result" if p.refine else "every key",
            *(f"{value:.3f}" for value in (p.recall1, p.recall10, p.recall_assured(TOP))),
            f"{p.scanned:.2%}",
            f"{p.flops / (2 * n * d):.2%}",
            *([f"{p.recognised:.1%}" if p.recognised else ""] if remembers else []),
        ]
        for p in (points[i] for i in front(cost, recall))
    ]
    effort = ["visited", "margin"] if graph else ["probes", "min mass"]
    head = [*effort, "candidates", "recall@1", "recall@10", "95 % sure", "keys scanned", "FLOPs"]
    head += ["recognised"] if remembers else []
    return text_table(head, rows)


def print_summary(summary: Any, results: Path) -> None:
    """The verdict of a bench, the first table, and where the rest is."""
    echo("\n".join(summary.verdict))
    for table in summary.tables[:1]:
        echo(f"\n{table.title}\n\n{text_table(table.head, table.rows)}")
        if table.note:
            echo(f"\n{table.note}")
    echo(f"\n{results}: everything is there; see it with: amips report {results}")
