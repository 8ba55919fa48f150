"""What is compared: an index that amips builds of a design, or another library's, and how a model is used."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from amips.backends import BACKENDS, backend_class
from amips.design import OWN, Design
from amips.errors import AmipsError, RunError
from amips.nets import WEIGHTS

Mode = Literal["cells", "drop-in", "drop-in-rescored"]
Role = Literal["baseline", "contender", "reference"]

EXACT = "exact"  # every key is scored
MODE_SUFFIXES = {"cells": "", "drop-in": ", drop-in", "drop-in-rescored": ", drop-in, scored again"}
SLUG_DIGEST = 10


@dataclass(frozen=True)
class System:
    """One way to search.

        System(Design.plain(632))                               # FAISS IVF: the baseline
        System(Design(1265))                                    # amips's own
        System(Design.graph())                                  # ... along the edges of a graph
        System(Design.plain(632), run=RUN, mode="drop-in")      # a trained model on plain cells
        System(backend="hnsw", settings=(("links", 16),))       # another library's index, searched with x
        System(backend="scann", run=RUN, mode="drop-in-rescored")
        System(Design(1265), backend="pgvector")                # a database, in cells that a design chooses
        System(backend="exact")                                 # every key

    Args:
        design: what amips builds. With a backend: the cells that the backend keeps its keys in, and the
            router that chooses among them (with `router=None` the backend searches by itself); its storage
            and second cells do not apply there, and are set to none.
        backend: another library's index: "exact", or one of `amips.backends.BACKENDS`.
        run: directory of a trained model, which is used in place of the design's router.
        mode: how a model is used. "cells": it chooses cells, and x scores the keys. "drop-in": the predicted
            key takes the place of x throughout, as in the paper. "drop-in-rescored": the same, and candidates
            are then scored with x.
        settings: of the backend, (name, value) each; the backend's own defaults otherwise.
        label: what to call its router in tables and plots.
    """

    design: Design | None = None
    backend: str | None = None
    run: str = ""
    mode: Mode = "cells"
    settings: tuple[tuple[str, Any], ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise AmipsError(f"system: mode={self.mode!r}: expected one of {', '.join(get_args(Mode))}")
        object.__setattr__(self, "settings", tuple(sorted((str(k), v) for k, v in self.settings)))
        if self.backend is None:
            self._check_cells()
        else:
            self._check_backend(self.backend)
        if self.mode != "cells" and not self.run:
            raise AmipsError(f"system: mode={self.mode!r} needs a run whose model predicts one key")
        if self.mode != "cells" and self.design is not None and self.design.stop == "mass":
            raise AmipsError(f"system: mode={self.mode!r} needs a design with stop='probes'")
        self._normalize()

    def _check_cells(self) -> None:
        if self.design is None:
            raise AmipsError("system: give a design, a backend, or both")
        if self.design.memory:
            raise AmipsError("system: a bench asks every query once: give a design without a memory")
        if self.run and self.graph:
            raise AmipsError("system: a graph has no cells that a model could choose: leave the run out")
        if self.settings:
            raise AmipsError(f"system: {self.settings[0][0]} is a setting of a backend, and there is none")
        if self.design.router == OWN and not self.run:
            raise AmipsError("system: a design with a router of its own needs the run of one")

    def _check_backend(self, name: str) -> None:
        if name == EXACT:
            if self.design is not None or self.run or self.settings:
                raise AmipsError("system: backend 'exact' scores every key: it has no design, run, settings")
            return
        kind = backend_class(name)  # refuses an unknown name
        if self.graph:
            raise AmipsError("system: a graph is amips's own: give the design or the backend")
        if self.design is not None and not kind.routable:
            raise AmipsError(f"system: the cells of {kind.title} cannot be addressed: leave the design out")
        if self.run and self.mode == "cells" and self.design is None:
            modes = "'drop-in' or 'drop-in-rescored'"
            modes += " or, with a design, 'cells'" if kind.routable else ""
            raise AmipsError(f"system: mode={self.mode!r}: a model on backend {name!r} can have {modes}")

    def _normalize(self) -> None:
        """What does not apply is set to one value, so that systems that are the same are equal."""
        design = self.design
        if design is None:
            return
        if self.run:
            design = replace(design, router="own", recipe=None)
        if self.backend is not None:
            design = replace(design, storage="flat", dimensions=None, spill_fraction=0.0)
            if not self.run and design.router is None:  # it searches by itself: nothing of ours stops it
                design = replace(design, stop="probes")
        object.__setattr__(self, "design", design)

    @property
    def cells(self) -> int:
        """How many cells it has that are chosen among; 0 if it has none, as a graph."""
        return 0 if self.design is None or self.graph else self.design.cells

    @property
    def routed(self) -> bool:
        """Whether amips chooses cells; otherwise a backend searches by itself."""
        if self.design is None:
            return False
        return self.backend is None or (self.mode == "cells" and self.design.router is not None)

    @property
    def graph(self) -> bool:
        """Whether it walks a graph of amips's own."""
        return self.design is not None and self.design.structure == "graph"

    @property
    def learns(self) -> bool:
        """Whether it may learn from the training queries; otherwise it knows only the keys."""
        if self.run:
            return True
        if self.backend not in (None, EXACT):
            return backend_class(str(self.backend)).learns or self.routed
        return self.design is not None and (self.design.learned or self.design.storage == "lean")

    @property
    def role(self) -> Role:
        """What part it plays in a comparison."""
        if self.backend is not None:
            return "contender" if self.run or self.routed else "reference"
        design = self.design
        assert design is not None
        plain = not self.run and design.router is None and not design.query_aware
        plain = plain and design.stop == "probes" and not design.spill_fraction and design.storage != "lean"
        return "baseline" if plain else "contender"

    @property
    def host(self) -> str | None:
        """For a contender on a backend: the family of that backend searched with x."""
        return self._backend_title if self.backend is not None and self.role == "contender" else None

    @property
    def family(self) -> str:
        """Its name without the number of cells: systems of one family share one Pareto front."""
        if self.role == "reference":
            return self._backend_title
        name = (self.label or self._router_title) + MODE_SUFFIXES[self.mode]
        if self.backend is not None:
            return f"{self._backend_title}: {name}"
        assert self.design is not None
        if self.graph and not self.label:
            name = f"graph of degree {self.design.degree}" + (", learned" if self.design.query_aware else "")
        return name + ("" if self.design.storage == "flat" else f", {self.design.storage}")

    @property
    def _router_title(self) -> str:
        """What chooses cells, and what differs from plain cells probed as often for every query."""
        design, name = self.design, Path(self.run).name
        if design is None:
            return name
        if not self.run:
            name = "centroid" if design.router is None else design.router_name
        name += ", query-aware cells" if design.query_aware else ""
        name += ", by mass" if design.stop == "mass" else ""
        return name + (f", {design.spill_fraction:.0%} in two cells" if design.spill_fraction else "")

    @property
    def _backend_title(self) -> str:
        if self.backend == EXACT:
            return "exact, all keys"
        assert self.backend is not None
        return ", ".join([backend_class(self.backend).title, *(f"{name} {v}" for name, v in self.settings)])

    @property
    def name(self) -> str:
        """Its name in full."""
        return f"{self.family}, {self.cells:,} cells" if self.routed and self.cells else self.family

    @property
    def slug(self) -> str:
        """A file name: readable, and different for different systems. A run is what its weights are."""
        described = {**self.to_json(), "label": "", "run": self._run_identity()}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:SLUG_DIGEST]
        structure = "cells" if self.design is None else self.design.structure
        words = [self.backend or structure, *([] if self.design is None else [str(self.design.cells)])]
        if self.run:
            words += ["model", self.mode]
        elif self.routed and self.design is not None:
            words.append(getattr(self.design.router, "kind", "centroid"))
        return "-".join([*words, digest])

    def _run_identity(self) -> str:
        if not self.run:
            return ""
        weights = Path(self.run) / WEIGHTS
        if not weights.exists():
            raise RunError(f"{self.run} is not a finished run: it has no {WEIGHTS}")
        return hashlib.sha256(weights.read_bytes()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "design": None if self.design is None else self.design.to_json(),
            "backend": self.backend,
            "run": self.run,
            "mode": self.mode,
            "settings": dict(self.settings),
            "label": self.label,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "System":
        """The inverse of `to_json`; raises AmipsError on anything else."""
        try:
            known = dict(values)
            design = known.pop("design")
            settings = tuple(known.pop("settings").items())
            return cls(None if design is None else Design.from_json(design), settings=settings, **known)
        except (TypeError, KeyError, ValueError, AttributeError) as problem:
            raise AmipsError(f"not a system: {problem}") from None


def searches_by_itself(system: System) -> bool:
    """Whether a backend of `amips.backends` chooses where to look."""
    return system.backend in BACKENDS and not system.routed
