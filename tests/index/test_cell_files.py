"""The files of a cell store, damaged or made to do harm: refused in one line, before FAISS sees any of it."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from amips import AmipsError, BundleError
from amips.blas import faiss
from amips.index import FaissCellStore, cell_files
from amips.lean import learn_projection
from amips.vectors import open_vectors
from helpers import make_world

N, D, C, R = 700, 16, 9, 6
STORAGES = ("flat", "sq8", "pq", "lean")


class World:
    def __init__(self, storage, spilled):
        self.keys, self.x = make_world(N, 30, D, seed=3)
        rng = np.random.default_rng(1)
        self.assignment = rng.integers(0, C - 1, N).astype(np.int32)  # the last cell is empty
        self.second = np.full(N, -1, np.int32)
        twice = rng.permutation(N)[:200]
        self.second[twice] = (self.assignment[twice] + 1) % C
        centroids = np.stack([self.keys[self.assignment == j].mean(axis=0) for j in range(C - 1)])
        centroids = np.concatenate([centroids, np.zeros((1, D), np.float32)])
        keys = open_vectors(self.keys)
        projection = learn_projection(keys, open_vectors(self.x), R) if storage == "lean" else None
        second = self.second if spilled else None
        self.store = FaissCellStore.build(keys, self.assignment, centroids, storage, projection, second)


_worlds = {}


def world_of(storage, spilled=False):
    if (storage, spilled) not in _worlds:
        _worlds[storage, spilled] = World(storage, spilled)
    return _worlds[storage, spilled]


@pytest.fixture(params=[(storage, spilled) for storage in STORAGES for spilled in (False, True)], ids=str)
def saved(request, tmp_path):
    """A store, its directory, and how to load it again."""
    storage, spilled = request.param
    world = world_of(storage, spilled)
    world.store.save(tmp_path)

    def load(mmap=False, finite=True):
        return FaissCellStore.load(tmp_path, storage, mmap, spilled, finite)

    return world, tmp_path, load


def refused(load, *words, options=((False, True), (True, True), (False, False), (True, False))):
    """However it is loaded: one line of BundleError with these words."""
    for mmap, finite in options:
        with pytest.raises(BundleError) as caught:
            load(mmap, finite)
        text = str(caught.value)
        assert "\n" not in text
        for word in words:
            assert word in text, text


def change(directory, name, edit):
    """Edit an array; returns what puts it back."""
    path = directory / name
    good = path.read_bytes()
    np.save(path, edit(np.load(path)))
    return lambda: path.write_bytes(good)


def search(store, world):
    cells = np.tile(np.arange(C), (len(world.x), 1))
    return [store.scan(world.x[:m], cells[:m, :p], 7) for m, p in ((1, C), (3, 2), (30, C))]


def test_no_file_of_faiss_is_read_or_written(saved, monkeypatch):
    def fail(*_):
        pytest.fail("a FAISS file")

    for name in ("read_index", "write_index", "deserialize_index"):
        monkeypatch.setattr(faiss, name, fail)
    world, directory, load = saved
    world.store.save(directory)
    assert {path.suffix for path in directory.iterdir()} == {".npy"}
    for mmap in (False, True):
        for got, want in zip(search(load(mmap), world), search(world.store, world), strict=True):
            np.testing.assert_array_equal(got[1], want[1])
            np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda a: a - 1, "do not have"),
        (lambda a: np.append(a[:-2], [a[-2] + 1, -1]), "do not have"),
        (lambda a: np.append(a, 1), "do not have"),
        (lambda a: np.full(4, 2**62), "do not have"),  # their sum is 0 in 64 bits
        (lambda a: a[:0], "0 cells"),
        (lambda a: a[:, None], "expected [any]"),
        (lambda a: a.astype(np.float64), "float64"),
        (lambda a: a.astype(np.int32), "int32"),
    ],
)
def test_sizes(saved, edit, words):
    _, directory, load = saved
    change(directory, "sizes.npy", edit)
    refused(load, words if not (directory / "second.npy").exists() else "")


def moved(a):
    """A cell gets a key more, another one fewer: what is there twice in one cell is once in none."""
    j = int(np.flatnonzero(a > 1)[0])
    a[j], a[j + 1] = a[j] - 1, a[j + 1] + 1
    return a


@pytest.mark.parametrize("wrong", [N, -1, -2, 2**40, -(2**63)])
def test_an_entry_that_is_no_key(saved, wrong):
    _, directory, load = saved
    cell = int(np.searchsorted(np.cumsum(np.load(directory / "sizes.npy")), 5, side="right"))
    change(directory, "entries.npy", lambda a: np.append(a[:5], [wrong, *a[6:]]))
    refused(load, "entries.npy", f"cell {cell} names a key that is not there")


def test_a_key_that_is_there_twice_and_another_never(saved):
    _, directory, load = saved
    change(directory, "entries.npy", lambda a: np.append(a[:5], [a[6], *a[6:]]))
    refused(load, "entries.npy", "wrong number of cells")


def test_second_cells_where_the_keys_are_not(saved):
    world, directory, load = saved
    if world.store.second is None:
        return
    for edit in (
        lambda a: np.where(a >= 0, (a + 1) % C, a),
        lambda a: np.where(a >= 0, C, a),
        lambda a: np.where(a >= 0, -2, a),
        lambda a: a[:-1],
        lambda a: a[:0],
        lambda a: np.append(a[1:], a[:1]),
    ):
        restore = change(directory, "second.npy", lambda a, edit=edit: edit(a).astype(np.int32))
        refused(load)
        restore()
    change(directory, "sizes.npy", moved)
    refused(load, "wrong number of cells")


FLOATS = ("codes.npy", "centroids.npy", "codebook.npy", "projection.npy", "keys.npy")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(saved, bad):
    world, directory, load = saved
    for name in FLOATS:
        if not (directory / name).exists() or np.load(directory / name).dtype != np.float32:
            continue

        def edit(a):
            a.reshape(-1)[-1] = bad
            return a

        restore = change(directory, name, edit)
        large = name == "keys.npy" or name == "codes.npy"
        looked_at = [(False, True), (False, False), (True, True)]
        refused(load, name, "not finite", options=looked_at if large else [*looked_at, (True, False)])
        if large:  # left on disk, and nobody asked: whatever comes, it comes from inside
            for _, ids in search(load(True, False), world):
                assert ((ids >= -1) & (ids < N)).all()
        restore()


@pytest.mark.parametrize("large", [3e38, -3e38, 1e-45])
def test_large_values_are_finite(tmp_path, large):
    world = world_of("flat")
    world.store.save(tmp_path)
    change(tmp_path, "codes.npy", lambda a: np.full_like(a, large))
    FaissCellStore.load(tmp_path, "flat", False)


class Harm:
    """What a pickle does when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_pickle_is_read(saved, tmp_path_factory):
    _world, directory, load = saved
    mark = tmp_path_factory.mktemp("mark") / "mark"
    assert pickle.loads(pickle.dumps(Harm(mark))) is None
    assert mark.exists()  # it would
    mark.unlink()
    for name in sorted(path.name for path in directory.iterdir()):
        good = (directory / name).read_bytes()
        np.save(directory / name, np.array([Harm(mark)], object), allow_pickle=True)
        refused(load, name)
        assert not mark.exists()
        (directory / name).write_bytes(good)


