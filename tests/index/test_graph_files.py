"""The files of a graph: read back bit for bit; damaged or made to do harm, refused in one line."""

import os
import pickle
import random
import warnings

import numpy as np
import pytest

from amips import AmipsError, BundleError
from amips.graph import make_graph
from amips.index import CODING, GRAPH_FILES, GraphStore
from amips.lean import learn_projection
from amips.vectors import open_vectors
from helpers import make_world

N, D, R, DEGREE = 300, 18, 12, 40
STORAGES = ("flat", "sq8", "lean")
WAYS = ((False, True), (True, True), (False, False), (True, False))  # mmap, finite
_worlds = {}


def world_of(storage):
    """Queries and a store: a graph of 300 keys whose lists do not fill their places."""
    if storage not in _worlds:
        keys, x = make_world(N, 20, D, seed=3)
        vectors = open_vectors(keys)
        projection = learn_projection(vectors, open_vectors(x), R) if storage == "lean" else None
        graph = make_graph(keys, None, None, degree=DEGREE, entries=20)
        _worlds[storage] = x, GraphStore.build(vectors, graph, storage, projection)
    return _worlds[storage]


@pytest.fixture(params=STORAGES)
def saved(request, tmp_path):
    """Queries, a store, its directory, and how to load it again."""
    x, store = world_of(request.param)
    store.save(tmp_path)

    def load(mmap=False, finite=True):
        return GraphStore.load(tmp_path, request.param, mmap, finite)

    return x, store, tmp_path, load


def files_of(store):
    """What a store is saved as."""
    return [*GRAPH_FILES[store.storage], *([CODING] if store.storage == "lean" else [])]


def refused(load, *words, ways=WAYS):
    """However it is loaded: one line of BundleError with these words."""
    for mmap, finite in ways:
        with pytest.raises(BundleError) as caught:
            load(mmap, finite)
        text = str(caught.value)
        assert "\n" not in text
        for word in words:
            assert word in text, text


def change(directory, name, edit):
    """Edit an array; returns what puts it back."""
    path = directory / f"{name}.npy"
    good = path.read_bytes()
    np.save(path, edit(np.load(path)))
    return lambda: path.write_bytes(good)


def put(value, *place):
    """An edit that puts a value at a place, the last by default."""

    def edit(array):
        array[place or (-1,) * array.ndim] = value
        return array

    return edit


def search(store, x):
    return [
        store.search(x[:m], k, margin)[1] for m, k, margin in ((1, 5, 0.0), (20, 10, 0.1), (20, 3, 100.0))
    ]


@pytest.mark.parametrize("mmap", [False, True])
def test_what_is_saved_is_loaded_bit_for_bit(saved, mmap, tmp_path_factory):
    x, store, directory, load = saved
    assert sorted(path.name for path in directory.iterdir()) == sorted(files_of(store))
    loaded = load(mmap)
    assert isinstance(loaded.keys.base, np.memmap) == mmap
    for file in GRAPH_FILES[store.storage]:
        array, other = (getattr(one, file.removesuffix(".npy")) for one in (store, loaded))
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(other, array)
    np.testing.assert_array_equal(loaded.coding, store.coding)
    for k, margin in ((10, 0.1), (5, 0.0), (10, None), (N, 0.1)):
        for part, other in zip(loaded.search(x, k, margin), store.search(x, k, margin), strict=True):
            np.testing.assert_array_equal(part, other)
    again = tmp_path_factory.mktemp("again")
    loaded.save(again)
    for file in files_of(store):
        assert (again / file).read_bytes() == (directory / file).read_bytes()


@pytest.mark.parametrize("mmap", [False, True])
def test_pickled(saved, mmap):
    x, store, directory, load = saved
    again = pickle.loads(pickle.dumps(load(mmap)))
    aside = directory.rename(directory.with_name("aside"))  # its files are gone
    for ids, other in zip(search(again, x), search(store, x), strict=True):
        np.testing.assert_array_equal(ids, other)
    aside.rename(directory)


@pytest.mark.parametrize("wrong", [N, -2, 2**31 - 1, -(2**31), 10**6])
def test_a_key_that_is_not_there(saved, wrong):
    _, _, directory, load = saved
    for name in ("neighbours", "entries"):
        for place in (0, -1):
            restore = change(directory, name, lambda a, place=place: put(wrong, *([place] * a.ndim))(a))
            refused(load, name, "names a key that is not there")
            restore()


def test_an_entry_is_a_key(saved):
    _, _, directory, load = saved
    for edit in (put(-1), put(-1, 0), lambda a: a[:0]):
        restore = change(directory, "entries", edit)
        refused(load, "entries")
        restore()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(saved, bad):
    x, store, directory, load = saved
    for name in ("keys", "step", "unit", "scale", "coding"):
        if f"{name}.npy" not in files_of(store):
            continue
        restore = change(directory, name, put(bad))
        refused(load, name, ways=WAYS if name != "keys" else WAYS[:3])
        if name == "keys":  # left on disk, and nobody asked: whatever comes, it comes from inside
            assert outcome(lambda: load(True, False), x) == "loaded"
        restore()


