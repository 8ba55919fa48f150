"""Shards on a Ray cluster: one Ray Serve application a shard, with replicas, and a client that fans out.

Ray Serve places replicas, restarts those that die and sends requests to those that live. What is here: a
question goes to all shards at once, and what has not answered when the time is over is missing, and said to
be. Each shard is an application of its own, so that one which cannot start does not take others with it.
Every node must see the directory of shards under the same path; a replica that finds another bundle there
than the one which was made for its shard does not start.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amips.arguments import check_flag, check_number, check_path, check_whole
from amips.cluster import check_address, join
from amips.errors import AmipsError, BundleError
from amips.extras import needs_extra
from amips.sharding.directory import open_shard, read_shards, shard_path
from amips.sharding.merging import Results
from amips.sharding.shard_measuring import search_shard
from amips.sharding.sharded import LocalShards, Question, ShardedIndex
from amips.vectors import Floats

TIMEOUT = 10.0  # seconds that shards have to answer
STARTING = 300.0  # seconds that replicas have to start
PAUSE = 0.05  # seconds before a shard is asked again whose replica died
GRACE = 1.0  # seconds for Ray to give an answer back, after its time


class ShardServer:
    """A replica of a shard: its bundle, opened once, which must be the one that was made for the shard."""

    def __init__(self, path: str, digest: str, size: int, mmap: bool = False) -> None:
        self.bundle, self.digest = open_shard(Path(path), digest, size, mmap=mmap), digest
        self.bundle.prepare()

    def search(self, digest: str, x: Floats, k: int, recall: float) -> Results:
        """The k best keys of the shard for each query; BundleError if another shard's are wanted."""
        if digest != self.digest:
            raise BundleError("other shards are deployed under this name than those of the directory")
        return search_shard(self.bundle, x, k, recall)


