"""Documents in an SQLite database, in a file or in memory: ids, texts, metadata, vectors.

    documents     number, id, whether there is a key      narrow: this is what conditions are tested on
    contents      number, text, metadata (JSON), extra (JSON), vector (float32)
    fields        name, kind, value, number               what conditions are tested with, see `conditions`
    facts         name, value                             of the store as a whole

A number is given once and never again, and stands for one vector: a document that gets another vector gets
another number. So an index of keys by number is in line with the documents when it has the same numbers.
"""

import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from amips.errors import BundleError, DiskFullError
from amips.integrations.condition_sql import sql_of
from amips.integrations.conditions import NUMBER, TEXT, TRUTH, WHOLE, Condition
from amips.integrations.exact_keys import Numbers
from amips.integrations.stored_document import DuplicateError, StoredDocument, content_rows, vector_of
from amips.vectors import Floats

Duplicates = Literal["overwrite", "skip", "fail"]

FORMAT = 1
FITTED = "fitted"  # the fact how often the store was fitted
BEHIND = "behind"  # the fact whether the fitted index has other keys than the documents: somebody is between
WAIT = 120.0  # seconds for another process that writes
TOGETHER = 10_000  # rows of one statement
TABLES = """
CREATE TABLE documents (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, keyed INTEGER);
CREATE TABLE contents (number INTEGER PRIMARY KEY, text TEXT, metadata TEXT NOT NULL, extra TEXT,
                       vector BLOB);
CREATE TABLE fields (name TEXT, kind INTEGER, value, number INTEGER,
                     PRIMARY KEY (name, kind, value, number)) WITHOUT ROWID;
CREATE INDEX fields_of_document ON fields (number);
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Written:
    """What a change did: to so many documents, by which these keys have gone, and these have come."""

    count: int
    removed: Numbers
    added: Numbers
    keys: list[Floats]


class Documents:
    """The database. Threads may share it, and so may processes if it is a file.

    Args:
        path: of the file, made if it is not there; None for one in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.revision = 0  # how often this process has changed something
        self._lock, self._process = threading.RLock(), os.getpid()
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        place = ":memory:" if self.path is None else str(self.path)
        with _one_line(place):
            connection = sqlite3.connect(place, WAIT, isolation_level=None, check_same_thread=False)
            connection.create_function("matches", 4, _matches, deterministic=True)
            # What was written is there after a power cut, and who reads does not wait for who writes.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            (known,) = connection.execute("PRAGMA user_version").fetchone()
            if known == 0:
                script = f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {FORMAT}; COMMIT"
                try:
                    connection.executescript(script)
                except sqlite3.OperationalError:  # another process was faster
                    connection.rollback()
                (known,) = connection.execute("PRAGMA user_version").fetchone()
        if known != FORMAT:
            raise BundleError(f"{place} has format {known}, this version of amips reads {FORMAT}")
        return connection

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time."""
        if os.getpid() != self._process:  # forked: neither the lock nor an open file of SQLite may be shared
            self._lock, self._process = threading.RLock(), os.getpid()
            self._connection = self._connection if self.path is None else self._open()
        with self._lock, _one_line(self.path or "the documents in memory"):
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is done inside, or nothing."""
        with self._using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self.revision += 1

    @property
    def version(self) -> tuple[int, int]:
        """Another one whenever documents have changed: by this process, by others."""
        return self.revision, self.version_of_others

    @property
    def version_of_others(self) -> int:
        """Another one whenever another process has changed documents."""
        with self._using() as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    def fact(self, name: str, default: Any = None) -> Any:
        """What is known of the store as a whole."""
        with self._using() as connection:
            row = connection.execute("SELECT value FROM facts WHERE name = ?", [name]).fetchone()
        return default if row is None else row[0]

    def set_fact(self, name: str, value: Any) -> None:
        """Note it."""
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", [name, value])

    def count(self, condition: Condition | None = None) -> int:
        """How many documents meet a condition."""
        test, values = ("1", []) if condition is None else sql_of(condition)
        return int(self._rows(f"SELECT count(*) FROM documents WHERE {test}", values)[0][0])

    def numbers(self, condition: Condition | None = None, *, keyed: bool = False) -> Numbers:
        """The numbers of the documents that meet a condition, ascending; only those with a key if `keyed`."""
        test, values = ("1", []) if condition is None else sql_of(condition)
        only = " AND keyed" if keyed else ""
        with self._using() as connection:
            rows = connection.execute(f"SELECT number FROM documents WHERE {test}{only}", values)
            return np.sort(np.fromiter((row[0] for row in rows), np.int64))

    def numbers_of(self, ids: Iterable[str]) -> dict[str, int]:
        """The number of each of these documents that there is."""
        wanted = list(ids)
        numbers: dict[str, int] = {}
        for low in range(0, len(wanted), TOGETHER):
            part = wanted[low : low + TOGETHER]
            test = f"id IN ({', '.join('?' * len(part))})"
            numbers.update(self._rows(f"SELECT id, number FROM documents WHERE {test}", part))
        return numbers

    def documents(self, numbers: Iterable[int], *, vectors: bool = False) -> dict[int, StoredDocument]:
        """The documents with these numbers that there are, by number; with their vectors if asked for."""
        wanted, documents = [int(number) for number in numbers], {}
        columns = "number, id, text, metadata, extra" + (", vector" if vectors else "")
        for low in range(0, len(wanted), TOGETHER):
            part = wanted[low : low + TOGETHER]
            test = f"number IN ({', '.join('?' * len(part))})"
            sql = f"SELECT {columns} FROM documents JOIN contents USING (number) WHERE {test}"
            for number, own, text, metadata, extra, *more in self._rows(sql, part):
                vector = vector_of(more[0]) if more else None
                documents[number] = StoredDocument(own, text, json.loads(metadata), vector, extra)
        return documents

    def keys(self, numbers: Numbers) -> Iterator[tuple[Numbers, Floats]]:
        """The vectors of documents that have keys, in blocks: numbers [m], and float32 [m, d]."""
        sql = "SELECT number, vector FROM contents WHERE vector IS NOT NULL AND number IN "
        for low in range(0, len(numbers), TOGETHER):
            part = numbers[low : low + TOGETHER].tolist()
            rows = self._rows(f"{sql}({', '.join('?' * len(part))}) ORDER BY number", part)
            if rows:
                joint = b"".join(row[1] for row in rows)
                own = np.array([row[0] for row in rows], np.int64)
                yield own, np.frombuffer(joint, "<f4").reshape(len(rows), -1).astype(np.float32)

    def write(self, documents: Iterable[StoredDocument], duplicates: Duplicates) -> Written:
        """Write documents, all or none; one whose id is there takes its place, is skipped, or is an error.

        A vector of zeros, whose inner product with anything is 0, is kept, and makes no key.
        """
        unique: dict[str, StoredDocument] = {}
        for document in documents:
            if document.id not in unique or duplicates == "overwrite":
                unique[document.id] = document
            elif duplicates == "fail":
                raise DuplicateError(f"two documents have the id {document.id!r}; nothing was written")
        removed, added, keys, count = [], [], [], 0
        rows = [content_rows(document) for document in unique.values()]
        with self._transaction() as connection:
            for document, content, fields in rows:
                keyed = document.vector is not None and bool(np.any(document.vector))
                sql = (
                    "SELECT number, vector IS ?, keyed FROM documents JOIN contents USING (number) "
                    "WHERE id = ?"
                )
                before = connection.execute(sql, [content[-1], document.id]).fetchone()
                if before is not None and duplicates == "fail":
                    raise DuplicateError(f"there is a document {document.id!r} already; nothing was written")
                if before is not None and duplicates == "skip":
                    continue
                count += 1
                number, same, had_key = before or (None, False, False)
                if number is not None and not same:
                    _delete(connection, [number])
                    removed += [number] if had_key else []
                if not same:
                    sql = "INSERT INTO documents (id, keyed) VALUES (?, ?)"
                    number = connection.execute(sql, [document.id, keyed]).lastrowid
                    if keyed and document.vector is not None:
                        added.append(number)
                        keys.append(document.vector)
                connection.execute("DELETE FROM fields WHERE number = ?", [number])
                connection.execute(
                    "INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?)", [number, *content]
                )
                connection.executemany(
                    "INSERT OR IGNORE INTO fields VALUES (?, ?, ?, ?)", [(*row, number) for row in fields]
                )
            if removed or added:
                _note_behind(connection)
        return Written(count, np.array(removed, np.int64), np.array(added, np.int64), keys)

    def delete(self, numbers: Numbers) -> Written:
        """Delete documents; numbers that are not there are passed over."""
        there: list[tuple[int, int]] = []
        with self._transaction() as connection:
            for low in range(0, len(numbers), TOGETHER):
                part = numbers[low : low + TOGETHER].tolist()
                test = f"number IN ({', '.join('?' * len(part))})"
                there += self._rows(f"SELECT number, keyed FROM documents WHERE {test}", part)
                _delete(connection, part)
            removed = np.array([number for number, keyed in there if keyed], np.int64)
            if len(removed):
                _note_behind(connection)
        return Written(len(there), removed, removed[:0], [])

    def clear(self) -> None:
        """Delete all documents, and what is known of the store but its similarity."""
        with self._transaction() as connection:
            for table in ("documents", "contents", "fields"):
                connection.execute(f"DELETE FROM {table}")
            connection.execute("DELETE FROM facts WHERE name IN (?, ?)", [FITTED, BEHIND])

    def field_values(self, name: str | None, condition: Condition | None = None) -> list[tuple[str, Any]]:
        """(name, value) of the metadata, each value once, of numbers before truth values before texts.

        Args:
            name: of one field; None for all.
            condition: which the documents meet.
        """
        test, values = ("1", []) if condition is None else sql_of(condition)
        only, own = ("1", []) if name is None else ("name = ?", [name])
        sql = f"SELECT DISTINCT name, kind, value, typeof(value) FROM fields WHERE {only} AND kind IN "
        sql += f"({NUMBER}, {TRUTH}, {TEXT}, {WHOLE})"
        sql += f" AND number IN (SELECT number FROM documents WHERE {test}) ORDER BY name, kind, value"
        read: dict[int, Any] = {TRUTH: bool, WHOLE: json.loads}
        return [
            (field, read[kind](value) if kind in read else value)
            for field, kind, value, _ in self._rows(sql, [*own, *values])
        ]

    def close(self) -> None:
        """Close the database."""
        with self._using() as connection:
            connection.close()

    def _rows(self, sql: str, values: list[Any]) -> list[Any]:
        with self._using() as connection:
            return connection.execute(sql, values).fetchall()


