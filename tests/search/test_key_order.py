"""Masks and attributes go by the order in which keys were given; an updated key keeps its place in it."""

import numpy as np
import pyarrow as pa
import pytest

import amips
from helpers import make_world

N, D = 240, 8
KINDS = ["flat", "lean", "sq8", "graph"]


@pytest.fixture(scope="module")
def task():
    keys, queries = make_world(N, 300, D, seed=3)
    return amips.label(keys, queries, cells=6, val=60, test=40, k=10)


@pytest.fixture(params=KINDS)
def index(request, task, tmp_path):
    kind = (
        {"structure": "graph", "storage": "flat"} if request.param == "graph" else {"storage": request.param}
    )
    return amips.build(task, out=tmp_path / "b", **kind)


def vectors(count, seed):
    rows = np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def check(index, keys, ids):
    """Each place has its key and id: by a mask of it alone, and by an attribute that says which it is."""
    index.set_attributes(pa.table({"place": np.arange(len(ids))}))
    opened = amips.load(index.path)
    for one in (index, opened):
        assert one.n == len(ids)
        for place in (0, 3, 5, 7, 40, len(ids) - 2, len(ids) - 1):
            for options in ({"filter": np.arange(len(ids)) == place}, {"where": f"place = {place}"}):
                scores, found = one.search(keys[place], 2, **options)
                assert found.tolist() == [[ids[place], -1]]
                assert scores[0, 0] == pytest.approx(keys[place] @ keys[place], abs=1e-4)


def test_updated_keys_keep_their_places(index, task):
    keys = list(np.asarray(task.keys))
    for count, seed in ((2, 1), (3, 2)):  # keys 5 and 3 come twice
        ids = [5, 3, 7][:count]
        new = vectors(count, seed)
        index.update(ids, new)
        for one, key in zip(ids, new, strict=True):
            keys[one] = key
    check(index, keys, list(range(N)))
    more = vectors(4, 3)
    index.add(more)
    keys += list(more)
    index.update([N + 1], more[:1])
    keys[N + 1] = more[0]
    mask = np.zeros(N + 4, bool)
    mask[[5, N + 1]] = True
    assert set(index.search(keys[5], 3, filter=mask)[1][0].tolist()) == {5, N + 1, -1}
    check(index, keys, list(range(N + 4)))
    index.remove([4, N + 3])
    left = [one for one in range(N + 4) if one not in (4, N + 3)]
    mask[:] = np.isin(np.arange(N + 4), [5, 4])  # those that were removed in it
    assert index.search(keys[5], 3, filter=mask)[1].tolist() == [[5, -1, -1]]
    check(index, [keys[one] for one in left], left)
    index.compact()
    assert index.labels.tolist() == left
    check(index, [keys[one] for one in left], left)


def test_attributes_of_updated_keys(index):
    index.set_attributes(pa.table({"price": np.arange(N)}))
    index.update([5, 9], vectors(2, 4), attributes=pa.table({"price": [1000, 1001]}))
    index.update([6], vectors(1, 5))
    index.compact()
    table = index.attributes.table.column("price").to_pylist()
    assert table == [*range(5), 1000, 6, 7, 8, 1001, *range(10, N)]
