"""Tasks: keys, cells, and split queries with their exact targets, in memory and on disk."""

from amips.task.labelling import label
from amips.task.planning import HELD_OUT
from amips.task.store import TaskStore, load_task
from amips.task.task import BY_ROWS, BY_SOURCE, BY_TIME, SPLITS, Split, Task

__all__ = [
    "BY_ROWS",
    "BY_SOURCE",
    "BY_TIME",
    "HELD_OUT",
    "SPLITS",
    "Split",
    "Task",
    "TaskStore",
    "label",
    "load_task",
]
