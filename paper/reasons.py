"""Why claims did not hold here, each with the experiment that shows it; claims without one are named, too."""

from dataclasses import dataclass

from amips.task import BY_ROWS, BY_SOURCE


@dataclass(frozen=True)
class Reason:
    """Why some claims did not hold under a split.

    Args:
        claims: their texts.
        split: the split under which they did not hold.
        why: a sentence.
        shown_by: the experiment that shows it, a page of results; "" where none does.
    """

    claims: tuple[str, ...]
    split: str
    why: str
    shown_by: str


MEMORY = (
    "The networks remember queries: one and the same network leads on rows whose relatives it was trained on "
    "and is behind x, or the centroids, on queries that it never saw."
)
MINUTES = (
    "Networks of all sizes had the same few minutes, so that larger and deeper ones saw fewer samples; with "
    "three times as many the errors still fall."
)
SLOW = (
    "SupportNet remembers little: having seen 300 queries 2,000 times each, with copies, it is level with "
    "the centroids on rows of these and of new queries alike, where KeyNet leads by rows after an eighth."
)
SUPPORT = (
    "SupportNet finds at least 10 points more than the centroids at k = 1",
    "SupportNet comes near 100 % at k = 5",
)
UNKNOWN = "No experiment here says why."

REASONS = (
    Reason(
        (
            "mapped queries find more than x at small and middle budgets",
            "at large budgets x overtakes the predicted key",
            "mapped queries lead in the middle of the budgets",
            "mapped queries lead in the middle of the budgets even at sigma = 0.03",
            "mapped queries lead in the middle of the budgets on FAISS IVF",
            "mapped queries lead in the middle of the budgets on LeanVec",
            "mapped queries lead in the middle of the budgets on ScaNN",
            "mapped queries lead in the middle of the budgets on SOAR",
            "the same picture on all backends and axes",
            "mapped queries lead in the middle of the budgets with every encoder",
            "mapped queries stay ahead in the middle of the budgets as n grows",
        ),
        BY_SOURCE,
        MEMORY,
        "leak",
    ),
    Reason(
        (
            "KeyNet finds at least 10 points more than the centroids at k = 1",
            "KeyNet comes near 100 % at k = 5",
        ),
        BY_SOURCE,
        MEMORY,
        "routing-replica",
    ),
    Reason(SUPPORT, BY_ROWS, SLOW, "routing-replica"),
    Reason(SUPPORT, BY_SOURCE, SLOW, "routing-replica"),
    Reason(
        (
            "larger models reach lower errors",
            "larger models favour greater depth",
            "a larger network improves both metrics",
            "shallower networks mostly do better",
            "SupportNet has the higher erel and the higher MRR at small sizes",
            "SupportNet has the lower erel and the lower MRR at large sizes",
            "from 3 to 7 units MRR gains about 0.002: it is saturated",
            "depth and re-injections have little impact",
            "comparable errors with every encoder",
        ),
        BY_SOURCE,
        MINUTES,
        "horizon",
    ),
    Reason(
        (
            "both losses have a noticeably lower score error at hardly any cost in gradient error",
            "SupportNet needs fewer FLOPs than the centroids for the same accuracy",
            "KeyNet needs fewer FLOPs than the centroids for the same accuracy",
            "with 128 cells SupportNet finds 16 points more than the centroids at k = 1 (72 % against 56 %)",
            "with 128 cells SupportNet reaches with 4 cells what the centroids reach with 16",
        ),
        BY_SOURCE,
        UNKNOWN,
        "",
    ),
)


def reason_of(text: str, split: str) -> Reason | None:
    """Why a claim did not hold under a split; None where nobody has said."""
    return next((one for one in REASONS if text in one.claims and one.split == split), None)
