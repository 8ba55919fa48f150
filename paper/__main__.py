"""`python -m paper`: the paper's experiments, a command each, and the pages that are made of their
results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from amips.cli import echo, output, path, print_summary, run_command
from paper import BOTH, EXPERIMENTS, TIMED_APART, run_experiment
from paper.page import collect, write_pages
from paper.ratios import ratios_table
from paper.workspace import SCALES, SPLITS_BY

STOPPED = "stopped; the same command continues where it was"

Options = list[Callable[[Any], Any]]
COMMON: Options = [
    click.option("--data", required=True, type=path, help="A directory with keys and queries."),
    click.option("--out", required=True, type=output, help="Experiments with the same share their models."),
    click.option("--scale", type=click.Choice([*SCALES]), default="small"),
    click.option("--seed", default=0),
    click.option("--device", help="Where labelling and training multiply: cuda, ...  [default: the CPU]"),
]
SPLIT: Options = [
    click.option(
        "--split",
        type=click.Choice([*SPLITS_BY, BOTH]),
        help="How queries are held out: by source, by rows as in the paper, or both, side by side.  "
        "[default: both at replica, source elsewhere]",
    )
]
MORE: dict[str, Options] = {
    **{
        name: [click.option("--times/--no-times", default=True, help="Time the searching, too.")]
        for name in TIMED_APART
    },
    "encoders": [
        click.option("--also", multiple=True, type=path, help="Data of another encoder; may be repeated."),
        click.option("--encoder", "encoders", multiple=True, help="Encode the data's texts, too, with this."),
    ],
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def cli() -> None:
    """Run an experiment of the paper, from the top of the repository.

    --scale smoke takes seconds, small minutes on two cores (scaling: two hours), and so does replica: it has
    the paper's ratios (see ratios). full has the paper's settings. An interrupted experiment continues when
    the same command is given again.
    """


def _experiment(name: str) -> click.Command:
    """The command of one experiment."""

    def run(
        data: Path, out: Path, encoders: tuple[str, ...] = (), also: tuple[Path, ...] = (), **options: Any
    ) -> None:
        others = [*also, *(_encoded(data, out, encoder) for encoder in encoders)]
        summary = run_experiment(name, data=data, out=out, also=others, progress=True, **options)
        print_summary(summary, out / summary.name)

    own = [*(SPLIT if EXPERIMENTS[name].split else []), *MORE.get(name, [])]
    for option in reversed([*COMMON, *own]):
        run = option(run)
    return click.command(name, help=EXPERIMENTS[name].question)(run)


def _encoded(data: Path, out: Path, encoder: str) -> Path:
    """Vectors of the texts that lie beside the data, by another encoder."""
    from amips.text import embed

    keys, queries = (data / f"{side}.jsonl" for side in ("keys", "queries"))
    place = out / f"vectors-{Path(encoder).name}"
    vectors: Path = embed(keys, queries, encoder=encoder, out=place, progress=True).path
    return vectors


for _name in EXPERIMENTS:
    cli.add_command(_experiment(_name))


@cli.command(name="collect")
@click.argument("out", type=path)
def collect_results(out: Path) -> None:
    """Copy the summaries and figures of OUT to results/, and write the pages."""
    for line in collect(out):
        echo(line)
    write_pages()


@cli.command(name="ratios")
def ratios() -> None:
    """Print the paper's regime and ours: parameters, rows and samples for each source query."""
    table = ratios_table()
    echo(table.markdown())


@cli.command(name="page")
def pages() -> None:
    """Write docs/results.md and docs/results/ from results/."""
    for written in write_pages():
        echo(written)


def main() -> None:
    """Run the command; what goes wrong is one line."""
    run_command(cli, STOPPED)


if __name__ == "__main__":
    main()
