"""Joining a Ray cluster, and leaving it."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amips.arguments import refused
from amips.cluster.tasks import Cluster
from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.version import __version__

# "auto" and "local" are Ray's own words; otherwise HOST:PORT.
_ADDRESS = re.compile(r"auto|local|[A-Za-z0-9._-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")

ANSWER_SECONDS = 10.0

_joined: list[str] = []  # the address that this process joined its cluster by, as it was given


def check_address(address: Any) -> str | None:
    """The address of a cluster, or None for none; AmipsError if it cannot be one."""
    if address is None:
        return None
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise refused("ray", address, '"auto", "local" or HOST:PORT')
    return address


@contextmanager
def connected(address: str | None) -> Iterator[Cluster | None]:
    """The cluster at an address, left at the end if it was joined here; None for None.

    Args:
        address: "auto" for the cluster that this process has joined, or that runs on this machine or is
            named by RAY_ADDRESS; HOST:PORT; or "local" for one of this machine alone, which ends with the
            block. If the process has joined a cluster already, "auto" and "local" mean that one.
    """
    if check_address(address) is None:
        yield None
        return
    # Of many tasks that fail for one reason, one is reported: by what this process raises.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    with needs_extra("ray=", "ray", "ray"):
        import ray
    joined = ray.is_initialized()
    if not joined:
        join(str(address))
        _joined[:] = [str(address)]  # Ray has another name for localhost
    elif address not in ("auto", "local", *_joined) and ray.get_runtime_context().gcs_address != address:
        present = ray.get_runtime_context().gcs_address
        raise AmipsError(f'ray={address}: this process has joined the cluster at {present}; give ray="auto"')
    try:
        cluster = Cluster(ray)
        _check_versions(cluster)
        yield cluster
    finally:
        if not joined:
            _joined.clear()
            ray.shutdown()


def join(address: str) -> None:
    """Join for good, quietly: what workers print is not for the terminal of whoever waits for a result."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        # Ray would wait for minutes where nobody answers: a head that has ended, and "auto" still names.
        if place := canonicalize_bootstrap_address(address):
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as problem:  # of Ray, of gRPC, of sockets
        reason = (str(problem).splitlines() or [""])[0] or type(problem).__name__
        raise AmipsError(
            f"no Ray cluster can be joined at {address}: {reason}; begin one with: ray start --head"
        ) from None


def _check_versions(cluster: Cluster) -> None:
    """AmipsError unless every node has this amips: another may give other results."""
    for node, version in cluster.everywhere(_version).items():
        if version != __version__:
            raise AmipsError(
                f"node {node} of the Ray cluster has amips {version}, this machine {__version__}: install "
                "the same on all"
            )


def _version() -> str:
    return __version__
