"""What committed results did otherwise than the experiments do today; their pages say so until they are run
again."""

from typing import Any

from amips.bench import Summary

FEW_KEYS = (
    "This run is of before k-means learned from all keys: its cells were made from 256 keys each, and "
    "keys lie farther from their centroids than they need to."
)
ONE_SIDED = (
    "In this run x had the best of all numbers of cells, and a prediction one index of 4 sqrt(n): its claim "
    "of a lead is about these, and not about one and the same index."
)
NO_TIMES = "This run took no times."
LACKS = {
    "routing": "Its sparse injections are none (n_x = 0); the paper's are every fourth layer.",
    "ivf": "This run has no comparison on one index at common probes (`leak` has one), and times of 10 "
    "results only.",
    "backends": "This run scored all candidates again with x. The paper's recall, of a fraction of n results "
    "as the engine returns them, was not measured.",
    "ood": NO_TIMES,
    "encoders": NO_TIMES,
    "losses": "This run summed the losses over d; averaged over d, as in the authors' code, they were not "
    "tried.",
}


def older_than(name: str, summary: Summary) -> list[str]:
    """Sentences for the page of an experiment, about what its stored run lacks; none where it is of today.

    Args:
        name: of the experiment.
    """
    # An experiment that was run under both splits has its values by split.
    sides: list[dict[str, Any]] = list(summary.values.get("splits", {}).values()) or [summary.values]
    one_sided = name == "ivf" and not any(
        "place" in one for side in sides for one in side.get("one index", {}).values()
    )
    notes = [ONE_SIDED] if one_sided else []
    notes += [FEW_KEYS] if "Cells are spherical k-means." in " ".join(summary.method) else []
    return notes + ([LACKS[name]] if any(_lacks(name, side) for side in sides) else [])


def _lacks(name: str, values: dict[str, Any]) -> bool:
    if name == "routing":
        return any(", n_x = 0" in network for network in values["samples"])
    if name == "ivf":
        return "one index" not in values
    if name == "backends":
        return "returned" not in values
    if name == "ood":
        return not all("seconds" in way for ways in values["curves"].values() for way in ways.values())
    if name == "encoders":
        return not all("seconds" in one for one in values["encoders"].values())
    return name == "losses" and not any("averaged" in network for network in values["networks"])
