"""The `amips` command: one command for each verb of the Python API."""

import io
import os
import sys

import click

from amips.cli import (  # noqa: F401  (commands join the group)
    bundles,
    change,
    describe,
    export,
    label_fit,
    learn,
    measure,
    planned,
    published,
    serving_commands,
    shards,
    text_commands,
    trust,
    watch,
)
from amips.cli.options import cli, echo, output, path, print_summary, size
from amips.errors import AmipsError, TrainingInterrupted
from amips.resources import plain_resource_errors
from amips.terminal import one_line

__all__ = ["cli", "echo", "main", "output", "path", "print_summary", "run_command", "size"]


def main() -> None:
    """Run `amips`."""
    run_command(cli, "stopped; embed, label, fit and bench continue when the same command is given again")


def run_command(command: click.Command, stopped: str) -> None:
    """Run a command; what goes wrong is one line and an exit code.

    Args:
        stopped: what to say when it was interrupted.
    """
    try:
        with plain_resource_errors():
            command(standalone_mode=False)
    except click.exceptions.Abort as stop:
        if isinstance(stop.__cause__, EOFError):  # click takes the end of a file for the end of the input
            echo(f"error: a file ended unexpectedly: {str(stop.__cause__) or 'it is cut'}", err=True)
            sys.exit(1)
        echo(stopped, err=True)
        sys.exit(130)
    except click.ClickException as problem:
        shown = io.StringIO()
        problem.show(shown)
        echo(shown.getvalue().rstrip("\n"), err=True)
        sys.exit(problem.exit_code)
    except TrainingInterrupted as stop:
        echo(str(stop), err=True)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (AmipsError, OSError, MemoryError) as problem:
        echo(f"error: {one_line(str(problem)) or type(problem).__name__}", err=True)
        sys.exit(1)
