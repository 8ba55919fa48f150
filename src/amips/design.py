"""A design: all that an index is made of, as one value.

    Design(cells=1265, router=Linear(rank=128), spill_fraction=0.5, storage="lean", dimensions=160)
    Design.graph(dimensions=192)

`amips.build` makes the index of a design, `amips.fit` searches over designs on held-out queries,
`amips.bench` measures them, and a bundle stores the one that it was made of. Nothing else says what an index
is.
"""

import hashlib
import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from amips.arguments import check_choice, check_flag, check_number, check_whole, refused
from amips.cells import STRENGTH
from amips.errors import AmipsError
from amips.graph import DEGREE, ENTRIES
from amips.nets import KeyNet, Linear, MaxAffine, Recipe, SupportNet, spec_from_json, spec_to_json

Structure = Literal["cells", "graph"]
Part = Literal["cells", "router", "second cells", "store", "graph"]
Storage = Literal["flat", "sq8", "pq", "lean"]
GraphStorage = Literal["flat", "sq8", "lean"]
Stop = Literal["mass", "probes", "margin"]
RouterSpec = Linear | MaxAffine | SupportNet | KeyNet

OWN = "own"  # a router that was brought along: any object with `scores(x)`
LINEAR, RECIPE = Linear(), Recipe()  # frozen, so that designs can share them
MOST_DEGREE = 1024
MEMORY, MOST_MEMORY = 64, 4096  # top keys of a logged query: what is usual, and the most
SPILL_FRACTION = 0.5  # of the keys that get a second cell, where nothing else is known

# The fields that each part of an index depends on. Second cells are where the router sends queries.
_CELLS = ("structure", "cells", "query_aware")
_ROUTER = (*_CELLS, "router", "recipe")
PARTS: dict[Part, tuple[str, ...]] = {
    "cells": _CELLS,
    "router": _ROUTER,
    "second cells": (*_ROUTER, "spill_fraction"),
    "store": (*_CELLS, "degree", "storage", "dimensions", "spill_fraction"),
    "graph": (*_CELLS, "degree", "dimensions"),
}


