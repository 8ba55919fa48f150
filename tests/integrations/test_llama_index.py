"""The vector store of LlamaIndex: nodes, modes, every operator of its filters."""

import asyncio

import pytest
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

import amips
from amips.integrations.llama_index import AmipsVectorStore

METADATA = {
    "a": {"year": 1999, "lang": "en", "tags": ["x", "y"]},
    "b": {"year": 2010, "lang": "de", "tags": ["y"]},
    "c": {"year": 2020, "lang": "EN", "tags": []},
}
VECTORS = {"a": [1.0, 0.0, 0.0], "b": [0.9, 0.1, 0.0], "c": [0.5, 0.0, 0.8]}


def nodes():
    return [
        TextNode(
            id_=name,
            text=f"text {name}",
            metadata=metadata,
            embedding=VECTORS[name],
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"source-{name}")},
        )
        for name, metadata in METADATA.items()
    ]


@pytest.fixture
def store():
    store = AmipsVectorStore()
    store.add(nodes())
    yield store
    store.close()


def asked(store, **options):
    return store.query(
        VectorStoreQuery(query_embedding=[1.0, 0.0, 0.0], **{"similarity_top_k": 3, **options})
    )


def test_nodes_come_back_as_they_were_after_reopening(tmp_path):
    store = AmipsVectorStore(path=tmp_path / "store")
    store.add(nodes())
    store.close()
    store = AmipsVectorStore(path=tmp_path / "store")
    result = asked(store)
    assert result.ids == ["a", "b", "c"]
    assert result.nodes[0].metadata == METADATA["a"]
    assert result.nodes[0].get_content() == "text a"
    assert result.nodes[0].ref_doc_id == "source-a"
    store.close()


@pytest.mark.parametrize(
    ("operator", "key", "value", "expected"),
    [
        (FilterOperator.EQ, "lang", "en", "a"),
        (FilterOperator.NE, "lang", "en", "bc"),
        (FilterOperator.GT, "year", 2010, "c"),
        (FilterOperator.GTE, "year", 2010, "bc"),
        (FilterOperator.LT, "year", 2010, "a"),
        (FilterOperator.LTE, "year", 2010, "ab"),
        (FilterOperator.IN, "lang", ["en", "de"], "ab"),
        (FilterOperator.NIN, "lang", ["en", "de"], "c"),
        (FilterOperator.CONTAINS, "tags", "x", "a"),
        (FilterOperator.ANY, "tags", ["x", "y"], "ab"),
        (FilterOperator.ALL, "tags", ["x", "y"], "a"),
        (FilterOperator.TEXT_MATCH, "lang", "e", "ab"),
        (FilterOperator.TEXT_MATCH_INSENSITIVE, "lang", "en", "ac"),
        (FilterOperator.IS_EMPTY, "tags", None, "c"),
    ],
    ids=lambda value: value.name if isinstance(value, FilterOperator) else str(value),
)
def test_every_operator(store, operator, key, value, expected):
    filters = MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])
    assert sorted(asked(store, filters=filters).ids) == list(expected)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [(FilterCondition.AND, ""), (FilterCondition.OR, "ab"), (FilterCondition.NOT, "c")],
    ids=["and", "or", "not"],
)
def test_conditions(store, condition, expected):
    parts = [MetadataFilter(key="lang", value=lang) for lang in ("en", "de")]
    filters = MetadataFilters(filters=parts, condition=condition)
    assert sorted(asked(store, filters=filters).ids) == list(expected)


def test_mmr_takes_what_is_unlike(store):
    assert asked(store, similarity_top_k=2).ids == ["a", "b"]
    mode = VectorStoreQueryMode.MMR
    assert asked(store, similarity_top_k=2, mode=mode, mmr_threshold=0.3).ids == ["a", "c"]
    assert asked(store, similarity_top_k=2, mode=mode, mmr_threshold=1.0).ids == ["a", "b"]


def test_deletion(store):
    store.delete("source-a")
    assert asked(store).ids == ["b", "c"]
    store.delete_nodes(["b"])
    assert [node.node_id for node in store.get_nodes()] == ["c"]
    asyncio.run(store.aclear())
    assert asked(store).ids == []


def test_errors_are_one_line(store):
    with pytest.raises(amips.AmipsError, match="the query has none"):
        store.query(VectorStoreQuery(query_str="words"))
    with pytest.raises(amips.AmipsError, match="mode sparse"):
        asked(store, mode=VectorStoreQueryMode.SPARSE)
    with pytest.raises(amips.AmipsError, match="give node_ids or filters"):
        store.delete_nodes()
