"""The queue in front of a search: who is searched with whom, who is refused."""

import asyncio
import threading
import time

import numpy as np
import pytest

from amips.errors import AmipsError
from amips.serving import Batcher
from amips.serving.refusals import Refused


class Slow:
    """A search that waits until it may go on, and remembers what it was asked."""

    def __init__(self):
        self.calls, self.go = [], threading.Event()

    def __call__(self, x, options):
        self.calls.append((x.copy(), options))
        assert self.go.wait(30)
        if options == "impossible":
            raise AmipsError("this recall cannot be had")
        if options == "fragile" and (x < 0).any():
            raise ZeroDivisionError
        return x[:, :1] * 2, x[:, :1].astype(np.int64)


def rows(*values):
    return np.array([[value, 0] for value in values], np.float32)


async def waiting(batcher, count):
    """Until so many rows wait."""
    end = time.monotonic() + 10
    while batcher.rows != count:
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def begun(search, count):
    end = time.monotonic() + 10
    while len(search.calls) < count:
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("place", ["before the search", "after it"])
def test_rows_that_cannot_be_put_together_do_not_keep_others_waiting(place, monkeypatch):
    def fail(*_):
        raise MemoryError

    async def run():
        search = Slow()
        batcher = Batcher(search, 100, observe=fail if place == "after it" else None)
        first = asyncio.create_task(batcher.search(rows(1), "a", "a", 30))
        await begun(search, 1)
        if place == "before the search":
            monkeypatch.setattr(np, "concatenate", fail)
        others = [asyncio.create_task(batcher.search(rows(i), "a", "a", 30)) for i in (2, 3)]
        await waiting(batcher, 2)
        search.go.set()
        scores = [(await one).scores.tolist() for one in (first, *others)]
        last = await asyncio.wait_for(batcher.search(rows(4), "a", "a", 30), 30)
        await batcher.close()
        return [*scores, last.scores.tolist()]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [[[2]], [[4]], [[6]], [[8]]]


def test_what_waits_together_is_searched_together_and_a_lone_request_at_once():
    batches = []

    async def run():
        search = Slow()
        batcher = Batcher(search, 100, observe=lambda *facts: batches.append(facts[:2]))
        first = asyncio.create_task(batcher.search(rows(1), "a", "a", 30))
        await begun(search, 1)  # nothing came with it, and nothing was waited for
        others = [
            asyncio.create_task(batcher.search(rows(*values), key, key, 30))
            for values, key in (((2, 3), "a"), ((4,), "b"), ((5,), "a"))
        ]
        await waiting(batcher, 4)
        search.go.set()
        answers = [await task for task in (first, *others)]
        await batcher.close()
        return search, answers

    search, answers = asyncio.run(run())
    assert [(x[:, 0].tolist(), options) for x, options in search.calls] == [
        ([1], "a"),
        ([2, 3, 5], "a"),
        ([4], "b"),
    ]
    assert [scores[:, 0].tolist() for scores, *_ in answers] == [[2], [4, 6], [8], [10]]
    assert [ids[:, 0].tolist() for _, ids, *_ in answers] == [[1], [2, 3], [4], [5]]
    assert batches == [(1, 1), (2, 3), (1, 1)]


def test_without_batching_each_is_searched_alone():
    async def run():
        search = Slow()
        batcher = Batcher(search, 100, together=False)
        tasks = [asyncio.create_task(batcher.search(rows(i), "a", "a", 30)) for i in range(4)]
        await begun(search, 1)
        search.go.set()
        await asyncio.gather(*tasks)
        await batcher.close()
        return search

    assert [len(x) for x, _ in asyncio.run(run()).calls] == [1, 1, 1, 1]


