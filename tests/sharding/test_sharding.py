import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest

import amips
from amips.cells import kmeans
from amips.routers import CentroidRouter, RoutingEstimate
from amips.sharding import (
    LocalShards,
    ShardRouter,
    Wants,
    divide,
    expected_shards,
    group_cells,
    load_shards,
    shard_call,
)
from amips.sharding.deployment import ShardServer
from amips.sharding.merging import Merged
from amips.sharding.shard_measuring import search_shard
from amips.vectors import vectors
from helpers import kill_when, reseal


def recall_of(ids, task):
    return np.mean(
        [len(set(a) & set(b)) / 10 for a, b in zip(ids, np.asarray(task.test.top_ids), strict=True)]
    )


def queries_of(task):
    return np.asarray(task.test.queries)


# Grouping


def test_wants_are_the_shares_of_the_top_keys():
    wants = Wants(np.array([[0, 0, 1, 2], [2, 2, 2, 2]]), 4)
    assert wants.of(2)[0].tolist() == [0, 1]
    assert wants.of(2)[1].tolist() == [0.25, 1.0]
    assert wants.by_shard(np.array([0, 1, 1, 0]), 2).tolist() == [[0.5, 0.5], [0, 1]]
    assert len(wants.of(3)[0]) == 0


def test_expected_shards_is_the_chance_that_one_of_ten_lies_there():
    assert expected_shards(np.array([0.0, 0.5, 1.0], np.float32)).tolist() == [0, 1 - 0.5**10, 1]


@pytest.mark.parametrize("shards", [2, 5])
def test_groups_are_even_none_is_empty_and_cells_wanted_together_are_together(shards):
    rng = np.random.default_rng(0)
    c, topics = 60, np.arange(60) % shards
    centroids = rng.standard_normal((c, 8)).astype(np.float32)  # they say nothing of the topics
    sizes = rng.integers(5, 15, c)
    asked = rng.integers(shards, size=600)
    cells = np.stack([rng.choice(np.flatnonzero(topics == topic), 10) for topic in asked])
    group = group_cells(Wants(cells, c), centroids, sizes, shards, slack=0.1, seed=1)
    load = np.bincount(group, weights=sizes, minlength=shards)
    assert load.min() > 0
    assert load.max() <= 1.1 * sizes.sum() / shards
    spread = np.mean([len(np.unique(row)) for row in group[cells]])
    assert spread < 0.75 * np.mean([len(np.unique(row)) for row in rng.permutation(topics)[cells]])


def test_grouping_repeats_itself(shard_task):
    first, second = (divide(shard_task, 4, kinds=["centroid"], copies=0.2) for _ in range(2))
    assert (first.assignment == second.assignment).all()
    assert (first.second == second.second).all()


def test_a_query_asks_fewer_shards_than_with_centroids_on_plain_ones(shard_task):
    plain = kmeans(shard_task.key_vectors, 8)
    x, top = queries_of(shard_task), np.asarray(shard_task.test.top_ids)
    base = RoutingEstimate.by(CentroidRouter(plain.centroids), x, top, plain.assignment, plain.sizes)
    ours = divide(shard_task, 8, kinds=("centroid",), copies=0.2).estimate(shard_task.test)
    asked = [routing.at_mass(routing.min_mass_for(0.95)).probes.mean() for routing in (ours, base)]
    assert asked[0] < 0.95 * asked[1]  # 0.88 here: topics that are easily told apart leave little to gain


def test_shards_with_copies_keep_to_their_size(shard_task):
    partition = divide(shard_task, 5, kinds=("centroid",), copies=0.3, slack=0.05)
    assert partition.sizes.max() <= 1.05 * 1.3 * shard_task.n / 5
    assert (partition.second != partition.assignment).all()
    assert 0.2 < (partition.second >= 0).mean() <= 0.3


def test_masses_of_shards_are_sums_over_their_cells():
    centroids = np.eye(4, dtype=np.float32)
    router = ShardRouter(None, centroids, np.array([1, 0, 1, 0]), 0.5, 2)
    x = np.array([[1, 0, 0.5, 0]], np.float32)
    soft = np.exp(x[0] / 0.5) / np.exp(x[0] / 0.5).sum()
    assert np.exp(router.scores(x))[0] == pytest.approx([soft[1] + soft[3], soft[0] + soft[2]], rel=1e-5)


# Merging


def test_merging_keeps_the_best_and_counts_a_key_once():
    merged = Merged(2, 3, np.int64)
    merged.add(np.array([0]), (np.array([[3, 1, -np.inf]], np.float32), np.array([[7, 5, -1]])))
    merged.add(np.array([0]), (np.array([[3.0000002, 2, 1]], np.float32), np.array([[7, 9, 4]])))
    assert merged.ids.tolist() == [[7, 9, 4], [-1, -1, -1]]
    assert merged.scores[0].tolist() == pytest.approx([3, 2, 1])


