"""A Ray cluster of two nodes on this machine for each file of tests."""

import pytest

from ray_helpers import join, two_nodes


@pytest.fixture(scope="module")
def nodes():
    """The cluster, one processor a node."""
    with two_nodes(cpus=1) as cluster:
        yield cluster


@pytest.fixture
def joined(nodes):
    """The cluster, joined: for `ray="auto"`, without the seconds that joining takes."""
    join(nodes)
    return nodes
