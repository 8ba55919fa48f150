"""The cells of a FAISS index that was built elsewhere: which row is which entry, what decides its cell."""

import numpy as np
import pytest

import amips
from amips.blas import faiss
from amips.cells import from_faiss, ivf_parts, place_keys
from amips.vectors import open_vectors
from helpers import make_world

N, D, C = 1200, 16, 10
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
STORAGES = ["Flat", "SQ8", "PQ8x4", "PQ8x4fs"]


@pytest.fixture(scope="module")
def keys():
    return make_world(N, 10, D, seed=1)[0]


@pytest.fixture(scope="module")
def names():
    return np.random.default_rng(2).permutation(10**9 + 17 * np.arange(N))


@pytest.fixture(scope="module")
def empty(keys):
    """Trained once, filled by each test: an index by its factory string."""
    trained = {}

    def make(factory, metric=IP):
        if (factory, metric) not in trained:
            index = faiss.index_factory(D, factory, metric)
            ivf = faiss.extract_index_ivf(index)
            ivf.cp.min_points_per_centroid = 1
            if hasattr(ivf, "pq"):
                ivf.pq.cp.min_points_per_centroid = 1
            index.train(keys)
            trained[factory, metric] = faiss.serialize_index(index)
        return faiss.deserialize_index(trained[factory, metric])

    return make


def filled(index, keys, ids=None):
    index.add(keys) if ids is None else index.add_with_ids(keys, ids)
    return index


def nearest(index, keys):
    """The cell of each key by the index's quantizer."""
    parts = ivf_parts(index)
    return parts.ivf.quantizer.search(parts.transformed(keys), 1)[1][:, 0]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("before", ["", "RR16,", "PCA12,"])
@pytest.mark.parametrize("kind", ["", "IDMap,", "IDMap2,", "native"])
@pytest.mark.parametrize("metric", [IP, L2], ids=["ip", "l2"])
def test_every_kind_of_index(empty, keys, names, storage, before, kind, metric):
    if before == "PCA12," and storage.startswith("PQ"):
        storage = storage.replace("PQ8", "PQ6")
    index = empty(f"{kind if kind != 'native' else ''}{before}IVF{C},{storage}", metric)
    filled(index, keys, names if kind else None)
    cells = from_faiss(index, keys)
    np.testing.assert_array_equal(cells.assignment, nearest(index, keys))
    assert cells.assignment.dtype == np.int32
    assert cells.centroids.shape == (C, D)
    placement = place_keys(ivf_parts(index), open_vectors(keys))
    np.testing.assert_array_equal(placement.ids, names if kind else np.arange(N))
    # The same with keys in any order, if their ids are said.
    order = np.random.default_rng(0).permutation(N)
    ids = (names if kind else np.arange(N))[order]
    np.testing.assert_array_equal(from_faiss(index, keys[order], ids=ids).assignment, cells.assignment[order])


def test_centroids_are_the_quantizers_or_behind_a_transform_the_means(empty, keys):
    index = filled(empty(f"IVF{C},Flat"), keys)
    np.testing.assert_array_equal(from_faiss(index, keys).centroids, index.quantizer.reconstruct_n(0, C))
    index = filled(empty(f"PCA12,IVF{C},Flat"), keys)
    cells = from_faiss(index, keys)
    means = [keys[cells.assignment == j].mean(axis=0) for j in range(C)]
    np.testing.assert_allclose(cells.centroids, means, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["", "IDMap,", "RR16,"])
