"""Data sets: the same files from every layout of a source, whole or not at all, and continued."""

import gzip
import json
import tracemalloc

import pytest

from amips import AmipsError
from amips.bench.relevance import read_qrels
from amips.cli import cli
from amips.text import data, sources, texts
from amips.text.data import DATASETS, get_data
from amips.text.texts import read_texts

PASSAGES = [{"_id": f"{i:02d}", "title": f"T{i}" if i % 2 else "", "text": f"passage {i}"} for i in range(8)]
PEOPLE = [{"_id": f"0{i}", "title": "", "text": f"question {i}"} for i in range(5)]
JUDGED = [("00", "03", 1), ("00", "07", 2), ("02", "01", 1)]  # ids look like numbers, and are not
GENERATED = [{**PASSAGES[i // 2], "query": f"query {i}\u2028é"} for i in range(16)]
FILES = {"corpus.jsonl", "queries.jsonl", "test-queries.jsonl", "qrels.tsv", "data.json"}


def write_jsonl(path, records, zipped=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(body) if zipped else body)


def write_parquet(path, records):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)


def write_tsv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{c}\t{s}\n" for q, c, s in rows))


def make_gz(root, name="fiqa"):
    write_jsonl(root / name / "corpus.jsonl.gz", PASSAGES, zipped=True)
    write_jsonl(root / name / "queries.jsonl.gz", PEOPLE, zipped=True)
    write_tsv(root / f"{name}-qrels" / "test.tsv", JUDGED)
    write_tsv(root / f"{name}-qrels" / "train.tsv", [("01", "01", 1)])
    write_jsonl(root / f"{name}-generated-queries" / "train.jsonl.gz", GENERATED, zipped=True)


def make_parquet(root, name="fiqa"):
    write_parquet(root / name / "corpus" / "corpus-00000-of-00002.parquet", PASSAGES[:5])
    write_parquet(root / name / "corpus" / "corpus-00001-of-00002.parquet", PASSAGES[5:])
    write_parquet(root / name / "queries" / "queries-00000-of-00001.parquet", PEOPLE)
    rows = [{"query-id": q, "corpus-id": c, "score": s} for q, c, s in JUDGED]
    write_parquet(root / f"{name}-qrels" / "data" / "test-00000-of-00001.parquet", rows)
    write_parquet(root / f"{name}-generated-queries" / "data" / "train-00000-of-00001.parquet", GENERATED)
    # what `hf download` leaves beside the files
    write_jsonl(root / name / ".cache" / "huggingface" / "corpus.jsonl", [{"broken": 1}])


def make_archive(root, name="fiqa"):
    write_jsonl(root / name / "corpus.jsonl", PASSAGES)
    write_jsonl(root / name / "queries.jsonl", PEOPLE)
    write_tsv(root / name / "qrels" / "test.tsv", JUDGED)
    write_jsonl(root / f"{name}-generated-queries" / "train.jsonl", GENERATED)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "data.json"}


@pytest.fixture
def source(tmp_path):
    make_gz(tmp_path / "source")
    return tmp_path / "source"


def test_every_layout_gives_the_same_files(tmp_path):
    made = []
    for make in (make_gz, make_parquet, make_archive):
        make(tmp_path / make.__name__)
        out = tmp_path / f"{make.__name__}-out"
        manifest = get_data("beir/fiqa", out, source=tmp_path / make.__name__)
        assert {path.name for path in out.iterdir()} == FILES
        assert manifest["counts"] == {
            "corpus.jsonl": 8,
            "qrels.tsv": 3,
            "test-queries.jsonl": 2,
            "queries.jsonl": 16,
        }
        made.append(bytes_of(out))
    assert made[0] == made[1] == made[2]


def test_what_is_written_is_what_the_other_rooms_read(source, tmp_path):
    out = tmp_path / "out"
    get_data("beir/fiqa", out, source=source)
    passages = list(read_texts(out / "corpus.jsonl"))
    assert [(text.id, text.title, text.text) for text in passages] == [tuple(p.values()) for p in PASSAGES]
    assert read_qrels(out / "qrels.tsv") == {"00": {"03": 1, "07": 2}, "02": {"01": 1}}
    assert [text.id for text in read_texts(out / "test-queries.jsonl")] == ["00", "02"]
    rows = [json.loads(row) for row in (out / "queries.jsonl").read_text("utf-8").split("\n")[:-1]]
    assert [row["source"] for row in rows] == [record["_id"] for record in GENERATED]
    assert [row["text"] for row in rows] == [record["query"] for record in GENERATED]
    assert len({row["_id"] for row in rows}) == 16


def test_most_keeps_the_first_passages_and_what_concerns_them(source, tmp_path):
    counts = get_data("beir/fiqa", tmp_path / "out", source=source, most=4)["counts"]
    assert counts == {"corpus.jsonl": 4, "qrels.tsv": 2, "test-queries.jsonl": 2, "queries.jsonl": 8}
    sourced = [
        json.loads(row)["source"] for row in (tmp_path / "out" / "queries.jsonl").read_text().split("\n")[:-1]
    ]
    assert set(sourced) == {"00", "01", "02", "03"}
    none = get_data("beir/fiqa", tmp_path / "one", source=source, most=1)["counts"]
    assert none == {"corpus.jsonl": 1, "qrels.tsv": 0, "test-queries.jsonl": 0, "queries.jsonl": 2}


def test_without_a_public_corpus_the_passages_are_those_of_the_generated_queries(tmp_path):
    write_jsonl(tmp_path / "s" / "bioasq-generated-queries" / "train.jsonl", GENERATED)
    manifest = get_data("beir/bioasq", tmp_path / "out", source=tmp_path / "s")
    assert manifest["counts"] == {"corpus.jsonl": 8, "queries.jsonl": 16}
    assert [text.id for text in read_texts(tmp_path / "out" / "corpus.jsonl")] == [p["_id"] for p in PASSAGES]
    part = get_data("beir/bioasq", tmp_path / "part", source=tmp_path / "s", most=3)
    assert part["counts"] == {"corpus.jsonl": 3, "queries.jsonl": 6}
    make_gz(tmp_path / "own", "bioasq")  # someone who has it all
    assert len(get_data("beir/bioasq", tmp_path / "all", source=tmp_path / "own")["counts"]) == 4


def test_a_stopped_run_goes_on_with_the_first_missing_file(source, tmp_path, monkeypatch):
    out, read, reads = tmp_path / "out", sources.Local.read, []

    def failing(self, part):
        reads.append(part)
        for i, record in enumerate(read(self, part)):
            if part == "generated" and i == 7 and reads.count("generated") == 1:
                raise KeyboardInterrupt
            yield record

    monkeypatch.setattr(sources.Local, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        get_data("beir/fiqa", out, source=source)
    assert {path.name for path in out.iterdir()} == FILES - {"queries.jsonl", "data.json"} | {"started.json"}
    with pytest.raises(AmipsError, match=r"other inputs or options \(most\)"):
        get_data("beir/fiqa", out, source=source, most=3)
    reads[:] = ["generated"]
    get_data("beir/fiqa", out, source=source)
    assert reads == ["generated", "generated"]
    assert {path.name for path in out.iterdir()} == FILES
    monkeypatch.undo()
    get_data("beir/fiqa", tmp_path / "at once", source=source)
    assert bytes_of(out) == bytes_of(tmp_path / "at once")


def test_finished_data_is_not_read_again_and_not_mixed_with_other(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = get_data("beir/fiqa", out, source=source)
    monkeypatch.setattr(sources.Hub, "read", None)
    assert get_data("beir/fiqa", out) == first
    with pytest.raises(AmipsError, match=r"other inputs or options \(name\)"):
        get_data("beir/nq", out)
    with (out / "corpus.jsonl").open("a") as f:
        f.write("{}\n")
    with pytest.raises(AmipsError, match="bytes"):
        get_data("beir/fiqa", out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(AmipsError, match="exists and is not a data set"):
        get_data("beir/fiqa", tmp_path / "full", source=source)


def test_mistakes_are_one_line_that_says_what_to_do(source, tmp_path):
    with pytest.raises(AmipsError, match=f"there are {', '.join(DATASETS)}$"):
        get_data("fiqa", tmp_path / "out")
    with pytest.raises(AmipsError, match="not a directory"):
        get_data("beir/fiqa", tmp_path / "out", source=tmp_path / "none")
    with pytest.raises(AmipsError, match="download BeIR/nq to it"):
        get_data("beir/nq", tmp_path / "out", source=source)
    (source / "fiqa" / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"_id": 1, "text": "x"}\n')[:-9])
    with pytest.raises(AmipsError, match=r"corpus\.jsonl\.gz, line 1: not a whole gzip file"):
        get_data("beir/fiqa", tmp_path / "out2", source=source)
    write_jsonl(source / "fiqa" / "corpus.jsonl", [{"_id": 1, "body": "x"}])
    with pytest.raises(AmipsError, match="corpus has no text; it has _id, body"):
        get_data("beir/fiqa", tmp_path / "out2", source=source)
    assert [path.name for path in (tmp_path / "out2").iterdir()] == ["started.json"]


def test_the_command_tells_what_there_is(source, tmp_path, capsys):
    command = ["data", "beir/fiqa", "--out", str(tmp_path / "out"), "--source", str(source), "--most", "4"]
    cli(command, standalone_mode=False)
    assert "test-queries.jsonl" in capsys.readouterr().out


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The real library, with directories in the place of repositories."""
    pytest.importorskip("datasets")
    root = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sources, "HUB", f"{root}/")
    return root


CARD = """---
configs:
- config_name: corpus
  data_files: [{split: corpus, path: "corpus*"}]
- config_name: queries
  data_files: [{split: queries, path: "queries*"}]
---
"""


def test_from_the_hub_come_the_same_files(hub, tmp_path):
    make_gz(hub)
    (hub / "fiqa" / "README.md").write_text(CARD)
    get_data("beir/fiqa", tmp_path / "a")
    get_data("beir/fiqa", tmp_path / "b", source=hub)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_without_a_network_one_line_says_what_to_do(hub, tmp_path, capfd):
    with pytest.raises(AmipsError) as said:
        get_data("beir/fiqa", tmp_path / "out")
    message = str(said.value)
    assert "\n" not in message
    assert "hf download --repo-type dataset" in message
    assert "fiqa-qrels" in message
    assert "--source" in message
    assert "Retry" not in capfd.readouterr().err


def test_a_data_set_whose_queries_are_passages_says_so(tmp_path):
    make_gz(tmp_path, "quora")
    assert get_data("beir/quora", tmp_path / "out", source=tmp_path)["same_ids"] is True
    assert data.read_manifest(tmp_path / "out", "data.json", "data", 1, AmipsError, verify=True)


def test_a_small_archive_of_one_endless_line_is_one_line(source, tmp_path, monkeypatch):
    """A few kilobytes of gzip can unpack to a line of gigabytes: it is not read into memory."""
    monkeypatch.setattr(texts, "MAX_LINE", 1 << 16)
    path = source / "fiqa" / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 26)))
    tracemalloc.start()
    try:
        with pytest.raises(AmipsError, match=r"corpus\.jsonl\.gz, line 1: longer than"):
            get_data("beir/fiqa", tmp_path / "out", source=source)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
