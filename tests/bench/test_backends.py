"""Engines of their own in the bench: with x, with the predicted key, and routed by cells."""

import numpy as np
import pytest
from click.testing import CliRunner

import amips
from amips import engines
from amips.bench import bench, comparison, load_summary
from amips.bench.derive import on_test
from amips.bench.searchers import NOT_TOLD
from amips.bench.machine import threads
from amips.bench.runner import Bench, Settings
from amips.bench.results import Store
from paper import study
from amips.bench.systems import System, engine_systems, own_on_engines
from amips.cli import cli
from amips.backends import scann_engine
from amips.errors import AmipsError, RunError
from amips.nets import AffineNet, Net, load_model
from amips.nets.affine import AffineArchitecture
from amips.search.points import shares
from helpers import Silent, make_world
from reference import architecture, random_net
from test_engines import HERE, open_place

D, N, K = 16, 600, 10
SETTINGS = Settings(batch=32, singles=4, rounds=2, minutes=0.005)


@pytest.fixture(scope="module")
def mapper(task, tmp_path_factory):
    """A network with random weights that predicts one key."""
    net = random_net(architecture("key", d=D, c=1, width=7, depth=3, injected=(1, 2)))
    out = tmp_path_factory.mktemp("runs") / "mapper"
    Net(net.architecture, net.weights, {"keys": task.fingerprint}).save(out)
    return str(out)


@pytest.fixture
def opened(task, tmp_path):
    made = Bench(task, Store(tmp_path / "results", {}), SETTINGS)
    yield made
    made.close()


@pytest.fixture
def silent(monkeypatch):
    """ScaNN's name for an engine that is here."""
    monkeypatch.setattr(scann_engine, "ScaNN", Silent)


class TestSystems:
    def test_roles_families_and_names(self, mapper):
        given = {"cells": 30, "router": mapper, "label": "KeyNet"}
        named = {
            System(engine="hnsw"): ("reference", None, "HNSW, 32 links"),
            System(engine="scann"): ("reference", None, "ScaNN"),
            System(engine="leanvec", cells=30): ("reference", None, "LeanVec"),
            System(engine="hnsw", **given, route="drop-in-rescored"): (
                "contender",
                "HNSW, 32 links",
                "HNSW, 32 links: KeyNet, drop-in, scored again",
            ),
            System(engine="leanvec", **given): ("contender", "LeanVec", "LeanVec: KeyNet"),
            System(engine="leanvec", cells=30, router="linear"): ("contender", "LeanVec", "LeanVec: linear"),
        }
        for system, names in named.items():
            assert (system.role, system.host, system.family) == names
        assert len({system.slug for system in named}) == len(named)
        assert System(engine="leanvec", **given).name == "LeanVec: KeyNet, 30 cells"

    def test_only_plain_centroid_routing_is_the_baseline(self):
        assert System(cells=30).role == System(cells=30, storage="sq8").role == "baseline"
        more = ({"aware": 1.5}, {"stop": "share"}, {"storage": "lean", "lean": 8}, {"router": "linear"})
        made = [System(cells=30, **settings) for settings in more]
        assert [(system.role, system.host) for system in made] == [("contender", None)] * len(more)
        assert System(engine="leanvec", cells=30, aware=1.5).role == "reference"

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"engine": "scann", "router": "run"}, "engine 'scann' can have 'drop-in-rescored'$"),
            ({"engine": "hnsw", "router": "linear"}, "engine 'hnsw' can have 'drop-in-rescored'$"),
            (
                {"engine": "leanvec", "cells": 4, "router": "run", "route": "drop-in"},
                "engine 'leanvec' can have 'drop-in-rescored' or 'cells'$",
            ),
            ({"engine": "leanvec", "router": "run"}, "cells=0: engine 'leanvec' needs at least 1"),
        ],
    )
    def test_what_cannot_be(self, settings, said):
        with pytest.raises(AmipsError, match=said):
            System(**settings)

    def test_of_a_bench(self, task, mapper):
        made = engine_systems(task, ["hnsw", "leanvec", "hnsw"], {mapper: load_model(mapper)})
        assert [(s.engine, s.routed, s.role) for s in made] == [
            ("hnsw", False, "reference"),
            ("hnsw", False, "contender"),
            ("leanvec", False, "reference"),
            ("leanvec", False, "contender"),
            ("leanvec", True, "contender"),
        ]
        assert {s.cells for s in made[2:]} == {round(4 * N**0.5)}

    def test_amips_on_engines_whose_cells_can_be_addressed(self):
        (made,) = own_on_engines(10_000, 384, ["hnsw", "leanvec", "scann", "leanvec"])
        assert (made.engine, made.cells, made.role, made.routed) == ("leanvec", 400, "contender", True)
        assert (made.router, made.aware, made.rank, made.stop) == ("linear", 1.5, 128, "share")
        assert made.host == System(engine="leanvec").family
        assert made.family == "LeanVec: amips"

    def test_a_model_that_scores_cells_needs_cells(self, task, opened, tmp_path):
        net = random_net(architecture("key", d=D, c=8, width=7, depth=3, injected=(1, 2)))
        Net(net.architecture, net.weights, {"keys": task.fingerprint}).save(tmp_path / "router")
        run = str(tmp_path / "router")
        with pytest.raises(RunError, match="it does not fit"):
            opened.check(System(engine="hnsw", router=run, route="drop-in-rescored"))
        made = engine_systems(task, ["hnsw", "leanvec"], {run: load_model(run)})
        assert [(s.engine, s.cells, s.routed) for s in made] == [
            ("hnsw", 0, False),
            ("leanvec", 8, False),
            ("leanvec", 8, True),
        ]


