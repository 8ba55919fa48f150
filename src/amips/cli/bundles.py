"""build, search, audit, ask: bundles."""

import json
import sys
from pathlib import Path
from typing import Any

import click

import amips
from amips.cli.hits import check_hits_file, writing_hits
from amips.cli.options import (
    ATTRIBUTES_HELP,
    IDS_HELP,
    KEEP_LOG_HELP,
    TRUSTED_HELP,
    cli,
    echo,
    ids_like,
    output,
    output_file,
    path,
    plain_warnings,
    points_table,
)
from amips.cli.shards import search_shards
from amips.files import read_json
from amips.metrics import TARGET_RECALL
from amips.nets import DEFAULT_MINUTES
from amips.search import KEEP_LOG, GraphSearcher, Index, Searcher, WrappedIndex, measure, plain_index
from amips.sharding import is_sharded
from amips.tables import text_table
from amips.task import Task, load_task
from amips.terminal import one_line
from amips.vectors import inspect, open_vectors

MISSED = 3  # how an audit ends whose recall is missed: other than an error


@cli.command()
@click.argument("task", type=path)
@click.argument("run", type=path, required=False)
@click.option("--out", required=True, type=output, help="The bundle to make or replace.")
@click.option("--design", type=path, help="A design as JSON, instead of the options below.")
@click.option(
    "--storage",
    type=click.Choice(["flat", "sq8", "pq", "lean"]),
    help="How keys are stored.  [default: lean, if that saves anything]",
)
@click.option("--dimensions", type=int, help="Of lean storage.  [default: the fewest that keep the recall]")
@click.option(
    "--spill-fraction", type=float, help="Fraction of the keys that get a second cell.  [default: 0.5]"
)
@click.option("--stop", type=click.Choice(["mass", "probes"]), help="When to stop probing.  [default: mass]")
@click.option(
    "--structure", type=click.Choice(["cells", "graph"]), help="How keys are found.  [default: cells]"
)
@click.option("--recall", default=TARGET_RECALL, help="The recall@10 that a search serves by default.")
@click.option("--minutes", default=DEFAULT_MINUTES, help="Training time of a design's router, at most.")
@click.option("--keep-log", default=KEEP_LOG, help=KEEP_LOG_HELP)
@click.option("--ids", help=IDS_HELP)
@click.option("--attributes", type=path, help=ATTRIBUTES_HELP)
@click.option(
    "--texts", type=path, help="The directory of amips embed: the bundle can then be asked in words."
)
@click.option("--seed", default=0)
def build(
    task: Path, run: Path | None, out: Path, design: Path | None, texts: Path | None, **options: Any
) -> None:
    """Make a searchable bundle of the keys of TASK.

    Cells are chosen by the model of RUN, or by centroids if none is named. Recall and cost are measured on
    the val queries of TASK. With --design, cells and router are made as the design says; `amips info
    --design` prints the design of a bundle.
    """
    opened = load_task(task)
    if texts is not None:
        from amips.text import Embedded

        if Embedded(texts).fingerprint != opened.fingerprint:  # before the work, not after it
            raise amips.TaskError(f"{task} was not made of the texts in {texts}: its keys are others")
    if design is not None:
        options["design"] = amips.Design.from_json(read_json(design, amips.AmipsError))
    index = amips.build(opened, run, out=out, progress=True, **options)
    if texts is not None:
        from amips.text import attach

        attach(out, texts)
    assert index.design is not None
    echo(f"{out}: {index.n:,} keys, d = {index.d}")
    echo(f"{index.design.describe()}\n")
    echo("on held-out queries, keys and FLOPs as shares of a full scan:\n")
    echo(points_table(index.points, index.n, index.d))
    echo(f"\na search serves recall@10 {index.target_recall:g} unless it is told otherwise")
    if run is not None and isinstance(index.snapshot, Searcher):
        _compare_with_centroids(index.snapshot, opened)


