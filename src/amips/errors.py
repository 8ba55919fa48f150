"""The errors amips raises: each message is one line that says what is wrong and what to do."""

from typing import Any

from amips.terminal import one_line

LONGEST = 1200  # characters of a message that are shown


class AmipsError(Exception):
    """Base of every error that amips raises on purpose."""

    def __str__(self) -> str:
        # A message may quote a file of someone else: its names, ids, fields, of any length.
        text = one_line(super().__str__())
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class VectorError(AmipsError):
    """Vectors that cannot be read or used: wrong dimension, not finite, empty, truncated."""


class TaskError(AmipsError):
    """A task directory that is unfinished, damaged or does not fit the request."""


class RunError(AmipsError):
    """A training run that cannot start, continue or be read."""


class TrainingDivergedError(RunError):
    """The loss stopped being finite; the last good checkpoint is kept."""


class TrainingInterrupted(RunError):  # noqa: N818  (it is not an error: the user asked for it)
    """Ctrl-C or SIGTERM: the state is saved and the run can be resumed."""


class BundleError(AmipsError):
    """A bundle that is damaged, of another version, or does not fit its keys or its model."""


class ShardsMissingError(AmipsError):
    """Shards did not answer; `answer` has what the others found, and what share is missing."""

    def __init__(self, message: str, answer: Any = None) -> None:
        super().__init__(message)
        self.answer = answer


class ResultsError(AmipsError):
    """Stored results that are damaged, of another version, or of another task."""


class MemoryLimitError(AmipsError, MemoryError):
    """The memory does not suffice for what was asked."""


class DiskFullError(AmipsError, OSError):
    """What was to be written does not fit on the disk, or in the size that files may have."""
