"""What is compared: how systems are named, read from files, and refused."""

import itertools
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from amips.bench import System, bench, read_systems
from amips.bench.runner import Bench, Settings
from amips.bench.results import Store
from amips.bench.systems import default_systems, load_models, model_systems, own_systems, sweep
from amips.cells import fingerprint_of
from amips.errors import AmipsError, RunError
from amips.nets import Net
from reference import architecture, random_net


def one_line(caught):
    assert "\n" not in str(caught.value)


def toml(tmp_path, text):
    path = tmp_path / "systems.toml"
    path.write_text(text)
    return path


def a_run(path, task=None, c=1, d=16, seed=0, **about):
    """A finished run with random weights, as if trained on the task."""
    kind = "key" if c == 1 else "support"
    net = random_net(architecture(kind, d=d, c=c), seed)
    if task is not None:
        about = {"keys": task.fingerprint, **about}
    Net(net.architecture, net.weights, about).save(path)
    return str(path)


# TOML


def test_a_good_file(tmp_path):
    path = toml(
        tmp_path,
        """
        [[system]]
        cells = [8, 32, 128]

        [[system]]
        cells = 32
        router = "runs/mine"
        route = "drop-in-rescored"
        label = "mine"

        [[system]]
        cells = 16
        router = "/elsewhere/theirs"
        storage = "sq8"

        [[system]]
        engine = "hnsw"
        links = 16

        [[system]]
        engine = "flat"
        """,
    )
    assert (
        read_systems(path)
        == read_systems(str(path))
        == [
            System(cells=8),
            System(cells=32),
            System(cells=128),
            System(cells=32, router=str(tmp_path / "runs" / "mine"), route="drop-in-rescored", label="mine"),
            System(cells=16, router="/elsewhere/theirs", storage="sq8"),
            System(engine="hnsw", links=16),
            System(engine="flat"),
        ]
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[system]]\ncells = 8\nprobes = 3", "'probes' is not a setting of a system; it has engine, cells"),
        ('[[system]]\ncells = "8"', "cells='8': expected int"),
        ("[[system]]\ncells = true", "cells=True: expected int"),
        ("[[system]]\ncells = [8, true]", "cells=True: expected int"),
        ("[[system]]\ncells = 8.0", "cells=8.0: expected int"),
        ("[[system]]\ncells = []", r"cells=\[\]: expected at least one"),
        ("[[system]]\ncells = 8\nrouter = 1", "router=1: expected str"),
        ("[[system]]\ncells = 0", "cells=0: engine 'ivf' needs at least 1"),
        ("[[system]]\nrouter = 'linear'", "cells=0: engine 'ivf' needs at least 1"),
        ("[[system]]\nengine = 'annoy'", "engine='annoy' is not one of ivf, flat, hnsw"),
        ("[[system]]\ncells = 4\nstorage = 'zip'", "storage='zip' is not one of flat, sq8, pq"),
        (
            "[[system]]\ncells = 4\nroute = 'drop-in'",
            "route='drop-in' needs a run whose model predicts one key",
        ),
        ("[[system]]\nengine = 'hnsw'\nlinks = 1", "links=1: expected at least 2"),
        ("[[system]\ncells = 8", "is not TOML: "),
        ("\x00", "is not TOML: "),
        ("", "names no systems"),
        ("system = []", "names no systems"),
        ("[system]\ncells = 8", "names no systems"),
        ("[[systems]]\ncells = 8", "names no systems"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, match):
    with pytest.raises(AmipsError, match=match) as caught:
        read_systems(toml(tmp_path, text))
    one_line(caught)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(AmipsError, match=r"nowhere\.toml does not exist"):
        read_systems(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AmipsError, match="is not TOML"):
        read_systems(tmp_path / "binary.toml")


# names


def test_roles_families_and_names():
    mapper = {"router": "/a/b/keynet-s", "cells": 1000}
    named = {
        System(cells=1000): ("baseline", "centroid", "centroid, 1,000 cells"),
        System(cells=7, router="linear"): ("contender", "linear", "linear, 7 cells"),
        System(**mapper): ("contender", "keynet-s", "keynet-s, 1,000 cells"),
        System(**mapper, route="drop-in"): (
            "contender",
            "keynet-s, drop-in",
            "keynet-s, drop-in, 1,000 cells",
        ),
        System(**mapper, label="ours", storage="pq"): ("contender", "ours, pq", "ours, pq, 1,000 cells"),
        System(engine="flat"): ("reference", "exact, all keys", "exact, all keys"),
        System(engine="hnsw", links=16): ("reference", "HNSW, 16 links", "HNSW, 16 links"),
    }
    for system, names in named.items():
        assert (system.role, system.family, system.name) == names


