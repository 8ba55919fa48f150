"""A Ray cluster on this machine for tests, which nothing else on it sees."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

# Before ray is imported: nothing is sent anywhere, all addresses are of the loopback, no token is written.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # others may use the memory of this machine
    # A node that is gone is noticed within two seconds.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_failure_threshold": "10",
    "OMP_NUM_THREADS": "1",
}
STORE = 100 << 20  # bytes of each node's object store, or they would take a third of the memory


@contextmanager
def two_nodes(cpus):
    """Two nodes with so many processors each, which this process has joined; it has left them at the end."""
    before = dict(os.environ)
    # Sockets are in there, whose names may not be long. Ray keeps there, too, which cluster is "auto".
    with tempfile.TemporaryDirectory(prefix="amr", ignore_cleanup_errors=True) as folder:
        os.environ.update(ENVIRONMENT, RAY_TMPDIR=folder)
        Path(folder, "ray").mkdir()
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        node = {"num_cpus": cpus, "object_store_memory": STORE}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            cluster.wait_for_nodes()
            join(cluster)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            os.environ.clear()
            os.environ.update(before)


def join(cluster):
    """Join it with this process, if it has not."""
    import ray

    if not ray.is_initialized():
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
