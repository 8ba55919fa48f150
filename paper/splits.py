"""One experiment under both splits: what was found by each, side by side, as one summary."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from amips.bench import Summary, Table
from amips.task import BY_ROWS, BY_SOURCE
from paper.claims import CLAIMS, Claim, claims_of

WORDS = {
    BY_ROWS: "Split by rows, the paper's way (noisy copies of nearly every test row were trained on)",
    BY_SOURCE: "Split by source (no relative of a test query was trained on)",
}
NOT_RUN = "not run"
OUTCOMES = {True: "held", False: "not held", None: "not decided"}


def stamped(summary: Summary, split: str) -> Summary:
    """The summary with its claims marked as tested under this split."""
    claims = [asdict(replace(claim, split=split)) for claim in claims_of(summary)]
    return replace(summary, values={**summary.values, CLAIMS: claims})


def side_by_side(marked: Mapping[str, Summary]) -> Summary:
    """One summary of an experiment that was run once for each split: what each gave, by split, `stamped`."""
    first = next(iter(marked.values()))
    claims = [claim for summary in marked.values() for claim in claims_of(summary)]
    return replace(
        first,
        verdict=[line for split, one in marked.items() for line in (f"{WORDS[split]}:", *one.verdict)],
        tables=[
            claims_table(claims, tuple(marked)),
            *(
                replace(table, title=f"{table.title}, split by {split}")
                for split, one in marked.items()
                for table in one.tables
            ),
        ],
        charts=[
            replace(chart, name=f"{chart.name}-{split}", title=f"{chart.title}, split by {split}")
            for split, one in marked.items()
            for chart in one.charts
        ],
        facts=_together([[*one.facts] for one in marked.values()], tuple(marked)),
        method=list(dict.fromkeys(line for one in marked.values() for line in one.method)),
        values={
            "splits": {split: _without_claims(one) for split, one in marked.items()},
            CLAIMS: [asdict(claim) for claim in claims],
        },
    )


def _without_claims(summary: Summary) -> dict[str, object]:
    return {name: value for name, value in summary.values.items() if name != CLAIMS}


def _together(facts: Sequence[Sequence[tuple[str, str]]], splits: Sequence[str]) -> list[tuple[str, str]]:
    """Facts that all splits share once, others with the split they are of."""
    merged: list[tuple[str, str]] = []
    for split, own in zip(splits, facts, strict=True):
        for what, value in own:
            shared = all((what, value) in other for other in facts)
            merged.append((what if shared else f"{what}, split by {split}", value))
    return list(dict.fromkeys(merged))


def claims_table(claims: Sequence[Claim], splits: Sequence[str]) -> Table:
    """A row for each claim, a column for each split: our figure, and whether the claim held."""
    rows = []
    for (text, where), by_split in grouped(claims).items():
        cells = [cell(by_split.get(split, [])) for split in splits]
        rows.append([text, where, *cells])
    head = ["the paper says", "where", *(f"split by {split}" for split in splits)]
    return Table("The paper's claims under both splits", head, rows)


def grouped(claims: Sequence[Claim]) -> dict[tuple[str, str], dict[str, list[Claim]]]:
    """Claims by text and place, then by split: a claim may be tested more than once under one."""
    groups: dict[tuple[str, str], dict[str, list[Claim]]] = {}
    for claim in claims:
        groups.setdefault((claim.text, claim.where), {}).setdefault(claim.split, []).append(claim)
    return groups


def outcome(claims: Sequence[Claim]) -> str:
    """Whether a claim held, of all the times that it was tested under one split."""
    if not claims:
        return NOT_RUN
    ends = [claim.held for claim in claims]
    counts = {words: ends.count(end) for end, words in OUTCOMES.items() if end in ends}
    if len(counts) == 1:
        return next(iter(counts))
    return f"{', '.join(f'{words} in {count}' for words, count in counts.items())} of {len(claims)}"


def cell(claims: Sequence[Claim]) -> str:
    """The outcome under one split with our figures, for a table."""
    figures = "; ".join(claim.figure for claim in claims if claim.figure)
    return f"{outcome(claims)}: {figures}" if figures else outcome(claims)
