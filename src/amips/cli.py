"""The `amips` command: one command for each verb of the Python API."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np

import amips
from amips.table import table

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


_directory = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(amips.__version__, prog_name="amips")
def cli() -> None:
    """Learned maximum-inner-product search: learn from your queries, scan fewer keys."""


@cli.command()
@click.argument("corpus")
@click.option("--queries", help="Texts to search with, in a file like CORPUS.")
@click.option("--out", required=True, type=_directory, help="The directory to make.")
@click.option("--encoder", default="all-MiniLM-L6-v2", help="A sentence-transformers model, or wordllama.")
@click.option("--batch", default=64, help="Texts encoded at a time.")
@click.option("--skip-empty", is_flag=True, help="Leave empty texts out, instead of an error.")
def embed(corpus: str, **options: Any) -> None:
    """Encode the texts of CORPUS, and of --queries, as vectors for label, fit and search.

    Files of texts: .jsonl (as in BEIR), .tsv, or one text a line; each may be compressed (.gz), and - is
    standard input. Duplicates are left out. An interrupted run continues when the same command is given
    again.
    """
    from amips.text.embedding import embed as run

    made = run(corpus, progress=True, **options)
    click.echo(f"{made.path}: encoded by {made.encoder}, d = {made.d}")
    rows = []
    for side, texts in (("keys", made.key_texts), ("queries", made.query_texts)):
        if texts is not None:
            left_out = made.manifest[f"left_out_of_{side}"]
            rows.append([side, *(f"{n:,}" for n in (len(texts), left_out["duplicates"], left_out["empty"]))])
    click.echo(table(["texts", "encoded", "duplicates", "empty"], rows))


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=_directory, help="The task directory to make.")
@click.option("--cells", default=1, help="Cells to partition the keys into; 1 means none.")
@click.option("--plain", is_flag=True, help="Plain k-means instead of spherical.")
@click.option("--runs", default=1, help="k-means runs; the most even one is kept.")
@click.option("--copies", default=1, help="Noisy copies of each training query, beside the original.")
@click.option("--noise", default=0.02, help="Standard deviation of the noise, relative to the norm.")
@click.option("--val", default=1000, help="Distinct queries held out for choosing.")
@click.option("--test", default=1000, help="Distinct queries held out for reporting.")
@click.option("--split", type=_directory, help="Your own split: an .npy of train, val, test, one a query.")
@click.option("-k", default=100, help="Top keys to store for each query.")
@click.option("--no-cell-targets", is_flag=True, help="Top keys only: enough for linear routers.")
@click.option("--seed", default=0)
@click.option("--keep-zero", is_flag=True, help="Allow keys that are all zero.")
@click.option("--memory", type=size, default="1G", help="Bound on the working set.")
def label(
    out: Path,
    keys: str,
    queries: str,
    plain: bool,
    keep_zero: bool,
    split: Path | None,
    no_cell_targets: bool,
    **options: Any,
) -> None:
    """Make a task: split QUERIES, add noise, and find the exact top KEYS of every one.

    KEYS and QUERIES are vector files: .npy, .fvecs, .fbin, .hdf5, .parquet, ... An interrupted run
    continues when the same command is given again.
    """
    options |= {"spherical": not plain, "zero": "keep" if keep_zero else "error"}
    options |= {"split": None if split is None else read_ids(split), "cell_targets": not no_cell_targets}
    task = amips.label(keys, queries, out=out, progress=True, **options)
    rows = [[split, f"{len(getattr(task, split)):,}"] for split in ("train", "val", "test")]
    click.echo(f"{task.path}: {task.n:,} keys, d = {task.d}, {task.c:,} cells")
    click.echo(f"imbalance {task.cells.imbalance:.2f}, duplicates {task.manifest['duplicate_queries']:,}")
    click.echo(table(["queries", "rows"], rows))


@cli.command()
@click.argument("task", type=_directory)
@click.option("--out", required=True, type=_directory, help="The run directory to make.")
@click.option("--net", type=click.Choice(["support", "key", "linear"]), default="support")
@click.option("--size", type=number_or_word, help="XS S M L XL XXL, or a share of n d.  [default: XS]")
@click.option("--depth", type=int, help="Hidden layers.  [default: 4]")
@click.option(
    "--inject", type=number_or_word, help="Later layers that see the input: a count, all, 'every R'."
)
@click.option("--residual", is_flag=True, default=None, help="Residual hidden layers.")
@click.option("--homogeneous", type=click.Choice(["wrapper", "relu"]), help="SupportNet only.")
@click.option("--nonnegative", type=click.Choice(["penalty", "clip", "softplus"]), help="SupportNet only.")
@click.option("--recipe", type=click.Choice(["default", "paper"]), default="default")
@click.option("--samples", type=int, help="Budget in samples.")
@click.option("--minutes", type=float, help="Budget in minutes.  [default: 3]")
@click.option("--batch", type=int, help="Rows in a batch, for each process.")
@click.option("--evaluations", default=10, help="How often to evaluate and save.")
@click.option("--seed", default=0)
@click.option("--device", help="cpu, cuda, ...")
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
def train(task: Path, out: Path, net: str, **options: Any) -> None:
    """Train a SupportNet, a KeyNet or a linear router on TASK."""
    names = ("size", "depth", "inject", "residual", "homogeneous", "nonnegative")
    shape = {name: value for name in names if (value := options.pop(name)) is not None}
    allowed = {"support": set(names), "key": set(names[:4]), "linear": set()}[net]
    if wrong := set(shape) - allowed:
        raise click.UsageError(f"--{sorted(wrong)[0]} is not for --net {net}")
    kinds = {"support": amips.SupportNet, "key": amips.KeyNet, "linear": amips.Linear}
    model = amips.train(task, kinds[net](**shape), out=out, progress=True, **options)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks
    click.echo(
        f"{out}: {kinds[net].__name__}, {model.architecture.parameters:,} parameters, "
        f"{model.about['samples']:,} samples in {model.about['seconds']:.0f} s"
    )
    rows = [[name, f"{value:.4f}"] for name, value in model.about["val"].items()]
    click.echo(table(["on val", ""], rows))


@cli.command()
@click.argument("task", type=_directory)
@click.argument("run", type=_directory, required=False)
@click.option("--out", required=True, type=_directory, help="The bundle to make or replace.")
@click.option("--storage", type=click.Choice(["flat", "sq8", "pq"]), default="flat")
@click.option("--ids", type=_directory, help="What to return for each key: .npy, or text with one a line.")
@click.option(
    "--texts", type=_directory, help="What amips embed made: the bundle can then be asked in words."
)
def build(
    task: Path, run: Path | None, out: Path, storage: Any, ids: Path | None, texts: Path | None
) -> None:
    """Make a searchable bundle of TASK's keys, routed by the model of RUN (without one: by centroid)."""
    names = None if ids is None else read_ids(ids)
    if texts is not None:
        from amips.text import Embedded, attach

        if Embedded(texts).fingerprint != amips.Task(task).fingerprint:  # before the work, not after it
            raise amips.TaskError(f"{task} was not made of the texts in {texts}: its keys are others")
    made = amips.build(task, run, out=out, storage=storage, ids=names)
    if texts is not None:
        attach(out, texts)
    click.echo(f"{out}: {made.n:,} keys, {made.c:,} cells, routed by {made.router.name}")
    click.echo(points_table(made.points))
    if run is not None:
        middle = min(made.points, key=lambda p: abs(p.recall10 - 0.9))
        (plain,) = amips.search.measure(made.with_model(None), amips.Task(task).val, [middle.probes])
        click.echo(
            f"with {middle.probes} probes, recall@10 on held-out queries is {middle.recall10:.3f}; "
            f"routed by centroid it is {plain.recall10:.3f}"
        )
        if plain.recall10 >= middle.recall10:
            click.echo(
                "warning: this model routes no better than centroids do; train it longer, try Linear, "
                "or build without it",
                err=True,
            )