def test_merging_takes_strings_of_any_length():
    merged = Merged(1, 2, "<U1")
    merged.add(np.array([0]), (np.array([[1.0]], np.float32), np.array([["a"]])))
    merged.add(np.array([0]), (np.array([[2.0]], np.float32), np.array([["longer"]])))
    assert merged.ids.tolist() == [["longer", "a"]]


# The index


def test_every_key_is_in_a_shard_under_its_own_number(sharded, shard_task):
    index = load_shards(sharded)
    labels = [index.local(shard).labels for shard in range(4)]
    assert set(np.concatenate(labels)) == set(range(shard_task.n))
    assert [len(each) for each in labels] == index.sizes.tolist()
    assert amips.load(sharded / "shard-002", watch=False).n == index.sizes[2]


def test_a_search_has_the_recall_asked_for_and_true_scores(sharded, shard_task):
    index, x = load_shards(sharded), queries_of(shard_task)
    scores, ids = index.search(x)
    assert recall_of(ids, shard_task) >= 0.93
    assert scores == pytest.approx((x[:, None] * shard_task.keys[ids]).sum(axis=2), abs=1e-5)
    assert index.ask(x).contacted.mean() < 3
    assert index.ask(x, recall=0.8).contacted.mean() < index.ask(x).contacted.mean()


def test_asking_for_everything_is_exact(sharded, shard_task):
    ids = load_shards(sharded).search(queries_of(shard_task), recall=1.0)[1]
    assert (ids == np.asarray(shard_task.test.top_ids)).all()


def test_probes_are_shards_and_costs_are_counted(sharded, shard_task):
    index, x = load_shards(sharded), queries_of(shard_task)[:20]
    assert index.ask(x, probes=2).contacted.tolist() == [2] * 20
    cost = index.cost(x, probes=2)
    assert cost.probed.tolist() == [2] * 20
    assert (cost.flops > index.cost(x, probes=1).flops).all()
    # Half of the keys of a bundle are in two of its cells.
    assert (index.cost(x, probes=4).scanned <= 1.5 * index.sizes.sum()).all()


def test_one_query_none_and_wrong_ones(sharded, shard_task):
    index, x = load_shards(sharded), queries_of(shard_task)
    assert (index.search(x[0])[1][0] == index.search(x)[1][0]).all()
    assert index.search(x[:0])[1].shape == (0, 10)
    with pytest.raises(amips.VectorError, match="this index needs numbers"):
        index.search(x[:, :3])
    with pytest.raises(amips.AmipsError, match="give one of recall, probes and min_mass"):
        index.search(x, recall=0.9, probes=1)


def test_a_silent_shard_is_an_error_that_says_what_is_missing(sharded, shard_task):
    index, x = load_shards(sharded), queries_of(shard_task)
    bundles = [index.local(shard) for shard in range(4)]
    broken = replace(index, shards=LocalShards([*bundles[:3], "it is gone"]))
    whole, answer = index.ask(x), broken.ask(x)
    asked = index.choose_shards(x)[:, 3]
    assert answer.silent == {3: "it is gone"}
    assert ((answer.missing > 0) == asked).all()
    mass = np.exp(index.router.scores(x)[:, 3] / index.temperature)
    total = np.exp(index.router.scores(x) / index.temperature).sum(axis=1)
    assert answer.missing[asked] == pytest.approx((mass / total)[asked], rel=1e-4)
    assert (answer.ids[~asked] == whole.ids[~asked]).all()
    lost = np.mean([len(set(a) - set(b)) / 10 for a, b in zip(whole.ids, answer.ids, strict=True)])
    assert 0 < lost <= answer.missing.mean() * 1.5
    with pytest.raises(
        amips.ShardsMissingError, match=r"shard 3 did not answer \(it is gone\): up to"
    ) as caught:
        broken.search(x)
    assert (caught.value.answer.ids == answer.ids).all()


# The directory


