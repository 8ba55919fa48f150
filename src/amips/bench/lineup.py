"""Which systems a bench compares when nobody says: what an expert would ask for."""

from collections.abc import Sequence
from pathlib import Path

from amips import native
from amips.backends import backend_class
from amips.bench.systems import EXACT, Mode, System
from amips.builder import Builder, graph_design
from amips.cells import default_count
from amips.design import Design
from amips.errors import AmipsError, RunError
from amips.nets import WEIGHTS, Model, load_model
from amips.task import Task

SWEEP = (0.5, 1.0, 2.0, 4.0, 10.0)  # cells of the baseline, in units of sqrt(n)
OWN_SWEEP = (2.0, 4.0, 8.0)  # cells of what `amips.fit` usually makes, in units of sqrt(n)

OWN_LABEL, GRAPH_LABEL = "amips", "amips graph"


def sweep(n: int, factors: Sequence[float] = SWEEP) -> list[int]:
    """Numbers of cells, by default from sqrt(n) / 2 to 10 sqrt(n), none with fewer than two keys a cell."""
    return sorted({max(2, default_count(n, factor, fewest=2)) for factor in factors})


def default_systems(builder: Builder, models: dict[str, Model]) -> list[System]:
    """Plain IVF over a sweep of cells, amips's cells and graph, the models; exact search, FastScan, HNSW."""
    task = builder.task
    plain = [System(design) for design in plain_designs(task)]
    references = [System(backend=EXACT), System(backend="hnsw")]
    if task.n >= backend_class("fastscan").fewest:
        references.append(System(backend="fastscan"))
    own = [*own_systems(builder), *graph_systems(builder)]
    return [*plain, *own, *model_systems(task, models), *references]


def graph_systems(builder: Builder) -> list[System]:
    """A graph that learns from the log; its codes have the dimensions that the builder measures."""
    if native.compiled is None or builder.task.n < 2:
        return []
    return [System(builder.resolved(graph_design(builder.task)), label=GRAPH_LABEL)]


def own_systems(builder: Builder, factors: Sequence[float] = OWN_SWEEP) -> list[System]:
    """What `amips.fit` usually makes of factors x sqrt(n) cells, with float32 keys and with lean storage.

    Lean storage has the dimensions that the builder measures; where they save nothing there is none of it.
    """
    counts = sorted({max(2, default_count(builder.task.n, factor)) for factor in factors})
    dimensions = builder.lean_dimensions()
    designs = [Design(cells, storage="flat") for cells in counts]
    if dimensions is not None:
        designs += [Design(cells, storage="lean", dimensions=dimensions) for cells in counts]
    return [System(design, label=OWN_LABEL) for design in designs]


def own_on_backends(n: int, names: Sequence[str]) -> list[System]:
    """The same cells and router on backends whose cells can be addressed."""
    routable = [name for name in dict.fromkeys(names) if backend_class(name).routable]
    design = Design(max(2, default_count(n)))
    return [System(design, backend=name, label=OWN_LABEL) for name in routable]


def model_systems(task: Task, models: dict[str, Model]) -> list[System]:
    """Models as systems: a mapper (one key) over every number of cells, as the baseline, routed and drop-in.

    A model that scores cells belongs to the cells it was trained on.
    """
    systems = []
    for run, model in models.items():
        label = model_label(run, model)
        if model.c == 1:
            modes: tuple[Mode, ...] = ("cells", "drop-in")
            for mode in modes:
                systems += [System(plain, run=run, mode=mode, label=label) for plain in plain_designs(task)]
        else:
            systems.append(System(cells_of(task), run=run, label=label))
    return systems


def backend_systems(task: Task, names: Sequence[str], models: dict[str, Model]) -> list[System]:
    """Backends searched with x and, for every mapper, with the predicted key.

    Where cells can be addressed, models choose them too.
    """
    # One number of cells, so that all share one backend; models that score cells have the task's.
    scores_cells = any(model.c > 1 for model in models.values())
    plain = cells_of(task) if scores_cells else Design.plain(max(2, default_count(task.n)))
    systems = []
    for name in dict.fromkeys(names):
        design = plain if backend_class(name).routable else None
        systems.append(System(design, backend=name))
        for run, model in models.items():
            label = model_label(run, model)
            if model.c == 1:
                systems.append(System(design, backend=name, run=run, mode="drop-in-rescored", label=label))
            if design is not None and model.c in (1, design.cells):
                systems.append(System(design, backend=name, run=run, label=label))
    return systems


def cells_of(task: Task) -> Design:
    """The task's own cells, routed by centroids, the same number of them for every query."""
    return Design(task.c, task.query_aware, None, None, "probes", 0.0, "flat")


def plain_designs(task: Task) -> list[Design]:
    """Plain IVF over the sweep of cells, with as many as the task has, and with those it was given."""
    counts = {*sweep(task.n), *([task.c] if task.c > 1 and task.query_aware is not None else [])}
    designs = [Design.plain(cells) for cells in sorted(counts)]
    return [*designs, cells_of(task)] if task.c > 1 and task.query_aware is None else designs


def model_label(run: str, model: Model) -> str:
    """What a model is called: its kind and its run."""
    kind = {"support": "SupportNet", "key": "KeyNet"}.get(model.architecture.kind, model.architecture.kind)
    return f"{kind} {Path(run).name}"


def load_models(runs: Sequence[str | Path]) -> dict[str, Model]:
    """The models of finished runs by directory; no two may have the same name."""
    for run in runs:
        if not (Path(run) / WEIGHTS).exists():
            raise RunError(f"{run} is not a finished run: it has no {WEIGHTS}")
    models = {str(Path(run)): load_model(run) for run in runs}
    names = [Path(run).name for run in models]
    if len(set(names)) < len(names):
        raise AmipsError("two of the runs have the same directory name, which is what they are called by")
    return models
