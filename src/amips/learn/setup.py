"""What a run is made of: the torch module of a network, where it begins, and the batches it learns from."""

from dataclasses import dataclass
from typing import Any

import torch

from amips.cells import trivial
from amips.errors import RunError
from amips.learn.affine_network import AffineNetwork, affine_network
from amips.learn.batches import Batches, CellBatches
from amips.learn.distributed import Group
from amips.learn.modules import Network
from amips.nets import (
    AffineArchitecture,
    AffineNet,
    Architecture,
    KeyNet,
    Linear,
    MaxAffine,
    Recipe,
    SupportNet,
    initial_model,
    spec_of,
    spec_to_json,
)
from amips.task import Task

Spec = SupportNet | KeyNet | Linear | MaxAffine


@dataclass(frozen=True)
class Setup:
    """A network before its first step.

    Args:
        task: what it learns from; of a network that predicts one key, without cells.
        through: the task with the cells through whose centroids such a network learns to route, if it does.
    """

    spec: Spec
    architecture: Architecture | AffineArchitecture
    network: Network | AffineNetwork
    batches: Batches | CellBatches
    task: Task
    through: Task | None

    @property
    def random(self) -> bool:
        """Whether it begins with random weights: then neither they nor what follows at once say anything."""
        return isinstance(self.network, Network)

    @property
    def routed(self) -> Task:
        """The task whose cells it chooses from."""
        return self.through or self.task

    def about(self) -> dict[str, Any]:
        """What its model says of its origin before anything is trained."""
        return {**self.task.fingerprints, "network": spec_to_json(self.spec)}


def set_up(
    task: Task, network: Spec | AffineNet, recipe: Recipe, seed: int, device: torch.device, group: Group
) -> Setup:
    """The network of a spec for a task, and its batches; RunError where the two do not go together.

    In the place of a spec a linear or max-affine router: its weights are what training begins with.
    """
    spec = spec_of(network) if isinstance(network, AffineNet) else network
    assert isinstance(spec, Spec)
    architecture = spec.architecture(task.n, task.d, task.c)
    if isinstance(network, AffineNet) and network.architecture != architecture:
        raise RunError(f"a router for d = {network.d}, c = {network.c}: the task has {task.d}, {task.c}")
    place = (seed, group.rank, group.world, device)
    if isinstance(architecture, AffineArchitecture):
        smooth = recipe.temperature if isinstance(spec, MaxAffine) and spec.smooth else 0.0
        assert isinstance(spec, Linear | MaxAffine)
        start = network if isinstance(network, AffineNet) else initial_model(task, spec, seed)
        affine = affine_network(start, smooth).to(device)
        return Setup(spec, architecture, affine, CellBatches(task, recipe, *place), task, None)
    if recipe.route_weight and task.c == 1:
        raise RunError("a routing loss needs a task with cells; label with cells=2 or more")
    cells = None
    if architecture.c < task.c:  # one key, whatever the cells
        if recipe.route_weight and recipe.listwise:
            raise RunError("listwise is for networks that score cells: a mapper predicts one key")
        cells, task = task, task.with_cells(trivial(task.key_vectors))
    through = cells if recipe.route_weight else None
    centroids = None if through is None else through.cells.centroids
    module = Network(architecture, seed, centroids).to(device)
    return Setup(
        spec, architecture, module, Batches(task, recipe, *place, through, architecture.kind), task, through
    )
