"""Training: one readable loop.

run/
  config.json              the architecture, the recipe, the budget, the task: what makes a run the same
  checkpoint.safetensors   the full state, replaced atomically
  log.jsonl                one line for each evaluation
  model.json, model.safetensors    the averaged weights; there when the run is finished
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from amips.cells import fingerprint_of, trivial
from amips.errors import RunError, TrainingDivergedError, TrainingInterrupted
from amips.files import differing, locked, read_json, write_atomic, write_json
from amips.learn.affine_network import AffineNetwork, affine_network
from amips.learn.batches import Batches, CellBatches
from amips.learn.checkpoint import CHECKPOINT, Progress, State
from amips.learn.distributed import Group
from amips.learn.evaluation import evaluate
from amips.learn.losses import total_loss
from amips.learn.modules import Network
from amips.nets import (
    PAPER_SAMPLES,
    AffineArchitecture,
    KeyNet,
    Linear,
    MaxAffine,
    Model,
    Recipe,
    SupportNet,
    load_model,
    recipe_named,
)
from amips.nets.model import DESCRIPTION
from amips.progress import bar
from amips.task import Task, load_task

CONFIG, LOG, LOCK = "config.json", "log.jsonl", ".lock"
FORMAT = 1
DEFAULT_MINUTES = 3.0
SAVE_SECONDS = 600.0  # a long run loses no more than this to a crash
BETAS, EPSILON = (0.9, 0.999), 1e-8


def train(
    task: Task | str | Path,
    network: SupportNet | KeyNet | Linear | MaxAffine,
    *,
    out: str | Path,
    recipe: str | Recipe = "default",
    samples: int | None = None,
    minutes: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    evaluations: int = 10,
    resume: bool = False,
    device: str | None = None,
    progress: bool = False,
) -> Model:
    """Train a network on a task and return its runtime.

    Args:
        task: a task or its directory.
        network: `SupportNet(...)`, `KeyNet(...)`, `Linear()` or `MaxAffine()`; sizes follow from the task.
        out: the run directory. A finished run with the same settings is returned as it is.
        recipe: "default", "paper" or a `Recipe`.
        samples, minutes: the budget; one of the two, 3 minutes if neither is given. The learning rate
            falls to 0 at its end. With `samples`, a run interrupted and resumed gives the same bytes as one
            that was not.
        batch: rows in a batch, for each process; replaces the recipe's.
        evaluations: how often in the run to evaluate on val, log, and save a checkpoint.
        resume: continue an unfinished run in `out`.
        device: "cpu", "cuda", ...; by default CUDA where there is one.
        progress: show a progress bar when standard error is a terminal.
    """
    task = load_task(task)
    if samples is not None and minutes is not None:
        raise RunError("give the budget as samples or as minutes, not both")
    if samples is None and minutes is None:
        samples, minutes = (PAPER_SAMPLES, None) if recipe == "paper" else (None, DEFAULT_MINUTES)
    recipe = recipe_named(recipe, batch)
    timeless = minutes is not None and not 0 < minutes < math.inf
    if (samples is not None and samples < 1) or timeless or evaluations < 1:
        raise RunError(f"samples={samples}, minutes={minutes}, evaluations={evaluations}: must be positive")
    if seed < 0:
        raise RunError(f"seed={seed}: must not be negative")
    chosen = _device(device)
    group = Group(chosen)
    try:
        run = Run(task, network, Path(out), recipe, samples, minutes, seed, evaluations, chosen, group)
        with ExitStack() as held:
            finished = run.prepare(resume, held)
            return finished if finished is not None else run.train(progress)
    finally:
        group.close()


def _device(name: str | None) -> torch.device:
    """The device of this name; by default this process's own GPU, or the CPU."""
    own_gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name or (own_gpu if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise RunError(f"device={name!r} cannot be used: {str(problem).splitlines()[0]}") from None
    return device


class Run:
    """A training run: its settings, its state, and its loop."""

    def __init__(
        self,
        task: Task,
        network: SupportNet | KeyNet | Linear | MaxAffine,
        out: Path,
        recipe: Recipe,
        samples: int | None,
        minutes: float | None,
        seed: int,
        evaluations: int,
        device: torch.device,
        group: Group,
    ) -> None:
        self.task, self.out, self.recipe, self.group = task, out, recipe, group
        self.samples, self.minutes, self.evaluations = samples, minutes, evaluations
        self.architecture = network.architecture(task.n, task.d, task.c)
        place = (seed, group.rank, group.world, device)
        self.through = ""  # the cells whose centroids a mapper is trained through
        self.network: Network | AffineNetwork
        self.batches: Batches | CellBatches
        if isinstance(self.architecture, AffineArchitecture):
            smooth = recipe.temperature if isinstance(network, MaxAffine) and network.smooth else 0.0
            self.network = affine_network(self.architecture, task, smooth, seed).to(device)
            self.batches = CellBatches(task, recipe, *place)
        else:
            through = task if self.architecture.c < task.c else None  # one key, whatever the cells
            if through is not None:
                self.task = task = task.with_cells(trivial(task.key_vectors))
                if recipe.listwise and recipe.route_weight:
                    raise RunError("listwise is for networks that score cells: a mapper predicts one key")
            elif recipe.route_weight and task.c == 1:
                raise RunError("a routing loss needs a task with cells; label with cells=2 or more")
            centroids = None
            if through is not None and recipe.route_weight:
                centroids = through.cells.centroids
                self.through = fingerprint_of(through.cells.assignment)
            self.network = Network(self.architecture, seed, centroids).to(device)
            self.batches = Batches(task, recipe, *place, through)
        self.batch = recipe.batch * group.world
        self.saved_at = time.monotonic()
        parameters = dict(self.network.named_parameters())
        self.state = State(
            parameters,
            {name: p.detach().clone() for name, p in parameters.items()},
            {name: torch.zeros_like(p) for name, p in parameters.items()},
            {name: torch.zeros_like(p) for name, p in parameters.items()},
            Progress(),
        )
        self.config: dict[str, Any] = {
            "kind": "run",
            "format": FORMAT,
            "architecture": self.architecture.to_json(),
            "network": asdict(network),
            "recipe": asdict(recipe),
            "world": group.world,
            "samples": samples,
            "minutes": minutes,
            "seed": seed,
            "keys": task.fingerprint,
            "task": task.options,
        } | ({"through": self.through} if self.through else {})

    def prepare(self, resume: bool, held: ExitStack) -> Model | None:
        """Begin, continue, or find the run finished; `held` keeps others from training here too."""
        existing = self.out / CONFIG
        if existing.exists():
            if (found := read_json(existing, RunError)) != self.config:
                raise RunError(
                    f"{self.out} holds a run with other settings or another task "
                    f"({differing(found, self.config)}); "
                    "choose another directory, or remove this one"
                )
            if (self.out / DESCRIPTION).exists():
                return load_model(self.out)
            if not resume and (self.out / CHECKPOINT).exists():
                raise RunError(
                    f"{self.out} holds an unfinished run; continue it with resume=True (--resume), "
                    "or remove the directory"
                )
            if (self.out / CHECKPOINT).exists():
                self.state.restore(self.out)
        elif self.out.exists() and (
            not self.out.is_dir() or any(file.name[0] != "." for file in self.out.iterdir())
        ):
            raise RunError(f"{self.out} exists and is not a run; choose another directory")
        elif resume:
            raise RunError(f"{self.out} holds no run to resume; leave resume out to begin one")
        self._together()
        if self.group.first:
            self.out.mkdir(parents=True, exist_ok=True)
            busy = RunError(f"{self.out}: another process is training there")
            held.enter_context(locked(self.out / LOCK, busy))
            write_json(existing, self.config)
            self._cut_log()
        return None

    def _together(self) -> None:
        """Wait until every process has looked, before the first one writes."""
        self.group.agree(0.0)

    def _cut_log(self) -> None:
        """Forget evaluations after the checkpoint: they will be made again."""
        path = self.out / LOG
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= self.state.progress.step]
        write_atomic(path, "".join(line + "\n" for line in kept).encode())

    def done(self) -> float:
        """How much of the budget is used, 0..1; the same in every process."""
        if self.samples is not None:
            return min(1.0, self.state.progress.samples / self.samples)
        assert self.minutes is not None
        return min(1.0, self.group.agree(self.state.progress.seconds) / (60 * self.minutes))

    def train(self, show: bool) -> Model:
        """The loop."""
        at, done = self.state.progress, self.done()
        evaluated = self._evaluations_due(done)
        total = self.samples or 0
        metrics: dict[str, float] = {}
        with (
            _stop_on_interrupt() as interrupted,
            bar(total, "training", " samples", show and self.group.first, at.samples) as shown,
        ):
            while done < 1:
                started = time.perf_counter()
                losses = self.step(done)
                at.seconds += time.perf_counter() - started
                done = self.done()
                for name, value in {**losses, "steps": 1.0}.items():
                    at.sums[name] = at.sums.get(name, 0.0) + value
                if shown.n == 0 and not total and done > 0:
                    shown.total = int(at.samples / done)
                shown.update(min(self.batch, (shown.total or at.samples) - shown.n))
                shown.set_postfix(loss=f"{losses['loss']:.4f}", refresh=False)
                # First the evaluation, then the interrupt: a resumed run does not come back for it.
                if self._evaluations_due(done) > evaluated or done >= 1:
                    evaluated = self._evaluations_due(done)
                    started = time.perf_counter()
                    metrics = self._evaluate()
                    self._log(metrics)
                    self._save()
                    at.seconds += time.perf_counter() - started
                elif time.monotonic() - self.saved_at > SAVE_SECONDS:
                    self._save()
                if done < 1 and self.group.agree(float(bool(interrupted))):
                    self._save()
                    raise TrainingInterrupted(
                        f"stopped after {at.samples:,} samples; the state is saved in {self.out}: "
                        "continue with resume=True (--resume)"
                    )
        # Without metrics, the run was killed between its last checkpoint and its model.
        net = self._export(metrics or self._evaluate())
        if self.group.first:
            net.save(self.out)
        self._together()
        return net

    def step(self, done: float) -> dict[str, float]:
        """One update: loss, gradients, Adam, projection, averages."""
        at = self.state.progress
        parameters = list(self.state.parameters.values())
        for p in parameters:
            p.grad = None
        batch = self.batches(at.step)
        loss, parts = total_loss(self.network, batch, self.recipe)
        loss.backward()  # type: ignore[no-untyped-call]
        losses = torch.stack([loss, *parts.values()]).detach()
        grads = [p.grad for p in parameters if p.grad is not None]
        self.group.average([*grads, losses])
        values: dict[str, float] = dict(zip(("loss", *parts), losses.tolist(), strict=True))
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        if not (math.isfinite(values["loss"]) and math.isfinite(float(norm))):
            saved = (self.out / CHECKPOINT).exists()
            kept = f"the last good checkpoint is kept in {self.out}" if saved else "nothing was saved"
            raise TrainingDivergedError(
                f"the loss is not finite at step {at.step} ({at.samples:,} samples); {kept}: "
                "try a lower rate or a smaller clip in the recipe"
            )
        at.step += 1
        at.samples += self.batch
        self.update(parameters, grads, done)
        return values

    @torch.no_grad()
    def update(self, parameters: list[Any], grads: list[Any], done: float) -> None:
        """Adam with bias correction, projection, averages: each on all parameters at once.

        Adam's kernel is called directly because its moments are part of the checkpoint as plain tensors;
        torch.optim keeps a state of its own, which is made for pickle.
        """
        rate = self.recipe.rate_at(done, self.batch)
        torch._fused_adam_(
            parameters,
            grads,
            list(self.state.first.values()),
            list(self.state.second.values()),
            [],
            [torch.tensor(float(self.state.progress.step), device=p.device) for p in parameters],
            lr=rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=0.0,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
        self.network.project()
        decay = self.recipe.decay_at(self.state.progress.step, self.batch)
        torch._foreach_lerp_(list(self.state.averages.values()), parameters, 1 - decay)

    def _export(self, metrics: dict[str, float]) -> Model:
        about = {
            "keys": self.task.fingerprint,
            "cells": fingerprint_of(self.task.cells.assignment),
            "samples": self.state.progress.samples,
            "seconds": round(self.state.progress.seconds, 3),
            "recipe": asdict(self.recipe),
            "val": metrics,
        }
        return self.network.export(about, self.state.averages)

    def _evaluations_due(self, done: float) -> int:
        return math.floor(done * self.evaluations + 1e-9)

    def _evaluate(self) -> dict[str, float]:
        return evaluate(self._export({}), self.task, self.task.val) if self.group.first else {}

    def _log(self, metrics: dict[str, float]) -> None:
        """One line: how far, the mean training losses since the line before, the metrics on val."""
        line = asdict(self.state.progress)
        sums = line.pop("sums")
        steps = sums.pop("steps")
        line |= {"train": {name: value / steps for name, value in sums.items()}, "val": metrics}
        self.state.progress.sums = {}
        if self.group.first:
            with (self.out / LOG).open("a") as f:
                f.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.group.first and self.state.finite():
            self.state.save(self.out)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line torn by a crash comes after every checkpoint
        return math.inf


@contextmanager
def _stop_on_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of dying in the middle of a step; a second Ctrl-C is final."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if caught:
            os._exit(130)
        caught.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)
