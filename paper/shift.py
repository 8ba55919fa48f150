"""How far the queries lie from the keys: both in the plane of the keys' two leading principal components,
and the scores of the true top keys.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.bench import Chart, Grid, Panel, Series, Summary, Table, describe_machine
from amips.vectors import Floats, Vectors
from paper.claims import Claim, Finding, claim_values, verdict
from paper.workspace import Workspace

Doubles = NDArray[np.float64]

APART = 0.05  # densities whose overlap is so much below that of two halves of the keys are apart
SATURATED = 0.8  # a mean top score from here on is that of near duplicates; the paper's Quora has 0.86
MOST_ROWS = 100_000  # keys that the components are fitted on, and queries that are projected
MOST_POINTS = 2000  # of each kind in the scatter
BINS = 64  # of the densities, on each axis
BARS = 40  # of the histogram
BLOCK = 8192  # rows in float64 at once

# Appendix "Distributional differences between queries and keys": mean and median of <x, y*(x)>.
PAPER = {"Quora": (0.86, 0.88), "Natural Questions": (0.71, None), "HotpotQA": (0.74, None)}


@dataclass(frozen=True)
class Plane:
    """The two leading principal components of a set of rows.

    `axes` [2, d] are orthonormal, `variances` those along them, `total` the sum over all d directions.
    """

    mean: Doubles
    axes: Doubles
    variances: Doubles
    total: float

    @property
    def explained(self) -> Doubles:
        """The fraction of the variance along each axis."""
        return self.variances / self.total

    def project(self, rows: Floats) -> Doubles:
        """The coordinates <a_i, x - mean>, [m, 2]."""
        blocks = [(rows[low : low + BLOCK] - self.mean) @ self.axes.T for low in range(0, len(rows), BLOCK)]
        return np.concatenate(blocks)


def principal_plane(rows: Floats) -> Plane:
    """Eigenvectors of the covariance (1 / n) sum (y - mean)(y - mean)^T with the two largest eigenvalues."""
    n, d = rows.shape
    mean = rows.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((d, d))
    for low in range(0, n, BLOCK):
        centred = rows[low : low + BLOCK] - mean
        covariance += centred.T @ centred
    values, vectors = np.linalg.eigh(covariance / n)  # rising
    axes = vectors[:, :-3:-1].T
    # The sign of an eigenvector is arbitrary: its largest entry is made positive, so that charts of the
    # same data look the same everywhere.
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    return Plane(mean, axes * np.sign(largest), values[:-3:-1], float(values.sum()))


def edges_of(*clouds: Doubles, bins: int = BINS) -> tuple[Doubles, Doubles]:
    """Edges of equal bins on both axes that hold every point of every cloud [m, 2]."""
    points = np.concatenate(clouds)
    low, high = points.min(axis=0), points.max(axis=0)
    room = np.where(high > low, 0.05 * (high - low), 1.0)
    x, y = np.linspace(low - room, high + room, bins + 1).T
    return x, y


def density(points: Doubles, edges: tuple[Doubles, Doubles], bandwidth: Doubles) -> Doubles:
    """A smoothed 2-D histogram P [bins of x, bins of y] that sums to 1: P = K_x H K_y^T.

    H is the fraction of the points in each bin, K the Gaussian kernel exp(-(u - v)^2 / 2 h^2) between the
    centres of the bins of one axis, each column scaled to sum to 1: no mass is lost at the border.
    """
    fractions = np.histogram2d(points[:, 0], points[:, 1], bins=list(edges))[0] / len(points)
    kernels = []
    for edge, h in zip(edges, bandwidth, strict=True):
        centres = (edge[1:] + edge[:-1]) / 2
        kernel = np.exp(-0.5 * np.square((centres[:, None] - centres[None, :]) / h))
        kernels.append(kernel / kernel.sum(axis=0))
    smoothed: Doubles = kernels[0] @ fractions @ kernels[1].T
    return smoothed


def scott(points: Doubles, count: int, edges: tuple[Doubles, Doubles]) -> Doubles:
    """Scott's bandwidth in the plane, sigma count^(-1/6) on each axis, but at least half a bin."""
    least = np.array([edge[1] - edge[0] for edge in edges]) / 2
    widths: Doubles = np.maximum(points.std(axis=0) * count ** (-1 / 6), least)
    return widths


