"""The vector store of LangChain: its own standard suite, and what that leaves out."""

import pytest
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from amips.integrations.langchain import AmipsVectorStore


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
