"""The shortest way in: keys and queries to a bundle, in one call."""

import hashlib
import json
import math
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from amips.errors import AmipsError, VectorError
from amips.fit.fitting import Fitting
from amips.fit.partitions import Objective, Settings
from amips.index import Storage
from amips.index.filling import FEWEST_KEYS
from amips.search import Searcher, save
from amips.search.build import check_labels
from amips.search.bundle import check_place
from amips.search.spill import checked_share
from amips.vectors import inspect, open_vectors


def fit(
    keys: Any,
    queries: Any,
    *,
    out: str | Path,
    minutes: float = 5.0,
    cells: int | None = None,
    recall: float = 0.95,
    objective: Objective = "flops",
    storage: Storage | None = None,
    spill: float | None = None,
    regroup: int = 0,
    ids: Any = None,
    seed: int = 0,
    quiet: bool = False,
) -> Searcher:
    """From keys and queries to a bundle that is cheaper to search than plain IVF, in about the minutes given.

    Labels the queries; tries numbers of cells, plain and query-aware; trains a linear router for the best;
    builds the index with float32 keys and with lean storage, with second cells and without. Everything is
    chosen on held-out queries, and what was gained over plain IVF is measured on others and printed. If
    nothing was, the bundle is plain IVF. Work in progress is kept in `OUT.work`, reused when the same call is
    made again and removed at its end; what a call left there that is not made again may be deleted.

    Args:
        keys, queries: arrays or files, see `open_vectors`.
        out: the bundle directory.
        minutes: how long it may take, roughly. With little time, part of the queries is used.
        cells: how many cells; several numbers are tried when not given.
        recall: the recall@10 at which cost is to be least.
        objective: what decides: "flops", or the measured time of a query alone ("latency") or among many
            ("throughput"). For times, the partitions with the fewest FLOPs are built and timed.
        storage: "flat", "sq8", "pq" or "lean"; the cheaper of "flat" and "lean" when not given.
        spill: share of the keys that are put into a second cell, too. When not given, a tenth or half of
            them, if that pays on held-out queries; 0 for none.
        regroup: so many times move keys to the cell that their queries are sent to and train again, as long
            as that pays on held-out queries. It rarely did where it was tried.
        ids: what to return for each key instead of 0..n-1.
        quiet: print nothing.
    """
    if not 0 < minutes < math.inf:
        raise AmipsError(f"minutes={minutes}: must be positive and finite")
    if not 0 < recall < 1:
        raise AmipsError(f"recall={recall}: expected a share between 0 and 1")
    for what, given, known in (("objective", objective, Objective), ("storage", storage, Storage)):
        if given is not None and given not in get_args(known):
            raise AmipsError(f"{what}={given!r}: expected one of {', '.join(get_args(known))}")
    spill = None if spill is None else checked_share(spill)
    try:
        regroup = operator.index(regroup)
    except TypeError:
        raise AmipsError(f"regroup={regroup!r}: expected a whole number") from None
    if regroup < 0:
        raise AmipsError(f"regroup={regroup}: must not be negative")
    if seed < 0:
        raise AmipsError(f"seed={seed}: must not be negative")
    try:
        cells = None if cells is None else operator.index(cells)
    except TypeError:
        raise AmipsError(f"cells={cells!r}: expected a whole number") from None
    if cells == 1:
        raise AmipsError("cells=1: a router needs cells to choose from; give 2 or more")
    check_place(out)  # before the work, not after it
    try:
        import amips.learn  # noqa: F401
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        raise AmipsError("amips.fit needs torch; pip install 'amips[train]'") from None
    keys, queries = open_vectors(keys, "keys"), open_vectors(queries, "queries")
    if keys.d != queries.d:
        raise VectorError(f"keys have dimension {keys.d} but queries have dimension {queries.d}")
    if cells is not None and not 2 <= cells <= keys.n:
        raise VectorError(f"cells={cells}: the number of cells must be between 2 and the {keys.n} keys")
    if storage in FEWEST_KEYS and keys.n < FEWEST_KEYS[storage]:
        few = f"storage={storage!r} needs at least {FEWEST_KEYS[storage]} keys, got {keys.n}"
        raise AmipsError(f"{few}; use 'flat' or 'sq8'")
    labels = None if ids is None else check_labels(ids, keys.n)
    settings = Settings(float(minutes), cells, float(recall), objective, storage, spill, regroup, int(seed))
    call = {"keys": inspect(keys).fingerprint, "queries": inspect(queries).fingerprint, **vars(settings)}
    # A folder for each call: the same call continues, another neither waits for it nor destroys it.
    name = hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()[:12]
    out = Path(out).resolve()
    fitting = Fitting(out.with_name(out.name + ".work") / name, settings, quiet)
    made = replace(fitting.run(keys, queries), labels=labels)
    save(made, out)
    fitting.remove()
    fitting.say(f"saved {out}")
    return made
