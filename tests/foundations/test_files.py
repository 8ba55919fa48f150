"""Atomic writes, manifests, and tables that are continued after a crash."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from amips.errors import AmipsError, TaskError
from amips.files import read_json, read_manifest, sha256, write_atomic, write_json, write_manifest
from amips.rowfiles import JOURNAL, RowFiles
from helpers import reseal


def failing(*_):
    raise OSError(28, "No space left on device")


class TestWriteAtomic:
    def test_writes_and_replaces(self, tmp_path):
        path = tmp_path / "a.bin"
        write_atomic(path, b"old")
        write_atomic(path, b"new and longer")
        assert path.read_bytes() == b"new and longer"
        assert os.listdir(tmp_path) == ["a.bin"]  # noqa: PTH208

    @pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
    def test_a_failure_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch, owner, name):
        path = tmp_path / "a.bin"
        write_atomic(path, b"old")
        monkeypatch.setattr(owner, name, failing)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(path, b"new")
        assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
        assert path.read_bytes() == b"old"

    def test_a_failure_of_the_first_write_leaves_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(tmp_path / "a.bin", b"new")
        assert list(tmp_path.iterdir()) == []

    def test_the_content_is_on_disk_before_the_name(self, tmp_path, monkeypatch):
        """fsync of the file, then the rename, then fsync of the directory."""
        events = []
        fsync, replace = os.fsync, Path.replace
        monkeypatch.setattr(os, "fsync", lambda handle: events.append("fsync") or fsync(handle))
        monkeypatch.setattr(
            Path, "replace", lambda self, target: events.append("rename") or replace(self, target)
        )
        write_atomic(tmp_path / "a.bin", b"new")
        assert events == ["fsync", "rename", "fsync"]


class TestJson:
    def test_round_trip(self, tmp_path):
        value = {"a": [1, 2.5, None], "b": {"c": "ü"}}
        write_json(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json", TaskError) == value

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b'{"a": ', b"\xff\xfe", b"nonsense"])
    def test_a_damaged_file_is_one_line(self, tmp_path, content):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(TaskError, match=r"a\.json is damaged") as caught:
            read_json(tmp_path / "a.json", TaskError)
        assert "\n" not in str(caught.value)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(TaskError, match=r"a\.json does not exist"):
            read_json(tmp_path / "a.json", TaskError)


def test_sha256_of_a_file_larger_than_a_chunk(tmp_path):
    data = np.random.default_rng(0).bytes((1 << 22) + 12345)
    (tmp_path / "a").write_bytes(data)
    assert sha256(tmp_path / "a") == hashlib.sha256(data).hexdigest()


@pytest.fixture
def finished(tmp_path):
    """A finished directory with two files."""
    folder = tmp_path / "thing"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"aaaa")
    (folder / "sub" / "b.bin").write_bytes(b"bb")
    fields = {"kind": "thing", "format": 3, "x": 1}
    write_manifest(folder, "thing.json", fields, ["a.bin", "sub/b.bin"])
    return folder


def read(folder, verify=False, kind="thing", version=3):
    return read_manifest(folder, "thing.json", kind, version, TaskError, verify)


class TestManifest:
    def test_lists_sizes_and_hashes(self, finished):
        manifest = read(finished, verify=True)
        assert manifest["x"] == 1
        assert manifest["files"] == {
            "a.bin": {"size": 4, "sha256": hashlib.sha256(b"aaaa").hexdigest()},
            "sub/b.bin": {"size": 2, "sha256": hashlib.sha256(b"bb").hexdigest()},
        }

    def test_is_written_last(self, tmp_path, monkeypatch):
        """If a file cannot be hashed or synced, there is no manifest."""
        (tmp_path / "a.bin").write_bytes(b"a")
        with pytest.raises(FileNotFoundError):
            write_manifest(tmp_path, "thing.json", {}, ["a.bin", "missing.bin"])
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="No space"):
            write_manifest(tmp_path, "thing.json", {}, ["a.bin"])
        assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]

    def test_a_changed_bit_is_found_by_verify(self, finished):
        (finished / "a.bin").write_bytes(b"aaab")
        read(finished)
        with pytest.raises(TaskError, match=r"a\.bin does not have the SHA-256"):
            read(finished, verify=True)

    def test_a_changed_size_is_always_found(self, finished):
        (finished / "a.bin").write_bytes(b"aaa")
        with pytest.raises(TaskError, match=r"a\.bin has 3 bytes, expected 4"):
            read(finished)

    def test_a_missing_file(self, finished):
        (finished / "sub" / "b.bin").unlink()
        with pytest.raises(TaskError, match=r"b\.bin is missing"):
            read(finished)

    def test_another_kind_version_or_place(self, finished, tmp_path):
        with pytest.raises(TaskError, match="describes 'thing', expected 'other'"):
            read(finished, kind="other")
        with pytest.raises(TaskError, match="has format 3, this version of amips reads 4"):
            read(finished, version=4)
        with pytest.raises(TaskError, match="is not a directory"):
            read(tmp_path / "nowhere")
        with pytest.raises(TaskError, match="is not a directory"):
            read(finished / "a.bin")
        with pytest.raises(TaskError, match=r"not a finished thing: it has no thing\.json"):
            read(tmp_path)

    @pytest.mark.parametrize(
        "files", [None, [], "a.bin", {"a.bin": None}, {"a.bin": {}}, {"a.bin": {"size": 4}}]
    )
    def test_a_manifest_that_is_damaged(self, finished, files):
        reseal(finished / "thing.json", files=files)
        with pytest.raises(TaskError, match=r"thing\.json is damaged"):
            read(finished)


COLUMNS = {"values": (np.float32, (3,)), "names": (np.int64, ())}


def some(start, stop):
    names = np.arange(start, stop)
    return {"values": names[:, None] + np.array([0, 0.25, 0.5], np.float32), "names": names}


class TestRowFiles:
    @pytest.mark.parametrize("place", [None, "out"])
    def test_rows_in_order(self, tmp_path, place):
        with RowFiles(place and tmp_path / place, 10, COLUMNS) as files:
            for start, stop in ((0, 4), (4, 5), (5, 10)):
                files.append(some(start, stop))
                files.commit()
            tables = files.finish()
        assert {name: table.tolist() for name, table in tables.items()} == {
            name: table.tolist() for name, table in some(0, 10).items()
        }
        assert (tables["values"].dtype, tables["names"].dtype) == (np.float32, np.int64)

    def test_continues_after_the_rows_that_were_committed(self, tmp_path):
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            files.append(some(0, 4))
            files.commit()
            files.append({name: -table for name, table in some(4, 7).items()})  # lost in the crash
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            assert files.done == 4
            files.append(some(4, 10))
            files.commit()
            tables = files.finish()
        assert tables["names"].tolist() == list(range(10))
        assert np.array_equal(tables["values"], some(0, 10)["values"])

    def test_a_finished_table_has_nothing_left_to_do(self, tmp_path):
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            files.append(some(0, 10))
            files.commit()
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            assert files.done == 10
            assert files.finish()["names"].tolist() == list(range(10))

    def test_finish_before_the_end_is_refused(self, tmp_path):
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            files.append(some(0, 9))
            files.commit()
            with pytest.raises(AssertionError, match="before every row"):
                files.finish()

    @pytest.mark.parametrize(
        ("m", "columns"),
        [
            (11, COLUMNS),
            (10, {**COLUMNS, "values": (np.float32, (4,))}),
            (10, {**COLUMNS, "values": (np.float16, (3,))}),
            (10, {"values": (np.float32, (3,))}),
        ],
    )
    def test_tables_of_another_shape_are_left_alone(self, tmp_path, m, columns):
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            files.append(some(0, 4))
            files.commit()
        before = (tmp_path / "values.npy").read_bytes()
        with pytest.raises(AmipsError, match="result of other inputs"):
            RowFiles(tmp_path, m, columns)
        assert (tmp_path / "values.npy").read_bytes() == before

    @pytest.mark.parametrize("journal", [b"", b"{", b"[]", b'"rows"', b"3"])
    def test_a_damaged_journal_means_starting_again(self, tmp_path, journal):
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            files.append(some(0, 4))
            files.commit()
        (tmp_path / JOURNAL).write_bytes(journal)
        with RowFiles(tmp_path, 10, COLUMNS) as files:
            assert files.done == 0

    def test_a_missing_or_cut_table_means_starting_again(self, tmp_path):
        for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:140])):
            with RowFiles(tmp_path, 10, COLUMNS) as files:
                files.append(some(0, 4))
                files.commit()
            damage(tmp_path / "values.npy")
            with RowFiles(tmp_path, 10, COLUMNS) as files:
                assert files.done == 0
                files.append(some(0, 10))
                files.commit()
                assert files.finish()["values"].tolist() == some(0, 10)["values"].tolist()
            (tmp_path / JOURNAL).unlink()
