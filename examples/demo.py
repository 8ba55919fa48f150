"""From text to learned search, on a corpus that every machine has: the docstrings of its Python packages.

Collects them, makes queries out of them, encodes both, finds exact targets, trains routers, compares with
tuned FAISS on held-out queries, and answers questions. What is already there is not done again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

import amips
from amips.bench import (
    EXACT,
    SUMMARY,
    Summary,
    System,
    bench,
    graph_systems,
    index_of,
    load_summary,
    own_systems,
    sweep,
    write_page,
)
from amips.builder import Builder
from amips.files import begin_output, write_atomically
from amips.search import save
from amips.tables import text_table
from amips.task import HELD_OUT
from amips.text import Asker, Embedded, attach, collect, embed, make_queries, read_texts

QUESTIONS = (
    "how do I read a csv file lazily",
    "run a function in another process and wait for the result",
    "compute the eigenvalues of a symmetric matrix",
)
SWEEP = (0.5, 2, 5, 10)  # cells of FAISS IVF, in units of sqrt(n); one less than the bench has by default
OWN_SWEEP = (4, 8)  # ... and of amips's own
BATCH, SINGLES = 256, 16  # queries timed together, and one at a time: fewer than the bench takes by default
NAMES = {"centroid": "FAISS IVF", "amips": "amips, float32 keys", "amips graph, lean": "amips graph"}

Step = Callable[[str], None]


def split_by_passage(queries: Path, embedded: Embedded) -> NDArray[np.str_]:
    """All queries of a passage go to one split: two sentences of one docstring are close relatives."""
    source = {text.id: text.id.rpartition("#")[0] for text in read_texts(queries)}
    assert embedded.query_texts is not None
    passages = np.array([source[name] for name in embedded.query_texts.ids()])
    named, of = np.unique(passages, return_inverse=True)
    size = min(HELD_OUT, len(passages) // 8)
    order = np.random.default_rng(0).permutation(len(named))
    before = np.cumsum(np.bincount(of, minlength=len(named))[order])  # queries of the passages up to this one
    part = np.full(len(named), "train", "<U5")
    part[order[before <= size]] = "test"
    part[order[(before > size) & (before <= 2 * size)]] = "val"
    return part[of]


def make(o: argparse.Namespace, step: Step, show: bool) -> Summary:
    """Everything up to the bundle; each step leaves alone what it finds finished."""
    out: Path = o.out
    corpus, passages, queries = (out / f"{name}.jsonl" for name in ("corpus", "passages", "queries"))
    if not corpus.exists():
        step("collecting the docstrings of the installed packages")

        def write(file: BinaryIO) -> None:
            for text in collect(most=o.texts):
                record = {"_id": text.id, "title": text.title, "text": text.text}
                file.write(f"{json.dumps(record)}\n".encode())

        write_atomically(corpus, write)
    if not (queries.exists() and passages.exists()):
        step("making queries: sentences, most of them taken out of their docstring")
        make_queries(corpus, out=queries, corpus_out=passages, per_text=4)
    step(f"encoding with {o.encoder}")
    vectors = out / "vectors"
    embedded = embed(passages, queries, encoder=o.encoder, out=vectors, progress=show, skip_empty=True)
    split = split_by_passage(queries, embedded)
    n = len(embedded.key_texts)
    step(f"finding the exact top keys of {len(split):,} queries among {n:,} docstrings")
    assert embedded.queries is not None
    task = amips.label(embedded.keys, embedded.queries, split=split, out=out / "task", progress=show)
    step("learning cells and routers; comparing with FAISS on held-out queries")
    systems = [System(amips.Design.plain(count)) for count in sweep(n, SWEEP)]
    builder = Builder(task)
    systems += [*own_systems(builder, OWN_SWEEP), *graph_systems(builder)]
    systems += [System(backend=EXACT), System(backend="hnsw")]
    results = out / "results"
    summary = bench(
        task,
        out=results,
        systems=systems,
        minutes=o.minutes,
        rounds=o.rounds,
        batch=BATCH,
        singles=SINGLES,
        all_threads=False,
        progress=show,
    )
    write_page(results, out / "report.html")
    step("building the bundle: the design that was best on val")
    index = index_of(task, results, System.from_json(summary.values["best"]))
    save(replace(index.snapshot, labels=np.array(embedded.key_texts.ids())), out / "bundle")
    attach(out / "bundle", embedded)
    return summary


def costs(summary: Summary) -> str:
    """What a recall costs: a line for each way to search."""
    rows = []
    for cost in summary.values["costs"]:
        if cost["metric"] != "recall@10":
            continue
        name = cost["family"]
        fractions = ["-" if cost[a] is None else f"{cost[a]:.1%}" for a in ("scanned", "flops")]
        times = ["-" if cost[a] is None else f"{cost[a] * 1e6:,.0f}" for a in ("single/1", "batch/1")]
        rows.append([f"{cost['recall']:.2f}", NAMES.get(name, name), *fractions, *times])
    head = ["recall@10", "search", "keys scanned", "FLOPs", "us a query", f"in batches of {BATCH}"]
    return text_table(head, rows)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--texts", type=int, default=40_000, help="At most so many docstrings.")
    parser.add_argument("--encoder", default="wordllama")
    parser.add_argument("--minutes", type=float, default=0.15, help="Training time of each router.")
    parser.add_argument("--rounds", type=int, default=2, help="How often each time is taken.")
    o = parser.parse_args()
    out, started = o.out, time.perf_counter()

    def step(text: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {text}", flush=True)

    settings = ("texts", "encoder", "minutes", "rounds")
    plan = {name: getattr(o, name) for name in settings}
    begin_output(out, plan, amips.AmipsError, what="a demo", mark="demo.json")
    results, bundle = out / "results", out / "bundle"
    finished = (results / SUMMARY, bundle / "text.json", out / "report.html")
    if all(path.exists() for path in finished):
        step(f"everything is in {out} already")
        summary = load_summary(results)
    else:
        summary = make(o, step, True)
    print("\nWhat a search costs, on queries that nothing was trained on, on one thread; FLOPs as a share of")
    print(f"those of scoring every key:\n\n{costs(summary)}\n")
    print("\n".join(summary.verdict))
    asker = Asker(bundle)
    for question in QUESTIONS:
        answer = asker.ask(question, k=3)
        print(f"\n{question}?")
        for hit in answer.hits:
            first = next(iter(hit.text.text.strip().splitlines()), "")
            print(f"  {hit.score:.3f}  {hit.text.title}: {first[:80]}")
        print(f"  ({answer.scanned:,} of {answer.n:,} keys scanned)")
    print()
    step(f'done: open {out / "report.html"}; ask more with: amips ask {bundle} "your question"')


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, amips.TrainingInterrupted):
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(130)
    except (amips.AmipsError, OSError) as problem:
        sys.exit(f"error: {problem}")
