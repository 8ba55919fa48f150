"""What `Cluster.merged` keeps in the cluster's memory, with a Ray that runs one task at a time, here."""

import weakref

import numpy as np
import pytest

from amips import exact
from amips.blas import threads, threads_allowed
from amips.cluster import Cluster, tasks
from amips.exact import ranges
from amips.progress import Bar
from helpers import make_world

PROCESSORS = 2


class Result:
    """A reference to a result, or to what will be one."""

    def __init__(self, function, arguments):
        self.function, self.arguments, self.value = function, arguments, None

    def run(self):
        inputs = [one.value if isinstance(one, Result) else one for one in self.arguments]
        self.value, self.arguments, self.function = self.function(*inputs), (), None


class SlowRay:
    """Runs the oldest task whenever it is waited for; counts results that anybody still refers to."""

    def __init__(self):
        self.alive, self.most, self.underway, self.most_underway = weakref.WeakSet(), 0, [], 0
        self.exceptions = type("Exceptions", (), {"RayTaskError": KeyError, "RayError": LookupError})

    def remote(self, function):
        ray = self

        class Task:
            def options(self, **_):
                return self

            def remote(self, *arguments):
                ray.underway.append(result := Result(function, arguments))
                ray.alive.add(result)
                ray.most = max(ray.most, len(ray.alive))
                ray.most_underway = max(ray.most_underway, len(ray.underway))
                return result

        return Task()

    def put(self, value):
        return value

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": PROCESSORS}, "NodeID": "one"}]

    def wait(self, results, num_returns=1, **_):
        if self.underway and not any(one.function is None for one in results):
            self.underway.pop(0).run()
        over = [one for one in results if one.function is None]
        return over[:num_returns], []

    def get(self, result):
        assert result.function is None, "only what has ended is fetched, or no bar could move meanwhile"
        return result.value


def one(number):
    return [number]


def joined(parts):
    assert len(parts) <= tasks.FAN_IN
    return [number for part in parts for number in part]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_results_of_many_jobs_are_merged_while_they_come(count):
    ray, told = SlowRay(), []
    groups = ([(one, (group, i)) for i in range(count)] for group in range(3))
    results = list(Cluster(ray).merged(groups, joined, told.append))
    assert results == [[(group, i) for i in range(count)] for group in range(3)]
    assert sum(told) == 3 * count
    underway = tasks.EACH_CPU * PROCESSORS
    assert ray.most_underway <= underway + 4  # a merge of each level may begin with a job
    # Inputs of merges under way, what waits on four levels, and groups whose turn has not come.
    assert ray.most <= (tasks.FAN_IN + 1) * (underway + 4) + 4 * tasks.FAN_IN


def test_jobs_are_told_of_while_a_group_is_under_way():
    ray, told = SlowRay(), []
    results = Cluster(ray).merged([[(one, i) for i in range(50)]], joined, lambda n: told.append(n))
    assert next(results) == list(range(50))
    assert sum(1 for n in told if n) > 20


def test_groups_come_in_order_one_by_one():
    ray = SlowRay()
    results = Cluster(ray).map((one, i) for i in range(1000))
    assert next(results) == [0]
    assert ray.most < 20
    assert [number for part in results for number in part] == list(range(1, 1000))


def test_a_sweep_moves_its_bar_within_a_shard_of_queries(monkeypatch):
    keys, queries = make_world(3 * ranges.TILE, 40, 8, seed=0)
    monkeypatch.setattr(ranges, "TASK_PRODUCTS", 1)
    moved = []
    monkeypatch.setattr(
        Bar, "update", lambda self, count: moved.append(count) or setattr(self, "n", self.n + count)
    )
    here = exact.top_k(keys, queries, 5)
    assert moved == [40]
    moved.clear()
    there = exact.top_k(keys, queries, 5, cluster=Cluster(SlowRay()))
    assert sum(moved) == 40
    assert len([count for count in moved if count]) == 3  # as many as there are ranges of keys
    np.testing.assert_array_equal(here[1], there[1])


def test_a_task_has_one_thread():
    with threads(2):
        assert tasks._call(threads_allowed) == 1
        assert threads_allowed() == 2
