"""What tests of the paper's experiments share."""

import subprocess
import sys

import pytest

from paper.__main__ import main


@pytest.fixture
def paper_command(monkeypatch, capfd):
    """`python -m paper ARGUMENTS` without a new process: its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["python -m paper", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return subprocess.CompletedProcess(arguments, code or 0, *capfd.readouterr())

    return run
