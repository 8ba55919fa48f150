"""docs/results.md and docs/results/, from the committed results; nothing in them is typed by hand.

    python -m paper collect OUT    # copy summaries and figures of OUT to results/, then write the pages
    python -m paper page           # write the pages

OUT holds a directory for each experiment, as `python -m paper NAME --out OUT` makes it, and `bench`, as
`amips bench ... --out OUT/bench` does.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from amips.bench import Summary, draw_figures, load_summary
from amips.tables import markdown_table
from amips.task import BY_ROWS, BY_SOURCE, BY_TIME
from paper import EXPERIMENTS
from paper.claims import Claim, claims_of
from paper.mappers import PORTIONS as MAPPERS
from paper.ratios import paper_regimes, ratios_table, regime_of
from paper.reasons import UNKNOWN, UNTESTED, reason_of
from paper.routing import PORTIONS as ROUTERS
from paper.splits import NOT_RUN, OUTCOMES, outcome
from paper.stored import older_than
from paper.workspace import SCALES, SPLITS_BY

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
OVERVIEW, PAGES = Path("docs/results.md"), Path("docs/results")
BENCH = "bench"  # no experiment of the paper: the plain routers, compared on the same data
POINTS = "The best points of each"  # hundreds of rows: they are in the report and in summary.json
REPLICA, HEADLINE = "replica", "replica100k"
# At these scales an experiment is published beside what it gave at another; the larger first.
REPLICAS = tuple(name for name, scale in reversed(SCALES.items()) if scale.sources is not None)
HEADLINES = ("leak", "routing", "routing128")  # their claims come first
INTRODUCTION = """# Results

