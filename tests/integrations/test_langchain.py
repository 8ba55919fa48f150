"""The vector store of LangChain: its own standard suite, and what that leaves out."""

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import VectorStoreIntegrationTests

import amips
from amips.integrations.langchain import AmipsVectorStore
from helpers import plain_build


class TestInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self):
        store = AmipsVectorStore(self.get_embeddings())
        yield store
        store.close()


class TestInDirectory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path):
        store = AmipsVectorStore(self.get_embeddings(), path=tmp_path / "store")
        yield store
        store.close()


class TestFitted(VectorStoreIntegrationTests):
    """With a learned index, in which the documents of the suite are few added keys."""

    @pytest.fixture
    def vectorstore(self, fitted_place):
        embeddings = self.get_embeddings()
        store = AmipsVectorStore(embeddings, path=fitted_place(len(embeddings.embed_query("a"))))
        assert store.index is not None
        yield store
        store.close()


def deep(levels):
    """A filter within as many others."""
    filter = {"lang": "en"}
    for _ in range(levels):
        filter = {"$not": filter}
    return filter


METADATA = {
    "a": {"year": 1999, "lang": "en", "tags": ["x", "y"]},
    "b": {"year": 2010, "lang": "de", "tags": ["y"]},
    "c": {"year": 2020, "lang": "EN", "price": 3.5},
}
VECTORS = [[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.5, 0.0, 0.8]]
X = [1.0, 0.0, 0.0]


@pytest.fixture
def store():
    store = AmipsVectorStore(DeterministicFakeEmbedding(size=3))
    documents = [Document(id=name, page_content=name, metadata=meta) for name, meta in METADATA.items()]
    store.add_embeddings(documents, VECTORS)
    yield store
    store.close()


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({"lang": "en"}, "a"),
        ({"year": {"$eq": 2010}}, "b"),
        ({"year": {"$ne": 2010}}, "ac"),
        ({"year": {"$gt": 2010}}, "c"),
        ({"year": {"$gte": 2010, "$lt": 2020}}, "b"),
        ({"year": {"$lte": 2010}}, "ab"),
        ({"lang": {"$in": ["en", "de"]}}, "ab"),
        ({"lang": {"$nin": ["en", "de"]}}, "c"),
        ({"year": {"$between": [2000, 2020]}}, "bc"),
        ({"price": {"$exists": True}}, "c"),
        ({"price": None}, "ab"),
        ({"tags": {"$contains": "x"}}, "a"),
        ({"tags": ["y"]}, "b"),
        ({"lang": {"$like": "e%"}}, "a"),
        ({"lang": {"$ilike": "e_"}}, "ac"),
        ({"$and": [{"lang": "en"}, {"year": 1999}]}, "a"),
        ({"$or": [{"lang": "en"}, {"year": 2010}]}, "ab"),
        ({"$not": {"lang": "en"}}, "bc"),
        ({}, "abc"),
    ],
    ids=str,
)
def test_every_operator(store, filter, expected):
    documents = store.similarity_search_by_vector(X, 3, filter=filter)
    assert sorted(document.id for document in documents) == list(expected)


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ("lang = 'en'", "expected a dict"),
        ({"$nor": []}, "not an operator of filters"),
        ({"year": {"$near": 3}}, "not an operator of fields"),
        ({"year": {"$gt": [1]}}, "compares with a list"),
        ({"year": {"$between": 3}}, "does not take 3"),
        ({"lang": {"$in": "en"}}, "does not take 'en'"),
        ({"lang": {"$like": 5}}, "does not take 5"),
        ({"$and": 5}, "expected a list of filters"),
        ({"$or": {"lang": "en"}}, "expected a list of filters"),
        ({5: 1}, "5 is no name of a field"),
        ({"year": {"$exists": True, "month": 1}}, "month is not an operator"),
        ({"year": {"$exists": "no"}}, "does not take 'no'"),
        (deep(150), "nested too deeply"),
        (deep(100_000), "nested too deeply"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_a_wrong_filter_is_one_line(store, filter, message):
    with pytest.raises(amips.AmipsError, match=message):
        store.similarity_search_by_vector(X, 3, filter=filter)


def test_mmr_takes_what_is_unlike(store):
    search = store.max_marginal_relevance_search_by_vector
    assert [one.id for one in search(X, 2, lambda_mult=1.0)] == ["a", "b"]
    assert [one.id for one in search(X, 2, lambda_mult=0.3)] == ["a", "c"]
    assert [one.id for one in search(X, 2, lambda_mult=0.3, filter={"year": {"$lt": 2015}})] == ["a", "b"]


def test_deletion_by_filter(store):
    store.delete(filter={"year": {"$lt": 2015}})
    assert [one.id for one in store.similarity_search_by_vector(X, 3)] == ["c"]


def test_an_empty_filter_deletes_nothing(store):
    for filter in ({}, {"$and": []}, {"$and": [{}]}):
        with pytest.raises(amips.AmipsError, match="would delete all"):
            store.delete(filter=filter)
    assert len(store.documents) == 3
    store.delete()
    assert len(store.documents) == 0


def test_relevance_of_inner_products_orders_as_they_do():
    store = AmipsVectorStore(DeterministicFakeEmbedding(size=3), similarity="dot")
    relevance = store._select_relevance_score_fn()
    values = [relevance(score) for score in (-300.0, -2.0, -0.5, 0.0, 0.5, 2.0, 40.0, 300.0)]
    assert values == sorted(set(values))
    assert all(0 < value < 1 for value in values)
    store.close()


async def test_every_text_needs_an_id_that_is_text(store):
    with pytest.raises(amips.AmipsError, match="1 ids for 2 texts"):
        store.add_texts(["d", "e"], ids=["d"])
    with pytest.raises(amips.AmipsError, match="1 ids for 2 texts"):
        await store.aadd_texts(iter(["d", "e"]), ids=["d"])
    with pytest.raises(amips.AmipsError, match="an id is 5"):
        store.add_texts(["d"], ids=[5])
    assert len(store.documents) == 3


def test_an_unknown_argument_is_refused(store):
    with pytest.raises(amips.AmipsError, match="namespace: not an argument"):
        store.similarity_search_by_vector(X, 3, namespace="n")


def test_a_store_of_a_bundle(task, tmp_path):
    index = plain_build(task, out=tmp_path / "bundle")
    options = {"path": tmp_path / "store"}
    store = AmipsVectorStore.from_bundle(tmp_path / "bundle", DeterministicFakeEmbedding(size=16), **options)
    x = np.asarray(task.test.queries[0])
    expected = [str(i) for i in index.search(x, 5)[1][0]]
    assert [one.id for one in store.similarity_search_by_vector(x.tolist(), 5)] == expected
    store.close()
