"""A vector store of LangChain.

from amips.integrations.langchain import AmipsVectorStore

store = AmipsVectorStore(embedding, path="store", log="queries.fvecs")
store.add_documents(documents)
store.similarity_search("...", k=4, filter={"lang": "en", "year": {"$gte": 2020}})
store.fit()  # learns from the queries that were recorded
"""

import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.integrations.bundle_documents import documents_of_bundle
from amips.integrations.diversity import diverse
from amips.integrations.document_index import DocumentIndex, Hit, Similarity
from amips.integrations.langchain_filters import Filter, condition_of
from amips.integrations.query_recorder import SIZE
from amips.integrations.stored_document import StoredDocument
from amips.search import Index, Refit, Report

with needs_extra("amips.integrations.langchain", "langchain", "langchain_core"):
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.runnables import run_in_executor
    from langchain_core.vectorstores import VectorStore


class AmipsVectorStore(VectorStore):
    """Documents that are searched by their embeddings, in a directory or in memory.

    All documents are scored until `fit` is called; from then on a learned index finds them.

    Args:
        embedding: what makes vectors of texts.
        path: the directory of the store, made if it is not there; None keeps it in memory.
        similarity: "cosine", or "dot" for encoders that are made for inner products.
        log: a file .npy or .fvecs in which queries are recorded, for `fit`; None records nothing.
        log_size: the newest queries that it keeps, at least.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        path: str | Path | None = None,
        similarity: Similarity = "cosine",
        log: str | Path | None = None,
        log_size: int = SIZE,
    ) -> None:
        self._embedding = embedding
        self.documents = DocumentIndex(path, similarity=similarity, log=log, log_size=log_size)

    @classmethod
    def from_bundle(
        cls,
        bundle: str | Path,
        embedding: Embeddings,
        documents: Sequence[Document] | None = None,
        **options: Any,
    ) -> "AmipsVectorStore":
        """A store with the keys and the index of a bundle, of which it has a copy.

        Args:
            bundle: a directory that `amips.fit` or `amips.build` made.
            embedding: what encodes queries for these keys.
            documents: one for each key, in the order of the keys; when not given, what the bundle has: texts
                (`amips embed`), ids, attributes.
            options: of the store, but for the similarity: `path`, `log`, `log_size`.
        """
        stored = None if documents is None else [_stored(one, own) for one, own in _with_ids(documents)]
        store = cls.__new__(cls)
        store._embedding = embedding
        store.documents = documents_of_bundle(bundle, stored, **options)
        return store

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> "AmipsVectorStore":
        """A store with these texts; `kwargs` are those of the constructor."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> "AmipsVectorStore":
        """As `from_texts`, with the embedding's own asynchronous method."""
        store = await run_in_executor(None, cls, embedding, **kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids)
        return store

    @property
    def embeddings(self) -> Embeddings:
        """What makes vectors of texts."""
        return self._embedding

    @property
    def index(self) -> Index | None:
        """The index that was fitted, to look at; None if none was."""
        return self.documents.index

    def fit(
        self, queries: Any = None, *, minutes: float | None = None, anew: bool = False, **options: Any
    ) -> Report | Refit | None:
        """Learn from queries, those that were recorded if none are given: see `DocumentIndex.fit`."""
        return self.documents.fit(queries, minutes=minutes, anew=anew, **options)

    def close(self) -> None:
        """Close the files: the store cannot be used any more."""
        self.documents.close()

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts; their ids."""
        return super().add_texts(_counted(texts, ids), metadatas, ids=ids, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As `add_texts`, with the embedding's own asynchronous method."""
        return await super().aadd_texts(_counted(texts, ids), metadatas, ids=ids, **kwargs)

    def add_documents(
        self, documents: list[Document], *, ids: Sequence[str | None] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents, in the place of those that have the same id; their ids.

        `ids` go before those of the documents; one that has neither gets one.
        """
        _refuse(kwargs)
        vectors = self._embedding.embed_documents([document.page_content for document in documents])
        return self.add_embeddings(documents, vectors, ids=ids)

    async def aadd_documents(
        self, documents: list[Document], *, ids: Sequence[str | None] | None = None, **kwargs: Any
    ) -> list[str]:
        """As `add_documents`, with the embedding's own asynchronous method."""
        _refuse(kwargs)
        vectors = await self._embedding.aembed_documents([document.page_content for document in documents])
        return await run_in_executor(None, self.add_embeddings, documents, vectors, ids=ids)

    def add_embeddings(
        self, documents: Sequence[Document], vectors: Any, *, ids: Sequence[str | None] | None = None
    ) -> list[str]:
        """As `add_documents`, with vectors [m, d] that were made already."""
        rows = np.asarray(vectors, np.float32)
        if len(rows) != len(documents):
            raise AmipsError(f"{len(rows)} vectors for {len(documents)} documents: one is needed for each")
        own = _with_ids(documents, ids)
        self.documents.write(_stored(one, name, row) for (one, name), row in zip(own, rows, strict=True))
        return [name for _, name in own]

    def delete(
        self, ids: Sequence[str] | None = None, *, filter: Filter | None = None, **kwargs: Any
    ) -> bool | None:
        """Delete documents: by their ids, those that meet a filter, or all of them if neither is given."""
        _refuse(kwargs)
        if ids is None and filter is None:
            self.documents.clear()
        else:
            self.documents.delete(ids, condition_of(filter))
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids that there are."""
        return [_document(one) for one in self.documents.select(ids)]

    def similarity_search(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The k documents that are most similar to a text.

        Args:
            filter: on their metadata, `{"lang": "en", "year": {"$gte": 2020}}`; operators are those of
                `amips.integrations.langchain_filters`.
            kwargs: `recall`, of a fitted index: see `Index.search`.
        """
        vector = self._embedding.embed_query(query)
        return self.similarity_search_by_vector(vector, k, filter=filter, **kwargs)

    async def asimilarity_search(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `similarity_search`, with the embedding's own asynchronous method."""
        vector = await self._embedding.aembed_query(query)
        search = self.similarity_search_by_vector
        return await run_in_executor(None, search, vector, k, filter=filter, **kwargs)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The k documents that are most similar to a vector."""
        return [_document(hit.document) for hit in self._search(embedding, k, filter, kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The k documents that are most similar to a text, with their scores: higher is better."""
        vector = self._embedding.embed_query(query)
        return self.similarity_search_with_score_by_vector(vector, k, filter=filter, **kwargs)

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """As `similarity_search_with_score`, with the embedding's own asynchronous method."""
        vector = await self._embedding.aembed_query(query)
        search = self.similarity_search_with_score_by_vector
        return await run_in_executor(None, search, vector, k, filter=filter, **kwargs)

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The k documents that are most similar to a vector, with their scores."""
        return [(_document(hit.document), hit.score) for hit in self._search(embedding, k, filter, kwargs)]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """k of the `fetch_k` documents that are most similar to a text, unlike each other.

        Args:
            lambda_mult: 1 for similarity alone, 0 for difference alone.
            kwargs: `filter`, `recall`.
        """
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """As `max_marginal_relevance_search`, with the embedding's own asynchronous method."""
        vector = await self._embedding.aembed_query(query)
        search = self.max_marginal_relevance_search_by_vector
        return await run_in_executor(None, search, vector, k, fetch_k, lambda_mult, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """k of the `fetch_k` documents that are most similar to a vector, unlike each other."""
        hits = self._search(embedding, max(k, fetch_k), filter, kwargs, vectors=True)
        chosen = diverse(hits, np.asarray(embedding, np.float32), k, lambda_mult)
        return [_document(hit.document) for hit in chosen]

    def _search(
        self, vector: Any, k: int, filter: Filter | None, more: dict[str, Any], vectors: bool = False
    ) -> list[Hit]:
        recall = more.pop("recall", None)
        _refuse(more)
        return self.documents.search(vector, k, condition_of(filter), vectors=vectors, recall=recall)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self.documents.similarity == "dot":  # which has no bounds: 0.5 for 0, and never the same for two
            return lambda score: 0.5 + 0.5 * score / (1 + abs(score))
        # Scores are cosines; what is turned away from a query is not relevant at all.
        return lambda score: min(1.0, max(0.0, score))


def _refuse(more: dict[str, Any]) -> None:
    if more:
        raise AmipsError(f"{', '.join(more)}: not an argument of this store")


def _with_ids(
    documents: Sequence[Document], ids: Iterable[str | None] | None = None
) -> list[tuple[Document, str]]:
    """Each document with its id."""
    names = [document.id for document in documents] if ids is None else list(ids)
    if len(names) != len(documents):
        raise AmipsError(f"{len(names)} ids for {len(documents)} documents: give one for each")
    if wrong := [name for name in names if not isinstance(name, str | None)]:
        raise AmipsError(f"an id is {wrong[0]!r}: expected text")
    return [(one, name or str(uuid.uuid4())) for one, name in zip(documents, names, strict=True)]


def _counted(texts: Iterable[str], ids: list[str] | None) -> list[str]:
    """The texts as a list, as many as ids: LangChain itself leaves out what has no id."""
    listed = list(texts)
    if ids is not None and len(ids) != len(listed):
        raise AmipsError(f"{len(ids)} ids for {len(listed)} texts: give one for each")
    return listed


def _stored(document: Document, name: str, vector: Any = None) -> StoredDocument:
    return StoredDocument(name, document.page_content, document.metadata, vector)


def _document(stored: StoredDocument) -> Document:
    return Document(id=stored.id, page_content=stored.text or "", metadata=stored.metadata)