@cli.command()
@click.argument("bundle", type=_directory)
@click.argument("queries")
@click.option("-k", default=10, help="Results for each query.")
@click.option("--probes", type=int, help="Cells to scan.")
@click.option("--recall", type=float, help="Scan as many cells as gave this recall on held-out queries.")
@click.option("--threads", type=int, help="Limit on threads.")
@click.option("--mmap", is_flag=True, help="Leave the keys on disk.")
@click.option(
    "--skip-bad", is_flag=True, help="No results for queries that are not finite, instead of an error."
)
@click.option("--out", type=_directory, help="An .npz with scores and ids; JSON lines to stdout without it.")
def search(bundle: Path, queries: str, out: Path | None, mmap: bool, skip_bad: bool, **options: Any) -> None:
    """Search BUNDLE for the best keys of every vector in QUERIES."""
    index = amips.load(bundle, mmap=mmap)
    found = amips.open_vectors(queries, "queries")
    if found.d != index.d:
        raise amips.VectorError(f"{found.name} has dimension {found.d}, {bundle} needs {index.d}")
    if skip_bad:
        options["on_bad"] = "skip"
    else:
        try:  # names the row of the file, where a block knows its own
            amips.vectors.inspect(found, zero="keep")
        except amips.VectorError as problem:
            raise amips.VectorError(f"{problem}, or pass --skip-bad") from None
    if out is not None and not out.parent.is_dir():
        raise amips.AmipsError(f"{out.parent} is not a directory: {out} cannot be written")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        parts = [index.search(block, **options) for _, block in found.blocks()]
    for text in dict.fromkeys(str(warning.message) for warning in said):
        click.echo(f"warning: {text}", err=True)
    scores, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
    if out is not None:
        with out.open("wb") as f:
            np.savez(f, scores=scores, ids=ids)
        click.echo(f"{out}: {len(ids):,} x {ids.shape[1]} scores and ids")
        return
    for row, (values, names) in enumerate(zip(scores.tolist(), ids.tolist(), strict=True)):
        hits = [
            {"id": name, "score": value}
            for name, value in zip(names, values, strict=True)
            if name not in (-1, "")
        ]
        click.echo(json.dumps({"query": row, "hits": hits}))


