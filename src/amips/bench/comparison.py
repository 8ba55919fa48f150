"""The bench: run every system, store what came of it, and say so."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from amips.arguments import check_number, check_seed
from amips.bench.derive import on_test
from amips.bench.judgements import Judgements, relevance_table
from amips.bench.lineup import (
    backend_systems,
    default_systems,
    load_models,
    model_systems,
    own_on_backends,
)
from amips.bench.results import ResultsStore
from amips.bench.runner import Runner, Settings
from amips.bench.summarize import summarize
from amips.bench.summary import Summary
from amips.bench.systems import System
from amips.bench.systems_file import read_systems
from amips.errors import AmipsError, ResultsError
from amips.locks import locked
from amips.metrics import TOP
from amips.nets import Model
from amips.resources import plain_resource_errors
from amips.search import Index, calibrated
from amips.task import Task, load_task


@plain_resource_errors()
def bench(
    task: Task | str | Path,
    *,
    out: str | Path,
    systems: Sequence[System] | str | Path | None = None,
    models: Sequence[str | Path] = (),
    backends: Sequence[str] = (),
    minutes: float = Settings.minutes,
    rounds: int = Settings.rounds,
    batch: int = Settings.batch,
    singles: int = Settings.singles,
    all_threads: bool = Settings.all_threads,
    seed: int = Settings.seed,
    judgements: Judgements | None = None,
    progress: bool = False,
) -> Summary:
    """Compare systems on the held-out queries of a task: recall against FLOPs, keys scanned and time.

    Raw runs are stored in `out`; what is there is not run again, so an interrupted bench continues and
    more systems can be added. The summary is derived from what is stored and written to summary.json.

    Args:
        task: a task or its directory, labelled with k of at least 10.
        out: the results directory.
        systems: a list, or a TOML file with them (see `read_systems`); by default FAISS IVF over
            a sweep of cells, what `amips.fit` usually makes, the models, exact search and HNSW.
        models: run directories to compare, beside the default systems or those given.
        backends: names of `amips.backends` to run too, each searched with x and with the models that fit;
            where cells can be addressed and no systems are given, also routed by what `amips.fit` usually
            makes.
        minutes: training time of each router that the systems ask for, at most.
        rounds: how often each time is taken.
        batch: queries in the large batch.
        singles: queries that are timed one at a time.
        all_threads: take times on all threads, too, beside those on one.
        judgements: what people judged relevant, for nDCG@10 and recall@100 of exact, centroid and learned
            search.
        progress: say on standard error how far it is: a bar on a terminal, a line now and then otherwise.
    """
    task = load_task(task)
    if not 0 < minutes < math.inf or min(rounds, batch, singles) < 1 or seed < 0:
        raise AmipsError(
            f"minutes={minutes}, rounds={rounds}, batch={batch}, singles={singles}, seed={seed}: seed must "
            "not be negative, the others must be positive"
        )
    if task.test.top_ids.shape[1] < min(TOP, task.n):
        raise AmipsError(
            f"{task.path} knows only the top {task.test.top_ids.shape[1]}: label with -k {TOP} or more"
        )
    settings = Settings(TOP, batch, singles, rounds, minutes, seed, progress, all_threads)
    loaded = load_models(list(models))
    named = list(read_systems(systems) if isinstance(systems, str | Path) else systems or [])
    if systems is not None and not named and not loaded and not backends:
        raise AmipsError("systems is empty: there is nothing to compare")
    _check([*named, *model_systems(task, loaded)])  # a run that is not finished is refused here,
    backend_systems(task, backends, loaded)  # ... and a backend that there is not
    if judgements is not None:
        judgements.check(task)
    store = ResultsStore(out, identity(task, settings))
    busy = ResultsError(f"another amips bench is at work in {out}; wait for it, or choose another out")
    with locked(store.path / ".lock", busy):
        runner = Runner(task, store, settings)
        compared = _compared(runner, None if systems is None else named, loaded, backends)
        runner.run(compared, "bench")
        summary = summarize(runner, compared)
        command = _command(settings, list(loaded), systems is not None, backends)
        summary = replace(summary, command=command)
        if judgements is not None:
            tested, contender = on_test(store.runs(compared), task), summary.values["contender"]
            table = relevance_table(runner, tested, contender, judgements)
            summary = replace(summary, tables=[*summary.tables[:1], table, *summary.tables[1:]])
        summary.save(store.path)
    return summary


def _compared(
    runner: Runner, named: list[System] | None, models: dict[str, Model], backends: Sequence[str]
) -> list[System]:
    """Everything that is to be run, each with every number of its design known."""
    task = runner.task
    if named is None:
        systems = default_systems(runner.builder, models)
    else:
        systems = [*named, *model_systems(task, models)]
    others = backend_systems(task, backends, models)
    others += own_on_backends(task.n, backends) if named is None else []
    systems = [runner.resolved(system) for system in systems]
    systems += [system for system in map(runner.resolved, others) if system not in systems]
    _check(systems)
    return systems


def _check(systems: Sequence[System]) -> None:
    """Refuse two systems that are the same, and two routers that have one name."""
    slugs = [system.slug for system in systems]
    if len(set(slugs)) < len(slugs):
        twice = next(s for s in systems if slugs.count(s.slug) > 1)
        raise AmipsError(f"two of the systems are the same: {twice.name}")
    routers: dict[str, System] = {}
    for system in systems:  # what has one name shares one front
        first = routers.setdefault(system.family, system)
        if _router(first) != _router(system):
            both = " and ".join(one.run or one.name for one in (first, system))
            raise AmipsError(f"{both} are both called {system.family!r}: give one another label")


def _router(system: System) -> object:
    """What chooses cells, or the predicted key."""
    return system.run or (system.design and (system.design.router, system.design.recipe))


def identity(task: Task, settings: Settings) -> dict[str, object]:
    """What makes results of another kind: answers to other queries must not be taken for these."""
    return {
        "kind": "results",
        "keys": task.fingerprint,
        "task": hashlib.sha256(json.dumps(task.options, sort_keys=True).encode()).hexdigest(),
        "k": settings.k,
        "batch": settings.batch,
        "minutes": settings.minutes,
        "seed": settings.seed,
    }


def index_of(task: Task | str | Path, results: str | Path, system: System) -> Index:
    """What a bench built of a system of amips's own, with operating points: ready to be saved as a bundle."""
    task = load_task(task)
    store = ResultsStore(results)
    settings = Settings(
        minutes=check_number("minutes", store.about.get("minutes"), above=0, error=ResultsError),
        seed=check_seed(store.about.get("seed"), error=ResultsError),
    )
    runner = Runner(task, store, settings)
    if system.graph and system.design is not None:
        return Index(runner.builder.index(system.design))
    return Index(calibrated(runner.opener.searcher(system), task.val, runner.builder.recall))


def _command(settings: Settings, models: list[str], named: bool, backends: Sequence[str] = ()) -> str:
    """What was typed, without the places of this machine."""
    words = ["amips bench TASK", *(f"--models {Path(run).name}" for run in models)]
    words += [f"--backend {name}" for name in backends]
    words += ["--systems SYSTEMS.toml"] if named else []
    options = ("minutes", "rounds", "batch", "singles", "seed")
    words += [f"--{name} {getattr(settings, name)}" for name in options]
    return " ".join([*words, "--out RESULTS"])