@dataclass(frozen=True, repr=False)
class Design:
    """All that an index is made of.

    Args:
        cells: how many (FAISS calls it nlist); of a graph, how many keys a walk may begin at.
        query_aware: how strongly cells follow the queries that want their keys, see
            `amips.cells.query_aware`; 0 is plain spherical k-means, None means cells that were given, by hand
            or by a FAISS index. Of a graph: whether edges and entry points come from the log, 1 or 0.
        router: what chooses cells: `Linear(rank=...)`, `MaxAffine(...)`, `SupportNet(...)`, `KeyNet(...)`;
            None for centroids; "own" for a router that was brought along.
        recipe: how the router is trained; None leaves a linear or max-affine router where training begins, at
            the centroids as the projected query sees them.
        stop: "mass" probes, for each query, the cells that are expected to hold enough of its top keys;
            "probes" the same number for all; "margin", of a graph, visits the keys whose scores are within a
            margin of the tenth best.
        spill_fraction: of the keys, that are put into a second cell, too (see `amips.search.spill`).
        storage: "flat" keeps float32 keys; "sq8" 8 bits a value, "pq" product-quantised codes, "lean" 4 bits
            a value of a projection to `dimensions`. All but the first score candidates again with float32
            keys.
        dimensions: of lean storage.
        structure: how keys are found: in "cells" that a router chooses, or along the edges of a "graph".
        degree: neighbours of a key in a graph; 0 for cells.
        memory: top keys that are stored for each logged query, with which the index answers queries that it
            recognises (`amips.search.memory`); 0 for no memory.
    """

    cells: int
    query_aware: float | None = STRENGTH
    router: RouterSpec | Literal["own"] | None = LINEAR
    recipe: Recipe | None = RECIPE
    stop: Stop = "mass"
    spill_fraction: float = SPILL_FRACTION
    storage: Storage = "lean"
    dimensions: int | None = None
    structure: Structure = "cells"
    degree: int = 0
    memory: int = 0

    def __post_init__(self) -> None:
        for name, choices in {"storage": Storage, "stop": Stop, "structure": Structure}.items():
            check_choice(name, getattr(self, name), choices)
        values: dict[str, Any] = {"cells": check_whole("cells", self.cells, 1)}
        if self.query_aware is not None:
            what = "None for given cells, or a number"
            values["query_aware"] = check_number("query_aware", self.query_aware, least=0, what=what)
        values["memory"] = check_whole("memory", self.memory, 0, MOST_MEMORY)
        values["spill_fraction"] = checked_fraction(self.spill_fraction)
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            raise refused("recipe", self.recipe, "a Recipe, or None for an untrained router")
        own = isinstance(self.router, str) and self.router == OWN
        if self.router is not None and not own and not isinstance(self.router, RouterSpec):
            raise refused("router", self.router, "Linear, MaxAffine, SupportNet, KeyNet, None or 'own'")
        if self.recipe is None and isinstance(self.router, SupportNet | KeyNet):
            raise AmipsError("recipe=None: a SupportNet or KeyNet is nothing before it is trained")
        if self.dimensions is not None:
            values["dimensions"] = check_whole("dimensions", self.dimensions, 1)
            if self.storage != "lean":
                raise AmipsError("dimensions are for storage 'lean' only")
        if not isinstance(self.router, RouterSpec):  # nothing is trained
            values["recipe"] = None
        self._check_structure()
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_structure(self) -> None:
        """AmipsError if a graph has what only cells can have, or the other way round."""
        check_whole("degree", self.degree, 0, MOST_DEGREE)
        if self.structure == "cells":
            if self.stop == "margin" or self.degree:
                raise AmipsError("a margin to stop by and a degree are for structure 'graph' only")
            return
        check_whole("degree", self.degree, 2, MOST_DEGREE)
        check_choice("storage", self.storage, GraphStorage)
        if self.router is not None or self.spill_fraction or self.stop != "margin":
            raise AmipsError(
                "a graph has no router and no second cells, and stops by a margin: "
                "take Design.graph(...), or router=None, spill_fraction=0, stop='margin'"
            )
        if self.query_aware not in (0, 1):
            raise refused("query_aware", self.query_aware, "1 or 0 for a graph: with the log, or without")

    @classmethod
    def graph(
        cls,
        *,
        degree: int = DEGREE,
        entries: int = ENTRIES,
        learned: bool = True,
        storage: GraphStorage = "lean",
        dimensions: int | None = None,
    ) -> "Design":
        """A graph over the keys, walked from the best of so many entries.

        Args:
            learned: whether edges and entries come from the log, or from the keys alone.
        """
        aware = 1.0 if check_flag("learned", learned) else 0.0
        check_whole("entries", entries, 1)
        return cls(entries, aware, None, None, "margin", 0.0, storage, dimensions, "graph", degree)

    @classmethod
    def plain(cls, cells: int, storage: Storage = "flat", dimensions: int | None = None) -> "Design":
        """Plain IVF: spherical k-means, centroids, the same probes for every query. The baseline."""
        return cls(cells, 0.0, None, None, "probes", 0.0, storage, dimensions)

    @property
    def learned(self) -> bool:
        """Whether anything in it comes from queries."""
        if self.structure == "graph":
            return bool(self.query_aware) or self.storage == "lean" or bool(self.memory)
        return self != Design.plain(self.cells, self.storage, self.dimensions)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.router, RouterSpec):
            values["router"] = spec_to_json(self.router)
        values["recipe"] = None if self.recipe is None else self.recipe.to_json()
        return values

    @classmethod
    def from_json(cls, values: Any) -> "Design":
        """The inverse of `to_json`; raises AmipsError on anything else. Fields left out are as by default."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or "cells" not in values:
            raise AmipsError(f"not a design: expected values of {', '.join(names)}, of cells at least")
        for name in values:
            if name not in names:
                raise AmipsError(
                    f"not a design: there is no field {name!r}; the fields are {', '.join(names)}"
                )
        parts = dict(values)
        try:
            if isinstance(parts.get("router"), dict):
                parts["router"] = spec_from_json(parts["router"])
            if parts.get("recipe") is not None:
                parts["recipe"] = Recipe.from_json(parts["recipe"])
            return cls(**parts)
        except AmipsError as problem:
            raise AmipsError(f"not a design: {problem}") from None

    def fingerprint(self, *names: str) -> str:
        """A short digest of these fields, of all if none are named: what is cached is known by it."""
        values = self.to_json()
        part = {name: values[name] for name in names or values}
        return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]

    def part(self, name: Part) -> str:
        """A short digest of what a part of the index depends on: designs that have the same can share it.

        A store, the keys by cell, depends on the router only if it has second cells.
        """
        spilled = PARTS["second cells"] if name == "store" and self.spill_fraction else ()
        return self.fingerprint(*PARTS[name], *spilled)

    def resolved(self, d: int, dimensions: int | None = None) -> "Design":
        """The same for keys of dimension d, with the router's rank and the lean dimensions as numbers."""
        router = self.router
        if isinstance(router, Linear | MaxAffine):
            router = replace(router, rank=router.rank_for(d))
        if self.storage == "lean" and self.dimensions is None:
            return replace(self, router=router, dimensions=dimensions)
        return replace(self, router=router)

    @property
    def router_name(self) -> str:
        """What chooses cells, and how it was trained, in a few words; what is as by default is left out."""
        if self.router is None:
            return "centroids"
        if isinstance(self.router, str):
            return "a router of its own"
        shape = self.router
        training = "untrained"
        if self.recipe is not None:
            training = f"trained{_in_brackets(self.recipe.differences())}"
        if isinstance(shape, Linear | MaxAffine):
            rank = {None: "", 0: " of full rank"}.get(shape.rank, f" of rank {shape.rank}")
            pieces = f" with {shape.pieces} pieces a cell" if isinstance(shape, MaxAffine) else ""
            return f"{shape.kind} router{rank}{pieces}{_rest(shape, 'rank', 'pieces')}, {training}"
        width = f"width {shape.width}" if shape.width is not None else f"{shape.size}"
        rest = _rest(shape, "width", "depth", *(["size"] if shape.width is None else []))
        return f"{type(shape).__name__} {width}, depth {shape.depth}{rest}, {training}"

    def describe(self) -> str:
        """All of it in one line, for people; of the router and its recipe, what is not as by default."""
        lean = f" in {self.dimensions} dimensions" if self.dimensions is not None else ""
        stored = f"{self.storage} storage{lean}"
        if self.memory:
            stored += f"; a memory of the log with {self.memory} top keys a query"
        if self.structure == "graph":
            source = "keys and log" if self.query_aware else "keys alone"
            begin = f"{self.cells:,} {'entry' if self.cells == 1 else 'entries'}"
            return (
                f"graph of degree {self.degree} from {source}; {begin}; as far as each query needs; {stored}"
            )
        kind = "given cells" if self.query_aware is None else "plain cells"
        if self.query_aware:
            kind = f"query-aware cells (strength {self.query_aware:g})"
        stop = (
            "as many probes as each query needs" if self.stop == "mass" else "the same probes for every query"
        )
        parts = [f"{self.cells:,} {kind}", self.router_name, stop]
        if self.spill_fraction:
            parts.append(f"{100 * self.spill_fraction:g}% of the keys in a second cell")
        return "; ".join([*parts, stored])

    def __repr__(self) -> str:
        return f"Design({self.describe()})"


def checked_fraction(fraction: Any) -> float:
    """The fraction of the keys that get a second cell, from 0 to 1; AmipsError on anything else."""
    return check_number("spill_fraction", fraction, least=0, most=1, what="a fraction of the keys")


def _rest(spec: RouterSpec, *names: str) -> str:
    """The fields of a spec that are not as by default, but for these, in brackets."""
    others = {field.name: field.default for field in fields(spec) if field.name not in names}
    values = {name: getattr(spec, name) for name in others}
    return _in_brackets({name: value for name, value in values.items() if value != others[name]})


def _in_brackets(values: dict[str, Any]) -> str:
    return f" ({', '.join(f'{name}={value}' for name, value in values.items())})" if values else ""
