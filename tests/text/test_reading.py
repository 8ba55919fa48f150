"""Texts from files: formats, hostile content, duplicates, rows by number."""

import gzip
import io
import itertools
import json
import os
import re
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from amips import AmipsError
from amips.text import texts as module
from amips.text.digests import Digests, digest
from amips.text.texts import Text, TextFile, distinct, read_texts

THREE = [Text("a", "One", "first text"), Text("b", "", "zweiter, schöner Text"), Text("7", "", "第三")]
BEIR = (
    '{"_id": "a", "title": "One", "text": "first text", "metadata": {}}\n'
    '\n{"_id": "b", "title": "", "text": "  zweiter, schöner Text\\n"}\r\n'
    '{"id": 7, "text": "\\u7b2c\\u4e09"}'
)
FILES = {
    "corpus.jsonl": BEIR,
    "lines.ndjson": BEIR,
    "with_mark.jsonl": "\ufeff" + BEIR,
    "three.tsv": "a\tOne\tfirst text\nb\t\tzweiter, schöner Text\r\n\n7\t\t 第三 \n",
    "header.tsv": "id\ttitle\ttext\na\tOne\tfirst text\nb\t\tzweiter, schöner Text\n7\t\t第三\n",
    "turned.tsv": "id\ttext\ttitle\na\tfirst text\tOne\nb\tzweiter, schöner Text\t\n7\t第三\t\n",
}


def put(folder, name, content):
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return folder / name


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", FILES)
def test_formats(tmp_path, name, ending):
    assert list(read_texts(put(tmp_path, name + ending, FILES[name]))) == THREE


@pytest.mark.parametrize("header", ["", "query-id\ttext\n", "id\tquery\n", "qid\tsomething\n"])
def test_two_columns(tmp_path, header):
    path = put(tmp_path, "queries.tsv", header + "q1\twhat is it\nq2\tand why\n")
    assert list(read_texts(path)) == [Text("q1", "", "what is it"), Text("q2", "", "and why")]


@pytest.mark.parametrize("name", ["log.txt", "log", "log.csv", "log.txt.gz", "v1.2 of it"])
def test_one_text_a_line(tmp_path, name):
    path = put(tmp_path, name, "\n  what is it \n\n\t\nand\twhy\nwhat is it")
    found = list(read_texts(path))
    assert found == [Text("1", "", "what is it"), Text("4", "", "and\twhy"), Text("5", "", "what is it")]


@pytest.mark.parametrize(("content", "count"), [(BEIR, 3), ("one\ntwo\n", 2)])
def test_standard_input(monkeypatch, content, count):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    found = list(read_texts("-"))
    assert len(found) == count
    assert found[0].text in ("first text", "one")


def test_whole_is_title_and_text():
    assert [text.whole for text in THREE] == ["One first text", "zweiter, schöner Text", "第三"]
    assert Text("", "Only a title", "").whole == "Only a title"


