"""info: what a directory holds."""

import json
from pathlib import Path
from typing import Any

import click

import amips
from amips import native
from amips.arguments import check_recall, check_whole
from amips.cli.options import TRUSTED_HELP, cli, echo, path, points_table, print_summary
from amips.files import manifest_kinds
from amips.nets import DESCRIPTION, load_model
from amips.search import (
    GraphSearcher,
    MemorySearcher,
    Point,
    Searcher,
    Snapshot,
    growth,
    live_keys,
    plain_index,
    read_bundle,
)
from amips.signing import Trusted
from amips.task import SPLITS, TaskStore, load_task
from amips.terminal import one_line

MANY_ADDED = 0.1  # of the keys that a bundle was written with: loading takes notice of them


@cli.command()
@click.argument("path", type=path)
@click.option(
    "--design", is_flag=True, help="Print the design of a bundle as JSON, for amips build --design."
)
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
def info(path: Path, design: bool, trusted: tuple[Path, ...]) -> None:
    """Print what PATH holds.

    PATH is a bundle, a directory of shards, a task, a training run or the results of a bench. Of a bundle:
    its design, the recall that it serves, the report of amips fit, and what was measured.
    """
    if not path.exists():
        raise amips.AmipsError(f"{path} does not exist")
    kinds = manifest_kinds(path) if path.is_dir() else set()
    if "bundle" in kinds:
        _bundle(path, design, list(trusted) or None)
    elif trusted:
        raise amips.AmipsError(f"{path} is not a bundle: it is not signed")
    elif design:
        raise amips.AmipsError(f"{path} is not a bundle: it has no design")
    elif "shards" in kinds:
        _shards(path)
    elif "task" in kinds:
        _task(path)
    elif (path / DESCRIPTION).exists():
        _run(path)
    elif kinds & {"summary", "results"}:
        from amips.bench import load_summary

        print_summary(load_summary(path), path)
    elif "run" in kinds:
        echo(f"{path}: an unfinished run; continue it with amips train ... --resume")
    elif TaskStore(path).unfinished:
        echo(f"{path}: an unfinished task; continue it with the same amips label")
    else:
        raise amips.AmipsError(f"{path} is not a bundle, a task, a run or results of amips")


def _bundle(path: Path, design: bool, trusted: Trusted | None) -> None:
    manifest, _, _ = read_bundle(path, verify=False, trusted=trusted)
    if "design" not in manifest:  # beside a FAISS index, which stays where it is
        if design:
            raise amips.AmipsError(f"{path} routes a FAISS index of your own: it has no design")
        return _wrapped(path, manifest)
    index = amips.load(path, verify=False, mmap=True, trusted=trusted).snapshot
    if design:
        if index.design is None:
            raise amips.AmipsError(f"{path} was put together by hand: it has no design")
        echo(json.dumps(index.design.to_json(), indent=1))
        return None
    words = _words(plain_index(index)) if index.design is None else index.design.describe()
    removed = index.n - live_keys(index)
    count = f"{index.n - removed:,}" + (f" ({removed:,} more were removed)" if removed else "")
    facts = [("keys", count), ("dimension", f"{index.d}"), ("design", words)]
    if index.target_recall is not None:
        facts.append(("serves recall@10", f"{index.target_recall:g}"))
    if index.spilled:
        facts.append(("keys in a second cell", f"{index.spilled:,}"))
    plain = plain_index(index)
    if isinstance(plain, Searcher):
        facts.append(("routing FLOPs", f"{plain.router.flops:,}"))
    else:
        facts.append(("walked by", "compiled code" if native.compiled is not None else "numpy"))
    if isinstance(index, MemorySearcher):
        memory = index.memory
        words = f"{len(memory.logged):,} logged queries with {memory.depth} top keys each"
        facts.append(("memory", f"{words}; recognised from a cosine of {memory.gate:.3f} on"))
    if index.attributes is not None:
        facts.append(("attributes", ", ".join(f"{name} {kind}" for name, kind in index.attributes.columns)))
    facts += _origin(index, check_whole("n", manifest.get("n"), 1))
    if index.fingerprint and not removed:
        facts.append(("keys SHA-256", index.fingerprint[:16]))
    _print_facts("bundle", path, facts)
    if index.report is not None:
        echo(f"\n{index.report}")
    _print_points(index.points, index.n, index.d)
    return None


