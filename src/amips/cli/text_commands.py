"""embed, queries, data: texts to vectors."""

from pathlib import Path
from typing import Any

import click

from amips.cli.options import RAY_HELP, cli, echo, output, output_file, path
from amips.tables import text_table


@cli.command()
@click.argument("corpus")
@click.option("--queries", help="Texts to search with, in a file like CORPUS.")
@click.option("--out", required=True, type=output, help="The directory to make.")
@click.option("--encoder", default="all-MiniLM-L6-v2", help="A sentence-transformers model, or wordllama.")
@click.option("--batch", default=64, help="Texts encoded at a time.")
@click.option(
    "--titles/--no-titles", default=True, help="Encode a document's title before its text, or the text alone."
)
@click.option("--skip-empty", is_flag=True, help="Leave empty texts out, instead of an error.")
@click.option("--ray", help=RAY_HELP)
def embed(corpus: str, **options: Any) -> None:
    """Encode the texts of CORPUS as vectors.

    Also those of --queries. The vectors are for label, fit and search. Files of texts: .jsonl (as in BEIR),
    .tsv, or one text a line; each may be compressed (.gz), and - is standard input. Duplicates are left out.
    An interrupted run continues when the same command is given again.
    """
    from amips.text import embed as run

    embedded = run(corpus, progress=True, **options)
    echo(f"{embedded.path}: encoded by {embedded.encoder}, d = {embedded.d}")
    rows = []
    for side, texts in (("keys", embedded.key_texts), ("queries", embedded.query_texts)):
        if texts is not None:
            left_out = embedded.left_out[side]
            rows.append([side, *(f"{n:,}" for n in (len(texts), left_out["duplicates"], left_out["empty"]))])
    echo(text_table(["texts", "encoded", "duplicates", "empty"], rows))


@cli.command()
@click.argument("corpus")
@click.option("--out", required=True, type=output_file, help="The queries to write, as JSON lines.")
@click.option("--corpus-out", type=output_file, help="The corpus to index: without the sentences removed.")
@click.option("--per-text", default=3, help="Sentences of each text, beside its title and heading.")
@click.option("--remove", default=0.9, help="Probability that a sentence is removed from its text.")
@click.option("--seed", default=0)
def queries(corpus: str, **options: Any) -> None:
    """Make queries out of CORPUS alone.

    Queries are sentences of its texts, each of which asks for its text. With --corpus-out, most of these
    sentences are taken out of the texts, so that a query is not found by its own words; then index that
    corpus. Without, nothing is removed.
    """
    from amips.text import make_queries as run

    counts = run(corpus, progress=True, **options)
    echo(
        f"{options['out']}: {counts.queries:,} queries of {counts.texts:,} texts, "
        f"{counts.duplicates:,} duplicates left out"
    )
    if options["corpus_out"] is not None:
        echo(f"{options['corpus_out']}: the corpus to index, {counts.removed:,} queries removed from it")


@cli.command()
@click.argument("name")
@click.option("--out", required=True, type=output, help="The directory to make, in BEIR's layout.")
@click.option("--source", type=path, help="Downloaded repositories, instead of the Hugging Face Hub.")
@click.option("--most", type=int, help="Only the first so many passages, and what concerns them.")
def data(name: str, out: Path, source: Path | None, most: int | None) -> None:
    """Fetch a data set.

    NAME is beir/fiqa, beir/quora, beir/nq, beir/hotpotqa or beir/bioasq. An interrupted fetch continues with
    the first missing file when the same command is given again.
    """
    from amips.text import get_data

    counts = get_data(name, out, source=source, most=most, progress=True)["counts"]
    echo(text_table([str(out), "records"], [[file, f"{count:,}"] for file, count in counts.items()]))
