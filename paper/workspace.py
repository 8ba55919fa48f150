"""What the studies share: the data at a scale, and tasks and models that are made once.

out/
  work/           data at this scale, tasks, runs: shared by all studies that are given the same `out`
  STUDY/          summary.json, table.md, figures, and raw runs where a study searches
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from amips.errors import AmipsError, ResultsError, TrainingInterrupted
from amips.files import differing, read_json, write_json
from amips.learn import train
from amips.nets import Recipe
from amips.nets import KeyNet, Linear, Model, SupportNet
from amips.task import Task, label
from amips.vectors import Vectors, open_vectors, row_norms

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Scale:
    """How large a study is. None means: no limit, or what the paper says."""

    name: str
    keys: int | None  # at most so many keys
    queries: int | None  # ... and training queries
    held: int  # queries held out for choosing, and as many for reporting
    copies: int  # noisy copies of each training query
    minutes: float | None  # training of each network, or:
    samples: int | None
    recipe: str
    sizes: tuple[str, ...]  # of networks, where a study varies them
    rounds: int  # times that a time is taken

    @property
    def budget(self) -> str:
        """The training of a network, in words."""
        return f"{self.minutes} minutes" if self.minutes is not None else f"{self.samples:,} samples"


SCALES = {
    "smoke": Scale("smoke", 1500, 2000, 200, 1, None, 4096, "default", ("XS",), 2),
    "small": Scale("small", 100_000, 200_000, 2000, 0, 1.5, None, "default", ("XS", "S"), 3),
    "full": Scale("full", None, None, 1000, 4, None, 1_000_000_000, "paper", ("XS", "S", "M", "L"), 10),
}


class Workspace:
    """Data at a scale and a place to keep what is made of it; nothing is made twice."""

    def __init__(
        self,
        data: str | Path,
        scale: str | Scale,
        out: str | Path,
        seed: int = 0,
        progress: bool = False,
        also: Sequence[str | Path] = (),
    ) -> None:
        if isinstance(scale, str):
            if scale not in SCALES:
                raise AmipsError(f"scale={scale!r}: expected one of {' '.join(SCALES)}")
            scale = SCALES[scale]
        self.scale, self.seed, self.progress = scale, seed, progress
        self.data, self.out = Path(data), Path(out)
        self.also = [Path(other) for other in also]  # data of other encoders, for the study of these
        self.work = self.out / "work"
        self._sources = {name: find(self.data, name) for name in ("keys", "queries")}
        self.work.mkdir(parents=True, exist_ok=True)
        self._claim()

    def _claim(self) -> None:
        """Refuse a place that holds the work of other data or of another scale."""
        wanted = {"scale": asdict(self.scale), "seed": self.seed}
        for name, (path, _) in self._sources.items():
            wanted[name] = {"file": path.name, "bytes": path.stat().st_size, "content": _glance(path)}
        wanted = json.loads(json.dumps(wanted))
        path = self.work / SETTINGS
        if not path.exists():
            write_json(path, wanted)
        elif different := differing(read_json(path, ResultsError), wanted):
            raise ResultsError(
                f"{self.out} holds studies of other data or settings ({different} differ); choose another out"
            )

    @cached_property
    def keys(self) -> Vectors:
        """The keys: all of them, or as many as the scale allows, drawn at random."""
        return self._vectors("keys", self.scale.keys)

    @cached_property
    def queries(self) -> Vectors:
        """The queries, held-out ones included."""
        most = None if self.scale.queries is None else self.scale.queries + 2 * self.scale.held
        return self._vectors("queries", most)

    def _vectors(self, name: str, most: int | None) -> Vectors:
        path = self.work / f"{name}.npy"
        if not path.exists():
            source, scaled = self._sources[name]
            rows = open_vectors(source, name)
            ids = np.arange(rows.n)
            if most is not None and rows.n > most:
                ids = np.sort(np.random.default_rng([self.seed, len(name)]).choice(rows.n, most, False))
            partial = path.with_name(f"{name}.partial.npy")
            out = open_memmap(partial, "w+", np.float32, (len(ids), rows.d))
            step = 1 << 14
            for low in range(0, len(ids), step):
                block = rows.take(ids[low : low + step])
                if scaled:
                    norms = row_norms(block)[:, None]
                    block /= np.where(norms > 0, norms, 1)  # an all-zero row stays one, for `label` to name
                out[low : low + step] = block
            out.flush()
            partial.rename(path)
        return open_vectors(path, name)

    @cached_property
    def split(self) -> NDArray[np.str_]:
        """A fixed permutation: test first, then val, the rest is for training."""
        m, held = self.queries.n, self.scale.held
        if m < 3 * held:
            held = max(1, m // 3)
        order = np.random.default_rng(1).permutation(m)
        split = np.full(m, "train", "<U5")
        split[order[:held]], split[order[held : 2 * held]] = "test", "val"
        return split

    def task(self, cells: int = 1, **options: Any) -> Task:
        """A task of this data; options as for `label`."""
        settings = {
            "copies": self.scale.copies,
            "k": 10,
            "split": self.split,
            "seed": self.seed,
            **options,
        }
        about = {**settings, "split": hashlib.sha256(settings["split"].tobytes()).hexdigest()}
        name = f"task-{cells}-{_digest(about)}"
        return label(
            self.keys, self.queries, out=self.work / name, cells=cells, progress=self.progress, **settings
        )

    def mapping_task(self) -> Task:
        """One cell, and at least one noisy copy of each query: the paper trains its mappers with noise."""
        return self.task(1, copies=max(1, self.scale.copies))

    def model(
        self,
        task: Task,
        network: SupportNet | KeyNet | Linear,
        name: str,
        recipe: str | Recipe | None = None,
        share: float = 1.0,
        evaluations: int = 10,
    ) -> Model:
        """A network trained on a task for `share` of the scale's budget; an unfinished run continues."""
        out = self.run_directory(name, task)
        scale = self.scale
        minutes = None if scale.minutes is None else scale.minutes * share
        samples = None if scale.samples is None else max(1, round(scale.samples * share))
        try:
            return train(
                task,
                network,
                out=out,
                recipe=recipe or scale.recipe,
                minutes=minutes,
                samples=samples,
                evaluations=evaluations,
                seed=self.seed,
                resume=(out / "config.json").exists(),
                progress=self.progress,
            )
        except TrainingInterrupted:
            raise TrainingInterrupted("stopped; the same command continues where it was") from None

    def run_directory(self, name: str, task: Task) -> Path:
        """Where a run is kept."""
        return self.work / f"run-{name}-{task.path.name}"

    def linear(self, task: Task, share: float = 0.5, rank: int = 0) -> Model:
        """The linear router, which learns the cells of the top keys: half the budget of a network."""
        recipe = Recipe(route_top=min(10, task.train.top_ids.shape[1]))
        name = _linear_name(task, rank)
        return self.model(task, Linear(rank=rank), name, recipe, share, evaluations=1)

    def linear_directory(self, task: Task, rank: int = 0) -> Path:
        """Where the run of `linear` is kept."""
        return self.run_directory(_linear_name(task, rank), task)


