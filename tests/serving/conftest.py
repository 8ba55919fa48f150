"""A bundle with attributes."""

import shutil

import pyarrow as pa
import pytest

import amips
from serving_helpers import application


@pytest.fixture(scope="session")
def bundle(task, tmp_path_factory):
    """600 keys of dimension 16 in 8 cells, with an attribute; nobody changes it."""
    out = tmp_path_factory.mktemp("serving") / "bundle"
    index = amips.build(task, out=out, recall=0.9)
    index.set_attributes(pa.table({"price": list(range(600))}))
    index.compact()
    index.close()
    return out


@pytest.fixture
def own_bundle(bundle, tmp_path):
    """A copy, to be changed."""
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture(scope="session")
def x(task):
    return task.test.queries[:].copy()


@pytest.fixture
def app(bundle):
    return application(bundle)
