"""Seconds for a batch: scores and predicted keys of SupportNet and KeyNet, with torch and with numpy.

The paper's table says what a gradient costs beside a score. Seconds belong to a machine; the ratio of the
two can be compared, and so can the fraction of the machine's limit that each reaches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amips.bench import Chart, Panel, Series, Summary, Table, describe_machine, in_turns
from amips.learn import Network
from amips.nets import SIZES, KeyNet, Net, SupportNet
from amips.vectors import Floats
from paper.claims import Claim, Finding, claim_values, verdict
from paper.workspace import Workspace

WHERE = "Appendix A.1, Table 1"
DEPTH = 4
BATCH = 4096  # the paper's; a scale of fewer queries takes fewer
NETWORKS = {"SupportNet": SupportNet, "KeyNet": KeyNet}
TIMED_SIZES = ("S", "M", "L")
RUNTIMES = ("torch", "numpy")
OUTPUTS = ("score", "gradient")
COLUMNS = [(network, output) for network in NETWORKS for output in OUTPUTS]
PRODUCT = "product"  # a plain matrix product: the machine's limit
DEARER = 1.25  # a gradient that takes so many times as long as a score surely costs more,
ALIKE = 1.15  # ... and one up to so many times as long costs about the same

# Appendix "Timing Results": seconds for 4,096 queries of dimension 384, in the order of COLUMNS.
PAPER = {
    "Quora, 513K keys": {
        "S": (1.34e-3, 2.50e-3, 1.28e-3, 1.29e-3),
        "M": (2.18e-3, 4.08e-3, 2.13e-3, 2.12e-3),
        "L": (1.99e-3, 3.12e-3, 1.90e-3, 1.90e-3),
    },
    "Natural Questions, 2.6M keys": {
        "S": (4.56e-3, 8.64e-3, 4.46e-3, 4.46e-3),
        "M": (8.55e-3, 1.62e-2, 7.68e-3, 7.69e-3),
        "L": (7.08e-3, 1.23e-2, 6.00e-3, 5.99e-3),
    },
    "HotpotQA, 5.2M keys": {
        "S": (8.69e-3, 1.68e-2, 8.15e-3, 8.15e-3),
        "M": (1.59e-2, 3.05e-2, 1.49e-2, 1.49e-2),
        "L": (3.14e-2, 5.96e-2, 2.85e-2, 2.86e-2),
    },
}


@dataclass(frozen=True)
class Work:
    """What is timed: an output of a network of a size, or a plain matrix product, with a runtime."""

    runtime: str
    output: str  # one of OUTPUTS, or PRODUCT
    network: str = ""
    size: str = ""

    def __str__(self) -> str:
        """What it is called in the values of the summary."""
        return " ".join(word for word in (self.runtime, self.network, self.size, self.output) if word)


def networks(network: Network, x: Floats) -> dict[tuple[str, str], Callable[[], object]]:
    """(runtime, output) -> what computes it for the queries x; both runtimes use the same weights in memory.

    The predicted keys are the gradient. SupportNet's is the module's own chain rule, as in training;
    KeyNet's is its forward pass, and its scores are <F(x), x>.
    """
    weights = {name: network.weight(name).detach().numpy() for name in network.shapes}
    net, queries = Net(network.architecture, weights, {}), torch.from_numpy(x)

    def keys() -> Tensor:
        predicted: Tensor = network(queries)
        return predicted

    def key_scores() -> Tensor:
        return torch.einsum("mcd,md->mc", keys(), queries)

    is_key = network.architecture.kind == "key"
    return {
        ("torch", "score"): _untracked(key_scores if is_key else lambda: network(queries)),
        ("torch", "gradient"): _untracked(
            keys if is_key else lambda: network.scores_and_gradient(queries)[1]
        ),
        ("numpy", "score"): lambda: net.scores(x),
        ("numpy", "gradient"): lambda: net.keys(x),
    }


def _untracked(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run_it() -> Tensor:
        with torch.no_grad():
            return work()

    return run_it


def _products(batch: int, side: int) -> dict[str, dict[Work, Callable[[], object]]]:
    """For each runtime a matrix product [batch, side] x [side, side]."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((batch, side), np.float32), rng.standard_normal((side, side), np.float32)
    s, t = torch.from_numpy(a), torch.from_numpy(b)
    return {
        "torch": {Work("torch", PRODUCT): lambda: s @ t},
        "numpy": {Work("numpy", PRODUCT): lambda: a @ b},
    }


