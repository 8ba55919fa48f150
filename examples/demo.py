"""From text to learned search, on a corpus that every machine has: the docstrings of its Python packages.

Collects them, makes queries out of them, encodes both, finds exact targets, trains routers, compares with
tuned FAISS on held-out queries, and answers questions. What is already there is not done again.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import amips
from amips.bench import bench
from amips.bench.report import report
from amips.table import table
from amips.text import Asker, Embedded, attach, collect, embed, make_queries
from amips.text.lines import line, writing
from amips.text.texts import read_texts

QUESTIONS = (
    "how do I read a csv file lazily",
    "run a function in another process and wait for the result",
    "compute the eigenvalues of a symmetric matrix",
)
HELD = 1000  # queries for choosing, and as many for reporting


def split_by_passage(queries: Path, embedded: Embedded) -> NDArray[np.str_]:
    """All queries of a passage go to one split: two sentences of one docstring are close relatives."""
    source = {text.id: text.id.rpartition("#")[0] for text in read_texts(queries)}
    assert embedded.query_texts is not None
    passages = np.array([source[name] for name in embedded.query_texts.ids()])
    named, of = np.unique(passages, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(named))
    before = np.cumsum(np.bincount(of, minlength=len(named))[order])  # queries of the passages up to this one
    part = np.full(len(named), "train", "<U5")
    part[order[before <= HELD]] = "test"
    part[order[(before > HELD) & (before <= 2 * HELD)]] = "val"
    return part[of]


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--texts", type=int, default=40_000, help="At most so many docstrings.")
    parser.add_argument("--encoder", default="wordllama")
    o = parser.parse_args()
    out, show, started = o.out, sys.stderr.isatty(), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)

    def step(text: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {text}", flush=True)

    corpus = out / "corpus.jsonl"
    if not corpus.exists():
        step("collecting the docstrings of the installed packages ...")
        with writing(corpus) as f:
            for text in collect(most=o.texts):
                f.write(line({"_id": text.id, "title": text.title, "text": text.text}))
    if not (out / "queries.jsonl").exists():
        step("making queries: sentences, most of them taken out of their docstring ...")
        make_queries(corpus, out=out / "queries.jsonl", corpus_out=out / "passages.jsonl", per_text=4)
    step(f"encoding with {o.encoder} ...")
    embedded = embed(
        out / "passages.jsonl",
        out / "queries.jsonl",
        encoder=o.encoder,
        out=out / "vectors",
        progress=show,
        skip_empty=True,
    )
    step(f"{embedded}")
    split = split_by_passage(out / "queries.jsonl", embedded)
    n = len(embedded.key_texts)
    step("finding the exact top keys of every query ...")
    task = amips.label(
        embedded.keys,
        embedded.queries,
        cells=round(3 * n**0.5),
        split=split,
        copies=0,
        k=10,
        cell_targets=False,
        out=out / "task",
        progress=show,
    )
    step("training linear routers; comparing with FAISS on held-out queries ...")
    results = out / "results"
    summary = bench(task, out=results, minutes=0.2, rounds=2, progress=show)
    costs = summary.tables[1]
    print("\nWhat a search costs, on queries that nothing was trained on:\n")
    shown = [row for row in costs.rows if row[0] in ("recall@10 0.90", "recall@10 0.95")]
    print(table(costs.head, shown) + "\n")
    print("\n".join(summary.verdict) + "\n")
    report(results, out / "report.html")
    bundle = out / "bundle"
    if not (bundle / "text" / "text.json").exists():
        step("building the bundle ...")
        amips.build(task, results / "work" / f"linear-{task.c}", out=bundle, ids=embedded.key_texts.ids())
        attach(bundle, embedded)
    asker = Asker(bundle)
    for question in QUESTIONS:
        answer = asker.ask(question, k=3)
        print(f"\n{question}?")
        for hit in answer.hits:
            first = hit.text.text.strip().splitlines()[0]
            print(f"  {hit.score:.3f}  {hit.text.title}: {first[:90]}")
        print(f"  ({answer.scanned:,} of {answer.n:,} keys scanned)")
    print()
    step(f'done: open {out / "report.html"}; ask more with: amips ask {bundle} "your question"')


if __name__ == "__main__":
    main()
