"""What the experiments share: the data at a scale, and tasks and models that are made once.

out/
  work/          data at this scale, tasks, runs: shared by all experiments that are given the same `out`
  EXPERIMENT/    summary.json, table.md, figures, and raw runs where an experiment searches
"""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from amips import label, train
from amips.cells import Cells, kmeans
from amips.errors import AmipsError, ResultsError, TrainingInterrupted
from amips.files import begin_output, partial
from amips.nets import KeyNet, Model, Recipe, SupportNet, recipe_named
from amips.task import BY_ROWS, BY_SOURCE, Task
from amips.vectors import Vectors, first_equal, open_vectors, row_norms
from paper.pool import COPIES, Pool, draw_pool, pool_view, write_rows

SETTINGS = "settings.json"
SPLITS_BY = (BY_ROWS, BY_SOURCE)  # the paper's first


@dataclass(frozen=True)
class Scale:
    """How large an experiment is. None means: no limit, or what the paper says."""

    name: str
    keys: int | None  # at most so many keys
    queries: int | None  # ... and training queries
    held_out: int  # queries for choosing, and as many for reporting
    copies: int  # noisy copies of each training query
    minutes: float | None  # training of each network, or:
    samples: int | None
    recipe: str
    sizes: tuple[str, ...]  # of networks, where an experiment varies them
    rounds: int  # times that a time is taken
    router_minutes: float  # training of each linear router, at most: it ends when val stops improving
    sources: int | None = None  # queries that the paper's split is made of, with `copies` each

    @property
    def budget(self) -> str:
        """The training of a network, in words."""
        return f"{self.minutes} minutes" if self.minutes is not None else f"{self.samples:,} samples"


