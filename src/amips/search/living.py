"""The index that a user holds: searched, asked what its recall is, and changed."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.metrics import TOP
from amips.resources import plain_resource_errors
from amips.search.auditing import Audit, audit
from amips.search.cost import Cost
from amips.search.explaining import Explanation, explain
from amips.search.memory_searcher import Snapshot, plain_index, with_facts
from amips.search.plain_ivf import PlainIvf
from amips.search.refits import RefittableIndex
from amips.search.watching import Watch
from amips.vectors import Floats


class Index(RefittableIndex):
    """What `fit`, `build` and `load` give: an index to search, and to change.

    Beside what is here it has what its present snapshot has: `d`, `design`, `report`, `points`, `labels`, ...
    """

    def __len__(self) -> int:
        return self.n

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for before there is a state: by pickle, by copy
            raise AttributeError(name)
        return getattr(self.serving, name)

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        filter: Any = None,
        where: Any = None,
        recall: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        margin: float | None = None,
        best_effort: bool = False,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
        **drop_in: Any,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query: scores float32 [m, k] and ids [m, k], best first.

        Scores are true inner products <x, y>. Where fewer than k keys were found, the id is -1 (an empty
        string if ids are strings) and the score -inf. Without an effort it serves the recall that the index
        was made for, `target_recall`.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            filter: the keys that may be results: bool [n], one value a key in the order in which keys were
                given and added, where an updated key has the place of the one before (with key numbers for
                ids and nothing removed, that of id i is filter[i]); or an array of ids, or a file of them
                (a `Path` where ids are strings). Ids that are not there are passed over.
            where: a condition on the attributes of keys: "lang = 'en' and price < 20", an
                expression of `pyarrow.compute`, or a list of tuples as `pyarrow.parquet` takes it. With both,
                both must hold. As many results as match, up to k; the recall is kept behind them.
            recall: choose the cheapest way that has this recall of the true top k (of the top 10 if k is
                more) with 95 % confidence, by held-out queries. What cannot be reached is an error.
            probes, min_mass: of cells: how many to scan, or the share of its top keys that a query's cells
                must be expected to hold. See `Searcher.search`, also for `drop_in` and `rescore`.
            margin: of a graph: how far below the tenth best score to go on. See `GraphSearcher.search`.
            best_effort: with `recall`, serve the highest recall that can be had, and warn, rather than fail.
            on_bad: a query that is not finite is an error, or ("skip") gets no results.
            threads: limit on them; one query alone has one.
        """
        options: Any = {"recall": recall, "best_effort": best_effort, "on_bad": on_bad, "threads": threads}
        options |= {"probes": probes, "min_mass": min_mass, "margin": margin}
        state = self._state
        if filter is not None or where is not None:
            options["allowed"] = state.filters.allowed(filter, where)
        # What was adapted to traffic serves recalls; who names an effort gets that, of the index as it is.
        named = probes is not None or min_mass is not None or margin is not None
        snapshot = state.snapshot if named else self._as_served(state.snapshot)
        result = snapshot.search(x, k, **options, **drop_in)
        self._note(x)
        return result

    def cost(self, x: Any, k: int = 10, *, filter: Any = None, where: Any = None, **effort: Any) -> Cost:
        """FLOPs, keys scanned and cells or keys visited for each query; arguments as of `search`."""
        state = self._state
        if filter is not None or where is not None:
            effort["allowed"] = state.filters.allowed(filter, where)
        named = any(effort.get(name) is not None for name in ("probes", "min_mass", "margin"))
        snapshot = state.snapshot if named else self._as_served(state.snapshot)
        return snapshot.cost(x, k, **effort)

    def audit(
        self,
        queries: Any,
        *,
        filter: Any = None,
        where: Any = None,
        sample: int = 500,
        recall: float | None = None,
        seed: int = 0,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> Audit:
        """What recall does it have on queries of now? A sample of them is searched for exactly.

        Args:
            queries: [m, d], an array or a file; not those it was fitted on.
            filter, where: as of `search`: what recall does it have behind them?
            sample: queries to search for exactly, at most, drawn at random.
            recall: what is asked of the index; by default what it was made for.
            seed: of the draw.
            on_bad: a query that is not finite is an error, or ("skip") left out.
            threads: limit on them.
        """
        options: Any = {"sample": sample, "recall": recall, "seed": seed, "on_bad": on_bad}
        state = self._state
        if filter is not None or where is not None:
            options["allowed"] = state.filters.allowed(filter, where)
        return audit(self._as_served(state.snapshot), queries, threads=threads, **options)

    def explain(
        self,
        x: Any,
        k: int = TOP,
        *,
        filter: Any = None,
        where: Any = None,
        plain: PlainIvf | None = None,
        **effort: Any,
    ) -> Explanation:
        """What a search of one query looks at, beside exact search and plain IVF: time, keys scored, found.

        Args:
            x: one query [d].
            k, filter, where, effort: as of `search`.
            plain: what to compare a graph with: `PlainIvf.of(index.snapshot)`, which takes a while. An index
                of cells is compared with centroid routing on these cells.
        """
        state = self._state
        allowed = None if filter is None and where is None else state.filters.allowed(filter, where)
        named = any(effort.get(name) is not None for name in ("probes", "min_mass", "margin"))
        snapshot = state.snapshot if named else self._as_served(state.snapshot)
        return explain(snapshot, x, k, allowed=allowed, plain=plain, **effort)

    @plain_resource_errors()
    def adopt(self, result: Audit) -> None:
        """Serve recalls as the queries of an audit need it, from now on; a bundle is written anew."""
        if result.matches is not None:
            raise AmipsError("this audit was behind a filter: what it says holds for that filter alone")
        with self._writing():
            now, then = plain_index(self.snapshot), plain_index(result.index)
            if now.store is not then.store or now.alive is not then.alive:
                raise AmipsError("this audit is of another index, or keys have changed since: audit it again")
            self._fold(with_facts(result.index, origin=result.index.origin.after("adopted")))
            self._adaptation = None

    def __reduce__(self) -> Any:
        state = self._state
        return _watching, (state.snapshot, state.opened, state.place, self._mode)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" in {self.path}"
        design = self.snapshot.design
        words = type(self.snapshot).__name__ if design is None else design.describe()
        return f"<Index{where}: {self.n:,} keys, d = {self.d}; {words}>"


def _watching(snapshot: Snapshot, opened: Any, place: Any, mode: Watch) -> Index:
    """What pickle makes of an index: the same, with traffic of its own."""
    index = Index(snapshot, opened, place)
    index.watch(mode)
    return index
