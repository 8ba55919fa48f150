"""`amips.plan` and `amips plan`: a cost model that counts what is done, with rates that are measured."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

import amips
from amips.capacity import Rates, calibrate, calibration, load_rates, rates_file
from amips.capacity import rates as capacity_rates
from amips.cli import main
from amips.errors import AmipsError

RATES = Rates()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The rates of the machine that runs the tests are none of their business."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def seconds(forecast):
    return {phase.name: phase.seconds for phase in forecast.phases}


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["amips", "plan", *words])
    main()


def test_labelling_by_hand():
    forecast = amips.plan(1e6, 100, 5000, rates=RATES)
    want = 4e8 / RATES.passes + 2 * 1e6 * 100 * 5000 / RATES.exact
    assert seconds(forecast)["label"] == pytest.approx(want)
    assert forecast.machines == forecast.shards == 1
    assert forecast.serving.shards_contacted == 1


@pytest.mark.parametrize("name", [field.name for field in fields(Rates)])
def test_every_rate_counts(name):
    """A faster machine takes less, in some phase or for a query."""
    slow = amips.plan(1e6, 128, 20_000, rates=RATES)
    factor = 0.5 if name in ("query", "random_read", "learn_code") else 2.0
    fast = amips.plan(1e6, 128, 20_000, rates=replace(RATES, **{name: factor * getattr(RATES, name)}))
    pairs = [(a.seconds, b.seconds) for a, b in zip(slow.phases, fast.phases, strict=True)]
    pairs.append((slow.serving.latency_on_disk, fast.serving.latency_on_disk))
    assert all(b <= a for a, b in pairs)
    assert any(b < a for a, b in pairs)


def test_more_machines_find_top_keys_together_and_one_makes_the_shards():
    one, four = (amips.plan(1e8, 128, 1e5, machines=count, rates=RATES) for count in (1, 4))
    passes = 4 * 1e8 * 128 / RATES.passes
    assert seconds(one)["label"] - passes == pytest.approx(4 * (seconds(four)["label"] - passes))
    assert seconds(one)["cells"] == pytest.approx(4 * seconds(four)["cells"])
    assert seconds(one)["train"] == seconds(four)["train"]
    shards = [amips.plan(1e8, 128, 1e5, machines=count, shards=16, rates=RATES) for count in (1, 4)]
    assert seconds(shards[0])["build"] == seconds(shards[1])["build"]
    # A fifth of the keys has a copy in a second shard.
    assert four.serving.memory == pytest.approx(1.2 * one.serving.memory / 4, rel=1e-3)
    assert 1 <= four.serving.shards_contacted < 4


def test_a_machine_holds_whole_shards():
    def memory(machines, shards):
        return amips.plan(1e8, 128, 1e5, machines=machines, shards=shards, rates=RATES).serving.memory

    assert memory(4, 2) == memory(2, 2) == pytest.approx(memory(1, 2) / 2)
    assert memory(4, 6) == pytest.approx(memory(1, 6) / 3)  # two of six, on some of four
    with pytest.raises(AmipsError, match="shards=2: each would need"):
        amips.plan(1e8, 128, 1e5, memory=3e9, shards=2, rates=RATES)


def test_machines_follow_from_the_memory():
    forecast = amips.plan(1e9, 768, 1e6, memory=100e9, rates=RATES)
    assert forecast.machines > 1
    assert 88e9 <= max(phase.memory for phase in forecast.phases) <= 100e9
    assert forecast.serving.memory <= 0.8 * 100e9  # copies of keys in other shards among it
    fewer = forecast.machines // 2
    with pytest.raises(amips.AmipsError, match=f"machines={fewer}: each would need .* give more of either"):
        amips.plan(1e9, 768, 1e6, memory=100e9, machines=fewer, rates=RATES)


def test_the_share_that_is_scanned_is_that_of_the_runs():
    """Of float32 keys in cells, as the results of scaling_n.py have them: FLOPs less those of the router."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "scaling_n.json"
    lines = [one for one in json.loads(results.read_text())["raw"] if "trained, flat" in one["setting"]]
    n = 1_000_000
    best = min((one for one in lines if one["n"] == n), key=lambda one: one["val"])
    rank, d, c = 32, 128, int(best["setting"].split()[0])
    scanned = best["test"] - rank * (c + d) / (n * d)
    assert amips.plan(n, d, 20_000, rates=RATES).serving.scanned == pytest.approx(scanned, rel=0.1)


def test_every_key_is_copied_by_who_labels():
    phases = {phase.name: phase for phase in amips.plan(1e8, 128, 1e5, machines=4, rates=RATES).phases}
    assert phases["label"].disk > 4 * 1e8 * 128


def test_the_share_that_is_scanned_decides_what_a_query_costs():
    little, much = (amips.plan(1e7, 128, 1e5, scanned=share, shards=16, rates=RATES) for share in (1e-3, 0.1))
    assert little.serving.latency < much.serving.latency
    assert 1 <= little.serving.shards_contacted < much.serving.shards_contacted <= 16


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keys": 0}, "keys=0"),
        ({"dim": 0}, "dim=0"),
        ({"queries": float("nan")}, "queries"),
        ({"machines": 0}, "machines=0"),
        ({"scanned": 2}, "scanned=2"),
        ({"memory": 10}, "memory=10: not even one key fits"),
        ({"keys": 1e30}, r"^keys=1e\+30: expected a number from 1 to 1e\+12$"),
        ({"machines": 10**12}, "^machines=1000000000000: expected a whole number from 1 to 100000$"),
        ({"shards": 20_001}, "^shards=20001: 1,000,000 keys are too few; ask for 20,000 at most$"),
        ({"keys": 1e10}, "^10,000,000,000 keys: `label` and `shard` take 2,147,483,647 at most"),
        ({"keys": 2e9, "machines": 1}, "an index holds 2,147,483,647 entries at most"),
    ],
)
def test_what_cannot_be_is_refused(options, match):
    with pytest.raises(amips.AmipsError, match=match):
        amips.plan(**{"keys": 1e6, "dim": 64, "queries": 1000, "rates": RATES, **options})


