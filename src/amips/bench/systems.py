"""What is compared: an engine, its cells, a router, and the way of routing."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from amips.backends import BACKENDS, backend_class
from amips.cells import STRENGTH
from amips.errors import AmipsError, RunError
from amips.index import Storage
from amips.lean import RANK_FRACTION, SCAN_FRACTION, reduced_dimension
from amips.nets import Model, load_model
from amips.nets.model import WEIGHTS
from amips.search.spill import SPILL, checked_fraction
from amips.task import Task

Way = Literal["cells", "drop-in", "drop-in-rescored"]
Stop = Literal["probes", "share"]
Role = Literal["baseline", "contender", "reference"]

SWEEP = (0.5, 1.0, 2.0, 4.0, 10.0)  # cells of the baseline, in units of sqrt(n)
CENTROID, LINEAR, OWN = "centroid", "linear", "amips"
OWN_SWEEP = (2.0, 4.0, 8.0)  # cells of what `amips.fit` usually makes, in units of sqrt(n)
# Fields that older results do not know.
LATER = {"aware": 0.0, "rank": 0, "stop": "probes", "lean": 0, "spill": 0.0}
SLUG_DIGEST = 10
ENGINE_NAMES = ("ivf", "flat", *BACKENDS)
CELLS_OF_ENGINES = 4.0  # where cells can be addressed, in units of sqrt(n)


@dataclass(frozen=True)
class System:
    """One way to search.

    Args:
        engine: "ivf" (FAISS inverted file), "flat" (every key), or one of `amips.backends`, which searches by
            itself: "hnsw", "scann", ... Such an engine is given x if `router` is "centroid".
        cells: of "ivf", and of engines whose cells can be addressed.
        router: "centroid", "linear" (trained by the bench on the task), or the directory of a run.
        route: "cells" lets the router choose cells and scores keys with x. "drop-in" puts the predicted
            key in the place of x throughout, as in the paper; "drop-in-rescored" then scores candidates
            with x again.
        storage: of "ivf": "flat", "sq8", "pq" or "lean"; `lean` is the latter's number of dimensions.
        aware: strength of query-aware cells; 0 is plain k-means.
        rank: of a linear router: project queries to so many dimensions first; 0 does not.
        spill: share of the keys that are in a second cell, too.
        stop: "probes" probes as many cells for every query, "share" those that are expected to hold enough of
            its top keys.
        links: of "hnsw": M.
        label: what to call its router in tables and plots.
    """

    engine: str = "ivf"
    cells: int = 0
    router: str = CENTROID
    route: Way = "cells"
    storage: Storage = "flat"
    links: int = 32
    label: str = ""
    aware: float = 0.0
    rank: int = 0
    stop: Stop = "probes"
    lean: int = 0
    spill: float = 0.0

    def __post_init__(self) -> None:
        choices = {"route": get_args(Way), "storage": get_args(Storage), "stop": get_args(Stop)}
        for name, known in {"engine": ENGINE_NAMES, **choices}.items():
            if getattr(self, name) not in known:
                raise AmipsError(f"system: {name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.engine in BACKENDS and self.router != CENTROID:
            can = backend_class(self.engine).celled
            if self.route == "drop-in" or (self.route == "cells" and not can):
                ways = "'drop-in-rescored'" + (" or 'cells'" if can else "")
                raise AmipsError(f"system: route={self.route!r}: engine {self.engine!r} can have {ways}")
        if self.cells < 1 and self.routed:
            raise AmipsError(f"system: cells={self.cells}: engine {self.engine!r} needs at least 1")
        if self.route != "cells" and self.router in (CENTROID, LINEAR):
            raise AmipsError(f"system: route={self.route!r} needs a run whose model predicts one key")
        if self.rank and self.router != LINEAR:
            raise AmipsError(f"system: rank={self.rank} is for router 'linear'")
        if self.stop == "share" and self.route != "cells":
            raise AmipsError("system: stop='share' is for route 'cells'")
        if self.rank < 0 or not 0 <= self.aware < math.inf:
            wrong = f"rank={self.rank}" if self.rank < 0 else f"aware={self.aware}"
            raise AmipsError(f"system: {wrong}: expected a finite number, not negative")
        if (self.storage == "lean") != (self.lean > 0):
            raise AmipsError("system: storage 'lean' has a number of dimensions, lean; others have none")
        if checked_fraction(self.spill) and self.engine != "ivf":
            raise AmipsError("system: spill is for engine 'ivf'")
        if self.links < 2:
            raise AmipsError(f"system: links={self.links}: expected at least 2")

    @property
    def role(self) -> Role:
        """What part it plays in a comparison."""
        if self.router != CENTROID and self.engine != "flat":
            return "contender"
        if self.engine != "ivf":
            return "reference"
        plain = self.stop == "probes" and not self.aware and not self.lean and not self.spill
        return "baseline" if plain else "contender"

    @property
    def routed(self) -> bool:
        """Whether cells are chosen and scanned; otherwise an engine searches by itself."""
        return self.engine == "ivf" or (
            self.engine in BACKENDS and self.router != CENTROID and self.route == "cells"
        )

    @property
    def host(self) -> str | None:
        """For a contender on an engine of its own: the family of that engine searched with x."""
        if self.engine == "ivf" or self.role != "contender":
            return None
        return self._engine_title

    @property
    def family(self) -> str:
        """Its name without the number of cells: systems of one family share one Pareto front."""
        if self.engine == "flat":
            return "exact, all keys"
        if self.role == "reference":
            return self._engine_title
        name = self.label or (self.router if self.router in (CENTROID, LINEAR) else Path(self.router).name)
        way = {"cells": "", "drop-in": ", drop-in", "drop-in-rescored": ", drop-in, scored again"}[self.route]
        if not self.label:
            name += f", rank {self.rank}" if self.rank else ""
            name += ", query-aware cells" if self.aware else ""
            name += ", by share" if self.stop == "share" else ""
            name += f", {self.spill:.0%} spilled" if self.spill else ""
        on = "" if self.engine == "ivf" else f"{self._engine_title}: "
        return on + name + way + ("" if self.storage == "flat" else f", {self.storage}")

    @property
    def _engine_title(self) -> str:
        title = backend_class(self.engine).title
        return f"{title}, {self.links} links" if self.engine == "hnsw" else title

    @property
    def name(self) -> str:
        """Its name in full."""
        return f"{self.family}, {self.cells:,} cells" if self.routed else self.family

    @property
    def slug(self) -> str:
        """A file name: readable, and different for different systems."""
        described = {**asdict(self), "label": "", "router": self._router_identity()}
        described = {name: v for name, v in described.items() if name not in LATER or v != LATER[name]}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:SLUG_DIGEST]
        word = self.router if self.router in (CENTROID, LINEAR) else "model"
        parts = [self.engine, *([str(self.cells), word, self.route] if self.role != "reference" else [])]
        return "-".join([*parts, digest])

    @property
    def linear_name(self) -> str:
        """The directory of the linear router that the bench trains for it."""
        more = f"-rank-{self.rank}-aware-{self.aware:g}" if self.rank or self.aware else ""
        return f"linear-{self.cells}{more}"

    def _router_identity(self) -> str:
        """A run is what its weights are, wherever it is kept."""
        if self.engine == "flat" or self.router in (CENTROID, LINEAR):
            return self.router
        weights = Path(self.router) / WEIGHTS
        if not weights.exists():
            raise RunError(f"{self.router} is not a finished run: it has no {WEIGHTS}")
        return hashlib.sha256(weights.read_bytes()).hexdigest()


def sweep(n: int, factors: Sequence[float] = SWEEP) -> list[int]:
    """Numbers of cells, by default from sqrt(n) / 2 to 10 sqrt(n), none with fewer than two keys a cell."""
    return sorted({min(max(2, round(factor * math.sqrt(n))), max(2, n // 2)) for factor in factors})


def default_systems(task: Task, models: "dict[str, Model]") -> list[System]:
    """What an expert would ask for: plain IVF over a sweep of cells, amips's own, the models, references."""
    plain = [System(cells=c) for c in _counts(task)]
    own = own_systems(task.n, task.d)
    return [*plain, *own, *model_systems(task, models), System(engine="flat"), System(engine="hnsw")]


