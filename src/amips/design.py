"""A design: all that an index is made of, as one value.

    Design(cells=1265, router=Linear(rank=128), spill_fraction=0.5, storage="lean", dimensions=160)

`amips.build` makes the index of a design, `amips.fit` searches over designs on held-out queries,
`amips.bench` measures them, and a bundle stores the one that it was made of. Nothing else says what an index
is.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from amips.cells import STRENGTH
from amips.errors import AmipsError, RunError
from amips.nets import KeyNet, Linear, MaxAffine, Recipe, SupportNet, spec_from_json, spec_to_json

Structure = Literal["cells"]
Storage = Literal["flat", "sq8", "pq", "lean"]
Stop = Literal["mass", "probes"]
RouterSpec = Linear | MaxAffine | SupportNet | KeyNet

OWN = "own"  # a router that was brought along: any object with `scores(x)`
LINEAR, RECIPE = Linear(), Recipe()  # frozen, so that designs can share them
SPILL_FRACTION = 0.5  # of the keys that get a second cell, where nothing else is known


@dataclass(frozen=True, repr=False)
class Design:
    """All that an index is made of.

    Args:
        cells: how many (FAISS calls it nlist).
        query_aware: how strongly cells follow the queries that want their keys, see
            `amips.cells.query_aware`; 0 is plain spherical k-means, None means cells that were given, by hand
            or by a FAISS index.
        router: what chooses cells: `Linear(rank=...)`, `MaxAffine(...)`, `SupportNet(...)`, `KeyNet(...)`;
            None for centroids; "own" for a router that was brought along.
        recipe: how the router is trained; None leaves a linear or max-affine router where training begins, at
            the centroids as the projected query sees them.
        stop: "mass" probes, for each query, the cells that are expected to hold enough of its top keys;
            "probes" the same number for all.
        spill_fraction: of the keys, that are put into a second cell, too (see `amips.search.spill`).
        storage: "flat" keeps float32 keys; "sq8" 8 bits a value, "pq" product-quantised codes, "lean" 4 bits
            a value of a projection to `dimensions`. All but the first score candidates again with float32
            keys.
        dimensions: of lean storage.
        structure: how keys are found; "cells" is the only one so far.
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

    def __post_init__(self) -> None:
        for name, known in {"storage": Storage, "stop": Stop, "structure": Structure}.items():
            if getattr(self, name) not in get_args(known):
                raise AmipsError(
                    f"{name}={getattr(self, name)!r}: expected one of {', '.join(get_args(known))}"
                )
        if type(self.cells) is not int or self.cells < 1:
            raise AmipsError(f"cells={self.cells!r}: expected a whole number, at least 1")
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            raise AmipsError(f"recipe={self.recipe!r}: expected a Recipe, or None for an untrained router")
        if self.query_aware is not None and not isinstance(self.query_aware, int | float):
            raise AmipsError(f"query_aware={self.query_aware!r}: expected a number, or None for given cells")
        if self.query_aware is not None and not 0 <= self.query_aware < math.inf:
            raise AmipsError(f"query_aware={self.query_aware}: expected a finite number, not negative")
        object.__setattr__(self, "spill_fraction", checked_fraction(self.spill_fraction))
        if self.router is not None and self.router != OWN and not isinstance(self.router, RouterSpec):
            kinds = "Linear, MaxAffine, SupportNet, KeyNet, None or 'own'"
            raise AmipsError(f"router={self.router!r}: expected {kinds}")
        if self.recipe is None and isinstance(self.router, SupportNet | KeyNet):
            raise AmipsError("recipe=None: a SupportNet or KeyNet is nothing before it is trained")
        if self.storage != "lean" and self.dimensions is not None:
            raise AmipsError("dimensions are for storage 'lean' only")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise AmipsError(f"dimensions={self.dimensions!r}: expected a whole number, at least 1")
        if not isinstance(self.router, RouterSpec):  # nothing is trained
            object.__setattr__(self, "recipe", None)

    @classmethod
    def plain(cls, cells: int, storage: Storage = "flat", dimensions: int | None = None) -> "Design":
        """Plain IVF: spherical k-means, centroids, the same probes for every query. The baseline."""
        return cls(cells, 0.0, None, None, "probes", 0.0, storage, dimensions)

    @property
    def learned(self) -> bool:
        """Whether anything in it comes from queries."""
        return self != Design.plain(self.cells, self.storage, self.dimensions)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.router, RouterSpec):
            values["router"] = spec_to_json(self.router)
        values["recipe"] = None if self.recipe is None else asdict(self.recipe)
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Design":
        """The inverse of `to_json`; raises AmipsError on anything else."""
        try:
            known = dict(values)
            if isinstance(known.get("router"), dict):
                known["router"] = spec_from_json(known["router"])
            if known.get("recipe") is not None:
                known["recipe"] = Recipe(**known["recipe"])
            return cls(**known)
        except (TypeError, KeyError, ValueError, AttributeError, RunError) as problem:
            raise AmipsError(f"not a design: {problem}") from None

    def fingerprint(self, *names: str) -> str:
        """A short digest of these fields, of all if none are named: what is cached is known by it."""
        values = self.to_json()
        chosen = {name: values[name] for name in names or values}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]

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
        """What chooses cells, and whether it was trained, in a few words."""
        if self.router is None:
            return "centroids"
        if self.router == OWN:
            return "a router of its own"
        assert isinstance(self.router, RouterSpec)
        shape = self.router
        how = "untrained" if self.recipe is None else "trained"
        if isinstance(shape, Linear | MaxAffine):
            rank = {None: "", 0: " of full rank"}.get(shape.rank, f" of rank {shape.rank}")
            pieces = f" with {shape.pieces} pieces a cell" if isinstance(shape, MaxAffine) else ""
            return f"{shape.kind} router{rank}{pieces}, {how}"
        width = f"width {shape.width}" if shape.width is not None else f"{shape.size}"
        return f"{type(shape).__name__} {width}, depth {shape.depth}, {how}"

    def describe(self) -> str:
        """In one line, for people."""
        kind = "given cells" if self.query_aware is None else "plain cells"
        if self.query_aware:
            kind = f"query-aware cells (strength {self.query_aware:g})"
        stop = (
            "as many probes as each query needs" if self.stop == "mass" else "the same probes for every query"
        )
        parts = [f"{self.cells:,} {kind}", self.router_name, stop]
        if self.spill_fraction:
            parts.append(f"{self.spill_fraction:.0%} of the keys in a second cell")
        lean = f" in {self.dimensions} dimensions" if self.dimensions is not None else ""
        return "; ".join([*parts, f"{self.storage} storage{lean}"])

    def __repr__(self) -> str:
        return f"Design({self.describe()})"


def checked_fraction(fraction: Any) -> float:
    """A fraction of the keys."""
    try:
        value = float("nan") if isinstance(fraction, (bool, str)) else float(fraction)
    except (TypeError, ValueError):
        value = float("nan")
    if not 0 <= value <= 1:
        raise AmipsError(f"spill_fraction={fraction!r}: expected a fraction of the keys, from 0 to 1")
    return value