def test_a_slug_is_of_the_weights_not_of_the_place(tmp_path):
    run = a_run(tmp_path / "here" / "run")
    system = System(cells=4, router=run)
    before = system.slug
    shutil.copytree(run, tmp_path / "there" / "renamed")
    assert System(cells=4, router=str(tmp_path / "there" / "renamed"), label="x").slug == before
    a_run(tmp_path / "here" / "run", seed=1)
    assert system.slug != before


def test_slugs_differ_when_anything_that_matters_does(tmp_path):
    run, other = a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=1)
    systems = [System(cells=c, router=r) for c in (4, 5) for r in ("centroid", "linear", run, other)]
    systems += [System(cells=4, storage="sq8"), System(cells=4, router=run, route="drop-in")]
    systems += [System(cells=4, router=run, route="drop-in-rescored"), System(engine="flat")]
    systems += [System(engine="hnsw"), System(engine="hnsw", links=16)]
    slugs = {system.slug for system in systems}
    assert len(slugs) == len(systems)
    assert all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for slug in slugs)


# the default set


@pytest.mark.parametrize("n", [40_000, 1_000_000])
def test_the_sweep_is_that_of_the_protocol(n):
    root = math.isqrt(n)
    counts = sweep(n)
    assert counts[0] == root // 2
    assert counts[-1] == 10 * root
    assert root in counts
    assert max(b / a for a, b in itertools.pairwise(counts)) <= 2.5


