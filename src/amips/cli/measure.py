"""bench, report, study: figures."""

from pathlib import Path
from typing import Any

import click

import amips
from amips.cli.options import cli, path, told


@cli.command()
@click.argument("task", type=path)
@click.option("--out", required=True, type=path, help="The results directory; what is there is kept.")
@click.option("--models", "--model", type=path, multiple=True, help="A run to compare; may be repeated.")
@click.option("--systems", type=path, help="A TOML file that names the systems to compare instead.")
@click.option("--engine", "engines", multiple=True, help="Also hnsw, scann, pgvector, ...; may be repeated.")
@click.option("--minutes", default=0.5, help="Training time of each linear router.")
@click.option("--rounds", default=3, help="How often each time is taken.")
@click.option("--batch", default=1024, help="Queries in the large batch.")
@click.option("--singles", default=64, help="Queries that are timed one at a time.")
@click.option("--texts", type=path, help="What amips embed made: the ids that --qrels speaks of.")
@click.option("--qrels", type=path, help="Relevance judgements: also measure nDCG@10 and recall@100.")
@click.option("--seed", default=0)
def bench(
    task: Path, models: tuple[Path, ...], texts: Path | None, qrels: Path | None, **options: Any
) -> None:
    """Compare ways to search on the held-out queries of TASK, and say whether learning pays.

    By default: FAISS IVF over a sweep of cells, what amips fit usually makes, every given model, exact search
    and HNSW. An interrupted bench continues when the same command is given again.
    """
    from amips.bench import bench as run

    if (texts is None) != (qrels is None):
        raise click.UsageError("--qrels and --texts go together: judgements, and the ids of queries and keys")
    judgements = None if texts is None or qrels is None else read_judgements(task, texts, qrels)
    made = run(task, models=list(models), judgements=judgements, progress=True, **options)
    told(made, options["out"])


@cli.command()
@click.argument("results", type=path)
@click.option("--out", type=path, help="The page to write.  [default: RESULTS/report.html]")
@click.option("--figures", "pictures", type=path, help="Also write the charts here, as PNG and SVG.")
def report(results: Path, out: Path | None, pictures: Path | None) -> None:
    """Make one self-contained HTML page of the RESULTS of a bench or a study."""
    from amips.bench import load_summary
    from amips.bench.figures import figures
    from amips.bench.page import report as write

    if pictures is not None:
        if pictures.exists() and not pictures.is_dir():
            raise amips.AmipsError(f"{pictures} is a file; name a directory for the figures")
        pictures.mkdir(parents=True, exist_ok=True)
    click.echo(f"{write(results, out or results / 'report.html')}: open it in a browser")
    if pictures is not None:
        click.echo(f"{pictures}: {len(figures(load_summary(results), pictures))} figures")


@cli.command()
@click.argument("name")
@click.option("--data", required=True, type=path, help="A directory with keys and queries.")
@click.option("--out", required=True, type=path, help="Studies with the same one share their models.")
@click.option("--scale", type=click.Choice(["smoke", "small", "full"]), default="small")
@click.option("--seed", default=0)
@click.option("--engine", help="For ivf: compare on this engine instead (hnsw, scann, pgvector, ...).")
@click.option("--also", multiple=True, type=path, help="encoders: data of another; as often as needed.")
@click.option("--encoder", "encoders", multiple=True, help="encoders: encode the data's texts, too.")
def study(
    name: str, data: Path, out: Path, also: tuple[Path, ...], encoders: tuple[str, ...], **options: Any
) -> None:
    """Run an experiment of the paper: routing, routing128, ivf, ood, timing, shift, leak, backends, dynamics,
    tradeoff, losses, horizon, encoders or scaling.

    smoke takes seconds, small minutes on two cores (scaling: two hours), full has the paper's
    settings. An interrupted study continues when the same command is given again.
    """
    from paper import study as run

    others = [*also]
    if encoders and name != "encoders":
        raise amips.AmipsError("--encoder is for the study encoders")
    for encoder in encoders:
        from amips.text import embed

        keys, queries = (data / f"{side}.jsonl" for side in ("keys", "queries"))
        place = out / "work" / f"vectors-{Path(encoder).name}"
        others.append(embed(keys, queries, encoder=encoder, out=place, progress=True).path)
    made = run(name, data=data, out=out, also=others, progress=True, **options)
    told(made, out / (name if options["engine"] is None else made.name))


def read_judgements(task: Path, texts: Path, qrels: Path) -> Any:
    """Judgements with the ids of the texts that a task was made of."""
    from amips.bench import Judgements
    from amips.bench.relevance import read_qrels
    from amips.text import Embedded

    embedded, found = Embedded(texts), load_task(task)
    if embedded.fingerprint != found.fingerprint:
        raise amips.TaskError(f"{task} was not made of the texts in {texts}: its keys are others")
    if embedded.query_texts is None:
        raise amips.AmipsError(f"{texts} holds no queries")
    return Judgements(read_qrels(qrels), embedded.query_texts.ids(), embedded.key_texts.ids())