GOOD = '{"_id": "a", "text": "x"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl", GOOD + "\n" + '{"_id": "b", "text":', "line 3: not JSON: "),
        ("c.jsonl", GOOD + "[" * 100_000, "line 2: not JSON: "),
        ("c.jsonl", GOOD + '["b", "x"]', "line 2: expected a JSON object, got an array"),
        ("c.jsonl", GOOD + "12", "line 2: expected a JSON object, got a number"),
        ("c.jsonl", GOOD + '{"_id": "b"}', "line 2: no text: its field `text` is missing"),
        ("c.jsonl", GOOD + '{"_id": "b", "text": ["x"]}', "line 2: no text: its field `text` is an array"),
        ("c.jsonl", GOOD + '{"_id": "b", "text": " "}', r"line 2: no text \(id 'b'\)"),
        ("c.jsonl", GOOD + '{"_id": "b", "title": 1, "text": "x"}', "line 2: the title is a number"),
        ("c.jsonl", GOOD + '{"_id": null, "text": "x"}', "line 2: the id is null"),
        ("c.jsonl", GOOD + '{"_id": true, "text": "x"}', "line 2: the id is true or false"),
        ("c.jsonl", GOOD + '{"_id": "a", "text": "y"}', "line 2: id 'a' came before with another text"),
        ("c.jsonl", GOOD + '{"_id": "b", "text": "\\ud83d"}', "line 2: not valid Unicode"),
        ("c.jsonl", GOOD.encode() + b'{"_id": "b", "text": "\xff"}', "line 2: not UTF-8"),
        ("c.json", json.dumps([{"id": "a", "text": "x"}]), "line 1: expected a JSON object, got an array"),
        ("c.tsv", "a\tx\nb\n", "line 2: 1 column between tabs"),
        ("c.tsv", "a\tx\nb\t1\t2\t3\n", "line 2: 4 columns between tabs"),
        ("c.tsv", "a\tx\nb\t \n", r"line 2: no text \(id 'b'\)"),
        ("c.tsv", "a\tx\na\ty\n", "line 2: id 'a' came before"),
        ("c.tsv", "id\ttext\na\tx\ty\n", "line 2: 3 columns, but the header names 2"),
        ("c.tsv", "query-id\tcorpus-id\tscore\n1\t2\t1\n", "line 1: .*judgements, not texts"),
        ("c.txt", "one\ntwo".encode("utf-16"), "line 1: not UTF-8"),
        ("c.txt", b"one\ntw\xe9\n", r"line 2: not UTF-8 \(byte 3 of the line\)"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_what_cannot_be_read_is_one_line_with_its_place(tmp_path, name, content, message, ending):
    path = put(tmp_path, name + ending, content)
    with pytest.raises(AmipsError) as problem:
        list(read_texts(path))
    assert re.match(re.escape(str(path)) + ", " + message, str(problem.value)), problem.value
    assert "\n" not in str(problem.value)


def test_a_damaged_gzip_file(tmp_path):
    whole = gzip.compress(("text\n" * 5000).encode() + bytes(range(32, 127)))
    for content in (b"not gzip\n", whole[:-12]):
        (tmp_path / "c.txt.gz").write_bytes(content)
        with pytest.raises(AmipsError, match=r"c\.txt\.gz, line [\d,]+: not a whole gzip file"):
            list(read_texts(tmp_path / "c.txt.gz"))


def test_no_such_file_and_a_directory(tmp_path):
    with pytest.raises(AmipsError, match=r"none\.jsonl does not exist"):
        list(read_texts(tmp_path / "none.jsonl"))
    with pytest.raises(AmipsError, match="is a directory"):
        list(read_texts(tmp_path))


def test_an_empty_file_has_no_texts(tmp_path):
    assert list(read_texts(put(tmp_path, "c.jsonl", ""))) == []
    assert list(read_texts(put(tmp_path, "c.tsv", "\n\n"))) == []


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE", 1 << 20)
    (tmp_path / "zeros.gz").write_bytes(gzip.compress(bytes(200 << 20), 1))
    tracemalloc.start()
    try:
        with pytest.raises(AmipsError, match="line 1: longer than 1 MiB"):
            list(read_texts(tmp_path / "zeros.gz"))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_the_same_line_twice_is_let_through(tmp_path):
    assert len(list(read_texts(put(tmp_path, "c.jsonl", GOOD + GOOD)))) == 2


def test_empty_texts_on_request(tmp_path):
    content = GOOD + '{"_id": "b", "text": " "}\n{"_id": "c", "title": "T", "text": ""}'
    found = distinct(read_texts(put(tmp_path, "c.jsonl", content), empty=True))
    assert [text.id for text in found] == ["a", "c"]
    assert (found.empty, found.duplicates) == (1, 0)


def test_reading_streams(tmp_path):
    """The first texts come before the line that is wrong, and a long file takes little memory."""
    path = put(tmp_path, "c.txt", b"fine\n" * 10 + b"\xff\n")
    assert len(list(itertools.islice(read_texts(path), 10))) == 10
    path = put(tmp_path, "long.txt", (("word " * 200) + "\n") * 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_texts(path)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 < path.stat().st_size / 10
    finally:
        tracemalloc.stop()


class TestDistinct:
    def test_keeps_the_first_of_equal_texts(self):
        given = [*THREE, Text("x", "One first", "text"), Text("y", "", "第三"), Text("z", "", "第 三")]
        found = distinct(given)
        assert list(found) == [*THREE, given[-1]]
        assert found.duplicates == 2

    def test_is_lazy_and_keeps_no_texts(self):
        def endless():
            for i in itertools.count():
                yield Text(str(i), "", f"{i % 1000} " * 3000)  # 12 MB of distinct text, repeated forever

        tracemalloc.start()
        try:
            found = distinct(endless())
            assert [text.id for text in itertools.islice(found, 1000)] == [str(i) for i in range(1000)]
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


class TestDigests:
    def test_is_a_set(self):
        table = Digests()
        entries = [digest(str(i)) for i in range(5000)]
        assert all(table.put(entry) is None for entry in entries)
        assert all(table.put(entry) == entry for entry in entries)
        assert len(table) == 5000

    def test_finds_by_key(self):
        table = Digests(key=10)
        assert table.put(b"0123456789" + b"first ") is None
        assert table.put(b"0123456789" + b"second") == b"0123456789first "
        assert table.put(b"012345678x" + b"second") is None

    def test_memory(self):
        tracemalloc.start()
        try:
            table = Digests()
            for i in range(50_000):
                table.put(digest(str(i)))
            assert tracemalloc.get_traced_memory()[0] < 50 * 50_000
        finally:
            tracemalloc.stop()


class TestTextFile:
    def test_rows(self, tmp_path):
        texts = TextFile(put(tmp_path, "c.jsonl", BEIR))
        assert len(texts) == 3
        assert [texts[i] for i in range(3)] == list(texts) == texts.rows(0, 99) == THREE
        assert texts[-1] == THREE[2]
        assert texts.ids() == ["a", "b", "7"]
        for row in (3, -4):
            with pytest.raises(IndexError, match=f"has 3 texts, not one of row {row}"):
                texts[row]

    def test_an_empty_file(self, tmp_path):
        assert len(TextFile(put(tmp_path, "c.jsonl", "\n"))) == 0

    def test_errors_name_the_line(self, tmp_path):
        texts = TextFile(put(tmp_path, "c.jsonl", GOOD + "\n\n" + GOOD + "nonsense\n"))
        assert texts[1].id == "a"
        with pytest.raises(AmipsError, match=r"c\.jsonl, line 5: not JSON"):
            texts[2]

    def test_compressed_files_have_no_rows(self, tmp_path):
        with pytest.raises(AmipsError, match="not compressed"):
            TextFile(put(tmp_path, "c.jsonl.gz", BEIR))

    def test_from_several_threads(self, tmp_path):
        lines = [json.dumps({"id": str(i), "text": f"text {i} " * (i % 50 + 1)}) for i in range(500)]
        with TextFile(put(tmp_path, "c.jsonl", "\n".join(lines))) as texts, ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: texts[i].id, list(range(500)) * 4))
        assert found == [str(i) for i in range(500)] * 4

    def test_memory(self, tmp_path):
        line = json.dumps({"id": "a", "text": "word " * 300}) + "\n"
        path = put(tmp_path, "c.jsonl", line * 10_000)
        tracemalloc.start()
        try:
            texts = TextFile(path)
            assert texts[9_999].id == "a"
            assert tracemalloc.get_traced_memory()[1] < 1 << 20 < path.stat().st_size / 10
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("read", [lambda path: next(read_texts(path)), TextFile])
def test_pipes_and_devices_are_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(AmipsError, match="not a regular file"):
            read(path)
