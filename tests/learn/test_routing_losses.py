"""The routing loss by hand, in every network that can have it, and mappers trained through centroids."""

import json

import numpy as np
import pytest
import torch

import amips
from amips import Design, KeyNet, Linear, Recipe, RunError, SupportNet
from amips.builder import Builder
from amips.cells import kmeans
from amips.learn.losses import route_loss
from amips.search import estimate_routing

torch.set_num_threads(1)


def by_hand(scores, cells, sigma, recipe):
    total = 0.0
    for row, scanned, values in zip(scores, cells, sigma, strict=True):
        logs = row / recipe.temperature - np.log(np.exp(row / recipe.temperature).sum())
        listed = np.exp(values / recipe.listwise_temperature)
        wanted = np.bincount(scanned, minlength=len(row)) / len(scanned)
        p = (1 - recipe.listwise) * wanted + recipe.listwise * listed / listed.sum()
        total -= (p * logs).sum()
    return total / len(scores)


@pytest.mark.parametrize("listwise", [0.0, 0.3, 1.0])
def test_the_loss_by_hand(listwise):
    rng = np.random.default_rng(0)
    scores, sigma = rng.standard_normal((2, 5, 7))
    cells = rng.integers(0, 7, (5, 3))
    recipe = Recipe(listwise=listwise, temperature=0.5, listwise_temperature=0.25)
    got = route_loss(*map(torch.tensor, (scores, cells, sigma)), recipe)
    assert float(got) == pytest.approx(by_hand(scores, cells, sigma, recipe))


@pytest.mark.parametrize("network", [SupportNet(width=16, depth=2), KeyNet(width=16, depth=2)], ids=str)
def test_a_network_with_the_loss_routes_better(task, tmp_path, network):
    """The same network and samples; entropy is of softmax(scores / t), t fitted for each."""
    scanned = {}
    for route in (0.0, 1.0):
        recipe = Recipe(batch=128, route_weight=route, route_top=10)
        model = amips.train(task, network, recipe=recipe, samples=30_000, out=tmp_path / f"{route}")
        seen = estimate_routing(amips.build(task, model, storage="flat", spill_fraction=0.0), task.val)
        scanned[route] = seen.at_mass(seen.min_mass_for(0.9)).scanned.mean()
        log = [json.loads(line) for line in (tmp_path / f"{route}" / "log.jsonl").read_text().splitlines()]
        assert ("route" in log[-1]["train"]) == (route > 0)
    assert scanned[1.0] < scanned[0.0]


def test_a_mapper_trained_through_centroids(task, tmp_path):
    scanned = {}
    for route in (0.0, 1.0):
        recipe = Recipe(batch=128, route_weight=route, route_top=10)
        network = KeyNet(width=16, depth=2, mapper=True)
        model = amips.train(task, network, recipe=recipe, samples=30_000, out=tmp_path / f"{route}")
        assert model.c == 1  # whatever cells the task has
        seen = estimate_routing(amips.build(task, model, storage="flat", spill_fraction=0.0), task.val)
        scanned[route] = seen.at_mass(seen.min_mass_for(0.9)).scanned.mean()
    assert scanned[1.0] < scanned[0.0]


def test_a_run_knows_the_cells_it_was_trained_through(task, tmp_path):
    network, recipe = KeyNet(width=8, depth=1, mapper=True), Recipe(batch=64, route_weight=0.1)
    amips.train(task, network, recipe=recipe, samples=128, out=tmp_path / "run")
    other = task.with_cells(kmeans(np.asarray(task.keys), 8, seed=5))
    with pytest.raises(RunError, match="other inputs or options"):
        amips.train(other, network, recipe=recipe, samples=128, out=tmp_path / "run")


def test_without_the_loss_a_mapper_knows_no_cells(task, tmp_path):
    network, recipe = KeyNet(width=8, depth=1, mapper=True), Recipe(batch=64)
    first = amips.train(task, network, recipe=recipe, samples=128, out=tmp_path / "run")
    other = task.with_cells(kmeans(np.asarray(task.keys), 8, seed=5))
    again = amips.train(other, network, recipe=recipe, samples=128, out=tmp_path / "run")
    np.testing.assert_array_equal(first.keys(task.val.queries), again.keys(task.val.queries))


@pytest.mark.parametrize(
    ("network", "recipe", "which", "words"),
    [
        (KeyNet(width=8, depth=1), Recipe(route_weight=0.1), "task1", "needs a task with cells"),
        (
            KeyNet(width=8, depth=1, mapper=True),
            Recipe(route_weight=0.1, listwise=0.5),
            "task",
            "a mapper predicts",
        ),
        (Linear(), Recipe(listwise=0.5), "bare", "no targets for each cell"),
    ],
    ids=["no cells", "listwise mapper", "listwise without targets"],
)
def test_what_cannot_be(request, task, tmp_path, network, recipe, which, words):
    on = task.with_cells(task.cells) if which == "bare" else request.getfixturevalue(which)
    with pytest.raises(RunError, match=words):
        amips.train(on, network, recipe=recipe, samples=64, out=tmp_path / "run")


def test_the_baseline_never_has_query_aware_cells(world, tmp_path):
    task = amips.label(
        *world, cells=8, query_aware=1.5, copies=0, val=100, test=100, k=10, out=tmp_path / "t"
    )
    builder = Builder(task, tmp_path / "work")
    assert builder.cells(Design(8, 1.5)) is task.cells
    plain = kmeans(np.asarray(task.keys), 8, seed=0)
    np.testing.assert_array_equal(builder.cells(Design.plain(8)).assignment, plain.assignment)
    assert (plain.assignment != task.cells.assignment).any()
