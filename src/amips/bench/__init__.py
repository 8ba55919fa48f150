"""Honest comparison: raw runs, what is derived from them, the paper's studies, the report."""

from amips.bench.comparison import bench, searcher
from amips.bench.judgements import Judgements
from amips.bench.summary import Summary, load_summary
from amips.bench.systems import System, read_systems

__all__ = ["Judgements", "Summary", "System", "bench", "load_summary", "read_systems", "searcher"]
