"""What was acknowledged is there: after an interrupted call, in a replaced directory, after a crash."""

import shutil

import numpy as np
import pytest

import amips
from amips.search import bundle_directory
from amips.search.changes import FIRST_LINE
from helpers import make_world

N, D = 300, 8
BLOCK = 4096  # that a file system writes at a time


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    keys, queries = make_world(N, 300, D, seed=4)
    return amips.label(keys, queries, cells=6, val=60, k=10, out=tmp_path_factory.mktemp("durable") / "task")


@pytest.fixture(scope="module")
def built(task, tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "b"
    amips.build(task, out=path, storage="flat")
    return path


@pytest.fixture
def bundle(built, tmp_path):
    return shutil.copytree(built, tmp_path / "b")


def vectors(count, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def ids_in(index):
    """The ids of all keys that can be found."""
    found = index.search(np.ones(D, np.float32), index.n, probes=index.c)[1][0].tolist()
    assert len(set(found)) == index.n
    return set(found)


@pytest.mark.parametrize("at", ["before the rename", "behind it", "while clearing up"])
def test_an_interrupted_compact_loses_and_repeats_nothing(bundle, monkeypatch, at):
    """Whether it had replaced the bundle or not, the writer goes on with what stands there."""
    index = amips.load(bundle)
    index.add(vectors(5))
    index.remove([0, N + 1])
    whole = bundle_directory.write_manifest

    def stop(*arguments, **_):
        if at == "behind it":
            whole(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == "while clearing up":
            patch.setattr(bundle_directory.shutil, "rmtree", stop)
        else:
            patch.setattr(bundle_directory, "write_manifest", stop)
        with pytest.raises(KeyboardInterrupt):
            index.compact()
    index.add(vectors(2, 1))
    index.remove([7])
    expected = set(range(N + 7)) - {0, 7, N + 1}
    assert ids_in(index) == expected
    index.close()
    assert ids_in(amips.load(bundle)) == expected


def test_a_directory_that_was_replaced_is_opened_again(bundle, built, task):
    """Changes go into the bundle that stands there, not into the one that was moved away."""
    index = amips.load(bundle)
    index.add(vectors(3))
    bundle.rename(bundle.with_name("aside"))
    shutil.copytree(built, bundle)  # with the same names of files
    index.add(vectors(2, 1), ids=[1000, 1001])
    assert ids_in(index) == ids_in(amips.load(bundle)) == {*range(N), 1000, 1001}
    amips.build(task, out=bundle.with_name("other"), storage="flat")
    shutil.rmtree(bundle)
    bundle.with_name("other").rename(bundle)
    index.remove([5])
    assert ids_in(amips.load(bundle)) == set(range(N)) - {5}
    shutil.rmtree(bundle)
    with pytest.raises(amips.BundleError) as caught:
        index.remove([6])
    assert "\n" not in str(caught.value)
    assert ids_in(index) == set(range(N)) - {5}


def test_a_change_to_a_bundle_that_is_replaced_meanwhile_is_refused(bundle, built, monkeypatch):
    """By the time that it is written, or after it: such a change is not acknowledged."""
    index = amips.load(bundle)
    index.add(vectors(3))
    sync = amips.search.changes.os.fdatasync

    def replace(handle):
        sync(handle)
        bundle.rename(bundle.with_name("aside"))
        shutil.copytree(built, bundle)

    with monkeypatch.context() as patch:
        patch.setattr("amips.search.changes.os.fdatasync", replace)
        with pytest.raises(amips.BundleError, match="was replaced while it was changed"):
            index.add(vectors(1))
    index.remove([1])
    assert ids_in(index) == ids_in(amips.load(bundle)) == set(range(N)) - {1}


def test_a_save_over_what_others_have_replaced_is_refused(bundle):
    one, other = amips.load(bundle), amips.load(bundle)
    with other:
        other.add(vectors(4))
        other.compact()
    with pytest.raises(amips.BundleError, match="was replaced since it was opened"):
        one.save(bundle)
    assert amips.load(bundle).n == N + 4
    assert one.refresh()
    one.save(bundle)
    assert amips.load(bundle).n == one.n == N + 4


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_reader_of_a_record_that_was_not_acknowledged_comes_back(bundle, monkeypatch, count):
    """The record is written, the call is interrupted, somebody reads; then another is in its place."""
    writer, reader = amips.load(bundle), amips.load(bundle)
    writer.add(vectors(2))

    def stop(handle):
        reader.refresh()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("amips.search.changes.os.fdatasync", stop)
        with pytest.raises(KeyboardInterrupt):
            writer.add(vectors(4, 1))
    assert reader.n == N + 6
    writer.add(vectors(count, 2))  # shorter, as long, longer
    writer.remove([3])
    assert reader.refresh()
    assert ids_in(reader) == ids_in(writer) == set(range(N + 2 + count)) - {3}
    x = vectors(3, 2)
    np.testing.assert_array_equal(reader.search(x, recall=1.0)[1], writer.search(x, recall=1.0)[1])
    assert not reader.refresh()


def test_zeros_that_a_crash_left_at_the_end_are_dropped(bundle):
    """Blocks that were not written are zeros: behind the last record, or from somewhere in it on."""
    with amips.load(bundle) as index:
        index.add(vectors(200))
        first = next(bundle.glob("changes-*")).stat().st_size
        index.add(np.zeros((200, D), np.float32))
    (log,) = bundle.glob("changes-*.log")
    whole = log.read_bytes()
    log.write_bytes(whole + bytes(BLOCK))
    assert amips.load(bundle).n == N + 400
    for kept in (0, 4, len(FIRST_LINE), first, first + 9, first + 28, first + 40, BLOCK * 2):
        log.write_bytes(whole[:kept] + bytes(len(whole) - kept))
        assert amips.load(bundle).n == N + (200 if kept >= first else 0), kept
        with amips.load(bundle) as index:
            index.remove([2])
        assert amips.load(bundle).n == N - 1 + (200 if kept >= first else 0), kept


def test_zeros_in_the_middle_are_damage(bundle):
    with amips.load(bundle) as index:
        index.add(vectors(200))
        index.remove([1])
    (log,) = bundle.glob("changes-*.log")
    whole = log.read_bytes()
    for begin, end in ((len(FIRST_LINE), 512), (512, 1024), (0, 512), (4096, len(whole) - 4)):
        log.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
        with pytest.raises(amips.BundleError, match=r"record [12] is damaged|does not begin"):
            amips.load(bundle)
    log.write_bytes(whole[:512] + bytes([whole[512] ^ 1]) + whole[513:] + bytes(BLOCK))
    with pytest.raises(amips.BundleError, match="record 1 is damaged"):
        amips.load(bundle)


def test_names_are_on_disk_before_the_manifest_relies_on_them(task, tmp_path, monkeypatch):
    """Of the data directory, of the bundle in its parent: a manifest must not outlive them."""
    done = []
    sync, write = bundle_directory.fsync_directory, bundle_directory.write_manifest

    def synced(path):
        done.append(path)
        sync(path)

    def written(out, *arguments):
        assert done[-3:] == [next(out.glob("data-*")), out, out.parent]
        write(out, *arguments)
        done.append("manifest")

    monkeypatch.setattr(bundle_directory, "fsync_directory", synced)
    monkeypatch.setattr(bundle_directory, "write_manifest", written)
    amips.build(task, out=tmp_path / "b", storage="flat")
    assert "manifest" in done