def _delete(connection: sqlite3.Connection, numbers: list[int]) -> None:
    listed = f"({', '.join('?' * len(numbers))})"
    for table in ("documents", "contents", "fields"):
        connection.execute(f"DELETE FROM {table} WHERE number IN {listed}", numbers)


def _note_behind(connection: sqlite3.Connection) -> None:
    """Note that the keys of a fitted index are to follow; keys that are all scored are read from here."""
    sql = "INSERT OR REPLACE INTO facts SELECT ?, 1 FROM facts WHERE name = ? AND value > 0"
    connection.execute(sql, [BEHIND, FITTED])


def _matches(value: str | None, pattern: str, ignore_case: int, like: int) -> bool:
    """Of SQL: whether a pattern is a part of a text or, if `like`, all of it."""
    if value is None:
        return False
    if like:
        return _is_like(value, pattern, ignore_case)
    return pattern.lower() in value.lower() if ignore_case else pattern in value


def _is_like(value: str, pattern: str, ignore_case: int) -> bool:
    """Whether a text is that of a pattern, in which % is any text, and _ any character.

    What is between two % is looked for from left to right, each where it comes first: one expression for all
    of it would try every way to share out the text among the %, which are too many.
    """
    *before, last = _parts(pattern, ignore_case)
    place = 0
    for i, part in enumerate(before):
        met = part.search(value, place) if i else part.match(value)
        if met is None:
            return False
        place = met.end()
    # The last part has a length, as every part, and stands at the end.
    length = len(pattern.rpartition("%")[2])
    start = len(value) - length
    return start >= place and (bool(before) or start == 0) and last.fullmatch(value, start) is not None


@lru_cache(64)
def _parts(pattern: str, ignore_case: int) -> "list[re.Pattern[str]]":
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    return [
        re.compile("".join("." if one == "_" else re.escape(one) for one in part), flags)
        for part in pattern.split("%")
    ]


@contextmanager
def _one_line(place: str | Path) -> Iterator[None]:
    """What SQLite says, in one line that names the file."""
    try:
        yield
    except sqlite3.Error as problem:
        if "disk is full" in str(problem):
            raise DiskFullError(
                f"cannot write {place}: {problem}; make room and give the call again"
            ) from None
        raise BundleError(f"{place}: {problem}") from None
