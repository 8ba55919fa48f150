"""bench, report: figures."""

from pathlib import Path
from typing import Any

import click

import amips
from amips.bench import Judgements, Settings, draw_figures, load_summary, read_qrels, write_page
from amips.bench import bench as run
from amips.cli.options import cli, echo, output, output_file, path, print_summary
from amips.task import load_task


@cli.command()
@click.argument("task", type=path)
@click.option("--out", required=True, type=output, help="The results directory; what is there is kept.")
@click.option("--models", "--model", type=path, multiple=True, help="A run to compare; may be repeated.")
@click.option("--systems", type=path, help="A TOML file that names the systems to compare instead.")
@click.option(
    "--backend", "backends", multiple=True, help="Also hnsw, scann, pgvector, ...; may be repeated."
)
@click.option("--minutes", default=Settings.minutes, help="Training time of each router, at most.")
@click.option("--rounds", default=Settings.rounds, help="How often each time is taken.")
@click.option("--batch", default=Settings.batch, help="Queries in the large batch.")
@click.option("--singles", default=Settings.singles, help="Queries that are timed one at a time.")
@click.option("--texts", type=path, help="The directory of amips embed: the ids that --qrels speaks of.")
@click.option("--qrels", type=path, help="Relevance judgements: also measure nDCG@10 and recall@100.")
@click.option("--seed", default=Settings.seed)
def bench(
    task: Path, models: tuple[Path, ...], texts: Path | None, qrels: Path | None, **options: Any
) -> None:
    """Compare ways to search on the held-out queries of TASK, and say whether learning pays.

    By default: FAISS IVF over a sweep of cells, what amips fit usually makes, every given model, exact search
    and HNSW. An interrupted bench continues when the same command is given again.
    """
    if (texts is None) != (qrels is None):
        raise click.UsageError("--qrels and --texts go together: judgements, and the ids of queries and keys")
    judgements = None if texts is None or qrels is None else read_judgements(task, texts, qrels)
    summary = run(task, models=list(models), judgements=judgements, progress=True, **options)
    print_summary(summary, options["out"])


@cli.command()
@click.argument("results", type=path)
@click.option("--out", type=output_file, help="The page to write.  [default: RESULTS/report.html]")
@click.option("--figures", "pictures", type=output, help="Also write the charts here, as PNG and SVG.")
def report(results: Path, out: Path | None, pictures: Path | None) -> None:
    """Make one self-contained HTML page of RESULTS: of a bench, an experiment, or a training run."""
    if pictures is not None:
        if pictures.exists() and not pictures.is_dir():
            raise amips.AmipsError(f"{pictures} is a file; name a directory for the figures")
        pictures.mkdir(parents=True, exist_ok=True)
    echo(f"{write_page(results, out or results / 'report.html')}: open it in a browser")
    if pictures is not None:
        echo(f"{pictures}: {len(draw_figures(load_summary(results), pictures))} figures")


def read_judgements(task: Path, texts: Path, qrels: Path) -> Any:
    """Judgements with the ids of the texts that a task was made of."""
    from amips.text import Embedded

    embedded = Embedded(texts)
    if embedded.fingerprint != load_task(task).fingerprint:
        raise amips.TaskError(f"{task} is not of the texts in {texts}: its keys are others")
    if embedded.query_texts is None:
        raise amips.AmipsError(f"{texts} holds no queries")
    return Judgements(read_qrels(qrels), embedded.query_texts.ids(), embedded.key_texts.ids())
