"""What is compared: how systems are named, read from files, and refused."""

import itertools
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from amips.bench import System, bench, read_systems
from amips.bench.lineup import (
    backend_systems,
    cells_of,
    default_systems,
    load_models,
    model_systems,
    own_on_backends,
    own_systems,
    sweep,
)
from amips.bench.results import ResultsStore
from amips.bench.runner import Runner, Settings
from amips.cells import fingerprint_of
from amips.design import Design
from amips.errors import AmipsError, RunError
from amips.nets import Linear, Net, Recipe
from reference import architecture, random_net

PLAIN = Design.plain(8)
LINEAR = Design(8, 0.0, Linear(rank=4), Recipe(), "probes", 0.0, "flat")


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
        mode = "drop-in-rescored"
        label = "mine"

        [[system]]
        cells = 16
        router = "/elsewhere/theirs"
        storage = "sq8"

        [[system]]
        cells = [12]
        query_aware = 1.5
        router = "linear"
        rank = 0
        stop = "mass"
        spill_fraction = 0.5
        storage = "lean"
        dimensions = 8
        label = "amips"

        [[system]]
        cells = 12
        query_aware = 2
        router = "linear"
        trained = false

        [[system]]
        backend = "hnsw"
        links = 16

        [[system]]
        cells = 9
        backend = "leanvec"
        router = "linear"
        refine = 4

        [[system]]
        backend = "scann"
        router = "runs/mine"
        mode = "drop-in-rescored"

        [[system]]
        backend = "exact"
        """,
    )
    mine = str(tmp_path / "runs" / "mine")
    untrained = Design(12, 2.0, Linear(), None, "probes", 0.0, "flat")
    assert (
        read_systems(path)
        == read_systems(str(path))
        == [
            *(System(Design.plain(cells)) for cells in (8, 32, 128)),
            System(Design.plain(32), run=mine, mode="drop-in-rescored", label="mine"),
            System(Design.plain(16, "sq8"), run="/elsewhere/theirs"),
            System(Design(12, 1.5, Linear(rank=0), Recipe(), "mass", 0.5, "lean", 8), label="amips"),
            System(untrained),
            System(backend="hnsw", settings=(("links", 16),)),
            System(Design(9, 0.0, stop="probes"), backend="leanvec", settings=(("refine", 4),)),
            System(backend="scann", run=mine, mode="drop-in-rescored"),
            System(backend="exact"),
        ]
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("cells = 8\nprobes = 3", "'probes' is not a setting of a system; it has cells, query_aware"),
        ('cells = "8"', "cells='8': expected int"),
        ("cells = true", "cells=True: expected int"),
        ("cells = [8, true]", "cells=True: expected int"),
        ("cells = 8.0", "cells=8.0: expected int"),
        ("cells = []", r"cells=\[\]: expected at least one"),
        ("cells = 8\nrouter = 1", "router=1: expected str"),
        ("cells = 8\nrouter = 'linear'\ntrained = 1", "trained=1: expected bool"),
        ("cells = 8\nspill_fraction = true", "spill_fraction=True: expected int or float"),
        ("cells = 0", "cells=0: expected a whole number, at least 1"),
        ("router = 'linear'", "a system without a backend needs cells"),
        ("backend = 'hnsw'\nrouter = 'linear'", "needs cells"),
        ("backend = 'hnsw'\nstorage = 'pq'", "storage needs cells"),
        ("cells = 8\nrank = 4", "rank is for router 'linear'"),
        ("cells = 8\nrouter = 'runs/a'\ntrained = true", "trained is for router 'linear'"),
        ("backend = 'annoy'", "there is no backend 'annoy'; there are fastscan, hnsw"),
        ("cells = 4\nstorage = 'zip'", "storage='zip': expected one of flat, sq8, pq, lean"),
        ("cells = 4\nstop = 'never'", "stop='never': expected one of mass, probes"),
        ("cells = 4\nmode = 'drop-in'", "mode='drop-in' needs a run whose model predicts one key"),
        ("cells = 4\nmode = 'sideways'", "mode='sideways': expected one of cells, drop-in"),
        ("backend = 'hnsw'\ncells = 4", "the cells of HNSW cannot be addressed: leave the design out"),
        ("backend = 'exact'\nlinks = 4", "backend 'exact' scores every key"),
    ],
)
def test_bad_entries_are_refused_in_one_line(tmp_path, text, match):
    with pytest.raises(AmipsError, match=match) as caught:
        read_systems(toml(tmp_path, f"[[system]]\n{text}"))
    one_line(caught)


@pytest.mark.parametrize(
    ("text", "match"),
    [
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


# what a system is


MAPPER = "/a/b/keynet-s"


@pytest.mark.parametrize(
    ("system", "learns"),
    [
        (System(PLAIN), False),
        (System(Design.plain(8, "lean", 4)), True),  # the projection of its codes
        (System(Design(8)), True),
        (System(Design.graph()), True),
        (System(Design.graph(learned=False, storage="flat")), False),
        (System(PLAIN, run=MAPPER), True),
        (System(backend="exact"), False),
        (System(backend="fastscan"), False),
        (System(backend="symphonyqg"), False),
        (System(backend="lorann"), True),
        (System(Design(8), backend="leanvec"), True),
        (System(backend="hnsw", run=MAPPER, mode="drop-in-rescored"), True),
    ],
    ids=lambda value: value.name if isinstance(value, System) else "",
)
def test_what_may_learn_from_the_log(system, learns):
    assert system.learns == learns


@pytest.mark.parametrize(
    ("system", "role", "family", "routed", "host"),
    [
        (System(PLAIN), "baseline", "centroid", True, None),
        (System(Design.plain(8, "sq8")), "baseline", "centroid, sq8", True, None),
        (System(Design.plain(8, "lean", 4)), "contender", "centroid, lean", True, None),
        (System(LINEAR), "contender", "linear router of rank 4, trained", True, None),
        (System(PLAIN, run=MAPPER), "contender", "keynet-s", True, None),
        (System(PLAIN, run=MAPPER, mode="drop-in"), "contender", "keynet-s, drop-in", True, None),
        (System(Design.plain(8, "pq"), run=MAPPER, label="ours"), "contender", "ours, pq", True, None),
        (System(backend="exact"), "reference", "exact, all keys", False, None),
        (System(backend="hnsw"), "reference", "HNSW", False, None),
        (System(backend="hnsw", settings=(("links", 16),)), "reference", "HNSW, links 16", False, None),
        (System(PLAIN, backend="leanvec"), "reference", "LeanVec", False, None),
        (
            System(backend="hnsw", run=MAPPER, mode="drop-in-rescored"),
            *("contender", "HNSW: keynet-s, drop-in, scored again", False, "HNSW"),
        ),
        (System(PLAIN, backend="leanvec", run=MAPPER), "contender", "LeanVec: keynet-s", True, "LeanVec"),
        (
            System(Design(8), backend="leanvec", label="amips"),
            *("contender", "LeanVec: amips", True, "LeanVec"),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, System) else "",
)
def test_roles_families_and_names(system, role, family, routed, host):
    assert (system.role, system.family, system.routed, system.host) == (role, family, routed, host)
    assert system.name == (f"{family}, 8 cells" if routed else family)


def test_names_say_what_differs_from_plain_ivf():
    named = {
        "centroid, query-aware cells": Design(8, 1.5, None, None, "probes", 0.0, "flat"),
        "centroid, by mass": Design(8, 0.0, None, None, "mass", 0.0, "flat"),
        "centroid, 25% in two cells": Design(8, 0.0, None, None, "probes", 0.25, "flat"),
        "linear router of rank 4, untrained, query-aware cells, by mass, lean": Design(
            8, 1.5, Linear(rank=4), None, "mass", 0.0, "lean", 8
        ),
    }
    for name, design in named.items():
        assert System(design).family == name
        assert System(design).name == f"{name}, 8 cells"
        assert System(design).role == "contender"
    assert System(Design(8), label="ours").family == "ours, lean"


def test_what_does_not_apply_makes_no_difference():
    """A run stands in for the router; a backend stores keys as it does."""
    assert System(LINEAR, run=MAPPER) == System(PLAIN, run=MAPPER)
    lean = Design(8, storage="lean", dimensions=4, spill_fraction=0.5)
    flat = Design(8, storage="flat", spill_fraction=0.0)
    assert System(lean, backend="leanvec") == System(flat, backend="leanvec")
    assert System(lean) != System(flat)
    settings = (("links", 16), ("construction", 9))
    assert System(backend="hnsw", settings=settings) == System(backend="hnsw", settings=settings[::-1])


def test_json_in_and_out():
    systems = [
        System(Design(8, dimensions=4), label="ours"),
        System(PLAIN, run=MAPPER, mode="drop-in"),
        System(backend="hnsw", settings=(("links", 16),)),
        System(Design(8), backend="leanvec"),
        System(backend="exact"),
    ]
    for system in systems:
        assert System.from_json(json.loads(json.dumps(system.to_json()))) == system
    for nonsense in ({}, {"design": None}, {**systems[0].to_json(), "colour": 1}):
        with pytest.raises(AmipsError, match="not a system: ") as caught:
            System.from_json(nonsense)
        one_line(caught)


def test_a_slug_is_of_the_weights_not_of_the_place(tmp_path):
    run = a_run(tmp_path / "here" / "run")
    system = System(PLAIN, run=run)
    before = system.slug
    shutil.copytree(run, tmp_path / "there" / "renamed")
    assert System(PLAIN, run=str(tmp_path / "there" / "renamed"), label="x").slug == before
    a_run(tmp_path / "here" / "run", seed=1)
    assert system.slug != before


def test_slugs_differ_when_anything_that_matters_does(tmp_path):
    run, other = a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=1)
    designs = [Design.plain(4), PLAIN, Design.plain(8, "sq8"), LINEAR, Design(8), Design(8, 3.0)]
    designs += [
        Design(8, dimensions=4),
        Design(8, dimensions=5),
        Design(8, recipe=None),
        Design(8, stop="probes"),
    ]
    designs += [Design(8, router=Linear(rank=r)) for r in (0, 3)] + [Design(8, spill_fraction=0.1)]
    systems = [System(design) for design in designs]
    systems += [System(design, run=one) for design in (PLAIN, Design.plain(4)) for one in (run, other)]
    systems += [System(PLAIN, run=run, mode="drop-in"), System(PLAIN, run=run, mode="drop-in-rescored")]
    systems += [System(backend="exact"), System(backend="hnsw"), System(backend="leanvec")]
    systems += [System(backend="hnsw", settings=(("links", 16),)), System(Design(8), backend="leanvec")]
    slugs = {system.slug for system in systems}
    assert len(slugs) == len(systems)
    assert all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for slug in slugs)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "give a design, a backend, or both"),
        ({"design": Design(8), "run": MAPPER, "mode": "drop-in"}, "needs a design with stop='probes'"),
        ({"design": PLAIN, "mode": "drop-in"}, "mode='drop-in' needs a run whose model predicts one key"),
        ({"design": PLAIN, "mode": "never"}, "mode='never': expected one of cells, drop-in"),
        ({"design": PLAIN, "settings": (("links", 3),)}, "links is a setting of a backend"),
        ({"design": Design(8, router="own")}, "a router of its own needs the run of one"),
        ({"backend": "annoy"}, "there is no backend 'annoy'"),
        ({"backend": "hnsw", "design": PLAIN}, "the cells of HNSW cannot be addressed"),
        ({"backend": "hnsw", "run": MAPPER}, "mode='cells': a model on backend 'hnsw' can have 'drop-in' or"),
        ({"backend": "leanvec", "run": MAPPER}, "'drop-in-rescored' or, with a design, 'cells'"),
        ({"backend": "exact", "design": PLAIN}, "backend 'exact' scores every key"),
    ],
    ids=str,
)
def test_systems_that_cannot_be(settings, match):
    with pytest.raises(AmipsError, match=match) as caught:
        System(**settings)
    one_line(caught)


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


def a_builder(n, c=1, query_aware=0.0, dimensions=16):
    """As much of a builder as lists of systems ask for."""
    task = SimpleNamespace(n=n, c=c, d=96, query_aware=query_aware)
    return SimpleNamespace(task=task, lean_dimensions=lambda: dimensions, resolved=lambda design: design)


def test_the_default_systems(tmp_path):
    builder = a_builder(10_000, 64)
    models = load_models([a_run(tmp_path / "mapper"), a_run(tmp_path / "cells", c=64)])
    systems = default_systems(builder, models)
    swept = [50, 64, 100, 200, 400, 1000]
    by_family = {}
    for system in systems:
        by_family.setdefault(system.family, []).append(system.cells)
    assert by_family == {
        "centroid": swept,
        "amips": [200, 400, 800],
        "amips, lean": [200, 400, 800],
        "amips graph, lean": [0],
        "KeyNet mapper": swept,
        "KeyNet mapper, drop-in": swept,
        "SupportNet cells": [64],
        "exact, all keys": [0],
        "HNSW": [0],
        "FAISS IVF, PQ FastScan + refine": [0],
    }
    assert {s.cells for s in default_systems(a_builder(10_000), {})} == {0, 800, *swept} - {64}
    added = model_systems(builder.task, models)
    assert [s for s in systems if s.run] == added
    assert len(added) == 2 * len(swept) + 1
    assert model_systems(builder.task, {}) == []


def test_cells_that_were_given_are_a_baseline_too():
    task = a_builder(10_000, 64, None).task
    systems = default_systems(a_builder(10_000, 64, None), {})
    assert System(cells_of(task)) in systems
    assert System(cells_of(task)).role == "baseline"
    assert cells_of(task).query_aware is None


@pytest.mark.parametrize(("n", "counts"), [(10_000, [200, 400, 800]), (1000, [63, 125]), (20, [2])])
def test_amips_s_own_systems(n, counts):
    """What `fit` makes: the defaults of a design, with float32 keys and in as many dimensions as measured."""
    systems = own_systems(a_builder(n))
    flat = [Design(cells, storage="flat") for cells in counts]
    lean = [Design(cells, storage="lean", dimensions=16) for cells in counts]
    assert [s.design for s in systems] == flat + lean
    assert {s.role for s in systems} == {"contender"}
    assert [s.design for s in own_systems(a_builder(n, dimensions=None))] == flat


def test_systems_on_backends(tmp_path):
    models = load_models([a_run(tmp_path / "mapper"), a_run(tmp_path / "cells", c=64)])
    task = a_builder(10_000, 64).task
    systems = backend_systems(task, ["hnsw", "leanvec", "hnsw"], models)
    assert [(s.family, s.cells) for s in systems] == [
        ("HNSW", 0),
        ("HNSW: KeyNet mapper, drop-in, scored again", 0),
        ("LeanVec", 64),
        ("LeanVec: KeyNet mapper, drop-in, scored again", 64),
        ("LeanVec: KeyNet mapper", 64),
        ("LeanVec: SupportNet cells", 64),
    ]
    assert [s.cells for s in backend_systems(task, ["leanvec"], {})] == [400]
    (own,) = own_on_backends(10_000, ["hnsw", "leanvec"])
    assert own == System(Design(400), backend="leanvec", label="amips")


def test_two_runs_of_one_name_are_refused(tmp_path):
    runs = [a_run(tmp_path / place / "run", seed=seed) for seed, place in enumerate("ab")]
    with pytest.raises(AmipsError, match="same directory name"):
        load_models(runs)


# what cannot be run


def checked(task, system, tmp_path):
    Runner(task, ResultsStore(tmp_path / "results", {}), Settings()).opener.check(system)


def refused(task, systems, tmp_path, match, kind=RunError):
    """By the bench, before anything is run."""
    with pytest.raises(kind, match=match) as caught:
        bench(task, out=tmp_path / "results", systems=systems)
    one_line(caught)
    assert not list((tmp_path / "results").glob("runs/*"))


def test_a_model_of_other_keys(task, tmp_path):
    run = a_run(tmp_path / "run", keys="0" * 64)
    refused(task, [System(PLAIN), System(PLAIN, run=run)], tmp_path, "trained on other keys")


def test_a_model_of_other_cells(task, tmp_path):
    run = a_run(tmp_path / "run", task, c=8, cells="0" * 64)
    own = cells_of(task)
    refused(task, [System(Design.plain(4)), System(own, run=run)], tmp_path, "trained on other cells")
    run = a_run(tmp_path / "run9", task, c=9, cells="0" * 64)
    refused(task, [System(Design.plain(9), run=run)], tmp_path, "trained on other cells")
    refused(task, [System(own, run=run)], tmp_path, "scores 9 cells in dimension 16: it does not fit 8 cells")


def test_a_model_of_another_dimension(task, tmp_path):
    run = a_run(tmp_path / "run", task, d=12)
    refused(
        task,
        [System(PLAIN, run=run)],
        tmp_path,
        "in dimension 12: it does not fit 8 cells in dimension 16",
    )


@pytest.mark.parametrize("mode", ["drop-in", "drop-in-rescored"])
def test_drop_in_with_a_router_of_cells(task, tmp_path, mode):
    run = a_run(tmp_path / "run", task, c=8)
    systems = [System(PLAIN, run=run, mode=mode)]
    refused(task, systems, tmp_path, f"scores cells: mode='{mode}' needs a model of one key")


def test_a_run_that_is_not_finished(task, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    systems = [System(PLAIN, run=str(tmp_path / "run"))]
    refused(task, systems, tmp_path, "run is not a finished run: it has no model.safetensors")
    for named in (None, [System(PLAIN)]):
        with pytest.raises(
            RunError, match=r"run is not a finished run: it has no model\.safetensors$"
        ) as caught:
            bench(task, out=tmp_path / "none", models=[tmp_path / "run"], systems=named)
        one_line(caught)
        assert not (tmp_path / "none").exists()


def test_more_cells_than_keys(task, tmp_path):
    refused(task, [System(Design.plain(601))], tmp_path, "there are only 600 keys", AmipsError)


@pytest.mark.parametrize(
    "design", [Design(8, router=Linear(rank=17)), Design(8, storage="lean", dimensions=17)], ids=str
)
def test_more_dimensions_than_there_are(task, tmp_path, design):
    systems = [System(PLAIN), System(design)]
    refused(task, systems, tmp_path, r"there are only 16 dimensions|from 0 to 16", AmipsError)


def test_systems_that_are_the_same(task, tmp_path):
    twice = [System(PLAIN), System(Design.plain(9)), System(PLAIN, label="again")]
    refused(task, twice, tmp_path, "two of the systems are the same: (centroid|again), 8 cells", AmipsError)
    run = a_run(tmp_path / "run", task)
    shutil.copytree(run, tmp_path / "copy")
    twice = [System(PLAIN, run=run), System(PLAIN, run=str(tmp_path / "copy"))]
    refused(task, twice, tmp_path, "two of the systems are the same", AmipsError)
    # A rank that is left to the builder, and the number that it is.
    twice = [System(Design(8, router=Linear())), System(Design(8, router=Linear(rank=Linear().rank_for(16))))]
    refused(task, twice, tmp_path, "two of the systems are the same", AmipsError)


def test_routers_that_are_called_the_same(task, tmp_path):
    """They would share one front."""
    runs = [a_run(tmp_path / place / "run", task, seed=seed) for seed, place in enumerate("ab")]
    systems = [System(PLAIN, run=run) for run in runs]
    refused(task, systems, tmp_path, "a/run and .*b/run are both called 'run'", AmipsError)
    posing = [System(PLAIN), System(PLAIN, run=runs[0], label="centroid")]
    refused(task, posing, tmp_path, "are both called 'centroid'", AmipsError)
    trained = [System(Design(8), label="ours"), System(Design(9, recipe=None), label="ours")]
    refused(task, trained, tmp_path, "are both called 'ours, lean'", AmipsError)


def test_a_model_that_is_among_the_systems_too(task, tmp_path):
    run = a_run(tmp_path / "run", task)
    for label, match in (
        ("KeyNet run", "two of the systems are the same: KeyNet run, 8 cells"),
        ("x", "same"),
    ):
        with pytest.raises(AmipsError, match=match) as caught:
            bench(task, out=tmp_path / "none", systems=[System(PLAIN, run=run, label=label)], models=[run])
        one_line(caught)
        assert not (tmp_path / "none").exists()


def test_no_systems(task, tmp_path):
    refused(task, [], tmp_path, "nothing to compare", AmipsError)


def test_what_can_be_run_passes(task, tmp_path):
    mapper, unknown = a_run(tmp_path / "mapper", task), a_run(tmp_path / "unknown")
    cells = a_run(tmp_path / "cells", task, c=8, cells=fingerprint_of(np.asarray(task.cells.assignment)))
    for system in (
        System(Design.plain(600)),
        System(LINEAR),
        System(cells_of(task), run=cells),
        System(Design.plain(33), run=mapper, mode="drop-in"),
        System(Design.plain(33), run=unknown),
        System(backend="exact"),
        System(backend="hnsw"),
        System(Design(8), backend="leanvec"),
    ):
        checked(task, system, tmp_path)


class TestGraphs:
    def test_from_a_file(self, tmp_path):
        (tmp_path / "s.toml").write_text(
            '[[system]]\nstructure = "graph"\nlabel = "ours"\n'
            '[[system]]\nstructure = "graph"\ndegree = 64\nquery_aware = 0\nstorage = "flat"\n'
        )
        first, second = read_systems(tmp_path / "s.toml")
        assert first == System(Design.graph(), label="ours")
        assert second == System(Design.graph(degree=64, learned=False, storage="flat"))
        assert (first.name, second.name) == ("ours, lean", "graph of degree 64")
        assert first.role == second.role == "contender"
        assert first.slug.startswith("graph-")
        assert System.from_json(json.loads(json.dumps(first.to_json()))) == first

    @pytest.mark.parametrize(
        "line", ['router = "linear"', "cells = 8", "spill_fraction = 0.5", 'backend = "hnsw"']
    )
    def test_what_a_graph_has_not(self, tmp_path, line):
        (tmp_path / "s.toml").write_text(f'[[system]]\nstructure = "graph"\n{line}\n')
        with pytest.raises(AmipsError, match="a graph has none"):
            read_systems(tmp_path / "s.toml")

    def test_no_model_and_no_backend(self, tmp_path):
        with pytest.raises(AmipsError, match="no cells that a model could choose"):
            System(Design.graph(), run=a_run(tmp_path / "run"))
        with pytest.raises(AmipsError, match="a graph is amips's own"):
            System(Design.graph(), backend="leanvec")