@pytest.mark.parametrize("n", [1, 2, 3, 5, 50, 600])
def test_the_sweep_of_few_keys(n):
    counts = sweep(n)
    assert counts == sorted(set(counts))
    assert counts[0] >= 2
    assert counts[-1] <= max(2, n // 2)


def test_the_default_systems(tmp_path):
    task = SimpleNamespace(n=10_000, c=64, d=96)
    models = load_models([a_run(tmp_path / "mapper"), a_run(tmp_path / "cells", c=64)])
    systems = default_systems(task, models)
    swept = [50, 64, 100, 200, 400, 1000]
    by_family = {}
    for system in systems:
        by_family.setdefault(system.family, []).append(system.cells)
    assert by_family == {
        "centroid": swept,
        "amips": [200, 400, 800],
        "amips, lean": [200, 400, 800],
        "KeyNet mapper": swept,
        "KeyNet mapper, drop-in": swept,
        "SupportNet cells": [64],
        "exact, all keys": [0],
        "HNSW, 32 links": [0],
    }
    assert {s.cells for s in default_systems(SimpleNamespace(n=10_000, c=1, d=96), {})} == {
        0,
        800,
        *swept,
    } - {64}
    added = model_systems(task, models)
    assert [s for s in systems if s.router not in ("centroid", "linear")] == added
    assert len(added) == 2 * len(swept) + 1
    assert model_systems(task, {}) == []


@pytest.mark.parametrize(("n", "counts"), [(10_000, [200, 400, 800]), (1000, [63, 125]), (20, [2])])
def test_amips_s_own_systems(n, counts):
    """What `fit` makes: query-aware cells, a reduced linear router, a bound on the share."""
    systems = own_systems(n, 96)
    assert [s.cells for s in systems] == 2 * counts
    kept = [(s.storage, s.lean) for s in systems]
    assert kept == [("flat", 0)] * len(counts) + [("lean", 32)] * len(counts)
    for system in systems:
        assert (system.router, system.aware, system.rank, system.stop) == ("linear", 1.5, 32, "share")
        assert system.role == "contender"


def test_only_plain_ivf_is_a_baseline():
    assert System(cells=8).role == System(cells=8, storage="sq8").role == "baseline"
    for other in (
        {"aware": 1.5},
        {"stop": "share"},
        {"storage": "lean", "lean": 8},
        {"router": "linear"},
        {"router": "linear", "rank": 4},
    ):
        assert System(cells=8, **other).role == "contender"


def test_names_of_the_new_fields():
    named = {
        "linear, rank 4": {"router": "linear", "rank": 4},
        "centroid, query-aware cells": {"aware": 1.5},
        "centroid, by share": {"stop": "share"},
        "linear, rank 4, query-aware cells, by share, lean": {
            "router": "linear",
            "rank": 4,
            "aware": 1.5,
            "stop": "share",
            "storage": "lean",
            "lean": 8,
        },
        "ours, lean": {"aware": 1.5, "label": "ours", "storage": "lean", "lean": 8},
    }
    for name, settings in named.items():
        assert System(cells=8, **settings).family == name
        assert System(cells=8, **settings).name == f"{name}, 8 cells"


def test_results_of_before_there_were_the_new_fields_are_found():
    """A slug is the name of a file: those of old systems are what they were."""
    assert System(cells=8).slug == "ivf-8-centroid-cells-35ad99893f"
    assert System(cells=8, router="linear").slug == "ivf-8-linear-cells-5762b3e315"
    changed = [{"aware": 1.5}, {"aware": 3.0}, {"stop": "share"}, {"storage": "lean", "lean": 4}]
    changed += [{"storage": "lean", "lean": 8}]
    assert len({System(cells=8, **c).slug for c in [{}, *changed]}) == 6
    ranks = [System(cells=8, router="linear", rank=r) for r in (0, 3, 4)]
    assert len({s.slug for s in ranks}) == 3


def test_each_linear_router_has_a_place_of_its_own():
    """Cells, rank and strength decide what is trained; the storage and the way to stop do not."""
    settings = [{"cells": c, "rank": r, "aware": a} for c in (8, 9) for r in (0, 4) for a in (0.0, 1.5, 3.0)]
    names = [System(router="linear", **s).linear_name for s in settings]
    assert len(set(names)) == len(names)
    assert names[0] == "linear-8"  # as it was
    same = System(router="linear", cells=8, rank=4, aware=1.5, stop="share", storage="lean", lean=5)
    assert same.linear_name == System(router="linear", cells=8, rank=4, aware=1.5).linear_name


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rank": 3}, "rank=3 is for router 'linear'"),
        ({"rank": 3, "router": "some/run"}, "rank=3 is for router 'linear'"),
        ({"stop": "share", "router": "some/run", "route": "drop-in"}, "stop='share' is for route 'cells'"),
        ({"stop": "never"}, "stop='never' is not one of probes, share"),
        ({"storage": "lean"}, "storage 'lean' has a number of dimensions, lean; others have none"),
        ({"lean": 4}, "storage 'lean' has a number of dimensions"),
        ({"lean": -4, "storage": "lean"}, "storage 'lean' has a number of dimensions"),
        ({"aware": -1.0}, "aware=-1.0: expected a finite number, not negative"),
        ({"aware": float("nan")}, "aware=nan"),
        ({"aware": float("inf")}, "aware=inf"),
        ({"rank": -1, "router": "linear"}, "rank=-1"),
    ],
    ids=str,
)
def test_systems_that_cannot_be(settings, match):
    with pytest.raises(AmipsError, match=match) as caught:
        System(cells=8, **settings)
    one_line(caught)


def test_two_runs_of_one_name_are_refused(tmp_path):
    runs = [a_run(tmp_path / place / "run", seed=seed) for seed, place in enumerate("ab")]
    with pytest.raises(AmipsError, match="same directory name"):
        load_models(runs)


# what cannot be run


def checked(task, system, tmp_path):
    Bench(task, Store(tmp_path / "results", {}), Settings()).check(system)


def refused(task, systems, tmp_path, match, kind=RunError):
    """By the bench, before anything is run."""
    with pytest.raises(kind, match=match) as caught:
        bench(task, out=tmp_path / "results", systems=systems)
    one_line(caught)
    assert not list((tmp_path / "results").glob("runs/*"))


def test_a_model_of_other_keys(task, tmp_path):
    run = a_run(tmp_path / "run", keys="0" * 64)
    refused(task, [System(cells=8), System(cells=8, router=run)], tmp_path, "trained on other keys")


