"""A store of a bundle that there is: its keys, and the texts and attributes that it has of them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_path
from amips.errors import AmipsError, BundleError
from amips.integrations.document_index import DocumentIndex
from amips.integrations.stored_document import StoredDocument
from amips.search import (
    TEXT_MANIFEST,
    GraphSearcher,
    Index,
    compacted,
    load,
    plain_index,
    read_texts,
)
from amips.text import TextFile


def documents_of_bundle(
    bundle: str | Path, documents: Sequence[StoredDocument] | None = None, **options: Any
) -> DocumentIndex:
    """A store with the keys and the index of a bundle, of which it has a copy.

    Args:
        bundle: a directory that `amips.fit` or `amips.build` made.
        documents: one for each key, in the order of the keys; their vectors are the keys. When not given,
            the texts of the bundle if it has any (`amips embed`), its ids and its attributes.
        options: of `DocumentIndex`, but for the similarity, which is that of the bundle: inner products.
    """
    path = check_path("bundle", bundle, error=BundleError)
    index = load(path, watch=False)
    if not isinstance(index, Index):
        raise BundleError(f"{path} routes an index that is elsewhere: a store needs a bundle with keys")
    snapshot = index.snapshot if plain_index(index.snapshot).fingerprint else compacted(index.snapshot)
    snapshot = compacted(snapshot) if plain_index(snapshot).alive is not None else snapshot
    plain = plain_index(snapshot)
    store_of_keys: Any = plain.store
    rows = (
        store_of_keys.keys if isinstance(plain, GraphSearcher) else store_of_keys.keys_at(np.arange(plain.n))
    )
    documents = _documents(path, plain) if documents is None else documents
    if len(documents) != plain.n:
        raise AmipsError(f"{len(documents):,} documents for {plain.n:,} keys: give one for each")
    keyed = [replace(one, vector=np.asarray(row)) for one, row in zip(documents, rows, strict=True)]
    store = DocumentIndex(similarity="dot", **options)
    store.adopt(Index(snapshot), keyed)
    return store


def _documents(path: Path, plain: Any) -> list[StoredDocument]:
    """What a bundle knows of its keys."""
    ids = [str(one) for one in (range(plain.n) if plain.labels is None else plain.labels.tolist())]
    table = [{}] * plain.n if plain.attributes is None else plain.attributes.table.to_pylist()
    if not os.path.lexists(path / TEXT_MANIFEST):
        return [StoredDocument(one, "", row) for one, row in zip(ids, table, strict=True)]
    stated, file = read_texts(path)
    texts = TextFile(file)
    if stated.get("keys") != plain.fingerprint or len(texts) != plain.n:
        raise BundleError(f"the texts in {path} belong to other keys: build it again with its texts")
    return [
        StoredDocument(one.id, one.text, {**({"title": one.title} if one.title else {}), **row})
        for one, row in zip(texts, table, strict=True)
    ]