def test_steps_and_units_that_cannot_be(saved):
    _, store, directory, load = saved
    if store.storage == "flat":
        return
    wrong = [
        ("unit", put(0)),
        ("unit", put(-1)),
        ("unit", put(-0.0)),
        ("step", put(-0.5)),
        ("step", put(-1e30, 0)),
    ]
    for name, edit in wrong:
        restore = change(directory, name, edit)
        refused(load, "damaged")
        restore()


@pytest.mark.parametrize("wrong", [64, -64, 127, -128])
def test_a_projection_of_numbers_that_are_too_large(tmp_path, wrong):
    world_of("lean")[1].save(tmp_path)
    assert np.abs(np.load(tmp_path / "projection.npy")).max() == 63
    change(tmp_path, "projection", put(wrong, 3, 4))
    refused(lambda mmap, finite: GraphStore.load(tmp_path, "lean", mmap, finite), "projection")


@pytest.mark.parametrize("r", [0, 1, 2, 3, 6, 13, 2052])
def test_codes_of_other_lengths(tmp_path, r):
    """All four arrays fit each other, but nothing could walk by them."""
    world_of("lean")[1].save(tmp_path)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "step.npy", rng.random(r).astype(np.float32))
    np.save(tmp_path / "scale.npy", rng.random(r).astype(np.float32))
    np.save(tmp_path / "projection.npy", rng.integers(-63, 64, (r, D)).astype(np.int8))
    np.save(tmp_path / "codes.npy", rng.integers(0, 256, (N, r // 2)).astype(np.uint8))
    refused(lambda mmap, finite: GraphStore.load(tmp_path, "lean", mmap, finite), "step")


def test_types_and_shapes(saved):
    _, store, directory, load = saved
    for file in files_of(store):
        name = file.removesuffix(".npy")
        array = np.load(directory / file)
        edits = [
            lambda a: a.astype(np.float64),
            lambda a: a.astype(np.int64),
            lambda a: a.astype(a.dtype.newbyteorder()) if a.dtype.itemsize > 1 else a.astype(np.int16),
            lambda a: a.view(np.uint32) if a.dtype.itemsize == 4 else a.astype(np.uint32),
            lambda a: a[..., None],
            lambda a: a.reshape(-1) if a.ndim == 2 else a[None],
            lambda a: a[:0],
            lambda a: np.array(a.flat[0]),
        ]
        if name != "entries":
            edits += [lambda a: a[:-1], lambda a: np.concatenate([a, a[:1]])]
        # Keys of another dimension are as good, where there are no codes: it is the manifest that says d.
        if array.ndim == 2 and name != "neighbours" and (name, store.storage) != ("keys", "flat"):
            edits += [lambda a: a[:, :-1], lambda a: np.concatenate([a, a[:, :1]], axis=1)]
        if array.ndim == 2:
            edits += [lambda a: a[:, :0], np.asfortranarray]
        for edit in edits:
            restore = change(directory, name, edit)
            refused(load)
            restore()
    assert load().n == N  # as it was


def test_a_missing_file(saved):
    _, store, directory, load = saved
    for file in GRAPH_FILES[store.storage]:
        aside = (directory / file).rename(directory / "aside")
        for mmap in (False, True):
            with pytest.raises((BundleError, FileNotFoundError)):  # which `amips.load` makes a line of
                load(mmap)
        aside.rename(directory / file)


def outcome(load, x):
    """What comes of a store in a child process: "refused", "loaded", or how it went wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: this process has threads
        pid = os.fork()
    if pid == 0:
        code = 9
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                lists = search(load(), x)
            code = 0 if all(((ids >= -1) & (ids < N)).all() for ids in lists) else 3
        except BundleError:
            code = 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    words = {0: "loaded", 2: "refused", 3: "ids out of range", 9: "an error"}
    return words.get(code, f"the process ended with {code}")


def test_a_place_that_is_free_before_one_that_is_not(saved):
    """-1 says that a list ends; what is behind one must not lead a walk out of the arrays."""
    x, _, directory, load = saved
    for place in (0, 1, 7):
        restore = change(directory, "neighbours", put(-1, slice(None), place))
        assert outcome(load, x) == "refused"
        restore()


def test_any_value_may_be_wrong(saved):
    """Without a hash to tell, and however it is loaded: refused, or answers from inside."""
    x, store, directory, load = saved
    rng = random.Random(store.storage)
    outcomes = set()
    for turn in range(30):
        path = directory / rng.choice(GRAPH_FILES[store.storage])
        good = path.read_bytes()
        bad = bytearray(good)
        for _ in range(rng.choice([1, 1, 4, 32])):
            bad[rng.randrange(len(bad))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(bad)
        outcomes.add(outcome(lambda turn=turn: load(*WAYS[turn % 4]), x))
        path.write_bytes(good)
    assert outcomes == {"refused", "loaded"}


@pytest.mark.parametrize("value", [3e38, -3e38, 1e-45, 0])
def test_keys_and_steps_of_any_size(saved, value):
    x, store, directory, load = saved
    for name in ("keys", "step", "scale", "unit"):
        if f"{name}.npy" in GRAPH_FILES[store.storage]:
            restore = change(directory, name, lambda a: np.full_like(a, value))
            assert outcome(load, x) in ("refused", "loaded"), name
            restore()


def test_a_graph_of_one_key_is_none():
    from amips.index import check_graph_size

    check_graph_size(2)
    for n in (0, 1, 1 << 30):
        with pytest.raises(AmipsError, match="a graph has between 2 and"):
            check_graph_size(n)
