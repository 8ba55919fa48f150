"""Questions in words: a bundle with texts, what it answers, and what it refuses."""

import hashlib
import json
import os
import shutil
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import amips
from amips.cli import cli
from amips.errors import AmipsError, BundleError
from amips.locks import locked
from amips.search import Index, Point
from amips.signing import new_key
from amips.task import load_task
from amips.text import Asker, attach, embed
from amips.text import asking as module
from helpers import Words, reseal

TOPICS = {
    "csv": "read write csv file rows columns delimiter",
    "process": "run function another process wait result pool",
    "matrix": "compute eigenvalues symmetric matrix vector product",
    "socket": "open network connection socket address port",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An embedded corpus of 400 texts and 300 queries, and a bundle with a linear router and the texts."""
    folder = tmp_path_factory.mktemp("asking")
    rng = np.random.default_rng(0)
    names = list(TOPICS)

    def text(count):
        topic = names[rng.integers(len(names))]
        words = rng.choice(TOPICS[topic].split(), count).tolist()
        return topic, " ".join([*words, f"w{rng.integers(400)}"])

    with (folder / "corpus.jsonl").open("w") as f:
        for i in range(400):
            topic, body = text(6)
            f.write(json.dumps({"_id": f"doc{i}", "title": f"{topic}.{i}", "text": body}) + "\n")
    with (folder / "queries.txt").open("w") as f:
        f.writelines(text(3)[1] + "\n" for _ in range(300))
    embedded = embed(folder / "corpus.jsonl", folder / "queries.txt", encoder=Words(), out=folder / "vectors")
    task = amips.label(embedded.keys, embedded.queries, cells=8, k=10, val=40, test=40, out=folder / "task")
    run = folder / "run"
    amips.train(task, amips.Linear(), samples=20_000, out=run)
    amips.build(task, run, storage="flat", spill_fraction=0.0, out=folder / "bundle")
    attach(folder / "bundle", embedded)
    return folder


@pytest.fixture(autouse=True)
def words_for_all(monkeypatch):
    monkeypatch.setattr(module, "open_published", lambda name: Words())


def test_the_answer_is_that_of_a_search_with_the_encoded_question(folder):
    asker = Asker(folder / "bundle")
    answer = asker.ask("read a csv file", k=4, probes=8)
    keys = np.load(folder / "vectors" / "keys.npy")
    scores = keys @ Words().encode(["read a csv file"])[0]
    best = np.argsort(-scores, kind="stable")[:4]
    texts = (folder / "vectors" / "keys.jsonl").read_text().splitlines()
    assert [hit.text.id for hit in answer.hits] == [json.loads(texts[i])["id"] for i in best]
    np.testing.assert_allclose([hit.score for hit in answer.hits], scores[best], rtol=1e-5)
    assert answer.scanned == answer.n == 400


def test_fewer_probes_scan_fewer_keys_and_recall_chooses_them(folder):
    asker = Asker(folder / "bundle")
    assert asker.ask("csv", probes=1).scanned < asker.ask("csv", probes=4).scanned
    # As many cells as this question needs, in the cheapest way that had this recall.
    x = Words().encode(["open a socket"])
    for recall, options in ((0.95, {}), (0.6, {"recall": 0.6})):
        answer, cost = asker.ask("open a socket", **options), asker.index.cost(x, recall=recall)
        assert (answer.probes, answer.scanned) == (cost.probed[0], cost.scanned[0])
        scores, _ = asker.index.search(x, 10, recall=recall)
        np.testing.assert_allclose(
            [hit.score for hit in answer.hits], scores[0, : len(answer.hits)], rtol=1e-5
        )
    # It is the recall of the top 10 that is asked for, also where one result is.
    points = [Point(1, 1.0, 0.5, 0.1, 1.0), Point(7, 1.0, 1.0, 0.9, 7.0)]
    asker.index = Index(replace(asker.index.snapshot, points=points))
    assert asker.ask("open a socket", k=1).probes == 7


def test_an_index_that_nothing_is_known_of_needs_probes(folder):
    asker = Asker(folder / "bundle")
    asker.index = Index(replace(asker.index.snapshot, points=[], target_recall=None))
    assert asker.ask("csv", probes=3).probes == 3
    with pytest.raises(AmipsError, match="give probes"):
        asker.ask("csv")


def test_compare_counts_the_probes_until_all_true_keys_are_seen(folder):
    asker = Asker(folder / "bundle")
    question = "eigenvalues of a matrix"
    x = Words().encode([question])
    for effort, model in zip(asker.compare(question, k=3), (None, asker.index.model), strict=True):
        searcher = asker.index.with_model(model)
        truth = searcher.search(x, 3, probes=8)[1]
        assert (searcher.search(x, 3, probes=effort.probes)[1] == truth).all()
        if effort.probes > 1:
            assert (searcher.search(x, 3, probes=effort.probes - 1)[1] != truth).any()
        assert effort.scanned == searcher.cost(x, probes=effort.probes).scanned[0]


def test_compare_knows_the_true_keys_of_codes_and_second_cells(folder):
    asker = Asker(folder / "bundle")
    question = "eigenvalues of a matrix"
    x, keys = Words().encode([question]), np.load(folder / "vectors" / "keys.npy")
    true = np.argsort(-(keys @ x[0]), kind="stable")[:3]
    task = load_task(folder / "task")
    second = ((task.cells.assignment + 1) % task.c).astype(np.int32)
    coded = amips.build(task, None, storage="lean", dimensions=8, second_cells=second)
    wrong = replace(coded.snapshot, store=replace(coded.store, refine=1))  # finds 3 candidates
    asker.index = Index(wrong)
    (effort,) = asker.compare(question, k=3)
    order = asker.index.choose_cells(x, task.c)[0]
    for probes, all_seen in ((effort.probes, True), (effort.probes - 1, False)):
        there = np.isin(task.cells.assignment[true], order[:probes]) | np.isin(second[true], order[:probes])
        assert there.all() == all_seen


def test_a_recall_out_of_reach_is_said_in_a_line(folder, monkeypatch):
    low = replace(amips.load(folder / "bundle").snapshot, points=[Point(1, 0.5, 0.5, 0.1, 1.0)])
    monkeypatch.setattr(module, "load", lambda path, trusted: Index(low))
    words = ["ask", str(folder / "bundle"), "read a csv file"]
    assert "recall 0.95 is out of reach" in str(CliRunner().invoke(cli, words).exception)
    done = CliRunner().invoke(cli, [*words, "--best-effort"])
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: recall 0.95 is out of reach")
    assert done.stderr.count("\n") == 1


def test_texts_of_other_keys_are_refused(folder, tmp_path):
    other = embed(folder / "queries.txt", encoder=Words(), out=tmp_path / "other")
    with pytest.raises(BundleError, match="does not hold the keys"):
        attach(folder / "bundle", other)
    assert Asker(folder / "bundle").ask("csv").hits  # what was there is whole


def test_a_bundle_without_texts_says_what_to_do(folder, tmp_path):
    amips.build(folder / "task", None, out=tmp_path / "plain")
    with pytest.raises(BundleError, match="--texts"):
        Asker(tmp_path / "plain")


def test_a_bundle_that_was_replaced_by_other_keys_is_noticed(folder, tmp_path):
    keys = np.load(folder / "vectors" / "keys.npy")[::-1].copy()
    task = amips.label(
        keys, folder / "vectors" / "queries.npy", cells=8, k=10, val=40, test=40, out=tmp_path / "t"
    )
    amips.build(folder / "task", None, out=tmp_path / "b")
    attach(tmp_path / "b", folder / "vectors")
    amips.build(task, None, out=tmp_path / "b")
    with pytest.raises(BundleError, match="belong to other keys"):
        Asker(tmp_path / "b")


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_one_line(folder, question):
    with pytest.raises(AmipsError, match="empty"):
        Asker(folder / "bundle").ask(question)


def test_the_command_as_typed(folder):
    done = CliRunner().invoke(cli, ["ask", str(folder / "bundle"), "read a csv file", "-k", "2", "--compare"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("1. 0.")
    assert "csv." in lines[0]
    assert any("of 400 keys scanned" in line for line in lines)
    assert [line.split()[0] for line in lines[-2:]] == ["centroid", "linear"]


def test_build_takes_the_texts(folder, tmp_path):
    arguments = ["build", str(folder / "task"), str(folder / "run"), "--texts", str(folder / "vectors")]
    done = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert Asker(tmp_path / "b").ask("csv").hits


class Other(Words):
    """Of the same dimension, with other directions."""

    name = "other"

    def encode(self, texts):
        return super().encode([" ".join(f"{word}!" for word in text.split()) for text in texts])


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder / "bundle", tmp_path / "bundle")


class TestEncoder:
    @pytest.fixture(autouse=True)
    def none_is_opened(self, monkeypatch):
        for name in ("open_encoder", "open_published"):
            monkeypatch.setattr(module, name, lambda name: pytest.fail(f"opened {name}"))

    @pytest.mark.parametrize("name", ["/tmp/evil", "./evil", "../evil", "~/evil", "a/b/c", "", "C:\\evil"])
    def test_a_path_that_a_bundle_names_is_never_opened(self, copy, name):
        reseal(copy / "text.json", encoder=name)
        with pytest.raises(BundleError, match="--encoder DIR"):
            Asker(copy).ask("csv")

    def test_a_published_name_is_opened_as_such(self, copy, monkeypatch):
        reseal(copy / "text.json", encoder="someone/model")
        names = []
        monkeypatch.setattr(module, "open_published", lambda name: names.append(name) or Words())
        Asker(copy).ask("csv")
        assert names == ["someone/model"]

    def test_the_caller_names_a_directory(self, copy, monkeypatch):
        reseal(copy / "text.json", encoder="/where/it/was")
        names = []
        monkeypatch.setattr(module, "open_encoder", lambda name: names.append(name) or Words())
        done = CliRunner().invoke(cli, ["ask", str(copy), "read a csv file", "--encoder", "here"])
        assert done.exit_code == 0, done.output
        assert names == ["here"]

    def test_one_that_did_not_encode_the_texts_is_refused(self, copy):
        assert Asker(copy, encoder=Words()).ask("csv").hits
        with pytest.raises(BundleError, match="other is not the encoder of"):
            Asker(copy, encoder=Other()).ask("csv")


def texts_of(bundle):
    """The file of its texts."""
    (name,) = json.loads((bundle / "text.json").read_text())["files"]
    return bundle / name


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp"


def write_texts(bundle, change):
    """Change the texts of a bundle as a forger would: every hash is right."""
    path = texts_of(bundle)
    records = [change(json.loads(row)) for row in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    facts = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    reseal(bundle / "text.json", files={f"{path.parent.name}/keys.jsonl": facts})


@pytest.mark.parametrize("field", ["id", "title", "text"])
def test_escapes_in_texts_do_not_reach_the_terminal(copy, field):
    def change(record):
        return {
            **record,
            "title": "" if field == "id" else record["title"],
            field: f"{record[field]} {HOSTILE}",
        }

    write_texts(copy, change)
    assert HOSTILE in getattr(Asker(copy).ask("csv").hits[0].text, field)  # a program gets what was written
    done = CliRunner().invoke(cli, ["ask", str(copy), "read a csv file"])
    assert done.exit_code == 0, done.output
    assert "\\x1b]0;owned\\x07" in done.stdout
    assert not set("\x1b\x07\x9b\u202e") & set(done.output)


def test_a_title_cannot_look_like_another_hit(copy):
    write_texts(copy, lambda record: {**record, "title": "x\n1. 1.000  forged"})
    done = CliRunner().invoke(cli, ["ask", str(copy), "csv", "-k", "1"])
    assert sum(line.startswith("1. ") for line in done.stdout.splitlines()) == 1


class TestHostileTexts:
    def refused(self, bundle, match):
        with pytest.raises(AmipsError, match=match) as problem:
            Asker(bundle)
        assert "\n" not in str(problem.value)

    def test_changed(self, copy):
        path = texts_of(copy)
        path.write_bytes(path.read_bytes().replace(b"csv", b"vsc"))
        self.refused(copy, "SHA-256")

    def test_a_pipe(self, copy):
        path = texts_of(copy)
        path.unlink()
        os.mkfifo(path)
        self.refused(copy, "not a regular file")
        (copy / "text.json").unlink()
        os.mkfifo(copy / "text.json")
        self.refused(copy, "not a regular file")

    def test_links_out_of_the_bundle(self, copy, tmp_path):
        texts = texts_of(copy)
        texts.rename(tmp_path / "elsewhere.jsonl")
        texts.symlink_to(tmp_path / "elsewhere.jsonl")
        self.refused(copy, "outside")
        texts.parent.rename(tmp_path / "text")
        texts.parent.symlink_to(tmp_path / "text")
        self.refused(copy, "outside")

    def test_decoys_that_are_verified_in_place_of_the_texts(self, copy):
        texts = texts_of(copy)
        (texts.parent / "decoy").write_bytes(b"")
        facts = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
        reseal(copy / "text.json", files={f"{texts.parent.name}/decoy": facts})
        self.refused(copy, "does not list keys.jsonl")


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    """A private and a public key."""
    return new_key(tmp_path_factory.mktemp("keys") / "key")


class TestSigned:
    def test_texts_are_signed_with_the_bundle(self, copy, signer):
        private, public = signer
        with pytest.raises(BundleError, match="is not signed"):
            Asker(copy, trusted=public)
        amips.sign(copy, private)
        assert Asker(copy, trusted=public).ask("csv").hits
        assert amips.verify(copy, public).texts
        done = CliRunner().invoke(cli, ["ask", str(copy), "csv", "--trusted", str(public)])
        assert done.exit_code == 0, done.output
        write_texts(copy, lambda record: {**record, "text": "forged"})
        assert amips.load(copy, trusted=public).n == 400  # whose files are as they were
        for refused in (lambda: Asker(copy, trusted=public), lambda: amips.verify(copy, public)):
            with pytest.raises(BundleError, match=r"text\.json is not the one that was signed"):
                refused()

    def test_texts_that_came_after_the_signature(self, folder, copy, signer):
        private, public = signer
        (copy / "text.json").unlink()
        amips.sign(copy, private)
        attach(copy, folder / "vectors")
        with pytest.raises(BundleError, match="came after the signature"):
            Asker(copy, trusted=public)

    def test_texts_of_another_bundle_that_is_signed_too(self, folder, copy, signer, tmp_path):
        """Of the same keys: only what was signed together goes together."""
        private, public = signer
        other = shutil.copytree(copy, tmp_path / "other")
        write_texts(other, lambda record: {**record, "text": "of the other"})
        for bundle in (copy, other):
            amips.sign(bundle, private)
            assert amips.verify(bundle, public).texts
        texts = texts_of(other)
        for file in (texts, other / "text.json"):
            shutil.copy(file, copy / file.relative_to(other))
        with pytest.raises(BundleError, match=r"text\.json is not the one that was signed"):
            Asker(copy, trusted=public)
        shutil.copy(other / "signature.json", copy)
        if (copy / "manifest.json").read_bytes() != (other / "manifest.json").read_bytes():
            with pytest.raises(BundleError, match=r"manifest\.json is not the one that was signed"):
                Asker(copy, trusted=public)


class TestReplacingTexts:
    def test_killed_at_any_moment_there_are_texts(self, folder, copy, monkeypatch):
        """Every change of the directory: the one before it was the last."""
        moments = []

        def look(event, arguments):
            if moments is not None and event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
                texts = json.loads((copy / "text.json").read_text())["files"]
                moments.append(all((copy / name).is_file() for name in texts))

        sys.addaudithook(look)
        attach(copy, folder / "vectors")
        seen, moments = moments, None  # a hook cannot be removed
        assert seen
        assert all(seen)
        assert len(list(copy.glob("text-*"))) == 1

    def test_what_a_killed_call_left_is_cleared(self, folder, copy):
        (copy / "text-0123456789ab").mkdir()
        (copy / "text-0123456789ab" / "keys.jsonl").write_text("x")
        (copy / ".text.json.1234567.tmp").write_text("x")
        (copy / "text-mine").mkdir()
        attach(copy, folder / "vectors")
        kept = json.loads((copy / "text.json").read_text())["data"]
        assert sorted(p.name for p in copy.glob("text-*")) == sorted([kept, "text-mine"])
        assert not list(copy.glob(".text.json*"))
        assert Asker(copy).ask("csv").hits

    def test_a_save_does_not_touch_them_and_they_wait_for_it(self, folder, copy):
        amips.build(folder / "task", None, out=copy)
        assert Asker(copy).ask("csv").hits
        waiting = threading.Thread(target=attach, args=(copy, folder / "vectors"))
        with locked(copy / ".lock"):
            before = texts_of(copy)
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive()
            assert texts_of(copy) == before
        waiting.join(30)
        assert texts_of(copy) != before

    def test_no_bundle(self, folder, tmp_path):
        with pytest.raises(BundleError, match="is not a directory"):
            attach(tmp_path / "none", folder / "vectors")


def test_texts_that_changed_since_they_were_embedded_are_not_attached(folder, tmp_path):
    vectors = shutil.copytree(folder / "vectors", tmp_path / "vectors")
    path = vectors / "keys.jsonl"
    path.write_bytes(path.read_bytes().replace(b"csv", b"vsc"))
    with pytest.raises(BundleError, match="has changed since"):
        attach(folder / "bundle", vectors)
    assert Asker(folder / "bundle").ask("csv").hits