What the paper says, and what was measured here: a row for each claim, and what it came to under each way of
holding queries out. Split by rows, the paper's way, noisy copies of nearly every measured query were trained
on: this is what queries get that come again. Split by source, a query that is measured has no relative in
training: this is what new queries get. "Not run" says that an experiment was not run under a split,
"whatever the split" that nothing in it is learned from queries. A third split, by time, has
[a table of its own](#traffic-split-by-time).
KeyNet is no candidate of `fit`, in the order of time either: where traffic comes again, a memory of the log
answers for less ([why](networks.md#when-the-papers-networks-pay)).
What `amips.fit` makes, which gains more, is measured in
[what amips gains](../benchmarks/results/win.md) and explained in [How it wins](how-it-wins.md).

`leak` and pages that end in "replica" keep the paper's ratios of parameters and of noisy copies to source
queries: few source queries with many noisy copies, seen again and again by one network, which is measured
under both splits. They are small, {keys:,} keys, and do not keep the paper's epochs: a row is seen
{least:,.0f} to {most:,.0f} times in most of them, and {paper_least:,.0f} to {paper_most:,.0f} times in
the paper on NQ, if it learned from the queries that people wrote ([the
ratios](#the-papers-ratios-and-ours)). Most networks had {samples:,} samples, SupportNets that route
{routing:,}, and fewer sizes, depths and strengths of noise than in the paper were tried, and `backends`
was run by rows alone: each page says which. SupportNet finds 10 points more than the centroids there with
100 times the published code's weight of its score loss, and does not with that weight: each is a row of
its own. Pages that end in "replica100k" are of the headline of mapped queries alone, at {large:,} keys:
{sources:,} source queries with {copies} noisy copies each, and one KeyNet XS that saw a row {seen:,.0f}
times.
Other pages are of networks that had minutes on two cores and as many different queries as there
are; the paper trains on 1 to 10 billion samples.

Intervals are of 95 %, over the test queries; a claim that was decided without one says "no interval". A claim
that an interval leaves open is "not decided", which is neither held nor not.

The data of `encoders` are 10,000 docstrings of Python packages and sentences taken out of them; of all
others 100,000 passages of English Wikipedia and 199,490 questions, claims and clues that people wrote, none
for these passages (all-MiniLM-L6-v2, d = 384). `python -m paper page` writes this page and those behind it
from the files in `results/`; [how to run the experiments](../paper/README.md). The claims of `routing`,
`routing128` and `ivf`, and what some others came to by their intervals, were stated after the runs, from the
stored figures: their pages say so."""
RATIOS = (
    "The paper does not say which queries it trains on. Under one reading, the queries that people wrote, a "
    "network has hundreds of parameters for each and sees it a hundred thousand times: it can know them by "
    "heart. Under the other, queries generated for every passage, it has about one. `python -m paper ratios` "
    "prints this table; the scale `replica` is made from it."
)
TIME = (
    "`repeats` holds queries out in a third way, by time: the last part of a log, with what comes again "
    "counted as often as it comes. Its logs go from one in which nothing comes again, where a measured query "
    "is as new as under the split by source, to one in which everything does, where it has relatives as "
    "under the split by rows. What it says of the paper's networks:"
)


def introduction() -> str:
    """What the page is about, with the numbers of the replica and of the paper."""
    scale = SCALES[REPLICA]
    assert scale.samples is not None
    ours, routing = regime_of(scale), ROUTERS[REPLICA]["SupportNet"]
    large = SCALES[HEADLINE]
    nq = next(one for one in paper_regimes() if one.name == "NQ")  # as people wrote them, the first reading
    return INTRODUCTION.format(
        keys=scale.keys,
        least=ours.epochs[0],
        most=routing * ours.epochs[0],
        paper_least=nq.epochs[0],
        paper_most=nq.epochs[1],
        samples=round(MAPPERS[REPLICA] * scale.samples),
        routing=round(routing * scale.samples),
        large=large.keys,
        sources=large.sources,
        copies=large.copies,
        seen=regime_of(large).epochs[0],
    )


def published() -> list[str]:
    """The results that there are, by their names; an experiment without any has no page yet."""
    names = [name for one in EXPERIMENTS for name in (*(f"{one}-{scale}" for scale in REPLICAS), one)]
    return [name for name in names if (RESULTS / name / "summary.json").exists()]


def rounded(value: object) -> object:
    """Floats to six significant digits: a committed file is no larger than it tells."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def collect(out: Path) -> list[str]:
    """Copy what is published of each experiment, its summary and the charts that its page shows, to results/.

    Returns a line for each: what was copied, and what is not there.
    """
    lines = []
    for name in (BENCH, *EXPERIMENTS):
        if not (out / name / "summary.json").exists():
            lines.append(f"{out / name}: nothing there")
            continue
        values = json.loads((out / name / "summary.json").read_text())
        target = RESULTS / published_as(name, values["command"])
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        (target / "summary.json").write_text(json.dumps(rounded(values)) + "\n")
        draw_figures(replace(load_summary(target), curves=[]), target, formats=("png",))
        lines.append(f"{out / name}: copied")
    return lines


def published_as(name: str, command: str) -> str:
    """What the results of an experiment are called: at a replica they stand beside those of another scale.

    Those of an experiment that measures both splits at once at the replica bear its name alone.
    """
    scale = command.partition("--scale ")[2].split(" ")[0]
    beside = name in EXPERIMENTS and scale in REPLICAS and (EXPERIMENTS[name].split or scale != REPLICA)
    return f"{name}-{scale}" if beside else name


def experiment_of(name: str) -> str:
    """The experiment that results of this name are of."""
    experiment, _, scale = name.rpartition("-")
    return experiment if scale in REPLICAS else name


@dataclass(frozen=True)
class Tested:
    """A claim and the results that tested it."""

    claim: Claim
    results: str

    @property
    def independent(self) -> bool:
        """Whether the claim is the same under every split."""
        return EXPERIMENTS[experiment_of(self.results)].independent

    def under(self, split: str) -> bool:
        """Whether it was tested under a split."""
        return self.independent or self.claim.split == split


def tested_claims(summaries: Mapping[str, Summary]) -> dict[tuple[str, str], list[Tested]]:
    """Every claim by text and place, the headlines first, with all that tested it."""
    ranks = {name: rank for rank, name in enumerate(HEADLINES)}
    ordered = sorted(summaries, key=lambda name: ranks.get(experiment_of(name), len(ranks)))
    claims: dict[tuple[str, str], list[Tested]] = {}
    for name in ordered:
        for claim in claims_of(summaries[name]):
            if claim.split not in SPLITS_BY:  # by time: no split of the paper, and told on its own page
                continue
            claims.setdefault((claim.text, claim.where), []).append(Tested(claim, name))
    return claims


def rows_of(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """A row for each claim: what and where the paper says it, what each split gave, the pages."""
    rows = []
    for (text, where), tests in tested_claims(summaries).items():
        cells: list[str] = []
        for split in SPLITS_BY:
            own = [one for one in tests if one.under(split)]
            said = [outcome([one.claim for one in own])]
            if not own and (why := UNTESTED.get(experiment_of(tests[0].results))):
                said.append(why)
            if own and all(one.independent for one in own):
                said[0] += ", whatever the split"
            if not (cells and all(one.independent for one in own)):  # said in the column before
                said += [f"{one.claim.evidence_text} ({one.results})" for one in own]
            cells.append(". ".join(said))
        pages = ", ".join(f"[{name}](results/{name}.md)" for name in dict.fromkeys(t.results for t in tests))
        rows.append([text, where, *cells, pages])
    return rows


def rows_by_time(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """A row for each claim that was tested on a log split by time."""
    return [
        [
            claim.text,
            claim.where,
            f"{outcome([claim])}. {claim.evidence_text}",
            f"[{name}](results/{name}.md)",
        ]
        for name, summary in summaries.items()
        for claim in claims_of(summary)
        if claim.split == BY_TIME
    ]


def tally(summaries: Mapping[str, Summary]) -> str:
    """How many claims held under each split."""
    claims, said = tested_claims(summaries), []
    words = {BY_ROWS: "the paper's split, by rows", BY_SOURCE: "the split by source"}
    for split, name in words.items():
        ends = [outcome([t.claim for t in tests if t.under(split)]) for tests in claims.values()]
        known = {word: ends.count(word) for word in (*OUTCOMES.values(), NOT_RUN)}
        mixed = [end for end in ends if end not in known]
        # Of the outcomes of a claim that was tested several times, those that held come first.
        known["held in part"] = sum(end.startswith(OUTCOMES[True]) for end in mixed)
        known["not held in part and otherwise not decided"] = len(mixed) - known["held in part"]
        counts = ", ".join(f"{count} {word}" for word, count in known.items() if count)
        said.append(f"Of {len(ends)} claims under {name}: {counts}.")
    free = [[t.claim for t in tests] for tests in claims.values() if all(t.independent for t in tests)]
    count = sum(outcome(own) == OUTCOMES[True] for own in free)
    said.append(
        f"In both counts are {count} claims that held whatever the split: nothing is learned in them."
    )
    return "\n".join(said)


def reasons_of(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """A row for each claim that did not hold under a split: why, and what shows it."""
    rows = []
    for (text, _), tests in tested_claims(summaries).items():
        for split in SPLITS_BY:
            own = [one.claim for one in tests if one.under(split)]
            if not own or all(claim.held is not False for claim in own):
                continue
            reason = reason_of(text, split)
            why, shown_by = (reason.why, reason.shown_by) if reason else (UNKNOWN, "")
            rows.append([text, split, why, f"[{shown_by}](results/{shown_by}.md)" if shown_by else ""])
    return rows


def overview(summaries: Mapping[str, Summary]) -> str:
    """docs/results.md."""
    head = [
        "the paper says",
        "where",
        "the paper's split, by rows",
        "held-out split, by source",
        "experiment",
    ]
    names = [*summaries, BENCH]
    pages = [[f"[{name}](results/{name}.md)", question_of(name)] for name in names]
    parts = [
        introduction(),
        tally(summaries),
        markdown_table(head, rows_of(summaries)),
        "## Why some did not hold",
        markdown_table(["the paper says", "split by", "why", "shown by"], reasons_of(summaries)),
        "## Traffic, split by time",
        TIME,
        markdown_table(["the paper says", "where", "split by time", "experiment"], rows_by_time(summaries)),
        "## The paper's ratios, and ours",
        RATIOS,
        ratios_table().markdown(),
        "## The experiments",
        markdown_table(["page", "question"], pages),
    ]
    return "\n\n".join(parts) + "\n"


def question_of(name: str) -> str:
    """What results of this name answer."""
    if name == BENCH:
        return "The plain routers of `amips bench`, with times, on the same data."
    scale = SCALES.get(name.removeprefix(f"{experiment_of(name)}-"))
    regime = "" if scale is None else f", in the paper's regime, {scale.keys:,} keys"
    question = EXPERIMENTS[experiment_of(name)].question
    return f"{question[:-1]}{regime}{question[-1]}"


def page(name: str, summary: Summary) -> str:
    """docs/results/NAME.md: the verdict, tables, figures, and how it was done."""
    parts = [f"# {summary.title}"]
    parts += [question_of(name)] if name != BENCH else []
    parts.append("\n".join(f"- {sentence}" for sentence in summary.verdict))
    for table in summary.tables:
        if table.title != POINTS:
            parts.append(f"## {table.title}\n\n{table.markdown()}")
    for chart in summary.charts:
        text = f"![{chart.title}](../../results/{name}/{chart.name}.png)"
        parts.append("\n\n".join([text, *([chart.caption] if chart.caption else [])]))
    parts.append("## How it was measured")
    parts.append("; ".join(f"{what}: {value}" for what, value in summary.facts) + ".")
    parts += [*summary.method, *older_than(experiment_of(name), summary), f"`{summary.command}`"]
    parts.append(", ".join(f"{what} {value}" for what, value in summary.machine.items()) + ".")
    parts.append("[All results](../results.md)")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """The text of every page by its place in the repository, made of the summaries in results/."""
    summaries = {name: load_summary(RESULTS / name) for name in published()}
    texts = {PAGES / f"{name}.md": page(name, summary) for name, summary in summaries.items()}
    texts[PAGES / f"{BENCH}.md"] = page(BENCH, load_summary(RESULTS / BENCH))
    return {OVERVIEW: overview(summaries), **texts}


def write_pages() -> list[str]:
    """Write every page; returns their places."""
    for place, text in pages().items():
        (ROOT / place).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / place).write_text(text)
    return [str(place) for place in pages()]