def own_systems(n: int, d: int, factors: tuple[float, ...] = OWN_SWEEP) -> list[System]:
    """What `amips.fit` usually makes, with float32 keys and with lean storage; factors x sqrt(n) cells.

    Half of the keys are in a second cell, too, which `fit` does where it pays.
    """
    counts = sorted({_own_cells(n, factor) for factor in factors})
    kept: list[dict[str, Any]] = [{}, {"storage": "lean", "lean": reduced_dimension(d, SCAN_FRACTION)}]
    return [System(cells=c, **_own(d), spill=SPILL, **how) for how in kept for c in counts]


def own_on_engines(n: int, d: int, names: "Sequence[str]") -> list[System]:
    """The same cells and router on engines whose cells can be addressed."""
    celled = [name for name in dict.fromkeys(names) if backend_class(name).celled]
    return [System(engine=name, cells=_own_cells(n, CELLS_OF_ENGINES), **_own(d)) for name in celled]


def _own(d: int) -> dict[str, Any]:
    rank = reduced_dimension(d, RANK_FRACTION)
    return {"router": LINEAR, "aware": STRENGTH, "rank": rank, "stop": "share", "label": OWN}


def _own_cells(n: int, factor: float) -> int:
    return min(max(2, round(factor * math.sqrt(n))), max(2, n // 8))


def model_systems(task: Task, models: "dict[str, Model]") -> list[System]:
    """Models as systems: a mapper (one key) over every number of cells, as the baseline, routed and drop-in.

    A model that scores cells belongs to the cells it was trained on.
    """
    systems = []
    for run, model in models.items():
        label = model_label(run, model)
        if model.c == 1:
            ways: tuple[Way, ...] = ("cells", "drop-in")
            systems += [
                System(cells=c, router=run, route=way, label=label) for way in ways for c in _counts(task)
            ]
        else:
            systems.append(System(cells=model.c, router=run, label=label))
    return systems


def engine_systems(task: Task, names: "Sequence[str]", models: "dict[str, Model]") -> list[System]:
    """Engines searched with x and, for every mapper, with the predicted key.

    Where cells can be addressed, models choose them too.
    """
    systems = []
    for name in dict.fromkeys(names):
        celled = backend_class(name).celled
        # One number of cells, so that all share one engine; models that score cells have the task's.
        own = task.c if any(model.c > 1 for model in models.values()) else 0
        cells = min(own or max(2, round(CELLS_OF_ENGINES * task.n**0.5)), task.n) if celled else 0
        systems.append(System(engine=name, cells=cells))
        for run, model in models.items():
            label = model_label(run, model)
            if model.c == 1:
                systems.append(
                    System(engine=name, cells=cells, router=run, route="drop-in-rescored", label=label)
                )
            if celled and model.c in (1, cells):
                systems.append(System(engine=name, cells=cells, router=run, label=label))
    return systems


def _counts(task: Task) -> list[int]:
    return sorted({*sweep(task.n), *([task.c] if task.c > 1 else [])})


def model_label(run: str, model: Model) -> str:
    """What a model is called: its kind and its run."""
    kind = {"support": "SupportNet", "key": "KeyNet"}.get(model.architecture.kind, model.architecture.kind)
    return f"{kind} {Path(run).name}"


def load_models(runs: "Sequence[str | Path]") -> "dict[str, Model]":
    """The models of finished runs by directory; no two may have the same name."""
    for run in runs:
        if not (Path(run) / WEIGHTS).exists():
            raise RunError(f"{run} is not a finished run: it has no {WEIGHTS}")
    models = {str(Path(run)): load_model(run) for run in runs}
    names = [Path(run).name for run in models]
    if len(set(names)) < len(names):
        raise AmipsError("two of the runs have the same directory name, which is what they are called by")
    return models


def read_systems(path: str | Path) -> list[System]:
    """Systems from a TOML file: one `[[system]]` for each; a list of `cells` makes one for each number."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
    try:
        entries = tomllib.loads(Path(path).read_text("utf-8")).get("system")
    except FileNotFoundError:
        raise AmipsError(f"{path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise AmipsError(f"{path} is not TOML: {problem}") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise AmipsError(f"{path} names no systems: expected at least one [[system]]")
    systems = []
    for entry in entries:
        counts = entry.get("cells", 0)
        for cells in counts if isinstance(counts, list) else [counts]:
            systems.append(_system({**entry, "cells": cells}, Path(path)))
        if counts == []:
            raise AmipsError(f"{path}: cells=[]: expected at least one number")
    return systems


def _system(entry: dict[str, Any], path: Path) -> System:
    kinds = {field.name: type(field.default) for field in fields(System)}
    for name, value in entry.items():
        if name not in kinds:
            raise AmipsError(f"{path}: {name!r} is not a setting of a system; it has {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise AmipsError(f"{path}: {name}={value!r}: expected {kinds[name].__name__}")
    router = entry.get("router", CENTROID)
    if router not in (CENTROID, LINEAR) and not Path(router).is_absolute():
        entry["router"] = str(path.parent / router)  # beside the file that names it
    return System(**entry)
