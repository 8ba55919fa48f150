"""Text in: reading corpora, encoders, pseudo-queries, data sets, questions in words."""

from amips.text.asking import Answer, Asker, attach
from amips.text.data import get_data
from amips.text.docstrings import collect
from amips.text.embedding import Embedded, embed
from amips.text.encoders import Encoder, open_encoder, open_published
from amips.text.pseudo import queries as make_queries
from amips.text.texts import Text, TextFile, read_texts

__all__ = [
    "Answer",
    "Asker",
    "Embedded",
    "Encoder",
    "Text",
    "TextFile",
    "attach",
    "collect",
    "embed",
    "get_data",
    "make_queries",
    "open_encoder",
    "open_published",
    "read_texts",
]
