"""A small sample of the log that an index was fitted on: what traffic is compared with, and refits mix in.

logtrain.npy     float16 [m, d]: queries that it learned from, at norm 1
logval.npy       float16 [v, d]: queries that were held out, at norm 1
logtop.npy       int32 [m, 10]: the top keys of the former by number, best first; -1 of one that has gone
logrounds.npy    int16 [m + v]: the fit (0) or refit (1, 2, ...) that each came with
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.arguments import check_whole
from amips.errors import BundleError
from amips.index import read_array
from amips.metrics import TOP
from amips.npy import save_npy
from amips.task import Split, Task
from amips.vectors import Floats, unit_rows

Halves = NDArray[np.float16]
Rounds = NDArray[np.int16]
Lists = NDArray[np.int32]

LOG_FILES = ["logtrain.npy", "logval.npy", "logrounds.npy", "logtop.npy"]
KEEP_LOG = 10_000  # training queries that are kept by default
HELD_OUT_PARTS = 5  # for each held-out query that is kept, so many to learn from
FEW_REPEATS = 0.01  # of queries that are different, but equal in float16
REFERENCE = 200  # held-out queries of the last round, with fewer of which older ones count, too


@dataclass(frozen=True)
class QueryLog:
    """Queries of the log, to learn from and held out, the round that each came with, and what they want."""

    train: Halves
    val: Halves
    train_rounds: Rounds
    val_rounds: Rounds
    top: Lists

    @classmethod
    def of(cls, task: Task, most: int = KEEP_LOG, seed: int = 0) -> "QueryLog | None":
        """A sample of a task's train and val queries: at most so many, and a fifth of that; None of 0."""
        if most <= 0:
            return None
        rng = np.random.default_rng([seed, 29])
        rows = _drawn(task.train, most, rng)
        train = halves(task.train.vectors.take(rows))
        val = halves(task.val.vectors.take(_drawn(task.val, -(-most // HELD_OUT_PARTS), rng)))
        top = np.asarray(task.train.top_ids)[rows, :TOP].astype(np.int32)
        return cls(train, val, np.zeros(len(train), np.int16), np.zeros(len(val), np.int16), top)

    @property
    def d(self) -> int:
        """The dimension."""
        return int(self.train.shape[1])

    @property
    def bytes(self) -> int:
        """What it takes on disk and in memory."""
        return sum(a.nbytes for a in (self.train, self.val, self.train_rounds, self.val_rounds, self.top))

    @cached_property
    def reference(self) -> Floats:
        """What traffic should look like: the held-out queries of the last round, float32 at norm 1."""
        newest = self.val_rounds == self.val_rounds.max(initial=0)
        rows = newest if newest.sum() >= REFERENCE else np.ones(len(newest), np.bool_)
        return unit_rows(self.val[rows].astype(np.float32))[0]

    @cached_property
    def repeats(self) -> bool:
        """Whether a query is in the reference as often as it was asked: of a log that was split by time."""
        return len(np.unique(self.reference, axis=0)) < (1 - FEW_REPEATS) * len(self.reference)

    def older(self, seed: int = 0) -> tuple[Floats, Lists]:
        """Training queries to learn from again, float32 at norm 1, and their top keys, best first, [m, 10].

        Of those that came with the round before, and so on back, half as many each time. A key that has gone
        is -1.
        """
        ages = (self.train_rounds.max(initial=0) - self.train_rounds).astype(np.float64)
        lucky = np.random.default_rng([seed, 31]).random(len(ages)) < np.exp2(-ages)
        rows = np.flatnonzero(lucky)
        return unit_rows(self.train[rows].astype(np.float32))[0], self.top[rows]

    def renumbered(self, kept: NDArray[np.int64], n: int) -> "QueryLog":
        """The same where of n keys these are left, numbered anew."""
        numbers = np.full(n + 1, -1, np.int32)
        numbers[kept] = np.arange(len(kept))
        return replace(self, top=numbers[self.top])

    def followed_by(
        self, train: Floats, top: Lists, val: Floats, most: int = KEEP_LOG, seed: int = 0
    ) -> "QueryLog":
        """With the queries of another round: up to half of the room is theirs, more if it is free."""
        number = np.int16(1 + max(int(self.train_rounds.max(initial=0)), int(self.val_rounds.max(initial=0))))
        rng = np.random.default_rng([seed, 37, int(number)])
        most_val = -(-most // HELD_OUT_PARTS)
        old, new = _rows(len(self.train), len(train), most, rng)
        old_val, new_val = _rows(len(self.val), len(val), most_val, rng)
        width = min(self.top.shape[1], top.shape[1]) if len(self.top) else top.shape[1]
        return QueryLog(
            np.concatenate([self.train[old], halves(train[new])]),
            np.concatenate([self.val[old_val], halves(val[new_val])]),
            np.concatenate([self.train_rounds[old], np.full(len(new), number, np.int16)]),
            np.concatenate([self.val_rounds[old_val], np.full(len(new_val), number, np.int16)]),
            np.concatenate([self.top[old, :width], top[new, :width]]).astype(np.int32),
        )

    def save(self, directory: Path) -> list[str]:
        """Write the files above; their names."""
        arrays: list[NDArray[Any]] = [self.train, self.val]
        arrays += [np.concatenate([self.train_rounds, self.val_rounds]), self.top]
        for file, array in zip(LOG_FILES, arrays, strict=True):
            save_npy(directory / file, array)
        return list(LOG_FILES)

    @classmethod
    def load(cls, directory: Path, n: int, d: int) -> "QueryLog":
        """Read what `save` wrote for n keys of dimension d, and check it."""
        paths = [directory / file for file in LOG_FILES]
        train, val = (read_array(path, np.float16, (None, d)) for path in paths[:2])
        rounds = read_array(paths[2], np.int16, (len(train) + len(val),))
        for path, queries in zip(paths, (train, val), strict=False):
            if not np.isfinite(queries).all():
                raise BundleError(f"{path} is damaged: it has values that are not finite")
        if rounds.min(initial=0) < 0:
            raise BundleError(f"{paths[2]} is damaged: a round is less than 0")
        top = read_array(paths[3], np.int32, (len(train), None))
        if top.min(initial=0) < -1 or top.max(initial=0) >= n:
            raise BundleError(f"{paths[3]} is damaged: it names a key that is not there")
        return cls(train, val, rounds[: len(train)], rounds[len(train) :], top)


def _drawn(split: Split, most: int, rng: "np.random.Generator") -> NDArray[np.int64]:
    """At most so many rows of a split, one of each source: noisy copies are no new evidence."""
    rows = np.sort(np.unique(np.asarray(split.source), return_index=True)[1])
    if len(rows) > most:
        rows = np.sort(rng.choice(rows, most, replace=False))
    return rows


def halves(queries: Floats) -> Halves:
    """Queries [m, d] at norm 1, in float16."""
    return unit_rows(np.asarray(queries, np.float32))[0].astype(np.float16)


def _rows(
    old: int, new: int, most: int, rng: "np.random.Generator"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of so many old and new queries are kept, if there is room for `most`."""
    room = max(most - old, most // 2)
    fresh = np.sort(rng.choice(new, min(new, room), replace=False))
    kept = np.sort(rng.choice(old, min(old, most - len(fresh)), replace=False))
    return kept.astype(np.int64), fresh.astype(np.int64)


def checked_keep_log(value: Any) -> int:
    """How many training queries to keep: a number, True for the default, False for none."""
    if isinstance(value, bool | np.bool_):
        return KEEP_LOG if value else 0
    return check_whole("keep_log", value, 0)