def test_a_full_queue_refuses_at_once_and_a_late_request_is_not_searched():
    async def run():
        search = Slow()
        batcher = Batcher(search, 3)
        first = asyncio.create_task(batcher.search(rows(1), "a", "a", 30))
        await begun(search, 1)
        kept = asyncio.create_task(batcher.search(rows(2, 3), "a", "a", 30))
        late = asyncio.create_task(batcher.search(rows(4), "a", "a", 0.05))
        await waiting(batcher, 3)
        with pytest.raises(Refused, match="too many") as full:
            await batcher.search(rows(5), "a", "a", 30)
        assert full.value.status == 503
        assert int(full.value.headers["retry-after"]) >= 1
        with pytest.raises(Refused, match="too long") as expired:  # while the searcher is still busy
            await late
        assert expired.value.status == 503
        search.go.set()
        await first
        scores = (await kept).scores
        await batcher.close()
        return search, scores

    search, scores = asyncio.run(run())
    assert scores[:, 0].tolist() == [4, 6]
    assert [x[:, 0].tolist() for x, _ in search.calls] == [[1], [2, 3]]


def test_a_client_that_leaves_is_not_searched_for():
    async def run():
        search = Slow()
        batcher = Batcher(search, 10)
        first = asyncio.create_task(batcher.search(rows(1), "a", "a", 30))
        await begun(search, 1)
        gone = asyncio.create_task(batcher.search(rows(2), "a", "a", 30))
        late = asyncio.create_task(batcher.search(rows(*range(9)), "b", "b", 0.01))
        await waiting(batcher, 10)
        gone.cancel()
        with pytest.raises(Refused, match="too long"):
            await late
        await waiting(batcher, 0)  # while the searcher is still busy: others may come in their place
        kept = asyncio.create_task(batcher.search(rows(*range(10)), "a", "a", 30))
        await waiting(batcher, 10)
        search.go.set()
        await first
        await kept
        await batcher.close()
        return search

    search = asyncio.run(run())
    assert [len(x) for x, _ in search.calls] == [1, 10]


def test_an_error_of_options_is_for_those_who_gave_them_and_a_broken_row_hurts_no_other():
    async def run():
        search = Slow()
        batcher = Batcher(search, 100)
        calls = [
            (1, "impossible"),
            (2, "impossible"),
            (3, "fragile"),
            (-4, "fragile"),
            (5, "fragile"),
            (6, "a"),
        ]
        first = asyncio.create_task(batcher.search(rows(0), "x", "x", 30))
        await begun(search, 1)
        tasks = [asyncio.create_task(batcher.search(rows(value), key, key, 30)) for value, key in calls]
        await waiting(batcher, len(calls))
        search.go.set()
        await first
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.close()
        return answers

    one, two, three, four, five, six = asyncio.run(run())
    assert isinstance(one, AmipsError)
    assert isinstance(two, AmipsError)
    assert isinstance(four, ZeroDivisionError)
    assert [answer[0][0, 0] for answer in (three, five, six)] == [6, 10, 12]


def test_rows_of_another_dimension_are_no_company():
    async def run():
        search = Slow()
        batcher = Batcher(search, 100)
        search.go.set()
        tasks = [
            asyncio.create_task(batcher.search(np.ones((1, d), np.float32), "a", "a", 30)) for d in (2, 3, 2)
        ]
        await asyncio.gather(*tasks)
        await batcher.close()
        return search

    assert sorted(x.shape for x, _ in asyncio.run(run()).calls) == [(1, 3), (2, 2)]


def test_many_of_one_kind_do_not_keep_another_waiting():
    async def run():
        search = Slow()
        batcher = Batcher(search, 10_000)
        first = asyncio.create_task(batcher.search(rows(0), "a", "a", 30))
        await begun(search, 1)
        block = np.ones((800, 2), np.float32)
        tasks = [asyncio.create_task(batcher.search(block, "a", "a", 30)) for _ in range(3)]
        await waiting(batcher, 2400)
        tasks.append(asyncio.create_task(batcher.search(rows(1), "b", "b", 30)))
        await waiting(batcher, 2401)
        search.go.set()
        await asyncio.gather(first, *tasks)
        await batcher.close()
        return search

    assert [options for _, options in asyncio.run(run()).calls] == ["a", "a", "b", "a", "a"]
