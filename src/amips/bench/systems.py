"""What is compared: an engine, its cells, a router, and the way of routing."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from amips.errors import AmipsError, RunError
from amips.index import Storage
from amips.lean import rank_for
from amips.nets import Model, load_model
from amips.nets.model import WEIGHTS
from amips.task import Task

EngineName = Literal["ivf", "flat", "hnsw"]
Way = Literal["cells", "drop-in", "drop-in-rescored"]
Stop = Literal["probes", "share"]
Role = Literal["baseline", "contender", "reference"]

SWEEP = (0.5, 1.0, 2.0, 4.0, 10.0)  # cells of the baseline, in units of sqrt(n)
CENTROID, LINEAR, OWN = "centroid", "linear", "amips"
AWARE, OWN_SWEEP = 1.5, (2.0, 4.0, 8.0)  # what `amips.fit` makes: query-aware cells, so many sqrt(n) of them,
OWN_RANK, OWN_LEAN = 1 / 3, 0.4  # ... routed and scanned in so many of the dimensions
LATER = {"aware": 0.0, "rank": 0, "stop": "probes", "lean": 0}  # fields that older results do not know


@dataclass(frozen=True)
class System:
    """One way to search.

    Args:
        engine: "ivf" (FAISS inverted file), "flat" (every key) or "hnsw" (FAISS graph).
        cells: of "ivf".
        router: "centroid", "linear" (trained by the bench on the task), or the directory of a run.
        route: "cells" lets the router choose cells and scores keys with x. "drop-in" puts the predicted
            key in the place of x throughout, as in the paper; "drop-in-rescored" then scores candidates
            with x again.
        storage: of "ivf": "flat", "sq8", "pq" or "lean"; `lean` is the latter's number of dimensions.
        aware: strength of query-aware cells; 0 is plain k-means.
        rank: of a linear router: project queries to so many dimensions first; 0 does not.
        stop: "probes" probes as many cells for every query, "share" those that are expected to hold enough of
            its top keys.
        links: of "hnsw": M.
        label: what to call its router in tables and plots.
    """

    engine: EngineName = "ivf"
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

    def __post_init__(self) -> None:
        choices = (("engine", EngineName), ("route", Way), ("storage", Storage), ("stop", Stop))
        for name, known in choices:
            if getattr(self, name) not in get_args(known):
                raise AmipsError(
                    f"system: {name}={getattr(self, name)!r} is not one of {', '.join(get_args(known))}"
                )
        if self.engine == "ivf" and self.cells < 1:
            raise AmipsError(f"system: cells={self.cells}: engine 'ivf' needs at least 1")
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
        if self.links < 2:
            raise AmipsError(f"system: links={self.links}: expected at least 2")

    @property
    def role(self) -> Role:
        """What part it plays in a comparison."""
        if self.engine != "ivf":
            return "reference"
        plain = self.router == CENTROID and self.stop == "probes" and not self.aware and not self.lean
        return "baseline" if plain else "contender"

    @property
    def family(self) -> str:
        """Its name without the number of cells: systems of one family share one Pareto front."""
        if self.engine == "flat":
            return "exact, all keys"
        if self.engine == "hnsw":
            return f"HNSW, {self.links} links"
        name = self.label or (self.router if self.router in (CENTROID, LINEAR) else Path(self.router).name)
        way = {"cells": "", "drop-in": ", drop-in", "drop-in-rescored": ", drop-in, scored again"}[self.route]
        if not self.label:
            name += f", rank {self.rank}" if self.rank else ""
            name += ", query-aware cells" if self.aware else ""
            name += ", by share" if self.stop == "share" else ""
        return name + way + ("" if self.storage == "flat" else f", {self.storage}")

    @property
    def name(self) -> str:
        """Its name in full."""
        return f"{self.family}, {self.cells:,} cells" if self.engine == "ivf" else self.family

    @property
    def slug(self) -> str:
        """A file name: readable, and different for different systems."""
        described = {**asdict(self), "label": "", "router": self._router_identity()}
        described = {name: v for name, v in described.items() if name not in LATER or v != LATER[name]}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:10]
        word = self.router if self.router in (CENTROID, LINEAR) else "model"
        parts = [self.engine, *([str(self.cells), word, self.route] if self.engine == "ivf" else [])]
        return "-".join([*parts, digest])

    @property
    def linear_name(self) -> str:
        """The directory of the linear router that the bench trains for it."""
        more = f"-rank-{self.rank}-aware-{self.aware:g}" if self.rank or self.aware else ""
        return f"linear-{self.cells}{more}"

    def _router_identity(self) -> str:
        """A run is what its weights are, wherever it is kept."""
        if self.engine != "ivf" or self.router in (CENTROID, LINEAR):
            return self.router
        weights = Path(self.router) / WEIGHTS
        if not weights.exists():
            raise RunError(f"{self.router} is not a finished run: it has no {WEIGHTS}")
        return hashlib.sha256(weights.read_bytes()).hexdigest()


def sweep(n: int) -> list[int]:
    """Numbers of cells from sqrt(n) / 2 to 10 sqrt(n), none with fewer than two keys a cell."""
    return sorted({min(max(2, round(factor * math.sqrt(n))), max(2, n // 2)) for factor in SWEEP})


def default_systems(task: Task, models: "dict[str, Model]") -> list[System]:
    """What an expert would ask for: plain IVF over a sweep of cells, amips's own, the models, references."""
    plain = [System(cells=c) for c in _counts(task)]
    own = own_systems(task.n, task.d)
    return [*plain, *own, *model_systems(task, models), System(engine="flat"), System(engine="hnsw")]


def own_systems(n: int, d: int) -> list[System]:
    """What `amips.fit` chooses from, with float32 keys and with lean storage."""
    counts = sorted({min(max(2, round(factor * math.sqrt(n))), max(2, n // 8)) for factor in OWN_SWEEP})
    rank = rank_for(d, OWN_RANK)
    common: dict[str, Any] = {"router": LINEAR, "aware": AWARE, "rank": rank, "stop": "share", "label": OWN}
    kept: list[dict[str, Any]] = [{}, {"storage": "lean", "lean": rank_for(d, OWN_LEAN)}]
    return [System(cells=c, **common, **how) for how in kept for c in counts]


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


def _counts(task: Task) -> list[int]:
    return sorted({*sweep(task.n), *([task.c] if task.c > 1 else [])})


def model_label(run: str, model: Model) -> str:
    """What a model is called: its kind and its run."""
    kind = {"support": "SupportNet", "key": "KeyNet"}.get(model.architecture.kind, model.architecture.kind)
    return f"{kind} {Path(run).name}"


def load_models(runs: "list[str | Path] | tuple[str | Path, ...]") -> "dict[str, Model]":
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
