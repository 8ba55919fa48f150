"""A FAISS index that was built elsewhere: its own answers, in cells that a model chooses."""

import numpy as np
import pytest

import amips
from amips.blas import faiss
from amips.cells import ivf_parts, place_keys
from amips.nets import AffineArchitecture, AffineNet, Architecture, Net, weight_shapes
from amips.search import WrappedIndex
from amips.vectors import open_vectors
from helpers import make_world

N, D, C = 1500, 16, 12
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2


_indexes = {}  # training takes most of the time


def make_index(keys, factory, metric=IP, ids=None):
    name = (hash(keys.tobytes()), factory, metric, None if ids is None else ids.tobytes())
    if name not in _indexes:
        _indexes[name] = faiss.serialize_index(train_index(keys, factory, metric, ids))
    return faiss.deserialize_index(_indexes[name])


def train_index(keys, factory, metric, ids):
    index = faiss.index_factory(keys.shape[1], factory, metric)
    faiss.ParameterSpace().set_index_parameter(index, "verbose", 0)
    ivf = faiss.extract_index_ivf(index)
    ivf.cp.min_points_per_centroid = 1
    if hasattr(ivf, "pq"):
        ivf.pq.cp.min_points_per_centroid = 1
    if isinstance(index, faiss.IndexPreTransform):
        transform = faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(transform, faiss.OPQMatrix):  # as good as random, and fast
            transform.niter = transform.niter_pq = transform.niter_pq_0 = 1
            transform.max_train_points = 300
    index.train(keys)
    if ids is None:
        index.add(keys)
    else:
        index.add_with_ids(keys, ids)
    return index


def identity(d):
    """A mapper whose predicted key points where the query does: KeyNet of one linear layer."""
    weights = {"Wx.0": np.eye(d, dtype=np.float32), "b.0": np.zeros(d, np.float32)}
    weights |= {"W": np.eye(d, dtype=np.float32), "b": np.zeros(d, np.float32)}
    return Net(Architecture("key", d, 1, d, 1, (), alpha=1.0), weights, {})


def random_mapper(d, seed=0):
    architecture = Architecture("key", d, 1, 8, 2, ())
    rng = np.random.default_rng(seed)
    shapes = weight_shapes(architecture).items()
    return Net(architecture, {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes}, {})


def router(index, d, seed=0, **about):
    """Random scores for the cells of an index, as if it had been trained on them."""
    ivf = faiss.extract_index_ivf(index)
    weights = {"W": np.random.default_rng(seed).standard_normal((ivf.nlist, d)).astype(np.float32)}
    about = {"quantizer": ivf_parts(index).fingerprint, **about}
    return AffineNet(AffineArchitecture(d, ivf.nlist), weights, about)


@pytest.fixture(scope="module")
def data():
    """Unit keys and queries: the norm does not change which cells are nearest."""
    return make_world(N, 400, D, seed=3)


# Scalar quantisers and residual PQ add the coarse score to that of the codes: the base must be right.
FACTORIES = ["IVF12,Flat", "IVF12,SQ8", "IVF12,PQ4x4", "IVF12,PQ8x4fs", "IVF12_HNSW8,Flat"]
TRANSFORMED = ["PCA8,IVF12,Flat", "OPQ4_16,IVF12,PQ4x4", "RR16,IVF12,SQ8", "PCA12,RR12,IVF12,Flat"]


@pytest.mark.parametrize("metric", [IP, L2], ids=["ip", "l2"])
@pytest.mark.parametrize("factory", FACTORIES + TRANSFORMED)
def test_a_mapper_that_changes_nothing_gives_the_index_its_own_answers(data, factory, metric):
    keys, queries = data
    index = make_index(keys, factory, metric)
    ivf = faiss.extract_index_ivf(index)
    wrapped = amips.wrap(index, identity(D))
    for probes in (1, 4, C):
        ivf.nprobe = probes
        expected = index.search(queries, 10)
        for options in ({"probes": probes}, {}):
            scores, ids = wrapped.search(queries, 10, **options)
            assert scores.dtype == np.float32
            assert ids.dtype == np.int64
            np.testing.assert_allclose(scores, expected[0], rtol=1e-4, atol=1e-4)
            assert (ids == expected[1]).mean() > 0.98  # ties, and the last bits of the scores


