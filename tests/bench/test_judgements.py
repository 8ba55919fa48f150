"""What a speed-up costs in relevance, on judgements that are planted."""

import numpy as np
import pytest

import amips
from amips.bench import Judgements, System, bench
from amips.design import Design
from amips.errors import AmipsError
from helpers import make_world, with_linear

N, M = 400, 300
SYSTEMS = [System(Design.plain(16)), System(with_linear(16), label="linear"), System(backend="exact")]
QUICK = {"minutes": 0.005, "rounds": 2, "batch": 16}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    keys, queries = make_world(N, M, 16, seed=5)
    out = tmp_path_factory.mktemp("judged") / "task"
    return amips.label(keys, queries, cells=16, k=10, val=40, test=60, cell_targets=False, out=out)


def judged(task, relevant):
    """Judgements in which `relevant(row)` lists the relevant keys of a test row."""
    qrels = {f"q{s}": {f"k{i}": 1 for i in relevant(row)} for row, s in enumerate(task.test.source)}
    return Judgements(qrels, [f"q{i}" for i in range(M)], [f"k{i}" for i in range(N)])


def shown(summary):
    table = next(t for t in summary.tables if t.title.startswith("Relevance"))
    return {row[0]: row for row in table.rows}, table


def test_exact_search_is_perfect_where_the_top_keys_are_the_relevant_ones(task, tmp_path):
    top = np.asarray(task.test.top_ids)
    made = bench(
        task, out=tmp_path / "r", systems=SYSTEMS, judgements=judged(task, lambda r: top[r, :3]), **QUICK
    )
    rows, table = shown(made)
    assert rows["exact"][1:] == ["-", "1.0000", "1.0000"]
    assert set(rows) == {"exact", "centroid", "linear"}
    for name in ("centroid", "linear"):
        value, low = float(rows[name][2].split()[0]), float(rows[name][2].split()[1].strip("(,"))
        assert 0.8 < value <= 1.0
        assert low == pytest.approx(value - 1, abs=1e-4)  # the difference from exact search
    assert "60 judged test queries" in table.note
    again = bench(
        task, out=tmp_path / "r", systems=SYSTEMS, judgements=judged(task, lambda r: top[r, :3]), **QUICK
    )
    assert shown(again)[1].rows == table.rows


def test_without_judgements_there_is_no_such_table(task, tmp_path):
    made = bench(task, out=tmp_path / "r", systems=SYSTEMS[:1], **QUICK)
    assert not any(t.title.startswith("Relevance") for t in made.tables)


def test_ids_of_another_task_are_refused(task, tmp_path):
    good = judged(task, lambda r: [0])
    for wrong, text in (
        (Judgements(good.qrels, good.query_ids, good.key_ids[:-1]), "399 keys"),
        (Judgements(good.qrels, good.query_ids[:5], good.key_ids), "5 queries"),
        (Judgements({"other": {"k1": 1}}, good.query_ids, good.key_ids), "none of the test queries"),
    ):
        with pytest.raises(AmipsError, match=text):
            bench(task, out=tmp_path / "r", systems=SYSTEMS[:1], judgements=wrong, **QUICK)
        assert not (tmp_path / "r").exists()
