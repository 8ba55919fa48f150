"""What a bench or an experiment ends in: sentences, tables and charts, as plain values in one JSON file.

    results/
      summary.json    what is defined here; the report, the figures and the documentation are drawn from it
      runs/           raw runs, from which a bench derives its summary (see `bench.results`)

Charts are described, not drawn: the same description becomes an interactive page (`bench.page`) and
PNG or SVG files (`bench.figures`).
"""

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from amips.errors import ResultsError
from amips.files import read_json, write_json
from amips.nets import is_run
from amips.tables import markdown_table
from amips.untrusted import inside

SUMMARY = "summary.json"
FORMAT = 1


@dataclass(frozen=True)
class Series:
    """One curve, cloud of points or set of bars; `text` is what hovering over each point shows.

    `group` says what role it plays, which decides how it is drawn: what is compared, what it is compared
    with, or a line to know about. A reference with a single point is a marker.
    """

    name: str
    x: list[float]
    y: list[float]
    text: list[str] = field(default_factory=list)
    kind: Literal["line", "points", "bars"] = "line"
    group: Literal["baseline", "contender", "reference"] = "contender"


@dataclass(frozen=True)
class Grid:
    """A density over the plane: `z` [rows of y][columns of x]."""

    name: str
    x: list[float]
    y: list[float]
    z: list[list[float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `marks` are vertical lines: (name, x)."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    grids: list[Grid] = field(default_factory=list)
    marks: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """Panels side by side under one title; `name` is what its files are called."""

    name: str
    title: str
    panels: list[Panel]
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a head."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        """As a Markdown table with its note."""
        return "\n\n".join([markdown_table(self.head, self.rows), *([self.note] if self.note else [])])


@dataclass(frozen=True)
class Summary:
    """Everything a reader is told.

    Args:
        name: "bench", or the name of the experiment.
        title: a headline.
        verdict: sentences, the most important first.
        tables, charts: in the order in which they are shown.
        facts: of the data: (what, value).
        curves: charts of the training of the models, if any.
        method: how it was measured, in paragraphs.
        command: what makes this again.
        machine: processor, threads, versions.
        values: figures by name, for tests and for other programs.
    """

    name: str
    title: str
    verdict: list[str]
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    curves: list[Chart] = field(default_factory=list)
    method: list[str] = field(default_factory=list)
    command: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Write summary.json, atomically."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / SUMMARY, {"kind": "summary", "format": FORMAT, **asdict(self)})


def load_summary(directory: str | Path) -> Summary:
    """Read summary.json of a results directory; of a training run, how it went."""
    path = Path(directory) / SUMMARY
    if not path.exists():
        from amips.bench.facts import training_summary  # what it makes is a summary

        if is_run(directory):
            return training_summary(directory)
        if (Path(directory) / "results.json").exists():
            raise ResultsError(f"{directory} holds an unfinished bench; give its command again to finish it")
        raise ResultsError(
            f"{directory} holds no {SUMMARY}: not results of amips bench, an experiment or a training run"
        )
    values = read_json(inside(path.parent, path.name, ResultsError), ResultsError)
    if values.pop("kind", None) != "summary" or values.pop("format", None) != FORMAT:
        raise ResultsError(f"{path} is not a summary that this version of amips reads")
    try:
        summary: Summary = _as(Summary, values)
    except ValueError as problem:
        raise ResultsError(f"{path} is damaged: {problem}") from None
    return summary


def _as(kind: Any, value: Any, name: str = "summary") -> Any:
    """A value of JSON as what a field of a summary is declared to be; ValueError if it is something else."""
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or not value.keys() <= hints.keys():
            raise ValueError(f"{name} is not a {kind.__name__}")
        try:
            return kind(**{field: _as(hints[field], inner, field) for field, inner in value.items()})
        except TypeError:
            raise ValueError(f"{name} lacks a part of a {kind.__name__}") from None
    origin, inside_of = get_origin(kind), get_args(kind)
    if origin is list and isinstance(value, list):
        return [_as(inside_of[0], inner, name) for inner in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(inside_of):
        return tuple(_as(each, inner, name) for each, inner in zip(inside_of, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {field: _as(inside_of[1], inner, name) for field, inner in value.items()}
    if origin is Literal and value in inside_of:
        return value
    if (kind is float and type(value) in (int, float)) or (kind in (str, bool) and type(value) is kind):
        return value
    raise ValueError(f"{name} is {str(value)[:40]!r}")
