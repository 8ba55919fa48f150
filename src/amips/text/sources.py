"""Where the records of BEIR's data sets come from: the Hugging Face Hub, or a directory like it."""

import csv
import json
import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from amips.errors import AmipsError
from amips.extras import needs_extra
from amips.text.texts import bounded_lines, opened

Record = dict[str, Any]
Part = Literal["corpus", "queries", "qrels", "generated"]

HUB = "BeIR/"
ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".tsv", ".tsv.gz")  # where there are several, the first is read

# For each part: what follows the name in the repository's, the configuration, the split.
PARTS: dict[Part, tuple[str, str | None, str]] = {
    "corpus": ("", "corpus", "corpus"),
    "queries": ("", "queries", "queries"),
    "qrels": ("-qrels", None, "test"),
    "generated": ("-generated-queries", None, "train"),
}


class Hub:
    """The repositories of a data set on the Hugging Face Hub, streamed."""

    def __init__(self, short: str) -> None:
        self.short = short
        self.name = f"hf://datasets/{HUB}{short}"

    def has(self, part: Part) -> bool:
        """Whether there is more than is known of: the Hub is not asked."""
        return False

    def read(self, part: Part) -> Iterator[Record]:
        """The records of a part, in order."""
        with needs_extra("data from the Hugging Face Hub", "text", "datasets"):
            import datasets
        suffix, config, split = PARTS[part]
        repository = f"{HUB}{self.short}{suffix}"
        # Ids are strings that often look like numbers: without this they would be read as such.
        names = ("query-id", "corpus-id", "score")
        columns = datasets.Features({name: datasets.Value("string") for name in names})
        features = columns if part == "qrels" else None
        try:
            with _quiet():
                yield from datasets.load_dataset(
                    repository, config, split=split, streaming=True, features=features
                )
        except Exception as problem:  # the libraries below raise nearly anything when a connection fails
            said = (str(problem).splitlines() or [""])[0]
            raise AmipsError(
                f"{repository} cannot be read from the Hugging Face Hub ({type(problem).__name__}: {said}); "
                f"check the network, or run `hf download --repo-type dataset {repository} "
                f"--local-dir DIR/{self.short}{suffix}` where there is one, for each of {self._all()}, "
                "and give DIR as --source"
            ) from None

    def _all(self) -> str:
        return ", ".join(dict.fromkeys(f"{HUB}{self.short}{suffix}" for suffix, _, _ in PARTS.values()))


class Local:
    """The same repositories as directories, `DIR/fiqa`, `DIR/fiqa-qrels`, `DIR/fiqa-generated-queries`.

    A file belongs to a part if it or a directory it is in is named for it: corpus.jsonl.gz,
    corpus/corpus-00000-of-00002.parquet, data/train-00000.parquet, test.tsv. Judgements may also be where
    BEIR's own archives have them, in `DIR/fiqa/qrels`.
    """

    def __init__(self, short: str, root: Path) -> None:
        self.short, self.root = short, root
        self.name = str(root.resolve())
        if not root.is_dir():
            raise AmipsError(f"the source {root} is not a directory")

    def has(self, part: Part) -> bool:
        """Whether the repository of a part is there."""
        return self._folder(part).is_dir()

    def read(self, part: Part) -> Iterator[Record]:
        """The records of a part, file after file in the order of their names."""
        for file in self._files(part):
            try:
                yield from _records(file)
            except (OSError, EOFError, ValueError, RecursionError, zlib.error, csv.Error) as problem:
                # Arrow's errors are OSErrors and ValueErrors.
                said = " ".join(str(problem).split()) or type(problem).__name__
                raise AmipsError(f"{file} is damaged or not readable: {said}") from None

    def _folder(self, part: Part) -> Path:
        folder = self.root / f"{self.short}{PARTS[part][0]}"
        inside = self.root / self.short / "qrels"
        return inside if part == "qrels" and not folder.is_dir() and inside.is_dir() else folder

    def _files(self, part: Part) -> list[Path]:
        folder, split = self._folder(part), PARTS[part][2]
        if not folder.is_dir():
            raise AmipsError(f"{folder} does not exist: download {HUB}{folder.name} to it")
        files: dict[str, list[Path]] = {}
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), None)
            hidden = any(name.startswith(".") for name in parts)  # .cache, where `hf download` keeps notes
            named = any(name.split(".")[0].split("-")[0] == split for name in parts)
            if ending is not None and named and not hidden and path.is_file():
                files.setdefault(ending, []).append(path)
        if not files:
            raise AmipsError(f"{folder} has no file of {split} that ends in {', '.join(ENDINGS)}")
        return min(files.items(), key=lambda item: ENDINGS.index(item[0]))[1]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for each retry; what went wrong in the end is an error."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _records(file: Path) -> Iterator[Record]:
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    with opened(file) as unpacked:
        lines = (line.decode("utf-8") for line in bounded_lines(unpacked, str(file)))
        if file.name.removesuffix(".gz").endswith(".tsv"):
            yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                yield record


def _parquet(file: Path) -> Iterator[Record]:
    with needs_extra(f"reading {file}", "formats", "pyarrow"):
        import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=1024):
            yield from batch.to_pylist()
