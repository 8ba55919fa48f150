"""Texts: read from files people have, kept beside the vectors that are made of them.

    DIR/
      keys.npy, queries.npy       float32, one row a text, L2-normalised
      keys.jsonl, queries.jsonl   {"id": ..., "title": ..., "text": ...}, line i belongs to row i
      embed.json                  the encoder, counts, duplicates left out; written last
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One text of a corpus or of a log of queries; `title` may be empty."""

    id: str
    title: str
    text: str

    @property
    def whole(self) -> str:
        """What is encoded: the title, if there is one, and the text."""
        return f"{self.title} {self.text}".strip() if self.title else self.text