class TestRunning:
    def test_answers_are_the_engines(self, opened, task, tmp_path):
        run = opened._run(system := System(engine="hnsw"), opened.open(system), 32)
        alone = engines.build("hnsw", np.asarray(task.keys), tmp_path / "hnsw")
        np.testing.assert_array_equal(run.ids, alone.search(opened.x, K, 32)[1])
        np.testing.assert_array_equal(run.scanned, alone.cost(opened.x, K, 32).scanned)

    def test_answers_with_the_predicted_key(self, opened, task, mapper):
        system = System(engine="hnsw", router=mapper, route="drop-in-rescored")
        run = opened._run(system, opened.open(system), 32)
        engine, model = opened._engine_of(system), load_model(mapper)
        want = engines.DropIn(engine, model, np.asarray(task.keys)).search(opened.x, K, 32)
        np.testing.assert_array_equal(run.ids, want[1])
        assert run.network == model.architecture.key_flops()

    def test_routed_by_the_prediction(self, opened, mapper):
        system = System(engine="leanvec", cells=30, router=mapper)
        run = opened._run(system, opened.open(system), 5)
        plain = System(cells=30, router=mapper)
        other = opened._run(plain, opened.open(plain), 5)
        np.testing.assert_array_equal(run.scanned, other.scanned)
        assert (run.ids == other.ids).mean() > 0.95
        assert run.scan.mean() != other.scan.mean()
        assert opened._ladder(system)[-1] == 30

    def test_routed_by_share_on_query_aware_cells(self, opened):
        given = {"cells": 30, "router": "linear", "aware": 1.5, "stop": "share"}
        system, plain = System(engine="leanvec", **given), System(**given)
        assert opened._ladder(system) == list(range(len(shares())))
        run, other = (opened._run(s, opened.open(s), 12) for s in (system, plain))
        np.testing.assert_array_equal(run.scanned, other.scanned)
        assert len(set(run.scanned)) > 10
        assert (run.ids == other.ids).mean() > 0.95
        cells = opened._engine_of(system).assignment
        np.testing.assert_array_equal(cells, opened.cells(30, 1.5).assignment)
        assert (opened._engine_of(System(engine="leanvec", cells=30)).assignment != cells).any()

    def test_cells_probed_are_told_where_there_are_cells(self, opened, mapper, silent):
        drop_in = {"router": mapper, "route": "drop-in-rescored"}
        systems = {
            System(engine="leanvec", cells=30): 7,
            System(engine="leanvec", cells=30, **drop_in): 7,
            System(engine="hnsw"): 0,
            System(engine="scann"): NOT_TOLD,
            System(engine="scann", **drop_in): NOT_TOLD,
        }
        for system, probed in systems.items():
            np.testing.assert_array_equal(opened.open(system).cost(opened.x, K, 7).probed, probed)

    def test_one_that_learns_does_so_from_what_it_is_given(self, opened, mapper):
        systems = [
            System(engine="leanvec", cells=30),
            System(engine="leanvec", cells=30, router=mapper, route="drop-in-rescored"),
        ]
        projections = [opened._engine_of(system).of_queries for system in systems]
        assert np.abs(projections[0] - projections[1]).max() > 1e-3
        assert len([path for path in opened.work.iterdir() if path.name.startswith("leanvec-30")]) == 2

    def test_an_unfinished_engine_is_built_again(self, opened):
        folder = opened.work / "hnsw-32"
        folder.mkdir(parents=True)
        (folder / "index.faiss").write_bytes(b"half of it")
        assert opened._engine_of(System(engine="hnsw")).n == N

    def test_a_library_that_is_missing_is_said_first(self, opened, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "scann", None)
        with pytest.raises(AmipsError, match=r"ScaNN needs scann; pip install 'amips\[scann\]'"):
            opened.run([System(cells=4), System(engine="scann")], "bench")
        assert not list((opened.store.path / "runs").glob("*.json"))

    def test_an_engine_that_does_not_tell_has_time_only(self, opened, task, silent):
        system = System(engine="scann")
        opened.run([system], "bench")
        runs = opened.store.runs([system])
        assert [run.budget for run in runs] == [1, 2, 3, 4]
        assert all((run.scanned < 0).all() for run in runs)
        (family,) = on_test(runs, task)
        assert not family.told("flops")
        assert not family.told("scanned")
        assert family.told("single/1")
        assert np.isnan(family.costs("flops")).all()
        assert np.isnan(family.cost_at("flops", "recall@10", 0.5))
        assert family.cost_at("single/1", "recall@10", 0.5) > 0

    def test_the_engine_is_let_go_of(self, opened, monkeypatch, silent):
        closed = []
        monkeypatch.setattr(Silent, "close", lambda self: closed.append(self))
        opened.run([System(engine="scann")], "bench", [1], times=False)
        assert len(closed) == 1
        assert opened._finder is None