def test_a_model_of_other_cells(task, tmp_path):
    run = a_run(tmp_path / "run", task, c=8, cells="0" * 64)
    refused(task, [System(cells=4), System(cells=8, router=run)], tmp_path, "trained on other cells")
    run = a_run(tmp_path / "run9", task, c=9, cells="0" * 64)
    refused(task, [System(cells=9, router=run)], tmp_path, "trained on other cells")
    refused(
        task,
        [System(cells=8, router=run)],
        tmp_path,
        "scores 9 cells in dimension 16: it does not fit 8 cells",
    )


def test_a_model_of_another_dimension(task, tmp_path):
    run = a_run(tmp_path / "run", task, d=12)
    refused(
        task,
        [System(cells=8, router=run)],
        tmp_path,
        "in dimension 12: it does not fit 8 cells in dimension 16",
    )


@pytest.mark.parametrize("way", ["drop-in", "drop-in-rescored"])
def test_drop_in_with_a_router_of_cells(task, tmp_path, way):
    run = a_run(tmp_path / "run", task, c=8)
    refused(
        task, [System(cells=8, router=run, route=way)], tmp_path, f"scores cells: route='{way}' needs a model"
    )


def test_a_run_that_is_not_finished(task, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    systems = [System(cells=8, router=str(tmp_path / "run"))]
    refused(task, systems, tmp_path, "run is not a finished run: it has no model.safetensors")
    for given in (None, [System(cells=8)]):
        with pytest.raises(
            RunError, match=r"run is not a finished run: it has no model\.safetensors$"
        ) as caught:
            bench(task, out=tmp_path / "none", models=[tmp_path / "run"], systems=given)
        one_line(caught)
        assert not (tmp_path / "none").exists()


def test_more_cells_than_keys(task, tmp_path):
    refused(task, [System(cells=601)], tmp_path, "there are only 600 keys", AmipsError)


@pytest.mark.parametrize("more", [{"router": "linear", "rank": 17}, {"storage": "lean", "lean": 17}], ids=str)
def test_more_dimensions_than_there_are(task, tmp_path, more):
    systems = [System(cells=8), System(cells=8, **more)]
    refused(task, systems, tmp_path, "there are only 16 dimensions", AmipsError)


def test_systems_that_are_the_same(task, tmp_path):
    twice = [System(cells=8), System(cells=9), System(cells=8, label="again")]
    refused(task, twice, tmp_path, "two of the systems are the same: (centroid|again), 8 cells", AmipsError)
    run = a_run(tmp_path / "run", task)
    shutil.copytree(run, tmp_path / "copy")
    twice = [System(cells=8, router=run), System(cells=8, router=str(tmp_path / "copy"))]
    refused(task, twice, tmp_path, "two of the systems are the same", AmipsError)


def test_routers_that_are_called_the_same(task, tmp_path):
    """They would share one front."""
    runs = [a_run(tmp_path / place / "run", task, seed=seed) for seed, place in enumerate("ab")]
    systems = [System(cells=8, router=run) for run in runs]
    refused(task, systems, tmp_path, "a/run and .*b/run are both called 'run'", AmipsError)
    posing = [System(cells=8), System(cells=8, router=runs[0], label="centroid")]
    refused(task, posing, tmp_path, "are both called 'centroid'", AmipsError)


def test_a_model_that_is_among_the_systems_too(task, tmp_path):
    run = a_run(tmp_path / "run", task)
    for label, match in (
        ("KeyNet run", "two of the systems are the same: KeyNet run, 8 cells"),
        ("x", "same"),
    ):
        with pytest.raises(AmipsError, match=match) as caught:
            bench(
                task, out=tmp_path / "none", systems=[System(cells=8, router=run, label=label)], models=[run]
            )
        one_line(caught)
        assert not (tmp_path / "none").exists()


def test_no_systems(task, tmp_path):
    refused(task, [], tmp_path, "nothing to compare", AmipsError)


def test_what_can_be_run_passes(task, tmp_path):
    mapper, unknown = a_run(tmp_path / "mapper", task), a_run(tmp_path / "unknown")
    cells = a_run(tmp_path / "cells", task, c=8, cells=fingerprint_of(np.asarray(task.cells.assignment)))
    for system in (
        System(cells=600),
        System(cells=8, router="linear"),
        System(cells=8, router=cells),
        System(cells=33, router=mapper, route="drop-in"),
        System(cells=33, router=unknown),
        System(engine="flat"),
        System(engine="hnsw"),
    ):
        checked(task, system, tmp_path)