def run(workspace: Workspace) -> Summary:
    """Times of scores and gradients at the sizes S, M and L, beside the paper's."""
    few = workspace.scale.queries is not None and workspace.scale.queries < BATCH
    batch, side = (256, 512) if few else (BATCH, 2048)
    drawn = np.random.default_rng([workspace.seed, 3]).integers(workspace.queries.n, size=batch)
    x = workspace.queries.take(drawn)
    contenders = _products(batch, side)
    flops = {work: 2.0 * batch * side**2 for group in contenders.values() for work in group}
    widths = []
    # All sizes are in memory at once, so that all take turns: 70 % of the numbers that the keys have.
    for size in TIMED_SIZES:
        for kind, spec in NETWORKS.items():
            a = spec(size=size, depth=DEPTH).architecture(workspace.keys.n, workspace.keys.d, 1)
            widths.append(f"{kind} {size} {a.width:,}")
            for (runtime, output), compute in networks(Network(a, workspace.seed), x).items():
                work = Work(runtime, output, kind, size)
                contenders[runtime][work] = compute
                flops[work] = float(batch * (a.score_flops if output == "score" else a.key_flops()))
    times = in_turns([contenders[runtime] for runtime in RUNTIMES], workspace.scale.rounds)
    values = figures(times, flops)
    values["batch"] = batch
    findings = compare(values)
    return Summary(
        name="timing",
        title="What a gradient costs beside a score",
        verdict=verdict(findings),
        tables=[_times_table(values, workspace.keys.n), _rates_table(values)],
        charts=[_ratio_chart(values)],
        facts=[
            ("keys", f"{workspace.keys.n:,} of dimension {workspace.keys.d}"),
            ("widths", ", ".join(widths)),
        ],
        method=[
            f"Batches of {batch:,} queries, c = 1, networks of depth {DEPTH} (the paper's table does not "
            "give its depth) whose parameters are 5 %, 10 % and 20 % of n d. Weights are random: the time "
            "does not depend on them.",
            f"All contenders take turns, {workspace.scale.rounds} rounds after a warm one, on the CPU with "
            f"the threads that torch ({torch.get_num_threads()}) and numpy choose by themselves. Times are "
            "medians, ratios medians of the ratios within a round.",
            f"The limit is the faster of numpy's and torch's product [{batch:,}, {side:,}] x [{side:,}, "
            f"{side:,}] in float32 of the same round, {values['peak GFLOP/s']:.0f} GFLOP/s in the median. "
            "FLOPs are counted from the architecture: matrix products alone, one multiply-add is 2.",
            "SupportNet's gradient is the chain rule written out, as it is in training and search; "
            "KeyNet's is its forward pass.",
        ],
        command=workspace.command("timing"),
        machine={**describe_machine(), "torch": torch.__version__},
        values={**values, **claim_values(findings)},
    )


def figures(times: dict[Work, list[float]], flops: dict[Work, float]) -> dict[str, Any]:
    """Everything that is derived from the times: medians, quartiles, fractions of the limit, ratios."""
    values: dict[str, Any] = {}
    products = [work for work in times if work.output == PRODUCT]
    rounds = len(times[products[0]])
    limit = [max(flops[product] / times[product][i] for product in products) for i in range(rounds)]
    values["peak GFLOP/s"] = median(limit) / 1e9
    for work, seconds in times.items():
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        rate = median(flops[work] / s / top for s, top in zip(seconds, limit, strict=True))
        values[str(work)] = {"seconds": middle, "quartiles": [low, high], "flops": flops[work], "rate": rate}
    for size in TIMED_SIZES:
        for network in NETWORKS:
            for runtime in RUNTIMES:
                score, gradient = (Work(runtime, output, network, size) for output in OUTPUTS)
                values[f"{runtime} {network} {size} ratio"] = _ratio(times, gradient, score)
            for output in OUTPUTS:
                numpy, torched = (Work(runtime, output, network, size) for runtime in ("numpy", "torch"))
                values[f"numpy / torch {network} {size} {output}"] = _ratio(times, numpy, torched)
    return values


def _ratio(times: dict[Work, list[float]], work: Work, base: Work) -> float:
    return median(a / b for a, b in zip(times[work], times[base], strict=True))


def paper_ratios(network: str) -> list[float]:
    """Gradient over score in every row of the paper's table."""
    score = COLUMNS.index((network, "score"))
    return [row[score + 1] / row[score] for data in PAPER.values() for row in data.values()]


