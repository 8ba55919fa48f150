"""The paper's experiments as commands: each a function from a `Workspace` to a `Summary`."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from amips.bench.summary import Summary
from amips.backends import backend_class
from amips.errors import AmipsError, ResultsError
from amips.files import locked, write_atomic

# The module and the function of each; imported when asked for, because most need torch.
STUDIES = {
    "routing": ("routing", "run"),
    "routing128": ("routing", "run_128"),
    "ivf": ("ivf", "run"),
    "ood": ("ood", "run"),
    "timing": ("timing", "run"),
    "shift": ("shift", "run"),
    "leak": ("leak", "run"),
    "backends": ("backends", "run"),
    "dynamics": ("dynamics", "run"),
    "tradeoff": ("tradeoff", "run"),
    "losses": ("losses", "run"),
    "horizon": ("horizon", "run"),
    "encoders": ("encoders", "run"),
    "scaling": ("scaling", "run"),
}


def study(
    name: str,
    *,
    data: str | Path,
    out: str | Path,
    scale: str = "small",
    seed: int = 0,
    engine: str | None = None,
    progress: bool = False,
    also: Sequence[str | Path] = (),
) -> Summary:
    """Run one of the paper's experiments and write its summary, table and figures to OUT/NAME.

    Args:
        name: one of `STUDIES`.
        data: a directory with keys and queries, as `keys.npy` and `queries.npy` or in another format.
        out: where everything goes; studies that are given the same share their tasks and models.
        scale: "smoke" (seconds), "small" (minutes on two cores; "scaling" two hours) or "full" (the
            paper's settings).
        engine: of `amips.backends`, for the study "ivf": the same comparison there, written to OUT/ivf-ENGINE.
        also: of "encoders", further such directories: vectors of other encoders.
    """
    if name not in STUDIES:
        raise AmipsError(f"there is no study {name!r}; there are {', '.join(STUDIES)}")
    if also and name != "encoders":
        raise AmipsError(f"study {name}: only encoders compares data; leave out also (--also)")
    if engine is not None:
        if name != "ivf":
            raise AmipsError(f"the study {name!r} has no engine; 'ivf' has")
        backend_class(engine).require()
    try:
        from paper.workspace import Workspace
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        raise AmipsError("studies need torch; pip install 'amips[train]'") from None
    from amips.bench.figures import figures
    from paper.mapped_backends import run as run_hosted

    module, function = STUDIES[name]
    workspace = Workspace(data, scale, out, seed, progress, also)
    busy = ResultsError(f"another study is at work in {out}; wait for it, or choose another out")
    with locked(workspace.work / ".lock", busy):
        run = getattr(importlib.import_module(f"paper.{module}"), function)
        made: Summary = run(workspace) if engine is None else run_hosted(workspace, engine)
    folder = workspace.out / (name if engine is None else made.name)
    made.save(folder)
    write_atomic(folder / "table.md", markdown(made).encode())
    figures(made, folder)
    return made


def markdown(summary: Summary) -> str:
    """What was found and the tables, as Markdown."""
    parts = [f"# {summary.title}", "\n".join(summary.verdict)]
    parts += [f"## {table.title}\n\n{table.markdown()}" for table in summary.tables]
    parts += [f"`{summary.command}`", ", ".join(f"{k} {v}" for k, v in summary.machine.items())]
    return "\n\n".join(parts) + "\n"