def header_of(array, shape=None, descr=None, fortran=False):
    """The bytes of an .npy whose header says something else than what is in it."""
    text = repr({"descr": descr or array.dtype.str, "fortran_order": fortran, "shape": shape or array.shape})
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + array.tobytes()


def test_headers_that_lie(saved):
    _world, directory, load = saved
    for name in sorted(path.name for path in directory.iterdir()):
        path = directory / name
        good, array = path.read_bytes(), np.load(path)
        longer = (array.shape[0] + 1, *array.shape[1:])
        huge = (1 << 40, *array.shape[1:])
        for bad in (
            header_of(array, longer),
            header_of(array, huge),
            header_of(array, (array.size, 1, 1, 1)),
            header_of(array, descr=">" + array.dtype.str[1:]) if array.dtype.itemsize > 1 else b"",
            header_of(array, descr="|O"),
            header_of(array, descr=f"|V{array.dtype.itemsize}"),
            good[:-1],
            good + b"\0",
            good[:40],
            b"\x93NUMPY\x01\x00\xff\xff" + good[10:],
            b"",
        ):
            path.write_bytes(bad)
            refused(load, name)
        if array.ndim > 1 and min(array.shape) > 1:
            path.write_bytes(header_of(array, fortran=True))
            refused(load, name)
        path.write_bytes(good)


