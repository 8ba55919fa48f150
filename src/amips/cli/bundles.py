"""build, search, ask, info: bundles."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

import amips
from amips.cli.options import cli, path, plain_warnings, points_table, read_ids
from amips.tables import text_table


@cli.command()
@click.argument("task", type=path)
@click.argument("run", type=path, required=False)
@click.option("--out", required=True, type=path, help="The bundle to make or replace.")
@click.option("--storage", type=click.Choice(["flat", "sq8", "pq", "lean"]), default="flat")
@click.option("--lean", type=int, help="Dimensions of lean storage.  [default: about 0.4 d]")
@click.option("--spill", default=0.0, help="Share of the keys to put into a second cell, too.")
@click.option("--ids", type=path, help="What to return for each key: .npy, or text with one a line.")
@click.option("--texts", type=path, help="What amips embed made: the bundle can then be asked in words.")
def build(
    task: Path, run: Path | None, out: Path, ids: Path | None, texts: Path | None, **storage: Any
) -> None:
    """Make a searchable bundle of TASK's keys, routed by the model of RUN (without one: by centroid)."""
    names = None if ids is None else read_ids(ids)
    if texts is not None:
        from amips.text import Embedded, attach

        if Embedded(texts).fingerprint != load_task(task).fingerprint:  # before the work, not after it
            raise amips.TaskError(f"{task} was not made of the texts in {texts}: its keys are others")
    made = amips.build(task, run, out=out, ids=names, **storage)
    if texts is not None:
        attach(out, texts)
    twice = f" ({made.spilled:,} keys in two)" if made.spilled else ""
    click.echo(f"{out}: {made.n:,} keys, {made.c:,} cells{twice}, routed by {made.router.name}")
    click.echo(points_table(made.points))
    if run is not None:
        middle = min((p for p in made.points if not p.min_mass), key=lambda p: abs(p.recall10 - 0.9))
        (plain,) = amips.search.measure(made.with_model(None), load_task(task).val, [middle.probes])
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
@click.argument("bundle", type=path)
@click.argument("queries")
@click.option("-k", default=10, help="Results for each query.")
@click.option("--probes", type=int, help="Cells to scan.  [default: 8]")
@click.option("--recall", type=float, help="The cheapest way that found this share of the true top 10.")
@click.option("--share", type=float, help="Scan cells expected to hold this share of the top keys.")
@click.option("--threads", type=int, help="Limit on threads.")
@click.option("--mmap", is_flag=True, help="Leave the keys on disk.")
@click.option(
    "--skip-bad", is_flag=True, help="No results for queries that are not finite, instead of an error."
)
@click.option("--out", type=path, help="An .npz with scores and ids; JSON lines to stdout without it.")
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
    with plain_warnings():
        parts = [index.search(block, **options) for _, block in found.blocks()]
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
@click.argument("bundle", type=path)
@click.argument("question")
@click.option("-k", default=5, help="Hits.")
@click.option("--probes", type=int, help="Cells to scan.")
@click.option("--recall", type=float, help="Scan as many cells as gave this recall.  [default: 0.95]")
@click.option("--compare", is_flag=True, help="Also say how many probes each way of routing needs.")
def ask(bundle: Path, question: str, k: int, compare: bool, **budget: Any) -> None:
    """Search BUNDLE, which was built with --texts, for a QUESTION in words."""
    from amips.text import Asker

    asker = Asker(bundle)
    with plain_warnings():
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
        click.echo(text_table(["routed by", "probes", "keys scanned", "share"], rows))


@cli.command()
@click.argument("path", type=path)
def info(path: Path) -> None:
    """Say what is in PATH: a task, a run or a bundle."""
    if not path.exists():
        raise amips.AmipsError(f"{path} does not exist")
    if (path / "task.json").exists():
        task = load_task(path)
        facts = [["keys", f"{task.n:,}"], ["dimension", f"{task.d}"], ["cells", f"{task.c:,}"]]
        facts += [["imbalance", f"{task.cells.imbalance:.2f}"]]
        facts += [["unit norm", "yes" if task.facts["unit_norm"] else "no"]]
        facts += [
            [f"{split} queries", f"{len(getattr(task, split)):,}"] for split in ("train", "val", "test")
        ]
        facts += [
            ["top keys a query", f"{task.train.top_ids.shape[1]}"],
            ["keys SHA-256", task.fingerprint[:16]],
        ]
        click.echo(text_table(["task", str(path)], facts))
    elif (path / "manifest.json").exists():
        index = amips.load(path, verify=False, mmap=True)
        facts = [["keys", f"{index.n:,}"], ["dimension", f"{index.d}"], ["cells", f"{index.c:,}"]]
        facts += [["storage", index.store.storage], ["keys in a second cell", f"{index.spilled:,}"]]
        facts += [["routed by", index.router.name]]
        facts += [["routing FLOPs", f"{index.router.flops:,}"], ["keys SHA-256", index.fingerprint[:16]]]
        click.echo(text_table(["bundle", str(path)], facts))
        click.echo("\n" + points_table(index.points))
    elif (path / "model.json").exists():
        model = amips.load_model(path)
        facts = [[name, str(value)] for name, value in model.architecture.to_json().items()]
        facts += [["parameters", f"{model.architecture.parameters:,}"]]
        facts += [[name, f"{model.about[name]:,}"] for name in ("samples", "seconds") if name in model.about]
        facts += [[f"val {name}", f"{value:.4f}"] for name, value in model.about.get("val", {}).items()]
        click.echo(text_table(["run", str(path)], facts))
    elif (path / "config.json").exists():
        click.echo(f"{path}: an unfinished run; continue it with amips train ... --resume")
    else:
        raise amips.AmipsError(f"{path} is not a finished task, a run or a bundle")
