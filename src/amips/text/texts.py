"""Texts: read from files people have, kept beside the vectors that are made of them.

    DIR/
      keys.npy, queries.npy       float32, one row a text, L2-normalised
      keys.jsonl, queries.jsonl   {"id": ..., "title": ..., "text": ...}, line i belongs to row i
      embed.json                  the encoder, counts, duplicates left out; written last

Everything here streams: what stays in memory of a text that was read is a digest of 16 bytes, or the
place of its line in a file.
"""

import gzip
import json
import operator
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, SupportsIndex, cast

from amips.errors import AmipsError
from amips.text.digests import Digests, digest
from amips.untrusted import open_regular

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
TSV_ENDINGS = (".tsv", ".tab")
SKIP = "skip_empty=True (--skip-empty)"  # what a caller of `embed` can do about empty texts
MAX_LINE = 1 << 26  # bytes; a file without line ends would otherwise be read into memory whole

# First words of a header line of a TSV file, and names of its columns of text.
_ID_NAMES = ("id", "_id", "qid", "pid", "docid", "doc_id", "query-id", "query_id", "corpus-id", "passage_id")
_TEXT_NAMES = ("text", "query", "question", "passage", "document", "contents", "body")
_ID_KEY = 10  # bytes of an id's digest; the 6 after it are of its text


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


Parse = Callable[[str, int], Text | None]  # a line and its number from 0; None for a line to leave out


def read_texts(path: str | Path, empty: bool = False) -> Iterator[Text]:
    """The texts of a file, in order, read as they are asked for.

    .jsonl (.ndjson, .json): an object a line with `_id` or `id`, `title` (may be missing) and `text`, as in
    BEIR; without an id, the number of the line from 0. .tsv: `id<TAB>text` or `id<TAB>title<TAB>text`,
    with a header line or without; a header that names its columns may have them in any order. Anything
    else: one text a line, its id the number of the line from 0. Each may be compressed (.gz). `-` is
    standard input: JSON lines if the first line begins with `{`, otherwise one text a line.

    Blank lines are skipped, and white space at the ends of a text is taken off. A line that cannot be
    read is an error with its number, and so is an id that comes again with another text.

    Args:
        path: the file, or `-`.
        empty: let texts of nothing but white space through, instead of an error. (`distinct` leaves them
            out and counts them.)
    """
    name = "standard input" if str(path) == "-" else str(path)
    parse: Parse | None = None
    ids = Digests(key=_ID_KEY)
    with opened(path) as file:
        for number, line in _lines(file, name):
            with _at(name, number):
                parse = parse or _parser(path, line)
                text = parse(line, number)
                if text is None:
                    continue
                if not (text.whole or empty):
                    raise ValueError(f"no text (id {text.id!r}); leave such texts out with {SKIP}")
                if parse is not _plain and not _is_new_or_same(ids, text):
                    raise ValueError(f"id {text.id!r} came before with another text")
            yield text


def _is_new_or_same(ids: Digests, text: Text) -> bool:
    entry = digest(text.id, _ID_KEY) + digest(f"{text.title}\n{text.text}", 6)
    return ids.put(entry) in (None, entry)


class Distinct:
    """The texts of `texts` without those that say the same as an earlier one (`whole`), or nothing.

    An iterator: `duplicates` and `empty` count what was left out so far.
    """

    def __init__(self, texts: Iterable[Text]) -> None:
        self._texts = iter(texts)
        self._seen = Digests()
        self.duplicates = 0
        self.empty = 0

    def __iter__(self) -> "Distinct":
        return self

    def __next__(self) -> Text:
        for text in self._texts:
            if not (whole := text.whole.strip()):
                self.empty += 1
            elif self._seen.put(digest(whole)) is not None:
                self.duplicates += 1
            else:
                return text
        raise StopIteration


def distinct(texts: Iterable[Text]) -> Distinct:
    """Leave out exact duplicates: see `Distinct`."""
    return Distinct(texts)


