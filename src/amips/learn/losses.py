"""The losses of the paper, averaged over the batch and over cells; squared norms are sums over d.

    SupportNet   score    (f(x)_j - sigma_j(x))^2
                 grad     ||grad f(x)_j - y*_j(x)||^2
    KeyNet       key      ||F(x)_j - y*_j(x)||^2
                 consist  (<F(x)_j, x> - sigma_j(x))^2

    all          route    -sum_j p_j log softmax(f(x) / t)_j,
                          p = (1 - l) x (fraction of the top keys in cell j) + l softmax(sigma(x) / t_l)_j

The authors' published code averages `grad` and `key` over d, so that score and consist weigh d times more
beside them: `reduction="mean"` minimises that. The parts that are logged are sums either way.

The first part of p says where the top keys are, the second (listwise) how good the best key of every cell is.
Linear and max-affine routers have this loss only, and begin at the centroids, where it is small already; with
m training queries, anchor / m ||W - W0||^2 beside it keeps cells that few queries ask for near there. A
KeyNet that predicts one key is routed through fixed centroids: f(x)_j = <F(x), centroid_j>.

All c gradients of every query are too much, and with many cells all target keys are. Then `grad` and `key`
are estimated from s cells S drawn uniformly for each query, without bias. KeyNet averages over S. SupportNet
draws a sign e_j = +-1 for each drawn cell and uses

    1/s || sum_{j in S} e_j (grad f(x)_j - y*_j(x)) ||^2,

one reverse pass for all of S: signs are independent with mean 0, so cross terms vanish in expectation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from amips.learn.affine_network import AffineNetwork
from amips.learn.modules import Network
from amips.nets import Recipe


@dataclass(frozen=True)
class Batch:
    """Queries x [m, d], support values sigma [m, c], and the top keys of the cells in `cells`.

    `cells` [m, s] names the cells drawn for each query, None means all c; `targets` [m, s or c, d].
    """

    x: Tensor
    sigma: Tensor
    targets: Tensor
    cells: Tensor | None = None
    signs: Tensor | None = None
    top: Tensor | None = None  # the cells of the top keys [m, t], for the routing loss


@dataclass(frozen=True)
class CellBatch:
    """Queries x [m, d], the cells [m, t] of their top t keys and, for a listwise loss, sigma [m, c].

    `anchor` is the weight of ||W - W0||^2.
    """

    x: Tensor
    cells: Tensor
    sigma: Tensor | None = None
    anchor: float = 0.0


def draw_cells(rows: int, c: int, sampled: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """s different cells for each row, uniformly, and a sign for each: [rows, s] both."""
    s = min(sampled, c)
    if s * 4 > c:
        cells = torch.rand(rows, c, generator=generator).argsort(dim=1)[:, :s]
    else:
        # One random start and s evenly spaced steps around the circle of cells: every cell is as likely,
        # no two are the same, and it costs one random number.
        start = torch.randint(c, (rows, 1), generator=generator)
        cells = (start + torch.arange(s) * (c // s)) % c
    signs = torch.randint(2, (rows, s), generator=generator, dtype=torch.float32) * 2 - 1
    return cells, signs


def support_losses(network: Network, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """`score` and `grad`, and the scores of all cells."""
    if batch.cells is None:
        scores, gradients = network.scores_and_gradient(batch.x)
        grad = (gradients - batch.targets).square().sum(dim=2).mean()
    else:
        assert batch.signs is not None
        combine = torch.zeros_like(batch.sigma).scatter_(1, batch.cells, batch.signs)
        scores, gradients = network.scores_and_gradient(batch.x, combine)
        target = torch.einsum("ms,msd->md", batch.signs, batch.targets)
        grad = (gradients[:, 0] - target).square().sum(dim=1).mean() / batch.cells.shape[1]
    return {"score": (scores - batch.sigma).square().mean(), "grad": grad}, scores


def key_losses(network: Network, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """`key` and `consist`, and the scores of all cells: of one key, <F(x), centroid> where there are any."""
    predicted = network(batch.x)
    scores = torch.einsum("mcd,md->mc", predicted, batch.x)
    routed = scores if network.centroids is None else predicted[:, 0] @ network.centroids.T
    if batch.cells is not None:
        predicted = torch.take_along_dim(predicted, batch.cells[:, :, None], dim=1)
    key = (predicted - batch.targets).square().sum(dim=2).mean()
    return {"key": key, "consist": (scores - batch.sigma).square().mean()}, routed


def route_loss(scores: Tensor, cells: Tensor, sigma: Tensor | None, recipe: Recipe) -> Tensor:
    """Cross-entropy of softmax(scores / t) with where the top keys are and how good each cell's best is."""
    chances = torch.log_softmax(scores.float() / recipe.temperature, dim=1)
    loss = -chances.gather(1, cells).mean()
    if not recipe.listwise:
        return loss
    assert sigma is not None
    listed = torch.softmax(sigma / recipe.listwise_temperature, dim=1)
    return (1 - recipe.listwise) * loss - recipe.listwise * (listed * chances).sum(dim=1).mean()


def total_loss(
    network: Network | AffineNetwork, batch: Batch | CellBatch, recipe: Recipe
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum that is minimised, and its parts."""
    if isinstance(batch, CellBatch):
        assert isinstance(network, AffineNetwork)
        loss = route_loss(network(batch.x), batch.cells, batch.sigma, recipe)
        if not batch.anchor:
            return loss, {"route": loss}
        moved = network.moved()
        return loss + batch.anchor * moved, {"route": loss, "moved": moved}
    assert isinstance(network, Network)
    over = batch.x.shape[1] if recipe.reduction == "mean" else 1
    if network.architecture.kind == "key":
        parts, scores = key_losses(network, batch)
        total = recipe.key / over * parts["key"] + recipe.consist * parts["consist"]
    else:
        parts, scores = support_losses(network, batch)
        total = recipe.score * parts["score"] + recipe.grad / over * parts["grad"]
    if recipe.route_weight:
        assert batch.top is not None
        parts["route"] = route_loss(scores, batch.top, batch.sigma, recipe)
        total = total + recipe.route_weight * parts["route"]
    a = network.architecture
    if a.kind == "support" and a.nonnegative == "penalty" and recipe.penalty:
        parts["penalty"] = network.penalty()
        total = total + recipe.penalty * parts["penalty"]
    return total, parts
