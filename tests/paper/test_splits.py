"""Both splits of one pool: who has relatives in training, one network for both, and results side by side."""

import math
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from amips import KeyNet
from amips.bench import Chart, Panel, Series, Summary, Table
from amips.errors import AmipsError
from amips.vectors import unit_rows
from helpers import make_world
from paper import run_experiment
from paper.claims import Claim, claim_values, claims_of, verdict
from paper.mappers import budget, portion_of
from paper.pool import NOISE, draw_pool
from paper.ratios import GENERATED, PEOPLE, paper_regimes, ratios_table, regime_of
from paper.routing import network_recipe
from paper.splits import NOT_RUN, claims_table, outcome, side_by_side, stamped
from paper.workspace import SCALES, Workspace

torch.set_num_threads(1)

POOLED = replace(
    SCALES["smoke"], name="pooled", keys=400, queries=600, held_out=60, copies=5, sources=80, samples=2048
)
ROLES = np.where(np.arange(500) % 10 == 0, "test", np.where(np.arange(500) % 10 == 1, "val", "train"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("splits") / "data"
    place.mkdir()
    keys, queries = make_world(1500, 2400, 16, seed=11)
    np.save(place / "keys.npy", keys)
    np.save(place / "queries.npy", queries)
    return place


@pytest.fixture(scope="module")
def workspace(data):
    return Workspace(data, POOLED, data.parent / "out")


def test_a_pool_leaks_by_rows_and_holds_out_by_source():
    ids = np.arange(3, 1003, 2)
    pool = draw_pool(ids, ROLES, copies=4, held_out=150, sources=None, seed=0)
    chosen = {
        (by, role): set(pool.source[(pool.by == by) & (pool.role == role)].tolist())
        for by, role in (
            ("", "train"),
            ("rows", "val"),
            ("rows", "test"),
            ("source", "val"),
            ("source", "test"),
        )
    }
    counts = {key: int(((pool.by == key[0]) & (pool.role == key[1])).sum()) for key in chosen}
    assert list(counts.values()) == [2000 - 300, 150, 150, 50, 50]
    trained = chosen["", "train"]
    for role in ("val", "test"):
        assert chosen["source", role] == set(ids[role == ROLES].tolist())  # one row of each
        assert not chosen["source", role] & trained
        assert chosen["rows", role] <= trained
    # Originals and copies are held out alike, in their proportion of 1 to 4.
    for by in ("rows", "source"):
        assert 0.6 < pool.noisy[pool.by == by].mean() < 0.95


def test_a_pool_keeps_within_bounds():
    pool = draw_pool(np.arange(500), ROLES, copies=4, held_out=500, sources=30, seed=0)
    assert (pool.by != "source").sum() == 30 * 5
    assert (
        (pool.by == "rows") & (pool.role == "val")
    ).sum() == 15  # a tenth: 500 would be more than there is
    same = draw_pool(np.arange(500), ROLES, copies=4, held_out=500, sources=30, seed=0)
    np.testing.assert_array_equal(pool.source, same.source)
    np.testing.assert_array_equal(pool.role, same.role)


def test_rows_are_queries_and_their_noisy_copies(workspace):
    views = workspace.pool_tasks()
    rows, pool = np.load(workspace.work / "pool.npy"), workspace.pool
    originals = workspace.queries.take(pool.source)
    np.testing.assert_array_equal(rows[~pool.noisy], originals[~pool.noisy])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), np.linalg.norm(originals, axis=1), rtol=1e-5)
    noise = (rows - originals)[pool.noisy].std()
    # Scaling back to the norm takes away the part of the noise along x: one of 16 directions.
    assert noise == pytest.approx(NOISE * math.sqrt(15 / 16), rel=0.05)
    for by, task in views.items():
        unit, _ = unit_rows(rows[(pool.by == by) & (pool.role == "test")])
        np.testing.assert_array_equal(task.test.queries, unit)
        np.testing.assert_array_equal(task.test.top_ids[:, 0], (unit @ task.keys.T).argmax(axis=1))
        assert len(task.val) == len(task.test)


