"""Embedding: a corpus and its queries, as texts, to vectors on disk beside the texts they are made of."""

import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_flag
from amips.cluster import Cluster, check_address, connected
from amips.errors import AmipsError
from amips.files import (
    ADVICE,
    check_output,
    check_same,
    local,
    read_json,
    read_manifest,
    sha256,
    write_json,
    write_manifest,
)
from amips.locks import locked
from amips.progress import Bar
from amips.resources import plain_resource_errors
from amips.rowfiles import Columns, RowFiles
from amips.text.encoders import DEFAULT, Encoder, canonical, open_encoder
from amips.text.encoding import encode_shard, encoded_on, shards_of
from amips.text.lines import line, writing
from amips.text.texts import SKIP, Text, TextFile, distinct, read_texts
from amips.vectors import inspect, open_vectors

MANIFEST, PLAN, PARTIAL, LOCK = "embed.json", "plan.json", "partial", ".lock"
KIND, FORMAT, WHAT = "embed", 1, "a directory of embed"

Source = str | Path | Iterable[Text]


class Embedded:
    """A finished directory of `embed`.

    Attributes:
        path: the directory.
        keys, queries: the files of vectors, for `label` and `open_vectors`; queries may be None.
        encoder: the name of the encoder; d is its dimension.
        fingerprint: of the keys, as a task and a bundle of them have it.
        counts: texts of the keys and of the queries; left_out: those that are duplicates or empty.
        manifest: what embed.json says.
    """

    def __init__(self, path: str | Path, verify: bool = False) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path, MANIFEST, KIND, FORMAT, AmipsError, verify)
        try:
            self.encoder, self.fingerprint = (str(self.manifest[name]) for name in ("encoder", "fingerprint"))
            self.d, self.counts = int(self.manifest["d"]), {"keys": int(self.manifest["keys"]["count"])}
            if "queries.npy" in self.manifest["files"]:
                self.counts["queries"] = int(self.manifest["queries"]["count"])
            self.left_out = {
                side: {what: int(number) for what, number in self.manifest[f"left_out_of_{side}"].items()}
                for side in self.counts
            }
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as problem:
            raise AmipsError(f"{self.path / MANIFEST} is damaged: {problem!r}") from None
        for needed in (f"{side}.{ending}" for side in self.counts for ending in ("npy", "jsonl")):
            if needed not in self.manifest["files"]:  # and so not checked
                raise AmipsError(f"{self.path / MANIFEST} is damaged: it does not list {needed}")
        self.keys = self.path / "keys.npy"
        self.queries = self.path / "queries.npy" if "queries" in self.counts else None

    @cached_property
    def key_texts(self) -> TextFile:
        """The texts of the keys: row i of their vectors is made of text i."""
        return TextFile(self.path / "keys.jsonl")

    @cached_property
    def query_texts(self) -> TextFile | None:
        """The texts of the queries, if there are any."""
        return None if self.queries is None else TextFile(self.path / "queries.jsonl")

    def __repr__(self) -> str:
        queries = f"{self.counts['queries']:,}" if self.queries else "no"
        counts = f"{self.counts['keys']:,} keys, {queries} queries"
        return f"Embedded({str(self.path)!r}: {counts}, d = {self.d}, {self.encoder})"