def _times_table(values: dict[str, Any], n: int) -> Table:
    rows = []
    for size in TIMED_SIZES:
        for runtime in RUNTIMES:
            seconds = [values[str(Work(runtime, o, network, size))]["seconds"] for network, o in COLUMNS]
            ratios = [values[f"{runtime} {network} {size} ratio"] for network in NETWORKS]
            rows.append([size, f"{runtime}, here, {n:,} keys", *_cells(seconds, ratios)])
        for data, table in PAPER.items():
            paper = table[size]
            ratios = [paper[1] / paper[0], paper[3] / paper[2]]
            rows.append([size, f"the paper, {data}", *_cells(paper, ratios)])
    head = ["size", "measured", *(f"{network} {output}, s" for network, output in COLUMNS)]
    note = (
        f"Seconds for a batch: {values['batch']:,} queries here, 4,096 in the paper, on hardware it does not "
        "name (its rates are those of a GPU). Only the ratios can be compared."
    )
    head += [f"{network} gradient / score" for network in NETWORKS]
    return Table("Seconds for a batch of queries", head, rows, note)


def _cells(seconds: Any, ratios: list[float]) -> list[str]:
    return [*(f"{s:.2e}" for s in seconds), *(f"{ratio:.2f}" for ratio in ratios)]


def _rates_table(values: dict[str, Any]) -> Table:
    rows = []
    for size in TIMED_SIZES:
        for runtime in RUNTIMES:
            measured = [values[str(Work(runtime, output, network, size))] for network, output in COLUMNS]
            cells = [
                f"{one['rate']:.0%} ({one['quartiles'][0]:.2e} to {one['quartiles'][1]:.2e})"
                for one in measured
            ]
            rows.append([size, runtime, *cells])
    head = ["size", "runtime", *(f"{network} {output}" for network, output in COLUMNS)]
    note = "In brackets the quartiles of the times in seconds."
    return Table(
        "How near to the machine's limit: fraction of the rate of a matrix product", head, rows, note
    )


def _ratio_chart(values: dict[str, Any]) -> Chart:
    parameters = [SIZES[size] for size in TIMED_SIZES]
    panels = []
    for network in NETWORKS:
        score = COLUMNS.index((network, "score"))
        series = [
            Series(runtime, parameters, [values[f"{runtime} {network} {size} ratio"] for size in TIMED_SIZES])
            for runtime in RUNTIMES
        ]
        for data, table in PAPER.items():
            ratios = [table[size][score + 1] / table[size][score] for size in TIMED_SIZES]
            series.append(Series(f"the paper, {data}", parameters, ratios, group="reference"))
        panels.append(Panel(network, "parameters / (n d)", "gradient / score", series, log_x=True))
    return Chart("ratio", "Time of a gradient over time of a score", panels)


def compare(values: dict[str, Any]) -> list[Finding]:
    """What a gradient costs beside a score, against the paper's table; then numpy against torch."""
    findings: list[Finding] = []
    for network in NETWORKS:
        here = {
            runtime: median(values[f"{runtime} {network} {size} ratio"] for size in TIMED_SIZES)
            for runtime in RUNTIMES
        }
        largest = [values[str(Work("torch", o, network, TIMED_SIZES[-1]))]["flops"] for o in OUTPUTS]
        paper = paper_ratios(network)
        if network == "KeyNet":
            text, reproduced = "KeyNet's gradient takes as long as its score", max(here.values()) <= ALIKE
        else:
            text = "SupportNet's gradient takes longer than its score"
            reproduced = min(here.values()) >= DEARER
        evidence = (
            f"{network}: a gradient takes {here['torch']:.2f} times as long as a score with torch and "
            f"{here['numpy']:.2f} times with numpy (medians over sizes); in the paper {median(paper):.2f} "
            f"({min(paper):.2f} to {max(paper):.2f}), by count of FLOPs {largest[1] / largest[0]:.2f}"
        )
        findings.append(Claim(text, WHERE, reproduced, evidence))
    slower = [
        values[f"numpy / torch {network} {size} {output}"]
        for network, output in COLUMNS
        for size in TIMED_SIZES
    ]
    rate = {
        runtime: median(values[str(Work(runtime, o, *c))]["rate"] for c in _sized() for o in OUTPUTS)
        for runtime in RUNTIMES
    }
    findings.append(
        f"numpy takes {median(slower):.2f} times as long as torch ({min(slower):.2f} to {max(slower):.2f}); "
        f"torch reaches {rate['torch']:.0%} and numpy {rate['numpy']:.0%} of the rate of a matrix product."
    )
    return findings


def _sized() -> list[tuple[str, str]]:
    return [(network, size) for network in NETWORKS for size in TIMED_SIZES]
