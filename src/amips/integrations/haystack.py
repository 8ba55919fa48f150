"""A document store of Haystack, and its retriever.

from amips.integrations.haystack import AmipsDocumentStore, AmipsEmbeddingRetriever

store = AmipsDocumentStore(path="store", log="queries.fvecs")
pipeline.add_component("retriever", AmipsEmbeddingRetriever(store, top_k=5))
store.fit()  # learns from the queries that were recorded
"""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amips.extras import needs_extra
from amips.integrations.bundle_documents import documents_of_bundle
from amips.integrations.document_index import DocumentIndex, Similarity
from amips.integrations.documents import Duplicates
from amips.integrations.query_recorder import SIZE
from amips.integrations.stored_document import DuplicateError, StoredDocument
from amips.search import Index, Refit, Report

with needs_extra("amips.integrations.haystack", "haystack", "haystack"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.document_stores.errors import DuplicateDocumentError
    from haystack.document_stores.types import DuplicatePolicy, FilterPolicy, apply_filter_policy

    from amips.integrations.haystack_filters import condition_of

Filters = dict[str, Any]

_POLICIES: dict[DuplicatePolicy, Duplicates] = {
    DuplicatePolicy.NONE: "fail",
    DuplicatePolicy.FAIL: "fail",
    DuplicatePolicy.SKIP: "skip",
    DuplicatePolicy.OVERWRITE: "overwrite",
}
_BESIDE = ("blob", "sparse_embedding")  # what a document has that is neither searched nor filtered by
DOT_SCALE = 100  # as Haystack scales inner products between 0 and 1


class AmipsDocumentStore:
    """Documents that are searched by their embeddings, in a directory or in memory.

    All documents are scored until `fit` is called; from then on a learned index finds them. Embeddings are
    kept in float32. Every method has a twin with `_async` at the end of its name, which works in another
    thread.

    Args:
        path: the directory of the store, made if it is not there; None keeps it in memory.
        similarity: "cosine", or "dot" for encoders that are made for inner products.
        log: a file .npy or .fvecs in which queries are recorded, for `fit`; None records nothing.
        log_size: the newest queries that it keeps, at least.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        similarity: Similarity = "cosine",
        log: str | Path | None = None,
        log_size: int = SIZE,
    ) -> None:
        self._use(DocumentIndex(path, similarity=similarity, log=log, log_size=log_size), path, log, log_size)

    def _use(
        self, documents: DocumentIndex, path: str | Path | None, log: str | Path | None, log_size: int
    ) -> None:
        self.documents = documents
        places = {"path": None if path is None else str(path), "log": None if log is None else str(log)}
        self._options = {**places, "similarity": documents.similarity, "log_size": log_size}

    @classmethod
    def from_bundle(
        cls, bundle: str | Path, documents: Sequence[Document] | None = None, **options: Any
    ) -> "AmipsDocumentStore":
        """A store with the keys and the index of a bundle, of which it has a copy.

        Args:
            bundle: a directory that `amips.fit` or `amips.build` made.
            documents: one for each key, in the order of the keys; when not given, what the bundle has: texts
                (`amips embed`), ids, attributes.
            options: of the store, but for the similarity: `path`, `log`, `log_size`.
        """
        stored = None if documents is None else [_stored(document) for document in documents]
        store = cls.__new__(cls)
        known = {"path": None, "log": None, "log_size": SIZE, **options}
        store._use(documents_of_bundle(bundle, stored, **options), **known)
        return store

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

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes the store of again; documents in memory are not in it."""
        return default_to_dict(self, **self._options)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "AmipsDocumentStore":
        """The store that `to_dict` describes."""
        store: AmipsDocumentStore = default_from_dict(cls, data)
        return store

    def count_documents(self) -> int:
        """How many documents there are."""
        return self.documents.count()

    def filter_documents(self, filters: Filters | None = None) -> list[Document]:
        """The documents that meet filters, with their embeddings, in the order in which they were written."""
        return [
            _document(one) for one in self.documents.select(condition=condition_of(filters), vectors=True)
        ]

    def write_documents(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """Write documents, all or none; how many were written. NONE is FAIL."""
        if not isinstance(documents, list) or not all(isinstance(one, Document) for one in documents):
            raise ValueError("write_documents: expected a list of documents")
        try:
            return self.documents.write([_stored(one) for one in documents], _POLICIES[policy])
        except DuplicateError as problem:
            raise DuplicateDocumentError(str(problem)) from None

    def delete_documents(self, document_ids: list[str]) -> None:
        """Delete documents by their ids; those that are not there are passed over."""
        self.documents.delete(document_ids)

    def delete_all_documents(self) -> None:
        """Delete all documents, and forget the index."""
        self.documents.clear()

    def delete_by_filter(self, filters: Filters) -> int:
        """Delete the documents that meet filters; how many there were."""
        return self.documents.delete(condition=condition_of(filters))

    def update_by_filter(self, filters: Filters, meta: dict[str, Any]) -> int:
        """Give metadata to the documents that meet filters, beside what they have; how many there were."""
        return self.documents.set_metadata(condition_of(filters), meta)

    def count_documents_by_filter(self, filters: Filters) -> int:
        """How many documents meet filters."""
        return self.documents.count(condition_of(filters))

    def count_unique_metadata_by_filter(self, filters: Filters, metadata_fields: list[str]) -> dict[str, int]:
        """How many values each field has in the documents that meet filters."""
        names = [field.removeprefix("meta.") for field in metadata_fields]
        return {name: len(self._values(name, filters)) for name in names}

    def get_metadata_fields_info(self) -> dict[str, dict[str, str]]:
        """The fields of the metadata, with the types of their values."""
        kinds: dict[type, str] = {bool: "boolean", int: "int", float: "float"}
        values = self.documents.documents.field_values(None)
        return {name: {"type": kinds.get(type(value), "keyword")} for name, value in values}

    def get_metadata_field_min_max(self, metadata_field: str) -> dict[str, Any]:
        """The least and the largest value of a field: of its numbers, of its texts if there are none."""
        values = self._values(metadata_field, None)
        numbers = [value for value in values if isinstance(value, int | float)]
        ordered: list[Any] = numbers or [value for value in values if isinstance(value, str)]
        return {"min": min(ordered, default=None), "max": max(ordered, default=None)}

    def get_metadata_field_unique_values(
        self,
        metadata_field: str,
        search_term: str | None = None,
        from_: int = 0,
        size: int = 10,
        filters: Filters | None = None,
    ) -> tuple[list[Any], int]:
        """The values that a field has, a page of them, and how many there are in all.

        Args:
            search_term: that is a part of the values, in small letters or large ones.
            from_, size: the page.
            filters: which the documents meet.
        """
        values = self._values(metadata_field, filters)
        if search_term:
            values = [value for value in values if search_term.lower() in str(value).lower()]
        values.sort(key=lambda value: (str(value), type(value).__name__))
        return values[from_ : from_ + size], len(values)

    def _values(self, field: str, filters: Filters | None) -> list[Any]:
        name, condition = field.removeprefix("meta."), condition_of(filters)
        return [value for _, value in self.documents.documents.field_values(name, condition)]

    def embedding_retrieval(
        self,
        query_embedding: list[float],
        filters: Filters | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        return_embedding: bool = False,
        recall: float | None = None,
    ) -> list[Document]:
        """The documents that are most similar to an embedding; see `AmipsEmbeddingRetriever`."""
        hits = self.documents.search(
            query_embedding, top_k, condition_of(filters), vectors=return_embedding, recall=recall
        )
        scale = self._scaled if scale_score else float
        return [_document(hit.document, scale(hit.score)) for hit in hits]

    def _scaled(self, score: float) -> float:
        """A score between 0 and 1."""
        if self.documents.similarity == "cosine":
            return (score + 1) / 2
        return 1 / (1 + math.exp(-max(-500.0, score / DOT_SCALE)))

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), name.removesuffix("_async"), None)
        if name.startswith("_") or not name.endswith("_async") or not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        async def in_thread(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, self, *args, **kwargs)

        return in_thread


