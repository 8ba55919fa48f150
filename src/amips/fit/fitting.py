"""The steps of a fit: label, try partitions, train, build in some ways, compare with plain IVF.

Everything is chosen on the val queries; the test queries are looked at once, to say what was gained.
"""

import contextlib
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from amips import exact, lean
from amips.cells import fingerprint_of, moved
from amips.errors import AmipsError, TrainingInterrupted
from amips.files import read_json, write_json
from amips.fit.partitions import TOP, Partitions, Second, Settings, Trial, flops_at
from amips.index import Storage
from amips.nets import Linear, Model
from amips.route import router_for
from amips.search import Point, Searcher, build
from amips.search.build import measure, measure_shares
from amips.search.points import point_for
from amips.search.spill import first_of, ranked, second_cells
from amips.table import table
from amips.task import Task, label
from amips.vectors import Vectors, open_vectors

LABEL_SHARE, TRAIN_SHARE = 0.4, 0.2  # of the time given, beside that of trials; the rest is for measuring
PILOT = 2048  # queries labelled to see how long that takes
LEAST = 100  # queries, however short the time
FEW = 1000  # queries: with fewer, what is chosen and reported rests on too few to be sure of
HELD = 1000  # queries to choose by, and as many to report on
CALL, WORK_TASK, WORK_RUN = "fit.json", "task", "run"  # in the directory of work in progress
LEAN_SHARES = (0.25, 1 / 3, 0.4, 0.5, 0.6)  # of the dimensions, of lean storage: the smallest that will do,
LEAN_RECALL = 0.99  # ... which is: so many of the true top keys are among the candidates
LEAN_SAMPLE = 200  # queries this is looked up for
TIMED = 256  # queries that are searched to take a time
SPILLS = (0.1, 0.5)  # shares of the keys that may get a second cell
SPILL_SHARE = 0.1  # of the time given, that second cells may take
WORTH = 0.98  # of the cost, at most, that second cells must come down to: they take memory
TIMED_TRIALS = 3  # partitions that are timed, if time is what counts
TARGETS = (0.8, 0.9, 0.95, 0.98)  # recalls at which the gain is shown


