"""docs/results.md, from committed results; nothing in it is typed by hand.

    python benchmarks/results_page.py collect OUT    # copy summaries and figures of OUT to results/
    python benchmarks/results_page.py page           # write docs/results.md from results/

OUT holds one directory for each study, as `amips study ... --out OUT` makes it, and `bench`, as
`amips bench ... --out OUT/bench` does.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from amips.bench import Summary, load_summary
from amips.bench.figures import figures
from amips.bench.summary import SUMMARY

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "results.md"
BACKENDS = ROOT / "benchmarks" / "results" / "engines.md"
SUPPORT = "What each engine supports is in [With the engine you run](engines.md)."
ORDER = (
    *("bench", "routing", "routing128", "ivf", "ood", "timing", "shift", "leak"),
    # Of the paper's appendix:
    *("backends", "dynamics", "tradeoff", "losses", "horizon", "encoders", "scaling"),
)
CLAIM = re.compile(r"not reproduced \(the paper: (.*?)\)")
REASONS = {  # the study that shows each
    "leak": "**The split.** The authors' published code adds noise to the queries first and splits the rows "
    "after, so that relatives of nearly every test row are trained on. `leak` trains a network on such rows "
    "and measures it on these and on rows whose relatives it never saw, which shows how much that explains:",
    "horizon": "**The budget.** A network had minutes here, and a billion samples or more in the paper. "
    "`horizon` shows how fast that changes:",
}
POINTS = "The best points of each"  # hundreds of rows: they are in the report and in summary.json
INTRODUCTION = """# Results

Made by `python benchmarks/results_page.py page` from the files in `results/`; a test checks that both agree.
Held-out queries only, minutes of training. The paper trains on 1 to 10 billion samples: where a figure here
falls short of the paper's, the budget is the first thing to think of, and the number of samples is given.
Sentences that test a claim of the paper end with "as in the paper" or "not reproduced".
Every section ends with the command that makes it; `DATA` is a directory with keys and queries. Of
`encoders` these are 10,000 docstrings of Python packages and sentences taken out of them; of all others
100,000 passages of English Wikipedia and 199,490 questions, claims and clues that people wrote, none for
these passages (all-MiniLM-L6-v2, d = 384).

The first section compares the plain routers. What `amips.fit` makes, which gains more, is measured in
[what amips gains](../benchmarks/results/win.md) and explained in [How it wins](how-it-wins.md).
"""


def rounded(value: object) -> object:
    """Floats to six significant digits: a committed file is no larger than it tells."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def collect(out: Path) -> None:
    """Copy what is published of each study: its summary and its figures."""
    for name in ORDER:
        if not (out / name / SUMMARY).exists():
            print(f"{out / name}: nothing there", file=sys.stderr)
            continue
        target = RESULTS / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        summary = json.loads((out / name / SUMMARY).read_text())
        (target / SUMMARY).write_text(json.dumps(rounded(summary)) + "\n")
        figures(load_summary(target), target, formats=("png",))


def section(name: str, summary: Summary) -> str:
    """One study: what was found, tables, figures, how."""
    parts = [f"## {summary.title}", "\n".join(f"- {sentence}" for sentence in summary.verdict)]
    for table in summary.tables:
        if table.title != POINTS:
            parts.append(f"**{table.title}**\n\n{table.markdown()}")
    for chart in [*summary.charts, *summary.curves]:
        text = f"![{chart.title}](../results/{name}/{chart.name}.png)"
        parts.append("\n\n".join([text, *([chart.caption] if chart.caption else [])]))
    parts.append("; ".join(f"{what}: {value}" for what, value in summary.facts) + ".")
    parts += [*summary.method, f"`{summary.command}`"]
    parts.append(", ".join(f"{what} {value}" for what, value in summary.machine.items()) + ".")
    return "\n\n".join(parts)


def not_reproduced(summaries: dict[str, Summary]) -> str:
    """The claims of the paper that did not hold here, by study, and the reasons that were found."""
    parts = ["## What did not reproduce, and why"]
    claims: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        for sentence in summary.verdict:
            if found := CLAIM.search(sentence):
                claims.setdefault(found[1], []).append(f"`{name}`")
    lines = [f"- {claim}: {', '.join(dict.fromkeys(names))}" for claim, names in claims.items()]
    parts.append("\n".join(lines))
    for name, reason in REASONS.items():
        said = [sentence for sentence in summaries[name].verdict if not CLAIM.search(sentence)]
        parts.append(f"{reason}\n\n" + "\n".join(f"> - {sentence}" for sentence in said))
    return "\n\n".join(parts)


def page() -> str:
    """The whole page."""
    summaries = {name: load_summary(RESULTS / name) for name in ORDER}
    sections = [section(name, summary) for name, summary in summaries.items()]
    engines = BACKENDS.read_text().replace("# Engines", "## Engines", 1).rstrip()
    parts = [INTRODUCTION.rstrip(), not_reproduced(summaries), *sections, engines, SUPPORT]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Collect, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["collect", "page"])
    parser.add_argument("out", type=Path, nargs="?")
    o = parser.parse_args()
    if o.what == "collect":
        if o.out is None:
            parser.error("collect needs OUT")
        collect(o.out)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
