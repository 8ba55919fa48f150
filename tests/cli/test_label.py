"""`amips label` as a user types it."""

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

import amips
from amips.cells import default_count
from amips.cli import main, size
from amips.task import load_task
from helpers import journal_rows, kill_when, make_world

AMIPS = shutil.which("amips", path=str(Path(sys.executable).parent)) or shutil.which("amips")
OPTIONS = ("--cells", "4", "--copies", "1", "--val", "50", "--test", "60", "-k", "7")


def amips_command(*arguments, cwd):
    return subprocess.run([AMIPS, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def in_process(folder, monkeypatch, capfd):
    """The same command without a new process, which would take most of the time."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["amips", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return subprocess.CompletedProcess(sys.argv, code, *capfd.readouterr())

    return run


def one_line_error(done, match, code=1):
    """It ends with this exit code and says why in one line, without a traceback."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert re.search(match, done.stderr), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys and queries in files."""
    folder = tmp_path_factory.mktemp("cli")
    keys, queries = make_world(500, 400, 12, seed=0)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", np.concatenate([queries, queries[:9]]))
    broken = keys.copy()
    broken[17, 3] = np.inf
    np.save(folder / "broken.npy", broken)
    broken[17] = 0
    np.save(folder / "zero.npy", broken)
    np.save(folder / "narrow.npy", queries[:, :5])
    (folder / "cut.npy").write_bytes((folder / "keys.npy").read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def labelled(folder):
    """What `amips label` printed, and the task that it wrote."""
    done = amips_command("label", "keys.npy", "queries.npy", "--out", "task", *OPTIONS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, load_task(folder / "task", verify=True)


def test_makes_the_task_that_the_python_function_makes(folder, labelled, tmp_path):
    _, task = labelled
    names = (folder / "keys.npy", folder / "queries.npy")
    same = amips.label(
        *names, cells=4, copies=1, val=50, test=60, k=7, memory=task.options["memory"], out=tmp_path / "t"
    )
    files = [file.relative_to(task.path) for file in sorted(task.path.rglob("*")) if file.is_file()]
    assert files
    for file in files:
        assert (same.path / file).read_bytes() == (task.path / file).read_bytes()


def test_on_a_device_it_makes_the_same_task(folder, labelled, tmp_path, in_process):
    _, task = labelled
    names = ("label", "keys.npy", "queries.npy", "--out")
    done = in_process(*names, tmp_path / "t", *OPTIONS, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    same = load_task(tmp_path / "t", verify=True)
    assert same.options == task.options
    for one, two in ((same.train, task.train), (same.val, task.val), (same.test, task.test)):
        assert np.array_equal(one.top_ids, two.top_ids)
    one_line_error(
        in_process(*names, tmp_path / "u", "--device", "cuda:99"), "device='cuda:99' cannot be used"
    )
    assert not (tmp_path / "u").exists()


def test_prints_what_it_made(labelled):
    done, task = labelled
    lines = done.stdout.splitlines()
    assert lines[0] == "task: 500 keys, d = 12, 4 cells"
    assert lines[1] == f"imbalance {task.cells.imbalance:.2f}, duplicate queries 9"
    assert [line.split() for line in lines[-3:]] == [["train", "580"], ["val", "50"], ["test", "60"]]
    assert done.stderr == ""  # no progress bar where there is no terminal


def test_the_same_command_again_reuses_the_task(folder, labelled):
    before = {p: p.stat().st_mtime_ns for p in (folder / "task").rglob("*")}
    done = amips_command("label", "keys.npy", "queries.npy", "--out", "task", *OPTIONS, cwd=folder)
    assert done.returncode == 0
    assert done.stdout == labelled[0].stdout
    assert {p: p.stat().st_mtime_ns for p in (folder / "task").rglob("*")} == before


def test_every_option_reaches_the_task(folder, tmp_path):
    done = amips_command(
        *("label", folder / "zero.npy", folder / "queries.npy", "--out", tmp_path / "t", "--cells", 3),
        *("--plain", "--runs", 2, "--copies", 3, "--noise", 0.1, "--val", 11, "--test", 12, "-k", 5),
        *("--cell-targets", "--seed", 8, "--keep-zero", "--memory", "64M"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    task = load_task(tmp_path / "t")
    expected = {
        "cells": 3,
        "spherical": False,
        "runs": 2,
        "copies": 3,
        "noise": 0.1,
        "val": 11,
        "test": 12,
        "k": 5,
        "cell_targets": True,
        "seed": 8,
        "memory": 64_000_000,
    }
    assert {name: task.options[name] for name in expected} == expected
    assert len(task.train) == 4 * (400 - 23)


def test_without_options_it_makes_the_measured_recipe(folder, tmp_path):
    done = amips_command("label", "keys.npy", "queries.npy", "--out", tmp_path / "t", cwd=folder)
    assert done.returncode == 0, done.stderr
    same = amips.label(folder / "keys.npy", folder / "queries.npy", memory=10**9)
    assert load_task(tmp_path / "t").options == same.options
    assert (same.c, same.query_aware, same.options["copies"]) == (default_count(500), 1.5, 0)
    paper = amips_command(
        "label", "keys.npy", "queries.npy", "--out", tmp_path / "p", "--preset", "paper", cwd=folder
    )
    assert paper.returncode == 0, paper.stderr
    options = load_task(tmp_path / "p").options
    assert (options["cells"], options["copies"], options["cell_targets"]) == (1, 4, True)


def test_a_split_of_its_own(folder, tmp_path):
    words = np.array(["train"] * 300 + ["val"] * 60 + ["test"] * 49)
    (tmp_path / "split.txt").write_text("".join(f"{word}\n" for word in words))
    command = ("label", "keys.npy", "queries.npy", "--out", tmp_path / "t", "--split", tmp_path / "split.txt")
    done = amips_command(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    task = load_task(tmp_path / "t")
    assert [len(split) for split in (task.train, task.val, task.test)] == [300, 60, 40]


def test_a_way_to_split_that_there_is_not(in_process, folder):
    done = in_process("label", "keys.npy", "queries.npy", "--out", "t", "--split", "day")
    one_line_error(done, "^error: --split day: expected source, rows, time, or a file that exists$")


def test_an_address_as_output_is_refused(in_process, folder):
    done = in_process("label", "keys.npy", "queries.npy", "--out", "s3://bucket/task")
    one_line_error(
        done,
        "^error: s3://bucket/task is an address, not a directory: write locally and `amips publish` it",
    )
    assert not (folder / "s3:").exists()


def test_an_unexpected_end_of_a_file_is_an_error_and_no_interrupt(in_process, monkeypatch):
    def end(*_, **__):
        raise EOFError("no more data")

    monkeypatch.setattr(amips, "label", end)
    one_line_error(in_process("label", "keys.npy", "queries.npy", "--out", "t"), "no more data")


def test_an_interrupt_says_how_to_continue(in_process, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(amips, "label", stop)
    done = in_process("label", "keys.npy", "queries.npy", "--out", "t")
    assert done.returncode == 130
    assert "continue when the same command is given again" in done.stderr


@pytest.mark.parametrize(
    ("keys", "queries", "match"),
    [
        ("none.npy", "queries.npy", r"none\.npy does not exist"),
        ("keys.npy", "none.fbin", r"none\.fbin does not exist"),
        ("cut.npy", "queries.npy", r"cut\.npy is damaged: it has 24,028 bytes, its header says 24,128"),
        ("broken.npy", "queries.npy", r"broken\.npy: row 17 has a value that is infinite"),
        ("zero.npy", "queries.npy", r"zero\.npy: row 17 is all zero.*--keep-zero"),
        ("keys.npy", "narrow.npy", "keys have dimension 12 but queries have dimension 5"),
        ("keys.npy", "..", "is a directory"),
        (".", "queries.npy", "is a directory"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(in_process, tmp_path, keys, queries, match):
    one_line_error(in_process("label", keys, queries, "--out", tmp_path / "t", *OPTIONS), match)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--val", "300", "--test", "200"), "400 distinct queries are too few"),
        (("--cells", "0"), "cells=0"),
        (("--cells", "501"), "between 1 and the 500 keys"),
        (("--seed", "-1"), "seed=-1"),
        (("--noise", "nan"), "noise=nan"),
        (("--memory", "10K"), "memory=10000 bytes is too little"),
        (("--memory", "-1G"), "memory=-1000000000: expected a whole number, at least 1"),
        (("--copies", "-2"), "copies=-2"),
    ],
)
def test_what_is_wrong_with_a_request_is_one_line_and_leaves_nothing(in_process, tmp_path, options, match):
    """So the corrected command does not find the remains of the wrong one."""
    command = ("label", "keys.npy", "queries.npy", "--out", tmp_path / "t", *OPTIONS)
    one_line_error(in_process(*command, *options), match)
    assert not (tmp_path / "t").exists()


def test_an_error_of_the_installed_command(folder, tmp_path):
    for keys in ("none.npy", "cut.npy", "broken.npy"):
        done = amips_command("label", keys, "queries.npy", "--out", tmp_path / "t", *OPTIONS, cwd=folder)
        one_line_error(done, re.escape(keys))
    done = amips_command("label", keys, "queries.npy", "--nonsense", cwd=folder)
    assert done.returncode == 2
    assert "--nonsense" in done.stderr


def test_a_directory_in_use_is_left_alone(folder, labelled, in_process, tmp_path):
    files = ("label", "keys.npy", "queries.npy", "--out")
    done = in_process(*files, "task", *OPTIONS, "--cells", "5")
    one_line_error(done, "holds a task of other inputs or options")
    load_task(folder / "task", verify=True)
    one_line_error(in_process(*files, folder, *OPTIONS), "exists and is not a task")
    (tmp_path / "file").write_text("")
    one_line_error(in_process(*files, tmp_path / "file" / "t", *OPTIONS), "file")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("label",), "Missing argument 'KEYS'"),
        (("label", "keys.npy"), "Missing argument 'QUERIES'"),
        (("label", "keys.npy", "queries.npy"), "Missing option '--out'"),
        (("label", "keys.npy", "queries.npy", "--out", "t", "--cells", "many"), "--cells"),
        (("label", "keys.npy", "queries.npy", "--out", "t", "--memory", "much"), "'much' is not a size"),
        (("label", "keys.npy", "queries.npy", "--out", "t", "--memory", "inf"), "'inf' is not a size"),
        (("label", "keys.npy", "queries.npy", "--out", "t", "--nonsense"), "--nonsense"),
        (("nonsense",), "nonsense"),
    ],
)
def test_usage_errors(folder, in_process, arguments, match):
    done = in_process(*arguments)
    assert done.returncode == 2
    assert match in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "t").exists()


def test_help_and_version(folder):
    done = amips_command("label", "--help", cwd=folder)
    assert done.returncode == 0
    for option in ("--out", "--cells", "--copies", "--noise", "--memory", "--keep-zero", "[default: 0.02]"):
        assert option in done.stdout
    done = amips_command("--version", cwd=folder)
    assert (done.returncode, done.stdout) == (0, f"amips, version {amips.__version__}\n")


def test_python_dash_m(folder, labelled):
    done = subprocess.run(
        [sys.executable, "-m", "amips", "label", "keys.npy", "queries.npy", "--out", "task", *OPTIONS],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, labelled[0].stdout)


def test_labelling_does_not_import_torch(folder, labelled):
    code = (
        "import sys; from amips.cli import cli\n"
        f"cli(['label', 'keys.npy', 'queries.npy', '--out', 'task', *{OPTIONS!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Enough work to be interrupted."""
    folder = tmp_path_factory.mktemp("larger")
    keys, queries = make_world(6000, 12_000, 16, seed=1)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries)
    return folder


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_continues_with_the_same_command(larger, tmp_path, how):
    command = [AMIPS, "label", "keys.npy", "queries.npy", "--out", str(tmp_path / "t"), "--memory", "4M"]
    command += ["--cells", "10", "--copies", "1", "--val", "100", "--test", "100"]
    # A shell starts what runs in its background with interrupts ignored, and so would this be.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, cwd=larger, stderr=subprocess.PIPE, text=True, **heard)
    if how == signal.SIGKILL:
        kill_when(process, lambda: journal_rows(tmp_path / "t" / "train" / "top") > 0)
        process.stderr.close()
    else:
        while journal_rows(tmp_path / "t" / "train" / "top") == 0:
            assert process.poll() is None
        process.send_signal(how)
        _, message = process.communicate(timeout=60)
        assert process.returncode == 130
        assert message.strip().startswith(
            "stopped; embed, label, fit and bench continue when the same command"
        )
    assert not (tmp_path / "t" / "task.json").exists()
    done = subprocess.run(command, cwd=larger, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(load_task(tmp_path / "t", verify=True).train) == 2 * 11_800


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a pseudo-terminal")
def test_a_progress_bar_on_a_terminal(larger, tmp_path):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    command = [AMIPS, "label", "keys.npy", "queries.npy", "--out", str(tmp_path / "t"), "--memory", "4M"]
    with subprocess.Popen(command, cwd=larger, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert b"top keys" in shown
    assert b"queries/s" in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("64M", 64_000_000),
        ("2G", 2 * 10**9),
        ("1.5k", 1500),
        ("3TB", 3 * 10**12),
        ("10mb", 10**7),
    ],
)
def test_sizes(text, expected):
    assert size(text) == expected