@pytest.mark.parametrize("storage", ["sq8", "pq", "lean"])
def test_a_codebook_of_another_shape(tmp_path, storage):
    world = world_of(storage)
    world.store.save(tmp_path)
    shape = np.load(tmp_path / "codebook.npy").shape
    assert shape == {"sq8": (2, D), "pq": (4, 256, 4), "lean": (R, 16, 1)}[storage]
    for wrong in (
        (0, *shape[1:]),
        (*shape[:-1], 0),
        (shape[0] * 2, *shape[1:]),
        (*shape[1:], shape[0]),
        shape[:-1],
        (2, 16, 1),
    ):
        np.save(tmp_path / "codebook.npy", np.zeros(wrong, np.float32))
        with pytest.raises(BundleError, match=r"codebook|projection|codes"):
            FaissCellStore.load(tmp_path, storage, False)


def test_arrays_that_fit_each_other_no_longer(saved):
    _world, directory, load = saved
    for name in ("codes.npy", "centroids.npy", "projection.npy", "keys.npy"):
        for cut in (
            lambda a: a[:-1],
            lambda a: a[:, :-1],
            lambda a: a[:0],
            lambda a: a[:, :0],
            lambda a: a.ravel(),
        ):
            if (directory / name).exists():
                restore = change(directory, name, cut)
                refused(load)
                restore()


def test_any_byte_may_be_wrong(saved):
    """Without a hash to tell, and however it is loaded: refused, or answers from inside."""
    world, directory, load = saved
    rng = random.Random(f"{world.store.storage} {world.store.second is None}")
    names = sorted(path.name for path in directory.iterdir())
    outcomes = set()
    for turn in range(60):
        name = rng.choice(names)
        good = bytearray((directory / name).read_bytes())
        bad = bytearray(good)
        for _ in range(rng.choice([1, 1, 4, 32])):
            bad[rng.randrange(len(bad))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        (directory / name).write_bytes(bad)
        try:
            loaded = load(turn % 2 == 0, turn % 4 < 2)
        except BundleError:
            outcomes.add("refused")
        else:
            outcomes.add("loaded")
            with np.errstate(all="ignore"):
                for scores, ids in search(loaded, world):
                    assert scores.shape == ids.shape
                    assert ((ids >= -1) & (ids < N)).all()
        (directory / name).write_bytes(good)
    assert outcomes == {"refused", "loaded"}


def test_cells_that_are_not_there_never_reach_faiss():
    world = world_of("flat")
    keys, centroids = open_vectors(world.keys), world.store.centroids
    for wrong in (C, -1, 10**6):
        assignment = world.assignment.copy()
        assignment[3] = wrong
        with pytest.raises(AmipsError, match="expected numbers from 0 to 8"):
            FaissCellStore.build(keys, assignment, centroids, "flat")
    second = world.second.copy()
    second[5] = C
    with pytest.raises(AmipsError, match="expected numbers from -1 to 8"):
        FaissCellStore.build(keys, world.assignment, centroids, "flat", None, second)


@pytest.mark.parametrize("mmap", [False, True])
def test_pickled(saved, mmap):
    world, directory, load = saved
    store = load(mmap)
    data = pickle.dumps(store)
    assert (len(data) < 1000) == mmap  # opened again where the keys stay on disk
    again = pickle.loads(data)
    for got, want in zip(search(again, world), search(store, world), strict=True):
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    aside = directory.rename(directory.with_name("aside"))
    late = pickle.loads(pickle.dumps(store))  # its files are gone: what is mapped is copied
    np.testing.assert_array_equal(search(late, world)[2][1], search(store, world)[2][1])
    if mmap:
        with pytest.raises(BundleError, match="is gone: its bundle was replaced or removed"):
            pickle.loads(data)
    aside.rename(directory)


def test_what_is_written_is_read_back(saved, monkeypatch):
    """A disk that keeps something else than it was handed is found out before anyone relies on it."""
    world, directory, _ = saved
    blocks = cell_files.scanned_bytes
    calls = []

    def other_bytes_the_second_time(parts):
        calls.append(1)
        for block in blocks(parts):
            yield block if len(calls) == 1 else block ^ 1

    monkeypatch.setattr(cell_files, "scanned_bytes", other_bytes_the_second_time)
    with pytest.raises(OSError, match="what was written is not what is there"):
        world.store.save(directory)
    assert len(calls) == 2
