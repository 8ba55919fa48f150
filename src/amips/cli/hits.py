"""Writing what a search returned: JSON lines to standard output, or a file in the format of its ending.

Tables have the columns query (its row), rank (from 1), id and score, and a row for each result. Blocks of
queries are written as they come; only an .npz archive, which holds the arrays themselves, waits for the last.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.extras import check_extra
from amips.files import check_output_file, partial
from amips.terminal import printable_json
from amips.vectors import Floats

# (the first query's row, scores [m, k], ids [m, k])
Write = Callable[[int, Floats, NDArray[Any]], None]
COLUMNS = ("query", "rank", "id", "score")


def check_hits_file(out: Path) -> None:
    """AmipsError unless results can be written to this file."""
    check_output_file(out, AmipsError)
    ending = out.suffix.lower()
    if ending not in FORMATS:
        raise AmipsError(f"{out}: unknown ending {ending!r}; write one of {' '.join(FORMATS)}")
    if ending in ARROW:
        check_extra(f"writing {out}", "formats", "pyarrow")


@contextmanager
def writing_hits(out: Path | None) -> Iterator[Write]:
    """Where results go: a file that appears whole when the block ends well, or standard output."""
    if out is None:
        yield json_lines(sys.stdout, shown=True)
        return
    with partial(out) as temporary, FORMATS[out.suffix.lower()](temporary) as write:
        yield write


def json_lines(file: TextIO, shown: bool = False) -> Write:
    """A line for each query: {"query": 0, "hits": [{"id": 17, "score": 0.9}, ...]}.

    Where it is `shown` on a terminal, control characters in ids are escapes of JSON: the same to a program.
    """

    def write(first: int, scores: Floats, ids: NDArray[Any]) -> None:
        there = real(ids)
        for row, (values, names, real_row) in enumerate(
            zip(scores.tolist(), ids.tolist(), there, strict=True), first
        ):
            pairs = zip(names, values, real_row, strict=True)
            hits = [{"id": name, "score": value} for name, value, known in pairs if known]
            line = json.dumps({"query": row, "hits": hits}, ensure_ascii=False)
            file.write((printable_json(line) if shown else line) + "\n")
        file.flush()

    return write


def real(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ids are results: where fewer than k keys were scanned, the rest is -1 or an empty string."""
    return np.asarray(ids != (-1 if ids.dtype.kind == "i" else ""))


def columns(first: int, scores: Floats, ids: NDArray[Any]) -> list[NDArray[Any]]:
    """Query, rank, id and score of every result, each in an array [results]."""
    m, k = ids.shape
    there = real(ids).ravel()
    query = np.repeat(np.arange(first, first + m), k)
    rank = np.tile(np.arange(1, k + 1), m)
    return [values[there] for values in (query, rank, ids.ravel(), scores.ravel())]


@contextmanager
def _jsonl(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        yield json_lines(file)


def _separated(delimiter: str) -> "Callable[[Path], AbstractContextManager[Write]]":
    @contextmanager
    def opened(path: Path) -> Iterator[Write]:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
            writer.writerow(COLUMNS)

            def write(first: int, scores: Floats, ids: NDArray[Any]) -> None:
                *others, score = columns(first, scores, ids)
                # As text: the shortest that is the same float32 again.
                texts = score.astype(np.str_).tolist()
                writer.writerows(zip(*(values.tolist() for values in others), texts, strict=True))

            yield write

    return opened


@contextmanager
def _npz(path: Path) -> Iterator[Write]:
    parts: list[tuple[Floats, NDArray[Any]]] = []
    yield lambda first, scores, ids: parts.append((scores, ids))
    scores, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
    with path.open("wb") as file:
        np.savez(file, scores=scores, ids=ids)


@contextmanager
def _arrow(path: Path) -> Iterator[Write]:
    """Parquet or the Arrow file format (which is Feather), a group of rows for each block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # `path` is a temporary name: the ending that decides is the one before it.
    parquet = path.name.rsplit(".", 2)[0].lower().endswith(".parquet")
    writers: list[Any] = []

    def write(first: int, scores: Floats, ids: NDArray[Any]) -> None:
        table = pa.table(dict(zip(COLUMNS, columns(first, scores, ids), strict=True)))
        if not writers:  # the type of ids is known only now
            open_writer = pq.ParquetWriter if parquet else pa.ipc.new_file
            writers.append(open_writer(str(path), table.schema))
        writers[0].write_table(table)

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()


ARROW = (".parquet", ".arrow", ".feather")
FORMATS: "dict[str, Callable[[Path], AbstractContextManager[Write]]]" = {
    ".npz": _npz,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".jsonl": _jsonl,
    **dict.fromkeys(ARROW, _arrow),
}
