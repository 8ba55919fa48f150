"""A store whose index was fitted, empty again: the suites of frameworks begin with nothing."""

import shutil

import pytest

from amips.integrations import DocumentIndex, StoredDocument
from helpers import make_world


@pytest.fixture(scope="session")
def fitted_places(tmp_path_factory):
    """By dimension, the directory of such a store."""
    return {}


@pytest.fixture
def fitted_place(fitted_places, tmp_path, tmp_path_factory):
    """A function that copies such a store of a dimension; the copy may be changed."""

    def copy(d):
        if d not in fitted_places:
            place = tmp_path_factory.mktemp("fitted") / "store"
            keys, queries = make_world(150, 300, d, seed=d)
            with DocumentIndex(place) as store:
                store.write(StoredDocument(f"d{i}", "", {}, key) for i, key in enumerate(keys))
                store.fit(queries, minutes=0.02, recall=0.9)
                store.delete(f"d{i}" for i in range(150))
                assert (len(store), store.index.n) == (0, 0)
            fitted_places[d] = place
        return shutil.copytree(fitted_places[d], tmp_path / "fitted")

    return copy