@cli.command()
@click.argument("bundle", type=_directory)
@click.argument("question")
@click.option("-k", default=5, help="Hits.")
@click.option("--probes", type=int, help="Cells to scan.")
@click.option("--recall", type=float, help="Scan as many cells as gave this recall.  [default: 0.95]")
@click.option("--compare", is_flag=True, help="Also say how many probes each way of routing needs.")
def ask(bundle: Path, question: str, k: int, compare: bool, **budget: Any) -> None:
    """Search BUNDLE, which was built with --texts, for a QUESTION in words."""
    from amips.text import Asker

    asker = Asker(bundle)
    answer = asker.ask(question, k, **budget)
    for place, hit in enumerate(answer.hits, 1):
        body = " ".join(hit.text.text.split())
        click.echo(f"{place}. {hit.score:.3f}  {hit.text.title or hit.text.id}")
        click.echo(f"   {body[:200]}{'...' if len(body) > 200 else ''}")
    click.echo(f"\n{answer.scanned:,} of {answer.n:,} keys scanned, {answer.probes} probes")
    if compare:
        efforts = asker.compare(question, k)
        rows = [[e.router, f"{e.probes}", f"{e.scanned:,}", f"{e.scanned / answer.n:.2%}"] for e in efforts]
        click.echo(f"\nuntil the true {k} best keys of this question are found:")
        click.echo(table(["routed by", "probes", "keys scanned", "share"], rows))


@cli.command()
@click.argument("path", type=_directory)
def info(path: Path) -> None:
    """Say what is in PATH: a task, a run or a bundle."""
    if not path.exists():
        raise amips.AmipsError(f"{path} does not exist")
    if (path / "task.json").exists():
        task = amips.Task(path)
        facts = [["keys", f"{task.n:,}"], ["dimension", f"{task.d}"], ["cells", f"{task.c:,}"]]
        facts += [["imbalance", f"{task.cells.imbalance:.2f}"]]
        facts += [["unit norm", "yes" if task.manifest["unit_norm"] else "no"]]
        facts += [
            [f"{split} queries", f"{len(getattr(task, split)):,}"] for split in ("train", "val", "test")
        ]
        facts += [
            ["top keys a query", f"{task.train.top_ids.shape[1]}"],
            ["keys SHA-256", task.fingerprint[:16]],
        ]
        click.echo(table(["task", str(path)], facts))
    elif (path / "manifest.json").exists():
        index = amips.load(path, verify=False, mmap=True)
        facts = [["keys", f"{index.n:,}"], ["dimension", f"{index.d}"], ["cells", f"{index.c:,}"]]
        facts += [["storage", index.engine.storage], ["routed by", index.router.name]]
        facts += [["routing FLOPs", f"{index.router.flops:,}"], ["keys SHA-256", index.fingerprint[:16]]]
        click.echo(table(["bundle", str(path)], facts))
        click.echo("\n" + points_table(index.points))
    elif (path / "model.json").exists():
        model = amips.load_model(path)
        facts = [[name, str(value)] for name, value in model.architecture.to_json().items()]
        facts += [["parameters", f"{model.architecture.parameters:,}"]]
        facts += [[name, f"{model.about[name]:,}"] for name in ("samples", "seconds") if name in model.about]
        facts += [[f"val {name}", f"{value:.4f}"] for name, value in model.about.get("val", {}).items()]
        click.echo(table(["run", str(path)], facts))
    elif (path / "config.json").exists():
        click.echo(f"{path}: an unfinished run; continue it with amips train ... --resume")
    else:
        raise amips.AmipsError(f"{path} is not a finished task, a run or a bundle")