@pytest.mark.parametrize("wrong", ["reversed", "halves", "shifted", "others"])
def test_keys_in_another_order_are_caught(empty, keys, names, storage, kind, wrong):
    index = filled(empty(f"{kind}IVF{C},{storage}"), keys, names if kind == "IDMap," else None)
    changed = {
        "reversed": keys[::-1],
        "halves": np.concatenate([keys[N // 2 :], keys[: N // 2]]),
        "shifted": np.roll(keys, 1, axis=0),
        "others": make_world(N, 10, D, seed=77)[0],
    }[wrong].copy()
    with pytest.raises(
        amips.VectorError, match=r"not those of the index, or in another order.*ids=ids"
    ) as caught:
        from_faiss(index, changed)
    assert "\n" not in str(caught.value)
    with pytest.raises(amips.VectorError, match="in another order"):
        amips.label(changed, changed, cells=index)


def test_ids_that_look_like_rows_in_another_order(empty, keys):
    """add_with_ids with a permutation of 0..n-1: numbers alone do not tell; the vectors do."""
    ids = np.random.default_rng(3).permutation(N)
    index = filled(empty(f"IVF{C},Flat"), keys, ids)
    with pytest.raises(amips.VectorError, match="in another order"):
        from_faiss(index, keys)
    np.testing.assert_array_equal(from_faiss(index, keys, ids=ids).assignment, nearest(index, keys))


@pytest.mark.parametrize("storage", ["Flat", "PQ8x4"])
def test_native_ids_need_no_order(empty, keys, names, storage):
    """The quantizer says where a key is; only which id it has is not known then."""
    index = filled(empty(f"IVF{C},{storage}"), keys, names)
    shuffled = keys[np.random.default_rng(0).permutation(N)]
    placement = place_keys(ivf_parts(index), open_vectors(shuffled))
    np.testing.assert_array_equal(placement.cells, nearest(index, shuffled))
    assert placement.ids is None


def test_native_ids_after_keys_were_removed(empty, keys, names):
    index = filled(empty(f"IVF{C},Flat"), keys, names)
    index.remove_ids(names[:50])
    rest = keys[50:]
    np.testing.assert_array_equal(from_faiss(index, rest).assignment, nearest(index, rest))
    named = place_keys(ivf_parts(index), open_vectors(rest), names[50:])
    np.testing.assert_array_equal(named.ids, names[50:])


def test_numbers_with_a_gap(empty, keys):
    index = filled(empty(f"IVF{C},Flat"), keys)
    index.remove_ids(np.arange(7))
    np.testing.assert_array_equal(from_faiss(index, keys[7:]).assignment, nearest(index, keys[7:]))


def test_native_ids_of_other_keys(empty, keys, names):
    index = filled(empty(f"IVF{C},Flat"), keys, names)
    with pytest.raises(amips.VectorError, match="its quantizer puts them into other cells"):
        from_faiss(index, np.repeat(keys[:1], N, axis=0))


def test_keys_between_two_cells(empty, keys, names):
    """Rounding may have put a key elsewhere than it does today: that is no other set of keys."""
    index = empty(f"IVF{C},Flat")
    cells = nearest(index, keys)
    second = index.quantizer.search(keys, 2)[1][:, 1]
    moved = cells.copy()
    moved[600] = second[600]
    index.add_core(N, faiss.swig_ptr(keys), faiss.swig_ptr(names), faiss.swig_ptr(moved))
    placement = place_keys(ivf_parts(index), open_vectors(keys))
    np.testing.assert_array_equal(placement.cells, cells)


@pytest.mark.parametrize("kind", ["", "IDMap,", "native"])
def test_keys_that_were_added_later(empty, keys, names, kind):
    index = empty(f"{kind if kind != 'native' else ''}IVF{C},Flat")
    filled(index, keys[:900], names[:900] if kind else None)
    before = ivf_parts(index).fingerprint
    filled(index, keys[900:], names[900:] if kind else None)
    parts = ivf_parts(index)
    placement = place_keys(parts, open_vectors(keys[:900]))
    np.testing.assert_array_equal(placement.cells, nearest(index, keys[:900]))
    np.testing.assert_array_equal(placement.ids, names[:900] if kind else np.arange(900))
    assert parts.fingerprint == before
    with pytest.raises(amips.VectorError, match="the index holds 1200 keys of dimension 16, but 900"):
        from_faiss(index, keys[:900])


def test_what_the_fingerprint_stands_for(empty, keys, tmp_path):
    """Centroids and transforms; not storage, keys, ids or the file."""
    plain = filled(empty(f"IVF{C},Flat"), keys)
    fingerprint = ivf_parts(plain).fingerprint
    assert from_faiss(plain, keys).quantizer_fingerprint == fingerprint
    assert amips.cells.Cells(
        np.zeros(3, np.int32), plain.quantizer.reconstruct_n(0, C)
    ).quantizer_fingerprint == (fingerprint)
    faiss.write_index(plain, str(tmp_path / "x.faiss"))
    assert ivf_parts(faiss.read_index(str(tmp_path / "x.faiss"))).fingerprint == fingerprint
    coded = faiss.IndexIVFScalarQuantizer(plain.quantizer, D, C, faiss.ScalarQuantizer.QT_8bit, IP)
    coded.train(keys)
    assert ivf_parts(coded).fingerprint == fingerprint
    rotated = filled(empty(f"RR16,IVF{C},Flat"), keys)
    others = filled(empty(f"IVF{C + 1},Flat"), keys)
    known = {fingerprint, ivf_parts(rotated).fingerprint, ivf_parts(others).fingerprint}
    assert len(known) == 3
    task = amips.label(keys, keys[:100], cells=rotated)
    assert task.fingerprints["quantizer"] == ivf_parts(rotated).fingerprint
    assert amips.task.load_task(task.path).fingerprints == task.fingerprints


def test_l2_of_keys_with_different_norms(empty, keys):
    """Nearest and largest inner product are then different questions."""
    longer = keys * np.linspace(1, 2, N, dtype=np.float32)[:, None]
    index = filled(empty(f"IVF{C},Flat", L2), longer)
    with pytest.raises(
        amips.VectorError, match=r"by L2 distance and the keys have different norms"
    ) as caught:
        from_faiss(index, longer)
    assert "\n" not in str(caught.value)
    from_faiss(filled(empty(f"IVF{C},Flat", IP), longer), longer)


def test_what_cannot_be(empty, keys, names):
    index = filled(empty(f"IDMap,IVF{C},Flat"), keys, names)
    for ids, message in (
        (names[:-1], r"expected 1200 whole numbers"),
        (names.astype(float), "whole numbers"),
        (np.zeros(N, int), "the same id"),
        (names + 1, "does not hold key 0"),
    ):
        with pytest.raises(amips.VectorError, match=message) as caught:
            from_faiss(index, keys, ids=ids)
        assert "\n" not in str(caught.value)
    for wrong in (keys[:-1], keys[:, :8]):
        with pytest.raises(amips.VectorError, match="the index holds 1200 keys of dimension 16"):
            from_faiss(index, wrong)
    with pytest.raises(amips.VectorError, match="has metric 2: inner product or L2"):
        ivf_parts(faiss.IndexIVFFlat(faiss.IndexFlat(D, faiss.METRIC_L1), D, 1, faiss.METRIC_L1))


def test_an_id_map_that_lost_keys(empty, keys, names):
    """FAISS renumbers the map, but not what is inside: its own answers are wrong after that."""
    index = filled(empty(f"IDMap,IVF{C},Flat"), keys, names)
    index.remove_ids(names[:50])
    with pytest.raises(amips.VectorError, match="does not fit its inverted lists"):
        from_faiss(index, keys[50:])