SCALES = {
    "smoke": Scale("smoke", 1500, 2000, 200, 1, None, 4096, "default", ("XS",), 2, 0.02),
    "small": Scale("small", 100_000, 200_000, 2000, 0, 1.5, None, "default", ("XS", "S"), 3, 0.75),
    # The paper's ratios (parameters and samples for each source query), not its sizes: see paper/ratios.py.
    "replica": Scale(
        "replica", 20_000, 20_000, 1000, 32, None, 150_000, "default", ("S",), 3, 0.2, sources=300
    ),
    # The paper's headline at a tenth of its keys: the queries of the log that a network can know by heart.
    "replica100k": Scale(
        "replica100k", 100_000, 20_000, 1000, 32, None, 13_600_000, "default", ("XS",), 2, 0.2, sources=3000
    ),
    "full": Scale("full", None, None, 1000, 4, None, 1_000_000_000, "paper", ("XS", "S", "M", "L"), 10, 30.0),
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
        times: bool = True,
        device: str | None = None,
    ) -> None:
        if isinstance(scale, str):
            if scale not in SCALES:
                raise AmipsError(f"scale={scale!r}: expected one of {' '.join(SCALES)}")
            scale = SCALES[scale]
        self.scale, self.seed, self.progress = scale, seed, progress
        self.data, self.out = Path(data), Path(out)
        self.times = times  # whether experiments that search take times, too
        self.device = device  # of labelling and training; None is the CPU
        self.also = [Path(other) for other in also]  # data of other encoders, for `encoders`
        self.split_by = BY_SOURCE  # how queries are held out; `by` changes it
        self._trained_on: dict[Path, Task] = {}  # of tasks with two splits the one that networks learn from
        self.work = self.out / "work"
        self._sources = {name: find(self.data, name) for name in ("keys", "queries")}
        self._check_place()

    def _check_place(self) -> None:
        """Refuse a place that holds the work of other data or of another scale."""
        wanted = {"scale": asdict(self.scale), "seed": self.seed}
        for name, (path, _) in self._sources.items():
            wanted[name] = {"file": path.name, "bytes": path.stat().st_size, "content": _glance(path)}
        begin_output(self.work, wanted, ResultsError, what="work", mark=SETTINGS)

    @cached_property
    def keys(self) -> Vectors:
        """The keys: all of them, or as many as the scale allows, drawn at random."""
        return self._vectors("keys", self.scale.keys)

    @cached_property
    def queries(self) -> Vectors:
        """The queries, held-out ones included."""
        most = None if self.scale.queries is None else self.scale.queries + 2 * self.scale.held_out
        return self._vectors("queries", most)

    def _vectors(self, name: str, most: int | None) -> Vectors:
        path = self.work / f"{name}.npy"
        if not path.exists():
            source, scaled = self._sources[name]
            rows = open_vectors(source, name)
            ids = np.arange(rows.n)
            if most is not None and rows.n > most:
                ids = np.sort(np.random.default_rng([self.seed, len(name)]).choice(rows.n, most, False))
            with partial(path) as temporary:
                out = open_memmap(temporary, "w+", np.float32, (len(ids), rows.d))
                step = 1 << 14
                for low in range(0, len(ids), step):
                    block = rows.take(ids[low : low + step])
                    if scaled:
                        norms = row_norms(block)[:, None]
                        block /= np.where(
                            norms > 0, norms, 1
                        )  # an all-zero row stays one, for `label` to name
                    out[low : low + step] = block
                out.flush()
        return open_vectors(path, name)

    @cached_property
    def split(self) -> NDArray[np.str_]:
        """A fixed permutation: test first, then val, the rest is for training."""
        m, size = self.queries.n, self.scale.held_out
        if m < 3 * size:
            size = max(1, m // 3)
        order = np.random.default_rng(1).permutation(m)
        split = np.full(m, "train", "<U5")
        split[order[:size]], split[order[size : 2 * size]] = "test", "val"
        return split

    def by(self, split: str) -> "Workspace":
        """The same place, with queries held out by "source", or by "rows", as in the paper."""
        if split not in SPLITS_BY:
            raise AmipsError(f"split={split!r}: expected one of {' '.join(SPLITS_BY)}")
        other = copy.copy(self)
        other.split_by = split
        return other

    def results(self, name: str) -> Path:
        """Where an experiment stores its runs, NAME or NAME/PART: a place for each split, with all parts."""
        own, _, part = name.partition("/")
        place = self.out / (own if self.split_by == BY_SOURCE else f"{own}-by-{self.split_by}")
        return place / part if part else place

    @cached_property
    def pool(self) -> Pool:
        """The rows that both splits are made of."""
        scale = self.scale
        copies = max(COPIES, scale.copies)
        # Half as many rows as the scale has training queries: labelling them is most of the work.
        most = None if scale.queries is None else max(1, scale.queries // 2 // (1 + copies))
        distinct = np.flatnonzero(first_equal(self.queries) == np.arange(self.queries.n))
        sources = most if scale.sources is None else scale.sources
        return draw_pool(distinct, self.split[distinct], copies, scale.held_out, sources, self.seed)

    def pool_tasks(self, cells: int = 1, **options: Any) -> dict[str, Task]:
        """A task of the pool's rows, labelled once, as each split sees it."""
        rows = write_rows(self.work / "pool.npy", self.queries, self.pool, self.seed)
        runs = int(options.pop("runs", 1))
        partition = self._cells(cells, runs) if cells > 1 else 1
        settings = {"cell_targets": cells > 1, "k": 10, "seed": self.seed, **options, "copies": 0}
        task = label(
            self.keys,
            rows,
            out=self.work / f"task-pool-{cells}-{_digest({**settings, 'runs': runs})}",
            cells=partition,
            query_aware=0.0,
            split=self.pool.role,
            device=self.device,
            progress=self.progress,
            **settings,
        )
        views = {split: pool_view(task, self.pool, split) for split in SPLITS_BY}
        self._trained_on[task.path] = views[BY_ROWS]
        return views

    def _cells(self, count: int, runs: int) -> Cells:
        """k-means on all keys, as in the paper; the most even of several runs."""
        path = self.work / f"cells-{count}-{runs}.npz"
        if not path.exists():
            cells = kmeans(self.keys, count, runs=runs, points=self.keys.n, seed=self.seed)
            with partial(path) as temporary, temporary.open("wb") as f:
                np.savez(f, assignment=cells.assignment, centroids=cells.centroids)
        with np.load(path) as stored:
            return Cells(stored["assignment"], stored["centroids"])

    def task(self, cells: int = 1, **options: Any) -> Task:
        """A task of this data over plain cells, with targets for each cell; other options as for `label`."""
        if self.split_by == BY_ROWS or self.scale.sources is not None:
            return self.pool_tasks(cells, **options)[self.split_by]
        settings = {
            "query_aware": 0.0,
            "cell_targets": cells > 1,
            "copies": self.scale.copies,
            "k": 10,
            "split": self.split,
            "seed": self.seed,
            **options,
        }
        about = {**settings, "split": hashlib.sha256(settings["split"].tobytes()).hexdigest()}
        out = self.work / f"task-{cells}-{_digest(about)}"
        return label(
            self.keys,
            self.queries,
            out=out,
            cells=cells,
            device=self.device,
            progress=self.progress,
            **settings,
        )

    def mapping_task(self) -> Task:
        """One cell, and at least one noisy copy of each query: the paper trains its mappers with noise."""
        return self.task(1, copies=max(1, self.scale.copies))

    def recipe(self) -> Recipe:
        """The scale's recipe, to the end: an experiment compares what runs of a known budget end in."""
        return replace(recipe_named(self.scale.recipe), patience=0, keep_best=False)

    def model(
        self,
        task: Task,
        network: SupportNet | KeyNet,
        name: str,
        recipe: Recipe | None = None,
        portion: float = 1.0,
        evaluations: int = 10,
    ) -> Model:
        """A network trained on a task for `portion` of the scale's budget; an unfinished run continues.

        Of a pool there is one network for both splits: their training rows are the same, and nothing is
        chosen on val.

        Args:
            recipe: that of the scale if None.
        """
        scale, task = self.scale, self._trained_on.get(task.path, task)
        minutes = None if scale.minutes is None else scale.minutes * portion
        samples = None if scale.samples is None else max(1, round(scale.samples * portion))
        try:
            return train(
                task,
                network,
                out=self.run_directory(name, task),
                recipe=self.recipe() if recipe is None else recipe,
                minutes=minutes,
                samples=samples,
                evaluations=evaluations,
                seed=self.seed,
                resume="auto",
                device=self.device,
                progress="bar" if self.progress else False,  # what is gained, an experiment says itself
            )
        except TrainingInterrupted:
            raise TrainingInterrupted("stopped; the same command continues where it was") from None

    def run_directory(self, name: str, task: Task) -> Path:
        """Where a run is kept."""
        return self.work / f"run-{name}-{task.path.name}"

    def command(self, name: str, options: str = "") -> str:
        """What makes an experiment again, without the places of this machine."""
        more = (f" {options}" if options else "") + ("" if self.times else " --no-times")
        return f"python -m paper {name}{more} --data DATA --scale {self.scale.name} --out OUT"


def find(data: Path, name: str) -> tuple[Path, bool]:
    """The file of `name` ("keys" or "queries") in a data directory, and whether rows are to be normalised.

    `NAME.i8.npy` holds int8 rows of a scale of their own; any other format is taken as it is.
    """
    if not data.is_dir():
        raise AmipsError(f"{data} is not a directory: expected one with keys.npy and queries.npy")
    # Texts lie beside their vectors, as `embed` leaves them.
    files = sorted(p for p in data.glob(f"{name}.*") if p.is_file() and p.suffix != ".jsonl")
    if not files:
        raise AmipsError(f"{data} holds no {name}: expected {name}.npy, {name}.i8.npy, {name}.fvecs, ...")
    if len(files) > 1:
        raise AmipsError(f"{data} holds more than one file of {name}: {files[0].name}, {files[1].name}")
    return files[0], files[0].name == f"{name}.i8.npy"


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
