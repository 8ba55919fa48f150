"""What a service can serve: a bundle, a directory of shards, another object with a `search`."""

import inspect
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from amips.errors import BundleError
from amips.search import Index, load, read_bundle
from amips.serving.limits import Settings
from amips.serving.refusals import BAD_REQUEST, Refused
from amips.sharding import EFFORT, ShardedIndex, is_sharded, load_shards, refuse_options


def check_place(settings: Settings) -> None:
    """BundleError if there is nothing to serve; quick, as nothing is loaded."""
    if not is_sharded(settings.bundle):
        read_bundle(settings.bundle, verify=False)


def open_place(settings: Settings) -> Any:
    """The index of a bundle or of shards; BundleError if an option is not of what there is."""
    options: dict[str, Any] = {"trusted": list(settings.trusted) or None, "index": settings.index}
    if is_sharded(settings.bundle):
        refuse_options(settings.bundle, {**options, "encoder": settings.encoder})
        return load_shards(settings.bundle, mmap=settings.mmap, partial=settings.partial)
    if settings.partial:
        raise BundleError(f"--partial is of shards; {settings.bundle} is not in shards: leave it out")
    return load(settings.bundle, mmap=settings.mmap, **options)


def check_options(index: Any, options: Iterable[str]) -> None:
    """`Refused` if an option of a request is none that this index can have."""
    if isinstance(index, ShardedIndex):
        known: frozenset[str] | None = frozenset(EFFORT)
    else:
        known = _arguments(index.__class__)
    if known is not None and (others := set(options) - known - {"k"}):
        kind = "is in shards, which" if isinstance(index, ShardedIndex) else f"({type(index).__name__})"
        raise Refused(BAD_REQUEST, f"{min(others)}: this index {kind} cannot have that")


@lru_cache(16)
def _arguments(kind: type) -> frozenset[str] | None:
    """Of the `search` of a class; None if it takes any."""
    parameters = inspect.signature(kind.search).parameters  # type: ignore[attr-defined]
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return None if takes_any else frozenset(parameters)


def index_facts(index: Any) -> dict[str, Any]:
    """What a client may want to know of an index, beside its size."""
    if isinstance(index, ShardedIndex):
        return {
            "ids": "strings" if index.id_type.kind == "U" else "whole numbers",
            "shards": {
                "sizes": index.sizes.tolist(),
                "router": index.router.name,
                "missing": sorted(index.absent),
            },
        }
    if not isinstance(index, Index):
        return {}
    design, attributes = index.snapshot.design, index.snapshot.attributes
    return {
        "design": None if design is None else design.describe(),
        "ids": "strings" if index.has_string_ids else "whole numbers",
        "attributes": {name: str(kind) for name, kind in ([] if attributes is None else attributes.columns)},
        "advice": index.growth,
        "adapted": index.adaptation is not None,
    }
