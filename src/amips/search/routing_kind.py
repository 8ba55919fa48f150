"""What a bundle says of its router and of what was measured with it; a router of one's own is not in it."""

from pathlib import Path
from typing import Any

from amips.arguments import check_number, check_recall
from amips.errors import BundleError
from amips.nets import Model

CENTROIDS, MODEL, OWN_ROUTER = "centroids", "model", "own"
ROUTINGS = (CENTROIDS, MODEL, OWN_ROUTER)


def routing_of(model: Any) -> str:
    """By what cells are chosen, in a word of the manifest."""
    return CENTROIDS if model is None else MODEL if isinstance(model, Model) else OWN_ROUTER


def own_router(path: Path, routing: str, router: Any) -> Any:
    """The router that was brought along for the bundle at `path`; None if that needs none.

    BundleError if one is missing, if there is one too many, or if it cannot route.
    """
    if routing != OWN_ROUTER:
        if router is not None:
            raise BundleError(f"{path} has a router: load it without model=, and take another by with_model")
        return None
    if router is None:
        raise BundleError(
            f"{path} needs the router it was saved with, which it does not hold: load it with model="
        )
    if not callable(getattr(router, "scores", None)):
        raise BundleError(f"model=: a {type(router).__name__} cannot route: it has no method scores(x)")
    return router


def manifest_targets(manifest: dict[str, Any]) -> dict[str, Any]:
    """The temperature and the target recall of a manifest, checked; KeyError or BundleError otherwise."""
    target = manifest["target_recall"]
    if target is not None:
        target = check_recall(target, "target_recall", error=BundleError)
    temperature = check_number("temperature", manifest["temperature"], least=0, error=BundleError)
    return {"temperature": temperature, "target_recall": target}
