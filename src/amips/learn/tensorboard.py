"""The log of a run for TensorBoard, beside the JSON lines and made of them."""

import shutil
from pathlib import Path
from typing import Any

from amips.arguments import check_flag
from amips.errors import RunError
from amips.extras import check_extra, needs_extra

OPTION = "tensorboard=True (--tensorboard)"
EVENTS = "tensorboard"  # in the run directory


def check_tensorboard(wanted: Any, out: Any) -> bool:
    """Whether to log for TensorBoard; AmipsError if that cannot be done, before any work is."""
    if not check_flag("tensorboard", wanted, error=RunError):
        return False
    check_extra(OPTION, "tensorboard", "tensorboard")
    if out is None:
        raise RunError("tensorboard: give the directory of the run, as out")
    return True


class Events:
    """Event files of a run, samples along the axis: train/loss, val/scan@0.95, centroid/scan@0.95, ..."""

    def __init__(self, run: Path, entries: list[dict[str, Any]]) -> None:
        """Begin anew with these entries of the log: those after a checkpoint that is resumed are gone."""
        with needs_extra(OPTION, "tensorboard", "tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        shutil.rmtree(run / EVENTS, ignore_errors=True)
        self.writer = SummaryWriter(str(run / EVENTS))
        for entry in entries:
            self.add(entry)

    def add(self, entry: dict[str, Any]) -> None:
        """One line of the log."""
        scalars = {
            f"{group}/{name}": value
            for group in ("train", "val", "centroid")
            for name, value in entry.get(group, {}).items()
        }
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, entry["samples"])
        self.writer.flush()

    def close(self) -> None:
        """Close the files."""
        self.writer.close()
