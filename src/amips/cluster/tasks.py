"""Functions run on a cluster: so many at a time, their results merged as a tree and given in order.

A task that is lost with its worker or its node is run again by Ray, and so are tasks whose results were lost;
functions must therefore give the same result each time. What is handed to several tasks is put into Ray's
store once (`Cluster.put`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from amips.errors import AmipsError
from amips.progress import Bar

Job = tuple[Any, ...]  # a function of a module that workers can import, and its arguments

RETRIES = 8  # of a task whose worker or node is lost; more often, the task itself is to blame
EACH_CPU = 2  # tasks under way for each processor: one runs, one waits with its inputs at hand
FAN_IN = 8  # results merged at a time
LOOK_SECONDS = 5.0  # between looks at how many nodes there are


class _LostError(AmipsError):
    """A task that Ray gave up, for reasons that are not its own."""


class Cluster:
    """A Ray cluster that this process has joined."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self._looked = -LOOK_SECONDS
        self._nodes: list[dict[str, Any]] = []
        self._task = ray.remote(_call)

    def nodes(self) -> list[str]:
        """Ids of the nodes that can run tasks, as Ray gives them."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            alive = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            self._looked, self._nodes = now, alive
        if not self._nodes:
            raise AmipsError("no node of the Ray cluster has a processor for tasks; add one with: ray start")
        return [node["NodeID"] for node in self._nodes]

    def processors(self) -> int:
        """Processors of all nodes together, as Ray was told of them."""
        self.nodes()
        return max(1, int(sum(node["Resources"]["CPU"] for node in self._nodes)))

    def put(self, value: Any) -> Any:
        """Hand a value to the cluster once; what comes back stands for it as an argument of jobs."""
        return self.ray.put(value)

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """What a function gives on every node, by the address of the node and the beginning of its id.

        A node that is lost meanwhile is left out.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._looked = -LOOK_SECONDS  # now, not some seconds ago
        names = {one: self._name(one) for one in self.nodes()}
        results = {}
        for node, name in names.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            results[name] = self._task.options(num_cpus=0, scheduling_strategy=there, max_retries=1).remote(
                function, *arguments
            )
        answers = {}
        for name, result in results.items():
            with suppress(_LostError):
                answers[name] = self._get(result)
        return answers

    def _name(self, node: str) -> str:
        address = next(one["NodeManagerAddress"] for one in self._nodes if one["NodeID"] == node)
        return f"{address} ({node[:6]})"

    def map(self, jobs: Iterable[Job]) -> Iterator[Any]:
        """The result of each job, in order."""
        return self.merged(([job] for job in jobs), _only)

    def merged(self, groups: Iterable[Iterable[Job]], merge: Callable[[list[Any]], Any]) -> Iterator[Any]:
        """For each group of jobs their results, merged; in order.

        Jobs are asked for one by one as others end, so that inputs of what is under way, and no more, are in
        the cluster's memory. If the caller ends early, what is under way ends by itself: telling Ray to
        cancel a task that is just ending can end this process.

        Args:
            merge: one result of several neighbouring ones, in order. It is called on results of its own, and
                with at most `FAN_IN` of them.
        """
        task = self._task.options(num_cpus=1, max_retries=RETRIES)
        running: set[Any] = set()
        finished: deque[Any] = deque()  # results of groups, or what will be
        for jobs in groups:
            leaves = []
            for job in jobs:
                while len(running) >= EACH_CPU * self.processors():
                    running -= self._ended(running)
                    while finished and self._is_there(finished[0]):
                        yield self._get(finished.popleft())
                leaves.append(task.remote(*job))
                running.add(leaves[-1])
            finished.append(_tree(task, merge, leaves))
            del leaves
            while finished and (self._is_there(finished[0]) or len(finished) > EACH_CPU * self.processors()):
                yield self._get(finished.popleft())
        while finished:
            yield self._get(finished.popleft())

    def _ended(self, running: set[Any]) -> set[Any]:
        """Tasks that have ended, one at least unless it takes long; the result of none is fetched for it."""
        ended, _ = self.ray.wait(list(running), num_returns=1, timeout=LOOK_SECONDS, fetch_local=False)
        if ended:
            more, _ = self.ray.wait(list(running), num_returns=len(running), timeout=0, fetch_local=False)
            ended = [*ended, *more]
        return set(ended)

    def _is_there(self, result: Any) -> bool:
        return bool(self.ray.wait([result], timeout=0)[0])

    def _get(self, result: Any) -> Any:
        """A result; what went wrong on the way becomes one line."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(result)
        except errors.RayTaskError as problem:
            cause: BaseException = problem
            while isinstance(cause, errors.RayTaskError) and isinstance(cause.cause, BaseException):
                cause = cause.cause
            if isinstance(cause, AmipsError):
                raise cause from None
            raise AmipsError(f"a task of the Ray cluster failed: {_first_line(cause)}") from problem
        except errors.RayError as problem:
            raise _LostError(
                f"the Ray cluster did not finish a task: {_first_line(problem)}; the same call continues"
            ) from problem

    def note(self, bar: Bar, started: float) -> None:
        """Show beside a progress bar how many nodes are at work, and the rate since it began."""
        count, rate = len(self.nodes()), (bar.n - bar.start) / max(1e-9, time.monotonic() - started)
        nodes = f"{count} node" if count == 1 else f"{count} nodes"
        bar.set_postfix_str(f"{nodes}, {rate:,.0f} {bar.unit}/s")


def _tree(task: Any, merge: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    """The merged result of parts: neighbours by tasks of their own, level by level."""
    while len(parts) > 1:
        groups = [parts[low : low + FAN_IN] for low in range(0, len(parts), FAN_IN)]
        parts = [one[0] if len(one) == 1 else task.remote(_merge, merge, *one) for one in groups]
    return parts[0]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a worker does: Ray puts values in the place of those that were `put`."""
    return function(*arguments)


def _merge(merge: Callable[[list[Any]], Any], *parts: Any) -> Any:
    return merge(list(parts))


def _only(parts: list[Any]) -> Any:
    return parts[0]


def _first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