@plain_resource_errors()
def embed(
    corpus: Source,
    queries: Source | None = None,
    *,
    encoder: str | Path | Encoder = DEFAULT,
    out: str | Path,
    batch: int = 64,
    shard: int = 8192,
    titles: bool = True,
    skip_empty: bool = False,
    ray: str | None = None,
    progress: bool = False,
) -> Embedded:
    """Encode a corpus, and queries, into `out`: keys.npy and keys.jsonl, queries.npy and queries.jsonl.

    Exact duplicates are left out, in each set by itself. A killed call is continued by the same call, which
    reads the texts again (to know that they are the same) but encodes only what is missing. A finished
    directory of the same texts and encoder is returned as it is; any other is left alone and is an error.

    Args:
        corpus, queries: files, see `read_texts`; or anything that gives `Text`s when iterated over.
        encoder: a name, see `open_encoder`, or an `Encoder`.
        out: the directory to make.
        batch: texts encoded at a time. It decides about speed, memory and the last bits of the vectors.
        shard: texts between two points from which a killed call continues. Within a shard, texts of about
            the same length are encoded together, because the shorter ones of a batch are padded.
        titles: encode the title of a document before its text, as BEIR's own tools do; False leaves titles
            out, as the paper's published code does. Two documents of one text are then one.
        skip_empty: leave texts of white space out, and count them, instead of an error.
        ray: a Ray cluster whose workers encode, a shard at a time: "auto", HOST:PORT or "local". Each opens
            the encoder by its name, or is handed the one given here.
        progress: say on standard error how far it is: a bar on a terminal, a line now and then otherwise.
    """
    out, address = local(out, AmipsError), check_address(ray)
    if batch < 1 or shard < 1:
        raise AmipsError(f"batch={batch}, shard={shard}: each must be at least 1")
    if str(corpus) == str(queries) == "-":
        raise AmipsError("corpus and queries cannot both come from standard input")
    sources: dict[str, Source] = {"keys": corpus} | ({} if queries is None else {"queries": queries})
    if not check_flag("titles", titles):
        sources = {side: _untitled(source, skip_empty) for side, source in sources.items()}
    name = canonical(encoder) if isinstance(encoder, (str, Path)) else encoder.name
    _check_place(out, name)
    handed = encoder
    if not (out / MANIFEST).exists() and isinstance(encoder, (str, Path)):
        # Before the texts are read, which may take long: weights that are missing are said at once.
        encoder = open_encoder(encoder)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, AmipsError(f"{out}: another process is embedding into it")):
        _check_place(out, name)  # again: another process may have just let go of it
        if (out / MANIFEST).exists():
            read = {side: _read(source, None, skip_empty) for side, source in sources.items()}
            _refuse_other(out, read_json(out / MANIFEST, AmipsError), _plan(name, read))
        else:
            assert not isinstance(encoder, (str, Path))
            read = _write_texts(out, sources, name, skip_empty)
            with connected(address) as cluster:
                for side in sources:
                    _encode(out, side, encoder, batch, shard, progress, handed, cluster)
            fields: dict[str, Any] = {"kind": KIND, "format": FORMAT, **_plan(name, read), "d": encoder.d}
            fields["fingerprint"] = inspect(open_vectors(out / "keys.npy")).fingerprint
            for side, facts in read.items():
                fields[f"left_out_of_{side}"] = {"duplicates": facts.duplicates, "empty": facts.empty}
            files = [f"{side}.{ending}" for side in sources for ending in ("npy", "jsonl")]
            write_manifest(out, MANIFEST, fields, files)
        # Queries where there are none to be: of a call that was refused, or ended before it made anything.
        stray = [] if queries is not None else [out / "queries.jsonl"]
        for leftover in (out / PLAN, *out.glob(".*.tmp"), *stray):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(out / PARTIAL, ignore_errors=True)
    return Embedded(out)


@dataclass(frozen=True)
class _Read:
    """What was read of one set of texts: the SHA-256 is that of its .jsonl file."""

    sha256: str
    count: int
    duplicates: int
    empty: int


def _plan(name: str, read: dict[str, _Read]) -> dict[str, Any]:
    """What a directory is a result of."""
    texts = {side: {"count": facts.count, "sha256": facts.sha256} for side, facts in read.items()}
    return {"encoder": name, "keys": texts["keys"], "queries": texts.get("queries")}


def _check_place(out: Path, name: str) -> None:
    """Raise unless `out` is free, or begun or finished with this encoder."""
    check_output(out, AmipsError, what=WHAT, marks=(MANIFEST, PLAN))
    for file in (MANIFEST, PLAN):
        if (out / file).is_file():
            stated = read_json(out / file, AmipsError)
            if stated.get("kind") != KIND:
                raise AmipsError(f"{out} exists and is not {WHAT}: {file} is of something else; {ADVICE}")
            if "keys" in stated:  # otherwise its call ended while it read the texts: nothing is made yet
                _refuse_other(out, stated, {**stated, "encoder": name})
            return


