"""k-means and fit on a Ray cluster: the cells of one process, and a bundle."""

import json

import numpy as np
import pytest

import amips
from amips.blas import faiss
from amips.cells import kmeans, lloyd, query_aware
from amips.cluster import Cluster
from helpers import generate, make_world


class Here:
    """What a cluster does, by this process."""

    def put(self, value):
        return value

    def note(self, bar, began):
        """Nothing is shown."""

    def map(self, jobs):
        return (function(*arguments) for function, *arguments in jobs)


@pytest.fixture
def cluster(joined):
    import ray

    return Cluster(ray)


@pytest.mark.parametrize("spherical", [True, False])
@pytest.mark.parametrize(("n", "count"), [(6000, 40), (20_000, 600), (500, 150), (40, 40)])
def test_centroids_are_those_of_faiss_to_the_last_bit(n, count, spherical):
    points, _ = make_world(n, 1, 16, seed=3)
    if n == 500:
        points[:300] = points[0]  # equal ones: many cells become empty, and are filled from others
    means = faiss.Kmeans(
        *(16, count),
        **{"niter": 6, "seed": 5, "spherical": spherical},
        **{"min_points_per_centroid": 1, "max_points_per_centroid": -(-n // count)},
    )
    means.train(points)
    centroids = lloyd.kmeans_on(Here(), points, count, spherical, 6, 5)
    np.testing.assert_array_equal(centroids, means.centroids)
    assert (sum(one["nsplit"] for one in means.iteration_stats) > 0) == (n == 500)


@pytest.mark.parametrize("spherical", [True, False])
def test_cells_are_the_same(cluster, tmp_path, monkeypatch, spherical):
    """Of an array, which is handed over, and of a file; from a sample, and from all keys."""
    monkeypatch.setattr(lloyd, "BLOCK", 4096)
    keys, _ = make_world(9000, 1, 24, seed=2)
    np.save(tmp_path / "keys.npy", keys)
    for source, points in ((keys, 30), (tmp_path / "keys.npy", None)):
        options = {"spherical": spherical, "runs": 2, "points": points, "seed": 4, "iterations": 4}
        here = kmeans(source, 100, **options)
        there = kmeans(source, 100, cluster=cluster, **options)
        np.testing.assert_array_equal(there.assignment, here.assignment)
        np.testing.assert_array_equal(there.centroids, here.centroids)


def test_query_aware_cells_are_the_same(cluster):
    keys, queries = make_world(3000, 500, 16, seed=2)
    top = np.argsort(-queries @ keys.T, axis=1)[:, :10]
    here, there = (query_aware(keys, queries, top, 60, cluster=one) for one in (None, cluster))
    np.testing.assert_array_equal(there.assignment, here.assignment)
    np.testing.assert_array_equal(there.centroids, here.centroids)


@pytest.mark.slow
def test_fit(joined, tmp_path, capfd):
    """All of it, on two nodes: what is chosen is searched, and the routers were trained by two workers."""
    pytest.importorskip("torch")
    keys, queries = generate(3000, 1200, 16)
    np.save(tmp_path / "keys.npy", keys)
    worlds = []
    trained = amips.train

    def noted(*arguments, **options):
        worlds.append(options["workers"])
        model = trained(*arguments, **options)
        worlds.append(json.loads((options["out"] / "config.json").read_text())["world"])
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amips.learn.train", noted)
        patch.setattr("amips.fitting.fitting.SURVIVORS", 1)
        index = amips.fit(
            tmp_path / "keys.npy", queries, out=tmp_path / "b", cells=48, minutes=0.2, ray="auto", quiet=True
        )
    assert worlds == [2, 2]
    _, ids = index.search(queries[:200], k=10)
    truth = np.argsort(-queries[:200] @ keys.T, axis=1)[:, :10]
    assert np.mean([len(set(a) & set(b)) for a, b in zip(ids, truth, strict=True)]) > 9
    assert not (tmp_path / "b.work").exists()


def test_fit_refuses_a_device_beside_it():
    keys, queries = make_world(200, 100, 8, seed=0)
    with pytest.raises(amips.AmipsError, match=r"^device and ray: "):
        amips.fit(keys, queries, ray="auto", device="cpu")
