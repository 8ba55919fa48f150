"""What is on a cluster after shards are deployed once more, with a Ray Serve that only takes notes."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from amips.errors import AmipsError
from amips.sharding import deployment


class Notes(ModuleType):
    """Applications by name; what is deployed runs at once, or fails to."""

    def __init__(self, there, state):
        super().__init__("ray.serve")
        self.there, self.state = dict.fromkeys(there, "RUNNING"), state

    def start(self, **options):
        pass

    def status(self):
        def state(status):
            return SimpleNamespace(status=status, deployments={}, message="no room")

        return SimpleNamespace(applications={name: state(status) for name, status in self.there.items()})

    def deployment(self, server):
        bound = SimpleNamespace(bind=lambda *arguments: None)
        return SimpleNamespace(options=lambda **options: bound)

    def RunTarget(self, bound, name, route_prefix):  # noqa: N802
        return name

    def run_many(self, names, wait_for_applications_running):
        self.there |= dict.fromkeys(names, self.state)

    def delete(self, name, _blocking):
        del self.there[name]


@pytest.fixture
def deploy(monkeypatch):
    def deploy(there, state, shards):
        notes = Notes(there, state)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=notes))
        monkeypatch.setattr(deployment, "_connect", lambda address: None)
        index = SimpleNamespace(digests=["d"] * shards, sizes=np.ones(shards, np.int64))
        monkeypatch.setattr(deployment, "read_shards", lambda path, shards: index)
        monkeypatch.setattr(deployment, "connect_shards", lambda *_, **__: index)
        try:
            deployment.deploy_shards("shards", starting=5)
        finally:
            deploy.names = sorted(notes.there)
        return deploy.names

    return deploy


def test_fewer_shards_leave_none_of_before(deploy):
    there = ["amips-000", "amips-001", "amips-002", "amips-other-002", "shop"]
    assert deploy(there, "RUNNING", 2) == ["amips-000", "amips-001", "amips-other-002", "shop"]


def test_what_fails_takes_away_only_what_it_brought(deploy):
    with pytest.raises(AmipsError, match=r"could not be deployed: amips-00[01]: no room"):
        deploy(["amips-000", "amips-002"], "DEPLOY_FAILED", 2)
    assert deploy.names == ["amips-000", "amips-002"]