@pytest.mark.parametrize("factory", FACTORIES + TRANSFORMED)
@pytest.mark.parametrize("metric", [IP, L2], ids=["ip", "l2"])
def test_a_router_chooses_the_cells_and_the_index_scores_them(data, factory, metric):
    """Against every key of the chosen cells, scored by the index itself."""
    keys, queries = data
    index = make_index(keys, factory, metric)
    model = router(index, D)
    scores, ids = amips.wrap(index, model).search(queries[:50], 5, probes=2)
    cells = place_keys(ivf_parts(index), open_vectors(keys)).cells
    chosen = np.argsort(-model.scores(queries[:50]), axis=1)[:, :2]
    faiss.extract_index_ivf(index).nprobe = C
    all_scores, all_ids = index.search(queries[:50], N)  # exhaustive: every cell
    for row in range(50):
        allowed = np.isin(cells[all_ids[row]], chosen[row])
        np.testing.assert_allclose(scores[row], all_scores[row][allowed][:5], rtol=1e-4, atol=1e-4)
        assert np.isin(cells[ids[row]], chosen[row]).all()


def test_flat_scores_are_true_inner_products(data):
    keys, queries = data
    keys = keys * np.random.default_rng(0).uniform(0.5, 2, (N, 1)).astype(np.float32)
    scores, ids = amips.wrap(make_index(keys, "IVF12,Flat"), random_mapper(D)).search(queries, 10, probes=3)
    expected = np.einsum("md,mkd->mk", queries, keys[ids])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_what_is_wrapped_is_said_in_one_line(data):
    index = make_index(data[0], "PCA8,IVF12,Flat")
    said = repr(amips.wrap(index, identity(D)))
    assert said == "<WrappedIndex: IndexIVFFlat of 1,500 keys, d = 16, 12 cells, routed by key mapper>"


def test_the_mapper_decides(data):
    """With one probe the cell is the one nearest to the predicted key."""
    keys, queries = data
    index, model = make_index(keys, "IVF12,Flat"), random_mapper(D)
    ids = amips.wrap(index, model).search(queries, 1, probes=1)[1][:, 0]
    expected = index.quantizer.search(np.ascontiguousarray(model.keys(queries)[:, 0]), 1)[1][:, 0]
    np.testing.assert_array_equal(amips.cells.from_faiss(index, keys).assignment[ids], expected)
    assert (expected != index.quantizer.search(queries, 1)[1][:, 0]).any()


@pytest.mark.parametrize("factory", ["IDMap,IVF12,Flat", "IDMap2,IVF12,Flat", "IDMap,PCA8,IVF12,PQ4x4"])
def test_external_ids_come_back(data, factory):
    keys, queries = data
    ids = np.random.default_rng(1).permutation(10**9 + np.arange(N) * 17)
    index = make_index(keys, factory, ids=ids)
    ivf = faiss.extract_index_ivf(index)
    ivf.nprobe = 3
    answers = amips.wrap(index, identity(D)).search(queries, 10)
    assert (answers[1] == index.search(queries, 10)[1]).mean() > 0.98
    every = amips.wrap(index, router(index, D)).search(queries, N, probes=1)[1]
    assert np.isin(every, [-1, *ids]).all()
    assert (every == -1).any()


def test_a_map_of_ids_behind_a_transform(data):
    keys, queries = data
    ids = np.arange(N) + 5000
    inner = make_index(keys, "IVF12,Flat")
    named = faiss.IndexIDMap(faiss.IndexIVFFlat(inner.quantizer, D, C, IP))
    rotation = faiss.RandomRotationMatrix(D, D)
    rotation.init(3)
    index = faiss.IndexPreTransform(rotation, named)
    named.index.is_trained = named.is_trained = index.is_trained = True
    index.add_with_ids(keys, ids)
    faiss.extract_index_ivf(index).nprobe = C
    expected = index.search(queries, 10)
    assert (amips.wrap(index, identity(D)).search(queries, 10)[1] == expected[1]).mean() > 0.98


def test_an_index_in_a_file(data, tmp_path):
    keys, queries = data
    index = make_index(keys, "IVF12,PQ4x4")
    index.nprobe = 5
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    identity(D).save(tmp_path / "run")
    before = (tmp_path / "x.faiss").read_bytes()
    for path, model in ((tmp_path / "x.faiss", identity(D)), (str(tmp_path / "x.faiss"), tmp_path / "run")):
        answers = amips.wrap(path, model).search(queries, 10)
        np.testing.assert_allclose(answers[0], index.search(queries, 10)[0], rtol=1e-4, atol=1e-4)
    assert (tmp_path / "x.faiss").read_bytes() == before


