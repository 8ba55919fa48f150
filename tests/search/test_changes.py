"""The file of changes: what was acknowledged is there, a cut record is dropped, a damaged one is named."""

import json
import os
import struct
import warnings
import zlib

import numpy as np
import pytest

from amips.errors import BundleError
from amips.search.changes import (
    CRC,
    FIRST_LINE,
    HEAD,
    MAGIC,
    START,
    Change,
    ChangeWriter,
    read_changes,
)

CHANGES = [
    Change("add", {"keys": np.arange(12, dtype=np.float32).reshape(3, 4), "ids": np.array(["a", "bb", "ü"])}),
    Change("remove", {"numbers": np.array([1, 5])}),
    Change("add", {"keys": np.zeros((0, 4), np.float32)}),
    Change("update", {"numbers": np.array([2]), "keys": np.ones((1, 4), np.float32)}),
]


@pytest.fixture
def path(tmp_path):
    writer = ChangeWriter(tmp_path / "changes.log", START)
    for change in CHANGES:
        writer.append(change)
    writer.close()
    return tmp_path / "changes.log"


def same(one, other):
    assert one.kind == other.kind
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name])
        assert array.dtype == other.arrays[name].dtype


def read(path, since=START):
    return [change for change, _ in read_changes(path, since)]


def test_what_was_written_comes_back_in_order(path):
    for change, expected in zip(read(path), CHANGES, strict=True):
        same(change, expected)


def test_from_a_place_on(path):
    places = [place for _, place in read_changes(path)]
    assert [place.number for place in places] == [1, 2, 3, 4]
    assert places[-1].offset == path.stat().st_size
    for first, place in enumerate(places, 1):
        assert len(read(path, place)) == len(CHANGES) - first


def test_without_a_file_there_are_none(tmp_path):
    assert read(tmp_path / "nothing.log") == []


def test_cut_off_anywhere_whole_records_remain(path):
    """A file that ends anywhere has the records that are whole, and a writer goes on behind them."""
    data, ends = path.read_bytes(), [place.offset for _, place in read_changes(path)]
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        assert len(read(path)) == whole
    place = [place for _, place in read_changes(path)][-1]
    writer = ChangeWriter(path, place)
    writer.append(CHANGES[0])
    writer.close()
    assert [change.kind for change in read(path)] == ["add", "remove", "add", "add"]


def test_any_byte_that_changed_is_damage_or_a_cut(path):
    """No changed byte is taken for what was written: an error that names the record, never another change.

    Of the last record, which nothing follows, a warning that names it: it may not have been acknowledged.
    """
    data = path.read_bytes()
    whole = [change.encoded() for change in CHANGES]
    last = [place.offset for _, place in read_changes(path)][-2]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x41
        path.write_bytes(changed)
        if at < last:
            with pytest.raises(BundleError, match="damaged") as caught:
                read(path)
            assert "\n" not in str(caught.value)
            assert at < len(FIRST_LINE) or "record" in str(caught.value)
        else:
            with pytest.warns(UserWarning, match="the last record, 4, is not whole"):
                assert [change.encoded() for change in read(path)] == whole[:-1], at


@pytest.mark.parametrize("part", [slice(0, 40), slice(0, 10), slice(20, 60), slice(60, 90)])
def test_blocks_that_did_not_reach_the_disk(path, part):
    """Zeros within the last record drop it, and a writer goes on; within another they are damage."""
    data, places = path.read_bytes(), [place for _, place in read_changes(path)]
    for number, place in ((4, places[2]), (3, places[1])):
        torn = bytearray(data)
        low, high = place.offset + part.start, place.offset + part.stop
        torn[low:high] = bytes(high - low)
        path.write_bytes(torn)
        if number == 3:
            with pytest.raises(BundleError, match="record 3 is damaged"):
                read(path)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(read(path)) == 3
        writer = ChangeWriter(path, places[2])
        writer.append(CHANGES[0])
        writer.close()
        assert [change.kind for change in read(path)] == ["add", "remove", "add", "add"]


def test_interrupted_behind_the_write(path, monkeypatch):
    """The record is whole on disk, and nobody has noted so: the next one goes into its place."""
    writer = ChangeWriter(path, [place for _, place in read_changes(path)][-1])
    write = ChangeWriter._write

    def stop(self, data):
        write(self, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ChangeWriter, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            writer.append(CHANGES[3])
    writer.append(CHANGES[1])
    writer.close()
    assert [change.kind for change in read(path)] == ["add", "remove", "add", "update", "remove"]


def record(body, number=1):
    head = HEAD.pack(MAGIC, number, len(body), zlib.crc32(body))
    return head + CRC.pack(zlib.crc32(head)) + body


def described(description, data=b""):
    text = json.dumps(description).encode()
    return struct.pack("<I", len(text)) + text + data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff{}",
        described([]),
        described({"kind": "other", "arrays": []}),
        described({"kind": "add"}),
        described({"kind": "add", "arrays": [["keys", "<f4", [3]]]}, b"1234"),
        described({"kind": "add", "arrays": [["keys", "<f4", [1]]]}, b"12345"),
        described({"kind": "add", "arrays": [["keys", "O", [1]]]}, b"12345678"),
        described({"kind": "add", "arrays": [["keys", "<f4", [-1]]]}, b"1234"),
        described({"kind": "add", "arrays": [["keys", "<f4", [1 << 62, 1 << 62]]]}, b"1234"),
        described({"kind": "add", "arrays": [["keys", "<f4", [0.5]]]}, b"1234"),
        described({"kind": "add", "arrays": [["keys", "nonsense", [1]]]}, b"1234"),
        described({"kind": "add", "arrays": [["keys", "<f4,<f4", [1]]]}, b"12345678"),
        described({"kind": "add", "arrays": "keys"}),
    ],
)
def test_records_that_were_made_up_are_refused(tmp_path, body):
    (tmp_path / "x.log").write_bytes(FIRST_LINE + record(body))
    with pytest.raises(BundleError, match="record 1 is damaged"):
        read(tmp_path / "x.log")


def test_another_file_in_its_place_is_refused(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(b"something else altogether")
    with pytest.raises(BundleError, match="does not begin"):
        read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match="not a regular file"):
        read(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(BundleError, match="cannot be read"):
        read(path)
