"""The `amips` command: one command for each verb of the Python API."""

import os
import sys

import click

from amips.cli import (  # noqa: F401  (commands join the group)
    bundles,
    describe,
    export,
    label_fit,
    learn,
    measure,
    text_commands,
)
from amips.cli.options import cli, output, path, print_summary, size
from amips.errors import AmipsError, TrainingInterrupted

__all__ = ["cli", "main", "output", "path", "print_summary", "run_command", "size"]


def main() -> None:
    """Run `amips`."""
    run_command(cli, "stopped; embed, label, fit and bench continue when the same command is given again")


def run_command(command: click.Command, stopped: str) -> None:
    """Run a command; what goes wrong is one line and an exit code.

    Args:
        stopped: what to say when it was interrupted.
    """
    try:
        command(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo(stopped, err=True)
        sys.exit(130)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except TrainingInterrupted as stop:
        click.echo(str(stop), err=True)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (AmipsError, OSError, MemoryError) as problem:
        click.echo(f"error: {problem or type(problem).__name__}", err=True)
        sys.exit(1)
