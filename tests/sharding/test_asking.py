"""How shards on a cluster are waited for, with shards of which one is silent."""

import threading

import numpy as np
import pytest

from amips.sharding.deployment import RayShards
from amips.sharding.sharded import Question

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of Ray Serve

SILENT, DYING, ANSWERING = range(3)
RESULTS = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64)


@pytest.fixture
def sent(monkeypatch):
    """Which shards were asked, one after the other; the silent one ends when the dying one has answered."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    sent, answered = [], threading.Event()

    class Response:
        def __init__(self, shard, times):
            self.shard, self.times = shard, times

        def result(self, timeout_s):
            if self.shard == SILENT:
                answered.wait(timeout_s)
                raise TimeoutError
            if self.shard == DYING and self.times < 2:
                raise ray.exceptions.ActorDiedError
            if self.shard == DYING:
                answered.set()
            return RESULTS

        def cancel(self):
            pass

    def send(self, question):
        sent.append(question.shard)
        return Response(question.shard, sent.count(question.shard))

    monkeypatch.setattr(RayShards, "_send", send)
    return sent


def test_a_silent_shard_keeps_no_other_from_being_taken_over(sent):
    x = np.zeros((1, 2), np.float32)
    questions = [Question(shard, x, 1, 0.9) for shard in (SILENT, DYING, ANSWERING)]
    silent, *others = RayShards("amips", 5.0, ("", "", "")).ask(questions)
    assert silent == "no answer in 5 s"
    assert all(one is RESULTS for one in others)
    assert sent == [SILENT, DYING, ANSWERING, DYING]
