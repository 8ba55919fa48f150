"""Experiments on training: dynamics, tradeoff, losses, horizon; what they share, and one run of each."""

import json
import math
import re
from dataclasses import asdict, fields
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from amips.bench import Bootstrap, load_summary
from amips.learn import evaluate, loop
from amips.nets import RECIPES, Recipe, load_model
from helpers import make_world
from paper import dynamics, encoders, horizon, ivf, losses, mappers, tradeoff
from paper.claims import claims_of
from paper.workspace import SCALES, Workspace

torch.set_num_threads(1)

NETWORKS = {
    f"{kind} {size}, L = {depth}" for kind in mappers.KINDS for size in ("XS", "S") for depth in (2, 4)
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    place = tmp_path_factory.mktemp("training")
    keys, queries = make_world(800, 1500, 16, seed=5)
    (place / "data").mkdir()
    np.save(place / "data" / "keys.npy", keys)
    np.save(place / "data" / "queries.npy", queries)
    return Workspace(place / "data", "smoke", place / "out")


def checked(summary, workspace, tmp_path):
    """What every summary must have; it survives being written, and names no path."""
    assert summary.verdict
    assert summary.facts
    assert summary.method
    assert summary.command == f"python -m paper {summary.name} --data DATA --scale smoke --out OUT"
    for table in summary.tables:
        assert {len(row) for row in table.rows} == {len(table.head)}
        measured = [row for row in table.rows if not row[0].startswith("the paper")]
        assert all(cell and "nan" not in cell for row in measured for cell in row)
        assert "The paper" in table.note
    claims = claims_of(summary)
    assert claims
    assert {claim.sentence() for claim in claims} <= set(summary.verdict)
    assert "nan" not in " ".join(summary.verdict)
    summary.save(tmp_path)
    text = json.dumps(asdict(summary), allow_nan=False)
    assert json.loads(json.dumps(asdict(load_summary(tmp_path)))) == json.loads(text)
    assert str(workspace.out) not in text
    return summary


def metrics_of(workspace, name):
    """The metrics of a stored run on test, evaluated anew."""
    task = workspace.mapping_task()
    return evaluate(load_model(workspace.run_directory(name, task)), task, task.test)


def erel_and_half(metrics):
    """What tables show of the transport error: the paper's figures do not say which of these they have."""
    both = metrics["erel"], metrics["erel_half"]
    assert both[0] == 2 * both[1]
    return [*both, *map(math.exp, both)]


def trained(kind, size, depth, erel, mrr=None, val=None):
    """A network whose errors are given."""
    rows = {"erel": np.asarray(erel, float), "mrr": np.asarray(erel if mrr is None else mrr, float)}
    about = {"samples": 1000, "val": {"erel": 99.0, "mrr": 99.0}}  # of the other split: nobody looks at it
    task = SimpleNamespace(test=SimpleNamespace(source=np.arange(len(rows["erel"]))))
    made = mappers.Trained(kind, size, depth, task, None, SimpleNamespace(about=about))
    vars(made)["rows"] = rows
    vars(made)["val_rows"] = {name: np.array([value]) for name, value in (val or {}).items()} or rows
    return made


# what they share


def test_pairs_differ_in_one_thing_and_are_neighbours():
    found = [trained("KeyNet", size, depth, [0.0]) for size in ("S", "L", "XS") for depth in (8, 2, 4)]
    by_size = [(a.size, b.size, a.depth, b.depth) for a, b in mappers.pairs(found, "size")]
    assert len(by_size) == 6
    assert {(a, b) for a, b, _, _ in by_size} == {("XS", "S"), ("S", "L")}
    assert all(a == b for _, _, a, b in by_size)
    by_depth = [(a.depth, b.depth, a.size, b.size) for a, b in mappers.pairs(found, "depth")]
    assert {(a, b) for a, b, _, _ in by_depth} == {(2, 4), (4, 8)}
    assert all(a == b for _, _, a, b in by_depth)
    other = trained("SupportNet", "L", 8, [0.0])
    assert len(mappers.pairs([*found, other], "size")) == 6  # of its own kind there is no other


def test_a_difference_is_sure_where_its_interval_leaves_out_zero():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(400)
    one, other = trained("KeyNet", "XS", 2, noise - 0.5), trained("KeyNet", "S", 2, noise)
    found = mappers.difference(one, other, "erel", Bootstrap(400))
    assert (found.value, found.low, found.high) == pytest.approx((-0.5, -0.5, -0.5))  # the same queries
    assert found.sure
    unlike = trained("KeyNet", "S", 2, rng.standard_normal(400) + 0.02)
    unsure = mappers.difference(one, trained("KeyNet", "S", 2, noise - 0.5), "erel", Bootstrap(400))
    assert (unsure.value, unsure.sure) == (0, False)
    wide = mappers.difference(unlike, other, "erel", Bootstrap(400))
    assert wide.low < wide.value < wide.high
    assert mappers.better(found, "erel")
    assert not mappers.better(found, "mrr")
    pair = [(other, one)]
    assert mappers.counted(pair, "erel", Bootstrap(400)) == (1, 1)
    assert mappers.counted(pair, "mrr", Bootstrap(400)) == (0, 0)
    # All go one way, and surely; all, but not all surely; not all.
    assert [mappers.settled(*counts) for counts in ((3, 3, 3), (3, 2, 3), (2, 2, 3))] == [True, None, False]


def test_per_row_errors_have_the_means_that_evaluate_gives(workspace):
    task = workspace.mapping_task()
    for kind in mappers.KINDS:
        one = mappers.trained(workspace, task, kind, "XS")
        expected = evaluate(one.model, task, task.test)
        means = {name: value.mean() for name, value in one.rows.items()}
        assert set(means) >= {"score", "key", "erel", "mrr", "match"}
        assert means == pytest.approx({name: expected[name] for name in means}, rel=1e-5, abs=1e-6)


def test_the_curve_is_what_the_run_logged(workspace):
    task = workspace.mapping_task()
    one = mappers.trained(workspace, task, "KeyNet", "XS")
    log = [json.loads(line) for line in (one.directory / "log.jsonl").read_text().splitlines()]
    assert log.pop(0)["samples"] == 0  # the look at it before the first step
    samples, erel = one.curve("erel")
    assert samples == [entry["samples"] for entry in log]
    assert samples[-1] == one.samples == 4096
    assert erel == [entry["val"]["erel"] for entry in log]
    assert one.curve("loss")[1] == [entry["train"]["loss"] for entry in log]


def test_the_mapper_of_the_experiments_that_search_is_the_same_run(workspace, monkeypatch):
    task = workspace.mapping_task()
    one = mappers.trained(workspace, task, "KeyNet", "XS")
    monkeypatch.setattr(loop.Run, "step", lambda self, done: pytest.fail("trained again"))
    assert ivf.mapper(workspace, task, "XS") == str(one.directory)
    assert one.directory == workspace.work / f"run-keynet-xs-{task.path.name}"


# the experiments, without running them


def with_curve(name, ys, size="XS", depth=2, erel=None):
    """A network whose curve on val is given, one evaluation every 100 samples."""
    made = trained("KeyNet", size, depth, [ys[-1]] * 20 if erel is None else erel)
    vars(made)["log"] = [
        {"samples": 100.0 * (i + 1), "val": {"erel": y}, "train": {"loss": y}} for i, y in enumerate(ys)
    ]
    return made


def test_errors_at_equal_samples_are_between_evaluations():
    one = with_curve("a", [0.0, -0.2, -0.6])
    assert dynamics.at(one, 100) == 0
    assert dynamics.at(one, 250) == pytest.approx(-0.4)
    assert dynamics.at(one, 99) is None
    assert dynamics.at(one, 301) is None
    assert dynamics.rise(one) == 0
    assert dynamics.rise(with_curve("a", [0.0, -0.6, -0.2])) == pytest.approx(0.4)


def test_dynamics_says_what_was_not_reproduced():
    steady = [
        with_curve("", [0, -0.1, -0.2], "XS", 2),
        with_curve("", [0, -0.1, -0.1], "XS", 4),
        with_curve("", [0, -0.2, -0.3], "S", 2),
        with_curve("", [0, -0.2, -0.4], "S", 4),
    ]
    findings = dynamics.compare(steady, 200)
    stable, size, budget, equal, depth = findings
    assert [claim.held for claim in (stable, size, depth)] == [True] * 3
    assert {claim.where for claim in (stable, size, depth)} == {"Appendix A.3, Figure 9"}
    assert "at most 0.000" in stable.evidence
    assert "the larger network ends with the lower erel on test in 2 (surely in 2)" in size.evidence
    assert size.evidence.endswith("; where it gains least, by -0.100 (-0.100 to -0.100)")
    assert (size.value, depth.value) == pytest.approx((-0.1, -0.1))
    assert budget == "Each network had the same budget, which gave them 0.001 million samples."
    assert equal.endswith("the larger one is lower on val in 2 of 2 pairs.")
    assert "L = 2 for XS (erel -0.200 on test), L = 4 for S (erel -0.400 on test)" in depth.evidence
    assert depth.evidence.endswith("KeyNet S, L = 4 minus KeyNet S, L = 2: -0.100 (-0.100 to -0.100)")
    # A greater depth that was chosen on val and is not surely better on test decides nothing.
    noisy = trained("KeyNet", "S", 4, np.linspace(-3, 2.39, 20), val={"erel": -0.4, "mrr": 0.0})
    vars(noisy)["log"] = vars(steady[3])["log"]
    assert dynamics.compare([*steady[:3], noisy], 200)[-1].held is None
    shaky = [with_curve("", [0, -0.5, -0.2], "XS", 2), with_curve("", [0, -0.1, -0.1], "S", 2)]
    stable, size, _, _, depth = dynamics.compare(shaky, 200)
    assert [claim.held for claim in (stable, size, depth)] == [False] * 3
    assert stable.evidence.endswith("KeyNet XS, L = 2 ends 0.300 above its lowest point")
    assert stable.sentence().endswith("not reproduced (the paper: no run diverges or becomes unstable late).")
    assert "in 0 (surely in 0); where it gains least, by +0.100" in size.evidence


def test_tradeoff_says_what_was_not_reproduced():
    def world(support_erel, support_mrr):
        networks = []
        for size, erel, mrr in (("XS", -0.2, 0.2), ("S", -0.4, 0.4)):
            for depth, less in ((2, 0.0), (4, 0.05)):
                key = (erel + less, mrr - less)
                own = (key[0] + support_erel[size], key[1] + support_mrr[size])
                networks += [trained("KeyNet", size, depth, [key[0]] * 9, [key[1]] * 9)]
                networks += [trained("SupportNet", size, depth, [own[0]] * 9, [own[1]] * 9)]
        return tradeoff.compare(networks, ("XS", "S"))

    best, budget, *claims = world({"XS": 0.01, "S": -0.01}, {"XS": 0.01, "S": -0.01})
    assert "KeyNet S, L = 2 the highest MRR (0.400 on test" in best
    assert (
        budget == "The same budget gave KeyNets 0.001 million samples and SupportNets 0.001 million samples."
    )
    assert [claim.held for claim in claims] == [True] * 6
    assert claims[0].evidence.startswith(
        "KeyNet: of 2 pairs that differ in size alone, the larger one has the lower erel"
    )
    assert claims[2].evidence.startswith(
        "KeyNet: of 2 pairs that differ in depth alone, the deeper one has the lower erel"
    )
    # Near the query itself everything is found, but farther from the key.
    near = trained("SupportNet", "XS", 2, [0.7] * 9, [0.9] * 9)
    far = [trained(kind, size, 2, [-0.1] * 9, [0.1] * 9) for kind in mappers.KINDS for size in ("XS", "S")]
    assert "SupportNet XS, L = 2 predicts points farther" in tradeoff.compare([near, *far], ("XS", "S"))[1]
    *_, small, large = world({"XS": -0.01, "S": 0.01}, {"XS": -0.01, "S": 0.01})
    assert (small.held, large.held) == (False, False)
    assert small.text == "SupportNet has the higher erel and the higher MRR at small sizes"
    assert "the lower erel at 0 of 2 depths for sure (+0.010 (+0.010 to +0.010), " in large.evidence
    assert "the higher MRR at 2 of 2 depths for sure" in large.evidence


def test_what_is_not_sure_does_not_decide_between_networks():
    def one(kind, size, depth, mean):
        return trained(kind, size, depth, mean + np.linspace(-1, 1, 9), np.full(9, 0.1))

    networks = [one("KeyNet", size, depth, 0.0) for size in ("XS", "S") for depth in (2, 4)]
    networks += [
        trained("SupportNet", n.size, n.depth, n.rows["erel"][::-1] + 0.01, [0.2] * 9) for n in networks
    ]
    said = [one for one in tradeoff.compare(networks, ("XS", "S")) if not isinstance(one, str)]
    by_depth, (small, large) = said[2:4], said[4:]
    assert [claim.held for claim in by_depth] == [None, None]
    assert small.held is None  # a higher MRR for sure, and an erel that may be higher
    assert large.held is False  # ... where a lower one was expected


@pytest.mark.parametrize("scale", ["default", "paper"])
def test_the_recipes_differ_in_the_weights_or_the_reduction_alone(scale):
    base = RECIPES[scale]
    made = losses.recipes(base)
    assert made[losses.BOTH] == base
    changed = {
        loss: {
            field.name: (getattr(base, field.name), getattr(recipe, field.name))
            for field in fields(Recipe)
            if getattr(base, field.name) != getattr(recipe, field.name)
        }
        for loss, recipe in made.items()
    }
    assert changed == {
        "both": {},
        "score only": {"grad": (1.0, 0.0), "key": (1.0, 0.0)},
        "gradient only": {"score": (0.01, 0.0), "consist": (0.01, 0.0)},
        "both averaged": {"reduction": ("sum", "mean")},
    }


def of_losses(score, key):
    made = trained("KeyNet", "XS", 2, [0.0] * 9)
    vars(made)["rows"] |= {"score": np.full(9, score), "key": np.full(9, key)}
    return made


def test_losses_say_what_was_not_reproduced():
    def said(both, averaged=(0.02, 1.01)):
        errors = {"score only": (0.01, 2.0), "gradient only": (0.1, 1.0), "both": both}
        errors["both averaged"] = averaged
        return losses.compare({("KeyNet", 1.0, loss): of_losses(*pair) for loss, pair in errors.items()})

    corners, together, averaged = said((0.05, 1.02))
    assert (corners.held, together.held, averaged.held) == (True, True, True)
    assert averaged.text == together.text
    assert "KeyNet, averaged over d: both losses together have 1.010 (1.010" in averaged.evidence
    assert said((0.05, 1.02), averaged=(0.01, 1.2))[2].held is False
    assert "score error is lowest with score only (0.01000)" in corners.evidence
    assert "1.020 (1.020 to 1.020) times the gradient error of gradient alone, and" in together.evidence
    assert together.evidence.endswith("0.500 (0.500 to 0.500) times its score error")
    spread = {"score only": (0.01, 2.0), "gradient only": (0.1, 1.0), "both": (0.05, 1.0)}
    networks = {("KeyNet", 1.0, loss): of_losses(*pair) for loss, pair in spread.items()}
    networks["KeyNet", 1.0, "both averaged"] = of_losses(0.02, 1.0)
    vars(networks["KeyNet", 1.0, "both"])["rows"]["score"] = np.linspace(0.0, 0.17, 9)
    assert losses.compare(networks)[1].held is None  # 0.85 times the score error, more or less
    for both in ((0.099, 1.0), (0.05, 1.2)):  # hardly a lower score error; a much higher gradient error
        assert said(both)[1].held is False


def test_full_has_every_size_of_the_paper():
    def of(scale):
        return mappers.sizes(SimpleNamespace(scale=SCALES[scale]))

    assert of("full") == ("XS", "S", "M", "L", "XL", "XXL")
    assert (of("small"), of("smoke")) == (("XS", "S"), ("XS", "S"))
    assert encoders.SIZES == ("XS", "S")  # the paper has these two there


def test_horizons_are_in_the_ratio_of_the_paper():
    for scale in ("smoke", "small", "full"):
        portions = [horizon.portion(scale, units) for units in horizon.HORIZONS]
        assert [portion / portions[0] for portion in portions] == pytest.approx([1, 3, 5, 7])
    # At small, three units are the run of the other experiments, to the last bit; at full one is.
    assert horizon.portion("small", 3) == 1
    assert horizon.portion("full", 1) == 1


def of_horizon(ratio, mrr, loss, spread=0.0):
    made = trained("KeyNet", "S", 2, np.full(50, math.log(ratio)), mrr + spread * np.linspace(-1, 1, 50))
    vars(made)["log"] = [{"samples": 100, "val": {"erel": 0.0}, "train": {"loss": loss}}]
    return made


def test_horizon_says_what_was_not_reproduced():
    plateau = {
        units: of_horizon(ratio, mrr, loss)
        for units, ratio, mrr, loss in zip(
            (1, 3, 5, 7),
            (0.40, 0.375, 0.37, 0.365),
            (0.1, 0.2, 0.201, 0.202),
            (4.0, 3.0, 2.0, 1.0),
            strict=True,
        )
    }
    loss, unit, erel, mrr = horizon.compare(plateau)
    assert unit == "A unit is 0.001 million samples here and a billion in the paper."
    assert [claim.held for claim in (loss, erel, mrr)] == [True] * 3
    assert "0.400, 0.375 and 0.365 after 1, 3 and 7 units" in erel.evidence
    assert "it falls by +0.025 (+0.025 to +0.025) up to 3 units and by +0.010 (" in erel.evidence
    assert erel.value == pytest.approx(0.015)
    assert "gains +0.002" in mrr.evidence
    rising = {**plateau, 5: of_horizon(0.3, 0.25, 3.5), 7: of_horizon(0.2, 0.3, 3.4)}
    loss, _, erel, mrr = horizon.compare(rising)
    assert [claim.held for claim in (loss, erel, mrr)] == [False] * 3
    # An error that rises, and a score that falls, are no smaller gains.
    worse = {**plateau, 7: of_horizon(0.39, 0.15, 1.0)}
    assert [claim.held for claim in horizon.compare(worse) if not isinstance(claim, str)] == [
        True,
        None,
        False,
    ]
    unsure = {**plateau, 7: of_horizon(0.365, 0.202, 1.0, spread=0.1)}
    assert horizon.compare(unsure)[-1].held is None


# one run of each, in one place


def test_dynamics(workspace, tmp_path):
    summary = checked(dynamics.run(workspace), workspace, tmp_path)
    found = summary.values["networks"]
    assert set(found) == {name for name in NETWORKS if name.startswith("KeyNet")}
    for row in summary.tables[0].rows:
        one = found[row[0]]
        name = "keynet-" + one["size"].lower() + ("" if one["depth"] == 2 else f"-{one['depth']}")
        metrics = metrics_of(workspace, name)
        assert [float(cell) for cell in row[6:]] == pytest.approx(erel_and_half(metrics), abs=6e-4)
        assert [float(cell) for cell in (row[2], row[4])] == pytest.approx(
            [one["curve"]["erel"][0], one["curve"]["erel"][-1]], abs=6e-4
        )
    curves = {
        f"{panel.title}, {s.name}": (s.x, s.y) for panel in summary.charts[0].panels for s in panel.series
    }
    assert curves == {name: (one["curve"]["samples"], one["curve"]["erel"]) for name, one in found.items()}


def test_nothing_is_trained_twice(workspace, tmp_path, monkeypatch):
    """Tradeoff finds the KeyNets of dynamics, and the other two find theirs; again, nothing is trained."""
    dynamics.run(workspace)
    begun = []
    run_train = loop.Run.train
    monkeypatch.setattr(
        loop.Run, "train", lambda self, show: begun.append(self.out.name) or run_train(self, show)
    )
    values = {"tradeoff": tradeoff.run(workspace).values}
    assert not [name for name in begun if "keynet" in name]
    values["losses"] = losses.run(workspace).values
    values["horizon"] = horizon.run(workspace).values
    assert len(begun) == len(set(begun))
    task = workspace.mapping_task().path.name
    new = {name.removeprefix("run-").removesuffix(f"-{task}") for name in begun}
    variants = ("score-only", "gradient-only", "both-averaged")
    alone = {f"{kind}-xs-{loss}" for kind in ("keynet", "supportnet") for loss in variants}
    assert new - {f"supportnet-{name}" for name in ("xs", "s", "xs-4", "s-4")} == {
        *alone,
        *("keynet-s-x3", "keynet-s-x5", "keynet-s-x7"),
    }
    begun.clear()
    for module in (tradeoff, losses, horizon):
        assert module.run(workspace).values == values[module.__name__.rsplit(".", 1)[1]]
    assert begun == []


def test_tradeoff(workspace, tmp_path):
    summary = checked(tradeoff.run(workspace), workspace, tmp_path)
    found = summary.values["networks"]
    assert set(found) == NETWORKS
    for row in summary.tables[0].rows:
        one = found[row[0]]
        name = f"{one['kind'].lower()}-{one['size'].lower()}" + (
            "" if one["depth"] == 2 else f"-{one['depth']}"
        )
        metrics = metrics_of(workspace, name)
        shown = [*erel_and_half(metrics), metrics["mrr"], metrics["match"]]
        assert [float(cell) for cell in row[3:]] == pytest.approx(shown, abs=6e-4)
    points = {
        (x, y)
        for series in summary.charts[0].panels[0].series
        for x, y in zip(series.x, series.y, strict=True)
    }
    assert points == {(one["test"]["mrr"], one["test"]["erel"]) for one in found.values()}
    told = re.search(r"networks, (.+?) has the lowest erel on val", summary.verdict[0])
    assert found[told[1]]["val"]["erel"] == min(one["val"]["erel"] for one in found.values())


def test_losses(workspace, tmp_path):
    summary = checked(losses.run(workspace), workspace, tmp_path)
    found = summary.values["networks"]
    assert set(found) == {
        f"{kind}, {loss}" for kind in mappers.KINDS for loss in (*losses.WITHOUT, losses.AVERAGED)
    }
    recipes = losses.recipes(workspace.recipe())
    for name, one in found.items():
        assert one["recipe"] == recipes[name.split(", ")[1]].to_json()
    for row in summary.tables[0].rows:
        kind, loss = row[0].split(", ")
        tag = "" if loss == "both" else "-" + loss.replace(" ", "-")
        metrics = metrics_of(workspace, f"{kind.lower()}-xs{tag}")
        shown = [metrics[name] for name in ("score", "key", "erel", "mrr")]
        assert [float(cell) for cell in row[2:]] == pytest.approx(shown, abs=6e-4)
    # A loss that is trained on alone is lower than one that is not trained on at all.
    for kind in mappers.KINDS:
        alone = {loss: found[f"{kind}, {loss} only"]["test"] for loss in ("score", "gradient")}
        assert alone["score"]["score"] < alone["gradient"]["score"]
        assert alone["gradient"]["key"] < alone["score"]["key"]


def test_horizon(workspace, tmp_path):
    summary = checked(horizon.run(workspace), workspace, tmp_path)
    found = summary.values["networks"]
    samples = [found[str(units)]["samples"] for units in horizon.HORIZONS]
    assert [count / samples[0] for count in samples] == [1, 3, 5, 7]
    # Evaluated as often in proportion.
    steps = [len(found[str(units)]["curve"]["samples"]) for units in horizon.HORIZONS]
    assert steps == [4, 12, 20, 28]
    final = [found[str(units)]["curve"]["loss"][-1] for units in horizon.HORIZONS]
    assert all(later < earlier for earlier, later in pairwise(final))  # so few samples: each more helps
    assert claims_of(summary)[0].held
    rows = summary.tables[0].rows
    assert [row[0] for row in rows[:4]] == ["1 unit", "3 units", "5 units", "7 units"]
    for units, row in zip(horizon.HORIZONS, rows, strict=False):
        metrics = metrics_of(workspace, "keynet-s" if units == 1 else f"keynet-s-x{units}")
        shown = [*erel_and_half(metrics), metrics["mrr"]]
        assert [float(cell) for cell in row[3:]] == pytest.approx(shown, abs=6e-4)
    paper = [(row[0], *row[3:7]) for row in rows[4:]]  # it does not say of which the exponential is
    assert paper == [
        ("the paper, NQ: 1 unit", "", "", "0.400", "0.400"),
        ("the paper, NQ: 3 units", "", "", "0.375", "0.375"),
        ("the paper, NQ: 7 units", "", "", "0.365", "0.365"),
    ]
