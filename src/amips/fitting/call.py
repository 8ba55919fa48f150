"""The shortest way in: keys and queries to a bundle, in one call."""

import hashlib
import json
import math
import operator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from amips.design import Storage, checked_fraction
from amips.errors import AmipsError, VectorError
from amips.extras import needs_extra
from amips.files import temporary_directory
from amips.fitting.fitting import Fitting
from amips.fitting.settings import Objective, Settings
from amips.index import FEWEST_KEYS
from amips.search import Searcher, check_bundle_place, check_labels, save
from amips.vectors import inspect, open_vectors


def fit(
    keys: Any,
    queries: Any,
    *,
    out: str | Path | None = None,
    minutes: float = 5.0,
    cells: int | None = None,
    recall: float = 0.95,
    objective: Objective = "flops",
    storage: Storage | None = None,
    spill_fraction: float | None = None,
    ids: Any = None,
    seed: int = 0,
    quiet: bool = False,
) -> Searcher:
    """From keys and queries to an index that is cheaper to search than plain IVF, in about the minutes given.

    Labels the queries; searches over designs (numbers of cells, plain and query-aware; the router trained or
    not; second cells; float32 or lean storage) by their cost on held-out queries; builds the best and keeps
    the cheapest. What was gained over plain IVF is measured on other queries, printed, and kept as
    `index.report`. If nothing was, the index is plain IVF. `index.search(x)` then serves the recall asked for
    here.

    Work in progress is kept in `OUT.work`, reused when the same call is made again and removed at its end;
    what a call left there that is not made again may be deleted.

    Args:
        keys, queries: arrays or files, see `amips.vectors.open_vectors`.
        out: the bundle directory; None keeps the index in memory.
        minutes: how long it may take, roughly. With little time, part of the queries is used.
        cells: how many cells; several numbers are tried when not given.
        recall: the recall@10 at which cost is to be least.
        objective: what decides between the best designs: "flops", or the measured time of a query alone
            ("latency") or among many ("throughput").
        storage: "flat", "sq8", "pq" or "lean"; the cheaper of "flat" and "lean" when not given.
        spill_fraction: of the keys, that are put into a second cell, too; what pays when not given, 0 for
            none.
        ids: what to return for each key instead of 0..n-1.
        quiet: print nothing.
    """
    if not 0 < minutes < math.inf:
        raise AmipsError(f"minutes={minutes}: must be positive and finite")
    if not 0 < recall < 1:
        raise AmipsError(f"recall={recall}: expected a share between 0 and 1")
    for what, value, known in (("objective", objective, Objective), ("storage", storage, Storage)):
        if value is not None and value not in get_args(known):
            raise AmipsError(f"{what}={value!r}: expected one of {', '.join(get_args(known))}")
    spill_fraction = None if spill_fraction is None else checked_fraction(spill_fraction)
    if seed < 0:
        raise AmipsError(f"seed={seed}: must not be negative")
    try:
        cells = None if cells is None else operator.index(cells)
    except TypeError:
        raise AmipsError(f"cells={cells!r}: expected a whole number") from None
    if cells == 1:
        raise AmipsError("cells=1: a router needs cells to choose from; give 2 or more")
    if out is not None:
        check_bundle_place(out)  # before the work, not after it
    with needs_extra("amips.fit", "train", "torch"):
        import amips.learn  # noqa: F401
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    if cells is not None and not 2 <= cells <= keys.n:
        raise VectorError(f"cells={cells}: the number of cells must be between 2 and the {keys.n} keys")
    if storage in FEWEST_KEYS and keys.n < FEWEST_KEYS[storage]:
        few = f"storage={storage!r} needs at least {FEWEST_KEYS[storage]} keys, got {keys.n}"
        raise AmipsError(f"{few}; use 'flat' or 'sq8'")
    labels = None if ids is None else check_labels(ids, keys.n)
    settings = Settings(float(minutes), cells, float(recall), objective, storage, spill_fraction, int(seed))
    call = {"keys": inspect(keys).fingerprint, "queries": inspect(queries).fingerprint, **asdict(settings)}
    # A folder for each call: the same call continues, another neither waits for it nor destroys it.
    name = hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()[:12]
    if out is None:
        work = temporary_directory("amips-fit-")
    else:
        out = Path(out).resolve()
        work = out.with_name(out.name + ".work")
    fitting = Fitting(work / name, settings, quiet)
    index = replace(fitting.run(keys, queries), labels=labels)
    if out is not None:
        save(index, out)
        fitting.remove()
        fitting.say(f"saved {out}")
    return index
