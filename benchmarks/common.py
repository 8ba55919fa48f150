"""What every benchmark here shares: ratios of rates, writing results."""

import json
import statistics
from pathlib import Path

from amips.bench.machine import describe
from amips.tables import markdown_table

RESULTS = Path(__file__).parent / "results"


def ratio(times: dict[str, list[float]], flops: dict[str, float], name: str, base: str) -> float:
    """Median over rounds of the FLOP rate of `name` as a share of that of `base` in the same round."""
    shares = [(flops[name] / a) / (flops[base] / b) for a, b in zip(times[name], times[base], strict=True)]
    return statistics.median(shares)


def write(
    name: str,
    title: str,
    command: str,
    head: list[str],
    rows: list[list[str]],
    raw: object,
    more: str = "",
) -> None:
    """Print a Markdown table, and `more` text below it, and store both beside the raw figures."""
    machine = describe()
    about = ", ".join(f"{k} {v}" for k, v in machine.items())
    text = f"# {title}\n\n`{command}`\n\n{markdown_table(head, rows)}\n\n" + (f"{more}\n\n" if more else "")
    text += f"{about}.\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "raw": raw}, indent=1) + "\n")
