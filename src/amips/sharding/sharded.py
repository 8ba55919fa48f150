"""An index in shards: a query goes to those that are expected to hold its top keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError, BundleError, ShardsMissingError
from amips.routers import best_cells, cells_above, limit_probes, masses
from amips.search import (
    Audit,
    Cost,
    Index,
    Point,
    checked_k,
    checked_probes,
    checked_queries,
    effort_for,
    split_norms,
)
from amips.sharding.merging import Merged, Results
from amips.sharding.router import ShardRouter
from amips.sharding.shard_measuring import audit_shards, search_shard, shard_cost
from amips.vectors import Floats

LEAST_MASS = np.float32(1e-30)  # of a silent shard: where its own is rounded to 0 it is missing all the same
EFFORT = frozenset({"recall", "probes", "min_mass", "best_effort"})  # what a search may be given beside k
UNCHANGED = "shards are not changed: add, remove or update keys in the bundle or task, then amips shard again"


@dataclass(frozen=True)
class Question:
    """What one shard is asked: queries [m, d], results for each, and the recall within the shard."""

    shard: int
    x: Floats
    k: int
    recall: float


class Shards(Protocol):
    """Where the shards are: in this process, or on the nodes of a cluster."""

    def ask(self, questions: Sequence[Question]) -> list[Results | str]:
        """Scores and ids for each question, or why there is no answer."""
        ...


@dataclass(frozen=True)
class LocalShards:
    """Bundles in this process; a reason in the place of one that cannot be opened."""

    bundles: Sequence[Index | str]

    def ask(self, questions: Sequence[Question]) -> list[Results | str]:
        """Search one after the other."""
        answers: list[Results | str] = []
        for question in questions:
            bundle = self.bundles[question.shard]
            if isinstance(bundle, str):
                answers.append(bundle)
                continue
            answers.append(search_shard(bundle, question.x, question.k, question.recall))
        return answers


@dataclass(frozen=True)
class Answer:
    """What a search of shards gave.

    Args:
        scores, ids: [m, k], best first, as of any index.
        missing: [m], the share of each query's expected top keys that lies in shards which were asked and
            did not answer. 0 only where all answered. A key that has a copy elsewhere counts as missing, too.
        contacted: [m], how many shards each query was sent to, those without an answer among them.
        silent: the shards without an answer, and why.
    """

    scores: Floats
    ids: NDArray[Any]
    missing: Floats
    contacted: NDArray[np.int64]
    silent: dict[int, str]

    @property
    def complete(self) -> bool:
        """Whether every shard that was asked has answered."""
        return not self.silent


def share_missing(missing: Floats) -> str:
    """The largest share of what silent shards leave out, in words; never 0 %."""
    return f"up to {max(float(missing.max()), 0.001):.1%} of a query's expected top keys"


@dataclass(frozen=True)
class ShardedIndex:
    """Shards, the router that chooses among them, and what is known of the recall.

    Args:
        router: scores shards.
        shards: where they are.
        sizes: keys in each, [S], copies among them.
        n: distinct keys.
        d: the dimension.
        id_type: of the ids.
        points: recall and cost on held-out queries, by bound on the mass; `probes` are shards.
        temperature: at which the router's scores are masses of shards.
        target_recall: what `search` serves when nothing else is asked for.
        inner_recall: what a shard that is asked serves of its own keys.
        about: how it was made, and what was measured.
        digests: of the bundles of the shards, by which they are known.
    """

    router: ShardRouter
    shards: Shards
    sizes: NDArray[np.int64]
    n: int
    d: int
    id_type: Any
    points: Sequence[Point]
    temperature: float
    target_recall: float | None
    inner_recall: float
    about: dict[str, Any]
    digests: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.n

    def search(
        self,
        x: Any,
        k: int = 10,
        *,
        recall: float | None = None,
        probes: "int | NDArray[np.integer[Any]] | None" = None,
        min_mass: float | None = None,
        best_effort: bool = False,
    ) -> tuple[Floats, NDArray[Any]]:
        """The k best keys of each query, as of any index; ShardsMissingError if a shard does not answer.

        The error has what did come as `answer`; `ask` returns that without an error.

        Args:
            x: queries [m, d], or one query [d].
            k: results for each query.
            recall: choose the cheapest way that has this recall of the true top k (of the top 10 if k is
                more) with 95 % confidence, by held-out queries.
            probes: shards to ask: a number, or one for each query.
            min_mass: ask the shards that are expected to hold at least this share of the query's top keys.
            best_effort: with `recall`, serve the highest recall that can be had, and warn, rather than fail.
        """
        effort = {"recall": recall, "probes": probes, "min_mass": min_mass, "best_effort": best_effort}
        answer = self.ask(x, k, **effort)
        if not answer.complete:
            shard, reason = next(iter(answer.silent.items()))
            more = f" and {len(answer.silent) - 1} more" if len(answer.silent) > 1 else ""
            raise ShardsMissingError(
                f"shard {shard}{more} did not answer ({reason}): {share_missing(answer.missing)} are "
                "missing; ask() returns what there is, with that share",
                answer,
            )
        return answer.scores, answer.ids

    def ask(self, x: Any, k: int = 10, **effort: Any) -> Answer:
        """The same with what is missing for each query; arguments as of `search`."""
        k = checked_k(k)
        x, _ = checked_queries(x, self.d)
        chosen, scores, certain = self._choose(x, k, **effort)
        asked = [(shard, np.flatnonzero(chosen[:, shard])) for shard in range(len(self.sizes))]
        asked = [(shard, rows) for shard, rows in asked if len(rows)]
        inner = 1.0 if certain else self.inner_recall
        answers = self.shards.ask([Question(shard, x[rows], k, inner) for shard, rows in asked])
        merged, silent = Merged(len(x), k, self.id_type), dict[int, str]()
        missing = np.zeros(len(x), np.float32)
        mass = masses(scores, self.temperature) if len(x) else scores
        for (shard, rows), results in zip(asked, answers, strict=True):
            if isinstance(results, str):
                silent[shard] = results
                missing[rows] += np.maximum(mass[rows, shard], LEAST_MASS)
            else:
                merged.add(rows, results)
        return Answer(merged.scores, merged.ids, np.minimum(missing, 1), chosen.sum(axis=1), silent)

    def choose_shards(self, x: Any, k: int = 10, **effort: Any) -> NDArray[np.bool_]:
        """Which shards a search would ask, [m, S]; arguments as of `search`."""
        return self._choose(checked_queries(x, self.d)[0], checked_k(k), **effort)[0]

    def _choose(
        self,
        x: Floats,
        k: int,
        *,
        recall: float | None = None,
        probes: Any = None,
        min_mass: float | None = None,
        best_effort: bool = False,
    ) -> tuple[NDArray[np.bool_], Floats, bool]:
        """Which shards are asked [m, S], the router's scores, and whether shards scan all they have."""
        effort = effort_for(self, probes, recall, min_mass, k, best_effort)
        scores = (
            self.router.scores(split_norms(x)[0]) if len(x) else np.empty((0, len(self.sizes)), np.float32)
        )
        chosen = np.zeros(scores.shape, np.bool_)
        if effort.refine == 0:
            return ~chosen, scores, True
        if not len(x):
            return chosen, scores, False
        if effort.min_mass:
            table = cells_above(scores, self.temperature, effort.min_mass, self.sizes, k)
        else:
            counts = checked_probes(effort.probes, len(x), len(self.sizes))
            table = limit_probes(best_cells(scores, int(counts.max())), counts)
        rows, places = np.nonzero(table >= 0)
        chosen[rows, table[rows, places]] = True
        return chosen, scores, False

    def cost(self, x: Any, k: int = 10, **effort: Any) -> Cost:
        """FLOPs, keys scanned and shards contacted for each query; of shards that are in this process."""
        x, _ = checked_queries(x, self.d)
        chosen, _, certain = self._choose(x, checked_k(k), **effort)
        scan, scanned = np.zeros(len(x), np.int64), np.zeros(len(x), np.int64)
        for shard in np.flatnonzero(chosen.any(axis=0)).tolist():
            rows = np.flatnonzero(chosen[:, shard])
            inner = shard_cost(self.local(shard), x[rows], 1.0 if certain else self.inner_recall)
            scan[rows] += inner.flops
            scanned[rows] += inner.scanned
        router = self.router
        return Cost(router.network_flops, router.coarse_flops, scan, scanned, chosen.sum(axis=1))

    def local(self, shard: int) -> Index:
        """The bundle of a shard in this process; AmipsError if it is elsewhere or cannot be opened."""
        if not isinstance(self.shards, LocalShards):
            raise AmipsError("the shards are on other machines: load the directory to know what they cost")
        bundle = self.shards.bundles[shard]
        if isinstance(bundle, str):
            raise AmipsError(f"shard {shard}: {bundle}")
        return bundle

    def audit(self, queries: Any, **options: Any) -> Audit:
        """What recall these queries have now, and what effort they need; see `audit_shards`."""
        return audit_shards(self, queries, **options)

    @property
    def absent(self) -> dict[int, str]:
        """Shards that could not be opened in this process, and why."""
        bundles = self.shards.bundles if isinstance(self.shards, LocalShards) else []
        return {shard: bundle for shard, bundle in enumerate(bundles) if isinstance(bundle, str)}

    def add(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: shards are made anew."""
        raise BundleError(UNCHANGED)

    remove = update = add

    def __enter__(self) -> "ShardedIndex":
        return self

    def __exit__(self, *_: object) -> None:
        pass  # nothing is held that has to be given back

    def __repr__(self) -> str:
        shards = f"{len(self.sizes)} shards, {self.router.name} router"
        return f"<ShardedIndex: {self.n:,} keys, d = {self.d}, {shards}>"
