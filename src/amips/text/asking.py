"""Questions in words: encode, search a bundle, and show the texts that were found.

A bundle that can be asked carries the texts of its keys and the name of the encoder:

    bundle/
      text/
        keys.jsonl     line i is the text of key i
        text.json      the encoder, the fingerprint of the keys, size and SHA-256; written last
"""

import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.errors import AmipsError, BundleError
from amips.files import partial, read_manifest, write_manifest
from amips.search import TOP, RoutingEstimate, Searcher, checked_k, load
from amips.text.embedding import Embedded
from amips.text.encoders import Encoder, open_encoder
from amips.text.texts import Text, TextFile
from amips.vectors import Floats

FOLDER, MANIFEST, TEXTS = "text", "text.json", "keys.jsonl"
FORMAT = 1


def attach(bundle: str | Path, embedded: Embedded | str | Path) -> None:
    """Put the texts that a bundle's keys were made of beside them, so that it can be asked in words."""
    bundle = Path(bundle)
    embedded = embedded if isinstance(embedded, Embedded) else Embedded(embedded)
    index = load(bundle, verify=False, mmap=True)
    if index.fingerprint != embedded.fingerprint:
        raise BundleError(f"{bundle} does not hold the keys of {embedded.path}")
    fields = {"kind": "texts", "format": FORMAT, "encoder": embedded.encoder, "keys": embedded.fingerprint}
    with partial(bundle / FOLDER) as temporary:
        temporary.mkdir()
        shutil.copyfile(embedded.path / TEXTS, temporary / TEXTS)
        write_manifest(temporary, MANIFEST, fields, [TEXTS])


@dataclass(frozen=True)
class Hit:
    """One text that was found, and its score."""

    score: float
    text: Text


@dataclass(frozen=True)
class Effort:
    """What a router needs to find the true best keys of a question."""

    router: str
    probes: int
    scanned: int  # keys in these cells


@dataclass(frozen=True)
class Answer:
    """The hits, best first, and how few keys were scanned for them."""

    question: str
    hits: list[Hit]
    probes: int
    scanned: int
    n: int


class Asker:
    """A bundle with texts and an encoder, ready for questions."""

    def __init__(self, bundle: str | Path) -> None:
        self.path = Path(bundle)
        self.index: Searcher = load(self.path)
        if not (self.path / FOLDER / MANIFEST).exists():
            raise BundleError(f"{bundle} has no texts: build it with --texts DIR (what amips embed made)")
        about = read_manifest(self.path / FOLDER, MANIFEST, "texts", FORMAT, BundleError)
        if about.get("keys") != self.index.fingerprint:
            raise BundleError(
                f"the texts in {self.path / FOLDER} belong to other keys: build with --texts again"
            )
        self.texts = TextFile(self.path / FOLDER / TEXTS)
        if len(self.texts) != self.index.n:
            raise BundleError(f"{self.path / FOLDER / TEXTS} is damaged: {len(self.texts)} texts")
        self._encoder = str(about.get("encoder"))

    @cached_property
    def encoder(self) -> Encoder:
        """Opened when the first question is asked."""
        encoder = open_encoder(self._encoder)
        if encoder.d != self.index.d:
            raise BundleError(f"{self._encoder} gives dimension {encoder.d}, the bundle has {self.index.d}")
        return encoder

    def ask(
        self, question: str, k: int = 5, *, recall: float | None = None, probes: int | None = None
    ) -> Answer:
        """The k best texts for a question, at the recall that the bundle was made for if neither is named."""
        k = checked_k(k)
        x = self._encoded(question)
        plain = replace(self.index, labels=None)  # rows, not labels: rows are what texts have
        wanted = max(k, TOP) if probes is None else k  # recall is known of so many top keys
        scores, ids = plain.search(x, wanted, recall=recall, probes=probes)
        hits = [
            Hit(float(score), self.texts[int(row)])
            for score, row in zip(scores[0, :k], ids[0, :k], strict=True)
            if row >= 0
        ]
        cost = plain.cost(x, wanted, recall=recall, probes=probes)
        return Answer(question, hits, int(cost.probed[0]), int(cost.scanned[0]), self.index.n)

    def compare(self, question: str, k: int = 5) -> list[Effort]:
        """How many probes centroid and learned routing need until they have seen the true k best keys."""
        x = self._encoded(question)
        plain, keys = Searcher(self.index.store, None), getattr(self.index.store, "keys", None)
        # Codes find candidates only; the true best keys are found among the keys themselves.
        if keys is None:
            ids = plain.search(x, k, probes=plain.c)[1][0]
        else:
            ids = exact.top_k(keys, x, min(k, self.index.n))[1][0]
        best = ids[ids >= 0]
        efforts = [_effort(plain, x, best)]
        if self.index.model is not None:
            efforts.append(_effort(Searcher(self.index.store, self.index.model), x, best))
        return efforts

    def _encoded(self, question: str) -> Floats:
        if not question.strip():
            raise AmipsError("the question is empty")
        return self.encoder.encode([question])


def _effort(searcher: Searcher, x: Floats, best: NDArray[np.integer[Any]]) -> Effort:
    store = searcher.store
    seen = RoutingEstimate.by(
        searcher.router, x, best[None], store.assignment, store.sizes, second=store.second
    )
    probes = seen.probes_for(1.0) if best.size else 1
    return Effort(searcher.router.name, probes, int(seen.at_probes(probes).scanned[0]))
