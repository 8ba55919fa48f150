"""The paper's experiments: each a function from a `Workspace` to a `Summary` that names the claims it tests.

    python -m paper NAME --data DIR --out OUT

They use amips through the doors of its rooms and are no part of the installed package.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amips.bench import Summary, draw_figures
from amips.errors import AmipsError, ResultsError
from amips.extras import needs_extra
from amips.files import write_atomic
from amips.locks import locked
from amips.task import BY_ROWS, BY_SOURCE
from paper.splits import side_by_side, stamped

if TYPE_CHECKING:
    from paper.workspace import Workspace

BOTH = "both"
ONE_NETWORK = (
    "One network of each kind serves both splits; what it logged on val during training is of held-out rows. "
    "Times, where there are any, were taken twice, on one thread of a machine that others used, too."
)
TIMED_APART = ("ivf", "ood")  # experiments that can leave out times: their claims need none
NOTHING_LEARNED = "learns nothing from queries and is the same under every split"


@dataclass(frozen=True)
class Experiment:
    """Where an experiment is defined (a module of this package and its function), and what it asks.

    `one_split` says why it cannot be run under either split, where it cannot. `independent` says that nothing
    in it is learned from queries, as in `timing` and `shift`: its claims are the same under every split.
    """

    module: str
    function: str
    question: str
    one_split: str = ""
    independent: bool = False

    @property
    def split(self) -> bool:
        """Whether it can be run under either split."""
        return not self.one_split


EXPERIMENTS = {
    "routing": Experiment(
        "routing",
        "run",
        "With 10 cells, is the top key in the 1 to 5 cells that a router scores best? Sizes, depths, "
        "injections.",
    ),
    "routing128": Experiment("routing", "run_128", "The same with 128 cells and up to 32 of them."),
    "ivf": Experiment(
        "ivf", "run", "FAISS IVF searched with x, with the predicted key (drop-in), and routed by it."
    ),
    "ood": Experiment("ood", "run", "What happens as test queries drift: noise from 0 to 0.06."),
    "timing": Experiment(
        "timing",
        "run",
        "How long scores and gradients take, with torch and with numpy.",
        one_split=NOTHING_LEARNED,
        independent=True,
    ),
    "shift": Experiment(
        "shift",
        "run",
        "How far queries lie from keys: components, densities, top scores.",
        one_split=NOTHING_LEARNED,
        independent=True,
    ),
    "leak": Experiment(
        "leak",
        "run",
        "The paper's headline under both splits: noise before splitting, as in the authors' published code, "
        "and queries never seen.",
        one_split="measures both splits at once",
    ),
    "repeats": Experiment(
        "repeats",
        "run",
        "When do its networks pay? Traffic that comes again, split by time: IVF, cells, a graph, KeyNet, "
        "SupportNet, and a plain memory of the log.",
        one_split="splits a log by time",
    ),
    "backends": Experiment(
        "backends",
        "run",
        "FAISS IVF, LeanVec, ScaNN, SOAR and HNSW, each searched with x, with the predicted key, and routed "
        "by it.",
    ),
    "dynamics": Experiment("dynamics", "run", "The transport error during training, by size and depth."),
    "tradeoff": Experiment(
        "tradeoff", "run", "Transport error against MRR, by size and depth, for both networks."
    ),
    "losses": Experiment(
        "losses", "run", "What the score loss and the gradient (or key) loss buy, alone and together."
    ),
    "horizon": Experiment("horizon", "run", "How long to train: budgets of 1, 3, 5 and 7 units."),
    "encoders": Experiment("encoders", "run", "The same recipe on vectors of other encoders and dimensions."),
    "scaling": Experiment(
        "scaling",
        "run",
        "From 10,000 to 2 million keys: how labelling, training, the cost of a recall and memory grow.",
    ),
}


def run_experiment(
    name: str,
    *,
    data: str | Path,
    out: str | Path,
    scale: str = "small",
    seed: int = 0,
    progress: bool = False,
    also: Sequence[str | Path] = (),
    split: str | None = None,
    times: bool = True,
    device: str | None = None,
) -> Summary:
    """Run one of the paper's experiments and write its summary, tables and figures to OUT/NAME.

    Args:
        name: one of `EXPERIMENTS`.
        data: a directory with keys and queries, as `keys.npy` and `queries.npy` or in another format.
        out: where everything goes; experiments that are given the same share their tasks and models.
        scale: "smoke" (seconds), "small" (minutes on two cores; "scaling" two hours), "replica" (the paper's
            ratios, minutes), "replica100k" (the same for the headline on 100,000 keys, half an hour) or
            "full" (the paper's settings).
        also: for "encoders", further such directories: vectors of other encoders.
        split: how queries are held out: by "source", so that no relative of a test query is trained on; by
            "rows", the paper's way, noise first; or "both", side by side. If None, "both" at replica, where
            one network serves both, and "source" at other scales.
        times: for "ivf" and "ood", whether searching is timed, too: no, on a machine that others use.
        device: where labelling and training multiply: "cuda", ...; None is the CPU.
    """
    if name not in EXPERIMENTS:
        raise AmipsError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    if also and name != "encoders":
        raise AmipsError(f"{name}: only encoders compares data; leave out also (--also)")
    if not times and name not in TIMED_APART:
        raise AmipsError(f"{name}: only {' and '.join(TIMED_APART)} run without times (--no-times)")
    experiment = EXPERIMENTS[name]
    if split is not None and not experiment.split:
        raise AmipsError(f"{name} {experiment.one_split}; leave out split (--split)")
    if split not in (None, BOTH, BY_ROWS, BY_SOURCE):
        raise AmipsError(f"split={split!r}: expected {BY_SOURCE}, {BY_ROWS} or {BOTH}")
    with needs_extra("the paper's experiments", "train", "torch"):
        from paper.workspace import Workspace
    workspace = Workspace(data, scale, out, seed, progress, also, times, device)
    busy = ResultsError(f"another experiment is at work in {out}; wait for it, or choose another out")
    with locked(workspace.work / ".lock", busy):
        summary = _run(name, workspace, split, _function(experiment))
    folder = workspace.out / summary.name
    summary.save(folder)
    write_atomic(folder / "table.md", markdown(summary).encode())
    draw_figures(summary, folder)
    return summary


def _run(
    name: str, workspace: "Workspace", split: str | None, function: "Callable[[Workspace], Summary]"
) -> Summary:
    """What an experiment finds under one split, or under both, side by side."""
    if not EXPERIMENTS[name].split:
        return function(workspace)
    asked = "" if split is None else f" --split {split}"
    split = split or (BOTH if workspace.scale.sources is not None else BY_SOURCE)
    splits = (BY_ROWS, BY_SOURCE) if split == BOTH else (split,)
    summaries = {one: stamped(function(workspace.by(one)), one) for one in splits}
    summary = side_by_side(summaries) if len(summaries) > 1 else summaries[split]
    if workspace.scale.sources is not None:
        summary = replace(summary, method=[*summary.method, ONE_NETWORK])
    return replace(summary, command=summary.command + asked)


def _function(experiment: Experiment) -> "Callable[..., Summary]":
    """What runs an experiment; imported when it is run, because most need torch."""
    function: Callable[..., Summary] = getattr(
        importlib.import_module(f"paper.{experiment.module}"), experiment.function
    )
    return function


def markdown(summary: Summary) -> str:
    """The verdict and the tables of a summary, as Markdown."""
    parts = [f"# {summary.title}", "\n".join(summary.verdict)]
    parts += [f"## {table.title}\n\n{table.markdown()}" for table in summary.tables]
    parts += [f"`{summary.command}`", ", ".join(f"{k} {v}" for k, v in summary.machine.items())]
    return "\n\n".join(parts) + "\n"
