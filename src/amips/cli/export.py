"""export: a trained model for other runtimes."""

from pathlib import Path

import click

from amips.cli.options import cli, echo, output_file, path
from amips.nets import load_model, to_onnx


@cli.command()
@click.argument("run", type=path)
@click.option("--out", required=True, type=output_file, help="The ONNX file to write or replace.")
def export(run: Path, out: Path) -> None:
    """Write the model of RUN as an ONNX file: queries in, scores of cells out, of a KeyNet also the keys."""
    model = load_model(run)
    to_onnx(model, out)
    keys = " and keys" if model.architecture.kind == "key" else ""
    echo(f"{out}: {model.architecture.kind}, queries [m, {model.d}] to scores [m, {model.c}]{keys}")
