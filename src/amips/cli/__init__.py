"""The `amips` command: one command for each verb of the Python API."""

import sys

import click

import amips
from amips.cli import learning, measuring, searching, text_commands  # noqa: F401  (commands join the group)
from amips.cli.options import cli, size

__all__ = ["cli", "main", "size"]


def main() -> None:
    """Run the command; what goes wrong is one line."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo(
            "stopped; embed, label, fit, bench and study continue when the same command is given again",
            err=True,
        )
        sys.exit(130)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except amips.TrainingInterrupted as stop:
        click.echo(str(stop), err=True)
        sys.exit(130)
    except (amips.AmipsError, OSError, MemoryError) as problem:
        click.echo(f"error: {problem or type(problem).__name__}", err=True)
        sys.exit(1)
