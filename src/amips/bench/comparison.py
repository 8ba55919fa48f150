"""The bench: run every system, store what came of it, and say so."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from amips.bench.derive import on_test
from amips.bench.judgements import Judgements, relevance_table
from amips.bench.runner import Bench, Settings
from amips.bench.searchers import CellSearch
from amips.bench.results import Store
from amips.bench.summarize import summarize
from amips.bench.summary import Summary
from amips.bench.systems import (
    System,
    default_systems,
    engine_systems,
    load_models,
    model_systems,
    own_on_engines,
    read_systems,
)
from amips.errors import AmipsError, ResultsError
from amips.files import locked
from amips.search import Searcher
from amips.search.build import calibrated
from amips.task import Task, load_task


def bench(
    task: Task | str | Path,
    *,
    out: str | Path,
    systems: "Sequence[System] | str | Path | None" = None,
    models: "Sequence[str | Path]" = (),
    engines: Sequence[str] = (),
    minutes: float = 0.5,
    rounds: int = 3,
    batch: int = 1024,
    singles: int = 64,
    all_threads: bool = True,
    seed: int = 0,
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
        engines: names of `amips.backends` to run too, each searched with x and with the models that fit; where
            cells can be addressed and no systems are given, also routed by what `amips.fit` usually makes.
        minutes: training time of each linear router that the systems ask for.
        rounds: how often each time is taken.
        batch: queries in the large batch.
        singles: queries that are timed one at a time.
        all_threads: take times on all threads, too, beside those on one.
        judgements: what people judged relevant, for nDCG@10 and recall@100 of exact, centroid and learned
            search.
        progress: show a progress bar when standard error is a terminal.
    """
    task = load_task(task)
    if not 0 < minutes < math.inf or min(rounds, batch, singles) < 1 or seed < 0:
        raise AmipsError(
            f"minutes={minutes}, rounds={rounds}, batch={batch}, singles={singles}, seed={seed}: seed must "
            "not be negative, the others must be positive"
        )
    if task.test.top_ids.shape[1] < min(10, task.n):
        raise AmipsError(
            f"{task.path} knows only the top {task.test.top_ids.shape[1]}: label with -k 10 or more"
        )
    loaded = load_models(list(models))
    named = systems is not None
    if systems is None:
        systems = default_systems(task, loaded)
    else:
        given = read_systems(systems) if isinstance(systems, (str, Path)) else list(systems)
        systems = [*given, *model_systems(task, loaded)]
    hosted = engine_systems(task, engines, loaded)
    hosted += [] if named else own_on_engines(task.n, task.d, engines)
    systems = [*systems, *(s for s in hosted if s not in systems)]
    settings = Settings(10, batch, singles, rounds, minutes, seed, progress, all_threads)
    about = identity(task, settings)
    if not systems:
        raise AmipsError("systems is empty: there is nothing to compare")
    slugs = [system.slug for system in systems]  # a run that is not finished is refused here
    if len(set(slugs)) < len(slugs):
        twice = next(s for s in systems if slugs.count(s.slug) > 1)
        raise AmipsError(f"two of the systems are the same: {twice.name}")
    called: dict[str, str] = {}
    for system in systems:  # what has one name shares one front
        if called.setdefault(system.family, system.router) != system.router:
            both = f"{called[system.family]} and {system.router}"
            raise AmipsError(f"{both} are both called {system.family!r}: give one another label")
    if judgements is not None:
        judgements.check(task)
    store = Store(out, about)
    busy = ResultsError(f"another amips bench is at work in {out}; wait for it, or choose another out")
    with locked(store.path / ".lock", busy):
        running = Bench(task, store, settings)
        running.run(systems, "bench")
        made = summarize(task, store, settings, list(systems), running.work)
        made = replace(made, command=_command(settings, list(loaded), named, engines))
        if judgements is not None:
            tested, chosen = on_test(store.runs(systems), task), made.values["chosen"]
            judged = relevance_table(running, tested, chosen, judgements)
            made = replace(made, tables=[*made.tables[:1], judged, *made.tables[1:]])
        made.save(store.path)
    return made


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


def searcher(task: Task | str | Path, results: str | Path, system: System) -> Searcher:
    """What a bench made of a system of cells, with operating points: ready to be saved as a bundle."""
    task = load_task(task)
    store = Store(results)
    settings = Settings(minutes=float(store.about["minutes"]), seed=int(store.about["seed"]))
    opened = Bench(task, store, settings).open(system)
    if not isinstance(opened, CellSearch):
        raise AmipsError(f"{system.name} has no cells: it cannot be a bundle")
    return calibrated(opened.searcher, task.val)


def _command(settings: Settings, models: list[str], named: bool, engines: Sequence[str] = ()) -> str:
    """What was typed, without the places of this machine."""
    words = ["amips bench TASK", *(f"--models {Path(run).name}" for run in models)]
    words += [f"--engine {name}" for name in engines]
    words += ["--systems SYSTEMS.toml"] if named else []
    given = ("minutes", "rounds", "batch", "singles", "seed")
    words += [f"--{name} {getattr(settings, name)}" for name in given]
    return " ".join([*words, "--out RESULTS"])
