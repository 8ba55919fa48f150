"""Embedding: texts in order, duplicates out, resumed after a kill, other settings refused."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import amips
from amips import AmipsError, VectorError, files
from amips.cli import main
from amips.text import encoding
from amips.text.embedding import Embedded, embed
from amips.text.texts import Text, read_texts
from amips.vectors import inspect, open_vectors
from helpers import journal_rows, kill_when, reseal

D = 8


def vector(text):
    """A unit vector that only this text has."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    made = np.random.default_rng(seed).standard_normal(D).astype(np.float32)
    return made / np.linalg.norm(made)


class Fake:
    """An encoder that keeps what it was asked for."""

    name, d = "fake", D

    def __init__(self):
        self.batches = []

    def encode(self, texts):
        self.batches.append(list(texts))
        return np.stack([vector(text) for text in texts])


def content(folder):
    """Every file of a finished directory with its bytes."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def corpus(tmp_path):
    """50 texts of many lengths, of which 3 are duplicates; 20 queries, 2 of them duplicates."""
    rng = np.random.default_rng(0)
    texts = [f"text {i} " + "word " * int(rng.integers(40)) for i in range(50)]
    texts[10], texts[20], texts[49] = texts[3], texts[3], texts[48]
    rows = [{"_id": f"d{i}", "title": "T" * (i % 2), "text": text} for i, text in enumerate(texts)]
    for i in (10, 20, 49):
        rows[i]["title"] = rows[3 if i < 49 else 48]["title"]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = [f"q{i}\tquestion {i % 18}\n" for i in range(20)]
    (tmp_path / "queries.tsv").write_text("id\ttext\n" + "".join(queries))
    return tmp_path / "corpus.jsonl", tmp_path / "queries.tsv"


def test_rows_are_in_the_order_of_the_texts(corpus, tmp_path):
    encoder = Fake()
    made = embed(*corpus, encoder=encoder, out=tmp_path / "out", batch=4, shard=16)
    assert len(made.key_texts) == 47
    assert len(made.query_texts) == 18
    expected = {text.id: text for text in read_texts(corpus[0]) if text.id not in ("d10", "d20", "d49")}
    assert list(made.key_texts) == list(expected.values())
    for path, texts in ((made.keys, made.key_texts), (made.queries, made.query_texts)):
        found = np.load(path)
        assert found.dtype == np.float32
        assert np.array_equal(found, np.stack([vector(text.whole) for text in texts]))
    assert made.manifest["left_out_of_keys"] == {"duplicates": 3, "empty": 0}
    assert made.manifest["left_out_of_queries"] == {"duplicates": 2, "empty": 0}
    assert (made.encoder, made.d) == ("fake", D)
    assert made.fingerprint == inspect(open_vectors(made.keys)).fingerprint
    assert repr(made).endswith("47 keys, 18 queries, d = 8, fake)")
    names = {"keys.npy", "keys.jsonl", "queries.npy", "queries.jsonl", "embed.json"}
    assert set(content(made.path)) == names
    Embedded(made.path, verify=True)


def test_titles_are_encoded_or_left_out(corpus, tmp_path):
    """Title and text as BEIR's tools have it; the text alone as the paper's published code does."""
    with_titles, without = Fake(), Fake()
    embed(*corpus, encoder=with_titles, out=tmp_path / "titles")
    made = embed(*corpus, encoder=without, out=tmp_path / "texts", titles=False)
    seen = {text for batch in with_titles.batches for text in batch}
    assert any(text.startswith("T text 1 ") for text in seen)
    bare = {text for batch in without.batches for text in batch}
    assert {text.removeprefix("T ") for text in seen} == bare
    assert {text.title for text in made.key_texts} == {""}
    with pytest.raises(AmipsError, match=r"other inputs or options \(corpus\)"):
        embed(*corpus, encoder=Fake(), out=tmp_path / "titles", titles=False)
    assert np.array_equal(
        np.load(made.keys), np.load(embed(*corpus, encoder=Fake(), out=made.path, titles=False).keys)
    )
    same = [Text("a", "One", "text"), Text("b", "Two", "text")]
    assert embed(same, encoder=Fake(), out=tmp_path / "same", titles=False).counts["keys"] == 1
    with pytest.raises(AmipsError, match="titles='no'"):
        embed(*corpus, encoder=Fake(), out=tmp_path / "x", titles="no")


def test_texts_of_one_length_are_encoded_together(corpus, tmp_path):
    encoder = Fake()
    embed(corpus[0], encoder=encoder, out=tmp_path / "out", batch=4, shard=16)
    assert [len(batch) for batch in encoder.batches] == [4] * 11 + [3]
    for shard in range(3):
        lengths = [len(text) for batch in encoder.batches[4 * shard : 4 * shard + 4] for text in batch]
        assert lengths == sorted(lengths, reverse=True)


def test_without_queries(corpus, tmp_path):
    made = embed(corpus[0], encoder=Fake(), out=tmp_path / "out")
    assert made.queries is None
    assert made.query_texts is None
    assert set(content(made.path)) == {"keys.npy", "keys.jsonl", "embed.json"}


def test_of_texts_that_are_not_in_a_file(tmp_path):
    texts = [Text("a", "", " x "), Text("b", "", "x"), Text("c", "", "half a pair \ud83d")]
    made = embed(texts, encoder=Fake(), out=tmp_path / "out")
    assert [text.text for text in made.key_texts] == ["x", "half a pair ?"]
    with pytest.raises(AmipsError, match=r"text 1 \(id 'b'\) is empty"):
        embed([Text("a", "", "x"), Text("b", "", " ")], encoder=Fake(), out=tmp_path / "other")


def test_very_long_texts_make_shorter_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "SHARD_BYTES", 1000)
    texts = [Text(str(i), "", f"{i} " + "w" * (5000 if i == 3 else 100)) for i in range(30)]
    encoder = Fake()
    made = embed(texts, encoder=encoder, out=tmp_path / "out")
    assert max(len(batch) for batch in encoder.batches) < 10
    assert np.array_equal(np.load(made.keys), np.stack([vector(text.whole) for text in texts]))


def test_a_finished_directory_is_returned_as_it_is(corpus, tmp_path):
    embed(*corpus, encoder=Fake(), out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
    encoder = Fake()
    assert len(embed(*corpus, encoder=encoder, out=tmp_path / "out", batch=3).key_texts) == 47
    assert encoder.batches == []
    assert {path: path.stat().st_mtime_ns for path in before} == before
    # Nothing needs to be opened for it.
    reseal(tmp_path / "out" / "embed.json", encoder="no/such-model")
    assert embed(*corpus, encoder="no/such-model", out=tmp_path / "out").encoder == "no/such-model"


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused(corpus, tmp_path, finished):
    out = tmp_path / "out"
    encoder = Fake()
    if not finished:
        encoder.encode = lambda texts: 1 / 0
    try:
        embed(*corpus, encoder=encoder, out=out)
    except ZeroDivisionError:
        assert not finished
    other = Fake()
    other.name = "other"
    before = content(out)
    texts = [Text("a", "", "something else")]
    for arguments, options, what in [
        (corpus, {"encoder": other}, "encoder"),
        ((texts, corpus[1]), {}, "corpus"),
        ((corpus[0], texts), {}, "queries"),
        ((corpus[0],), {}, "queries"),
        ((texts,), {}, "corpus, queries"),
    ]:
        with pytest.raises(
            AmipsError, match=rf"other inputs or options \({what}\); choose another directory"
        ):
            embed(*arguments, **{"encoder": Fake(), "out": out, **options})
    assert {name: raw for name, raw in content(out).items() if name in before} == before
    assert len(embed(*corpus, encoder=Fake(), out=out).key_texts) == 47


def test_a_directory_with_something_else_is_left_alone(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(AmipsError, match="is not a directory of embed; choose another"):
        embed(*corpus, encoder=Fake(), out=out)
    with pytest.raises(AmipsError, match="is not a directory of embed; choose another"):
        embed(*corpus, encoder=Fake(), out=out / "thesis.tex")
    (out / "plan.json").write_text('{"cells": 8}')  # that of an unfinished task
    with pytest.raises(AmipsError, match=r"not a directory of embed: plan\.json is of something else"):
        embed(*corpus, encoder=Fake(), out=out)
    assert {path.name for path in out.iterdir()} == {"thesis.tex", "plan.json"}


def test_wrong_requests(corpus, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "hole.jsonl").write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "text": ""}\n')
    for arguments, options, message in [
        (corpus, {"batch": 0}, "batch=0"),
        (corpus, {"shard": 0}, "shard=0"),
        (("-", "-"), {}, "both come from standard input"),
        ((tmp_path / "none.txt",), {}, "none.txt does not exist"),
        ((tmp_path / "blank.txt",), {}, "blank.txt: there is no text in it"),
        ((tmp_path / "hole.jsonl",), {}, "hole.jsonl, line 2: no text .*--skip-empty"),
    ]:
        with pytest.raises(AmipsError, match=message):
            embed(*arguments, **{"encoder": Fake(), "out": out, **options})
    made = embed(tmp_path / "hole.jsonl", encoder=Fake(), out=tmp_path / "skipped", skip_empty=True)
    assert made.manifest["left_out_of_keys"] == {"duplicates": 0, "empty": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (np.zeros(D), "gives text 'd5' a vector of norm 0,"),
        (np.full(D, np.nan), "gives text 'd5' a vector of norm nan,"),
        (np.full(D, np.inf), "gives text 'd5' a vector of norm inf,"),
        (np.full(D, 1.0), "gives text 'd5' a vector of norm 2.83,"),
    ],
)
def test_a_vector_that_cannot_be_used_is_never_written(corpus, tmp_path, row, message):
    class Bad(Fake):
        def encode(self, texts):
            made = super().encode(texts)
            made[[i for i, text in enumerate(texts) if text.startswith("T text 5")]] = row
            return made

    with pytest.raises(VectorError, match=message):
        embed(*corpus, encoder=Bad(), out=tmp_path / "out")
    assert not (tmp_path / "out" / "keys.npy").exists()


def test_an_encoder_of_another_shape(corpus, tmp_path):
    class Bad(Fake):
        d = D + 1

    with pytest.raises(VectorError, match=r"gave \[47, 8\] for 47 texts, not d = 9"):
        embed(*corpus, encoder=Bad(), out=tmp_path / "out")


def test_continues_after_a_stop_at_any_write(corpus, tmp_path, monkeypatch):
    """Stop at the first durable write, at the second, ...: the same call always ends with the same bytes."""
    whole = content(embed(*corpus, encoder=Fake(), out=tmp_path / "whole", batch=4, shard=16).path)
    real = files.fsync_directory

    class Stopped(BaseException):
        pass

    stopped, number = True, 0
    while stopped:
        number += 1
        left = number

        def stop(path):
            nonlocal left
            left -= 1
            if left == 0:
                raise Stopped
            real(path)

        out = tmp_path / f"stopped-{number}"
        with monkeypatch.context() as patch:
            patch.setattr(files, "fsync_directory", stop)
            try:
                embed(*corpus, encoder=Fake(), out=out, batch=4, shard=16)
                stopped = False
            except Stopped:
                (out / f".keys.jsonl.{os.getpid()}.tmp").write_text("what a kill leaves behind")
        encoder = Fake()
        assert content(embed(*corpus, encoder=encoder, out=out, batch=4, shard=16).path) == whole
    assert number > 6
    assert encoder.batches == []  # everything was there


def test_texts_that_were_lost_or_changed_are_written_again(corpus, tmp_path):
    whole = content(embed(*corpus, encoder=Fake(), out=tmp_path / "whole", batch=4, shard=16).path)

    class Stops(Fake):
        def encode(self, texts):
            if len(self.batches) == 6:
                raise KeyboardInterrupt
            return super().encode(texts)

    with pytest.raises(KeyboardInterrupt):
        embed(*corpus, encoder=Stops(), out=tmp_path / "out", batch=4, shard=16)
    assert journal_rows(tmp_path / "out" / "partial" / "keys") == 16
    (tmp_path / "out" / "keys.jsonl").write_text('{"id": "x", "text": "y"}\n')
    encoder = Fake()
    assert content(embed(*corpus, encoder=encoder, out=tmp_path / "out", batch=4, shard=16).path) == whole
    assert sum(map(len, encoder.batches)) == 47 - 16 + 18


SLOW = """
    import sys, time
    sys.path[:0] = {folders!r}
    from test_embedding import Fake, embed
    class Slow(Fake):
        def encode(self, texts):
            time.sleep(0.05)
            return super().encode(texts)
    embed({corpus!r}, {queries!r}, encoder=Slow(), out={out!r}, batch=2, shard=4)
