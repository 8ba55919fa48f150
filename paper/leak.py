"""What a leaking split is worth: one network, measured on rows whose relatives it was trained on, and on
rows of queries that it never saw. `paper.pool` has the rows.

The authors' published code adds noise to the queries first and splits the rows after, so that noisy copies
of nearly every validation row, or its original, are trained on.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.bench import Chart, Panel, Series, Summary, Table, describe_machine
from amips.builder import Builder
from amips.task import BY_ROWS, BY_SOURCE, Split, Task
from amips.vectors import Floats, inspect, open_vectors, row_norms
from paper.claims import claim_values, verdict
from paper.mappers import per_row, trained
from paper.one_index import chart, claims, one_index, table
from paper.pool import COPIES, NOISE
from paper.workspace import Workspace

Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

DRAWS = 1000  # of the bootstrap
BARS = 40
METRICS = {
    "erel": "transport error (erel), lower is better",
    "match": "match rate",
    "recall@10": "recall@10",
    "recall@100": "recall@100",
    "mrr": "MRR",
}
LOOKUP = "lookup"


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
    views = workspace.pool_tasks()
    task = views[BY_ROWS]
    size = workspace.scale.sizes[0]
    one = trained(workspace, task, "KeyNet", size, portion=1.0)
    net = one.model
    kinds = {"leaky": views[BY_ROWS], "held_out": views[BY_SOURCE]}
    splits, val = ({kind: getattr(view, part) for kind, view in kinds.items()} for part in ("test", "val"))
    leaky, held_out = splits.values()
    rows = {name: per_row(net, task, split) for name, split in splits.items()}
    for name, split in splits.items():
        rows[name][LOOKUP] = lookup(task, split)
    sources = {name: np.asarray(split.source) for name, split in splits.items()}
    rng = np.random.default_rng([workspace.seed, 6])
    values: dict[str, Any] = {}
    for metric in (*METRICS, LOOKUP):
        known, unseen = (float(rows[name][metric].mean()) for name in splits)
        drawn = [bootstrap(rows[name][metric], sources[name], rng) for name in splits]
        interval = np.quantile(drawn[0] - drawn[1], (0.025, 0.975)).tolist()
        values[metric] = {
            "leaky": known,
            "held_out": unseen,
            "difference": known - unseen,
            "interval": interval,
        }
    pool = np.asarray(task.train.source)
    values |= {
        "rows": {"train": len(task.train), "leaky": len(leaky), "held_out": len(held_out)},
        "sources": {"pool": len(np.unique(pool)), "held_out": len(np.unique(sources["held_out"]))},
        "leaky_with_relatives": float(np.isin(sources["leaky"], pool).mean()),
        "held_out_with_relatives": float(np.isin(sources["held_out"], pool).mean()),
        "size": size,
        "samples": int(net.about["samples"]),
        "times_seen": net.about["samples"] / len(task.train),
        "one_index": one_index(task, net, splits, val, Builder(task, workspace.work / "leak-designs")),
    }
    findings = claims(values["one_index"])
    values |= claim_values(findings)
    return Summary(
        name="leak",
        title="What noise before the split is worth",
        verdict=[*verdict(findings), *sentences(values)],
        tables=[table(values["one_index"]), _table(values)],
        charts=[
            chart(values["one_index"]),
            _errors_chart(rows["leaky"]["erel"], rows["held_out"]["erel"]),
        ],
        facts=[
            ("keys", f"{task.n:,} of dimension {task.d}"),
            ("training rows", f"{len(task.train):,} of {values['sources']['pool']:,} source queries"),
            (
                "leaky rows",
                f"{len(leaky):,}, {values['leaky_with_relatives']:.1%} with relatives in train",
            ),
            (
                "held-out rows",
                f"{len(held_out):,} of {values['sources']['held_out']:,} other source queries",
            ),
        ],
        method=[
            f"Every source query gives its original and {max(COPIES, workspace.scale.copies)} noisy copies "
            f"(sigma {NOISE} relative to its norm, scaled back to it). Equal queries are removed first. The "
            "pool's rows are split at random, row by row, as in the authors' published code; the held-out "
            "sources were set aside before, and their rows are made in the same way.",
            f"One KeyNet {size}, c = 1, recipe {workspace.scale.recipe!r}, {values['samples']:,} samples: "
            f"each training row was seen {values['times_seen']:.1f} times. Only the number of "
            "probes of the verdict is chosen, for each kind on other rows of that kind.",
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
    """What the leak is worth: of predictions, and of memory alone."""
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
    memory = values[LOOKUP]
    said.append(
        f"A lookup that does nothing but memorise is right on {memory['leaky']:.1%} of the leaky rows and "
        f"on {memory['held_out']:.1%} of the held-out ones: that is what the split gives away."
    )
    said.append(
        f"This holds for a KeyNet {values['size']} that saw each of {values['rows']['train']:,} training "
        f"rows {values['times_seen']:.1f} times; other budgets were not measured."
    )
    return said