@dataclass(frozen=True)
class RayShards:
    """Shards behind the handles of Ray Serve.

    Args:
        name: of the deployment; that of shard i is `name`-i.
        timeout: seconds that all shards together have to answer.
        digests: of the bundles of the shards: a replica of another bundle gives no answer.
    """

    name: str
    timeout: float
    digests: tuple[str, ...]

    def ask(self, questions: Sequence[Question]) -> list[Results | str]:
        """Ask all at once; a shard whose replica dies is asked again, another replica answers."""
        answers: list[Results | str] = [f"no answer in {self.timeout:g} s"] * len(questions)
        # In a thread of its own: not every call of Ray ends in a given time, as when its controller is lost.
        asking = threading.Thread(target=self._ask, args=(questions, answers), daemon=True)
        asking.start()
        asking.join(self.timeout + GRACE)
        return list(answers)

    def _ask(self, questions: Sequence[Question], answers: list[Results | str]) -> None:
        """Put answers, and reasons for there being none, in their places.

        Each shard is waited for by a thread of its own, so that one which is silent keeps no other from
        being asked again. All is sent from here: handles of Ray are not made to be used by several threads.
        """
        import ray

        end = time.monotonic() + self.timeout
        over: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # which to ask again, or None: that was it

        def wait_for(place: int, response: Any) -> None:
            answer, again = self._receive(response, end)
            if answer is not None:
                answers[place] = answer
            if again and time.monotonic() + PAUSE < end:
                time.sleep(PAUSE)
                over.put(place)
            else:
                over.put(None)

        to_send, waiting = list(range(len(questions))), 0
        while True:
            for place in to_send:
                if not ray.is_initialized():  # Ray would begin a cluster of its own
                    answers[place] = "this process has left the Ray cluster"
                    continue
                try:
                    response = self._send(questions[place])
                except Exception as problem:  # of Ray
                    answers[place] = f"it is not deployed: {_first_line(problem)}"
                    continue
                threading.Thread(target=wait_for, args=(place, response), daemon=True).start()
                waiting += 1
            if not waiting:
                return
            again = over.get()
            waiting -= 1
            to_send = [] if again is None else [again]

    def _send(self, question: Question) -> Any:
        """The response to come."""
        from ray import serve

        handle = serve.get_app_handle(shard_name(self.name, question.shard))
        digest = self.digests[question.shard]
        return handle.search.remote(digest, question.x, question.k, question.recall)

    def _receive(self, response: Any, end: float) -> tuple[Results | str | None, bool]:
        """An answer or a reason, and whether to ask again while there is time."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

        try:
            return response.result(timeout_s=max(0.0, end - time.monotonic())), False
        except TimeoutError:
            response.cancel()
            return None, False
        except DeploymentUnavailableError:
            return "none of its replicas can start", False
        except RayTaskError as problem:  # the shard itself raised
            return f"it failed: {_first_line(problem.cause)}", False
        except (RayError, RayServeException) as problem:  # also of a node that is lost
            return f"its replica died: {type(problem).__name__}", True
        except Exception as problem:  # whatever else Ray comes upon, as when the cluster ends
            return f"Ray failed: {_first_line(problem)}", False


def shard_name(name: str, shard: int) -> str:
    """What the application of a shard is called."""
    return f"{name}-{shard:03d}"


def deploy_shards(
    path: str | Path,
    *,
    replicas: int = 1,
    name: str = "amips",
    address: str | None = None,
    cpus: float = 1.0,
    mmap: bool = False,
    timeout: float = TIMEOUT,
    starting: float = STARTING,
) -> ShardedIndex:
    """Deploy every shard of a directory on a Ray cluster, and connect to them.

    Nothing is opened to the network beside what the cluster itself has: there is no HTTP proxy, and shards
    are asked through Ray's handles, by any process of the cluster (`connect_shards`).

    Shards that are deployed under this name are replaced, and those of a number that there is no more are
    removed once the others run. If a replica does not start, shards that were not there before are taken from
    the cluster; those that were stay as Ray has them.

    Args:
        path: what `amips.shard` made; every node sees it under this path.
        replicas: of each shard, which Ray spreads over nodes as far as it can.
        name: of the deployment.
        address: of the cluster, if this process is not connected yet: "auto" for the one on this machine.
        cpus: that each replica reserves.
        mmap: leave the float32 keys on disk, as of `amips.load`: replicas then hold codes.
        timeout: seconds that shards have to answer.
        starting: seconds that all replicas have to start.
    """
    replicas, timeout = check_whole("replicas", replicas, 1), check_number("timeout", timeout, above=0)
    mmap = check_flag("mmap", mmap)
    cpus, starting = check_number("cpus", cpus, least=0), check_number("starting", starting, above=0)
    path = Path(check_path("path", path, error=BundleError)).absolute()
    index = read_shards(
        path, LocalShards([])
    )  # refuses what is no directory of shards before anything starts
    _connect(address)
    from ray import serve

    names = [shard_name(name, shard) for shard in range(len(index.sizes))]
    targets = []
    with _one_line(f"shards of {path} could not be deployed"):
        serve.start(proxy_location="Disabled")
        server: Any = serve.deployment(ShardServer)
        for shard, (digest, size) in enumerate(zip(index.digests, index.sizes.tolist(), strict=True)):
            options: Any = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": cpus}}
            place = str(shard_path(path, shard))
            bound = server.options(name="shard", **options).bind(place, digest, size, mmap)
            targets.append(serve.RunTarget(bound, name=names[shard], route_prefix=None))
        before = set(serve.status().applications)
        serve.run_many(targets, wait_for_applications_running=False)
        try:
            _wait_for(names, time.monotonic() + starting)
        except BaseException:
            _delete(set(names) - before)
            raise
        _delete({one for one in before - set(names) if _is_shard(one, name)})
    return connect_shards(path, name=name, timeout=timeout)


def _is_shard(application: str, name: str) -> bool:
    """Whether an application is a shard of this deployment."""
    own, _, number = application.rpartition("-")
    return own == name and number.isdigit()


def _delete(names: set[str]) -> None:
    """Take applications from the cluster, without waiting for their end."""
    from ray import serve

    for one in sorted(names):
        serve.delete(one, _blocking=False)


def _wait_for(names: list[str], end: float) -> None:
    """Until all applications run; AmipsError if one cannot, or the time is over."""
    from ray import serve

    while True:
        applications = serve.status().applications
        states = {name: applications[name] for name in names if name in applications}
        for name, state in states.items():
            if state.status == "DEPLOY_FAILED":
                details = [one.message for one in state.deployments.values()]
                raise AmipsError(f"{name}: {_cause([*details, state.message])}")
        waiting = [name for name in names if name not in states or states[name].status != "RUNNING"]
        if not waiting:
            return
        if time.monotonic() >= end:
            raise AmipsError(
                f"{len(waiting)} of {len(names)} have no replica for want of time or of free processors "
                f"({waiting[0]} first): give fewer replicas=, fewer cpus=, or more nodes"
            )
        time.sleep(PAUSE)


def connect_shards(
    path: str | Path, *, name: str = "amips", address: str | None = None, timeout: float = TIMEOUT
) -> ShardedIndex:
    """An index whose shards are those that `deploy_shards` put on a cluster; arguments as there.

    Only the router is read from the directory.
    """
    timeout = check_number("timeout", timeout, above=0)
    path = Path(check_path("path", path, error=BundleError))
    index = read_shards(path, LocalShards([]))
    _connect(address)
    return replace(index, shards=RayShards(name, timeout, index.digests))


def remove_shards(index: ShardedIndex) -> None:
    """Take the shards of an index that `deploy_shards` or `connect_shards` gave from the cluster."""
    if not isinstance(index.shards, RayShards):
        raise AmipsError("the shards of this index are in this process: there is nothing to remove")
    _connect(None)
    from ray import serve

    with _one_line("shards could not be removed"):
        for shard in range(len(index.sizes)):
            serve.delete(shard_name(index.shards.name, shard))


def _connect(address: str | None) -> None:
    """Connect this process to a cluster, unless it is."""
    with needs_extra("serving shards", "ray", "ray", "starlette", "fastapi"):
        import ray
        from ray import serve  # noqa: F401  (what it needs may be missing)
    if ray.is_initialized():
        return
    if check_address(address) is None:
        raise AmipsError(
            "not connected to a Ray cluster: give its address, or 'auto' for the one on this machine"
        )
    join(str(address))


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Errors of Ray as one line."""
    try:
        yield
    except Exception as problem:
        raise AmipsError(f"{what}: {_first_line(problem)}") from None


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [""])[0] or type(problem).__name__


def _cause(messages: list[str]) -> str:
    """Of Ray's messages the line that says what went wrong: an error of amips where a traceback has one."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("amips.") and "Error: " in line]
    return own[-1].split("Error: ", 1)[1] if own else (lines or ["no reason"])[0]
