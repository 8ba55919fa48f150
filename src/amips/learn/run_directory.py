"""A run directory: the only module that knows its files.

run/
  config.json              the network, the recipe, the budget, the task: what makes a run the same
  checkpoint.safetensors   the full state, replaced atomically
  log.jsonl                one line for each evaluation, the first before any training
  model.json, model.safetensors    the best weights; there when the run is finished
"""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from amips.errors import RunError
from amips.files import check_output, check_same, locked, read_json, write_atomic, write_json
from amips.learn.checkpoint import CHECKPOINT
from amips.nets import DESCRIPTION, Model, load_model

CONFIG, LOG, LOCK = "config.json", "log.jsonl", ".lock"


class RunDirectory:
    """The directory of a run with these settings: not there yet, begun, or finished."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to continue from."""
        return (self.path / CHECKPOINT).exists()

    def finished(self, resume: bool) -> Model | None:
        """The model, if the run is finished; RunError if the directory is not one that can be trained in."""
        check_output(self.path, RunError, what="a run", marks=[CONFIG])
        if (self.path / CONFIG).exists():
            check_same(self.path, read_json(self.path / CONFIG, RunError), self.config, RunError, "a run")
            if (self.path / DESCRIPTION).exists():
                return load_model(self.path)
            if not resume and self.has_checkpoint:
                raise RunError(
                    f"{self.path} holds an unfinished run; continue it with resume=True (--resume), "
                    "or remove the directory"
                )
        elif resume:
            raise RunError(f"{self.path} holds no run to resume; leave resume out to begin one")
        return None

    def begin(self, step: int, stack: ExitStack) -> None:
        """Make it ready to train in from this step on; `stack` keeps others from training here too."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = RunError(f"{self.path}: another process is training there")
        stack.enter_context(locked(self.path / LOCK, busy))
        write_json(self.path / CONFIG, self.config)
        # Evaluations after the checkpoint will be made again; without one all of them.
        last = step if self.has_checkpoint else -1
        log = self.path / LOG
        lines = log.read_text().splitlines() if log.exists() else []
        write_atomic(log, "".join(line + "\n" for line in lines if _step_of(line) <= last).encode())

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the log."""
        with (self.path / LOG).open("a") as f:
            f.write(json.dumps(line) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line torn by a crash comes after every checkpoint
        return math.inf
