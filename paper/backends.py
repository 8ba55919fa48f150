"""Original against mapped queries on several backends: FAISS IVF, LeanVec, ScaNN, SOAR and HNSW.

First as in the paper: Recall@{0.01, 0.1, 0.5}% of n on what each engine itself returns, for x and for the
predicted key, one and the same index, timed with so many results. Then with candidates scored again with x
(recall@1) and, where the engine has cells, routed by the prediction. Costs are FLOPs, keys scanned and time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from amips.backends import backend_class, missing
from amips.bench import (
    Axis,
    Bootstrap,
    Family,
    Metric,
    Summary,
    System,
    Table,
    describe_machine,
    gain_tables,
    silent_sentences,
)
from paper.claims import Claim, Finding, claim_values, verdict
from paper.ivf import SMALL_SIZES, mapper, title
from paper.mapped_backends import IVF_TITLE, Measurement, backend_ways, measure, method, titled, with_x
from paper.mappers import budget
from paper.returned import FRACTIONS, one_index_ways, search_returned
from paper.search_runs import CLEARLY, IVF, Searched, Way, lead, none_if_nan, points
from paper.workspace import Workspace

WHERE = "Appendix A.8"
OF_THE_PAPER = {
    IVF: "Appendix A.8, Figures 16 to 18",
    "leanvec": "Appendix A.8, Figures 25 to 27",
    "scann": "Appendix A.8, Figures 19 to 21",
    "soar": "Appendix A.8, Figures 22 to 24",
}
COMPARED = (*OF_THE_PAPER, "hnsw")
JUDGED: Metric = "recall@0.1%"  # of what the engine returns: what the claims are about
RESCORED: Metric = "recall@1"  # all candidates are scored with x: the top key comes first wherever it is
AXES: dict[Axis, str] = {"flops": "FLOPs", "scanned": "keys scanned", "batch/1": "time, large batch"}
LEADS = "mapped queries lead in the middle of the budgets on {}"
PAPER = (
    "The paper (Quora, NQ, HotpotQA; figures, no table): on FAISS IVF, ScaNN, SOAR and LeanVec and on all "
    "three axes mapped queries dominate in the middle of the budgets, XS and S most of all; at very small "
    "budgets the original query is as good. With ScaNN gains shrink at high budgets; SOAR leaves least room "
    "(on Quora the curves overlap); LeanVec is like FAISS. It has no HNSW."
)

Pair = tuple[Family, Family]  # a backend searched with x, and with a mapper


def run(workspace: Workspace) -> Summary:
    """Every backend that can be run here; the others are named."""
    absent = missing([name for name in COMPARED if name != IVF])
    here = [name for name in COMPARED if name not in absent]
    measured = measure(workspace, "backends", here, workspace.scale.sizes)
    bootstrap = Bootstrap(np.asarray(measured.task.test.source))
    pairs, on_val = (with_x(families) for families in (measured.searched.test, measured.searched.val))
    order = sorted(pairs, key=lambda way: (here.index(way.backend), way.query == "routed"))
    pairs = {way: pairs[way] for way in order}
    best = best_on_val(pairs, on_val, RESCORED)
    compared = [pairs[way] for way in best]
    budgets = {title_of(name): "probes" if name == IVF else backend_class(name).budget for name in here}
    returned = {metric: as_returned(workspace, measured, here, metric) for metric in FRACTIONS}
    judged, judged_on_val = (with_x(by) for by in (returned[JUDGED].test, returned[JUDGED].val))
    chosen = best_on_val(judged, judged_on_val, JUDGED)
    findings = compare({way: judged[way] for way in chosen}, workspace.scale.sizes, absent)
    findings += rescored({way: pairs[way] for way in best})
    scale = workspace.scale
    return Summary(
        name="backends",
        title="Original against mapped queries on several backends",
        verdict=[*verdict(findings), *silent_sentences(list(pairs.values()))],
        tables=[
            *(_lead_table(list(with_x(one.test).values()), metric) for metric, one in returned.items()),
            _lead_table(list(pairs.values()), RESCORED),
            *gain_tables(compared, bootstrap, measured.batch),
        ],
        charts=[
            *(
                replace(measured, searched=returned[JUDGED]).chart(
                    f"returned-{name}", title_of(name), JUDGED, name
                )
                for name in here
                if name in OF_THE_PAPER
            ),
            *(measured.chart(f"backends-{name}", title_of(name), RESCORED, name) for name in here),
        ],
        facts=[
            ("keys", f"{measured.task.n:,}"),
            ("training rows", f"{len(measured.task.train):,}, noisy copies included"),
            ("test queries", f"{len(measured.task.test):,}"),
            ("backends", "; ".join(dict.fromkeys(base.name for base, _ in pairs.values()))),
            *([("not run", ", ".join(title_of(name) for name in absent))] if absent else []),
        ],
        method=[
            f"Each KeyNet was trained for {budget(workspace)} (recipe {scale.recipe!r}). FAISS IVF with x "
            "and with a prediction is the front over indexes of sqrt(n) / 2 to 10 sqrt(n) cells. Other "
            "backends have the settings that amips gives them.",
            "As returned: recalls of 0.01, 0.1 and 0.5 % of n ask whether the top key is among so many "
            "results of the engine itself, for x and for the predicted key, on the same index (FAISS IVF: "
            "sqrt(n) cells); the times of 0.1 % are taken with as many. HNSW, which the paper does not have, "
            "is left out there: its effort is never less than the results asked for.",
            f"Scored again ({RESCORED}): " + method(budgets, routed=True),
        ],
        command=workspace.command("backends"),
        machine=describe_machine(),
        values={
            **measured.values(RESCORED),
            "returned": {
                metric: {
                    family.name: {
                        "recall": family.recalls(metric).tolist(),
                        "budget": [run.run.budget for run in family.runs],
                    }
                    for family in one.test.values()
                }
                for metric, one in returned.items()
            },
            "flops": {
                family.name: family.costs("flops").tolist()
                for family in measured.searched.test.values()
                if family.knows("flops")
            },
            "lead": {
                ours.name: {axis: none_if_nan(value) for axis, value in leads(base, ours, RESCORED).items()}
                for base, ours in pairs.values()
            },
            "not run": absent,
            **claim_values(findings),
        },
    )


def title_of(name: str) -> str:
    """What a backend is called."""
    return IVF_TITLE if name == IVF else backend_class(name).title


def as_returned(
    workspace: Workspace, measured: Measurement, backends: Sequence[str], metric: Metric
) -> Searched[Way]:
    """What the engines of the paper return for x and for the predicted keys, as many as the metric asks for.

    Times are taken for the fraction that the claims are about.
    """
    task = measured.task
    runs = {size: mapper(workspace, task, size) for size in workspace.scale.sizes}
    ways: dict[Way, list[System]] = {}
    for backend in (name for name in backends if name in OF_THE_PAPER):
        every = (
            one_index_ways(task.n, runs) if backend == IVF else backend_ways(task.n, backend, runs, "drop-in")
        )
        ways |= {way: systems for way, systems in every.items() if way.query != "routed"}
    times = metric == JUDGED
    return titled(search_returned(workspace, task, "backends", ways, metric, times=times))


def leads(base: Family, ours: Family, metric: Metric) -> dict[Axis, float]:
    """By how much a mapper finds more than x at equal cost, where it does most, by every cost that is
    known."""
    return {axis: lead(base, ours, axis, metric) for axis in AXES if base.knows(axis) and ours.knows(axis)}


def best_on_val(pairs: Mapping[Way, Pair], on_val: Mapping[Way, Pair], metric: Metric) -> list[Way]:
    """Of the sizes of each backend and way the one that leads most on val, in FLOPs where these are known."""

    def lead_on_val(way: Way) -> float:
        value = next(iter(leads(*on_val[way], metric).values()), math.nan)
        return -math.inf if math.isnan(value) else value

    groups: dict[tuple[str, str], list[Way]] = {}
    for way in pairs:
        groups.setdefault((way.backend, way.query), []).append(way)
    return [max(group, key=lead_on_val) for group in groups.values()]


def compare(best: Mapping[Way, Pair], sizes: Sequence[str], absent: Mapping[str, str]) -> list[Finding]:
    """The paper's claims of what its engines return: the lead of the best mapper on each.

    Args:
        best: for each backend the size that was best on val, beside x.
        sizes: of the networks.
        absent: why a backend was not run.
    """
    findings: list[Finding] = []
    mapped: dict[Way, bool] = {}
    for way, (base, ours) in best.items():
        known = leads(base, ours, JUDGED)
        mapped[way] = bool(known) and all(value > CLEARLY for value in known.values())
        text, where = LEADS.format(title_of(way.backend)), OF_THE_PAPER[way.backend]
        findings.append(Claim(text, where, mapped[way], _evidence(way, base, known, JUDGED)))
    for name, reason in absent.items():
        text = LEADS.format(title_of(name))
        claimed = name in OF_THE_PAPER
        findings.append(
            Claim(text, OF_THE_PAPER[name], None, f"Not run: {reason}") if claimed else f"Not run: {reason}."
        )
    ahead = sum(mapped.values())
    findings.append(
        Claim(
            "the same picture on all backends and axes",
            WHERE,
            ahead == len(mapped),
            f"Mapped queries lead by more than a point on every axis that is known on {ahead} of the "
            f"{len(mapped)} backends of the paper that were run",
        )
    )
    if not set(sizes) <= set(SMALL_SIZES):
        small = sum(way.size in SMALL_SIZES for way in mapped)
        findings.append(
            Claim(
                "XS and S gain most",
                WHERE,
                small == len(mapped) if ahead else None,
                f"The size that leads most on val is XS or S on {small} of {len(mapped)} backends",
            )
        )
    return findings


def rescored(best: Mapping[Way, Pair]) -> list[Finding]:
    """What is left of a lead where candidates are scored again with x, and of routing."""
    sentences = []
    for way, (base, ours) in best.items():
        evidence = _evidence(way, base, leads(base, ours, RESCORED), RESCORED)
        again = ", scored again with x" if way.query == "mapped" else ""
        sentences.append(f"{evidence}{again}.")
    return list(sentences)


def _evidence(way: Way, base: Family, known: Mapping[Axis, float], metric: Metric) -> str:
    words = [f"{points(value)} ({AXES[axis]})" for axis, value in known.items()]
    how = "routed by the prediction" if way.query == "routed" else "searched with the predicted key"
    return (
        f"{base.name} {how} (KeyNet {way.size}, the best on val): {metric} minus that of x at equal "
        f"cost, where it is highest: {', '.join(words)}"
    )


def _lead_table(pairs: Sequence[Pair], metric: Metric) -> Table:
    rows = []
    for base, ours in pairs:
        values = {
            axis: "-" if math.isnan(value) else f"{value:+.3f}"
            for axis, value in leads(base, ours, metric).items()
        }
        best = [f"{family.recalls(metric).max():.3f}" for family in (base, ours)]
        rows.append([ours.name, *best, *(values.get(axis, "not told") for axis in AXES)])
    head = ["backend: model", f"best {metric} with x", "with the model", *AXES.values()]
    note = (
        f"The largest lead in {metric} over x at equal cost, over all budgets that both have (- where there "
        f"are none); below 0 the unmodified query is ahead everywhere."
    )
    note += f" {PAPER}" if metric == JUDGED else ""
    return Table(f"{title(metric)}: the largest lead over searching with x", head, rows, note)
