"""The summary as one HTML page that works offline: prose, charts to explore, tables, how it was measured.

Texts of a summary are foreign to the page: they are escaped for HTML, for plotly (which reads a little HTML
in labels) and inside the embedded JSON.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from amips.bench.figures import (
    MANY_POINTS,
    Look,
    bar_width,
    columns,
    contents,
    extent,
    looks,
    matrix,
    numbers,
    points,
    short,
    thousands,
)
from amips.bench.summary import SUMMARY, Chart, Panel, Series, Summary, Table, load_summary
from amips.errors import ResultsError
from amips.extras import needs_extra
from amips.files import check_output_file, write_atomic

TEMPLATE = "report.html"
NUMBER = re.compile(
    r"[-+\N{MINUS SIGN}±~≈<>≤≥]?\s*[\d.,]*\d\s*(?:[%x\N{MULTIPLICATION SIGN}]|[kMGTµmn]?[a-zA-Z]{0,3})?"
)
HINT = """<p class="note hint">Click a name to hide or show it, double-click to see it alone<span
class="mouse">; drag over a chart to zoom in, double-click it to zoom out</span>.</p>
"""
NOTHING = {"", "-", "\N{EN DASH}", "\N{EM DASH}"}

# The symbols of plotly as SVG, centred in a box of 28 by 12, for the legend.
SHAPES = {
    "circle": '<circle cx="14" cy="6" r="4"/>',
    "square": '<rect x="10.5" y="2.5" width="7" height="7"/>',
    "diamond": '<path d="M14 1.2 18.8 6 14 10.8 9.2 6Z"/>',
    "triangle-up": '<path d="M14 1.5 18.6 9.5H9.4Z"/>',
    "x": '<path d="m14 4 2.4-2.4 2 2L16 6l2.4 2.4-2 2L14 8l-2.4 2.4-2-2L12 6 9.6 3.6l2-2Z"/>',
    "triangle-down": '<path d="M14 10.5 18.6 2.5H9.4Z"/>',
}


def write_page(results: str | Path, out: str | Path) -> Path:
    """Write the summary in the directory `results` as one self-contained HTML page; returns its path."""
    summary = load_summary(results)
    out = check_output_file(out, ResultsError)
    with needs_extra("amips report", "bench", "plotly"):
        from plotly.offline import get_plotlyjs
    try:
        parts = page(summary)
    except (TypeError, ValueError, AttributeError) as problem:  # values of another type than declared
        raise ResultsError(f"{Path(results) / SUMMARY} is damaged: {problem}") from problem
    parts["plotly"] = get_plotlyjs()
    template = files("amips.bench").joinpath(TEMPLATE).read_text(encoding="utf-8")
    # In one pass: what is put in is never searched for places itself.
    html = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)
    try:
        write_atomic(out, html.encode())
    except OSError as problem:
        raise ResultsError(f"cannot write {out}: {problem.strerror}") from None
    return out


def page(summary: Summary) -> dict[str, str]:
    """What fills the template, but for plotly itself: title, content and the plots as JSON."""
    looks_of = looks(summary)
    index = {name: place for place, name in enumerate(looks_of)}
    plots: list[dict[str, Any]] = []

    def charts(some: list[Chart], prefix: str) -> str:
        drawn = []
        for place, chart in enumerate(some):
            plots.append(_plot(chart, f"{prefix}-{place}", index))
            drawn.append(_chart(chart, plots[-1], looks_of))
        return "\n".join(drawn)

    shown = [
        _section("results", "Results", HINT + charts(summary.charts, "chart") if summary.charts else ""),
        _section("tables", "Tables", "\n".join(map(_table, summary.tables))),
        _section("data", "Data", _terms(summary.facts)),
        _section("training", "Training", charts(summary.curves, "curve")),
        _section("method", "How it was measured", _method(summary)),
    ]
    data = {"looks": [asdict(look) for look in looks_of.values()], "plots": plots}
    return {
        "title": _text(summary.title),
        "verdict": _verdict(summary.verdict),
        "content": "\n".join(part for part in shown if part),
        "plots": _json(data),
    }


def _text(value: object) -> str:
    return escape(str(value))


def _prose(value: object) -> str:
    """Escaped text in which `code` between backticks is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(value))


