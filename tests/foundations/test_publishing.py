"""Finished directories at an address: whole or not there, checked, continued."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import amips
from amips import publishing
from amips.publishing import LISTING, fetch, publish


@pytest.fixture
def task(tmp_path):
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((m, 8)).astype(np.float32) for m in (200, 120))
    amips.label(keys, queries, out=tmp_path / "task", cells=2, val=20, test=20)
    return tmp_path / "task"


@pytest.fixture
def address(tmp_path):
    return (tmp_path / "store" / "task").as_uri()


def content(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def change(task):
    """Another content of the same directory, as good as finished anew."""
    (task / "note.txt").write_text(os.urandom(8).hex())


def store(tmp_path):
    return tmp_path / "store" / "task"


def test_what_is_published_is_fetched_byte_for_byte(task, address, tmp_path):
    version = publish(task, address)
    out = fetch(address, tmp_path / "out" / "task")
    assert content(out) == content(task)
    assert publish(task, address) == version
    assert fetch(address, out) == out
    assert amips.build(out, out=tmp_path / "bundle").n == 200


def test_bundles_and_shards_are_published(task, tmp_path):
    amips.build(task, out=tmp_path / "bundle")
    amips.shard(task, shards=2, out=tmp_path / "shards", minutes=0.01)
    x = np.eye(8, dtype=np.float32)
    for name in ("bundle", "shards"):
        address = (tmp_path / "store" / name).as_uri()
        publish(tmp_path / name, address)
        fetch(address, tmp_path / f"{name} 2")
        before, after = (amips.load(tmp_path / place).search(x) for place in (name, f"{name} 2"))
        assert np.array_equal(before[1], after[1])


def test_two_versions_are_kept(task, address, tmp_path):
    versions = []
    for _ in range(4):
        change(task)
        versions.append(publish(task, address))
    assert len(set(versions)) == 4
    assert {path.name for path in store(tmp_path).iterdir()} == {LISTING, *versions[-2:]}
    assert content(fetch(address, tmp_path / "out")) == content(task)


def test_a_publication_that_is_cut_leaves_what_was_there_and_is_continued(
    task, address, tmp_path, monkeypatch
):
    before = content(task)
    publish(task, address)
    change(task)
    sent = []
    send = publishing._send

    def cut(system, path, *arguments):
        if len(sent) == 3:
            raise OSError("the line is dead")
        sent.append(path)
        send(system, path, *arguments)

    monkeypatch.setattr(publishing, "_send", cut)
    with pytest.raises(amips.AmipsError, match="cannot be written: the line is dead"):
        publish(task, address)
    assert content(fetch(address, tmp_path / "old")) == before
    monkeypatch.setattr(publishing, "_send", send)
    publish(task, address)
    assert content(fetch(address, tmp_path / "new")) == content(task)


def test_killed_at_any_moment_it_is_the_old_or_the_new(task, address, tmp_path):
    change(task)
    publish(task, address)
    states = [content(task)]
    code = "import sys, amips; print('begin', flush=True); amips.publish(sys.argv[1], sys.argv[2])"
    for attempt in range(4):
        change(task)
        states.append(content(task))
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(task), address], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        try:
            process.wait(0.02 * attempt)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        assert content(fetch(address, tmp_path / f"out{attempt}")) in states


def test_a_file_that_changes_meanwhile_is_noticed(task, address, monkeypatch):
    facts = publishing._facts

    def stale(path):
        known = facts(path)
        if path.name == "keys.npy":
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        return known

    monkeypatch.setattr(publishing, "_facts", stale)
    with pytest.raises(amips.AmipsError, match="has changed while it was published"):
        publish(task, address)
    with pytest.raises(amips.AmipsError, match="nothing is published"):
        fetch(address, task.parent / "out")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "longer"])
def test_damaged_files_are_not_fetched(task, address, tmp_path, damage):
    version = publish(task, address)
    file = store(tmp_path) / version / "keys.npy"
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"flip": data[:-1] + b"?", "cut": data[:-9], "longer": data + b"more"}[damage])
    with pytest.raises(amips.AmipsError, match=r"keys\.npy (is not what was published|cannot be read)"):
        fetch(address, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "", "a\0b"])
def test_a_listing_names_no_file_outside(task, address, tmp_path, name):
    publish(task, address)
    listing = json.loads((store(tmp_path) / LISTING).read_text())
    listing["files"][name] = listing["files"].pop("keys.npy")
    listing["version"] = publishing._version_of(listing["files"])
    (store(tmp_path) / LISTING).write_text(json.dumps(listing))
    with pytest.raises(amips.AmipsError):
        fetch(address, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "publication", "format": 1}', "nonsense"])
def test_a_listing_that_is_none_is_one_line(task, address, tmp_path, text):
    publish(task, address)
    (store(tmp_path) / LISTING).write_text(text)
    with pytest.raises(amips.AmipsError) as problem:
        fetch(address, tmp_path / "out")
    assert "\n" not in str(problem.value)


def test_a_listing_in_which_a_file_lies_in_another_is_damaged(task, address, tmp_path):
    publish(task, address)
    listing = json.loads((store(tmp_path) / LISTING).read_text())
    listing["files"]["keys.npy/b"] = listing["files"]["keys.npy"]
    listing["version"] = publishing._version_of(listing["files"])
    (store(tmp_path) / LISTING).write_text(json.dumps(listing))
    with pytest.raises(amips.AmipsError, match=r"amips\.json is damaged: publish again$"):
        fetch(address, tmp_path / "out")


@pytest.mark.parametrize("inner", ["", "store", "train/../store"])
def test_nothing_is_published_into_itself(task, tmp_path, monkeypatch, inner):
    before = content(task)
    (tmp_path / "link").symlink_to(task)
    for start in (task, tmp_path / "link"):
        with pytest.raises(amips.AmipsError, match="which is published: give an address outside of it"):
            publish(task, f"{start.as_uri()}/{inner}".rstrip("/"))
    monkeypatch.chdir(task)
    with pytest.raises(amips.AmipsError, match="give an address outside of it"):
        publish(".", (task / "store").as_uri())
    assert content(task) == before
    assert not (task / "store").exists()
    assert not list(task.rglob(".lock"))


def test_a_directory_of_another_content_is_not_taken_for_the_published_one(task, address, tmp_path):
    publish(task, address)
    out = fetch(address, tmp_path / "out")
    data = bytearray((out / "keys.npy").read_bytes())
    data[-1] ^= 1
    (out / "keys.npy").write_bytes(data)  # as large as before
    with pytest.raises(amips.AmipsError, match="holds something else"):
        fetch(address, out)


@pytest.mark.parametrize("damage", ["flip", "gone", "listing", "both"])
def test_publishing_again_mends_what_was_damaged(task, address, tmp_path, damage):
    version = publish(task, address)
    file = store(tmp_path) / version / "keys.npy"
    if damage != "gone":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        file.unlink()
    if damage in ("listing", "both"):
        (store(tmp_path) / LISTING).write_bytes(b"\0\0")
    assert publish(task, address) == version
    assert content(fetch(address, tmp_path / "out")) == content(task)


def interleaved(task, address, tmp_path, monkeypatch):
    """Another content is published, twice, in the middle of a publication."""
    other = shutil.copytree(task, tmp_path / "other")
    send, sent = publishing._send, []

    def between(system, path, *arguments):
        sent.append(path)
        if len(sent) == 3:
            change(other)
            publish(other, address)
            change(other)
            publish(other, address)
        send(system, path, *arguments)

    monkeypatch.setattr(publishing, "_send", between)
    publish(task, address)


def test_two_publishers_do_not_mix(task, address, tmp_path, monkeypatch):
    publish(task, address)
    change(task)
    with pytest.raises(amips.AmipsError, match="another process is publishing at"):
        interleaved(task, address, tmp_path, monkeypatch)


def test_two_publishers_do_not_mix_where_there_are_no_locks(task, address, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "_on_disk", lambda *_: None)
    publish(task, address)
    change(task)
    interleaved(task, address, tmp_path, monkeypatch)
    assert content(fetch(address, tmp_path / "out")) == content(task)


def test_what_is_on_a_disk_is_synced_before_it_is_listed(task, address, tmp_path, monkeypatch):
    synced = set()
    sync = os.fsync

    def note(handle):
        facts = os.fstat(handle)
        synced.add((facts.st_dev, facts.st_ino))
        sync(handle)

    listed = publishing.write_atomic

    def check(path, data):
        for file in [path.parent, *path.parent.rglob("*")]:
            facts = file.stat()
            assert (facts.st_dev, facts.st_ino) in synced or file.name == ".lock", file
        listed(path, data)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(publishing, "write_atomic", check)
    publish(task, address)
    assert (store(tmp_path) / LISTING).is_file()


def test_only_what_was_finished_is_published(task, address, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "plan.json").write_text('{"kind": "embed", "keys": {}}')  # as a call of embed that was killed
    with pytest.raises(amips.AmipsError, match="nothing that amips finished"):
        publish(begun, address)
    (task / "keys.npy").write_bytes((task / "keys.npy").read_bytes()[:-1] + b"?")
    with pytest.raises(amips.AmipsError, match=r"keys\.npy is not what it was when .* was finished"):
        publish(task, address)


def test_what_is_refused(task, address, tmp_path):
    with pytest.raises(amips.AmipsError, match="nothing is published at"):
        fetch(address, tmp_path / "out")
    with pytest.raises(amips.AmipsError, match="not an address"):
        publish(task, "plain/path")
    with pytest.raises(amips.AmipsError, match="nothing that amips finished"):
        publish(tmp_path, address)
    publish(task, address)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(amips.AmipsError, match="holds something else"):
        fetch(address, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    with pytest.raises(amips.AmipsError, match="`amips fetch` it"):
        amips.load("s3://bucket/bundle")
    with pytest.raises(amips.AmipsError, match="cannot be opened"):
        publish(task, "nowhere://bucket/name")


def test_the_commands(task, address, tmp_path):
    for words in (["publish", str(task), address], ["fetch", address, str(tmp_path / "out")]):
        subprocess.run([sys.executable, "-m", "amips", *words], check=True, capture_output=True)
    assert content(tmp_path / "out") == content(task)
