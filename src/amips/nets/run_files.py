"""What a training run leaves beside its model, readable without torch: `amips.learn` writes it.

run/
  config.json     the network, the recipe, the budget, the task: what makes a run the same; and, when it is
                  finished, the size and SHA-256 of its model
  log.jsonl       one line for each evaluation, the first before any training
"""

import json
import warnings
from pathlib import Path
from typing import Any

from amips.errors import AmipsError, RunError
from amips.files import read_json, read_manifest, write_manifest
from amips.nets.model import DESCRIPTION, WEIGHTS
from amips.untrusted import inside, read_bounded

RUN_CONFIG, RUN_LOG = "config.json", "log.jsonl"
RUN_FORMAT = 3
LOG_BYTES = 1 << 23  # of a log: an evaluation takes about 1 kB


def is_run(directory: str | Path) -> bool:
    """Whether a directory is of a training run, finished or not."""
    return (Path(directory) / RUN_CONFIG).exists()


def is_unfinished_run(directory: str | Path) -> bool:
    """Whether a run was begun in a directory and did not come to its end: no model, or one not sealed."""
    if not is_run(directory):
        return False
    if not (Path(directory) / DESCRIPTION).exists():
        return True
    return read_json(inside(Path(directory), RUN_CONFIG, RunError), RunError).get("files") == {}


def write_run_config(directory: Path, config: dict[str, Any], *, finished: bool) -> None:
    """Write the settings of a run; at its end with the size and SHA-256 of its model, which seals it."""
    write_manifest(directory, RUN_CONFIG, config, [DESCRIPTION, WEIGHTS] if finished else [])


def read_run_config(directory: str | Path, error: type[AmipsError] = RunError) -> dict[str, Any]:
    """The settings of a run; `error` if they are missing or damaged."""
    config = read_manifest(Path(directory), RUN_CONFIG, "run", RUN_FORMAT, error)
    return {name: value for name, value in config.items() if name not in ("files", "digest")}


def check_run(directory: Path, error: type[AmipsError] = RunError) -> None:
    """`error` unless the model of a finished run is the one that its training wrote."""
    config = read_manifest(directory, RUN_CONFIG, "run", RUN_FORMAT, error, verify=True)
    if not {DESCRIPTION, WEIGHTS} <= config["files"].keys():
        raise error(f"{directory} holds an unfinished run; continue it with resume=True (--resume)")


def read_run_log(directory: str | Path, error: type[AmipsError] = RunError) -> list[dict[str, Any]]:
    """What a run logged: an entry for each evaluation, in order; nothing where there is no log.

    A crash may tear the last line: it is left out. So is every other line that is no entry, with a warning: a
    log is for looking at, and no reason to refuse a run.
    """
    path = inside(Path(directory), RUN_LOG, error)
    lines = read_bounded(path, error, LOG_BYTES).split(b"\n") if path.exists() else []
    entries = [_entry(line) for line in lines]
    wrong = [row for row, entry in enumerate(entries[:-1], 1) if entry is None and lines[row - 1].strip()]
    if wrong:
        rows = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        warnings.warn(f"{path} is damaged: left out line {rows}", stacklevel=2)
    return [entry for entry in entries if entry is not None]


def _entry(line: bytes) -> dict[str, Any] | None:
    """An evaluation: at which step, after how many samples, its metrics on val; None if it is none."""
    try:
        entry = json.loads(line)
        metrics = [*entry["val"].values(), *entry.get("centroid", {}).values()]
        numbers = [entry["step"], entry["samples"], *metrics]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return entry if all(type(number) in (int, float) for number in numbers) else None