def test_a_shard_that_is_gone_is_an_error_or_missing(sharded, shard_task, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    shutil.rmtree(copy / "shard-001")
    with pytest.raises(amips.BundleError, match="partial=True"):
        load_shards(copy)
    answer = load_shards(copy, partial=True).ask(queries_of(shard_task), probes=4)
    assert list(answer.silent) == [1]
    assert (answer.missing > 0).all()


@pytest.mark.parametrize(
    "changes", [{"sizes": []}, {"d": 0}, {"points": [{}]}, {"ids": "<f8"}, {"temperature": 0}, {"trained": 2}]
)
def test_a_damaged_manifest_is_one_line(sharded, tmp_path, changes):
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    reseal(copy / "manifest.json", **changes)
    with pytest.raises(amips.BundleError, match="is damaged"):
        load_shards(copy)


def test_a_changed_router_is_noticed(sharded, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    group = np.load(copy / "router/shards.npy")
    np.save(copy / "router/shards.npy", group[::-1])
    with pytest.raises(amips.BundleError, match="SHA-256"):
        load_shards(copy)


def test_the_same_call_returns_what_is_there_and_another_is_refused(sharded, shard_task):
    before = (sharded / "manifest.json").read_bytes()
    amips.shard(shard_task, shards=4, out=sharded, minutes=0.02)
    assert (sharded / "manifest.json").read_bytes() == before
    with pytest.raises(amips.BundleError, match=r"other inputs or options \(copies\)"):
        amips.shard(shard_task, shards=4, out=sharded, minutes=0.02, copies=0.1)
    assert not (sharded / "work").exists()


def test_a_call_that_is_killed_is_continued(shard_task, tmp_path):
    call = f"import amips; amips.shard({str(shard_task.path)!r}, shards=4, out='{{}}', routers='centroid')"
    process = subprocess.Popen([sys.executable, "-c", call.format(tmp_path / "killed")])
    kill_when(process, (tmp_path / "killed/shard-001/manifest.json").exists, seconds=120)
    with pytest.raises(amips.BundleError, match="not a finished shards"):
        load_shards(tmp_path / "killed")
    stamp = (tmp_path / "killed/shard-000/manifest.json").stat().st_mtime_ns
    task = amips.task.load_task(shard_task.path)
    continued = amips.shard(task, shards=4, out=tmp_path / "killed", routers="centroid")
    whole = amips.shard(task, shards=4, out=tmp_path / "whole", routers="centroid")
    assert (tmp_path / "killed/shard-000/manifest.json").stat().st_mtime_ns == stamp
    x = queries_of(shard_task)
    assert (continued.search(x)[1] == whole.search(x)[1]).all()
    assert continued.points == whole.points


def test_a_bundle_is_sharded_by_its_log_and_keeps_its_ids(shard_task, tmp_path):
    names = [f"key {i}" for i in range(shard_task.n)]
    bundle = amips.build(shard_task, out=tmp_path / "bundle", ids=names)
    bundle.remove(["key 3"])
    bundle.close()
    index = amips.shard(tmp_path / "bundle", shards=3, out=tmp_path / "shards", routers="centroid")
    assert index.n == shard_task.n - 1
    x = queries_of(shard_task)
    ids = index.search(x, recall=1.0)[1]
    true = np.array(names)[np.asarray(shard_task.test.top_ids)]
    assert "key 3" not in ids
    assert (ids == true).mean() > 0.95
    amips.build(shard_task, out=tmp_path / "without", keep_log=0).close()
    with pytest.raises(amips.BundleError, match="keeps no log"):
        amips.shard(tmp_path / "without", shards=3, out=tmp_path / "other")


def test_shards_are_not_sharded_again(sharded, tmp_path):
    for source in (sharded, str(sharded), load_shards(sharded)):
        with pytest.raises(amips.BundleError, match="in shards already; shard the task or the bundle"):
            amips.shard(source, shards=2, out=tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_one_shard_is_open_at_a_time(shard_task, tmp_path, monkeypatch):
    amips.build(shard_task, out=tmp_path / "bundle").close()
    opened, alive, most = [], weakref.WeakSet(), []

    def load(path, **options):
        most.append(len(alive))
        opened.append((path.name, options["mmap"]))
        alive.add(index := amips.search.load(path, **options))
        return index

    monkeypatch.setattr(shard_call, "load", load)
    amips.shard(tmp_path / "bundle", shards=3, out=tmp_path / "shards", routers="centroid")
    assert opened == [("bundle", True), *((f"shard-{number:03d}", True) for number in range(3))]
    assert most == [0, 1, 1, 1]  # the bundle beside each


def test_keys_of_a_bundle_are_read_in_blocks(shard_task, monkeypatch):
    index, rows = amips.build(shard_task), []

    def keys_at(snapshot, numbers):
        rows.append(len(numbers))
        return amips.search.keys_at(snapshot, numbers)

    whole = shard_call._fingerprint(index)
    monkeypatch.setattr(shard_call, "keys_at", keys_at)
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 100 * 4 * shard_task.d)
    assert shard_call._fingerprint(index) == whole
    assert rows == [100] * 15
    index.remove([3])
    assert shard_call._fingerprint(index) != whole


def test_a_replica_may_leave_keys_on_disk(sharded):
    index = load_shards(sharded)
    one = str(sharded / "shard-000"), index.digests[0], int(index.sizes[0])
    server = ShardServer(*one, mmap=True)
    assert server.bundle.snapshot.store.directory is not None  # where its keys are mapped from
    assert ShardServer(*one).bundle.snapshot.store.directory is None
    x = np.ones((2, index.d), np.float32)
    here = search_shard(index.local(0), x, 5, 0.9)
    there = server.search(index.digests[0], x, 5, 0.9)
    assert (there[1] == here[1]).all()
    assert there[0] == pytest.approx(here[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shards": 1}, "shards=1"),
        ({"shards": 500}, "too few"),
        ({"copies": 2}, "copies=2"),
        ({"slack": 0}, "slack=0"),
        ({"routers": "best"}, "routers='best'"),
        ({"routers": []}, "routers: name at least one"),
    ],
)
def test_what_cannot_be_is_refused(shard_task, tmp_path, options, text):
    with pytest.raises(amips.AmipsError, match=text):
        amips.shard(shard_task, out=tmp_path / "out", **options)


@pytest.mark.slow
def test_networks_can_choose_shards(shard_task):
    partition = divide(shard_task, 4, kinds=("support", "key"), copies=0, minutes=0.05)
    assert set(partition.contacted) == {"support", "key"}
    assert partition.chosen == min(partition.contacted, key=partition.contacted.get)
    assert partition.router.scores(queries_of(shard_task)).shape == (200, 4)


def test_the_command(shard_task, tmp_path):
    from click.testing import CliRunner

    from amips.cli import cli

    words = [
        "shard",
        str(shard_task.path),
        "--shards",
        "4",
        "--out",
        str(tmp_path / "s"),
        "--router",
        "centroid",
    ]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "keys in 4 shards of" in result.output
    assert "centroid router" in result.output
    assert "of 4 shards on val" in result.output
    assert json.loads((tmp_path / "s/manifest.json").read_text())["kind"] == "shards"


def test_a_bundle_in_the_place_of_another_or_changed_is_noticed(sharded, tmp_path):
    for number, (said, change) in enumerate(
        [
            ("is not the bundle that was made", lambda path: swap(path)),
            ("was changed since it was made", lambda path: remove_some(path / "shard-001")),
        ]
    ):
        place = tmp_path / str(number)
        shutil.copytree(sharded, place)
        change(place)
        with pytest.raises(amips.BundleError, match=said):
            load_shards(place)
        index = load_shards(place, partial=True)
        assert "shard-001" in index.shards.bundles[1]


def swap(path):
    shutil.rmtree(path / "shard-001")
    shutil.copytree(path / "shard-000", path / "shard-001")


def remove_some(path):
    with amips.load(path) as bundle:
        bundle.remove(bundle.search(np.ones(bundle.d, np.float32), 5)[1][0])


def test_too_many_shards_leave_nothing_behind(shard_task, tmp_path):
    with pytest.raises(amips.AmipsError, match="too few; ask for"):
        amips.shard(shard_task, shards=1000, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(amips.AmipsError, match="source"):
        amips.shard(np.zeros((3, 4)), shards=2, out=tmp_path / "out")


def run(*words):
    from click.testing import CliRunner

    from amips.cli import cli

    return CliRunner().invoke(cli, [str(word) for word in words])


def test_info_and_search_take_a_directory_of_shards(sharded, shard_task, tmp_path):
    x, index = queries_of(shard_task), load_shards(sharded)
    np.save(tmp_path / "x.npy", x)
    shown = run("info", sharded)
    assert shown.exit_code == 0, shown.output
    assert "1,500" in shown.output
    assert "4, of " in shown.output
    assert "missing" not in shown.output
    done = run("search", sharded, tmp_path / "x.npy", "--recall", "0.9", "--out", tmp_path / "h.npz")
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "h.npz") as hits:
        assert (hits["ids"] == index.search(x, recall=0.9)[1]).all()
    refused = run("search", sharded, tmp_path / "x.npy", "--where", "a = 1")
    assert isinstance(refused.exception, amips.AmipsError)
    assert "--where" in str(refused.exception)


def test_a_search_of_fewer_shards_says_what_is_missing(sharded, shard_task, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    shutil.rmtree(copy / "shard-001")
    np.save(tmp_path / "x.npy", queries_of(shard_task))
    assert isinstance(run("search", copy, tmp_path / "x.npy").exception, amips.BundleError)
    done = run("search", copy, tmp_path / "x.npy", "--partial", "--out", tmp_path / "h.npz")
    assert done.exit_code == 0, done.output
    missing = load_shards(copy, partial=True).ask(queries_of(shard_task)).missing
    assert "shard 1 did not answer" in done.output
    assert f"{missing.mean():.1%} of the expected top keys, up to {missing.max():.1%}" in done.output
    assert "missing" in run("info", copy).output