def overlap(p: Doubles, q: Doubles) -> float:
    """sum min(p, q): 1 for equal densities, 0 for densities that share no place."""
    return float(np.minimum(p, q).sum())


def run(workspace: Workspace) -> Summary:
    """The shift between queries and keys, as charts and as numbers."""
    rng = np.random.default_rng([workspace.seed, 2])
    keys, queries = _sample(workspace.keys, rng), _sample(workspace.queries, rng)
    plane = principal_plane(keys)
    at_keys, at_queries = plane.project(keys), plane.project(queries)
    apart = float(np.linalg.norm(queries.mean(axis=0, dtype=np.float64) - plane.mean))
    edges = edges_of(at_keys, at_queries)
    # One bandwidth for both: densities that are smoothed differently would differ for that alone.
    bandwidth = scott(at_keys, min(len(keys), len(queries)), edges)
    of_keys, of_queries = (density(points, edges, bandwidth) for points in (at_keys, at_queries))
    # What samples of one distribution give: two random halves of the keys.
    halves = rng.permutation(len(at_keys))
    half = max(1, len(at_keys) // 2)
    floor = overlap(*(density(at_keys[ids], edges, bandwidth) for ids in (halves[:half], halves[-half:])))
    scores = np.asarray(workspace.mapping_task().test.top_scores[:, 0], np.float64)
    values = {
        "explained": plane.explained.tolist(),
        "apart": apart,
        "apart_relative": apart / float(np.sqrt(plane.total)),
        "overlap": overlap(of_keys, of_queries),
        "overlap_of_halves": floor,
        "top1_mean": float(scores.mean()),
        "top1_median": float(np.median(scores)),
        "top1_queries": len(scores),
    }
    findings = compare(values)
    panels = [
        _scatter(_some(at_keys, rng), _some(at_queries, rng)),
        _density_panel("keys", of_keys, edges),
        _density_panel("queries", of_queries, edges),
    ]
    return Summary(
        name="shift",
        title="How far the queries lie from the keys",
        verdict=verdict(findings),
        tables=[_scores_table(values), _shift_table(values)],
        charts=[
            Chart(
                "plane",
                "Keys and queries in the plane of the keys' principal components",
                panels,
                "Each density is normalised by itself: compare shapes and places, not heights.",
            ),
            _histogram(scores, values),
        ],
        facts=[
            ("keys", f"{workspace.keys.n:,} of dimension {workspace.keys.d}"),
            ("queries", f"{workspace.queries.n:,}, of which {len(scores):,} held out"),
        ],
        method=[
            f"Principal components: eigenvectors of the covariance of {len(keys):,} keys drawn at random; "
            f"{len(queries):,} queries drawn at random are projected onto them.",
            f"Densities: histograms of {BINS} x {BINS} bins smoothed with a Gaussian of Scott's width, the "
            "same for keys and queries. The overlap is the sum over bins of the smaller of the two; two "
            "random halves of the keys show what sampling alone takes from 1.",
            "The distance of the means is taken in all dimensions and divided by the root mean square "
            "distance of the keys from their mean.",
            f"Top-1 scores: exact <x, y*(x)> over all {workspace.keys.n:,} keys for the {len(scores):,} "
            "held-out queries, without noise.",
        ],
        command=workspace.command("shift"),
        machine=describe_machine(),
        values={**values, **claim_values(findings)},
    )


def _sample(vectors: Vectors, rng: np.random.Generator) -> Floats:
    if vectors.n <= MOST_ROWS:
        return vectors.load()
    return vectors.take(np.sort(rng.choice(vectors.n, MOST_ROWS, replace=False)))


def _some(points: Doubles, rng: np.random.Generator) -> Doubles:
    return points[rng.permutation(len(points))[:MOST_POINTS]]


def _rounded(values: Doubles) -> list[float]:
    """Four digits: as much as a chart shows."""
    return [float(f"{value:.4g}") for value in values.ravel()]


def _scatter(keys: Doubles, queries: Doubles) -> Panel:
    clouds = [
        Series("keys", _rounded(keys[:, 0]), _rounded(keys[:, 1]), kind="points", group="baseline"),
        Series("queries", _rounded(queries[:, 0]), _rounded(queries[:, 1]), kind="points"),
    ]
    return Panel("both", "component 1", "component 2", clouds)


def _density_panel(name: str, p: Doubles, edges: tuple[Doubles, Doubles]) -> Panel:
    x, y = (_rounded((edge[1:] + edge[:-1]) / 2) for edge in edges)
    grid = Grid(f"fraction of the {name}", x, y, [_rounded(row) for row in p.T])
    return Panel(f"density of {name}", "component 1", "component 2", grids=[grid])


def _histogram(scores: Doubles, values: dict[str, Any]) -> Chart:
    counts, edges = np.histogram(scores, bins=BARS)
    bars = Series(
        "held-out queries",
        _rounded((edges[1:] + edges[:-1]) / 2),
        _rounded(counts / len(scores)),
        kind="bars",
    )
    marks = [("mean", values["top1_mean"]), ("median", values["top1_median"])]
    panel = Panel("", "score of the top key <x, y*(x)>", "fraction of queries", [bars], marks=marks)
    return Chart("top1", "Scores of the top keys of held-out queries", [panel])


def _scores_table(values: dict[str, Any]) -> Table:
    rows = [["here", f"{values['top1_mean']:.2f}", f"{values['top1_median']:.2f}"]]
    for name, (mean, median) in PAPER.items():
        rows.append([f"the paper, {name}", f"{mean:.2f}", "not given" if median is None else f"{median:.2f}"])
    return Table("Score of the top key", ["data", "mean", "median"], rows)


def _shift_table(values: dict[str, Any]) -> Table:
    explained = " and ".join(f"{fraction:.1%}" for fraction in values["explained"])
    rows = [
        ["variance of the keys along the two components", explained],
        ["distance of the means", f"{values['apart']:.3f}"],
        ["... over the spread of the keys", f"{values['apart_relative']:.2f}"],
        ["overlap of the densities in the plane", f"{values['overlap']:.2f}"],
        ["... of two random halves of the keys", f"{values['overlap_of_halves']:.2f}"],
    ]
    note = "The plane shows a part of the variance only: queries may lie apart in directions outside of it."
    return Table("The shift in numbers", ["what", "value"], rows, note)


def compare(values: dict[str, Any]) -> list[Finding]:
    """How far queries and keys are apart, against what the paper says of its data."""
    paper = ", ".join(f"{mean:.2f} on {name}" for name, (mean, _) in PAPER.items())
    return [
        Claim(
            "queries and keys are distributed differently",
            "Appendix A.10, Figure 29",
            values["overlap"] < values["overlap_of_halves"] - APART,
            f"The densities of queries and keys overlap by {values['overlap']:.2f} in the plane of the keys' "
            f"first two components (two halves of the keys: {values['overlap_of_halves']:.2f})",
        ),
        Claim(
            "where queries and keys differ, the top key scores well below 1",
            "Appendix A.10, Figure 30",
            values["top1_mean"] < SATURATED,
            f"The top key of a held-out query scores {values['top1_mean']:.2f} on average (median "
            f"{values['top1_median']:.2f}); in the paper {paper}",
        ),
        f"The means of queries and keys lie {values['apart_relative']:.2f} spreads of the keys apart.",
    ]
