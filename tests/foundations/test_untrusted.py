"""Files that someone else may have written, and `.npy` headers that say what is not so."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from amips import locks
from amips.errors import AmipsError, TaskError
from amips.files import manifest_kinds, partial, read_json, remove_directory, remove_partials
from amips.locks import locked
from amips.npy import HEADER_BYTES, load_npy, npy_header
from amips.untrusted import inside, open_regular, read_bounded, read_toml


def refused(match, call, *inputs, **options):
    with pytest.raises(TaskError, match=match) as caught:
        call(*inputs, TaskError, **options)
    assert "\n" not in str(caught.value)


class TestOpening:
    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.json")
        for call in (open_regular, read_bounded, read_json, read_toml, npy_header, load_npy):
            refused("is not a regular file", call, tmp_path / "pipe.json")
        with pytest.raises(AmipsError, match="is not a regular file"):
            manifest_kinds(tmp_path)

    def test_devices_and_directories(self, tmp_path):
        (tmp_path / "zero").symlink_to("/dev/zero")
        refused("is not a regular file", read_json, tmp_path / "zero")
        refused("is not a regular file", read_json, tmp_path)

    def test_what_is_too_large_is_not_read(self, tmp_path):
        with (tmp_path / "large.json").open("wb") as file:
            file.truncate(1 << 40)
        refused("expected at most", read_json, tmp_path / "large.json")
        (tmp_path / "a").write_bytes(b"12345")
        assert read_bounded(tmp_path / "a", TaskError, 5) == b"12345"
        refused("it has 5 bytes, expected at most 4", lambda p, e: read_bounded(p, e, 4), tmp_path / "a")

    def test_deeply_nested_json(self, tmp_path):
        (tmp_path / "a.json").write_text("[" * 100_000)
        refused("is damaged", read_json, tmp_path / "a.json")

    def test_json_that_is_small_on_disk_and_large_in_memory(self, tmp_path):
        """Of 4 MB, Python makes 120 MB of empty lists; of 64 MB it would make 2 GB."""
        (tmp_path / "a.json").write_text('{"a": [' + "[]," * (1 << 21) + "[]]}")
        refused("expected at most 4,194,304", read_json, tmp_path / "a.json")

    def test_what_a_file_says_is_quoted_in_part(self):
        assert str(TaskError("a.json has format " + "x" * 10**6 + ": make it again")).endswith(
            "x: make it again"
        )
        assert len(str(TaskError("x" * 10**6))) < 1300
        assert len(str(TaskError("\x1b" * 10**6))) < 1300

    def test_links_only_where_they_may_be(self, tmp_path):
        (tmp_path / "file").write_text("x")
        (tmp_path / "link").symlink_to("file")
        open_regular(tmp_path / "link", TaskError).close()
        refused("cannot be read", lambda p, e: open_regular(p, e, follow=False), tmp_path / "link")


class TestInside:
    @pytest.mark.parametrize(
        "name", ["../x", "a/../../x", "/etc/passwd", "", ".", "a//b", "a/.", "a\0b", "a\\b", None, 3, ["a"]]
    )
    def test_names_that_lead_out(self, tmp_path, name):
        refused("is not the name of a file in this directory", inside, tmp_path, name)

    def test_names_and_links_within(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b").write_text("x")
        (tmp_path / "link").symlink_to("a/b")
        (tmp_path / "round").symlink_to("round")
        assert inside(tmp_path, "a/b", TaskError).read_text() == "x"
        assert inside(tmp_path, "link", TaskError).read_text() == "x"
        (tmp_path / "out").symlink_to("/etc")
        refused("is a link to a place outside", inside, tmp_path, "out/passwd")

    def test_a_directory_that_is_a_link_itself(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "a").write_text("x")
        (tmp_path / "link").symlink_to("real")
        assert inside(tmp_path / "link", "a", TaskError).read_text() == "x"


def with_header(path, header, values=b"", version=(1, 0)):
    text = header.encode("latin1")
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes(version) + length + text + values)
    return path


class TestNpy:
    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("kind", ["<f4", ">f8", "<i4", "|u1", "|b1", "<U7", "<f2"])
    @pytest.mark.parametrize("shape", [(3, 4), (0, 5), (7,), ()])
    def test_what_numpy_writes(self, tmp_path, kind, shape, order):
        values = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind), order=order)
        np.save(tmp_path / "a.npy", values)
        for mmap in (False, True):
            array = load_npy(tmp_path / "a.npy", TaskError, dtype=kind, shape=shape, mmap=mmap)
            np.testing.assert_array_equal(array, values)
            assert array.dtype == values.dtype

    @pytest.mark.parametrize(
        ("header", "match"),
        [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4), }", "its header says"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }", "a shape of"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4), }", "a shape of"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1e3, 4), }", "a shape of"),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 4), }", "does not give a shape"),
            ("{'descr': '|O', 'fortran_order': False, 'shape': (2, 4), }", "are not numbers"),
            ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", "are not numbers"),
            ("{'descr': '<f3', 'fortran_order': False, 'shape': (2, 4), }", "values of type"),
            ("{'descr': '<f4', 'shape': (2, 4), }", "lacks descr"),
            ("((((((((", "cannot be read"),
            ("(" * 5000, "cannot be read"),
            ("__import__('os').getcwd()", "cannot be read"),
            ("[1, 2]", "lacks descr"),
            (" " * (HEADER_BYTES + 1), "a header of"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2**46, 2**46), }", "cannot be read"),
            (
                f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {1 << 46}, {1 << 46}), }}",
                "a shape of",
            ),
            (f"{{'descr': '|U0', 'fortran_order': False, 'shape': ({10**12},), }}", "which have no bytes"),
        ],
        ids=range(17),
    )
    @pytest.mark.parametrize("version", [(1, 0), (2, 0)])
    def test_headers_that_lie(self, tmp_path, header, match, version):
        path = with_header(tmp_path / "a.npy", header, bytes(32), version)
        refused(match, npy_header, path)
        refused(match, load_npy, path, mmap=True)

    def test_another_type_or_shape_than_expected(self, tmp_path):
        np.save(tmp_path / "a.npy", np.zeros((3, 4), np.float32))
        path = tmp_path / "a.npy"
        assert npy_header(path, TaskError, dtype=np.float32, shape=(None, 4)).shape == (3, 4)
        refused("values of type float32, expected int32", npy_header, path, dtype=np.int32)
        refused(r"shape \[3, 4\], expected \[any, 5\]", npy_header, path, shape=(None, 5))
        refused(r"expected \[3\]", npy_header, path, shape=(3,))

    def test_a_file_that_is_cut_or_longer(self, tmp_path):
        np.save(tmp_path / "a.npy", np.zeros((30, 4), np.float32))
        data = (tmp_path / "a.npy").read_bytes()
        for changed in (data[:-1], data + b"x", data[:64], data[:7], b""):
            (tmp_path / "a.npy").write_bytes(changed)
            refused("damaged|not a readable", npy_header, tmp_path / "a.npy")


def forked(work):
    """The id of a child that does this, and no more."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


