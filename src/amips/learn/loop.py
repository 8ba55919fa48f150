"""Training: one readable loop. What a run leaves on disk is in `run_directory`."""

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amips.arguments import check_flag_or, check_path, check_seed, refused
from amips.cluster import check_address
from amips.device import device_named
from amips.errors import RunError, TrainingDivergedError, TrainingInterrupted
from amips.learn.adam import adam_step, average_step
from amips.learn.budget import Budget
from amips.learn.checkpoint import State
from amips.learn.compute import Compute
from amips.learn.distributed import Group
from amips.learn.evaluation import centroid_metrics, criterion, evaluate, gain_lines
from amips.learn.interrupts import collected_interrupts
from amips.learn.losses import total_loss
from amips.learn.meter import Meter
from amips.learn.on_ray import RaySettings, check_workers, train_on_ray
from amips.learn.run_directory import Resume, RunDirectory, run_config
from amips.learn.setup import Setup, Spec, set_up
from amips.learn.tensorboard import check_tensorboard
from amips.metrics import SCAN
from amips.nets import (
    DEFAULT_MINUTES,
    PAPER_SAMPLES,
    AffineNet,
    Linear,
    Model,
    Precision,
    Recipe,
    recipe_named,
)
from amips.progress import Bar, Progress
from amips.resources import plain_resource_errors
from amips.scratch import Scratch
from amips.task import Task, load_task

EVALUATIONS = 20
SAVE_SECONDS = 600.0  # a long run loses no more than this to a crash
RANDOM_START = 0.25  # of the budget: networks that begin with random weights are not stopped before
BLENDS = (0.75, 0.5, 0.25)  # of the way from where training began to its best weights, beside all and nothing


@plain_resource_errors()
def train(
    task: Task | str | Path,
    network: Spec | AffineNet | None = None,
    *,
    out: str | Path | None = None,
    recipe: str | Recipe = "default",
    samples: int | None = None,
    minutes: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    evaluations: int = EVALUATIONS,
    resume: Resume = False,
    device: str | None = None,
    ray: str | None = None,
    workers: int | None = None,
    precision: Precision = "float32",
    compile: bool = False,
    tensorboard: bool = False,
    progress: Progress = False,
) -> Model:
    """Train a network on a task and return its runtime: the best weights on val, the first ones among them.

    What is best has the least `scan@0.95` (the mean share of the keys that is scanned for recall@10 0.95) or,
    if the network predicts one key, the least `erel`. Training ends when val stops improving (see
    `Recipe.patience`, and `Recipe.keep_best` for the weights at the end instead). `model.about` has the
    metrics on val as "val", those of the first weights as "start", those of centroid routing as "centroid".

    Args:
        task: a task or its directory.
        network: `Linear()` if None; or `MaxAffine()`, `SupportNet(...)`, `KeyNet(...)`. Sizes follow from the
            task. Or a linear router to go on from.
        out: the run directory; None keeps none. A finished run with the same settings is returned as it is.
        recipe: "default", "paper" or a `Recipe`.
        samples, minutes: the budget; one of the two, 1 minute if neither is given, evaluations not counted.
            The learning rate falls to 0 at its end. With `samples`, a run interrupted and resumed gives the
            same bytes as one that was not.
        batch: rows in a batch, for each process; replaces the recipe's.
        evaluations: how often in the run to evaluate on val, log, and save a checkpoint: more often at first.
        resume: continue an unfinished run in `out`; "auto" begins one where there is none.
        device: "cpu", "cuda", ...; by default CUDA where there is one.
        ray: a Ray cluster to train on: "auto", HOST:PORT or "local". The task and `out` must be where all its
            nodes see them. A run that lost a worker continues from its last checkpoint.
        workers: processes on the cluster, one a node if None; each takes `batch` rows of every batch.
        precision: "float32", or "bf16" for products in bfloat16 (autocast); weights stay float32.
        compile: `torch.compile` the loss; the first step then takes a minute or so.
        tensorboard: log to `out`/tensorboard, too, for TensorBoard; needs `amips[tensorboard]`.
        progress: say on standard error how far it is (a bar on a terminal, a line now and then otherwise) and
            print at the end what was gained on val, beside centroid routing; "bar" for the first alone.
    """
    seed = check_seed(seed, error=RunError)
    resume = check_flag_or("resume", resume, "auto", error=RunError)
    progress = check_flag_or("progress", progress, "bar", error=RunError)
    workers = check_workers(workers, check_address(ray))
    compute = Compute(precision, compile)
    tensorboard = check_tensorboard(tensorboard, out)
    if samples is not None and minutes is not None:
        raise RunError("give the budget as samples or as minutes, not both")
    by_default = samples is None and minutes is None
    if by_default and isinstance(recipe, str) and recipe == "paper":
        samples = PAPER_SAMPLES
    elif by_default:
        minutes = DEFAULT_MINUTES
    recipe, budget = recipe_named(recipe, batch), Budget(samples, minutes, evaluations)
    if network is not None and not isinstance(network, Spec | AffineNet):
        raise refused("network", network, "Linear, MaxAffine, SupportNet, KeyNet or None", RunError)
    if out is not None:
        out = check_path("out", out, error=RunError)
    elif resume is True:
        raise RunError("resume: give the directory of the run to continue, as out")
    task = load_task(task, verify=True)
    if ray is not None:
        common = {"device": device, "tensorboard": tensorboard}
        settings = RaySettings(ray, workers, resume, bool(progress), common)
        model = train_on_ray(settings, task, network or Linear(), out, recipe, budget, seed, compute)
        return _said(model) if progress is True else model
    place = device_named(device, RunError)
    group = Group(place)
    try:
        setup = set_up(task, network or Linear(), recipe, seed, place, group)
        scratch = Scratch("amips-run-") if out is None else None
        directory = scratch.path if scratch is not None else Path(str(out))
        run = Run(setup, directory, recipe, budget, seed, group, compute)
        with ExitStack() as stack:
            stack.callback(setup.batches.close)
            finished = run.prepare(resume, stack, tensorboard)
            model = finished if finished is not None else run.train(bool(progress))
    finally:
        group.close()
    return _said(model) if progress is True and group.first else model


