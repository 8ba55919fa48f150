"""`repeats`: the log that comes again, and what is said of what was measured."""

import numpy as np
import pytest

from amips.vectors import open_vectors
from helpers import make_world
from paper import repeats, repeats_summary
from paper.claims import claims_of
from paper.repeats_ways import (
    ALONE,
    CELLS,
    DROP_IN,
    FIT,
    FIT_WITHOUT,
    GRAPH,
    IVF,
    LEARNED,
    MEMORY,
    ROUTED,
    SUPPORT,
)
from paper.workspace import Workspace


def nearest(x, rows):
    return (x @ rows.T).max(axis=1)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_share_of_a_log_has_a_near_relative_in_its_past(share):
    queries = open_vectors(np.random.default_rng(0).standard_normal((2200, 64)).astype(np.float32), "queries")
    log, again = repeats.make_log(queries, share, 2200, 200, seed=0)
    assert again.mean() == pytest.approx(share, abs=0.03)
    np.testing.assert_allclose(np.linalg.norm(log, axis=1), 1, atol=1e-5)
    before = nearest(log[-400:], log[:-400])
    if share:
        assert (before[again[-400:]] > 0.9).mean() > 0.95  # noise of 0.02 in 64 dimensions
    assert before[~again[-400:]].max(initial=0) < 0.8
    assert len(np.unique(log, axis=0)) == len(log)


def test_what_is_new_was_not_learned_from():
    """The log that cells and graph are made of holds none of what is new in the last rows of the others."""
    queries = open_vectors(np.random.default_rng(0).standard_normal((2200, 64)).astype(np.float32), "queries")
    learned = repeats.make_log(queries, LEARNED, 2200, 200, seed=0)[0][:-400]
    for share in repeats.SHARES:
        log, again = repeats.make_log(queries, share, 2200, 200, seed=0)
        assert nearest(log[-400:][~again[-400:]], learned).max(initial=0) < 0.8


def test_popular_queries_come_by_a_zipf_law():
    queries = open_vectors(np.eye(300, dtype=np.float32), "queries")
    log, _ = repeats.make_log(queries, 1.0, 20_000, 50, seed=0)
    counts = np.sort(np.bincount(log.argmax(axis=1), minlength=300))[::-1]
    assert (counts[50:] == 0).all()
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.15)


def test_an_experiment_from_end_to_end(tmp_path):
    keys, queries = make_world(1200, 1500, 16, seed=7)
    for name, rows in (("keys", keys), ("queries", queries)):
        (tmp_path / "data").mkdir(exist_ok=True)
        np.save(tmp_path / "data" / f"{name}.npy", rows)
    summary = repeats.run(Workspace(tmp_path / "data", "smoke", tmp_path / "out"))
    shares = summary.values["shares"]
    assert list(shares) == ["0", "0.25", "0.5", "0.75", "1"]
    for share, one in shares.items():
        ways = {IVF, DROP_IN, ROUTED, SUPPORT, CELLS, GRAPH, MEMORY, ALONE}
        assert set(one["costs"]) == ways
        assert set(one["times"]) == ways - {DROP_IN}
        assert one["again"] == pytest.approx(float(share), abs=0.1)
    assert shares["1"]["costs"][MEMORY]["0.95"] < shares["1"]["costs"][GRAPH]["0.95"]
    assert [chart.name for chart in summary.charts] == ["repeats"]
    assert len(claims_of(summary)) == 3
    assert summary.values["support"]["cells"] == 128
    # What a fit gains is measured with an index of its own for each share, in FLOPs and in time.
    for share in ("0", "1"):
        fit = shares[share]["fit"]
        assert set(fit["times"]) == {FIT_WITHOUT, FIT}
        assert fit["gain"][1] <= fit["gain"][0] <= fit["gain"][2]
        assert fit[FIT]["val"] <= fit[FIT_WITHOUT]["val"]  # it never loses where it was chosen
        if not fit["recognised"]:  # no memory: the same index twice, and the same times
            assert fit["gain"] == [1.0, 1.0, 1.0]
            assert fit["times"][FIT] == fit["times"][FIT_WITHOUT]
    assert summary.verdict[0].startswith('`amips.fit(order="time")` for recall@10 0.95')
    assert summary.tables[0].title == 'What `amips.fit(order="time")` gains by its memory'


FITS = [
    {"gain": [1.0, 1.0, 1.0], "times": {FIT_WITHOUT: [30e-6, 20e-6], FIT: [31e-6, 20e-6]}},
    {"gain": [2.0, 1.5, 2.5], "times": {FIT_WITHOUT: [30e-6, 20e-6], FIT: [20e-6, 40e-6]}},
]


def made_up(costs):
    """Figures of two shares: by way, the cost at every recall, None where that is out of reach."""
    return {
        f"{share:g}": {
            "fit": FITS[place],
            "costs": {way: dict.fromkeys(("0.8", "0.9", "0.95"), row[place]) for way, row in costs.items()},
        }
        for place, share in enumerate((0.0, 1.0))
    }


def test_what_is_said_follows_from_the_figures():
    values = made_up(
        {
            GRAPH: (0.02, 0.02),
            MEMORY: (0.02, 0.01),
            IVF: (0.1, 0.1),
            DROP_IN: (None, 0.05),
            ROUTED: (0.2, 0.3),
            SUPPORT: (None, None),
        }
    )
    assert repeats_summary.gains(values, MEMORY, GRAPH) == {0.0: 1.0, 1.0: 2.0}
    assert repeats_summary.gains(values, DROP_IN, IVF) == {1.0: 2.0}
    said = repeats_summary.findings(values)
    assert "1.00 (1.00 to 1.00) at 0, 2.00 (1.50 to 2.50) at 1" in said[0]
    assert said[1] == "In FLOPs it pays at a share of 1."
    # What pays in FLOPs need not in time.
    assert said[2].endswith("31 us instead of 30 at 0, 20 us instead of 30 at 1; it pays at a share of 1.")
    assert said[3].endswith("it pays at no share, and is slower at 1.")
    assert "1.00 at 0, 2.00 at 1" in said[4]
    assert said[5] == "In FLOPs that memory pays from a share of 1 on."
    mapped, routed, supported = said[6:]
    assert mapped.held
    assert "at best 2.00 times fewer FLOPs than FAISS IVF searched with x" in mapped.evidence
    assert "from a share of 1 on, and the graph with a memory needs 5.0 times fewer" in mapped.evidence
    assert not routed.held
    assert "it pays at no share" in routed.evidence
    assert supported.evidence == f"{SUPPORT}: it reaches none of these recalls"
    assert supported.where == "Section 4.3, Figure 4"