def test_rates_are_kept_in_the_cache_of_the_user():
    assert load_rates()[0] == RATES
    assert "shipped" in load_rates()[1]
    other = replace(RATES, exact=1.5e11)
    other.save_to(rates_file())
    assert load_rates() == (other, str(rates_file()))
    assert amips.plan(1e6, 64, 1000).rates == str(rates_file())


def test_a_file_that_has_no_rates(tmp_path):
    (tmp_path / "r.json").write_text('{"kind": "rates", "exact": 1}')
    with pytest.raises(amips.AmipsError, match="no rates of a machine; measure them with: amips plan --cal"):
        amips.plan(1e6, 64, 1000, rates=tmp_path / "r.json")
    bad = {**RATES.to_json(), "scan": -1}
    (tmp_path / "r.json").write_text(json.dumps(bad))
    with pytest.raises(amips.AmipsError, match="scan"):
        load_rates(tmp_path / "r.json")


def test_calibrating(monkeypatch):
    """A small collection instead of the real one: every rate is measured, none is left as it was."""
    for name, value in {"N": 4000, "M": 2600, "C": 32, "SAMPLES": 4096, "READS": 256}.items():
        monkeypatch.setattr(calibration, name, value)
    lines = []
    rates = calibrate(lines.append)
    assert all(getattr(rates, field.name) > 0 for field in fields(Rates))
    assert not [
        field.name for field in fields(Rates) if getattr(rates, field.name) == getattr(RATES, field.name)
    ]
    assert any(line.startswith("exact: ") for line in lines)


def test_the_command(monkeypatch, capsys, tmp_path):
    RATES.save_to(tmp_path / "r.json")
    words = ["--keys", "1e9", "--dim", "768", "--queries", "1e6", "--memory", "100G"]
    run(monkeypatch, *words, "--constants", str(tmp_path / "r.json"))
    text = capsys.readouterr().out
    for word in ("label", "cells", "train", "build", "serving:", "shards", "queries a second", "r.json"):
        assert word in text
    run(monkeypatch, *words, "--json")
    said = json.loads(capsys.readouterr().out)
    assert said == amips.plan(1e9, 768, 1e6, memory=100e9).to_json()


@pytest.mark.parametrize("more", [(), ("--calibrate",), ("--calibrate", "--queries", "1e5")])
def test_what_is_missing_is_said_before_anything_is_measured(monkeypatch, capsys, more):
    monkeypatch.setattr("amips.cli.planned.calibrate", lambda say: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        run(monkeypatch, "--keys", "1e9", *more)
    assert "give --keys, --dim and --queries, or --calibrate alone" in capsys.readouterr().err


def test_amounts_are_written_as_sizes_are(monkeypatch, capsys):
    run(monkeypatch, "--keys", "10M", "--dim", "64", "--queries", "0.2m", "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["keys"], said["queries"]) == (10_000_000, 200_000)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--keys", "ten", "--dim", "64", "--queries", "1B")
    assert "'ten' is not a number; write it like 1e7, 200K, 10M or 2.5B" in capsys.readouterr().err


def test_one_is_not_in_the_plural(monkeypatch, capsys):
    run(monkeypatch, "--keys", "1e6", "--dim", "64", "--queries", "1e4")
    text = capsys.readouterr().out
    assert "1 machine, 1 shard of 4,000 cells" in text
    assert "1.0 of 1 shard," in text


def test_rates_of_another_machine_are_said_to_be(monkeypatch, tmp_path):
    RATES.save_to(tmp_path / "r.json")
    assert load_rates(tmp_path / "r.json")[1] == str(tmp_path / "r.json")
    monkeypatch.setattr(capacity_rates, "processor", lambda: "Abacus")
    monkeypatch.setattr(capacity_rates, "threads", lambda: 1)
    where = load_rates(tmp_path / "r.json")[1]
    assert "not of this machine, Abacus, 1 thread; measure this one with: amips plan --calibrate" in where
    values = json.loads((tmp_path / "r.json").read_text())
    del values["machine"]
    (tmp_path / "r.json").write_text(json.dumps(values))
    assert "r.json, of an unknown machine, not of this machine" in load_rates(tmp_path / "r.json")[1]


def test_as_many_machines_as_the_memory_needs():
    whole = amips.plan(1e7, 128, 1e5, memory=2e9)
    assert max(whole.serving.memory, *(phase.memory for phase in whole.phases)) <= 2e9
    small = amips.plan(1e7, 128, 1e5, memory=900e6)
    assert small.machines > whole.machines
    amips.plan(1e7, 128, 1e5, memory=900e6, machines=small.machines)
    with pytest.raises(AmipsError, match="give more of either"):
        amips.plan(1e7, 128, 1e5, memory=900e6, machines=1)
    with pytest.raises(AmipsError, match="however many machines"):
        amips.plan(1e6, 128, 1e8, memory=1e9)
