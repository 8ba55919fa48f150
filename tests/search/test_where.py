"""Conditions over attributes: what SQL says, what Arrow answers, and one line for everything else."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import amips
from amips.search.where import matches

TABLE = pa.table(
    {
        "a": pa.array([1, 2, None, 4]),
        "small": pa.array([1, 2, 3, 4], pa.int8()),
        "f": pa.array([1.5, 2.0, None, -4.0]),
        "lang": ["en", "de", None, "EN"],
        "day": pa.array([dt.date(2024, 1, 1), dt.date(2025, 1, 1), None, dt.date(2023, 1, 1)]),
        "at": pa.array([dt.datetime(2024, 1, 1), None, None, dt.datetime(2026, 1, 1)]),
        "flag": [True, False, None, True],
        "my col": [1, 2, 3, 4],
        "cost": pa.array([Decimal("1.10")] * 4),
    }
)
HOLDS = {
    "a = 1": "1000",
    "a == 1": "1000",
    "a <> 1": "0101",
    "1 < a": "0101",
    "-1 < a": "1101",
    "a >= 2 and a <= 4": "0101",
    "a = 1 or a = 4": "1001",
    "not (a = 1 or a = 4)": "0100",
    "a in (1, 2)": "1100",
    "a not in (1, 2)": "0001",
    "not a in (1, 2)": "0001",
    "a in (1.5)": "0000",
    "a in (1.0, 4)": "1001",
    "small in (300, 2)": "0100",
    "small < 99999999999999999999999": "1111",
    "a between 1 and 2": "1100",
    "a not between 1 and 2": "0001",
    "a is null": "0010",
    "a is not null": "1101",
    "lang = 'en'": "1000",
    "lang like 'e%'": "1000",
    "lang not like 'e%'": "0101",
    "lang ilike 'e_'": "1001",
    "lang in ('en', 'de')": "1100",
    "lang = 'it''s'": "0000",
    "f < 2": "1001",
    "f = 2": "0100",
    "a = f": "0100",
    "a = 1.5": "0000",
    "cost = 1.1": "1111",
    "day >= '2024-01-01'": "1100",
    "day >= date '2024-01-01'": "1100",
    "day = date '2023-01-01'": "0001",
    "at > timestamp '2024-01-01 10:00:00'": "0001",
    "at >= '2024-01-01'": "1001",
    "flag": "1001",
    "not flag": "0100",
    "flag = false": "0100",
    "flag is true": "1001",
    "flag is not true": "0110",
    '"my col" = 3': "0010",
    "(a = 1 and flag) or lang = 'de'": "1100",
    "true": "1111",
}
REFUSED = {
    "": "not a condition",
    "a =": "not a condition",
    "select 1": "not a condition",
    "a = 1; drop table keys": "not a condition",
    "nothing = 1": "no column 'nothing'; there are a, small",
    "Lang = 'en'": "no column 'Lang'",
    "t.a = 1": "'t.a' is not supported",
    "a = null": "'NULL' is not supported",
    "a in (null)": "'NULL' is not supported",
    "a in (select 1)": "not supported",
    "lower(lang) = 'x'": "not supported",
    "a + 1 > 2": "not supported",
    "lang like 'x!%' escape '!'": "not supported",
    "a is distinct from 1": "not supported",
    "1 = 1": "not supported",
    "a": "not a condition by itself",
    "a = 'x'": "'x' cannot be compared with a column of type int64",
    "lang = 1": "1 cannot be compared with a column of type string",
    "lang = a": "equal",
    "a like 'x'": "LIKE is of strings",
    "day = 'soon'": "'soon' is not a value of type date32",
    "day = date 'soon'": "is no date",
    "flag = 1": "cannot be compared",
    "(" * 300 + "a = 1" + ")" * 300: "within each other",
    "a = 1 or " * 9000 + "a = 1": "characters",
}


@pytest.mark.parametrize("where", HOLDS)
def test_strings_in_the_manner_of_sql(where):
    assert "".join("01"[int(one)] for one in matches(where, TABLE)) == HOLDS[where]


@pytest.mark.parametrize("where", REFUSED, ids=lambda text: text[:30])
def test_anything_else_is_one_line(where):
    with pytest.raises(amips.AmipsError, match="where: ") as problem:
        matches(where, TABLE)
    assert REFUSED[where] in str(problem.value)
    assert "\n" not in str(problem.value)


def test_long_chains_are_no_deep_trees():
    assert matches(" or ".join(f"a = {i}" for i in range(2000)), TABLE).tolist() == [True, True, False, True]


def test_expressions_and_lists():
    assert matches(pc.field("a") > 1, TABLE).tolist() == [False, True, False, True]
    assert matches([("a", ">", 1)], TABLE).tolist() == [False, True, False, True]
    assert matches([[("a", "==", 1)], [("lang", "in", ["de"])]], TABLE).tolist() == [True, True, False, False]


@pytest.mark.parametrize("where", [[("zz", "==", 1)], [("a", "~", 1)], [], 3, [1, 2], {"a": 1}])
def test_other_values_are_refused(where):
    with pytest.raises(amips.AmipsError, match="where"):
        matches(where, TABLE)


def test_expressions_of_other_things_are_refused():
    for where in (pc.field("zz") == 1, pc.field("a") + 1, pc.field("lang") < 3):
        with pytest.raises(amips.AmipsError, match="where"):
            matches(where, TABLE)


def test_chunks_stay_in_order():
    table = pa.concat_tables([pa.table({"a": np.arange(i, i + 1000)}) for i in range(0, 50000, 1000)])
    mask = matches("a between 12345 and 23456", table)
    assert (np.flatnonzero(mask) == np.arange(12345, 23457)).all()
