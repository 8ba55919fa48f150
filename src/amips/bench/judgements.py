"""What a speed-up costs in relevance: exact, centroid and learned search against what people judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from amips.bench.derive import Family
from amips.bench.relevance import DEPTH, MEASURES, Qrels, Relevance, difference, measure
from amips.bench.results import ResultsStore
from amips.bench.runner import Runner
from amips.bench.searchers import where_at
from amips.bench.summary import Table
from amips.bench.systems import EXACT, System
from amips.errors import AmipsError
from amips.metrics import TARGET_RECALL
from amips.task import Task

FOLDER = "relevance"


@dataclass(frozen=True)
class Judgements:
    """Judgements, and the ids of the queries (as they were labelled) and of the keys that they speak of."""

    qrels: Qrels
    query_ids: Sequence[str]
    key_ids: Sequence[str]

    def check(self, task: Task) -> None:
        """Refuse ids of another task."""
        if len(self.key_ids) != task.n:
            raise AmipsError(f"the judgements come with {len(self.key_ids):,} keys, the task has {task.n:,}")
        last = max(int(np.max(split.source, initial=-1)) for split in (task.val, task.test))
        if last >= len(self.query_ids):
            raise AmipsError(
                f"the judgements come with {len(self.query_ids):,} queries, the task was made of more"
            )
        names = [self.query_ids[int(row)] for row in task.test.source]
        if not any(name in self.qrels for name in names):
            raise AmipsError(
                "none of the test queries is judged: label with --split, the judged queries as test"
            )


def relevance_table(
    runner: Runner, tested: list[Family], contender: str | None, judgements: Judgements
) -> Table:
    """nDCG@10 and recall@100 of exact search, and of the best centroid and the chosen learned search.

    The latter two are run where they reach recall@10 = 0.95 at the fewest FLOPs. Their raw answers, 100 to
    a query, are stored beside those of the bench.
    """
    task, seed = runner.task, runner.settings.seed
    about = {"kind": "results", "keys": task.fingerprint, "k": DEPTH, "seed": seed}
    store = ResultsStore(runner.store.path / FOLDER, about)
    deeper = Runner(task, store, replace(runner.settings, k=DEPTH), work=runner.work)
    first, names = len(task.val), [judgements.query_ids[int(row)] for row in task.test.source]
    points: list[tuple[str, System, int]] = [("exact", System(backend=EXACT), 1)]
    for family in tested:
        at = family.nearest("flops", "recall@10", TARGET_RECALL)
        if at is not None and (family.role == "baseline" or family.name == contender):
            points.append((family.name, at.run.system, at.run.budget))
    rows: list[list[str]] = []
    exact: Relevance | None = None
    for name, system, budget in points:
        deeper.answer(system, [budget])
        run = store.get(system, budget)
        measured = measure(judgements.qrels, names, judgements.key_ids, run.ids[first:], run.scores[first:])
        exact = exact or measured
        apart = difference(measured, exact, seed=seed)
        cells = []
        for name_of_measure in MEASURES:
            text = f"{measured.means[name_of_measure]:.4f}"
            if measured is not exact:
                d = apart[name_of_measure]
                text += f" ({d.value:+.4f}, {d.low:+.4f} to {d.high:+.4f})"
            cells.append(text)
        where = "-" if system.backend == EXACT else where_at(system, budget)
        rows.append([name, where, *cells])
    assert exact is not None
    note = (
        f"On {len(exact.queries):,} judged test queries, each at recall@10 = {TARGET_RECALL} against exact "
        "search. In brackets the difference from exact search and its 95 % interval over queries."
    )
    return Table("Relevance, as people judged it", ["search", "at", *MEASURES], rows, note)
