"""A vector store of LlamaIndex.

from amips.integrations.llama_index import AmipsVectorStore

store = AmipsVectorStore(path="store", log="queries.fvecs")
index = VectorStoreIndex.from_vector_store(store)
store.fit()  # learns from the queries that were recorded
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.integrations.bundle_documents import documents_of_bundle
from amips.integrations.conditions import (
    All,
    Compare,
    Condition,
    Equal,
    Exists,
    Has,
    Matches,
    Not,
    Some,
    equal,
    one_of,
    scalar,
    shallow,
)
from amips.integrations.diversity import diverse
from amips.integrations.document_index import DocumentIndex, Similarity
from amips.integrations.query_recorder import SIZE
from amips.integrations.stored_document import StoredDocument
from amips.search import Index, Refit, Report

with needs_extra("amips.integrations.llama_index", "llama-index", "llama_index"):
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.schema import BaseNode, MetadataMode, TextNode
    from llama_index.core.vector_stores.types import (
        BasePydanticVectorStore,
        FilterCondition,
        FilterOperator,
        MetadataFilter,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
        VectorStoreQueryResult,
    )
    from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

_CONTENT, _TYPE, _SOURCE = "_node_content", "_node_type", "ref_doc_id"  # LlamaIndex's names
PREFETCH = 4  # times as many nodes are looked at as MMR is to choose
BALANCE = 0.5  # of MMR, between difference (0) and similarity (1)


class AmipsVectorStore(BasePydanticVectorStore):
    """Nodes that are searched by their embeddings, in a directory or in memory.

    All nodes are scored until `fit` is called; from then on a learned index finds them.

    Args:
        path: the directory of the store, made if it is not there; None keeps it in memory.
        similarity: "cosine", or "dot" for encoders that are made for inner products.
        log: a file .npy or .fvecs in which queries are recorded, for `fit`; None records nothing.
        log_size: the newest queries that it keeps, at least.
    """

    stores_text: bool = True
    path: str | None = None
    similarity: Similarity = "cosine"
    log: str | None = None
    log_size: int = SIZE
    _documents: DocumentIndex = PrivateAttr()

    def __init__(
        self,
        path: str | Path | None = None,
        similarity: Similarity = "cosine",
        log: str | Path | None = None,
        log_size: int = SIZE,
        **fields: Any,
    ) -> None:
        fields |= {"path": None if path is None else str(path), "log": None if log is None else str(log)}
        fields |= {"similarity": similarity, "log_size": log_size}
        super().__init__(**fields)
        self._documents = DocumentIndex(path, similarity=similarity, log=log, log_size=log_size)

    @classmethod
    def from_bundle(
        cls, bundle: str | Path, nodes: Sequence[BaseNode] | None = None, **options: Any
    ) -> "AmipsVectorStore":
        """A store with the keys and the index of a bundle, of which it has a copy.

        Args:
            bundle: a directory that `amips.fit` or `amips.build` made.
            nodes: one for each key, in the order of the keys; when not given, what the bundle has: texts
                (`amips embed`), ids, attributes.
            options: of the store, but for the similarity: `path`, `log`, `log_size`.
        """
        stored = None if nodes is None else [_stored(node) for node in nodes]
        documents = documents_of_bundle(bundle, stored, **options)
        places = {name: str(options[name]) for name in ("path", "log") if options.get(name) is not None}
        store = cls.model_construct(**{**options, **places, "similarity": "dot"})
        store._documents = documents
        return store

    @classmethod
    def class_name(cls) -> str:
        """The name by which LlamaIndex knows it."""
        return "AmipsVectorStore"

    @property
    def client(self) -> DocumentIndex:
        """The documents and their keys."""
        return self._documents

    @property
    def index(self) -> Index | None:
        """The index that was fitted, to look at; None if none was."""
        return self._documents.index

    def fit(
        self, queries: Any = None, *, minutes: float | None = None, anew: bool = False, **options: Any
    ) -> Report | Refit | None:
        """Learn from queries, those that were recorded if none are given: see `DocumentIndex.fit`."""
        return self._documents.fit(queries, minutes=minutes, anew=anew, **options)

    def close(self) -> None:
        """Close the files: the store cannot be used any more."""
        self._documents.close()

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes with embeddings, in the place of those that have the same id; their ids."""
        self._documents.write(_stored(node, node.get_embedding()) for node in nodes)
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As `add`, in another thread."""
        return await asyncio.to_thread(self.add, nodes)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document."""
        self._documents.delete(condition=equal(_SOURCE, ref_doc_id))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As `delete`, in another thread."""
        await asyncio.to_thread(self.delete, ref_doc_id)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes by their ids, by filters, or those that meet both."""
        if node_ids is None and filters is None:
            raise AmipsError("delete_nodes: give node_ids or filters; clear deletes all nodes")
        self._documents.delete(node_ids, condition_of(filters))

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """As `delete_nodes`, in another thread."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters)

    def clear(self) -> None:
        """Delete all nodes, and forget the index."""
        self._documents.clear()

    async def aclear(self) -> None:
        """As `clear`, in another thread."""
        await asyncio.to_thread(self.clear)

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes by their ids, by filters, or those that meet both; all of them if neither is given."""
        return [_node(one) for one in self._documents.select(node_ids, condition_of(filters), vectors=True)]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """As `get_nodes`, in another thread."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes that are most similar to an embedding; modes are DEFAULT and MMR.

        Args:
            kwargs: `recall`, of a fitted index: see `Index.search`. Of MMR `mmr_threshold`, between
                difference (0) and similarity (1), and `mmr_prefetch_k`, how many nodes are looked at.
        """
        if query.query_embedding is None:
            raise AmipsError("this store is asked with embeddings: the query has none")
        if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
            raise AmipsError(f"mode {query.mode.value}: expected default or mmr")
        parts = [condition_of(query.filters)]
        if query.doc_ids is not None:
            parts.append(one_of(_SOURCE, query.doc_ids))
        conditions = tuple(part for part in parts if part is not None)
        x, k, mmr = query.query_embedding, query.similarity_top_k, query.mode == VectorStoreQueryMode.MMR
        hits = self._documents.search(
            x,
            int(kwargs.get("mmr_prefetch_k") or PREFETCH * k) if mmr else k,
            All(conditions) if conditions else None,
            ids=query.node_ids,
            vectors=mmr,
            recall=kwargs.get("recall"),
        )
        if mmr:
            balances = (query.mmr_threshold, kwargs.get("mmr_threshold"), BALANCE)
            balance = next(one for one in balances if one is not None)
            hits = diverse(hits, np.asarray(x, np.float32), k, balance)
        return VectorStoreQueryResult(
            nodes=[_node(hit.document) for hit in hits],
            similarities=[hit.score for hit in hits],
            ids=[hit.document.id for hit in hits],
        )

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`, in another thread."""
        return await asyncio.to_thread(self.query, query, **kwargs)


@shallow
def condition_of(filters: MetadataFilters | None) -> Condition | None:
    """Metadata filters, of which some may be within others, as a condition."""
    if filters is None or not filters.filters:
        return None
    inner = (
        condition_of(one) if isinstance(one, MetadataFilters) else _condition(one) for one in filters.filters
    )
    parts = tuple(part for part in inner if part is not None)
    if filters.condition == FilterCondition.OR:
        return Some(parts)
    return Not(Some(parts)) if filters.condition == FilterCondition.NOT else All(parts)


_OPERATORS: dict[FilterOperator, Callable[[str, Any], Condition]] = {
    FilterOperator.EQ: equal,
    FilterOperator.NE: lambda key, value: Not(equal(key, value)),
    FilterOperator.GT: lambda key, value: Compare(key, ">", scalar(value)),
    FilterOperator.GTE: lambda key, value: Compare(key, ">=", scalar(value)),
    FilterOperator.LT: lambda key, value: Compare(key, "<", scalar(value)),
    FilterOperator.LTE: lambda key, value: Compare(key, "<=", scalar(value)),
    FilterOperator.IN: lambda key, value: one_of(key, _listed(value)),
    FilterOperator.NIN: lambda key, value: Not(one_of(key, _listed(value))),
    FilterOperator.CONTAINS: lambda key, value: _contains(key, value),
    FilterOperator.ANY: lambda key, value: Some(tuple(_contains(key, one) for one in _listed(value))),
    FilterOperator.ALL: lambda key, value: All(
        (Exists(key), *(_contains(key, one) for one in _listed(value)))
    ),
    FilterOperator.TEXT_MATCH: lambda key, value: Matches(key, str(value)),
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda key, value: Matches(key, str(value), ignore_case=True),
    FilterOperator.IS_EMPTY: lambda key, _: Some((Not(Exists(key)), equal(key, ""), Equal(key, "[]"))),
}


def _condition(filter: MetadataFilter) -> Condition:
    return _OPERATORS[filter.operator](filter.key, filter.value)


def _contains(key: str, value: Any) -> Condition:
    """A list with this element, or a text with this part."""
    element = Has(key, scalar(value))
    return Some((element, Matches(key, value))) if isinstance(value, str) else element


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise AmipsError(f"a filter for one of several values has {value!r}: expected a list")
    return list(value)


def _stored(node: BaseNode, vector: Any = None) -> StoredDocument:
    metadata = node_to_metadata_dict(node, remove_text=True)
    extra = json.dumps({name: metadata.pop(name) for name in (_CONTENT, _TYPE)})
    row = None if vector is None else np.asarray(vector, np.float32)
    return StoredDocument(node.node_id, node.get_content(MetadataMode.NONE), metadata, row, extra)


def _node(stored: StoredDocument) -> BaseNode:
    content = {} if stored.extra is None else json.loads(stored.extra)
    if _CONTENT in content:
        node = metadata_dict_to_node(content, stored.text)
    else:  # another framework wrote it, or it comes from a bundle
        node = TextNode(id_=stored.id, text=stored.text or "", metadata=stored.metadata)
    if stored.vector is not None:
        node.embedding = stored.vector.tolist()
    return node
