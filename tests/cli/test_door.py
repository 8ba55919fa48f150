"""What goes wrong in a command, whatever raises it: one line and an exit status, no traceback."""

import errno
import sys

import click
import pytest

from amips.cli import run_command


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command that raises `problem`, in its body or while its options are read."""

    def call(problem, early=False):
        def convert(*_):
            if early:
                raise problem
            return "x"

        @click.command()
        @click.argument("word", callback=convert)
        def command(word):
            raise problem

        monkeypatch.setattr(sys, "argv", ["amips", "word"])
        with pytest.raises(SystemExit) as end:
            run_command(command, "stopped; give the command again")
        return end.value.code, capsys.readouterr().err.strip()

    return call


@pytest.mark.parametrize("early", [True, False])
def test_a_file_that_ends_is_no_interrupt(run, early):
    assert run(EOFError(), early) == (1, "error: a file ended unexpectedly: it is cut")
    said = "error: a file ended unexpectedly: read 3 of 8 bytes"
    assert run(EOFError("read 3 of 8 bytes"), early) == (1, said)


def test_an_interrupt_is(run):
    assert run(KeyboardInterrupt()) == (130, "stopped; give the command again")


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MemoryError(), "error: not enough memory: an allocation failed"),
        (RuntimeError("std::bad_alloc"), "error: not enough memory: std::bad_alloc"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "error: cannot write a/b: No space left"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a/b"),
            "error: [Errno 13] Permission denied: 'a/b'",
        ),
    ],
)
def test_memory_and_disk(run, problem, said):
    code, line = run(problem)
    assert code == 1
    assert line.startswith(said)
    assert "\n" not in line


def test_a_bug_is_shown_as_it_is(run):
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())
