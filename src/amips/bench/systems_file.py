"""Systems from a TOML file: one `[[system]]` for each, a list of `cells` makes one for each number.

[[system]]                      # plain FAISS IVF: what an entry does not say is as it is here
cells = [316, 632, 1265]

[[system]]                      # what amips.fit usually makes
cells = [632, 1265]
query_aware = 1.5
router = "linear"               # or "centroid", or the directory of a trained run
rank = 128                      # of a linear router; about a quarter of the dimensions if it is left out
trained = true                  # false: the linear router stays where training begins
stop = "mass"                   # or "probes"
spill_fraction = 0.5
storage = "lean"                # "flat", "sq8", "pq"
dimensions = 160                # of lean storage; measured if it is left out
label = "amips"

[[system]]
structure = "graph"             # storage is "lean" if it is left out; "flat" or "sq8" otherwise
degree = 32
query_aware = 1                 # 0: edges of the keys alone
label = "amips graph"

[[system]]
backend = "hnsw"                # "exact", or one of amips.backends; its settings stand beside it
links = 16

[[system]]
backend = "scann"
router = "runs/keynet"          # beside this file
mode = "drop-in-rescored"       # or "cells", "drop-in"
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from amips.arguments import check_choice
from amips.bench.systems import System
from amips.design import Design, Structure
from amips.errors import AmipsError
from amips.nets import Linear, Recipe
from amips.untrusted import read_toml

CENTROID, LINEAR = "centroid", "linear"
KINDS: dict[str, tuple[type, ...]] = {
    "cells": (int,),
    "query_aware": (int, float),
    "router": (str,),
    "rank": (int,),
    "trained": (bool,),
    "stop": (str,),
    "spill_fraction": (int, float),
    "storage": (str,),
    "dimensions": (int,),
    "structure": (str,),
    "backend": (str,),
    "mode": (str,),
    "label": (str,),
}
OF_DESIGN = ("query_aware", "stop", "spill_fraction", "storage", "dimensions")


def read_systems(path: str | Path) -> list[System]:
    """Systems from a TOML file, see above."""
    entries = read_toml(Path(path), AmipsError).get("system")
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise AmipsError(f"{path} names no systems: expected at least one [[system]]")
    systems = []
    for entry in entries:
        counts = entry.pop("cells", None)
        if counts == []:
            raise AmipsError(f"{path}: cells=[]: expected at least one number")
        for cells in counts if isinstance(counts, list) else [counts]:
            values = entry if cells is None else {**entry, "cells": cells}
            systems.append(_system(values, Path(path)))
    return systems


def _system(entry: dict[str, Any], path: Path) -> System:
    settings = {name: value for name, value in entry.items() if name not in KINDS}
    degree = settings.pop("degree", None) if entry.get("structure") == "graph" else None
    if settings and "backend" not in entry:
        known = ", ".join(KINDS)
        raise AmipsError(f"{path}: {next(iter(settings))!r} is not a setting of a system; it has {known}")
    for name, kinds in KINDS.items():
        if name in entry and type(entry[name]) not in kinds:  # a bool is an int in Python, and no number here
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise AmipsError(f"{path}: {name}={entry[name]!r}: expected {expected}")
    if check_choice("structure", entry.get("structure", "cells"), Structure) == "graph":
        return _graph(entry, degree, path)
    router = entry.get("router", CENTROID)
    run = ""
    if router not in (CENTROID, LINEAR):
        run = router if Path(router).is_absolute() else str(path.parent / router)
    others = {name: entry[name] for name in ("backend", "mode", "label") if name in entry}
    return System(_design(entry, router, path), run=run, settings=tuple(settings.items()), **others)


def _graph(entry: dict[str, Any], degree: Any, path: Path) -> System:
    """A graph of amips's own; AmipsError if it is said to have what cells have."""
    known = ("structure", "query_aware", "storage", "dimensions", "label")
    if wrong := [name for name in entry if name not in (*known, "degree")]:
        raise AmipsError(f"{path}: {wrong[0]}: a graph has none")
    options: dict[str, Any] = {name: entry[name] for name in ("storage", "dimensions") if name in entry}
    options |= {} if degree is None else {"degree": degree}
    design = replace(Design.graph(**options), query_aware=entry.get("query_aware", 1))
    return System(design, label=entry.get("label", ""))


def _design(entry: dict[str, Any], router: str, path: Path) -> Design | None:
    for name in ("rank", "trained"):
        if name in entry and router != LINEAR:
            raise AmipsError(f"{path}: {name} is for router {LINEAR!r}")
    if "cells" not in entry:
        wrong = [name for name in ("rank", *OF_DESIGN) if name in entry]
        if wrong or router == LINEAR or "backend" not in entry:
            raise AmipsError(f"{path}: {wrong[0] if wrong else 'a system without a backend'} needs cells")
        return None
    options = {name: entry[name] for name in OF_DESIGN if name in entry}
    trained = router == LINEAR and entry.get("trained", True)
    plain: dict[str, Any] = {"query_aware": 0.0, "stop": "probes", "spill_fraction": 0.0, "storage": "flat"}
    plain["router"] = Linear(rank=entry.get("rank")) if router == LINEAR else None
    return Design(entry["cells"], **{**plain, "recipe": Recipe() if trained else None, **options})
