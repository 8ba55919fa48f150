"""Requests that wait together are searched together.

One thread searches. While it is at work, requests gather; as soon as it is free it takes all that wait with
the same options, searches their rows in one call and splits the answer. A request that comes alone is
searched at once: nothing waits for others to come.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError, MemoryLimitError
from amips.serving.refusals import busy
from amips.vectors import Floats

Results = tuple[NDArray[Any], ...]  # scores and ids [m, k]; of shards also what is missing [m]
Search = Callable[[Floats, Any], Results]
Observe = Callable[[int, int, float], None]  # requests and rows of a batch, seconds

MOST_ROWS = 1024  # searched in one call: beyond, more at a time is no cheaper, and others wait for longer
SLOWEST = 60.0  # seconds that a client is told to wait, at most
FORGET = 0.1  # weight of the newest batch in the mean time of a row


class Answer(NamedTuple):
    """The answer to one request.

    Args:
        scores, ids: [m, k] each.
        seconds: that the search of its batch took.
        missing: [m], of shards: the share of each query's expected top keys that lies in silent ones.
    """

    scores: Floats
    ids: NDArray[Any]
    seconds: float
    missing: Floats | None = None


@dataclass(eq=False, slots=True)
class _Request:
    x: Floats
    options: Any
    group: Hashable  # of requests that can be searched together
    answer: "asyncio.Future[Answer]"
    waiting: bool = True


class Batcher:
    """A bounded queue in front of a search.

    Args:
        search: (rows [m, d], options) -> scores [m, k] and ids [m, k], of shards also what is missing [m];
            called in a thread of its own, and never twice at a time.
        queue: rows that may wait.
        together: search requests together; False searches each alone, to compare.
        observe: is told of each batch.
    """

    def __init__(
        self, search: Search, queue: int, *, together: bool = True, observe: Observe | None = None
    ) -> None:
        self._search, self._queue, self._together, self._observe = search, queue, together, observe
        self._thread = ThreadPoolExecutor(1, "amips-search")
        self._groups: dict[Hashable, deque[_Request]] = {}  # by what can be searched together, oldest first
        self._draining: asyncio.Task[None] | None = None
        self._pace = 0.0  # seconds that a row takes
        self.rows = 0  # that wait

    async def search(self, x: Floats, options: Any, key: Hashable, seconds: float) -> Answer:
        """The answer to queries [m, d]; `Refused` (503) if too many wait, or the time is over.

        Args:
            options: of the search.
            key: requests of the same key have the same options.
            seconds: until nobody waits for the answer any more.
        """
        if self.rows + len(x) > self._queue:
            raise busy("too many requests are waiting: try again later", min(self.delay, SLOWEST))
        loop = asyncio.get_running_loop()
        # Rows of another dimension, of requests from before a reload, cannot be in one array with others.
        group = (key, x.shape[1]) if self._together else object()
        request = _Request(x, options, group, loop.create_future())
        self._groups.setdefault(group, deque()).append(request)
        self.rows += len(x)
        timer = loop.call_later(seconds, self._give_up, request)
        if self._draining is None:
            self._draining = loop.create_task(self._drain())
        try:
            return await request.answer
        finally:
            timer.cancel()
            if request.waiting:  # its time is over, or its client has left: others may have its place
                self._drop(request)

    @property
    def delay(self) -> float:
        """Seconds until what waits now has been searched, about."""
        return self.rows * self._pace

    async def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        if self._draining is not None:
            await self._draining
        self._thread.shutdown()

    def _give_up(self, request: _Request) -> None:
        if not request.answer.done():
            late = busy("the request waited for too long: try again later", min(self.delay, SLOWEST))
            request.answer.set_exception(late)

    def _drop(self, request: _Request) -> None:
        waiting = self._groups[request.group]
        waiting.remove(request)
        self.rows -= len(request.x)
        if not waiting:
            del self._groups[request.group]

    async def _drain(self) -> None:
        """Search until nothing waits."""
        try:
            while self._groups:
                if batch := self._take():
                    try:
                        await self._run(batch)
                    except Exception as problem:  # others wait behind this batch
                        for request in batch:
                            if not request.answer.done():
                                request.answer.set_exception(problem)
        finally:
            self._draining = None

    def _take(self) -> list[_Request]:
        """Requests of the group that has waited longest, without those that nobody waits for."""
        group, waiting = next(iter(self._groups.items()))
        batch: list[_Request] = []
        rows = 0
        while waiting and (not batch or rows + len(waiting[0].x) <= MOST_ROWS):
            request = waiting.popleft()
            request.waiting = False
            self.rows -= len(request.x)
            if not request.answer.done():  # which was given up in this moment
                batch.append(request)
                rows += len(request.x)
        del self._groups[group]
        if waiting:
            self._groups[group] = waiting  # behind the others: many of one kind must not keep them waiting
        return batch

    async def _run(self, batch: list[_Request]) -> None:
        start = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            x = batch[0].x if len(batch) == 1 else np.concatenate([request.x for request in batch])
            results = await loop.run_in_executor(self._thread, self._search, x, batch[0].options)
        except Exception as problem:
            # Options are those of all; what depends on one request, or on how many there are, is not.
            if len(batch) > 1 and (
                not isinstance(problem, AmipsError) or isinstance(problem, MemoryLimitError)
            ):
                for request in batch:  # what one of them broke must not hurt the others
                    await self._run([request])
                return
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(problem)
            return
        seconds = time.perf_counter() - start
        self._pace += FORGET * (seconds / max(1, len(x)) - self._pace)
        low = 0
        for request in batch:
            high = low + len(request.x)
            if not request.answer.done():
                scores, ids, *missing = (part[low:high] for part in results)
                request.answer.set_result(Answer(scores, ids, seconds, *missing))
            low = high
        if self._observe is not None:
            self._observe(len(batch), len(x), seconds)