class Fitting:
    """One call of `fit` and its work in progress."""

    def __init__(self, work: Path, settings: Settings, quiet: bool) -> None:
        self.work, self.settings, self.quiet = work, settings, quiet
        self.seconds = 60 * settings.minutes
        self.rate = 0.0  # FLOPs a second, of labelling

    def say(self, text: str) -> None:
        """Print, unless quiet."""
        if not self.quiet:
            print(text, flush=True)  # noqa: T201

    def run(self, keys: Vectors, queries: Vectors) -> Searcher:
        """The best searcher found."""
        task = self._label(keys, queries)
        partitions = Partitions(self.work, self.settings, self.rate, self.say)
        trials = partitions.tried(task)
        plain, best = self._chosen(task, trials)
        ours, model = self._routed(task.with_cells(best.cells), best.model)
        made = self._stored(ours, model)
        baseline = _plain(task.with_cells(plain.cells), self.settings.storage or "flat")
        return self._compare(task, made, baseline, _swept(trials, plain, partitions.counts(task.n)))

    def remove(self) -> None:
        """Remove the work of this call, and the folder around it if no other call is at work there."""
        shutil.rmtree(self.work, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.work.parent.rmdir()

    def _label(self, keys: Vectors, queries: Vectors) -> Task:
        """Exact top keys of as many queries as there is time for."""
        if (self.work / CALL).exists():
            known = read_json(self.work / CALL, AmipsError)  # measured anew it would differ
            count, self.rate = int(known["labelled"]), float(known["rate"])
        else:
            self.rate = _rate(keys, queries)
            affordable = int(self.rate * self.seconds * LABEL_SHARE / (2 * keys.n * keys.d))
            count = min(queries.n, max(LEAST, affordable))
            self.work.mkdir(parents=True, exist_ok=True)
            write_json(self.work / CALL, {**asdict(self.settings), "labelled": count, "rate": self.rate})
        seed = self.settings.seed
        if count < queries.n:
            self.say(f"using {count:,} of {queries.n:,} queries: labelling them all would take too long")
            drawn = np.sort(np.random.default_rng([seed, 3]).choice(queries.n, count, replace=False))
            queries = open_vectors(queries.take(drawn), "queries")
        held = max(1, min(HELD, queries.n // 5))
        self.say(f"{keys.n:,} keys, {queries.n:,} queries of dimension {keys.d}: finding their top keys ...")
        if queries.n < FEW:
            self.say(
                f"few queries: what is chosen rests on {held:,} of them, and what is reported on {held:,} "
                "others; some thousands would do better"
            )
        try:
            return label(
                keys,
                queries,
                out=self.work / WORK_TASK,
                copies=0,
                val=held,
                test=held,
                k=TOP,
                seed=seed,
                progress=not self.quiet,
            )
        except AmipsError:
            if not (self.work / WORK_TASK).exists():  # refused before anything was done
                self.remove()
            raise

    def _chosen(self, task: Task, trials: list[Trial]) -> tuple[Trial, Trial]:
        """The best partition for plain IVF, and the best for learning, before anything is trained."""
        plain = sorted((trial for trial in trials if not trial.strength), key=lambda trial: trial.centroid)
        ours = sorted(trials, key=lambda trial: trial.routed)
        if self.settings.objective == "flops":
            return plain[0], ours[0]
        # Many small cells cost more time than their FLOPs say: the cheapest few are timed, the same for both.
        return self._fastest(task, plain, routed=False), self._fastest(task, ours, routed=True)

    def _fastest(self, task: Task, trials: list[Trial], routed: bool) -> Trial:
        """Of the first few trials the one that is fastest on val queries."""
        taken = []
        for trial in trials[:TIMED_TRIALS]:
            made = build(task.with_cells(trial.cells), trial.model if routed else None)
            taken.append(self._cost(made, task))
            way = "share-bounded, reduced routing" if routed else "plain IVF"
            self.say(f"  {trial.cells.count:6,} cells, {trial.kind}, {way}: {self._told(taken[-1])}")
        return trials[int(np.argmin(taken))]

    def _routed(self, task: Task, untrained: Model) -> tuple[Task, Model]:
        """A router for the cells, and the cells: moved to suit it, where that was asked for and pays."""
        model, full = self._train(task), 2 * task.n * task.d
        costs = [flops_at(task, candidate, self.settings.recall) for candidate in (model, untrained)]
        better = costs[0] < costs[1]
        self.say(
            f"  {costs[0] / full:.2%} of a full scan, untrained {costs[1] / full:.2%}: "
            f"the {'trained' if better else 'untrained'} one is taken"
        )
        if not better:
            return task, untrained
        for _ in range(self.settings.regroup):
            queries, top = task.path / "train" / "queries.npy", np.asarray(task.train.top_ids)[:, :TOP]
            cells = moved(task.cells, task.path / "keys.npy", queries, top, model.scores)
            other = task.with_cells(cells)
            trained = self._train(other)
            cost = flops_at(other, trained, self.settings.recall)
            count = int((cells.assignment != task.cells.assignment).sum())
            pays = cost < costs[0]
            self.say(
                f"  {cost / full:.2%} with {count:,} keys moved to the cell that their queries are sent to: "
                f"{'' if pays else 'not '}kept"
            )
            if not pays:
                break
            task, model, costs[0] = other, trained, cost
        return task, model

    def _seconds(self, task: Task, model: Model) -> list[Second | None]:
        """Second cells to choose from: none, and those of some keys; what was asked for, if anything was."""
        share = self.settings.spill
        if share == 0:
            return [None]
        if share is None and 4 * task.n * task.c * task.d > SPILL_SHARE * self.seconds * self.rate:
            self.say("no time to look for second cells")
            return [None]
        router = router_for(model, task.cells.centroids)
        recall = self.settings.recall
        if share is not None:
            return [second_cells(task, router, share, recall)]
        found = ranked(task, router, recall)
        tried = [first_of(*found, some) for some in SPILLS]
        return [None, min(tried, key=lambda second: flops_at(task, model, recall, second))]

    def _train(self, task: Task) -> Model:
        from amips.learn import Recipe, train

        self.say(f"training a linear router for {task.c:,} cells ...")
        # Named by its cells: with other time to try them in, a call that continues may choose others.
        run = self.work / f"{WORK_RUN}-{fingerprint_of(task.cells.assignment)[:12]}"
        try:
            return train(
                task,
                Linear(rank=lean.rank_for(task.d, lean.ROUTE_SHARE)),
                recipe=Recipe(route_top=TOP),
                minutes=self.settings.minutes * TRAIN_SHARE / (1 + self.settings.regroup),
                out=run,
                resume=(run / "config.json").exists(),
                evaluations=1,
                seed=self.settings.seed,
                progress=not self.quiet,
            )
        except TrainingInterrupted:
            raise TrainingInterrupted(
                f"stopped; the same call continues with what is in {self.work}"
            ) from None

    def _stored(self, task: Task, model: Model) -> Searcher:
        """The cheapest index on val: in the storage asked for, or flat or lean; with second cells, or not."""
        storage, r = self.settings.storage, None
        if storage in (None, "lean"):
            r = _lean_rank(task) or (task.d if storage else None)
        if r is None and storage is None:
            self.say(f"lean storage: no projection keeps {LEAN_RECALL:.0%} of the top keys; flat it is")
        ways: list[tuple[Storage, int | None]] = [(storage, r)] if storage else [("flat", None)]
        ways += [("lean", r)] if r is not None and storage is None else []
        seconds = self._seconds(task, model)
        best, least = None, math.inf
        self.say("building the index; cost on held-out queries:")
        for way, dims in ways:
            for second in seconds:
                made = build(task, model, storage=way, lean=dims, spill=0.0 if second is None else second)
                cost = self._cost(made, task)
                name = f"lean, {dims} of {task.d} dimensions" if dims else way
                twice = f", {made.spilled:,} keys in two cells" if made.spilled else ""
                self.say(f"  {name}{twice}: {self._told(cost)}")
                if best is None or cost < least * (WORTH if made.spilled > best.spilled else 1):
                    best, least = made, cost
        assert best is not None
        return best

    def _told(self, cost: float) -> str:
        """A cost, in words."""
        if math.isinf(cost):
            return f"does not reach recall@10 {self.settings.recall}"
        if self.settings.objective == "flops":
            return f"{cost:.2%} of a full scan"
        return f"{1e6 * cost:,.0f} us a query"

    def _cost(self, searcher: Searcher, task: Task) -> float:
        """What the objective names, of one query at the recall asked for; infinite if it is out of reach."""
        if all(point.recall10 < self.settings.recall for point in searcher.points):
            return math.inf
        if self.settings.objective == "flops":
            return point_for(searcher.points, self.settings.recall, TOP).flops / (2 * task.n * task.d)
        x = np.asarray(task.val.queries[:TIMED])
        parts = [x] if self.settings.objective == "throughput" else [x[i : i + 1] for i in range(len(x))]
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            for part in parts:
                searcher.search(part, TOP, recall=self.settings.recall)
            taken.append(time.perf_counter() - started)
        return float(np.median(taken)) / len(x)

    def _compare(self, task: Task, made: Searcher, baseline: Searcher, tried: str) -> Searcher:
        """What was gained, on the test queries; plain IVF where nothing was on val."""
        before_cost, after_cost = self._cost(baseline, task), self._cost(made, task)
        plain = measure(baseline, task.test)
        ours = measure_shares(made, task.test)
        full = 2 * task.n * task.d
        rows = []
        for target in TARGETS:
            before, after = cost_at(plain, target), cost_at(ours, target)
            if before is None or after is None:
                continue
            shares = [before.flops / full, after.flops / full, before.scanned, after.scanned]
            rows.append(
                [f"{target:.2f}", *(f"{v:.2%}" for v in shares), f"{before.flops / after.flops:.2f}x"]
            )
        kinds = ["plain IVF", "learned"]
        head = ["recall@10", *(f"FLOPs: {k}" for k in kinds), *(f"keys: {k}" for k in kinds), "fewer FLOPs"]
        self.say("\nshare of what scanning all keys costs, on queries that nothing was chosen by;")
        self.say(f"plain IVF has the best of {tried}:\n")
        self.say(table(head, rows) + "\n")
        costs = f"plain IVF {self._told(before_cost)}; learned {self._told(after_cost)}"
        self.say(f"{self.settings.objective} at recall@10 {self.settings.recall} on val: {costs}")
        if after_cost < before_cost:
            return made
        self.say("learning does not pay here: the bundle is plain IVF")
        return baseline


def _rate(keys: Vectors, queries: Vectors) -> float:
    """FLOPs a second of finding top keys."""
    lengths, taken = [], []
    for few in (min(64, queries.n // 2), min(64 + PILOT, queries.n)):
        x = queries.rows(0, max(1, few))
        started = time.perf_counter()
        exact.top_k(keys, x, TOP)
        taken.append(time.perf_counter() - started)
        lengths.append(len(x))
    # Of the difference: what a call costs whatever it is asked is not part of a rate.
    seconds = taken[1] - taken[0] if taken[1] > taken[0] else taken[1]
    return 2 * keys.n * keys.d * max(1, lengths[1] - lengths[0]) / max(seconds, 1e-9)


def _swept(trials: list[Trial], plain: Trial, wanted: list[int]) -> str:
    """Over which numbers of cells plain IVF is the best, and whether one that was left out may be better."""
    counts = sorted(trial.cells.count for trial in trials if not trial.strength)
    left_out = set(wanted) - set(counts)
    at_an_end = plain.cells.count in (counts[0], counts[-1])
    more = " (with more time others may be better)" if left_out and at_an_end else ""
    return f"{', '.join(f'{count:,}' for count in counts)} cells{more}"


def _plain(task: Task, storage: Storage) -> Searcher:
    """Plain IVF in this storage."""
    r = (_lean_rank(task) or task.d) if storage == "lean" else None
    return build(task, None, storage=storage, lean=r)


def _lean_rank(task: Task) -> int | None:
    """The fewest dimensions whose candidates hold nearly all of the true top keys; None if none are few."""
    if task.n <= 10 * TOP:
        return None  # every key is a candidate: nothing is saved
    keys = open_vectors(task.path / "keys.npy")
    queries = open_vectors(task.path / "train" / "queries.npy")
    x, true = np.asarray(task.val.queries[:LEAN_SAMPLE]), np.asarray(task.val.top_ids[:LEAN_SAMPLE])
    whole = lean.learn(keys, queries, task.d)
    for r in dict.fromkeys(lean.rank_for(task.d, share) for share in LEAN_SHARES):
        projection = whole.first(r)
        found = exact.top_k(projection.of_keys(keys), x @ projection.queries.T, 10 * TOP)[1]
        if (true[:, :, None] == found[:, None, :]).any(axis=2).mean() >= LEAN_RECALL:
            return r
    return None


def cost_at(points: list[Point], recall: float) -> Point | None:
    """The point at which recall@10 is reached, between the two nearest measured ones; None if it is not."""
    reached = next((i for i, p in enumerate(points) if p.recall10 >= recall), None)
    if reached is None:
        return None
    above, below = points[reached], points[max(0, reached - 1)]
    rise = above.recall10 - below.recall10
    share = (recall - below.recall10) / rise if rise > 0 else 1.0

    def between(name: str) -> float:
        low, high = float(getattr(below, name)), float(getattr(above, name))
        return low + share * (high - low)

    return Point(above.probes, between("recall1"), recall, between("scanned"), between("flops"))