def _said(model: Model) -> Model:
    for line in gain_lines(model):
        print(line, flush=True)  # noqa: T201
    return model


class Run:
    """A training run: its settings, its state, and its loop."""

    def __init__(
        self,
        setup: Setup,
        out: Path,
        recipe: Recipe,
        budget: Budget,
        seed: int,
        group: Group,
        compute: Compute = Compute(),  # noqa: B008  (frozen)
    ) -> None:
        self.setup, self.network, self.batches = setup, setup.network, setup.batches
        self.out, self.recipe, self.budget, self.group = out, recipe, budget, group
        self.batch = recipe.batch * group.world
        self.saved_at = time.monotonic()
        self.state = State.beginning(dict(self.network.named_parameters()))
        self.device = next(iter(self.state.parameters.values())).device
        self.compute, self.compiled = compute, compute.prepared(total_loss) if compute.compile else None
        self.meter = Meter(self.device, {})
        self.start = {name: value.clone() for name, value in self.state.averages.items()}
        self.centroid: dict[str, float] = {}
        config = run_config(setup, recipe, budget, seed, group.world, compute)
        self.directory = RunDirectory(out, config)

    def prepare(self, resume: Resume, stack: ExitStack, tensorboard: bool = False) -> Model | None:
        """Begin, continue, or find the run finished; `stack` keeps others from training here too."""
        finished = self.directory.finished(resume)
        if finished is not None:
            return finished
        if self.directory.has_checkpoint:
            self.state.restore(self.out)
            self.meter.restart(self.state.progress.sums)
        self._together()
        if self.group.first:
            self.directory.begin(self.state.progress.step, stack, tensorboard)
            self.centroid = centroid_metrics(self.setup.routed, self.setup.routed.val)
        return None

    def _together(self) -> None:
        """Wait until every process has looked, before the first one writes."""
        self.group.agree(0.0)

    def done(self) -> float:
        """How much of the budget is used, 0..1; the same in every process."""
        return self.group.agree(self.budget.done(self.state.progress))

    def stopped(self, done: float) -> bool:
        """Whether val has stopped improving."""
        patience = self.recipe.patience
        early = self.setup.random and done < RANDOM_START
        return bool(patience) and self.state.progress.stale >= patience and not early

    def train(self, show: bool) -> Model:
        """Step until the budget is used or val stops improving; the best weights as a model, saved in `out`.

        Evaluates on val and saves a checkpoint as often as the budget says; on an interrupt it saves first.
        With `show` it says on standard error how far it is.
        """
        at, done = self.state.progress, self.done()
        total = self.budget.samples or 0
        with (
            collected_interrupts() as interrupted,
            Bar(total, "training", " samples", show and self.group.first, at.samples) as shown,
        ):
            if at.evaluations == 0:
                self._look()
            evaluated = self.budget.evaluations_due(done)
            while done < 1 and not self.stopped(done):
                started = time.perf_counter()
                self.step(done)
                at.seconds += time.perf_counter() - started
                done = self.done()
                if shown.n == 0 and not total and done > 0:
                    shown.total = int(at.samples / done)
                shown.update(min(self.batch, (shown.total or at.samples) - shown.n))
                shown.set_postfix(loss=f"{self.meter.loss:.4f}", best=self._best(), refresh=False)
                # First the evaluation, then the interrupt: a resumed run does not come back for it.
                due = self.budget.evaluations_due(done) > evaluated and self.budget.affords(at)
                if self.group.agree(float(due)) or done >= 1:
                    evaluated = self.budget.evaluations_due(done)
                    self._look()
                    self._save()
                elif time.monotonic() - self.saved_at > SAVE_SECONDS:
                    self._save()
                if done < 1 and self.group.agree(float(bool(interrupted))):
                    self._save()
                    raise TrainingInterrupted(
                        f"stopped after {at.samples:,} samples; the state is saved in {self.out}: "
                        "continue with resume=True (--resume)"
                    )
        model = self._chosen()
        if self.group.first:
            self.directory.finish(model)
        self._together()
        return model

    def step(self, done: float) -> None:
        """One update: loss, gradients, Adam, projection, averages. On a GPU nothing here waits for it."""
        at = self.state.progress
        parameters = list(self.state.parameters.values())
        for p in parameters:
            p.grad = None
        batch = self.batches(at.step)
        with self.compute.autocast(self.device):
            loss, parts = (self.compiled or total_loss)(self.network, batch, self.recipe)
        loss.backward()  # type: ignore[no-untyped-call]
        losses = torch.stack([loss, *parts.values()]).detach()
        grads = [p.grad for p in parameters if p.grad is not None]
        self.group.average([*grads, losses])
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        self.meter.add(["loss", *parts], losses, norm, at.step)
        if self.meter.due(at.step):
            self._check_finite()
        at.step += 1
        at.samples += self.batch
        rate, decay = self.recipe.rate_at(done, self.batch), self.recipe.decay_at(at.step, self.batch)
        adam_step(self.state, grads, rate)
        self.network.project()
        average_step(self.state, decay)

    def _check_finite(self) -> None:
        """TrainingDivergedError if a loss was not finite since this was last asked; waits for the device."""
        broken = self.meter.first_broken()
        if broken is None:
            return
        saved = self.directory.has_checkpoint
        kept = f"the last good checkpoint is kept in {self.out}" if saved else "nothing was saved"
        raise TrainingDivergedError(
            f"the loss is not finite at step {broken} ({broken * self.batch:,} samples); {kept}: "
            "try a lower rate or a smaller clip in the recipe"
        )

    def _look(self) -> None:
        """Evaluate the averages on val, keep them if they are the best, and log it."""
        at, started = self.state.progress, time.perf_counter()
        self._check_finite()
        at.seconds += time.perf_counter() - started  # what the device had still to do
        started = time.perf_counter()
        metrics = self._evaluate(self.state.averages)
        value = self.group.agree(criterion(metrics) if self.group.first else 0.0)
        self.state.keep_if_best(value if math.isfinite(value) else math.inf, metrics)
        at.evaluating += time.perf_counter() - started
        sums, at.sums = self.meter.sums(), {}
        self.meter.restart()
        steps = sums.pop("steps", 1.0)
        line: dict[str, Any] = {
            name: getattr(at, name) for name in ("step", "samples", "seconds", "evaluating")
        }
        line |= {"train": {name: total / steps for name, total in sums.items()}, "val": metrics}
        if self.group.first:
            self.directory.log(line | ({"centroid": self.centroid} if self.centroid else {}))

    def _evaluate(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Metrics on val of these values of the parameters; empty in all processes but the first."""
        if not self.group.first:
            return {}
        setup = self.setup
        device = None if self.device.type == "cpu" else str(self.device)
        return evaluate(self.network.export({}, values), setup.task, setup.task.val, setup.through, device)

    def _best(self) -> str:
        """The criterion on val so far, for the progress bar."""
        best = self.state.progress.best
        return f"{best:.2%} scanned" if SCAN in self.state.progress.best_val else f"erel {best:.3f}"

    def _chosen(self) -> Model:
        """The best weights or, if the beginning was good already, a better point on the way to them."""
        at = self.state.progress
        blend, values, metrics, best = 1.0 if at.best_step else 0.0, self.state.best, at.best_val, at.best
        if not self.recipe.keep_best:
            blend, values, metrics = 1.0, self.state.averages, self._evaluate(self.state.averages)
        elif at.best_step and not self.setup.random:
            for part in BLENDS:
                between = {
                    name: torch.lerp(self.start[name], end, part) for name, end in self.state.best.items()
                }
                at_part = self._evaluate(between)
                value = self.group.agree(criterion(at_part) if self.group.first else 0.0)
                if value < best:
                    blend, values, metrics, best = part, between, at_part, value
        about = self.setup.about() | {
            "recipe": self.recipe.to_json(),
            "samples": at.samples,
            "seconds": round(at.seconds, 3),
            "best_step": at.best_step,
            "blend": blend,
            "val": metrics,
            "start": at.start_val,
        }
        return self.network.export(about | ({"centroid": self.centroid} if self.centroid else {}), values)

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        self._check_finite()
        self.state.progress.sums = self.meter.sums()
        if self.group.first and self.state.finite():
            self.state.save(self.out)