@component
class AmipsEmbeddingRetriever:
    """The documents of an `AmipsDocumentStore` that are most similar to an embedding.

    Args:
        document_store: where they are.
        filters: which they meet.
        top_k: how many, at most.
        scale_score: whether scores are brought between 0 and 1.
        return_embedding: whether documents come with their embeddings.
        filter_policy: whether filters of a run go in the place of these ("replace") or beside them ("merge").
        recall: of a fitted index: see `Index.search`.
    """

    def __init__(
        self,
        document_store: AmipsDocumentStore,
        filters: Filters | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        return_embedding: bool = False,
        filter_policy: str | FilterPolicy = FilterPolicy.REPLACE,
        recall: float | None = None,
    ) -> None:
        if not isinstance(document_store, AmipsDocumentStore):
            raise TypeError(f"document_store is a {type(document_store).__name__}, not an AmipsDocumentStore")
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: expected 1 at least")
        self.document_store, self.filters, self.top_k = document_store, filters, top_k
        self.scale_score, self.return_embedding, self.recall = scale_score, return_embedding, recall
        policy = filter_policy
        self.filter_policy = policy if isinstance(policy, FilterPolicy) else FilterPolicy.from_str(policy)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes the retriever of again, its store with it."""
        names = ("filters", "top_k", "scale_score", "return_embedding", "recall")
        options = {name: getattr(self, name) for name in names}
        options["filter_policy"] = self.filter_policy.value
        return default_to_dict(self, document_store=self.document_store.to_dict(), **options)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "AmipsEmbeddingRetriever":
        """The retriever that `to_dict` describes."""
        options = dict(data["init_parameters"])
        options["document_store"] = AmipsDocumentStore.from_dict(options["document_store"])
        retriever: AmipsEmbeddingRetriever = default_from_dict(cls, {**data, "init_parameters": options})
        return retriever

    @component.output_types(documents=list[Document])
    def run(
        self,
        query_embedding: list[float],
        filters: Filters | None = None,
        top_k: int | None = None,
        scale_score: bool | None = None,
        return_embedding: bool | None = None,
    ) -> dict[str, list[Document]]:
        """The documents; what is given here goes in the place of what the retriever was made with."""
        call = self._call(filters, top_k, scale_score, return_embedding)
        return {"documents": self.document_store.embedding_retrieval(query_embedding, **call)}

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        query_embedding: list[float],
        filters: Filters | None = None,
        top_k: int | None = None,
        scale_score: bool | None = None,
        return_embedding: bool | None = None,
    ) -> dict[str, list[Document]]:
        """As `run`, in another thread."""
        call = self._call(filters, top_k, scale_score, return_embedding)
        return {"documents": await self.document_store.embedding_retrieval_async(query_embedding, **call)}

    def _call(self, filters: Filters | None, top_k: Any, scale_score: Any, return_embedding: Any) -> Any:
        return {
            "filters": apply_filter_policy(self.filter_policy, self.filters, filters),
            "top_k": self.top_k if top_k is None else top_k,
            "scale_score": self.scale_score if scale_score is None else scale_score,
            "return_embedding": self.return_embedding if return_embedding is None else return_embedding,
            "recall": self.recall,
        }


def _stored(document: Document) -> StoredDocument:
    whole = document.to_dict(flatten=False)
    beside = {name: whole[name] for name in _BESIDE if whole[name] is not None}
    vector = None if document.embedding is None else np.asarray(document.embedding, np.float32)
    extra = json.dumps(beside) if beside else None
    return StoredDocument(document.id, document.content, document.meta, vector, extra)


def _document(stored: StoredDocument, score: float | None = None) -> Document:
    beside = {} if stored.extra is None else json.loads(stored.extra)
    whole = {"id": stored.id, "content": stored.text, "meta": stored.metadata, "score": score}
    whole |= {name: beside[name] for name in _BESIDE if name in beside}
    whole["embedding"] = None if stored.vector is None else stored.vector.tolist()
    return Document.from_dict(whole)
