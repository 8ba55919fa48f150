"""Memory and disks that end, and temporary directories that go away."""

import errno
import gc
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

import amips
from amips.errors import AmipsError, DiskFullError, MemoryLimitError
from amips.resources import plain_resource_errors, resource_error
from amips.scratch import Scratch
from helpers import make_world


class TestErrors:
    @pytest.mark.parametrize(
        "problem",
        [
            MemoryError(),
            MemoryError("Unable to allocate 3.4 GiB for an array"),
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory:\nyou"
            ),
            RuntimeError("std::bad_alloc"),
            RuntimeError("can't start new thread"),
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ],
    )
    def test_memory(self, problem):
        with pytest.raises(MemoryLimitError, match=r"^not enough memory") as caught, plain_resource_errors():
            raise problem
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, MemoryError)

    @pytest.mark.parametrize(
        "problem",
        [
            OSError(errno.ENOSPC, "No space left on device", "/somewhere"),
            OSError(errno.EFBIG, "File too large"),
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            RuntimeError("Error in faiss::FileIOWriter: write error in index.faiss: No space left on device"),
            Exception("Error while serializing: I/O error: File too large (os error 27)"),
            OSError("1048576 requested and 262112 written"),
        ],
    )
    def test_disk(self, problem):
        unchanged = r"^cannot write.*what was there before is unchanged"
        with pytest.raises(DiskFullError, match=unchanged), plain_resource_errors():
            raise problem
        assert isinstance(resource_error(problem), OSError)

    @pytest.mark.parametrize("problem", [ValueError("x"), OSError(errno.EACCES, "no"), RuntimeError("a bug")])
    def test_everything_else_is_left_alone(self, problem):
        assert resource_error(problem) is None
        with pytest.raises(type(problem)) as caught, plain_resource_errors():
            raise problem
        assert caught.value is problem

    def test_errors_of_its_own_are_left_alone(self):
        with pytest.raises(AmipsError, match=r"^the file says: out of memory$"), plain_resource_errors():
            raise AmipsError("the file says: out of memory")


def typed(*words, **limits):
    """Run a command under limits, given in bytes by their names in `resource`."""

    def limit():
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))

    command = [sys.executable, "-m", "amips", *map(str, words)]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)


class TestLimits:
    """Each in a process of its own: one line, no signal, and what was there before stays."""

    @pytest.fixture
    def vectors(self, tmp_path):
        for name, count in (("keys", 4000), ("queries", 1000)):
            np.save(tmp_path / f"{name}.npy", make_world(count, count, 32, seed=3)[0])
        return tmp_path / "keys.npy", tmp_path / "queries.npy"

    @pytest.mark.parametrize("megabytes", [300, 500])
    def test_too_little_address_space(self, vectors, tmp_path, megabytes):
        done = typed("label", *vectors, "--out", tmp_path / "task", RLIMIT_AS=megabytes << 20)
        assert done.returncode == 1  # not a signal
        assert "not enough memory: the limit on address space is" in done.stderr.splitlines()[-1]
        assert not (tmp_path / "task" / "task.json").exists()

    @pytest.mark.parametrize("kilobytes", [1, 300])
    def test_a_full_disk_while_labelling(self, vectors, tmp_path, kilobytes):
        done = typed("label", *vectors, "--out", tmp_path / "task", RLIMIT_FSIZE=kilobytes << 10)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "File too large" in done.stderr
        assert amips.label(*vectors, out=tmp_path / "task").n == 4000  # goes on where it was

    def test_a_full_disk_under_numpy(self, tmp_path):
        """numpy counts what it wrote and drops the system's error."""
        code = (
            "import sys, numpy as np; from pathlib import Path; from amips.files import write_atomically\n"
            "from amips.resources import plain_resource_errors\n"
            "with plain_resource_errors():\n"
            "    array = np.zeros(1 << 18, np.float32)\n"
            "    write_atomically(Path(sys.argv[1]), lambda file: np.save(file, array))\n"
        )
        size = 200 << 10
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a.npy")],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
            capture_output=True,
            text=True,
            check=False,
        )
        line = done.stderr.splitlines()[-1]
        assert "DiskFullError: cannot write: 262144 requested and " in line
        assert "what was there before is unchanged" in line
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_keeps_the_bundle_that_was_there(self, vectors, tmp_path):
        amips.build(amips.label(*vectors, out=tmp_path / "task"), out=tmp_path / "bundle")
        before = (tmp_path / "bundle" / "manifest.json").read_bytes()
        done = typed("build", tmp_path / "task", "--out", tmp_path / "bundle", RLIMIT_FSIZE=200 << 10)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "error: " in done.stderr.splitlines()[-1]
        assert (tmp_path / "bundle" / "manifest.json").read_bytes() == before
        assert amips.load(tmp_path / "bundle").n == 4000


class TestScratch:
    def test_it_goes_with_the_object(self):
        scratch = Scratch("amips-test-")
        path = scratch.path
        (path / "file").write_text("x")
        del scratch
        gc.collect()
        assert not path.exists()

    def test_or_when_it_is_told_to(self):
        scratch = Scratch("amips-test-")
        scratch.remove()
        scratch.remove()
        assert not scratch.path.exists()

    def test_or_when_the_process_ends(self):
        code = "from amips.scratch import Scratch; kept = Scratch('amips-test-'); print(kept.path)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "amips-test-" in done.stdout
        assert not os.path.exists(done.stdout.strip())  # noqa: PTH110

    def test_a_forked_child_leaves_it(self):
        code = (
            "import os, sys; from amips.scratch import Scratch; kept = Scratch('amips-test-')\n"
            "child = os.fork()\n"
            "if not child: sys.exit()\n"
            "os.waitpid(child, 0); print(kept.path.exists())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "True"
