"""The charts of a summary as PNG and SVG files, and the looks that they share with the report.

The same summary gives the same bytes, so that committed figures change only when the results do.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from amips.bench.summary import Chart, Grid, Panel, Series, Summary
from amips.errors import ResultsError
from amips.extras import needs_extra
from amips.files import local, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (on white, on dark). Hues after Okabe and Ito, told apart by colour-blind readers; those too pale for a thin
# line are darkened to a contrast of 3:1 with the page.
PALETTE = {
    "baseline": [("#1f2328", "#f0f3f6"), ("#6b7280", "#a9b2bc"), ("#8b929c", "#7d8792")],
    "contender": [
        ("#0072b2", "#58b0f0"),
        ("#d55e00", "#ff8f50"),
        ("#008a65", "#36cfa1"),
        ("#b9558f", "#ee9dcb"),
        ("#a87400", "#f0bb45"),
        ("#2f8bc4", "#9bd7ff"),
    ],
    "reference": [("#7d5a3c", "#d3a983"), ("#6556c8", "#b7acff"), ("#5c7a1c", "#b7d36f")],
}
# Shapes beside colours, so that nothing is told by colour alone: names of plotly and of matplotlib.
SYMBOLS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X", "triangle-down": "v"}

MANY_POINTS = 40  # from here on markers hide the line
MARK_ROW = 12  # points of height for the label of a mark
MUTED = "#57606a"
MINUS = "\N{MINUS SIGN}"
MATPLOTLIB: dict[Any, Any] = {
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.hashsalt": "amips",  # ids in SVG are random otherwise
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8b929c",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Look:
    """How a series is drawn wherever it appears: colours on white and on dark, a symbol (plotly's name)."""

    light: str
    dark: str
    symbol: str


def looks(summary: Summary) -> dict[str, Look]:
    """A look for the name of each series and grid, in order of appearance within its group."""
    looks: dict[str, Look] = {}
    used = dict.fromkeys(PALETTE, 0)
    for panel in (panel for chart in (*summary.charts, *summary.curves) for panel in chart.panels):
        named = [(grid.name, "contender") for grid in panel.grids]
        for name, group in [*named, *((series.name, series.group) for series in panel.series)]:
            if name in looks:
                continue
            if group not in PALETTE:
                raise ResultsError(f"series {name!r} is of unknown group {group!r}")
            turn, colour = divmod(used[group], len(PALETTE[group]))
            # When the colours start over, the symbols are shifted: the pair stays unique for longer.
            symbol = list(SYMBOLS)[(len(looks) + turn) % len(SYMBOLS)]
            looks[name] = Look(*PALETTE[group][colour], symbol)
            used[group] += 1
    return looks


def numbers(values: Iterable[Any], of: str) -> list[float | None]:
    """Values to plot; None where there is none to show (not finite)."""
    checked: list[float | None] = []
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ResultsError(f"{of!r} holds {value!r} where a number is expected")
        checked.append(float(value) if value is not None and math.isfinite(value) else None)
    return checked


def points(series: Series) -> tuple[list[float | None], list[float | None]]:
    """x and y of a series, checked."""
    x, y = numbers(series.x, series.name), numbers(series.y, series.name)
    if len(x) != len(y):
        raise ResultsError(f"series {series.name!r} has {len(x)} x and {len(y)} y")
    return x, y


def matrix(grid: Grid) -> tuple[list[float | None], list[float | None], list[list[float | None]]]:
    """x, y and z of a grid, checked."""
    x, y = numbers(grid.x, grid.name), numbers(grid.y, grid.name)
    z = [numbers(row, grid.name) for row in grid.z]
    if len(z) != len(y) or any(len(row) != len(x) for row in z):
        raise ResultsError(f"grid {grid.name!r} has a z that is not [{len(y)}][{len(x)}]")
    return x, y, z


def contents(panel: Panel) -> list[Grid | Series]:
    """What is drawn in a panel, from below to above."""
    return [*panel.grids, *panel.series]


def extent(panel: Panel, axis: str) -> tuple[float, float, float]:
    """(smallest, smallest above zero, largest) value along "x" or "y"; what is missing is 0."""
    values: list[float | None] = []
    for one in contents(panel):
        values += numbers(getattr(one, axis), one.name)
    if axis == "x":
        values += numbers((x for _, x in panel.marks), panel.title)
    there = [value for value in values if value is not None]
    above = [value for value in there if value > 0]
    return min(there, default=0.0), min(above, default=0.0), max(there, default=0.0)


def thousands(panel: Panel, axis: str) -> bool:
    """Whether the ticks of an axis read better with k, M and G."""
    _, above, largest = extent(panel, axis)
    return largest >= 10_000 and above >= 1


def short(value: float) -> str:
    """A number for reading: four digits, with k, M, G or T from ten thousand on."""
    scaled, unit = value, ""
    if abs(value) >= 10_000:
        power = min(int(math.log10(abs(value)) // 3), 4)
        scaled, unit = value / 1000**power, " kMGT"[power]
    text = f"{scaled:.4g}" if abs(scaled) < 1000 or "e" in f"{scaled:.4g}" else f"{scaled:,.0f}"
    return text.replace("-", MINUS) + unit


def bar_width(x: Sequence[float | None]) -> float:
    """The distance of neighbouring bars: `x` are their centres."""
    there = sorted({value for value in x if value is not None})
    return min((b - a for a, b in pairwise(there)), default=1.0)


def columns(count: int) -> int:
    """How many panels go side by side where there is room: at most three, four as two by two."""
    return 2 if count == 4 else max(1, min(count, 3))


def draw_figures(summary: Summary, directory: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw each chart and each training curve to `<directory>/<name>.<format>`; returns the files."""
    with needs_extra("drawing figures", "bench", "matplotlib"):
        import matplotlib
        from matplotlib.figure import Figure
    charts = [*summary.charts, *summary.curves]
    names = [chart.name for chart in charts]
    for name in names:
        if not name or name.startswith(".") or Path(name).name != name or names.count(name) > 1:
            raise ResultsError(
                f"{name!r} cannot name the files of a chart: it must be a plain, unique file name"
            )
    looks_of = looks(summary)
    try:
        local(directory, ResultsError).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ResultsError(f"cannot write figures to {directory}: {problem.strerror}") from None
    written = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc of the user would change the bytes
        matplotlib.rcParams.update(MATPLOTLIB)
        for chart in charts:
            across = columns(len(chart.panels))
            down = max(1, math.ceil(len(chart.panels) / across))
            size = (6.8, 4.0) if across == 1 else (3.9 * across, 3.5 * down)
            figure = Figure(figsize=size, dpi=144, layout="constrained")
            _draw(figure, chart, looks_of, across, down)
            for ending in formats:
                # Neither the date nor the version of matplotlib: they say nothing about the results.
                metadata = {"Software": None} if ending == "png" else {"Date": None, "Creator": None}
                drawn = io.BytesIO()
                figure.savefig(drawn, format=ending, metadata=cast(dict[str, Any], metadata))
                write_atomic(directory / f"{chart.name}.{ending}", drawn.getvalue())
                written.append(directory / f"{chart.name}.{ending}")
    return written


def _draw(figure: "Figure", chart: Chart, looks_of: dict[str, Look], across: int, down: int) -> None:
    handles: dict[str, Any] = {}
    for place, panel in enumerate(chart.panels, start=1):
        axes = figure.add_subplot(down, across, place)
        for grid in panel.grids:
            handles.setdefault(
                grid.name, _grid(figure, axes, grid, looks_of[grid.name], len(panel.grids) == 1)
            )
        for series in panel.series:
            handles.setdefault(series.name, _series(axes, series, looks_of[series.name]))
        _axes(axes, panel)
        _marks(axes, panel)
        # The same height in all panels of a row, so that their titles stand on one line.
        first = (place - 1) // across * across
        above = 6 + MARK_ROW * max(len(one.marks) for one in chart.panels[first : first + across])
        axes.set_title(panel.title if panel.title != chart.title else "", pad=above)
    figure.suptitle(chart.title, x=0.01, ha="left", weight="bold", size=12)
    if handles:
        # About 14 characters an inch, and the room of 8 for each sample of a line.
        room, widths = 14 * figure.get_figwidth(), [len(name) + 8 for name in handles]
        fit = len(handles) if sum(widths) <= room else max(1, int(room / max(widths)))
        rows = math.ceil(len(handles) / fit)
        ncols = math.ceil(len(handles) / rows)  # rows of about the same length
        figure.set_figheight(figure.get_figheight() + 0.2 * (rows - 1))
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols)


def _series(axes: "Axes", series: Series, look: Look) -> Any:
    x, y = points(series)
    xs, ys = _floats(x), _floats(y)
    if series.kind == "bars":
        return axes.bar(xs, ys, width=bar_width(x), color=look.light, alpha=0.6, linewidth=0)
    single = len(x) == 1
    line = "none" if series.kind == "points" or single else ":" if series.group == "reference" else "-"
    marker = "none" if line != "none" and len(x) > MANY_POINTS else SYMBOLS[look.symbol]
    size = 8.0 if single else 4.2
    (drawn,) = axes.plot(
        xs, ys, color=look.light, linestyle=line, linewidth=1.7, marker=marker, markersize=size
    )
    return drawn


def _grid(figure: "Figure", axes: "Axes", grid: Grid, look: Look, alone: bool) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, to_rgba
    from matplotlib.patches import Patch

    x, y, z = matrix(grid)
    # From nothing to the colour: grids over one another stay visible, and the lowest level leaves no tint.
    clear, full = to_rgba(look.light, 0), to_rgba(look.light, 0.9)
    shades = LinearSegmentedColormap.from_list("density", [(0, clear), (0.06, clear), (1, full)])
    if len(x) > 1 and len(y) > 1:
        drawn = axes.contourf(_floats(x), _floats(y), [_floats(row) for row in z], levels=12, cmap=shades)
        if alone:
            figure.colorbar(drawn, ax=axes, shrink=0.85, aspect=28, pad=0.02)
    return Patch(color=look.light, alpha=0.7)


def _axes(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    for name, axis, log in (("x", axes.xaxis, panel.log_x), ("y", axes.yaxis, panel.log_y)):
        _, above, largest = extent(panel, name)
        if log:
            few = above > 0 and largest / above < 300
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        plain = not thousands(panel, name)
        axis.set_major_formatter(
            FuncFormatter(lambda v, _, plain=plain: f"{v:,.6g}".replace("-", MINUS) if plain else short(v))
        )


def _marks(axes: "Axes", panel: Panel) -> None:
    """Draw labelled vertical lines; the labels stand above the axes, where they cover no data."""
    marks = [(name, x) for name, x in panel.marks if math.isfinite(x) and (x > 0 or not panel.log_x)]
    for _, x in marks:
        axes.axvline(x, color=MUTED, linewidth=1, linestyle="--")
    axes.set_xlim(*axes.get_xlim())

    def place(mark: tuple[str, float]) -> float:
        return float(axes.transAxes.inverted().transform(axes.transData.transform((mark[1], 1)))[0])

    # A label points to the middle, and outer marks are labelled higher: no label crosses another's line.
    for row, mark in enumerate(sorted(marks, key=lambda mark: abs(place(mark) - 0.5))):
        left, height = place(mark) <= 0.5, 3 + MARK_ROW * row
        spot: dict[str, Any] = {"xy": (mark[1], 1), "xycoords": axes.get_xaxis_transform()}
        spot["textcoords"] = "offset points"
        stem = {"arrowstyle": "-", "color": MUTED, "lw": 1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xytext=(0, height + MARK_ROW - 4), arrowprops=stem, **spot)
        side: dict[str, Any] = {"ha": "left" if left else "right", "size": 8, "color": MUTED}
        axes.annotate(mark[0], xytext=(3 if left else -3, height), **spot, **side)


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