@pytest.fixture(scope="module")
def done(task, tmp_path_factory):
    """A bench with an engine that tells and one that does not; the model is always right, and costly."""
    out = tmp_path_factory.mktemp("bench")
    keys = np.array(task.keys)
    model = AffineNet(AffineArchitecture(D, 1, N), {"W": keys}, {"keys": task.fingerprint})
    model.save(out / "oracle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scann_engine, "ScaNN", Silent)
        ours = System(cells=8, router=str(out / "oracle"), label="linear oracle")
        patch.setattr(comparison, "model_systems", lambda *_: [ours])  # without its sweep of cells
        given = {"models": [out / "oracle"], "engines": ["hnsw", "scann"], "rounds": 2, "batch": 32}
        return bench(task, out=out / "results", systems=[System(cells=8)], **given)


class TestTelling:
    def test_the_verdict_is_of_cells_and_engines_have_their_own(self, done):
        assert done.values["chosen"].startswith("linear oracle")
        about = [line for line in done.verdict if line.startswith(("HNSW, 32 links: ", "ScaNN: "))]
        assert any("against HNSW, 32 links searched with x, one thread: " in line for line in about)
        assert any("FLOPs" in line for line in about if line.startswith("HNSW"))
        assert "ScaNN: FLOPs and keys scanned are not told; there is only time." in done.verdict

    def test_tables_say_what_is_not_told(self, done):
        table = next(t for t in done.tables if t.title == "Engines: a model against x")
        for row in table.rows:
            alone = threads() == 1  # then there are no times on all threads
            counted = [row[1].startswith("ScaNN")] * 2
            assert [cell == "not told" for cell in row[2:]] == [*counted, *[False] * 4]
            assert [cell == "not taken" for cell in row[2:]] == [False, False, False, alone, False, alone]
        assert {row[1].split(":")[0] for row in table.rows} == {"HNSW, 32 links", "ScaNN"}
        against = next(t for t in done.tables if t.title == "Against the best FAISS IVF")
        assert all(not row[1].startswith(("HNSW", "ScaNN")) for row in against.rows)
        costs = next(t for t in done.tables if t.title == "What a recall costs")
        assert all((row[2:4] == ["not told"] * 2) == row[1].startswith("ScaNN") for row in costs.rows)
        points = next(t for t in done.tables if t.title == "The best points of each")
        silent = [row for row in points.rows if row[0].startswith("ScaNN")]
        assert silent
        assert all(row[7:11] == ["-"] * 4 for row in silent)
        assert "For HNSW the budget is efSearch. For ScaNN the budget is nothing." in points.note

    def test_the_command_names_the_engines(self, done):
        assert "--engine hnsw --engine scann" in done.command

    def test_nothing_beside_the_engines(self, task, tmp_path):
        made = bench(task, out=tmp_path / "r", systems=[System(engine="hnsw")], engines=["hnsw"], rounds=2)
        assert made.verdict == ["Nothing was compared: there is no baseline, or nothing beside it."]

    def test_an_engine_that_there_is_not(self, task, tmp_path):
        with pytest.raises(AmipsError, match="there is no engine 'annoy'; there are hnsw"):
            bench(task, out=tmp_path / "r", engines=["annoy"])


@pytest.fixture(scope="module")
def place():
    keys, queries = make_world(400, 120, 16, seed=7)
    with open_place() as place:
        np.save(place / "keys.npy", keys)
        np.save(place / "queries.npy", queries)
        yield place


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Few keys and few held-out queries: Milvus Lite goes through all keys for each."""
    out = tmp_path_factory.mktemp("few") / "task"
    return amips.label(*make_world(300, 260, D, seed=7), cells=1, val=20, test=20, k=10, out=out)


@pytest.mark.engines
class TestEveryEngine:
    """Each that is here, run by the bench; `test_the_study_on_another_engine` runs them in a study."""

    @pytest.mark.parametrize("name", HERE)
    def test_in_the_bench(self, few, name, monkeypatch):
        keys = np.array(few.keys)
        model = AffineNet(AffineArchitecture(D, 1, few.n), {"W": keys}, {"keys": few.fingerprint})
        monkeypatch.setattr(comparison, "model_systems", lambda *_: [])  # without its sweep of cells
        with open_place() as out:
            model.save(out / "oracle")
            given = {"models": [out / "oracle"], "engines": [name], "minutes": 0.005}
            short = {"rounds": 1, "batch": 8, "singles": 2}
            made = bench(few, out=out / "results", systems=[System(cells=8)], **given, **short)
        title = System(engine=name).family
        best = {}
        for point in made.values["points"]:
            best[point["family"]] = max(best.get(point["family"], 0), point["recall@1"])
        routed = [f"{title}: linear oracle"] if engines.backend_class(name).celled else []
        assert set(best) == {"centroid", title, f"{title}: linear oracle, drop-in, scored again", *routed}
        assert min(best.values()) > 0.9
        assert {cost["family"] for cost in made.values["costs"] if cost["single/1"]} == set(best)
        told = {cost["family"] for cost in made.values["costs"] if cost["flops"]}
        assert (title in told) == (name in ("hnsw", "leanvec", "usearch"))
        assert set(routed) <= told


class TestCommands:
    @pytest.mark.slow
    @pytest.mark.engines
    @pytest.mark.parametrize("engine", HERE)
    def test_the_study_on_another_engine(self, place, engine):
        command = ["study", "ivf", "--engine", engine, "--data", str(place), "--scale", "smoke"]
        done = CliRunner().invoke(cli, [*command, "--out", str(place / "out")])
        assert done.exit_code == 0, done.output
        made = load_summary(place / "out" / f"ivf-{engine}")
        title = System(engine=engine).family
        assert set(made.values["recall"]) == {
            title,
            f"{title}: KeyNet XS, drop-in, scored again",
            *([f"{title}: KeyNet XS"] if engines.backend_class(engine).celled else []),
        }
        # LanceDB's cells are drawn anew each time, and its ladder ends before the last of them.
        assert max(made.values["recall"][title]) > (0.9 if engine == "lancedb" else 0.95)
        told = engines.backend_class(engine).celled or engine in ("hnsw", "usearch")
        first = "FLOPs, share of a full scan" if told else "us a query, batch 1, 1 thread"
        assert made.charts[0].panels[0].x_label == first
        assert made.command.startswith(f"amips study ivf --engine {engine} ")
        assert (place / "out" / f"ivf-{engine}" / "table.md").exists()
        assert any(title in line for line in made.verdict)

    def test_only_one_study_has_engines(self, place):
        with pytest.raises(AmipsError, match="the study 'routing' has no engine; 'ivf' has"):
            study("routing", engine="hnsw", data=place, out=place / "other", scale="smoke")
        with pytest.raises(AmipsError, match="there is no engine 'annoy'"):
            study("ivf", engine="annoy", data=place, out=place / "other", scale="smoke")

    def test_the_bench_with_an_engine(self, task, tmp_path):
        systems = tmp_path / "systems.toml"
        systems.write_text(
            "[[system]]\ncells = 8\n[[system]]\nengine = 'leanvec'\ncells = 8\nrouter = 'linear'"
        )
        command = ["bench", str(task.path), "--systems", str(systems), "--engine", "leanvec"]
        command += ["--minutes", "0.005", "--rounds", "1", "--batch", "16", "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
        families = {cost["family"] for cost in load_summary(tmp_path / "out").values["costs"]}
        assert families == {"centroid", "LeanVec", "LeanVec: linear"}
