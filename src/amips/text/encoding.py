"""Shards of texts to vectors, by this process or by the workers of a cluster."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from amips.cluster import Cluster
from amips.errors import VectorError
from amips.text.encoders import Encoder, open_encoder
from amips.text.texts import Text, TextFile
from amips.vectors import Floats, row_norms

SHARD_BYTES = 1 << 26  # of text in a shard, whatever its number of texts
TOLERANCE = 1e-3  # how far from 1 a norm may be


def shards_of(texts: TextFile, start: int, shard: int) -> Iterator[list[Text]]:
    """The texts from `start` on, in shards of so many, or of fewer that are very long."""
    while start < len(texts):
        rows = texts.rows(start, _end(texts, start, shard))
        yield rows
        start += len(rows)


def encode_shard(
    encoder: str | Path | Encoder,
    rows: list[Text],
    batch: int,
    tell: Callable[[int], None] = lambda count: None,
) -> Floats:
    """The vectors of a shard of texts, encoded in batches of about the same length; by a worker, too."""
    if isinstance(encoder, (str, Path)):
        encoder = _opened(encoder)
    vectors = np.empty((len(rows), encoder.d), np.float32)
    # The longest first: what does not fit in memory fails at once, not hours later.
    order = sorted(range(len(rows)), key=[-len(text.whole) for text in rows].__getitem__)
    for low in range(0, len(rows), batch):
        chosen = order[low : low + batch]
        vectors[chosen] = _vectors(encoder, [rows[i] for i in chosen])
        if tell is not None:
            tell(len(chosen))
    return vectors


@lru_cache(maxsize=1)
def _opened(name: str | Path) -> Encoder:
    """An encoder that a worker opens once."""
    return open_encoder(name)


def encoded_on(
    cluster: Cluster, handed: str | Path | Encoder, shards: Iterator[list[Text]], batch: int
) -> Iterator[Floats]:
    """The vectors of each shard, in order, by the workers of a cluster."""
    shared = handed if isinstance(handed, (str, Path)) else cluster.put(handed)
    return cluster.map((encode_shard, shared, rows, batch) for rows in shards)


def _end(texts: TextFile, start: int, shard: int) -> int:
    """The end of the shard that begins at `start`: of so many texts, but fewer if they are very long."""
    stop = min(start + shard, len(texts))
    while stop > start + 1 and texts.size(start, stop) > SHARD_BYTES:
        stop = start + (stop - start) // 2
    return stop


def _vectors(encoder: Encoder, texts: list[Text]) -> Floats:
    """Encode a batch; a row that cannot be used is an error that names its text."""
    vectors = np.asarray(encoder.encode([text.whole for text in texts]), np.float32)
    if vectors.shape != (len(texts), encoder.d):
        raise VectorError(
            f"{encoder.name} gave {list(vectors.shape)} for {len(texts)} texts, not d = {encoder.d}"
        )
    norms = row_norms(vectors)
    wrong = ~(np.abs(norms - 1) < TOLERANCE)  # and so those that are not finite
    if wrong.any():
        first = int(wrong.argmax())
        raise VectorError(
            f"{encoder.name} gives text {texts[first].id!r} a vector of norm {norms[first]:.3g}, expected 1; "
            "remove the text, or use another encoder"
        )
    return vectors
