"""The document store of Haystack: its own suites, and what those leave out."""

import numpy as np
import pytest

pytest.importorskip("haystack")  # needs Python 3.11
from haystack import Document
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.errors import FilterError
from haystack.testing import document_store as suites
from haystack.testing import document_store_async as async_suites

from amips.integrations.haystack import AmipsDocumentStore, AmipsEmbeddingRetriever


class Store:
    """The fixture that the suites ask for, in a directory."""

    @pytest.fixture
    def document_store(self, tmp_path):
        store = AmipsDocumentStore(tmp_path / "store")
        yield store
        store.close()

    def assert_documents_are_equal(self, received, expected):
        """Embeddings are kept in float32."""

        def rounded(document):
            fields = document.to_dict(flatten=False)
            if fields["embedding"] is not None:
                fields["embedding"] = np.array(fields["embedding"], np.float32).tolist()
            return fields

        assert [rounded(one) for one in received] == [rounded(one) for one in expected]


class TestStandardSuites(
    Store,
    suites.DocumentStoreBaseExtendedTests,
    suites.CountDocumentsByFilterTest,
    suites.CountUniqueMetadataByFilterTest,
    suites.GetMetadataFieldsInfoTest,
    suites.GetMetadataFieldMinMaxTest,
    suites.GetMetadataFieldUniqueValuesTest,
):
    def test_write_documents(self, document_store):
        document = Document(content="a")
        assert document_store.write_documents([document]) == 1
        with pytest.raises(DuplicateDocumentError):
            document_store.write_documents([document])


class TestFitted(Store, suites.CountDocumentsTest, suites.DeleteDocumentsTest, suites.WriteDocumentsTest):
    """With a learned index, in which the documents of the suite are few added keys: what changes these."""

    test_write_documents = TestStandardSuites.test_write_documents

    @pytest.fixture
    def document_store(self, fitted_place):
        store = AmipsDocumentStore(fitted_place(768))
        assert store.index is not None
        yield store
        store.close()


class TestStandardSuitesAsync(
    Store,
    async_suites.CountDocumentsAsyncTest,
    async_suites.CountDocumentsByFilterAsyncTest,
    async_suites.CountUniqueMetadataByFilterAsyncTest,
    async_suites.DeleteAllAsyncTest,
    async_suites.DeleteByFilterAsyncTest,
    async_suites.DeleteDocumentsAsyncTest,
    async_suites.FilterDocumentsAsyncTest,
    async_suites.GetMetadataFieldMinMaxAsyncTest,
    async_suites.GetMetadataFieldsInfoAsyncTest,
    async_suites.GetMetadataFieldUniqueValuesAsyncTest,
    async_suites.UpdateByFilterAsyncTest,
    async_suites.WriteDocumentsAsyncTest,
):
    async def test_write_documents_async(self, document_store):
        document = Document(content="a")
        assert await document_store.write_documents_async([document]) == 1
        with pytest.raises(DuplicateDocumentError):
            await document_store.write_documents_async([document])


@pytest.fixture
def retriever(tmp_path):
    store = AmipsDocumentStore(tmp_path / "store")
    store.write_documents(
        [
            Document(id="a", content="a", meta={"year": 1999}, embedding=[1.0, 0.0]),
            Document(id="b", content="b", meta={"year": 2010}, embedding=[0.8, 0.6]),
        ]
    )
    yield AmipsEmbeddingRetriever(store, top_k=2)
    store.close()


def test_the_retriever_is_described_and_made_again(retriever):
    data = retriever.to_dict()
    retriever.document_store.close()
    again = AmipsEmbeddingRetriever.from_dict(data)
    documents = again.run([1.0, 0.0])["documents"]
    assert [(one.id, round(one.score, 4)) for one in documents] == [("a", 1.0), ("b", 0.8)]
    again.document_store.close()
    retriever.document_store = again.document_store = AmipsDocumentStore()


async def test_the_retriever_filters_and_scales(retriever):
    filters = {"field": "meta.year", "operator": ">", "value": 2000}
    (document,) = retriever.run([1.0, 0.0], filters=filters, scale_score=True)["documents"]
    assert (document.id, round(document.score, 4), document.embedding) == ("b", 0.9, None)
    (document,) = (await retriever.run_async([1.0, 0.0], top_k=1, return_embedding=True))["documents"]
    assert (document.id, document.embedding) == ("a", [1.0, 0.0])


def test_a_retriever_needs_a_store_of_its_own():
    with pytest.raises(TypeError, match="not an AmipsDocumentStore"):
        AmipsEmbeddingRetriever("store")


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"operator": "AND", "conditions": 5}, "expected a list of filters"),
        ({"field": 5, "operator": "==", "value": 1}, "expected a name"),
    ],
)
def test_a_wrong_filter_is_an_error_of_haystack(retriever, filters, words):
    with pytest.raises(FilterError, match=words):
        retriever.document_store.filter_documents(filters)
