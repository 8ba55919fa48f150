"""Data sets by name, in BEIR's layout:

    DIR/
      corpus.jsonl          {"_id", "title", "text"}: the passages
      queries.jsonl         {"_id", "text", "source"}: queries that a model made of passages, to train on
      test-queries.jsonl    {"_id", "text"}: queries that people asked, and that have judgements
      qrels.tsv             query-id, corpus-id, score: the judgements of the test split
      data.json             where it came from and how much there is; written last

Everything streams, one file after another. Each file is either whole or not there; a run that was stopped
goes on with the first file that is missing.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amips.errors import AmipsError
from amips.files import begin_output, check_output, check_same, read_manifest, write_manifest
from amips.locks import locked
from amips.progress import Bar
from amips.text.digests import Digests, digest
from amips.text.lines import line, writing
from amips.text.sources import Hub, Local, Part, Record

MANIFEST, STARTED, LOCK = "data.json", "started.json", ".lock"
KIND, FORMAT = "data", 1
CORPUS, QUERIES, TEST_QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "test-queries.jsonl", "qrels.tsv"


@dataclass(frozen=True)
class Dataset:
    """What there is of a data set.

    `judged`: its corpus and judgements are public; else the passages are those that queries were made of.
    `same_ids`: its queries are passages too, under the same id, and must not count as their own answers.
    """

    judged: bool = True
    same_ids: bool = False


DATASETS = {
    "beir/fiqa": Dataset(),
    "beir/quora": Dataset(same_ids=True),
    "beir/nq": Dataset(),
    "beir/hotpotqa": Dataset(),
    "beir/bioasq": Dataset(judged=False),
}


def get_data(
    name: str,
    out: str | Path,
    *,
    source: str | Path | None = None,
    most: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Fetch a data set and write it to `out`; what is already there is not fetched again.

    Args:
        name: beir/fiqa, beir/quora, beir/nq, beir/hotpotqa or beir/bioasq.
        out: The directory to make.
        source: A directory with the downloaded repositories, `fiqa`, `fiqa-qrels` and
            `fiqa-generated-queries` for beir/fiqa; without it, they are read from the Hugging Face Hub.
        most: Only the first so many passages, and the queries and judgements that concern them.

    Returns:
        The manifest: the settings and `counts`, the records in each file.
    """
    if name not in DATASETS:
        raise AmipsError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}")
    if most is not None and most < 1:
        raise AmipsError(f"most is {most}; it must be 1 or more")
    out = check_output(out, AmipsError, what="a data set", marks=[MANIFEST, STARTED])
    short = name.removeprefix("beir/")
    origin = Hub(short) if source is None else Local(short, Path(source))
    settings = {"kind": KIND, "format": FORMAT, "name": name, "source": origin.name, "most": most}
    if (out / MANIFEST).exists():
        return _finished(out, settings)
    begin_output(out, settings, AmipsError, what="an unfinished data set", mark=STARTED)
    busy = AmipsError(f"another process is writing a data set to {out}; wait for it, or choose another out")
    with locked(out / LOCK, busy, remove=True):
        making = _Making(out, origin, DATASETS[name], most, progress)
        counts = making.all()
        same = {"same_ids": DATASETS[name].same_ids}
        write_manifest(out, MANIFEST, {**settings, **same, "counts": counts}, list(counts))
        (out / STARTED).unlink(missing_ok=True)
    return read_manifest(out, MANIFEST, KIND, FORMAT, AmipsError)


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    manifest = read_manifest(out, MANIFEST, KIND, FORMAT, AmipsError)
    # Where it was read from does not matter any more: a finished one may be asked for without the source.
    wanted = {field: settings[field] for field in ("name", "most")}
    check_same(out, {field: manifest.get(field) for field in wanted}, wanted, AmipsError, "a data set")
    return manifest


class _Making:
    """The files of one data set, each made of those before it."""

    def __init__(
        self, out: Path, origin: Hub | Local, data: Dataset, most: int | None, progress: bool
    ) -> None:
        self.out, self.origin, self.most, self.progress = out, origin, most, progress
        self.judged = data.judged or origin.has("corpus")

    def all(self) -> dict[str, int]:
        """Make what is missing; the records in each file."""
        plan: dict[str, Callable[[], Iterator[str]]] = {CORPUS: self._corpus}
        if self.judged:
            plan |= {QRELS: self._qrels, TEST_QUERIES: self._test_queries}
        plan[QUERIES] = self._queries
        return {file: self._make(file, records) for file, records in plan.items()}

    def _make(self, file: str, records: Callable[[], Iterator[str]]) -> int:
        path = self.out / file
        if not path.exists():
            with writing(path) as to, Bar(0, file, "lines", self.progress) as shown:
                if file == QRELS:
                    to.write("query-id\tcorpus-id\tscore\n")
                for record in records():
                    to.write(record)
                    shown.update()
        with path.open("rb") as f:
            count = sum(block.count(b"\n") for block in iter(lambda: f.read(1 << 20), b""))
        count -= file == QRELS
        if count == 0 and self.most is None:
            raise AmipsError(
                f"{self.origin.name} has no records for {file}; remove {path} and look at the source"
            )
        return count

    def _corpus(self) -> Iterator[str]:
        part: Part = "corpus" if self.judged else "generated"
        seen = Digests()
        for record in self.origin.read(part):
            name = _field(record, "_id", part)
            if not self.judged and seen.put(digest(name)) is not None:
                continue  # a passage comes with each of its queries
            yield line(
                {"_id": name, "title": record.get("title") or "", "text": _field(record, "text", part)}
            )
            seen.put(digest(name))
            if len(seen) == self.most:
                return

    def _qrels(self) -> Iterator[str]:
        kept = self._kept()
        for record in self.origin.read("qrels"):
            query, passage = _field(record, "query-id", "qrels"), _field(record, "corpus-id", "qrels")
            if kept is None or passage in kept:
                yield f"{query}\t{passage}\t{int(float(_field(record, 'score', 'qrels')))}\n"

    def _test_queries(self) -> Iterator[str]:
        with (self.out / QRELS).open(encoding="utf-8") as f:
            judged = {row.split("\t", 1)[0] for row in f}
        for record in self.origin.read("queries"):
            if (name := _field(record, "_id", "queries")) in judged:
                yield line({"_id": name, "text": _field(record, "text", "queries")})

    def _queries(self) -> Iterator[str]:
        kept = self._kept()
        for number, record in enumerate(self.origin.read("generated")):
            passage = _field(record, "_id", "generated")
            text = _field(record, "query", "generated").strip()
            if text and (kept is None or passage in kept):
                # The number of the row, so that an id does not depend on `most`.
                yield line({"_id": f"{passage}#{number}", "text": text, "source": passage})

    def _kept(self) -> set[str] | None:
        """The ids of the passages, where not all of them were taken."""
        if self.most is None:
            return None
        with (self.out / CORPUS).open(encoding="utf-8") as f:
            return {json.loads(row)["_id"] for row in f}


def _field(record: Record, name: str, part: Part) -> str:
    value = record.get(name)
    if value is None:
        raise AmipsError(f"a record of the {part} has no {name}; it has {', '.join(map(str, record))}")
    return str(value)
