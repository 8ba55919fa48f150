"""Tasks: keys, cells, and split queries with their exact targets, on disk."""

from amips.task.make import label
from amips.task.store import Split, Task

__all__ = ["Split", "Task", "label"]
