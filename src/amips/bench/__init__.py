"""Honest comparison of designs and other libraries' indexes: raw runs, what follows from them, the page."""

from amips.bench.backend_tables import gain_tables, silent_sentences
from amips.bench.comparison import bench, identity, index_of
from amips.bench.derive import (
    Array,
    Axis,
    Bootstrap,
    Family,
    Measured,
    Metric,
    Ratio,
    baseline,
    on_test,
    on_val,
    within,
    yardstick_seconds,
)
from amips.bench.facts import training_curves
from amips.bench.figures import draw_figures
from amips.bench.judgements import Judgements
from amips.bench.lineup import (
    OWN_LABEL,
    backend_systems,
    cells_of,
    graph_systems,
    load_models,
    own_on_backends,
    own_systems,
    sweep,
)
from amips.bench.machine import describe_machine, in_turns, peak_memory
from amips.bench.page import write_page
from amips.bench.relevance import read_qrels
from amips.bench.results import ResultsStore
from amips.bench.runner import Runner, Settings
from amips.bench.searchers import CellSearch, budgets, effort
from amips.bench.summary import SUMMARY, Chart, Grid, Panel, Series, Summary, Table, load_summary
from amips.bench.systems import EXACT, Mode, System
from amips.bench.systems_file import read_systems
from amips.bench.verdict import SMALL, gain_sentences, in_words

__all__ = [
    "EXACT",
    "OWN_LABEL",
    "SMALL",
    "SUMMARY",
    "Array",
    "Axis",
    "Bootstrap",
    "CellSearch",
    "Chart",
    "Family",
    "Grid",
    "Judgements",
    "Measured",
    "Metric",
    "Mode",
    "Panel",
    "Ratio",
    "ResultsStore",
    "Runner",
    "Series",
    "Settings",
    "Summary",
    "System",
    "Table",
    "backend_systems",
    "baseline",
    "bench",
    "budgets",
    "cells_of",
    "describe_machine",
    "draw_figures",
    "effort",
    "gain_sentences",
    "gain_tables",
    "graph_systems",
    "identity",
    "in_turns",
    "in_words",
    "index_of",
    "load_models",
    "load_summary",
    "on_test",
    "on_val",
    "own_on_backends",
    "own_systems",
    "peak_memory",
    "read_qrels",
    "read_systems",
    "silent_sentences",
    "sweep",
    "training_curves",
    "within",
    "write_page",
    "yardstick_seconds",
]
