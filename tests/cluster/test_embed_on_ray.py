"""Embedding on a Ray cluster: the same bytes, whatever is lost meanwhile."""

import os
import signal

import numpy as np
import pytest

import amips
from amips.text import Text, embed
from amips.text import encoding as room


def letters():
    """An encoder that counts letters; a class of this function's own, which goes to workers by value."""

    class Letters:
        name, d = "letters", 26

        def encode(self, texts):
            import numpy as np

            rows = np.array([[1 + text.count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)
            return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    return Letters()


def texts(count):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 9))) for _ in range(200)]
    return [
        Text(str(i), "", " ".join(rng.choice(words, rng.integers(2, 30))) + f" {i}") for i in range(count)
    ]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".npy", ".jsonl")}


def test_the_same_bytes_though_a_worker_is_killed(joined, tmp_path, monkeypatch):
    corpus, options = texts(900), {"encoder": letters(), "batch": 16, "shard": 100}
    embed(corpus, corpus[:250], out=tmp_path / "here", **options)
    encode, mark = room.encode_shard, str(tmp_path / "killed")

    def killed_at_first(encoder, rows, batch):
        if rows[0].id == "300" and not os.path.exists(mark):  # noqa: PTH110
            with open(mark, "w"):  # noqa: PTH123
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(encoder, rows, batch)

    monkeypatch.setattr(room, "encode_shard", killed_at_first)
    embed(corpus, corpus[:250], out=tmp_path / "there", ray="auto", **options)
    assert os.path.exists(mark)  # noqa: PTH110
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_an_encoder_by_name(joined, tmp_path):
    pytest.importorskip("wordllama")
    corpus, options = texts(60), {"encoder": "wordllama", "batch": 16, "shard": 20}
    embed(corpus, out=tmp_path / "here", **options)
    embed(corpus, out=tmp_path / "there", ray="auto", **options)
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_a_text_that_cannot_be_encoded_is_named(joined, tmp_path):
    encoder = letters()
    corpus = [*texts(40), Text("odd", "", "zzz")]
    type(encoder).encode = lambda self, texts: np.array([[np.nan if t == "zzz" else 0.2] * 26 for t in texts])
    with pytest.raises(amips.VectorError, match=r"letters gives text .* a vector of norm"):
        embed(corpus, out=tmp_path / "there", encoder=encoder, ray="auto")