"""


def test_continues_after_a_kill_bit_for_bit(corpus, tmp_path):
    whole = content(embed(*corpus, encoder=Fake(), out=tmp_path / "whole", batch=2, shard=4).path)
    out = tmp_path / "out"
    values = {"corpus": str(corpus[0]), "queries": str(corpus[1]), "out": str(out)}
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    code = textwrap.dedent(SLOW).format(folders=folders, **values)
    process = subprocess.Popen([sys.executable, "-c", code])
    kill_when(process, lambda: journal_rows(out / "partial" / "keys") > 0)
    done = journal_rows(out / "partial" / "keys")
    assert 0 < done < 47
    assert not (out / "embed.json").exists()
    encoder = Fake()
    assert content(embed(*corpus, encoder=encoder, out=out, batch=2, shard=4).path) == whole
    assert sum(map(len, encoder.batches)) == 47 - done + 18


def test_a_call_that_could_not_read_its_texts_binds_nothing(corpus, tmp_path):
    with pytest.raises(AmipsError, match="does not exist"):
        embed(corpus[0], tmp_path / "none.txt", encoder=Fake(), out=tmp_path / "out")
    other = Fake()
    other.name = "other"
    assert embed(corpus[1], encoder=other, out=tmp_path / "out").encoder == "other"


def test_queries_of_a_refused_call_are_not_left_behind(corpus, tmp_path):
    encoder = Fake()
    encoder.encode = lambda texts: 1 / 0
    with pytest.raises(ZeroDivisionError):
        embed(corpus[0], encoder=encoder, out=tmp_path / "out")
    with pytest.raises(AmipsError, match=r"other inputs or options \(queries\)"):
        embed(*corpus, encoder=Fake(), out=tmp_path / "out")
    made = embed(corpus[0], encoder=Fake(), out=tmp_path / "out")
    assert set(content(made.path)) == {"keys.npy", "keys.jsonl", "embed.json"}


def test_two_at_a_time(corpus, tmp_path):
    class Nosy(Fake):
        def encode(self, texts):
            with pytest.raises(AmipsError, match="another process is embedding into it"):
                embed(*corpus, encoder=Fake(), out=tmp_path / "out")
            return super().encode(texts)

    assert len(embed(*corpus, encoder=Nosy(), out=tmp_path / "out").key_texts) == 47


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    class Flat(Fake):
        def encode(self, texts):
            made = np.zeros((len(texts), D), np.float32)
            made[:, 0] = 1
            return made

    def many():
        for i in range(6000):
            yield Text(str(i), "", f"{i} " + "word " * 1000)  # 30 MB in all

    tracemalloc.start()
    try:
        made = embed(many(), encoder=Flat(), out=tmp_path / "out", shard=200)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (made.path / "keys.jsonl").stat().st_size > 30_000_000


@pytest.fixture
def command(monkeypatch, capfd):
    """`amips ...` in this process: (exit code, output, errors)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["amips", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return code, *capfd.readouterr()

    return run


class TestCommand:
    def test_embeds_and_what_it_makes_can_be_labelled(self, corpus, tmp_path, command):
        pytest.importorskip("wordllama", reason="the static encoder is not installed")
        arguments = (corpus[0], "--queries", corpus[1], "--encoder", "wordllama", "--out", tmp_path / "out")
        for _ in range(2):
            code, said, errors = command("embed", *arguments)
            assert (code, errors) == (0, "")
            assert f"{tmp_path / 'out'}: encoded by wordllama, d = 256" in said
            assert [line.split() for line in said.splitlines()[-2:]] == [
                ["keys", "47", "3", "0"],
                ["queries", "18", "2", "0"],
            ]
        made = Embedded(tmp_path / "out", verify=True)
        task = amips.label(made.keys, made.queries, out=tmp_path / "task", val=2, test=2, k=3)
        assert task.facts["unit_norm"] is True
        assert task.fingerprint == made.fingerprint

    def test_as_a_user_types_it(self, tmp_path):
        pytest.importorskip("wordllama", reason="the static encoder is not installed")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "amips",
                "embed",
                "-",
                "--encoder",
                "wordllama",
                "--out",
                tmp_path / "out",
            ],
            input="one text\nanother\none text\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert [text.text for text in Embedded(tmp_path / "out").key_texts] == ["one text", "another"]

    def test_errors_are_one_line(self, corpus, tmp_path, command):
        for arguments, message in [
            (("none.txt", "--encoder", "wordllama"), "none.txt does not exist"),
            ((corpus[0], "--encoder", "no such/model!"), "is not the name of a model"),
            ((corpus[0], "--batch", "0"), "batch=0"),
        ]:
            if "wordllama" in arguments:
                pytest.importorskip("wordllama", reason="the static encoder is not installed")
            code, said, errors = command("embed", *arguments, "--out", tmp_path / "out")
            assert (code, said) == (1, "")
            assert errors.startswith("error: ")
            assert errors.count("\n") == 1
            assert message in errors


@pytest.mark.parametrize(
    "fields",
    [
        {"d": "many"},
        {"d": None},
        {"d": float("inf")},
        {"keys": None},
        {"keys": {}},
        {"left_out_of_keys": 3},
        {"left_out_of_keys": {"empty": []}},
        {"files": {}},
        {"files": {"../elsewhere": {"size": 1, "sha256": ""}}},
        {"files": {"keys.npy": 5}},
    ],
)
def test_a_manifest_that_somebody_forged_is_one_line(corpus, tmp_path, fields):
    embed(*corpus, encoder=Fake(), out=tmp_path / "out")
    reseal(tmp_path / "out" / "embed.json", **fields)
    with pytest.raises(AmipsError) as problem:
        Embedded(tmp_path / "out")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("stated", [5, "x", [], {}, {"sha256": 3}])
def test_a_plan_that_somebody_forged_is_one_line(corpus, tmp_path, stated):
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text(json.dumps({"kind": "embed", "encoder": Fake().name, "keys": stated}))
    with pytest.raises(AmipsError, match="of other inputs or options"):
        embed(*corpus, encoder=Fake(), out=out)
