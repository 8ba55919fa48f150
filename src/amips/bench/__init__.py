"""Honest comparison of designs and other libraries' indexes: raw runs, what follows from them, the page."""

from amips.bench.backend_tables import gain_sentences, gain_tables, pairs, silent_sentences
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
    families,
    on_test,
    on_val,
    within,
    yardstick_seconds,
)
from amips.bench.facts import read_log, top_scores, training_curves, training_summary
from amips.bench.figures import draw_figures
from amips.bench.judgements import Judgements
from amips.bench.lineup import (
    OWN_LABEL,
    OWN_SWEEP,
    SWEEP,
    backend_systems,
    cells_of,
    default_systems,
    load_models,
    model_label,
    model_systems,
    own_on_backends,
    own_systems,
    plain_designs,
    sweep,
)
from amips.bench.machine import describe_machine, in_turns, peak_memory, threads
from amips.bench.page import write_page
from amips.bench.relevance import read_qrels
from amips.bench.results import WORK, ResultsStore, Run
from amips.bench.runner import Runner, Settings
from amips.bench.searchers import CellSearch, SystemSearch, budgets, effort, spent
from amips.bench.summarize import AXES
from amips.bench.summary import SUMMARY, Chart, Grid, Panel, Series, Summary, Table, load_summary
from amips.bench.systems import EXACT, Mode, System
from amips.bench.systems_file import read_systems
from amips.bench.verdict import HEADLINES, SMALL, TARGETS, best_system, choose, give_verdict, in_words

__all__ = [
    "AXES",
    "EXACT",
    "HEADLINES",
    "OWN_LABEL",
    "OWN_SWEEP",
    "SMALL",
    "SUMMARY",
    "SWEEP",
    "TARGETS",
    "WORK",
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
    "Run",
    "Runner",
    "Series",
    "Settings",
    "Summary",
    "System",
    "SystemSearch",
    "Table",
    "backend_systems",
    "baseline",
    "bench",
    "best_system",
    "budgets",
    "cells_of",
    "choose",
    "default_systems",
    "describe_machine",
    "draw_figures",
    "effort",
    "families",
    "gain_sentences",
    "gain_tables",
    "give_verdict",
    "identity",
    "in_turns",
    "in_words",
    "index_of",
    "load_models",
    "load_summary",
    "model_label",
    "model_systems",
    "on_test",
    "on_val",
    "own_on_backends",
    "own_systems",
    "pairs",
    "peak_memory",
    "plain_designs",
    "read_log",
    "read_qrels",
    "read_systems",
    "silent_sentences",
    "spent",
    "sweep",
    "threads",
    "top_scores",
    "training_curves",
    "training_summary",
    "within",
    "write_page",
    "yardstick_seconds",
]