def test_both_splits_share_training_and_one_of_them_shares_sources(workspace):
    by_rows, by_source = (workspace.by(split).task(4, runs=2) for split in ("rows", "source"))
    trained = set(by_rows.train.source.tolist())
    assert trained == set(by_source.train.source.tolist())
    assert set(by_rows.test.source.tolist()) <= trained
    assert not set(by_source.test.source.tolist()) & trained
    assert set(by_source.test.source.tolist()) == set(np.flatnonzero(workspace.split == "test").tolist())
    assert (by_rows.shares_sources, by_source.shares_sources) == (True, False)
    assert by_rows.fingerprints == by_source.fingerprints
    assert by_rows.test.cell_scores.shape == (len(by_rows.test), 4)
    # One network for both: it is trained once, and read back.
    models = [
        workspace.by(split).model(task, KeyNet("XS", depth=2), "one")
        for split, task in (("rows", by_rows), ("source", by_source))
    ]
    assert models[0].about == models[1].about
    assert workspace.run_directory("one", by_rows) == workspace.run_directory("one", by_source)


def test_equal_queries_cannot_be_in_training_and_held_out(tmp_path):
    keys, queries = make_world(200, 600, 16, seed=6)
    queries[300:] = queries[:300]
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", queries)
    workspace = Workspace(tmp_path, replace(POOLED, keys=None, queries=None), tmp_path / "out")
    task = workspace.pool_tasks()["source"]
    seen = {row.tobytes() for row in workspace.queries.take(np.unique(task.train.source))}
    assert not seen & {row.tobytes() for row in workspace.queries.take(np.unique(task.test.source))}


def test_a_split_is_one_of_two(workspace):
    with pytest.raises(AmipsError, match="split='time': expected one of rows source"):
        workspace.by("time")


def test_by_rows_without_sources_has_at_least_five_rows_a_query(data, tmp_path):
    workspace = Workspace(data, replace(POOLED, sources=None, copies=1), tmp_path / "out")
    task = workspace.by("rows").task()
    assert np.bincount(task.train.source).max() == 5
    assert task.shares_sources
    assert not workspace.task().shares_sources


def summary_of(split: str, value: float) -> Summary:
    claim = Claim(
        "networks gain", "Section 4", value > 0, f"gain {value}", value=value, low=value, high=value
    )
    chart = Chart("gain", "Gains", [Panel("", "x", "y", [Series("a", [1.0], [value])])])
    table = Table("Gains", ["gain"], [[f"{value}"]])
    facts = [("keys", "10"), ("test queries", split)]
    return Summary(
        "x",
        "X",
        verdict([claim, "More."]),
        [table],
        [chart],
        facts,
        values={"gain": value, **claim_values([claim])},
    )


def test_results_of_both_splits_stand_side_by_side():
    found = {
        "rows": stamped(summary_of("a", 0.25), "rows"),
        "source": stamped(summary_of("b", -0.5), "source"),
    }
    both = side_by_side(found)
    assert [claim.split for claim in claims_of(both)] == ["rows", "source"]
    assert {claim.sentence() for claim in claims_of(both)} <= set(both.verdict)
    assert both.tables[0].rows == [
        ["networks gain", "Section 4", "held: 0.250 (0.250 to 0.250)", "not held: -0.500 (-0.500 to -0.500)"]
    ]
    assert [table.title for table in both.tables[1:]] == ["Gains, split by rows", "Gains, split by source"]
    assert [chart.name for chart in both.charts] == ["gain-rows", "gain-source"]
    assert both.facts == [
        ("keys", "10"),
        ("test queries, split by rows", "a"),
        ("test queries, split by source", "b"),
    ]
    assert both.values["splits"] == {"rows": {"gain": 0.25}, "source": {"gain": -0.5}}


def test_what_was_not_run_says_so():
    claim = Claim("a", "Section 1", True, "b", split="rows")
    assert claims_table([claim], ("rows", "source")).rows == [["a", "Section 1", "held", NOT_RUN]]
    assert outcome([]) == NOT_RUN