@pytest.mark.parametrize("factory", [*FACTORIES[:4], *TRANSFORMED[:2], "IDMap,IVF12,Flat"])
def test_the_index_is_left_as_it_was(data, factory):
    keys, queries = data
    index = make_index(keys, factory, ids=np.arange(N) if factory.startswith("IDMap") else None)
    ivf = faiss.extract_index_ivf(index)
    ivf.nprobe = 7
    before, expected = faiss.serialize_index(index), index.search(queries, 10)
    for model in (random_mapper(D), router(index, D)):
        wrapped = amips.wrap(index, model)
        for probes in (None, 1, C, 10 * C):
            wrapped.search(queries, 10, probes=probes)
    assert ivf.nprobe == 7
    assert index.ntotal == N
    np.testing.assert_array_equal(faiss.serialize_index(index), before)
    np.testing.assert_array_equal(index.search(queries, 10)[1], expected[1])


# Routers trained on the index's own cells


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A linear router trained on the cells of an index that hides behind a map of ids and a rotation."""
    folder = tmp_path_factory.mktemp("wrap")
    keys, queries = data
    index = make_index(keys, "IDMap,RR16,IVF12,Flat", ids=np.arange(N) + 7000)
    task = amips.label(keys, queries, cells=index, val=80, test=80, out=folder / "task")
    model = amips.train(task, amips.Linear(), samples=60_000, out=folder / "run")
    return index, task, model, folder


def recall(wrapped, task, probes):
    ids = wrapped.search(task.test.queries, 1, probes=probes)[1][:, 0] - 7000
    return (ids == task.test.top_ids[:, 0]).mean()


def test_a_router_trained_on_the_cells_finds_the_top_key(trained):
    index, task, model, folder = trained
    inside = faiss.extract_index_ivf(index).quantizer.search(ivf_parts(index).transformed(task.keys), 1)[1]
    np.testing.assert_array_equal(task.cells.assignment, inside[:, 0])
    learned = recall(amips.wrap(index, model), task, 1)
    plain = recall(amips.wrap(index, identity(D)), task, 1)
    assert learned > 0.8  # one cell of twelve
    assert learned > plain - 0.05
    assert learned > 3 * recall(amips.wrap(index, router(index, D)), task, 1)
    assert recall(amips.wrap(index, folder / "run"), task, 1) == learned
    assert recall(amips.wrap(index, model), task, C) == 1


def test_a_router_is_refused_on_other_cells(trained, data):
    keys, _ = data
    model = trained[2]
    with pytest.raises(amips.AmipsError, match="trained on other cells"):
        amips.wrap(make_index(keys, "RR16,IVF12,Flat", L2), model)
    with pytest.raises(amips.AmipsError, match="trained on other cells than this index has: label with"):
        amips.wrap(make_index(keys[::-1].copy(), "RR16,IVF12,Flat"), model)
    with pytest.raises(amips.AmipsError, match="scores 12 cells, the index has 10"):
        amips.wrap(make_index(keys, "IVF10,Flat"), model)


def test_a_mapper_that_was_trained(data, tmp_path):
    keys, queries = data
    task = amips.label(keys, queries, cells=1, val=80, test=80, out=tmp_path / "task")
    network = amips.KeyNet(depth=1, width=24)
    model = amips.train(task, network, samples=30_000, out=tmp_path / "run")
    index = make_index(keys, "IVF12,Flat")
    x, true = task.test.queries, task.test.top_ids[:, 0]
    recalls = [(amips.wrap(index, model).search(x, 1, probes=p)[1][:, 0] == true).mean() for p in (1, 4, C)]
    assert recalls == sorted(recalls)
    assert recalls[-1] == 1
    assert recalls[0] > 0.3  # one cell of twelve


def test_the_cells_of_a_plain_index_come_with_its_centroids(data, tmp_path):
    keys, queries = data
    index = make_index(keys, "IVF12,Flat", L2)
    task = amips.label(
        keys, queries, cells=index, cell_targets=True, val=50, test=50, k=5, out=tmp_path / "task"
    )
    np.testing.assert_array_equal(task.cells.centroids, index.quantizer.reconstruct_n(0, C))
    assert task.has_cell_targets
    _, nearest = index.quantizer.search(keys, 1)
    np.testing.assert_array_equal(task.cells.assignment, nearest[:, 0])


def test_behind_a_transform_the_means_stand_for_the_centroids(data, trained):
    keys, task = data[0], trained[1]
    for j in range(C):
        members = keys[task.cells.assignment == j]
        np.testing.assert_allclose(task.cells.centroids[j], members.mean(axis=0), atol=1e-5)


def test_an_empty_cell(data, tmp_path):
    keys, queries = data
    index = make_index(keys, "IVF12,Flat")
    cells = amips.cells.from_faiss(index, keys).assignment
    kept = keys[cells != 5]
    index.reset()
    index.add(kept)
    with pytest.raises(amips.VectorError, match=r"cell 5 holds no keys.*without cell_targets") as caught:
        amips.label(kept, queries, cells=index, cell_targets=True, out=tmp_path / "task", val=50, test=50)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "task").exists()
    task = amips.label(kept, queries, cells=index, val=50, test=50, out=tmp_path / "task")
    model = amips.train(task, amips.Linear(), samples=5_000, out=tmp_path / "run")
    ids = amips.wrap(index, model).search(task.test.queries, 1, probes=C)[1][:, 0]
    np.testing.assert_array_equal(ids, task.test.top_ids[:, 0])
    assert (amips.build(task, model).search(task.test.queries, 1, probes=C)[1][:, 0] == ids).all()


def test_the_keys_given_must_be_those_of_the_index(data, tmp_path):
    keys, queries = data
    index = make_index(keys, "IVF12,Flat")
    for wrong, asked in ((keys[:-1], queries), (keys[:, :8], queries[:, :8])):
        with pytest.raises(amips.VectorError, match="the index holds 1500 keys of dimension 16"):
            amips.label(wrong, asked, cells=index, out=tmp_path / "task", val=50, test=50)
    assert not (tmp_path / "task").exists()


# What cannot be wrapped, and what cannot be searched


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "SQ8", "IDMap,Flat", "PCA8,Flat"])
def test_an_index_without_cells(data, factory, tmp_path):
    index = faiss.index_factory(D, factory, IP)
    index.train(data[0])
    index.add_with_ids(data[0], np.arange(N)) if "IDMap" in factory else index.add(data[0])
    with pytest.raises(amips.AmipsError, match="has no cells; an IndexIVF is needed") as caught:
        amips.wrap(index, identity(D))
    assert "\n" not in str(caught.value)
    with pytest.raises(amips.AmipsError, match="has no cells"):
        amips.label(*data, cells=index, out=tmp_path / "task", val=50, test=50)


def test_a_transform_that_is_not_linear(data):
    with pytest.raises(amips.AmipsError, match="NormalizationTransform, which is not linear"):
        amips.wrap(make_index(data[0], "L2norm,IVF12,Flat"), identity(D))


def test_a_model_of_another_dimension(data):
    index = make_index(data[0], "PCA8,IVF12,Flat")
    with pytest.raises(amips.AmipsError, match="model is for dimension 8, the index for 16"):
        amips.wrap(index, identity(8))


def test_an_untrained_index():
    quantizer = faiss.IndexFlatIP(D)
    with pytest.raises(amips.AmipsError, match="not trained"):
        amips.wrap(faiss.IndexIVFFlat(quantizer, D, C, IP), identity(D))


def test_files_that_are_no_index(data, tmp_path):
    with pytest.raises(amips.AmipsError, match=r"none\.faiss does not exist"):
        amips.wrap(tmp_path / "none.faiss", identity(D))
    with pytest.raises(amips.AmipsError, match="does not exist"):
        amips.wrap(tmp_path, identity(D))
    faiss.write_index(make_index(data[0], "IVF12,Flat"), str(tmp_path / "good.faiss"))
    good = (tmp_path / "good.faiss").read_bytes()
    for content in (b"", b"garbage", b"IwFl garbage of some length", good[: len(good) // 2], good[:-1]):
        (tmp_path / "bad.faiss").write_bytes(content)
        with pytest.raises(amips.AmipsError, match=r"bad\.faiss is not a readable FAISS index") as caught:
            amips.wrap(tmp_path / "bad.faiss", identity(D))
        assert "\n" not in str(caught.value)
    with pytest.raises(amips.RunError, match=r"model\.json does not exist"):
        amips.wrap(tmp_path / "good.faiss", tmp_path / "no-run")


@pytest.fixture(scope="module")
def small(data):
    return amips.wrap(make_index(data[0], "IVF12,Flat"), identity(D))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_a_query_that_is_not_finite(small, data, bad):
    x = data[1][:5].astype(np.float64)
    x[3, 2] = bad
    with pytest.raises(amips.VectorError, match="query 3 is not finite"):
        small.search(x)


@pytest.mark.parametrize(
    "x", [np.zeros((2, 5)), np.zeros(5), np.zeros((2, 2, D)), np.zeros(()), [["a"] * D], None]
)
def test_queries_of_the_wrong_shape_or_type(small, x):
    with pytest.raises(amips.VectorError, match=r"this index needs numbers \[m, 16\]"):
        small.search(x)


@pytest.mark.parametrize("options", [{"k": 0}, {"probes": 0}, {"probes": -1}, {"k": -2}])
def test_k_and_probes_are_at_least_one(small, data, options):
    with pytest.raises(amips.AmipsError, match="at least 1"):
        small.search(data[1][:3], **options)


def test_queries_in_other_forms(small, data):
    x = data[1][:6]
    expected = small.search(x, 5, probes=4)
    for form in (x.astype(np.float64), np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x.tolist()):
        np.testing.assert_array_equal(small.search(form, 5, probes=4)[1], expected[1])
    np.testing.assert_array_equal(small.search(x[0], 5, probes=4)[1], expected[1][:1])
    np.testing.assert_array_equal(small.search(x, 5, probes=4, threads=1)[1], expected[1])
    scores, ids = small.search(x[:0], 5, probes=4)
    assert scores.shape == ids.shape == (0, 5)


def test_more_results_than_there_are(small, data):
    scores, ids = small.search(data[1][:3], N + 7, probes=10 * C)
    assert (ids[:, -7:] == -1).all()
    assert (np.sort(ids[:, :N], axis=1) == np.arange(N)).all()
    assert scores.shape == (3, N + 7)


def test_a_large_batch_goes_block_by_block(small, data, monkeypatch):
    expected = small.search(data[1], 5, probes=4)
    monkeypatch.setattr("amips.search.inputs.BATCH_BYTES", 7000)
    blocks = []
    coarse = WrappedIndex._coarse

    def counted(self, inner, cells):
        blocks.append(len(inner))
        return coarse(self, inner, cells)

    monkeypatch.setattr(WrappedIndex, "_coarse", counted)
    np.testing.assert_array_equal(small.search(data[1], 5, probes=4)[1], expected[1])
    assert len(blocks) > 10
    assert sum(blocks) == len(data[1])


def test_a_filter_means_the_keys_that_it_names():
    """A mask is by the order of adding; where the index does not know it, it is refused."""
    keys, x = make_world(N, 40, D, seed=9)
    names = 3 * np.arange(N) + 10
    mask = np.random.default_rng(2).random(N) < 0.02
    own = make_index(keys, f"IVF{C},Flat")
    for index, ids in ((own, np.arange(N)), (make_index(keys, f"IDMap,IVF{C},Flat", ids=names), names)):
        wrapped = amips.wrap(index, identity(D))
        best = np.argsort(-np.where(mask, x @ keys.T, -9), axis=1)[:, :5]
        for chosen in (mask, ids[mask], ids[mask].tolist()):
            np.testing.assert_array_equal(wrapped.search(x, 5, probes=C, filter=chosen)[1], ids[best])
        with pytest.raises(amips.AmipsError, match="give it as bool"):
            wrapped.search(x, 5, probes=C, filter=mask.astype(int))
        with pytest.raises(amips.AmipsError, match="not known behind a filter"):
            wrapped.search(x, 5, recall=0.9, filter=mask)
    index = make_index(keys, f"IVF{C},Flat", ids=names)
    wrapped = amips.wrap(index, identity(D))
    np.testing.assert_array_equal(wrapped.search(x, 5, probes=C, filter=names[mask])[1], names[best])
    with pytest.raises(amips.AmipsError, match="give ids, not a mask"):
        wrapped.search(x, 5, probes=C, filter=mask)
