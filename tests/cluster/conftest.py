"""A Ray cluster of two nodes on this machine, started once and joined by the process of the tests."""

import os
import tempfile

import pytest

# Before ray is imported: nothing is sent anywhere, all addresses are of the loopback, no token is written.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # A node that is gone is noticed within two seconds.
    "RAY_memory_monitor_refresh_ms": "0",  # others may use the memory of this machine
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_failure_threshold": "10",
}
STORE = 100 << 20  # bytes of each node's object store, or they would take a third of the memory


@pytest.fixture(scope="session")
def two_nodes():
    """The cluster, one processor a node."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Sockets are in there, whose names may not be long.
    with tempfile.TemporaryDirectory(prefix="amr", ignore_cleanup_errors=True) as folder:
        node = {"num_cpus": 1, "object_store_memory": STORE}
        cluster = Cluster(
            initialize_head=True, head_node_args={**node, "include_dashboard": False, "temp_dir": folder}
        )
        try:
            cluster.add_node(**node)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture
def joined(two_nodes):
    """The cluster, joined: for `ray="auto"`, without the seconds that joining takes."""
    import ray

    if not ray.is_initialized():
        ray.init(address=two_nodes.address, log_to_driver=False, logging_level="ERROR")
    return two_nodes