class TestLocks:
    def test_a_link_is_not_followed(self, tmp_path):
        (tmp_path / ".lock").symlink_to(tmp_path / "precious")
        with pytest.raises(AmipsError, match="is not a lock file"), locked(tmp_path / ".lock"):
            pass
        assert not (tmp_path / "precious").exists()

    def test_other_things_than_files(self, tmp_path):
        os.mkfifo(tmp_path / ".lock")
        with (
            pytest.raises(TaskError, match="is not a lock file"),
            locked(tmp_path / ".lock", TaskError("busy")),
        ):
            pass

    def test_a_forked_child_does_not_keep_it(self, tmp_path):
        """Neither after the holder is done, nor when the holder was killed."""
        path, busy = tmp_path / ".lock", TaskError("busy")
        with locked(path, busy):
            child = forked(lambda: time.sleep(60))
        try:
            with locked(path, busy):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_the_child_of_a_holder_that_was_killed(self, tmp_path):
        path, busy = tmp_path / ".lock", TaskError("busy")
        reader, writer = os.pipe()

        def hold():
            with locked(path):
                child = forked(lambda: time.sleep(60))
                os.write(writer, f"{child}\n".encode())
                time.sleep(60)

        holder = forked(hold)
        grandchild = int(os.read(reader, 20))
        try:
            with pytest.raises(TaskError, match="busy"), locked(path, busy):
                pass
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
            with locked(path, busy):
                pass
        finally:
            os.kill(grandchild, signal.SIGKILL)
            os.close(reader)
            os.close(writer)

    def test_a_child_that_leaves_the_block_does_not_let_go_of_it(self, tmp_path):
        path, busy = tmp_path / ".lock", TaskError("busy")
        block = locked(path, busy, remove=True)
        with block:
            child = forked(lambda: block.__exit__(None, None, None))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert path.exists()
            with pytest.raises(TaskError, match="busy"), locked(path, busy):
                pass
        assert not path.exists()

    def test_its_directory_may_be_removed_at_any_moment(self, tmp_path, monkeypatch):
        """By the holder before, between the moment it is made and the moment the lock is."""
        path = tmp_path / "deep" / "work" / ".lock"
        opened, removed = locks.open_lock, []

        def remove_first(where, error):
            if len(removed) < 3:
                removed.append(where.parent.rmdir())
            return opened(where, error)

        monkeypatch.setattr(locks, "open_lock", remove_first)
        with locked(path, remove=True, make=True):
            assert path.exists()
        assert len(removed) == 3
        path.parent.rmdir()
        path.parent.write_text("a file")
        with pytest.raises(OSError, match="exists"), locked(path, make=True):
            pass

    def test_the_holder_may_remove_it(self, tmp_path):
        """Then the next one makes another; both are never held at once."""
        path, busy = tmp_path / ".lock", TaskError("busy")
        with locked(path, busy):
            with pytest.raises(TaskError, match="busy"), locked(path, busy):
                pass
            path.unlink()
        with locked(path, busy), pytest.raises(TaskError, match="busy"), locked(path, busy):
            pass


class TestRemoving:
    def test_it_is_whole_or_gone(self, tmp_path, monkeypatch):
        (tmp_path / "work" / "a").mkdir(parents=True)
        (tmp_path / "work" / "a" / "b").write_text("x")
        with monkeypatch.context() as patched:
            patched.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before it was done
            remove_directory(tmp_path / "work")
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".work.")
        (tmp_path / ".hidden").write_text("of the user")
        remove_partials(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".hidden"]
        remove_directory(tmp_path / "work")  # nothing there: nothing to do

    def test_every_file_of_a_directory_is_on_disk_before_its_name(self, tmp_path, monkeypatch):
        events = []
        fsync, rename = os.fsync, type(tmp_path).replace
        monkeypatch.setattr(
            os,
            "fsync",
            lambda h: events.append(Path(f"/proc/self/fd/{h}").readlink().name) or fsync(h),
        )
        monkeypatch.setattr(type(tmp_path), "replace", lambda a, b: events.append("rename") or rename(a, b))
        with partial(tmp_path / "out") as temporary:
            (temporary / "inner").mkdir(parents=True)
            (temporary / "inner" / "one").write_text("1")
        assert events.index("one") < events.index("inner") < events.index("rename")
        assert (tmp_path / "out" / "inner" / "one").read_text() == "1"