def _compare_with_centroids(index: Searcher, task: Task) -> None:
    """Say what the same cells give when centroids choose, and warn where the model does no better."""
    fixed = [point for point in index.points if not point.min_mass]
    middle = min(fixed, key=lambda point: abs(point.recall10 - 0.9))
    (plain,) = measure(index.with_model(None), task.val, [middle.probes])
    echo(
        f"probes={middle.probes} for every query: recall@10 on val is {middle.recall10:.3f}; "
        f"routed by centroids it is {plain.recall10:.3f}"
    )
    if plain.recall10 >= middle.recall10:
        echo(
            "warning: this model routes no better than centroids do; train with more queries, or build "
            "without it",
            err=True,
        )


@cli.command()
@click.argument("bundle", type=path)
@click.argument("queries")
@click.option("-k", default=10, help="Results for each query.")
@click.option("--where", help="A condition on the attributes of keys: \"lang = 'en' and price < 20\".")
@click.option("--filter", "chosen", help="Ids of the keys that may be results: a file, as of build --ids.")
@click.option("--recall", type=float, help="The recall@10 to serve.  [default: what BUNDLE was made for]")
@click.option("--probes", type=int, help="Cells to scan for every query, instead (FAISS: nprobe).")
@click.option("--min-mass", type=float, help="Share of its top keys that a query's cells must hold, instead.")
@click.option("--margin", type=float, help="Of a graph: how far below the tenth best key to go on, instead.")
@click.option(
    "--best-effort", is_flag=True, help="The highest recall that can be had, where --recall cannot."
)
@click.option("--threads", type=int, help="Limit on threads.")
@click.option("--mmap", is_flag=True, help="Leave the keys on disk.")
@click.option("--index", type=path, help="The FAISS index that BUNDLE routes, if it wraps one.")
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
@click.option(
    "--skip-bad", is_flag=True, help="No results for queries that are not finite, instead of an error."
)
@click.option("--partial", is_flag=True, help="Of shards: search those there are, and say what is missing.")
@click.option("--out", type=output_file, help="A file to write.  [default: JSON lines to standard output]")
def search(
    bundle: Path,
    queries: str,
    k: int,
    out: Path | None,
    mmap: bool,
    index: Path | None,
    trusted: tuple[Path, ...],
    skip_bad: bool,
    chosen: str | None,
    partial: bool,
    **options: Any,
) -> None:
    """Search BUNDLE, or a directory of shards, for the best keys of QUERIES.

    QUERIES is a file of vectors, or of one vector. The ending of --out decides about the format: .npz (arrays
    scores and ids), .csv .tsv .parquet .arrow .feather (columns query, rank, id, score) or .jsonl (a line for
    each query).
    """
    if out is not None:
        check_hits_file(out)
    if is_sharded(bundle):
        more = {"index": index, "trusted": trusted, "skip_bad": skip_bad, "filter": chosen}
        options = {name: value for name, value in (options | more).items() if value}
        search_shards(bundle, queries, k, out, mmap, partial, options)
        return
    if partial:
        raise amips.AmipsError(f"--partial is of shards; {bundle} is not in shards: leave it out")
    searcher: Any = amips.load(bundle, mmap=mmap, index=index, trusted=list(trusted) or None)
    x = open_vectors(queries, "queries", single=True)
    if x.d != searcher.d:
        raise amips.VectorError(f"{x.name} has dimension {x.d}, {bundle} needs {searcher.d}")
    options = {name: value for name, value in options.items() if value is not None}
    if "where" in options and isinstance(searcher, WrappedIndex):
        raise amips.AmipsError(f"{bundle} routes a FAISS index, which has no attributes: give --filter")
    if chosen is not None:
        strings = isinstance(searcher, Index) and searcher.has_string_ids
        options["filter"] = ids_like(chosen, strings, unique=False)
    if "margin" in options and not isinstance(plain_index(searcher.snapshot), GraphSearcher):
        raise amips.AmipsError(f"--margin is of a graph; {bundle} has cells: give --recall or --probes")
    if (
        sys.stderr.isatty()
        and not options.keys() & {"recall", "probes", "min_mass", "margin"}
        and searcher.target_recall
    ):
        served = f"serving recall@10 {searcher.target_recall:g}, which {bundle} was made for"
        echo(f"{served}; --recall for another", err=True)
    if skip_bad:
        options["on_bad"] = "skip"
    else:
        try:  # names the row of the file, where a block knows its own
            inspect(x, zero="keep", any_norm=True)
        except amips.VectorError as problem:
            raise amips.VectorError(f"{problem}, or pass --skip-bad") from None
    with plain_warnings(), writing_hits(out) as write:
        for first, block in x.blocks():
            write(first, *searcher.search(block, k, **options))
    if out is not None:
        echo(f"{out}: the best {k} keys of {x.n:,} {'query' if x.n == 1 else 'queries'}")


