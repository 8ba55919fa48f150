"""The service itself, without HTTP: an index, who searches it, who changes it, and how it is replaced."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from amips.blas import threads as limit_threads
from amips.errors import AmipsError
from amips.routers import masses
from amips.search import TEXT_MANIFEST, Index, Searcher, bundle_stamp, plain_index, split_norms
from amips.serving.batching import Answer, Batcher, Results
from amips.serving.explanations import Explainer, store_of
from amips.serving.index_kinds import check_options, index_facts, open_place
from amips.serving.limits import Limits, Settings
from amips.serving.prometheus import Counters
from amips.serving.questions import Questions
from amips.serving.refusals import BUSY, CONFLICT, NOT_FOUND, Refused, busy
from amips.serving.requests import ChangeRequest, Options, SearchRequest
from amips.sharding import UNCHANGED, ShardedIndex, share_missing
from amips.text import Answer as AskAnswer
from amips.text import Asker
from amips.vectors import Floats
from amips.version import __version__

Result = TypeVar("Result")

SAMPLE_SECONDS = 1.0  # between two queries whose cost is looked at, and two looks at what waits
DRIFT_SECONDS = 60.0  # between two looks at drift
MOST_CHANGES = 32  # that may wait
MOST_EXPLANATIONS = 1  # at a time: each scores every key
KINDS = ("changes", "explanations")  # of what is done beside searches, each in its own thread

log = logging.getLogger("amips.serving")


class Service:
    """An index that is served.

    Args:
        open_index: opens the index: anything with `d`, `n` and a `search` as of `amips.search.Index`.
        path: the bundle, where it is one.
        limits: what a request may ask for.
        batching: search requests together that wait together.
        threads: of a search, at most.
        open_asker: opens what answers questions in words, given the index.
        read_only: why nothing may be changed here; None if it may.
    """

    def __init__(
        self,
        open_index: Callable[[], Any],
        *,
        path: Path | None = None,
        limits: Limits | None = None,
        batching: bool = True,
        threads: int | None = None,
        open_asker: Callable[[Any], Asker | None] | None = None,
        read_only: str | None = None,
    ) -> None:
        self._open_index, self._open_asker, self.path = open_index, open_asker, path
        self.limits, self.counters, self.read_only = limits or Limits(), Counters(), read_only
        self.index: Any = None
        self._asker: Asker | AmipsError | None = None
        self._threads = {} if threads is None else {"threads": threads}
        self._stamp: Any = None
        self._next_sample = 0.0
        self._batcher = Batcher(
            self._search, self.limits.queue, together=batching, observe=self.counters.note_batch
        )
        self._questions = Questions(self._can_ask, together=batching)
        self._explainer = Explainer(None)
        # One change or reload after the other; so with explanations.
        self._threads_of = {kind: ThreadPoolExecutor(1, f"amips-{kind}") for kind in KINDS}
        self._waiting = dict.fromkeys(KINDS, 0)
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Service":
        """The service of a bundle."""
        asker = partial(_open_asker, settings.bundle, settings.encoder, list(settings.trusted) or None)
        several = (
            "this service has several workers, which would not see a change: change the bundle with the "
        )
        several += "command line (amips add, remove, update) and send SIGHUP"
        return cls(
            partial(open_place, settings),
            path=settings.bundle,
            limits=settings.limits,
            batching=settings.batching,
            threads=settings.threads,
            open_asker=asker,
            read_only=several if settings.workers > 1 else None,
        )

    def open(self) -> None:
        """Load the index, in place of the one that was there, if any."""
        stamp = None if self.path is None else _stamp(self.path)
        index = self._open_index()
        asker: Asker | AmipsError | None = None
        if self._open_asker is not None:
            try:
                asker = self._open_asker(index)
            except AmipsError as problem:  # it can be searched all the same
                asker = problem
        before, self.index, self._asker, self._stamp = self.index, index, asker, stamp
        if isinstance(before, Index):
            before.close()
        self.counters.loaded.set(time.time())
        self._note_index()

    async def start(self) -> None:
        """Be ready: load the index, if nobody has yet."""
        if self.index is None:
            await asyncio.to_thread(self.open)
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Finish what is under way."""
        if self._watching is not None:
            self._watching.cancel()
        await self._batcher.close()
        await self._questions.close()
        for thread in self._threads_of.values():
            await asyncio.to_thread(thread.shutdown)
        if isinstance(self.index, Index):
            self.index.close()
        self.counters.close()

    async def search(self, request: SearchRequest) -> Answer:
        """Scores and ids, [m, k] each, and how long the search took."""
        answer = await self._batcher.search(request.x, request.options, request.options.key, request.seconds)
        if answer.missing is not None and answer.missing.any() and not request.partial:
            share, cure = share_missing(answer.missing), '"partial": true asks for what there is'
            raise Refused(BUSY, f"shards do not answer (GET /info names them): {share} are missing; {cure}")
        return answer

    def _search(self, x: Floats, options: Options) -> Results:
        index = self.index
        check_options(index, options.arguments)
        if isinstance(index, ShardedIndex):
            return self._search_shards(index, x, options)
        answer = self._search_rows(index, x, options)
        now = time.monotonic()
        if now >= self._next_sample and options.plain and isinstance(index, Index):
            self._next_sample = now + SAMPLE_SECONDS
            with suppress(AmipsError):  # the answer is there, whatever becomes of this
                self._sample(index, x[:1], options)
        return answer

    def _search_rows(self, index: Any, x: Floats, options: Options) -> Results:
        threads = {} if len(x) == 1 else self._threads
        scores, ids = index.search(x, **options.arguments, **threads)
        if not isinstance(index, Index) and ids.dtype.kind == "i":  # FAISS has its largest float there
            scores = np.where(ids == -1, np.float32(-np.inf), scores)
        return scores, ids

    def _search_shards(self, index: ShardedIndex, x: Floats, options: Options) -> Results:
        """As of any index, with the share of each query's top keys that lies in shards which are silent."""
        with limit_threads(self._threads.get("threads")):
            answer = index.ask(x, **options.arguments)
        return answer.scores, answer.ids, answer.missing

    def _sample(self, index: Index, x: Floats, options: Options) -> None:
        """Look at what one query cost, and at the mass of the cells that were probed for it."""
        cost = index.cost(x, **options.arguments)
        self.counters.scanned.observe(float(cost.scanned[0]) / max(1, index.snapshot.n))
        plain, probed = plain_index(index.serving), int(cost.probed[0])
        if isinstance(plain, Searcher) and plain.temperature > 0 and probed:
            mass = np.sort(masses(plain.router.scores(split_norms(x)[0]), plain.temperature)[0])
            self.counters.mass.observe(float(mass[-probed:].sum()))

    async def ask(self, question: str, options: dict[str, Any]) -> AskAnswer:
        """The texts that answer a question in words."""
        return await self._questions.ask(question, options, self.limits.seconds)

    def _can_ask(self) -> Asker:
        """What answers questions; `Refused` if nothing does."""
        if self._asker is None:
            raise Refused(NOT_FOUND, "this index has no texts: ask it by vectors, with POST /search")
        if isinstance(self._asker, AmipsError):
            raise Refused(CONFLICT, str(self._asker))
        return self._asker

    async def explain(self, question: str | None, x: Floats | None, options: dict[str, Any]) -> Any:
        """How one query is answered, beside other ways; refused while another is explained."""
        asker = self._asker if isinstance(self._asker, Asker) else None
        check_options(self.index, options)
        if x is None:
            x = await self._questions.encode(question or "", self.limits.seconds)
        call = partial(self._explainer.explain, self.index, x, options, asker)
        return await self._in_turn("explanations", MOST_EXPLANATIONS, call, self.limits.seconds)

    async def add(self, request: ChangeRequest) -> NDArray[Any]:
        """Add keys; their ids."""
        change = partial(Index.add, keys=request.keys, ids=request.ids, attributes=request.attributes)
        return await self._change(change)

    async def remove(self, request: ChangeRequest) -> int:
        """Remove keys; how many."""
        return await self._change(partial(Index.remove, ids=request.ids))

    async def update(self, request: ChangeRequest) -> None:
        """Put other keys in the place of those that were there."""
        change = partial(Index.update, ids=request.ids, keys=request.keys, attributes=request.attributes)
        return await self._change(change)

    async def reload(self) -> bool:
        """Take in what others have done to the bundle; whether there was anything.

        What fails changes nothing. Searches that are under way go on with what there was, the next begin
        with what there is.
        """
        try:
            changed = await self._in_turn("changes", MOST_CHANGES, self._reload)
        except BaseException:
            self.counters.reloads.labels("failed").inc()
            raise
        self.counters.reloads.labels("changed" if changed else "same").inc()
        return changed

    def _reload(self) -> bool:
        if self.path is not None and isinstance(self.index, Index) and _stamp(self.path) == self._stamp:
            changed = self.index.refresh()
            if changed:
                self.counters.loaded.set(time.time())
            self._note_index()
            return changed
        self.open()
        return True

    async def _change(self, change: Callable[[Index], Result]) -> Result:
        if self.read_only is not None:
            raise Refused(CONFLICT, self.read_only)
        if isinstance(self.index, ShardedIndex):
            raise Refused(CONFLICT, UNCHANGED)
        if not isinstance(self.index, Index):
            raise Refused(CONFLICT, "this index is not changed by amips: change what it routes")
        return await self._in_turn("changes", MOST_CHANGES, partial(self._run_change, change))

    def _run_change(self, change: Callable[[Index], Result]) -> Result:
        index: Index = self.index
        d = index.d
        try:
            return change(index)
        finally:
            index.close()  # between two changes another process may change the bundle: refit it, compact it
            if index.d != d:  # it was replaced by one of another dimension, which this handle is not made for
                self.open()
            self._note_index()

    async def _in_turn(
        self, kind: str, most: int, call: Callable[[], Result], seconds: float | None = None
    ) -> Result:
        """Run a call in the thread of its kind; `Refused` if too many wait for it, or the time is over."""
        if self._waiting[kind] >= most:
            raise busy(f"too many {kind} are waiting: try again later")
        self._waiting[kind] += 1
        future = asyncio.wrap_future(self._threads_of[kind].submit(call))

        def end(done: "asyncio.Future[Result]") -> None:
            self._waiting[kind] -= 1
            if not done.cancelled():
                done.exception()  # nobody may be left to be told

        future.add_done_callback(end)
        try:  # A client that leaves, or has waited for too long, does not undo what was begun.
            return await asyncio.wait_for(asyncio.shield(future), seconds)
        except asyncio.TimeoutError:
            raise busy(f"the {kind} before this one take too long: try again later") from None

    @property
    def info(self) -> dict[str, Any]:
        """What is served, for a client."""
        index = self.index
        return {
            "amips": __version__,
            "bundle": None if self.path is None else self.path.absolute().name,
            "n": int(index.n),
            "d": int(index.d),
            "target_recall": getattr(index, "target_recall", None),
            "texts": isinstance(self._asker, Asker),
            "changes": isinstance(index, Index) and self.read_only is None,
            **index_facts(index),
            "limits": self.limits.to_json(),
        }

    def metrics(self) -> bytes:
        """All that is counted, as Prometheus reads it."""
        self.counters.waiting.set(self._batcher.rows)
        return self.counters.text()

    def _note_index(self) -> None:
        absent = getattr(self.index, "absent", {})
        for shard, reason in absent.items():
            log.warning("shard %d is not served: %s", shard, reason)
        self.counters.absent.set(len(absent))
        self.counters.keys.set(self.index.n)
        store = store_of(self.index)
        if self._explainer.store is not store:  # what was made of another one is not kept in memory
            self._explainer = Explainer(store)

    async def _watch(self) -> None:
        """Note what waits, and look at drift now and then; whatever goes wrong, the next time comes."""
        next_drift = time.monotonic() + DRIFT_SECONDS
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.counters.waiting.set(self._batcher.rows)  # here: with workers, who is asked adds them up
            if isinstance(self.index, Index) and time.monotonic() >= next_drift:
                next_drift = time.monotonic() + DRIFT_SECONDS
                try:
                    await self._look_at_drift(self.index)
                except Exception:
                    log.exception("drift is not known")

    async def _look_at_drift(self, index: Index) -> None:
        with suppress(AmipsError):  # no sample of the log, or too few queries yet
            self.counters.drift_p.set((await asyncio.to_thread(index.drift)).p)
        self.counters.adapted.set(index.adaptation is not None)


def _open_asker(bundle: Path, encoder: str | None, trusted: Any, index: Any) -> Asker | None:
    """What answers questions about a bundle; None if it has no texts."""
    if not isinstance(index, Index) or not (bundle / TEXT_MANIFEST).exists():
        return None
    return Asker(bundle, encoder=encoder, trusted=trusted, index=index)


def _stamp(bundle: Path) -> tuple[Any, Any]:
    """What changes when a bundle is replaced, or its texts."""
    return bundle_stamp(bundle), bundle_stamp(bundle, TEXT_MANIFEST)
