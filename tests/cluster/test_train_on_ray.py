"""Training on a Ray cluster: the loop of torchrun, workers that are lost, and what nodes must see."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file  # noqa: E402

import amips  # noqa: E402
from amips.cells import kmeans  # noqa: E402
from amips.learn import on_ray  # noqa: E402
from amips.nets import read_run_log  # noqa: E402

# Ray Train takes half a minute to begin on a busy machine: `make chaos` has all of it.
in_full = pytest.mark.skipif("AMIPS_CHAOS" not in os.environ, reason="in `make chaos`")
NETWORK = {"network": amips.SupportNet(size=0.05, depth=2), "samples": 1920, "evaluations": 4}


@pytest.fixture(scope="module")
def many(world, tmp_path_factory):
    """24 cells: enough for the gradient loss to draw some."""
    out = tmp_path_factory.mktemp("many") / "task"
    return amips.label(*world, cells=24, val=100, test=100, copies=1, cell_targets=True, out=out)


@pytest.fixture(scope="module")
def two(many, nodes, tmp_path_factory):
    """A run of two workers that nothing happened to."""
    out = tmp_path_factory.mktemp("two") / "run"
    amips.train(many, out=out, batch=32, ray="auto", workers=2, **NETWORK)
    return out


@pytest.mark.slow
def test_two_workers_are_one_process_with_the_doubled_batch(many, two, tmp_path):
    for name, batch in (("one", 64), ("half", 32)):
        amips.train(many, out=tmp_path / name, batch=batch, **NETWORK)
    one, there, half = (
        load_file(run / "checkpoint.safetensors") for run in (tmp_path / "one", two, tmp_path / "half")
    )
    for name, value in one.items():
        np.testing.assert_allclose(there[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert max(abs(one[name] - half[name]).max() for name in one if name.startswith("parameters")) > 1e-3
    for a, b in zip(read_run_log(two), read_run_log(tmp_path / "one"), strict=True):
        assert a["samples"] == b["samples"]
        assert a["val"]["score"] == pytest.approx(b["val"]["score"], rel=1e-3)
    assert sorted(path.name for path in two.iterdir() if path.name != ".lock") == [
        *("checkpoint.safetensors", "config.json", "log.jsonl", "model.json", "model.safetensors")
    ]


def lost_once(mark, how):
    """The work of a worker whose second process is lost as soon as there is a checkpoint."""
    work = on_ray.work

    def lost(inputs):
        import threading
        import time
        from pathlib import Path

        def watch():
            while not Path(inputs["out"], "checkpoint.safetensors").exists():
                time.sleep(0.002)
            if not Path(mark).exists():
                Path(mark).touch()
                how()

        if os.environ["RANK"] == "1" and not Path(mark).exists():
            threading.Thread(target=watch, daemon=True).start()
        work(inputs)

    return lost


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_is_killed_in_the_middle(many, two, nodes, tmp_path, monkeypatch):
    """The rest is begun again from the checkpoint: the same bytes as of a run without that."""
    mark = str(tmp_path / "killed")

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(on_ray, "work", lost_once(mark, kill))
    amips.train(many, out=tmp_path / "run", batch=32, ray="auto", workers=2, **NETWORK)
    assert os.path.exists(mark)  # noqa: PTH110
    same(tmp_path / "run", two)


@in_full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_is_removed_in_the_middle(many, two, nodes, tmp_path, monkeypatch):
    """One that came with the second worker; the node that was there before takes its place."""
    mark = tmp_path / "asked"

    def ask():
        import time

        time.sleep(60)  # until the node is gone

    import ray

    busy = ray.remote(num_cpus=1)(lambda seconds: time.sleep(seconds))
    extra = nodes.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"extra": 1})
    nodes.wait_for_nodes()
    before = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != extra.node_id]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(before[-1], soft=False)
    held = busy.options(scheduling_strategy=place).remote(600)
    monkeypatch.setattr(on_ray, "work", lost_once(str(mark), ask))
    time.sleep(1.0)

    def remove():
        end = time.monotonic() + 90
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.01)
        nodes.remove_node(extra, allow_graceful=False)
        ray.cancel(held, force=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        amips.train(many, out=tmp_path / "run", batch=32, ray="auto", workers=2, **NETWORK)
    finally:
        remover.join()
    assert mark.exists()
    same(tmp_path / "run", two)


def same(run, other):
    a, b = (load_file(path / "checkpoint.safetensors") for path in (run, other))
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@in_full
@pytest.mark.slow
def test_cells_of_their_own_a_finished_run_and_progress(many, nodes, tmp_path, capfd, monkeypatch):
    """A task whose cells are not those on disk, as a fit has it; the same call again finds it finished."""
    monkeypatch.setattr("amips.progress.SECONDS", 0.0)
    monkeypatch.setattr(on_ray, "LOOK_SECONDS", 0.05)
    task = many.with_cells(kmeans(many.key_vectors, 12))
    options = {"out": tmp_path / "run", "samples": 640, "batch": 32, "ray": "auto", "workers": 1}
    model = amips.train(task, progress=True, **options)
    assert model.c == 12
    assert "training on 1 workers" in capfd.readouterr().err
    monkeypatch.setattr(on_ray, "run_together", None)
    again = amips.train(task, **options)
    assert again.about["samples"] == model.about["samples"]


class TestWhatIsWrong:
    @in_full
    @pytest.mark.slow
    def test_an_error_of_the_run_is_not_tried_again_and_again(self, many, nodes, tmp_path, monkeypatch):
        work, marks = on_ray.work, str(tmp_path / "begun")

        def broken(inputs):
            import amips
            from amips.learn import loop

            def no_loss(*inputs):
                raise amips.TrainingDivergedError("the loss is not finite")

            with open(marks, "a") as file:  # noqa: PTH123
                file.write("x")
            loop.total_loss = no_loss
            work(inputs)

        monkeypatch.setattr(on_ray, "work", broken)
        with pytest.raises(amips.TrainingDivergedError, match="the loss is not finite"):
            amips.train(many, out=tmp_path / "r", batch=32, ray="auto", workers=1, **NETWORK)
        assert (tmp_path / "begun").read_text() == "xx"
        assert not (tmp_path / "r" / on_ray.NOTES).exists()

    def test_a_node_that_does_not_see_the_run(self, many, nodes, tmp_path, monkeypatch):
        monkeypatch.setattr("amips.learn.on_ray.Cluster.everywhere", lambda self, *job: {"elsewhere": False})
        monkeypatch.setattr("amips.cluster.connecting._check_versions", lambda cluster: None)
        with pytest.raises(amips.RunError, match=r"^node elsewhere of the Ray cluster does not see .*share$"):
            amips.train(many, out=tmp_path / "r", ray="auto", workers=2, **NETWORK)
        assert not (tmp_path / "r").exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"workers": 2}, "^workers=2: give the Ray cluster"),
            ({"workers": 0, "ray": "auto"}, "^workers=0: expected a whole number"),
            ({"ray": "auto"}, "^ray: give the directory of the run, as out"),
            ({"ray": 3, "out": "r"}, "^ray=3: expected"),
        ],
    )
    def test_arguments(self, many, options, message):
        with pytest.raises(amips.AmipsError, match=message):
            amips.train(many, **options)

    def test_more_workers_than_processors_are_refused(self, many, tmp_path, monkeypatch):
        """Ray would wait for another node, silently and without end."""
        cluster = SimpleNamespace(processors=lambda: 2, nodes=lambda: ["a", "b"])
        monkeypatch.setattr(on_ray, "connected", lambda address: nullcontext(cluster))
        with pytest.raises(amips.RunError, match=r"^workers=3: the Ray cluster has 2 processors, and each"):
            amips.train(many, out=tmp_path / "r", ray="auto", workers=3, **NETWORK)