@cli.command()
@click.argument("keys")
@click.argument("queries")
@click.option("--out", required=True, type=_directory, help="The bundle to make or replace.")
@click.option("--minutes", default=5.0, help="How long it may take, roughly.")
@click.option("--cells", type=int, help="How many cells; about 3 sqrt(n) when not given.")
@click.option("--ids", type=_directory, help="What to return for each key: .npy, or text with one a line.")
@click.option("--seed", default=0)
def fit(keys: str, queries: str, ids: Path | None, **options: Any) -> None:
    """Label, train and build in one go, and say what was gained over centroid routing."""
    amips.fit(keys, queries, ids=None if ids is None else read_ids(ids), **options)


@cli.command()
@click.argument("task", type=_directory)
@click.option("--out", required=True, type=_directory, help="The results directory; what is there is kept.")
@click.option(
    "--models", "--model", type=_directory, multiple=True, help="A run to compare; may be repeated."
)
@click.option("--systems", type=_directory, help="A TOML file that names the systems to compare instead.")
@click.option("--minutes", default=0.5, help="Training time of each linear router.")
@click.option("--rounds", default=3, help="How often each time is taken.")
@click.option("--batch", default=1024, help="Queries in the large batch.")
@click.option("--singles", default=64, help="Queries that are timed one at a time.")
@click.option("--texts", type=_directory, help="What amips embed made: the ids that --qrels speaks of.")
@click.option("--qrels", type=_directory, help="Relevance judgements: also measure nDCG@10 and recall@100.")
@click.option("--seed", default=0)
def bench(
    task: Path, models: tuple[Path, ...], texts: Path | None, qrels: Path | None, **options: Any
) -> None:
    """Compare ways to search on the held-out queries of TASK, and say whether learning pays.

    By default: FAISS IVF with centroid routing and with a linear router over a sweep of cells, every given
    model, exact search and HNSW. An interrupted bench continues when the same command is given again.
    """
    from amips.bench import bench as run

    if (texts is None) != (qrels is None):
        raise click.UsageError("--qrels and --texts go together: judgements, and the ids of queries and keys")
    judgements = None if texts is None or qrels is None else read_judgements(task, texts, qrels)
    made = run(task, models=list(models), judgements=judgements, progress=True, **options)
    told(made, options["out"])


@cli.command()
@click.argument("results", type=_directory)
@click.option("--out", type=_directory, help="The page to write.  [default: RESULTS/report.html]")
@click.option("--figures", "pictures", type=_directory, help="Also write the charts here, as PNG and SVG.")
def report(results: Path, out: Path | None, pictures: Path | None) -> None:
    """Make one self-contained HTML page of the RESULTS of a bench or a study."""
    from amips.bench import load_summary
    from amips.bench.figures import figures
    from amips.bench.report import report as write

    if pictures is not None:
        if pictures.exists() and not pictures.is_dir():
            raise amips.AmipsError(f"{pictures} is a file; name a directory for the figures")
        pictures.mkdir(parents=True, exist_ok=True)
    click.echo(f"{write(results, out or results / 'report.html')}: open it in a browser")
    if pictures is not None:
        click.echo(f"{pictures}: {len(figures(load_summary(results), pictures))} figures")


@cli.command()
@click.argument("name")
@click.option("--data", required=True, type=_directory, help="A directory with keys and queries.")
@click.option("--out", required=True, type=_directory, help="Studies with the same one share their models.")
@click.option("--scale", type=click.Choice(["smoke", "small", "full"]), default="small")
@click.option("--seed", default=0)
@click.option("--also", multiple=True, type=_directory, help="encoders: data of another; as often as needed.")
@click.option("--encoder", "encoders", multiple=True, help="encoders: encode the data's texts, too.")
def study(
    name: str, data: Path, out: Path, also: tuple[Path, ...], encoders: tuple[str, ...], **options: Any
) -> None:
    """Run an experiment of the paper: routing, routing128, ivf, ood, timing, shift, leak, dynamics, tradeoff,
    losses, horizon, encoders or scaling.

    smoke takes seconds, small minutes on two cores, full has the paper's settings. An interrupted study
    continues when the same command is given again.
    """
    from amips.bench.studies import study as run

    others = [*also]
    if encoders and name != "encoders":
        raise amips.AmipsError("--encoder is for the study encoders")
    for encoder in encoders:
        from amips.text import embed

        keys, queries = (data / f"{side}.jsonl" for side in ("keys", "queries"))
        place = out / "work" / f"vectors-{Path(encoder).name}"
        others.append(embed(keys, queries, encoder=encoder, out=place, progress=True).path)
    told(run(name, data=data, out=out, also=others, progress=True, **options), out / name)


