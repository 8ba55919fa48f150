"""amips behind the interfaces of other libraries: one file each, imported by who uses it.

    from amips.integrations.langchain import AmipsVectorStore
    from amips.integrations.llama_index import AmipsVectorStore
    from amips.integrations.haystack import AmipsDocumentStore, AmipsEmbeddingRetriever
    from amips.integrations.sklearn import AmipsNeighbors

The first three share `DocumentIndex`: documents in SQLite, their keys in an index.
"""

from amips.integrations.document_index import DocumentIndex, Hit
from amips.integrations.query_recorder import QueryRecorder
from amips.integrations.stored_document import StoredDocument

__all__ = ["DocumentIndex", "Hit", "QueryRecorder", "StoredDocument"]
