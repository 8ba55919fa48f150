"""Questions in words: encode, search a bundle, and show the texts that were found.

A bundle that can be asked carries the texts of its keys and the name of the encoder (`attach`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips import exact
from amips.errors import AmipsError, BundleError
from amips.metrics import TOP
from amips.routers import RoutingEstimate
from amips.search import (
    TEXT_MANIFEST,
    TEXTS,
    GraphSearcher,
    Index,
    Searcher,
    bundle_stamp,
    checked_k,
    load,
    plain_index,
    read_texts,
    with_facts,
    write_texts,
)
from amips.signing import Trusted, approval
from amips.text.embedding import Embedded
from amips.text.encoders import Encoder, is_published_name, open_encoder, open_published
from amips.text.texts import Text, TextFile
from amips.vectors import Floats

SAME = 0.7  # the score of a text with its own key: 1 but for codes; with a key of another encoder about 0


def attach(bundle: str | Path, embedded: Embedded | str | Path) -> None:
    """Put the texts that a bundle's keys were made of beside them, so that it can be asked in words."""
    embedded = embedded if isinstance(embedded, Embedded) else Embedded(embedded)
    digest = embedded.manifest["files"][TEXTS]["sha256"]
    stated = {"encoder": embedded.encoder, "keys": embedded.fingerprint}
    write_texts(Path(bundle), embedded.path / TEXTS, digest, stated)


@dataclass(frozen=True)
class Hit:
    """One text that was found, and its score."""

    score: float
    text: Text