def _refuse_other(out: Path, before: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise if a directory was made, or begun, of something else; name what differs."""
    names = {"encoder": "encoder", "corpus": "keys", "queries": "queries"}
    old, new = ({name: plan.get(field) for name, field in names.items()} for plan in (before, wanted))
    check_same(out, old, new, AmipsError, "vectors")


def _write_texts(out: Path, sources: dict[str, Source], name: str, skip_empty: bool) -> dict[str, _Read]:
    """Write the .jsonl files, or make sure that those of an earlier call are of the same texts."""
    plan: dict[str, Any] = read_json(out / PLAN, AmipsError) if (out / PLAN).exists() else {"kind": KIND}
    known = "keys" in plan
    if not known:
        write_json(out / PLAN, plan)
    read = {}
    for side, source in sources.items():
        path = out / f"{side}.jsonl"
        stated = plan.get(side)
        whole = known and path.exists() and isinstance(stated, dict) and sha256(path) == stated.get("sha256")
        read[side] = _read(source, None if whole else path, skip_empty)
    if known:
        _refuse_other(out, plan, _plan(name, read))
    else:
        write_json(out / PLAN, {**plan, **_plan(name, read)})
    return read


def _read(source: Source, to: Path | None, skip_empty: bool) -> _Read:
    """Read texts, leave out duplicates, and write the rest as JSON lines to `to`; None: only look at them."""
    texts = distinct(_texts(source, skip_empty))
    hashed, count = hashlib.sha256(), 0
    with nullcontext() if to is None else writing(to) as file:
        for text in texts:
            record = line({"id": text.id, "title": text.title, "text": text.text})
            hashed.update(record.encode())
            count += 1
            if file is not None:
                file.write(record)
        if count == 0:
            what = source if isinstance(source, (str, Path)) else "the texts given"
            raise AmipsError(f"{what}: there is no text in it")
    return _Read(hashed.hexdigest(), count, texts.duplicates, texts.empty)


def _texts(source: Source, skip_empty: bool) -> Iterator[Text]:
    if isinstance(source, (str, Path)):
        yield from read_texts(source, empty=skip_empty)
        return
    for row, text in enumerate(source):
        if not (text.whole.strip() or skip_empty):
            raise AmipsError(f"text {row:,} (id {text.id!r}) is empty; leave such texts out with {SKIP}")
        yield text


def _untitled(source: Source, skip_empty: bool) -> Iterator[Text]:
    """The texts without their titles."""
    return (replace(text, title="") for text in _texts(source, skip_empty))


def _encode(
    out: Path,
    side: str,
    encoder: Encoder,
    batch: int,
    shard: int,
    progress: bool,
    handed: str | Path | Encoder,
    cluster: Cluster | None,
) -> None:
    """Encode the texts of `side`, or what is missing of them, and put the file of vectors in its place.

    Workers of a cluster are given `handed`: the name of the encoder, or itself.
    """
    if (out / f"{side}.npy").exists():  # it is moved there whole
        return
    folder = out / PARTIAL / side
    columns: Columns = {side: (np.float32, (encoder.d,))}
    with (
        TextFile(out / f"{side}.jsonl") as texts,
        RowFiles(folder, len(texts), columns, of=encoder.name) as files,
        Bar(len(texts), side, " texts", progress, start=files.done) as shown,
    ):
        shards, started = shards_of(texts, files.done, shard), time.monotonic()
        encoded = (
            (encode_shard(encoder, rows, batch, shown.update) for rows in shards)
            if cluster is None
            else encoded_on(cluster, handed, shards, batch)
        )
        for vectors in encoded:
            files.append({side: vectors})
            files.commit()
            if cluster is not None:
                shown.update(len(vectors))
                cluster.note(shown, started)
    (folder / f"{side}.npy").rename(out / f"{side}.npy")