class TextFile:
    """The texts of a .jsonl file by row, without having them in memory: 8 bytes a text.

    Rows are the lines that are not blank. `texts[i]`, `texts.rows(a, b)`, `len(texts)` and iteration work;
    reading from several threads does too. The lines are read like those of `read_texts`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.suffix.lower() == ".gz" or str(path) == "-":
            raise AmipsError(f"{path}: rows can be read from a file that is not compressed only; unpack it")
        self._starts = array("q")
        self._numbers = array("q")  # of lines, only if there are blank ones: for error messages
        place, blank = 0, False
        self._handle = open_regular(self.path, AmipsError)  # and the rows are read from what was looked at
        for number, raw in enumerate(bounded_lines(self._handle, str(path))):
            if raw.strip():
                if blank:
                    self._numbers.append(number)
                self._starts.append(place)
            elif not blank:
                blank, self._numbers = True, array("q", range(len(self._starts)))
            place += len(raw)
        self._starts.append(place)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: SupportsIndex) -> Text:
        i = operator.index(row)
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has {len(self)} texts, not one of row {operator.index(row)}")
        return self.rows(i, i + 1)[0]

    def __iter__(self) -> Iterator[Text]:
        for low in range(0, len(self), 256):
            yield from self.rows(low, low + 256)

    def rows(self, start: int, stop: int) -> list[Text]:
        """The texts start..stop."""
        return [self._row(i) for i in range(start, min(stop, len(self)))]

    def size(self, start: int, stop: int) -> int:
        """How many bytes of the file the rows start..stop take."""
        return self._starts[min(stop, len(self))] - self._starts[start]

    def ids(self) -> list[str]:
        """The id of every row."""
        return [text.id for text in self]

    def _row(self, i: int) -> Text:
        raw = os.pread(self._handle.fileno(), self.size(i, i + 1), self._starts[i])
        number = self._numbers[i] if self._numbers else i
        with _at(str(self.path), number):
            return _from_json(_decoded(raw, first=i == 0), number)

    def close(self) -> None:
        """Close the file; rows cannot be read any more."""
        self._handle.close()

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # not if the constructor failed
            self.close()


@contextmanager
def _at(name: str, number: int) -> Iterator[None]:
    """Errors in a line, with its number as an editor counts."""
    try:
        yield
    except (ValueError, RecursionError) as problem:  # UnicodeError and JSONDecodeError are ValueErrors
        raise AmipsError(f"{name}, line {number + 1:,}: {problem}") from None


@contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes]]:
    """A regular file of texts, unpacked if it is a .gz; `-` is standard input."""
    path = Path(path)
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    if path.is_dir():
        raise AmipsError(f"{path} is a directory; name a file of texts in it")
    with open_regular(path, AmipsError) as file:
        if path.suffix.lower() != ".gz":
            yield file
            return
        with gzip.open(file, "rb") as unpacked:
            yield cast(IO[bytes], unpacked)


def bounded_lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    """The lines of a file with their ends; one too long to be a text is an error, and not read whole."""
    number = 0
    while True:
        try:
            raw = file.readline(MAX_LINE + 1)
        except (gzip.BadGzipFile, zlib.error, EOFError) as problem:
            raise AmipsError(f"{name}, line {number + 1:,}: not a whole gzip file: {problem}") from None
        if not raw:
            return
        if len(raw) > MAX_LINE:
            raise AmipsError(f"{name}, line {number + 1:,}: longer than {MAX_LINE >> 20} MiB; is it text?")
        yield raw
        number += 1


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, str]]:
    """(number from 0, line) of the lines that are not blank."""
    for number, raw in enumerate(bounded_lines(file, name)):
        with _at(name, number):
            line = _decoded(raw, first=number == 0)
        if line.strip():
            yield number, line


def _decoded(raw: bytes, first: bool) -> str:
    try:
        line = raw.decode()
    except UnicodeDecodeError as problem:
        raise ValueError(f"not UTF-8 (byte {problem.start + 1} of the line); convert the file") from None
    return line.removeprefix("\ufeff") if first else line  # a byte order mark


def _parser(path: str | Path, first: str) -> Parse:
    """How to read the lines of a file, by its ending; `first` is its first line that is not blank."""
    endings = [ending.lower() for ending in Path(path).suffixes if ending.lower() != ".gz"]
    ending = endings[-1] if endings else ""
    if ending in JSON_ENDINGS or (str(path) == "-" and first.lstrip().startswith("{")):
        return _from_json
    return _tsv(first) if ending in TSV_ENDINGS else _plain


def _plain(line: str, number: int) -> Text:
    return Text(str(number), "", line.strip())


def _from_json(line: str, number: int) -> Text:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"not JSON: {problem}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {_kind(record)}")
    name = record.get("_id", record.get("id", number))
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"the id is {_kind(name)}, expected a string or a whole number")
    text, title = record.get("text"), record.get("title")
    if not isinstance(text, str):
        raise ValueError(f"no text: its field `text` is {'missing' if text is None else _kind(text)}")
    if not isinstance(title, (str, type(None))):
        raise ValueError(f"the title is {_kind(title)}, expected a string")
    parsed = Text(str(name), (title or "").strip(), text.strip())
    try:
        f"{parsed.id}{parsed.title}{parsed.text}".encode()
    except UnicodeEncodeError:  # JSON can write it, UTF-8 and tokenizers cannot
        raise ValueError("not valid Unicode: half of a surrogate pair") from None
    return parsed


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _tsv(first: str) -> Parse:
    names = [field.strip().lower() for field in first.split("\t")]
    header = names if len(names) > 1 and names[0] in _ID_NAMES else None
    text_at = title_at = None
    if header is not None:
        if "corpus-id" in header[1:] or "score" in header:
            raise ValueError(f"the columns are {', '.join(header)}: these are judgements, not texts")
        text_at = next((i for i, name in enumerate(header) if i and name in _TEXT_NAMES), None)
        title_at = header.index("title") if "title" in header and text_at is not None else None

    def parse(line: str, number: int) -> Text | None:
        if header is not None and line is first:
            return None
        fields = [field.strip() for field in line.split("\t")]
        if text_at is not None and header is not None:
            if len(fields) != len(header):
                raise ValueError(f"{len(fields)} columns, but the header names {len(header)}")
            return Text(fields[0], "" if title_at is None else fields[title_at], fields[text_at])
        if len(fields) not in (2, 3):
            raise ValueError(
                f"{len(fields)} {'column' if len(fields) == 1 else 'columns'} between tabs, "
                "expected id and text, or id, title and text"
            )
        return Text(fields[0], fields[1] if len(fields) == 3 else "", fields[-1])

    return parse