def _json(value: Any) -> str:
    """JSON that can stand inside a script element: no `<`, so neither `</script>` nor `<!--`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(name: str, heading: str, content: str) -> str:
    if not content:
        return ""
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{content}\n</section>'


def _verdict(sentences: list[str]) -> str:
    lead, rest = sentences[:1], sentences[1:]
    shown = [f'<p class="lead">{_prose(sentence)}</p>' for sentence in lead]
    return "\n".join([*shown, *([f"<p>{' '.join(map(_prose, rest))}</p>"] if rest else [])])


def _terms(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{_text(what)}</dt><dd>{_prose(value)}</dd></div>" for what, value in pairs)
    return f"<dl>{rows}</dl>" if rows else ""


def _method(summary: Summary) -> str:
    shown = [f"<p>{_prose(paragraph)}</p>" for paragraph in summary.method]
    if summary.command:
        shown.append("<h3>To make this again</h3>")
        shown.append(f'<pre tabindex="0"><code>{_text(summary.command)}</code></pre>')
    if summary.machine:
        shown += ["<h3>Machine</h3>", _terms(summary.machine.items())]
    return "\n".join(shown)


def _table(table: Table) -> str:
    def numeric(column: int) -> bool:
        cells = [str(row[column]).strip() for row in table.rows if column < len(row)]
        there = [cell for cell in cells if cell not in NOTHING]
        return bool(there) and all(NUMBER.fullmatch(cell) for cell in there)

    aligned = [' class="number"' if numeric(column) else "" for column in range(len(table.head))]
    head = "".join(
        f'<th scope="col"{kind}>{_prose(cell)}</th>' for cell, kind in zip(table.head, aligned, strict=True)
    )
    rows = []
    for row in table.rows:
        kinds = [*aligned, *[""] * len(row)]
        first, *others = [f"{kind}>{_prose(cell)}" for cell, kind in zip(row, kinds, strict=False)] or [">"]
        cells = "".join(f"<td{cell}</td>" for cell in others)
        rows.append(f'<tr><th scope="row"{first}</th>{cells}</tr>')
    note = f'<p class="note">{_prose(table.note)}</p>' if table.note else ""
    # The box scrolls, not the page; it takes the focus so that the keyboard can scroll it.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(table.title)}">'
        f"<table><caption>{_prose(table.title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _chart(chart: Chart, plot: dict[str, Any], looks_of: dict[str, Look]) -> str:
    name = plot["id"]
    panels = []
    for panel, drawn in zip(chart.panels, plot["panels"], strict=True):
        named = ", ".join(one.name for one in contents(panel))
        label = f"{panel.title or chart.title}: {panel.y_label} against {panel.x_label}; {named}"
        title = f"<h4>{_text(panel.title)}</h4>" if panel.title not in ("", chart.title) else ""
        panels.append(
            f'<div class="panel">{title}<div class="plot" id="{drawn["id"]}" role="img" '
            f'aria-label="{_text(label)}"></div></div>'
        )
    kinds: dict[str, Series | None] = {}
    for panel in chart.panels:
        for one in contents(panel):
            kinds.setdefault(one.name, one if isinstance(one, Series) else None)
    keys = "".join(
        _key(series, one, looks_of[one], list(looks_of).index(one)) for one, series in kinds.items()
    )
    legend = f'<ul class="legend" aria-label="Series; click to hide or show">{keys}</ul>' if keys else ""
    switch = '<label class="switch"><input type="checkbox"> Logarithmic x axis</label>'
    tools = legend + (switch if any(panel["x"]["switch"] for panel in plot["panels"]) else "")
    caption = f"<figcaption>{_prose(chart.caption)}</figcaption>" if chart.caption else ""
    return (
        f'<figure class="chart" id="{name}" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title">{_text(chart.title)}</h3>\n<div class="tools">{tools}</div>\n'
        f'<div class="panels" style="--columns:{plot["columns"]}">\n{"".join(panels)}\n</div>\n'
        f"{caption}</figure>"
    )


def _key(series: Series | None, name: str, look: Look, index: int) -> str:
    """One entry of the legend: a button that shows how the series is drawn."""
    if series is None or series.kind == "bars":
        shape = '<rect x="5" y="1" width="18" height="10" rx="2" opacity=".65"/>'
    else:
        single = series.kind == "points" or len(series.x) == 1
        dots = ' stroke-dasharray="2 3"' if series.group == "reference" else ""
        shape = "" if single else f'<path d="M1 6H27" stroke="currentColor" stroke-width="2"{dots}/>'
        shape += SHAPES[look.symbol] if single or len(series.x) <= MANY_POINTS else ""
    colours = f"--light:{look.light};--dark:{look.dark}"
    return (
        f'<li><button type="button" aria-pressed="true" data-series="{index}">'
        f'<svg style="{colours}" width="28" height="12" fill="currentColor" aria-hidden="true">{shape}</svg>'
        f"<span>{_text(name)}</span></button></li>"
    )


def _plot(chart: Chart, name: str, index: dict[str, int]) -> dict[str, Any]:
    """A chart for the script of the page: per panel its axes, marks and traces of plotly without colours."""
    panels = []
    for place, panel in enumerate(chart.panels):
        flat = any(series.kind == "bars" for series in panel.series) or bool(panel.grids)
        x, y = _axis(panel, "x", panel.x_label, panel.log_x), _axis(panel, "y", panel.y_label, panel.log_y)
        x["switch"] = not flat and bool(panel.series) and extent(panel, "x")[0] > 0
        traces = [_density(panel, one, index) for one in range(len(panel.grids))]
        traces += [_trace(panel, series, index[series.name]) for series in panel.series]
        xs = numbers((x for _, x in panel.marks), panel.title)
        marks = [
            {"text": _text(text), "x": at}
            for (text, _), at in zip(panel.marks, xs, strict=True)
            if at is not None
        ]
        panels.append({"id": f"{name}-{place}", "x": x, "y": y, "marks": marks, "traces": traces})
    return {"id": name, "columns": columns(len(panels)), "panels": panels}


def _axis(panel: Panel, axis: str, label: str, log: bool) -> dict[str, Any]:
    return {
        "title": _text(label),
        "log": log,
        "format": "~s" if thousands(panel, axis) else ",~g",
        "extent": extent(panel, axis),
    }


def _trace(panel: Panel, series: Series, look: int) -> dict[str, Any]:
    x, y = points(series)
    texts = []
    for a, b, text in zip_longest(x, y, series.text[: len(x)]):
        lines = [f"<b>{_text(series.name)}</b>", *([_text(text)] if text else [])]
        # Plotly reads pseudo-HTML in hover texts, so that these are escaped like the page itself.
        pairs = ((panel.x_label, a), (panel.y_label, b))
        texts.append(
            "<br>".join([*lines, *(f"{_text(what)}: {short(v)}" for what, v in pairs if v is not None)])
        )
    trace = {
        "look": look,
        "name": _text(series.name),
        "x": x,
        "y": y,
        "hovertext": texts,
        "hoverinfo": "text",
    }
    if series.kind == "bars":
        return {**trace, "type": "bar", "width": bar_width(x)}
    if series.kind == "points" or len(x) == 1:
        return {**trace, "type": "scatter", "mode": "markers", "single": len(x) == 1}
    mode = "lines" if len(x) > MANY_POINTS else "lines+markers"
    return {**trace, "type": "scatter", "mode": mode, "dotted": series.group == "reference"}


def _density(panel: Panel, place: int, index: dict[str, int]) -> dict[str, Any]:
    grid = panel.grids[place]
    x, y, z = matrix(grid)
    hover = "<b>%{fullData.name}</b><br>%{z:.3~g} at (%{x:.4~g}, %{y:.4~g})<extra></extra>"
    trace = {"type": "heatmap", "look": index[grid.name], "name": _text(grid.name), "x": x, "y": y, "z": z}
    return {**trace, "hovertemplate": hover, "showscale": len(panel.grids) == 1}