def _linear_name(task: Task, rank: int) -> str:
    return f"linear-{task.c}" + (f"-rank-{rank}" if rank else "")


def find(data: Path, name: str) -> tuple[Path, bool]:
    """The file of `name` ("keys" or "queries") in a data directory, and whether rows are to be normalised.

    `NAME.i8.npy` holds int8 rows of a scale of their own; any other format is taken as it is.
    """
    if not data.is_dir():
        raise AmipsError(f"{data} is not a directory: expected one with keys.npy and queries.npy")
    # Texts lie beside their vectors, as `embed` leaves them.
    found = sorted(p for p in data.glob(f"{name}.*") if p.is_file() and p.suffix != ".jsonl")
    if not found:
        raise AmipsError(f"{data} holds no {name}: expected {name}.npy, {name}.i8.npy, {name}.fvecs, ...")
    if len(found) > 1:
        raise AmipsError(f"{data} holds more than one file of {name}: {found[0].name}, {found[1].name}")
    return found[0], found[0].name == f"{name}.i8.npy"


def _glance(path: Path) -> str:
    """A digest of 64 pieces spread evenly over a file: tells other data of the same size, whatever it is."""
    size, piece = path.stat().st_size, 1 << 14
    digest = hashlib.sha256()
    with path.open("rb") as f:
        for start in np.linspace(0, max(0, size - piece), 64, dtype=np.int64).tolist():
            f.seek(start)
            digest.update(f.read(piece))
    return digest.hexdigest()[:16]


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
