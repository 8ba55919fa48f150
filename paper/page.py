"""docs/results.md and docs/results/, from the committed results; nothing in them is typed by hand.

    python -m paper collect OUT    # copy summaries and figures of OUT to results/, then write the pages
    python -m paper page           # write the pages

OUT holds a directory for each experiment, as `python -m paper NAME --out OUT` makes it, and `bench`, as
`amips bench ... --out OUT/bench` does.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from amips.bench import Summary, draw_figures, load_summary
from amips.tables import markdown_table
from paper import EXPERIMENTS
from paper.claims import Claim, claims_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
OVERVIEW, PAGES = Path("docs/results.md"), Path("docs/results")
BENCH = "bench"  # no experiment of the paper: the plain routers, compared on the same data
POINTS = "The best points of each"  # hundreds of rows: they are in the report and in summary.json
INTRODUCTION = """# Results

What the paper says, and what was measured here: a row for each claim and each way of holding queries out. By
source, a query that is measured has no relative in training: this is what new queries get. By rows, the
paper's way, noisy copies of nearly every measured query were trained on: this is what queries get that come
again. Minutes of training on two cores, half an hour for `leak`; the paper trains on 1 to 10 billion samples.
What `amips.fit` makes, which gains more, is measured in
[what amips gains](../benchmarks/results/win.md) and explained in [How it wins](how-it-wins.md).

The data of `encoders` are 10,000 docstrings of Python packages and sentences taken out of them; of all
others 100,000 passages of English Wikipedia and 199,490 questions, claims and clues that people wrote, none
for these passages (all-MiniLM-L6-v2, d = 384). `python -m paper page` writes this page and those behind it
from the files in `results/`; [how to run the experiments](../paper/README.md). The claims of `routing`,
`routing128` and `ivf` were stated after their runs, from the stored figures: their pages say how."""
SPLIT = (
    "**The split.** The authors' published code adds noise to the queries first and splits the rows after, "
    "so that relatives of nearly every test row are trained on. [leak](results/leak.md) trains a network on "
    "such rows, few queries with many copies, and measures it on these and on queries that it never saw. In "
    "this regime the headline holds, and it is memory of the log: the same network is worse than x on new "
    "queries. Where traffic repeats itself that is worth something; other experiments here split by source:"
)
BUDGET = (
    "**The budget.** A network had minutes here, and a billion samples or more in the paper. "
    "[horizon](results/horizon.md) shows how fast that changes:"
)


def published() -> list[str]:
    """The experiments that have results; one without has no page yet."""
    return [name for name in EXPERIMENTS if (RESULTS / name / "summary.json").exists()]


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
        target = RESULTS / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        values = json.loads((out / name / "summary.json").read_text())
        (target / "summary.json").write_text(json.dumps(rounded(values)) + "\n")
        draw_figures(replace(load_summary(target), curves=[]), target, formats=("png",))
        lines.append(f"{out / name}: copied")
    return lines


def outcome(claims: list[Claim]) -> str:
    """Whether a claim held, of all the times that it was tested."""
    if all(claim.held is None for claim in claims):
        return "not decided"
    held_in = sum(claim.held is True for claim in claims)
    if held_in in (0, len(claims)):
        return "held" if held_in else "not held"
    return f"held in {held_in} of {len(claims)}"


def rows_of(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """A row for each claim and split: what and where the paper says it, whether it held, evidence, page."""
    rows = []
    for name, summary in summaries.items():
        same: dict[tuple[str, str, str], list[Claim]] = {}
        for claim in claims_of(summary):
            same.setdefault((claim.text, claim.where, claim.split), []).append(claim)
        for (text, where, split), claims in same.items():
            evidence = "; ".join(claim.evidence for claim in claims)
            rows.append([text, where, split, outcome(claims), evidence, f"[{name}](results/{name}.md)"])
    return rows


def overview(summaries: Mapping[str, Summary]) -> str:
    """docs/results.md."""
    rows = rows_of(summaries)
    counts = {word: sum(row[3] == word for row in rows) for word in ("held", "not held", "not decided")}
    partly = len(rows) - sum(counts.values())
    tally = (
        f"Of {len(rows)} claims {counts['held']} held, {partly} held in part, {counts['not held']} did not "
        f"hold, and {counts['not decided']} are not decided."
    )
    head = ["the paper says", "where", "split by", "here", "evidence", "experiment"]
    pages = [
        *([f"[{name}](results/{name}.md)", EXPERIMENTS[name].question] for name in summaries),
        [
            f"[{BENCH}](results/{BENCH}.md)",
            "The plain routers of `amips bench`, with times, on the same data.",
        ],
    ]
    leak, horizon = summaries["leak"].verdict, summaries["horizon"]
    claimed = {claim.sentence() for claim in claims_of(horizon)}
    parts = [
        INTRODUCTION,
        tally,
        markdown_table(head, rows),
        "## Why some did not hold",
        SPLIT,
        "\n".join(f"> - {sentence}" for sentence in leak),
        BUDGET,
        "\n".join(f"> - {sentence}" for sentence in horizon.verdict if sentence not in claimed),
        "## The experiments",
        markdown_table(["page", "question"], pages),
    ]
    return "\n\n".join(parts) + "\n"


def page(name: str, summary: Summary) -> str:
    """docs/results/NAME.md: the verdict, tables, figures, and how it was done."""
    parts = [f"# {summary.title}"]
    parts += [EXPERIMENTS[name].question] if name in EXPERIMENTS else []
    parts.append("\n".join(f"- {sentence}" for sentence in summary.verdict))
    for table in summary.tables:
        if table.title != POINTS:
            parts.append(f"## {table.title}\n\n{table.markdown()}")
    for chart in summary.charts:
        text = f"![{chart.title}](../../results/{name}/{chart.name}.png)"
        parts.append("\n\n".join([text, *([chart.caption] if chart.caption else [])]))
    parts.append("## How it was measured")
    parts.append("; ".join(f"{what}: {value}" for what, value in summary.facts) + ".")
    parts += [*summary.method, f"`{summary.command}`"]
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
