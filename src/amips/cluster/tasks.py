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

from amips.blas import threads
from amips.errors import AmipsError
from amips.progress import Bar

Job = tuple[Any, ...]  # a function of a module that workers can import, and its arguments

RETRIES = 8  # of a task whose worker or node is lost; more often, the task itself is to blame
EACH_CPU = 2  # tasks under way for each processor: one runs, one waits with its inputs at hand
FAN_IN = 8  # results merged at a time
LOOK_SECONDS = 5.0  # between looks at how many nodes there are


def _nothing(count: int) -> None:
    """Told of jobs that ended, where nobody asks."""


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

    def map(self, jobs: Iterable[Job], ended: Callable[[int], None] = _nothing) -> Iterator[Any]:
        """The result of each job, in order; `ended` as in `merged`."""
        return self.merged(([job] for job in jobs), _only, ended)

    def merged(
        self,
        groups: Iterable[Iterable[Job]],
        merge: Callable[[list[Any]], Any],
        ended: Callable[[int], None] = _nothing,
    ) -> Iterator[Any]:
        """For each group of jobs their results, merged; in order.

        Jobs are asked for one by one as others end, and neighbouring results are merged as soon as there are
        `FAN_IN` of them, so that the cluster's memory has inputs and results of what is under way, a few
        results of each level of the tree, and of so many groups as tasks may be under way. If the caller ends
        early, what is under way ends by itself: telling Ray to cancel a task that is just ending can end this
        process.

        Args:
            merge: one result of several neighbouring ones, in order. It is called on results of its own, and
                with at most `FAN_IN` of them.
            ended: told of every few jobs that ended, how many they are; merges are not counted.
        """
        task = self._task.options(num_cpus=1, max_retries=RETRIES)
        running: set[Any] = set()  # tasks under way, merges among them
        leaves: set[Any] = set()  # those that are jobs
        finished: deque[Any] = deque()  # results of groups, or what will be

        def wait() -> None:
            """Until one task has ended at least, unless it takes long."""
            over = self._ended(running)
            running.difference_update(over)
            ended(len(leaves & over))
            leaves.difference_update(over)

        def begin(*job: Any) -> Any:
            running.add(result := task.remote(*job))
            return result

        def first() -> Any:
            """The result of the first group, when it is there."""
            while finished[0] in running:
                wait()
            return self._get(finished.popleft())

        for jobs in groups:
            tree = _Tree(lambda *parts: begin(_merge, merge, *parts))
            for job in jobs:
                while len(running) >= EACH_CPU * self.processors():
                    wait()
                    while finished and finished[0] not in running:
                        yield first()
                leaves.add(leaf := begin(*job))
                tree.add(leaf)
                del leaf
            finished.append(tree.root())
            del tree
            while finished and (finished[0] not in running or len(finished) > EACH_CPU * self.processors()):
                yield first()
        while finished:
            yield first()
        while leaves:  # their results are there, and nobody has looked
            wait()

    def _ended(self, running: set[Any]) -> set[Any]:
        """Tasks that have ended, one at least unless it takes long; the result of none is fetched for it."""
        ended, _ = self.ray.wait(list(running), num_returns=1, timeout=LOOK_SECONDS, fetch_local=False)
        if ended:
            more, _ = self.ray.wait(list(running), num_returns=len(running), timeout=0, fetch_local=False)
            ended = [*ended, *more]
        return set(ended)

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


class _Tree:
    """Merges neighbours, level by level, while results are added; `merge` begins a task for some of them."""

    def __init__(self, merge: Callable[..., Any]) -> None:
        self._merge = merge
        self._levels: list[list[Any]] = []  # results that wait for neighbours; later ones are in lower levels

    def add(self, part: Any, level: int = 0) -> None:
        if level == len(self._levels):
            self._levels.append([])
        self._levels[level].append(part)
        if len(self._levels[level]) == FAN_IN:
            parts, self._levels[level] = self._levels[level], []
            self.add(self._merge(*parts), level + 1)

    def root(self) -> Any:
        """All that was added, merged: from the lowest level up, which has the last results."""
        above: list[Any] = []
        for parts in self._levels:
            above = [*parts, *above]
            if len(above) > 1:
                above = [self._merge(*above)]
        return above[0]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a worker does: Ray puts values in the place of those that were `put`.

    With one thread, whatever the environment of the worker says: a task has one processor, and with more
    threads products may round otherwise.
    """
    with threads(1):
        return function(*arguments)


def _merge(merge: Callable[[list[Any]], Any], *parts: Any) -> Any:
    return merge(list(parts))


def _only(parts: list[Any]) -> Any:
    return parts[0]


def _first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