@cli.command()
@click.argument("bundle", type=path)
@click.argument("queries")
@click.option("--sample", default=500, help="Queries to search for exactly, at most, drawn at random.")
@click.option("--recall", type=float, help="The recall@10 asked for.  [default: what BUNDLE was made for]")
@click.option("--seed", default=0)
@click.option("--threads", type=int, help="Limit on threads.")
@click.option("--mmap", is_flag=True, help="Leave the keys on disk.")
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
@click.option("--skip-bad", is_flag=True, help="Leave out queries that are not finite, instead of an error.")
@click.option("--adopt", is_flag=True, help="Save BUNDLE with what these queries need for the recall.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON, for a monitor.")
def audit(
    bundle: Path,
    queries: str,
    mmap: bool,
    trusted: tuple[Path, ...],
    adopt: bool,
    as_json: bool,
    skip_bad: bool,
    **options: Any,
) -> None:
    """Say what recall BUNDLE, or a directory of shards, has on QUERIES of now.

    A sample of them is searched for exactly. Ends with 3 if the recall is missed for sure and not adopted, so
    that a monitor notices; an error ends with 1.
    """
    if adopt and is_sharded(bundle):
        raise amips.BundleError(
            f"--adopt: {bundle} is in shards, which serve as they were made; leave it out"
        )
    index: Any = amips.load(bundle, mmap=mmap, trusted=list(trusted) or None)
    result = index.audit(queries, on_bad="skip" if skip_bad else "error", **options)
    echo(json.dumps(result.to_json()) if as_json else str(result))
    if adopt:
        index.adopt(result)
        if not as_json:
            echo(f"\n{bundle}: serves recall@10 {result.target:g} as these queries need it")
    elif result.verdict == "missed":
        sys.exit(MISSED)


@cli.command()
@click.argument("bundle", type=path)
@click.argument("question")
@click.option("-k", default=5, help="Hits.")
@click.option("--recall", type=float, help="The recall@10 to serve.  [default: what BUNDLE was made for]")
@click.option("--probes", type=int, help="Cells to scan, instead.")
@click.option("--best-effort", is_flag=True, help="The highest recall there is, where --recall is not.")
@click.option("--encoder", help="What encoded the texts: a model's name or directory.")
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
@click.option("--compare", is_flag=True, help="Also print how many probes each router needs.")
def ask(
    bundle: Path,
    question: str,
    k: int,
    compare: bool,
    encoder: str | None,
    trusted: tuple[Path, ...],
    **effort: Any,
) -> None:
    """Search BUNDLE for a QUESTION in words.

    The bundle must have been built with --texts. The encoder is the published model that it names, if that is
    on this machine; a model is downloaded, or opened in a directory, only if you name it with --encoder.
    """
    from amips.text import Asker

    asker = Asker(bundle, encoder=encoder, trusted=list(trusted) or None)
    with plain_warnings():
        answer = asker.ask(question, k, **effort)
    for place, hit in enumerate(answer.hits, 1):
        body = " ".join(hit.text.text.split())
        echo(f"{place}. {hit.score:.3f}  {one_line(hit.text.title or hit.text.id)}")
        echo(f"   {body[:200]}{'...' if len(body) > 200 else ''}")
    where = "keys visited" if isinstance(plain_index(asker.index.snapshot), GraphSearcher) else "probes"
    echo(f"\n{answer.scanned:,} of {answer.n:,} keys scanned, {answer.probes} {where}")
    if compare:
        efforts = asker.compare(question, k)
        rows = [[e.router, f"{e.probes}", f"{e.scanned:,}", f"{e.scanned / answer.n:.2%}"] for e in efforts]
        echo(f"\nuntil the true {k} best keys of this question are among those scanned:")
        echo(text_table(["routed by", "probes", "keys scanned", "of all keys"], rows))