@dataclass(frozen=True)
class RouterEffort:
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
    """A bundle with texts and an encoder, ready for questions.

    Args:
        bundle: the bundle directory.
        encoder: what encoded the texts, a name, a directory or an `Encoder`; by default the published model
            that the bundle names, if it is on this machine. Nothing is downloaded because a bundle says so,
            and a directory that it names is never opened: either may be someone else's.
        trusted: as in `amips.load`; the texts must be signed too.
        index: the bundle, if it is open already: it is not loaded again.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        encoder: str | Path | Encoder | None = None,
        trusted: Trusted | None = None,
        index: Index | None = None,
    ) -> None:
        self.path = Path(bundle)
        self.index = load(self.path, trusted=trusted) if index is None else index
        if not os.path.lexists(self.path / TEXT_MANIFEST):
            raise BundleError(f"{bundle} has no texts: build it with --texts DIR (what amips embed made)")
        self.texts, self._named = self._open_texts(trusted)
        self._brought = encoder

    def _open_texts(self, trusted: Trusted | None) -> tuple[TextFile, str]:
        """The texts, and the encoder that their manifest names."""
        while True:
            before = bundle_stamp(self.path, TEXT_MANIFEST)
            try:
                about, path = read_texts(self.path, approval(self.path, TEXT_MANIFEST, trusted, BundleError))
                texts = TextFile(path)
                break
            except AmipsError:
                if bundle_stamp(self.path, TEXT_MANIFEST) == before:
                    raise  # otherwise they were replaced meanwhile
        if not self.index.fingerprint:
            raise BundleError(f"{self.path} has keys that were added without texts: search it by vectors")
        if about.get("keys") != self.index.fingerprint:
            raise BundleError(f"the texts in {self.path} belong to other keys: build with --texts again")
        if len(texts) != self.index.snapshot.n:
            raise BundleError(f"{path} is damaged: {len(texts)} texts")
        return texts, str(about.get("encoder"))

    @cached_property
    def encoder(self) -> Encoder:
        """Opened when the first question is asked."""
        encoder = self._open()
        if encoder.d != self.index.d:
            raise BundleError(f"{encoder.name} gives dimension {encoder.d}, the bundle has {self.index.d}")
        if encoder.name != self._named and not self._knows_keys(encoder):
            raise BundleError(
                f"{encoder.name} is not the encoder of {self.path}, which is {self._named}: it gives the "
                "first text another vector than its key"
            )
        return encoder

    def _open(self) -> Encoder:
        if isinstance(self._brought, (str, Path)):
            return open_encoder(self._brought)
        if self._brought is not None:
            return self._brought
        if not is_published_name(self._named):
            raise BundleError(
                f"{self.path} was made with the encoder {self._named!r}, which is not a published model: "
                "name its directory with --encoder DIR (encoder=)"
            )
        return open_published(self._named)

    def _knows_keys(self, encoder: Encoder) -> bool:
        """Whether the first text, encoded, is found with the score that a unit vector has with itself."""
        plain = plain_index(self.index.snapshot)
        x = encoder.encode([self.texts[0].whole])
        if isinstance(plain, GraphSearcher):
            scores, _, _ = plain.search_with(x, 1, None)
        else:
            scores, _ = plain.search(x, 1, probes=plain.c)
        return bool(scores[0, 0] > SAME)

    def ask(
        self,
        question: str,
        k: int = 5,
        *,
        recall: float | None = None,
        probes: int | None = None,
        best_effort: bool = False,
    ) -> Answer:
        """The k best texts for a question, at the recall that the bundle was made for if neither is named.

        With `best_effort`, a recall that cannot be had is a warning instead of an error.
        """
        effort: dict[str, Any] = {"recall": recall, "probes": probes, "best_effort": best_effort}
        return self.ask_many([question], k, **effort)[0]

    def ask_many(self, questions: Sequence[str], k: int = 5, **effort: Any) -> list[Answer]:
        """As `ask`, of several questions, which are encoded and searched for together."""
        k = checked_k(k)
        x = self.encoded_many(questions)
        plain = with_facts(self.index.snapshot, labels=None)  # rows, not labels: rows are what texts have
        if plain.n != len(self.texts):
            raise BundleError(f"{self.path} has keys that were added without texts: search it by vectors")
        wanted = max(k, TOP) if effort.get("probes") is None else k  # recall is known of so many top keys
        scores, ids = plain.search(x, wanted, **effort)
        cost = plain.cost(x, wanted, **effort)
        answers = []
        for i, question in enumerate(questions):
            hits = [
                Hit(float(score), self.texts[int(row)])
                for score, row in zip(scores[i, :k], ids[i, :k], strict=True)
                if row >= 0
            ]
            answers.append(Answer(question, hits, int(cost.probed[i]), int(cost.scanned[i]), self.index.n))
        return answers

    def compare(self, question: str, k: int = 5) -> list[RouterEffort]:
        """How many probes centroid and learned routing need until they have seen the true k best keys."""
        index = plain_index(self.index.snapshot)
        if isinstance(index, GraphSearcher):
            raise AmipsError(f"{self.path} walks a graph: it has no probes to compare")
        x = self.encoded(question)
        plain, keys = Searcher(index.store, None), getattr(index.store, "keys", None)
        # Codes find candidates only; the true best keys are found among the keys themselves.
        if keys is None:
            ids = plain.search(x, k, probes=plain.c)[1][0]
        else:
            ids = exact.top_k(keys, x, min(k, self.index.n))[1][0]
        best = ids[ids >= 0]
        efforts = [_effort(plain, x, best)]
        if index.model is not None:
            efforts.append(_effort(Searcher(index.store, index.model), x, best))
        return efforts

    def encoded(self, question: str) -> Floats:
        """The vector of a question, [1, d]."""
        return self.encoded_many([question])

    def encoded_many(self, questions: Sequence[str]) -> Floats:
        """The vectors of questions, [m, d]."""
        if not all(question.strip() for question in questions):
            raise AmipsError("the question is empty")
        return self.encoder.encode(list(questions))


def _effort(searcher: Searcher, x: Floats, best: NDArray[np.integer[Any]]) -> RouterEffort:
    store = searcher.store
    seen = RoutingEstimate.by(
        searcher.router, x, best[None], store.assignment, store.sizes, second=store.second
    )
    probes = seen.probes_for(1.0) if best.size else 1
    return RouterEffort(searcher.router.name, probes, int(seen.at_probes(probes).scanned[0]))