def _origin(index: Snapshot, written: int) -> list[tuple[str, str]]:
    """What it was fitted on, what was done to it since it was written with so many keys, and what to do."""
    origin, facts = index.origin, list[tuple[str, str]]()
    if (log := origin.log) is not None:
        size = f"{log.bytes / 1e6:.1f} MB"
        facts.append(
            ("sample of the log", f"{len(log.train):,} queries and {len(log.val):,} held out, {size}")
        )
    facts += [(event.what, f"{event.when} (round {event.round})") for event in origin.events]
    if (advice := growth(index)) is not None:
        facts.append(("advice", advice))
    if (added := index.n - written) >= MANY_ADDED * written:
        again = "placed in its cells" if isinstance(plain_index(index), Searcher) else "linked into its graph"
        facts.append(
            ("advice", f"{added:,} keys were added, and are {again} at each load: run amips compact BUNDLE")
        )
    return facts


def _words(index: Searcher | GraphSearcher) -> str:
    if not isinstance(index, Searcher):
        return f"a graph of {index.c:,} entries; {index.store.storage} storage"
    return f"{index.c:,} cells; routed by {index.router.name}; {index.store.storage} storage"


def _wrapped(path: Path, manifest: dict[str, Any]) -> None:
    try:
        n, d = (check_whole(name, manifest.get(name), 1) for name in ("n", "d"))
        points = [Point.from_json(point) for point in manifest["points"]]
        target = manifest.get("target_recall")
        target = None if target is None else check_recall(target, "target_recall")
    except (amips.AmipsError, KeyError, TypeError, ValueError) as problem:
        raise amips.BundleError(f"{path} is damaged: {problem}") from None
    facts = [("keys", f"{n:,}"), ("FAISS index", str(manifest.get("file") or "not known"))]
    if target is not None:
        facts.append(("serves recall@10", f"{target:g}"))
    _print_facts("wrapped FAISS index", path, facts)
    _print_points(points, n, d)


def _print_points(points: list[Point], n: int, d: int) -> None:
    if points:
        echo("\non held-out queries, keys and FLOPs as shares of a full scan:\n")
        echo(points_table(points, n, d))


def _shards(path: Path) -> None:
    index = amips.load_shards(path, verify=False, mmap=True, partial=True)
    sizes, stored = index.sizes, index.sizes.sum() / index.n
    facts = [("keys", f"{index.n:,}"), ("dimension", f"{index.d}")]
    facts += [("shards", f"{len(sizes)}, of {sizes.min():,} to {sizes.max():,} keys")]
    facts += [("keys stored", f"{stored:.2f} times, copies among them"), ("router", index.router.name)]
    if index.target_recall is not None:
        facts.append(("serves recall@10", f"{index.target_recall:g}"))
    facts += [("missing", f"shard {shard}: {reason}") for shard, reason in index.absent.items()]
    _print_facts("shards of", path, facts)
    _print_points(list(index.points), index.n, index.d)


def _task(path: Path) -> None:
    task = load_task(path)
    aware = {None: "brought along", 0.0: "plain k-means"}
    cells = aware.get(task.query_aware, f"query-aware, strength {task.query_aware}")
    facts = [("keys", f"{task.n:,}"), ("dimension", f"{task.d}"), ("cells", f"{task.c:,} ({cells})")]
    facts += [("imbalance", f"{task.cells.imbalance:.2f}")]
    facts += [("unit norm", "yes" if task.facts["unit_norm"] else "no")]
    facts += [(f"{split} queries", f"{len(getattr(task, split)):,}") for split in SPLITS]
    facts += [("split by", "rows: held-out ones have relatives in train")] if task.shares_sources else []
    facts += [("split by", "time: held-out rows are the last of the log")] if task.by_time else []
    facts += [("top keys a query", f"{task.train.top_ids.shape[1]}")]
    facts += [("targets of each cell", "yes" if task.has_cell_targets else "no")]
    _print_facts("task", path, [*facts, ("keys SHA-256", task.fingerprint[:16])])


def _run(path: Path) -> None:
    model = load_model(path)
    facts = [(name, str(value)) for name, value in model.architecture.to_json().items()]
    facts += [("parameters", f"{model.architecture.parameters:,}")]
    facts += [(name, f"{model.about[name]:,}") for name in ("samples", "seconds") if name in model.about]
    facts += [(f"val {name}", f"{value:.4f}") for name, value in model.about.get("val", {}).items()]
    _print_facts("run", path, facts)


def _print_facts(kind: str, path: Path, facts: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in [*facts, (kind, "")])
    for name, value in [(kind, str(path)), *facts]:
        echo(f"{one_line(name.ljust(width))}  {one_line(value)}")
