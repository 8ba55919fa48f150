"""A document as it is kept: an id, a text, metadata, a vector."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amips.errors import AmipsError
from amips.integrations.conditions import plain_value, rows_of
from amips.vectors import Floats


class DuplicateError(AmipsError):
    """A document has the id of another."""


@dataclass(frozen=True)
class StoredDocument:
    """A document: what every framework has of one.

    Args:
        metadata: by name; what JSON can keep.
        vector: float32 [d]; None of a document that is not searched for.
        extra: what one framework has beside, as JSON.
    """

    id: str
    text: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    vector: Floats | None = field(default=None, compare=False)
    extra: str | None = None


def vector_of(data: bytes | None) -> Floats | None:
    """What `content_rows` made bytes of."""
    return None if data is None else np.frombuffer(data, "<f4").astype(np.float32)


def content_rows(document: StoredDocument) -> tuple[StoredDocument, list[Any], list[Any]]:
    """A document, the row of its content, and the rows of its metadata."""
    try:
        metadata = json.dumps(document.metadata, default=_jsonable)
        rows = list(rows_of(document.metadata))
        for text in (document.id, document.text or "", *(one for row in rows for one in row)):
            if isinstance(text, str):
                text.encode()
    except (TypeError, ValueError, RecursionError) as problem:
        reason = "half of a surrogate pair" if isinstance(problem, UnicodeError) else problem
        raise AmipsError(f"document {document.id!r} cannot be kept: {reason}; nothing was written") from None
    vector = None if document.vector is None else document.vector.astype("<f4").tobytes()
    return document, [document.text, metadata, document.extra, vector], rows


def _jsonable(value: Any) -> Any:
    if (plain := plain_value(value)) is value:
        raise TypeError(f"its metadata has a {type(value).__name__}, which JSON does not have")
    return plain
