"""Backends (ScaNN, pgvector, ...): what a model gains over the same backend searched with x."""

from amips.bench.derive import AXES, Bootstrap, Family, Metric
from amips.bench.summary import Table
from amips.bench.verdict import TARGETS


def pairs(tested: list[Family]) -> list[tuple[Family, Family]]:
    """(the backend searched with x, the same backend with a model), for every one that was run with both."""
    named = {family.name: family for family in tested}
    return [(named[f.host], f) for f in tested if f.host is not None and f.host in named]


def gain_tables(compared: list[tuple[Family, Family]], bootstrap: Bootstrap, batch: int) -> list[Table]:
    """How many times less a model costs than x on the same backend, for `pairs`; none if there are none."""
    rows = []
    for metric, target in TARGETS:
        for base, ours in compared:
            rows.append(ratio_row(bootstrap, base, ours, metric, target))
    if not rows:
        return []
    note = (
        "How many times less than the same backend searched with x: above 1 is a gain. In brackets the 95 % "
        "interval, where it is known; - where one does not reach the recall; not told where the backend does "
        "not say what it looked at: then there is only time; not taken where one thread is all there is. "
        "Databases have threads of their own, whatever the column says."
    )
    return [Table("Backends: a model against x", ratio_head("backend: model", batch), rows, note)]


def ratio_head(what: str, batch: int) -> list[str]:
    """The head of a table of `ratio_row`s; `what` is compared."""
    times = ["time: batch 1, 1 thread", "batch 1, all", f"batch {batch:,}, 1 thread", f"batch {batch:,}, all"]
    return ["recall", what, "FLOPs", "keys scanned", *times]


def ratio_row(bootstrap: Bootstrap, base: Family, ours: Family, metric: Metric, target: float) -> list[str]:
    """How many times less `ours` costs than `base` at a recall, on every axis."""
    cells = []
    for axis in AXES:
        ratio = bootstrap.ratio(base, ours, axis, metric, target)
        unknown = "not told" if axis in ("flops", "scanned") else "not taken"
        text = "-" if ratio is None else str(ratio)
        cells.append(text if base.knows(axis) and ours.knows(axis) else unknown)
    return [f"{metric} {target:.2f}", ours.name, *cells]


def silent_sentences(compared: list[tuple[Family, Family]]) -> list[str]:
    """Which backends do not tell what they looked at; nothing if all do."""
    silent = dict.fromkeys(base.name for base, _ in compared if not base.knows("flops"))
    known = "FLOPs and keys scanned are not told; there is only time."
    return [f"{', '.join(silent)}: {known}"] if silent else []