@cli.command()
@click.argument("name")
@click.option("--out", required=True, type=_directory, help="The directory to make, in BEIR's layout.")
@click.option("--source", type=_directory, help="Downloaded repositories, instead of the Hugging Face Hub.")
@click.option("--most", type=int, help="Only the first so many passages, and what concerns them.")
def data(name: str, out: Path, source: Path | None, most: int | None) -> None:
    """Fetch a data set: beir/fiqa, beir/quora, beir/nq, beir/hotpotqa or beir/bioasq.

    An interrupted fetch continues with the first missing file when the same command is given again.
    """
    from amips.text.data import get_data

    counts = get_data(name, out, source=source, most=most, progress=True)["counts"]
    click.echo(table([str(out), "records"], [[file, f"{count:,}"] for file, count in counts.items()]))


@cli.command()
@click.argument("corpus")
@click.option("--out", required=True, type=_directory, help="The queries to write, as JSON lines.")
@click.option("--corpus-out", type=_directory, help="The corpus to index: without the sentences removed.")
@click.option("--per-text", default=3, help="Sentences of each text, beside its title and heading.")
@click.option("--remove", default=0.9, help="Probability that a sentence is removed from its text.")
@click.option("--seed", default=0)
def queries(corpus: str, **options: Any) -> None:
    """Make queries out of CORPUS alone: sentences of its texts, each of which asks for its text.

    With --corpus-out, most of these sentences are taken out of the texts, so that a query is not found by
    its own words; then index that corpus. Without, nothing is removed.
    """
    from amips.text.pseudo import queries as run

    made = run(corpus, progress=True, **options)
    click.echo(
        f"{options['out']}: {made.queries:,} queries of {made.texts:,} texts, {made.duplicates:,} duplicates "
        "left out"
    )
    if options["corpus_out"] is not None:
        click.echo(f"{options['corpus_out']}: the corpus to index, {made.removed:,} queries removed from it")


def read_judgements(task: Path, texts: Path, qrels: Path) -> Any:
    """Judgements with the ids of the texts that a task was made of."""
    from amips.bench import Judgements
    from amips.bench.relevance import read_qrels
    from amips.text import Embedded

    embedded, found = Embedded(texts), amips.Task(task)
    if embedded.fingerprint != found.fingerprint:
        raise amips.TaskError(f"{task} was not made of the texts in {texts}: its keys are others")
    if embedded.query_texts is None:
        raise amips.AmipsError(f"{texts} holds no queries")
    return Judgements(read_qrels(qrels), embedded.query_texts.ids(), embedded.key_texts.ids())


def told(summary: Any, results: Path) -> None:
    """The verdict, the first table, and where the rest is."""
    click.echo("\n".join(summary.verdict))
    for shown in summary.tables[:1]:
        click.echo(f"\n{shown.title}\n\n{table(shown.head, shown.rows)}")
        if shown.note:
            click.echo(f"\n{shown.note}")
    click.echo(f"\n{results}: everything is there; see it with: amips report {results}")


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


def points_table(points: list[amips.Point]) -> str:
    """Operating points, for a person."""
    rows = [
        [f"{p.probes}", f"{p.recall1:.3f}", f"{p.recall10:.3f}", f"{p.scanned:.2%}", f"{p.flops / 1e6:.2f}"]
        for p in points
    ]
    return table(["probes", "recall@1", "recall@10", "keys scanned", "MFLOP"], rows)


def main() -> None:
    """Run the command; what goes wrong is one line."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo(
            "stopped; embed, label, fit, bench and study continue when the same command is given again",
            err=True,
        )
        sys.exit(130)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except amips.TrainingInterrupted as stop:
        click.echo(str(stop), err=True)
        sys.exit(130)
    except (amips.AmipsError, OSError, MemoryError) as problem:
        click.echo(f"error: {problem or type(problem).__name__}", err=True)
        sys.exit(1)
