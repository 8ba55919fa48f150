"""What a leaking split is worth: one network, measured on rows whose relatives it was trained on, and on
rows of queries that it never saw.

The authors' published code adds noise to the queries first and splits the rows after, so that noisy copies
of nearly every validation row, or its original, are trained on. Here both kinds of held-out rows are made
by the same rule from queries of the same log, so that this is all in which they differ:

    source queries --+-- pool -- original + copies each --+-- train    what the network learns from
                     |                                    +-- val      leaky: split from train row by row
                     +-- held out -- original + copies each -- test    no relative in train
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from amips import KeyNet, exact, label
from amips.bench import Chart, Panel, Series, Summary, Table, describe_machine
from amips.builder import Builder
from amips.files import partial
from amips.task import Split, Task
from amips.vectors import Floats, Vectors, first_equal, inspect, open_vectors, row_norms
from paper.claims import claim_values, verdict
from paper.leak_search import search_chart, search_sentences, search_table, searched
from paper.mappers import per_row
from paper.one_index import chart, claims, one_index, table
from paper.workspace import Workspace

Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

NOISE = 0.02  # the paper's
COPIES = 4  # the least number of noisy copies: the paper makes the queries 5 to 100 times as many
DRAWS = 1000  # of the bootstrap
BARS = 40
BLOCK_FLOATS = 1 << 22
METRICS = {
    "erel": "transport error (erel), lower is better",
    "match": "match rate",
    "recall@10": "recall@10",
    "recall@100": "recall@100",
    "mrr": "MRR",
}
LOOKUP = "lookup"


@dataclass(frozen=True)
class Plan:
    """Which rows there are: source `sources[i]` has rows i * each ... (i + 1) * each - 1, its original first.

    `split` says for each row whether it is trained on ("train"), leaky ("val") or truly held out ("test").
    """

    sources: Ids
    each: int
    split: NDArray[np.str_]

    def source_of(self, rows: NDArray[np.integer[Any]]) -> Ids:
        """The source query of each row."""
        sources: Ids = self.sources[np.asarray(rows) // self.each]
        return sources


def plan(
    distinct: Ids,
    test: NDArray[np.bool_],
    leaky: int,
    copies: int,
    most: int | None,
    seed: int,
    sources: int | None = None,
) -> Plan:
    """Draw the pool, its split row by row as the authors do it, and the held-out sources.

    Args:
        distinct: ids of the queries of which no two are equal.
        test: for each of them, whether it is to be held out.
        leaky: how many leaky rows there are; a tenth of the pool if that is fewer.
        copies: noisy copies of each source.
        most: rows in the pool, at most.
        sources: queries in the pool, at most.
    """
    rng = np.random.default_rng([seed, 4])
    each = 1 + copies
    pool, held_out = distinct[~test], distinct[test]
    wanted = len(pool) if most is None else max(1, most // each)
    wanted = min(wanted, len(pool) if sources is None else sources)
    if wanted < len(pool):
        pool = np.sort(rng.choice(pool, wanted, replace=False))
    rows = len(pool) * each
    split = np.full(rows + len(held_out) * each, "", "<U5")
    split[:rows] = "train"
    # One row of each: rows of one source are alike, and all of them have to be labelled.
    split[rows + np.arange(len(held_out)) * each + rng.integers(each, size=len(held_out))] = "test"
    split[rng.permutation(rows)[: min(leaky, max(1, rows // 10))]] = "val"
    return Plan(np.concatenate([pool, held_out]), each, split)


def write_rows(path: Path, queries: Vectors, planned: Plan, seed: int) -> Vectors:
    """The rows of a plan as a file: x itself, then copies x + noise ||x|| eps, eps ~ N(0, I), at x's norm."""
    if not path.exists():
        each = planned.each
        with partial(path) as temporary:
            out = open_memmap(temporary, "w+", np.float32, (len(planned.split), queries.d))
            rng = np.random.default_rng([seed, 5])
            step = max(1, BLOCK_FLOATS // (each * queries.d))
            for low in range(0, len(planned.sources), step):
                x = np.repeat(queries.take(planned.sources[low : low + step]), each, axis=0)
                norms = row_norms(x)
                eps = rng.standard_normal(x.shape, np.float32)
                eps[::each] = 0
                x += NOISE * norms[:, None] * eps
                x *= (norms / row_norms(x))[:, None]
                out[low * each : low * each + len(x)] = x
            out.flush()
    return open_vectors(path, "rows")


def prepare(workspace: Workspace) -> tuple[Plan, Task]:
    """The rows of both splits, labelled: `val` of the task is leaky, `test` is not."""
    distinct = np.flatnonzero(first_equal(workspace.queries) == np.arange(workspace.queries.n))
    # Half as many rows as the scale has training queries: labelling them is most of the work.
    scale = workspace.scale
    most = None if scale.queries is None or scale.sources is not None else scale.queries // 2
    copies = max(COPIES, scale.copies)
    test = workspace.split[distinct] == "test"
    planned = plan(distinct, test, scale.held_out, copies, most, workspace.seed, scale.sources)
    rows = write_rows(workspace.work / "leak.npy", workspace.queries, planned, workspace.seed)
    task = label(
        workspace.keys,
        rows,
        out=workspace.work / "task-leak",
        cells=1,
        copies=0,
        split=planned.split,
        k=1,
        seed=workspace.seed,
        progress=workspace.progress,
    )
    return planned, task


def lookup(task: Task, split: Split) -> Doubles:
    """Pure memory: answer with the top key of the nearest training row; 1 where that is right."""
    _, nearest = exact.top_k(_unit(task.train.queries), _unit(split.queries), 1)
    answers = np.asarray(task.train.top_ids[:, 0])[nearest[:, 0]]
    right: Doubles = (answers == np.asarray(split.top_ids[:, 0])).astype(np.float64)
    return right


def _unit(rows: Floats) -> Floats:
    """Rows at norm 1, of which the nearest has the largest inner product; as they are if they have it."""
    if inspect(open_vectors(rows)).unit_norm:
        return rows
    scaled: Floats = np.asarray(rows) / row_norms(np.asarray(rows))[:, None]
    return scaled


def bootstrap(values: Doubles, sources: Ids, rng: np.random.Generator, draws: int = DRAWS) -> Doubles:
    """Means of the values when sources are drawn with replacement, each with all of its rows.

    Rows of one source are alike, so drawing rows one by one would promise more certainty than there is.
    """
    _, group = np.unique(sources, return_inverse=True)
    sums, counts = np.bincount(group, values), np.bincount(group)
    means = np.empty(draws)
    for i in range(draws):
        drawn = rng.integers(len(sums), size=len(sums))
        means[i] = sums[drawn].sum() / counts[drawn].sum()
    return means


def run(workspace: Workspace) -> Summary:
    """Train one KeyNet on the authors' split and measure it on leaky and on truly held-out rows."""
    planned, task = prepare(workspace)
    net = workspace.model(task, KeyNet("XS"), "leak")
    splits = {"leaky": task.val, "held_out": task.test}
    rows = {name: per_row(net, task, split) for name, split in splits.items()}
    for name, split in splits.items():
        rows[name][LOOKUP] = lookup(task, split)
    sources = {name: planned.source_of(split.source) for name, split in splits.items()}
    rng = np.random.default_rng([workspace.seed, 6])
    values: dict[str, Any] = {}
    for metric in (*METRICS, LOOKUP):
        leaky, unseen = (float(rows[name][metric].mean()) for name in splits)
        drawn = [bootstrap(rows[name][metric], sources[name], rng) for name in splits]
        interval = np.quantile(drawn[0] - drawn[1], (0.025, 0.975)).tolist()
        values[metric] = {
            "leaky": leaky,
            "held_out": unseen,
            "difference": leaky - unseen,
            "interval": interval,
        }
    trained = planned.source_of(task.train.source)
    values |= {
        "rows": {"train": len(task.train), "leaky": len(task.val), "held_out": len(task.test)},
        "sources": {"pool": len(np.unique(trained)), "held_out": len(np.unique(sources["held_out"]))},
        "leaky_with_relatives": float(np.isin(sources["leaky"], trained).mean()),
        "held_out_with_relatives": float(np.isin(sources["held_out"], trained).mean()),
        "samples": int(net.about["samples"]),
        "times_seen": net.about["samples"] / len(task.train),
        "search": searched(workspace, task, workspace.run_directory("leak", task)),
        "one_index": one_index(task, net, splits, sources, Builder(task, workspace.work / "leak-designs")),
    }
    findings = claims(values["one_index"])
    values |= claim_values(findings)
    return Summary(
        name="leak",
        title="What noise before the split is worth",
        verdict=[*verdict(findings), *sentences(values)],
        tables=[table(values["one_index"]), _table(values), search_table(values["search"])],
        charts=[
            chart(values["one_index"]),
            _errors_chart(rows["leaky"]["erel"], rows["held_out"]["erel"]),
            search_chart(values["search"]),
        ],
        facts=[
            ("keys", f"{task.n:,} of dimension {task.d}"),
            ("training rows", f"{len(task.train):,} of {values['sources']['pool']:,} source queries"),
            (
                "leaky rows",
                f"{len(task.val):,}, {values['leaky_with_relatives']:.1%} with relatives in train",
            ),
            (
                "held-out rows",
                f"{len(task.test):,} of {values['sources']['held_out']:,} other source queries",
            ),
        ],
        method=[
            f"Every source query gives its original and {planned.each - 1} noisy copies (sigma {NOISE} "
            "relative to its norm, scaled back to it). Equal queries are removed first. The pool's rows are "
            "split at random, row by row, as in the authors' published code; the held-out sources were set "
            "aside before, and their rows are made in the same way.",
            f"One KeyNet XS, c = 1, recipe {workspace.scale.recipe!r}, {values['samples']:,} samples: each "
            f"training row was seen {values['times_seen']:.1f} times. Nothing is chosen by the leaky rows; "
            "training only logs them.",
            f"Intervals: 95 %, {DRAWS:,} bootstrap draws of source queries, each with all of its rows.",
            "The lookup answers with the top key of the nearest training row: a model that does nothing "
            "but memorise.",
        ],
        command=workspace.command("leak"),
        machine=describe_machine(),
        values=values,
    )


def _table(values: dict[str, Any]) -> Table:
    rows = []
    for metric, what in {**METRICS, LOOKUP: "match rate of a lookup"}.items():
        one = values[metric]
        low, high = one["interval"]
        cells = [f"{one['leaky']:.3f}", f"{one['held_out']:.3f}", f"{one['difference']:+.3f}"]
        rows.append([what, *cells, f"{low:+.3f} to {high:+.3f}"])
    head = ["metric", "leaky rows", "held-out rows", "difference", "95 % interval"]
    return Table("The same network on both kinds of rows", head, rows)


def _errors_chart(leaky: Doubles, unseen: Doubles) -> Chart:
    both = np.concatenate([leaky, unseen])
    # The few rows far out would leave the rest to a corner of the chart; the outermost bins hold them.
    low, high = np.quantile(both, (0.005, 0.995))
    edges = np.linspace(low, max(high, low + 1e-6), BARS + 1)
    centres = ((edges[1:] + edges[:-1]) / 2).tolist()

    def line(name: str, errors: Doubles) -> Series:
        counts, _ = np.histogram(errors.clip(edges[0], edges[-1]), bins=edges)
        return Series(name, centres, (counts / len(errors)).tolist())

    marks = [("mean, leaky", float(leaky.mean())), ("mean, held out", float(unseen.mean()))]
    series = [line("leaky rows", leaky), line("held-out rows", unseen)]
    panel = Panel("", "transport error of a row (erel)", "fraction of rows", series, marks=marks)
    return Chart("errors", "Transport errors on leaky and on held-out rows", [panel])


def sentences(values: dict[str, Any]) -> list[str]:
    """What the leak is worth: of predictions, of searching with them, and of memory alone."""
    said = []
    for metric, what in (("match", "Match rate"), ("erel", "Transport error (erel)")):
        one = values[metric]
        low, high = one["interval"]
        flattering = one["difference"] < 0 if metric == "erel" else one["difference"] > 0
        if low <= 0 <= high:
            worth = "no difference that these rows can show"
        else:
            worth = (
                "the leak flatters" if flattering else "held-out rows do better, the leak does not flatter"
            )
        said.append(
            f"{what}: {one['leaky']:.3f} on leaky rows, {one['held_out']:.3f} on held-out ones, a difference "
            f"of {one['difference']:+.3f} ({low:+.3f} to {high:+.3f}): {worth}."
        )
    said += search_sentences(values["search"])
    memory = values[LOOKUP]
    said.append(
        f"A lookup that does nothing but memorise is right on {memory['leaky']:.1%} of the leaky rows and "
        f"on {memory['held_out']:.1%} of the held-out ones: that is what the split gives away."
    )
    said.append(
        f"This holds for a KeyNet XS that saw each of {values['rows']['train']:,} training rows "
        f"{values['times_seen']:.1f} times; other budgets were not measured."
    )
    return said
