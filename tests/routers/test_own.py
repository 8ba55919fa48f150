"""A router that a user brings along: any object with `scores(x)`, of numpy or torch."""

import faiss
import numpy as np
import pytest
import torch

import amips
from amips.routers import OwnRouter, router_for
from helpers import make_world


class Numpy:
    """Scores centroids that it has learned elsewhere."""

    def __init__(self, vectors, flops=None):
        self.vectors = vectors
        if flops is not None:
            self.flops = flops

    def scores(self, x):
        return x @ self.vectors.T


class Torch(torch.nn.Module):
    """The same as a module, whose scores carry a gradient."""

    def __init__(self, vectors):
        super().__init__()
        self.layer = torch.nn.Linear(vectors.shape[1], len(vectors), bias=False)
        self.layer.weight.data = torch.tensor(vectors)

    def scores(self, x):
        return self.layer(torch.from_numpy(x))


@pytest.fixture(scope="module")
def task():
    keys, queries = make_world(2000, 1500, 16, seed=2)
    return amips.label(keys, queries, cells=20, val=200, test=200)


@pytest.fixture(params=[Numpy, Torch], ids=["numpy", "torch"])
def own(request, task):
    return request.param(task.cells.centroids)


def test_scores(own, task):
    router = router_for(own, task.cells.centroids)
    assert isinstance(router, OwnRouter)
    assert (router.c, router.flops, router.name) == (20, 0, "own router")
    x = np.asarray(task.val.queries)
    scores = router.scores(x)
    assert (type(scores), scores.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(scores, x @ task.cells.centroids.T, atol=1e-5)


def test_build_and_search(own, task):
    """It routes as centroids do, so it finds the same."""
    options = {"storage": "flat", "spill_fraction": 0.0}
    index, plain = amips.build(task, own, **options), amips.build(task, None, **options)
    x = np.asarray(task.test.queries)
    for effort in ({"probes": 3}, {"recall": 0.9}, {}):
        np.testing.assert_array_equal(index.search(x, **effort)[1], plain.search(x, **effort)[1])
    assert index.design.router == "own"
    recall = (index.search(x)[1][:, :, None] == task.test.top_ids[:, None, :]).any(axis=2).mean()
    assert recall > 0.9


def test_its_cost_is_what_it_says(task):
    options = {"storage": "flat", "spill_fraction": 0.0}
    index = amips.build(task, Numpy(task.cells.centroids, flops=640), **options)
    assert index.cost(np.asarray(task.test.queries), probes=2).network == 640


def test_wrap(own, task):
    quantizer = faiss.IndexFlatIP(16)
    index = faiss.IndexIVFFlat(quantizer, 16, 20, faiss.METRIC_INNER_PRODUCT)
    index.train(np.asarray(task.keys))
    index.add(np.asarray(task.keys))
    centroids = quantizer.reconstruct_n(0, 20)
    x = np.asarray(task.test.queries)
    wrapped = amips.wrap(index, type(own)(centroids))
    index.nprobe = 4
    np.testing.assert_array_equal(wrapped.search(x, 10, probes=4)[1], index.search(x, 10)[1])


def test_it_is_saved_without_and_brought_again(own, task, tmp_path):
    index = amips.build(task, own, storage="flat", spill_fraction=0.0)
    index.save(tmp_path / "bundle")
    with pytest.raises(amips.BundleError, match="needs the router it was saved with") as caught:
        amips.load(tmp_path / "bundle")
    assert "\n" not in str(caught.value)
    again = amips.load(tmp_path / "bundle", model=own)
    assert (again.points, again.temperature) == (index.points, index.temperature)
    x = np.asarray(task.test.queries)
    for options in ({"probes": 3}, {"min_mass": 0.1}):
        np.testing.assert_array_equal(again.search(x, **options)[1], index.search(x, **options)[1])


@pytest.mark.parametrize("shape", [(5,), (4, 20), (5, 19)])
def test_scores_of_another_shape(task, shape):
    class Wrong:
        def scores(self, x):
            return np.zeros(shape, np.float32)

    with pytest.raises(amips.RunError, match=r"expected \[5, 20\]: one for each cell"):
        router_for(Wrong(), task.cells.centroids).scores(np.zeros((5, 16), np.float32))


def test_without_scores(task):
    with pytest.raises(amips.RunError, match=r"a dict cannot route: it has no method scores\(x\)"):
        amips.build(task, {})