def test_an_experiment_under_both_splits(data, tmp_path):
    out = tmp_path / "out"
    both = run_experiment("routing", data=data, out=out, scale="smoke", split="both")
    assert both.command.endswith(" --split both")
    assert {claim.split for claim in claims_of(both)} == {"rows", "source"}
    alone = run_experiment("routing", data=data, out=out, scale="smoke", split="source")
    assert alone.values["accuracy"] == both.values["splits"]["source"]["accuracy"]
    assert alone.command.endswith(" --split source")
    rows = run_experiment("routing", data=data, out=out, scale="smoke", split="rows")
    assert {claim.split for claim in claims_of(rows)} == {"rows"}
    assert rows.values["accuracy"] == both.values["splits"]["rows"]["accuracy"]


@pytest.mark.parametrize(
    ("name", "split", "match"),
    [
        ("leak", "rows", "leak measures both splits at once; leave out split"),
        ("repeats", "rows", "repeats splits a log by time; leave out split"),
        ("timing", "rows", "timing learns nothing from queries and is the same under every split"),
        ("routing", "time", "expected source, rows or both"),
    ],
)
def test_a_split_that_cannot_be(data, tmp_path, name, split, match):
    with pytest.raises(AmipsError, match=match):
        run_experiment(name, data=data, out=tmp_path, scale="smoke", split=split)


def test_ratios_follow_from_the_numbers():
    regimes = {(one.name, one.reading): one for one in paper_regimes()}
    assert len(regimes) == 8
    nq = regimes["NQ", PEOPLE]
    assert nq.parameters(0.01) / nq.sources == pytest.approx(0.01 * 2_600_000 * 384 / 3452)
    assert nq.epochs == (3e9 / 345_200, 3e9 / 17_260)
    # Three generated queries a key: the parameters of a source query do not depend on the data set.
    for name in ("FIQA", "Quora", "NQ", "HotpotQA"):
        one = regimes[name, GENERATED]
        assert one.parameters(0.01) / one.sources == pytest.approx(1.28)


def test_the_replica_keeps_the_papers_ratios():
    ours = regime_of(SCALES["replica"])
    people = {
        one.name: one.parameters(0.01) / one.sources for one in paper_regimes() if one.reading == PEOPLE
    }
    assert people["HotpotQA"] < ours.parameters(0.01) / ours.sources < people["NQ"]
    assert 5 <= ours.each[0] <= 100
    assert [row[0] for row in ratios_table().rows[-2:]] == ["ours, replica", "ours, replica100k"]


def test_routers_of_the_replica_weigh_scores_as_the_published_code_does(workspace):
    assert network_recipe(workspace, 16) == workspace.recipe()
    recipe = network_recipe(replaced(workspace, name="replica"), 16)
    assert (recipe.score, recipe.consist) == (16 * 0.01, 16 * 0.01)
    assert (recipe.grad, recipe.key) == (1.0, 1.0)
    scored = network_recipe(replaced(workspace, name="replica"), 16, 100.0)
    assert (scored.score, scored.consist) == (100 * 16 * 0.01, 16 * 0.01)


def test_each_split_has_a_place_for_all_parts_of_an_experiment(workspace):
    """A part of one split must not make the place of the other before it is there."""
    rows, source = (workspace.by(split) for split in ("rows", "source"))
    assert source.results("ivf/returned-0.1") == workspace.out / "ivf" / "returned-0.1"
    assert rows.results("ivf/returned-0.1") == workspace.out / "ivf-by-rows" / "returned-0.1"
    assert rows.results("ivf") == workspace.out / "ivf-by-rows"


def test_networks_of_the_replica_have_three_units(workspace):
    assert budget(workspace) == "2,048 samples"
    replica = replaced(workspace, name="replica")
    assert (portion_of(replica), budget(replica)) == (3.0, "3 times 2,048 samples")


def replaced(workspace, **fields):
    """The workspace at a scale with other fields."""
    other = copy(workspace)
    other.scale = replace(workspace.scale, **fields)
    return other
