"""Shards on a Ray cluster: one Ray Serve application a shard, with replicas, and a client that fans out.

Ray Serve places replicas, restarts those that die and sends requests to those that live. What is here: a
question goes to all shards at once, and what has not answered when the time is over is missing, and said to
be. Each shard is an application of its own, so that one which cannot start does not take others with it.
Every node must see the directory of shards under the same path.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amips.arguments import check_number, check_path, check_whole
from amips.errors import AmipsError, BundleError
from amips.extras import needs_extra
from amips.search import load
from amips.sharding.directory import read_shards, shard_path
from amips.sharding.merging import Results
from amips.sharding.shard_measuring import search_shard
from amips.sharding.sharded import LocalShards, Question, ShardedIndex
from amips.vectors import Floats

TIMEOUT = 10.0  # seconds that shards have to answer
PAUSE = 0.05  # seconds before a shard is asked again whose replica died


class ShardServer:
    """A replica of a shard: its bundle, opened once."""

    def __init__(self, path: str) -> None:
        self.bundle = load(path, watch=False)
        self.bundle.prepare()

    def search(self, x: Floats, k: int, recall: float) -> Results:
        """The k best keys of the shard for each query."""
        return search_shard(self.bundle, x, k, recall)


@dataclass(frozen=True)
class RayShards:
    """Shards behind the handles of Ray Serve.

    Args:
        name: of the deployment; that of shard i is `name`-i.
        timeout: seconds that all shards together have to answer.
    """

    name: str
    timeout: float

    def ask(self, questions: Sequence[Question]) -> list[Results | str]:
        """Ask all at once; a shard whose replica dies is asked again, another replica answers."""
        end = time.monotonic() + self.timeout
        answers: list[Results | str] = [f"no answer in {self.timeout:g} s"] * len(questions)
        waiting = dict(enumerate(questions))
        while waiting:
            sent = {place: self._send(question) for place, question in waiting.items()}
            waiting = {}
            for place, response in sent.items():
                answer, again = self._receive(response, end)
                if answer is not None:
                    answers[place] = answer
                if again:
                    waiting[place] = questions[place]
            if waiting:
                if time.monotonic() + PAUSE >= end:
                    break
                time.sleep(PAUSE)
        return answers

    def _send(self, question: Question) -> Any:
        """The response to come, or the reason why there is none."""
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            handle = serve.get_app_handle(shard_name(self.name, question.shard))
            return handle.search.remote(question.x, question.k, question.recall)
        except RayServeException:
            return "it is not deployed"

    def _receive(self, response: Any, end: float) -> tuple[Results | str | None, bool]:
        """An answer or a reason, and whether to ask again while there is time."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

        if isinstance(response, str):
            return response, False
        try:
            return response.result(timeout_s=max(0.0, end - time.monotonic())), False
        except TimeoutError:
            response.cancel()
            return None, False
        except DeploymentUnavailableError:
            return "none of its replicas can start", False
        except RayTaskError as problem:  # the shard itself raised
            lines = str(problem.cause).splitlines() or [type(problem.cause).__name__]
            return f"it failed: {lines[0]}", False
        except (RayError, RayServeException) as problem:  # also of a node that is lost
            return f"its replica died: {type(problem).__name__}", True


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
    timeout: float = TIMEOUT,
) -> ShardedIndex:
    """Deploy every shard of a directory on a Ray cluster, and connect to them.

    Nothing is opened to the network beside what the cluster itself has: there is no HTTP proxy, and shards
    are asked through Ray's handles, by any process of the cluster (`connect_shards`).

    Args:
        path: what `amips.shard` made; every node sees it under this path.
        replicas: of each shard, on different nodes where there are enough of them.
        name: of the deployment.
        address: of the cluster, if this process is not connected yet: "auto" for the one on this machine.
        cpus: that each replica reserves.
        timeout: seconds that shards have to answer.
    """
    replicas, timeout = check_whole("replicas", replicas, 1), check_number("timeout", timeout, above=0)
    cpus = check_number("cpus", cpus, least=0)
    path = Path(check_path("path", path, error=BundleError)).absolute()
    index = read_shards(
        path, LocalShards([])
    )  # refuses what is no directory of shards before anything starts
    _connect(address)
    from ray import serve

    serve.start(proxy_location="Disabled")
    server: Any = serve.deployment(ShardServer)
    targets = []
    for shard in range(len(index.sizes)):
        options: Any = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": cpus}}
        bound = server.options(name="shard", **options).bind(str(shard_path(path, shard)))
        targets.append(serve.RunTarget(bound, name=shard_name(name, shard), route_prefix=None))
    try:
        serve.run_many(targets)
    except RuntimeError as problem:
        raise AmipsError(f"shards of {path} could not be deployed: {str(problem).splitlines()[0]}") from None
    return connect_shards(path, name=name, timeout=timeout)


def connect_shards(
    path: str | Path, *, name: str = "amips", address: str | None = None, timeout: float = TIMEOUT
) -> ShardedIndex:
    """An index whose shards are those that `deploy_shards` put on a cluster; arguments as there.

    Only the router is read from the directory.
    """
    timeout = check_number("timeout", timeout, above=0)
    path = Path(check_path("path", path, error=BundleError))
    index = read_shards(path, RayShards(name, timeout))
    _connect(address)
    return index


def remove_shards(index: ShardedIndex) -> None:
    """Take the shards of an index that `deploy_shards` or `connect_shards` gave from the cluster."""
    if not isinstance(index.shards, RayShards):
        raise AmipsError("the shards of this index are in this process: there is nothing to remove")
    from ray import serve

    for shard in range(len(index.sizes)):
        serve.delete(shard_name(index.shards.name, shard))


def _connect(address: str | None) -> None:
    """Connect this process to a cluster, unless it is."""
    with needs_extra("serving shards", "ray", "ray", "starlette", "fastapi"):
        import ray
        from ray import serve  # noqa: F401  (what it needs may be missing)
    if ray.is_initialized():
        return
    if address is None:
        raise AmipsError(
            "not connected to a Ray cluster: give its address, or 'auto' for the one on this machine"
        )
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError) as problem:
        raise AmipsError(f"no Ray cluster at {address}: {str(problem).splitlines()[0]}") from None
