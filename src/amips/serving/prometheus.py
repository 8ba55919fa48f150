"""What a service counts, in Prometheus's format.

With several workers each counts for itself, into files of a directory that the environment names; whichever
is asked adds them up.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # the library's own name
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
MASSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class Counters:
    """The counters of one service."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ["path"]
        self.requests = Counter(
            "amips_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "amips_request_seconds", "Time of a request.", labels, buckets=SECONDS, registry=registry
        )
        self.batch_requests = Histogram(
            "amips_batch_requests", "Requests searched together.", buckets=SIZES, registry=registry
        )
        self.batch_rows = Histogram(
            "amips_batch_rows", "Queries searched together.", buckets=SIZES, registry=registry
        )
        self.search_seconds = Histogram(
            "amips_search_seconds", "Time of a search of one batch.", buckets=SECONDS, registry=registry
        )
        self.scanned = Histogram(
            "amips_scanned_fraction",
            "Fraction of the keys that a query scanned; of one query a second.",
            buckets=FRACTIONS,
            registry=registry,
        )
        self.mass = Histogram(
            "amips_probability_mass",
            "Share of a query's top keys that its cells are expected to hold; of one query a second.",
            buckets=MASSES,
            registry=registry,
        )
        self.reloads = Counter("amips_reloads", "Reloads by result.", ["result"], registry=registry)
        self.waiting = self._gauge("amips_waiting_rows", "Queries that wait for the searcher.", "livesum")
        self.keys = self._gauge("amips_keys", "Keys that can be found.", "livemax")
        self.absent = self._gauge("amips_missing_shards", "Shards that could not be opened.", "livemax")
        self.loaded = self._gauge("amips_loaded_timestamp_seconds", "When the bundle was loaded.", "livemin")
        self.drift_p = self._gauge(
            "amips_drift_p",
            "Of differences as large if traffic were like the log; below 0.01 is drift.",
            "livemin",
        )
        self.adapted = self._gauge(
            "amips_adapted", "1 while recalls are served as recent queries need it, not as fitted.", "livemax"
        )
        self.drift_p.set(1)
        self._of_requests: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def _gauge(self, name: str, words: str, mode: str) -> Gauge:
        return Gauge(name, words, registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def note_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        both = self._of_requests.get((path, status))
        if both is None:  # to find a counter by its labels takes longer than to count
            both = self.requests.labels(path, str(status)), self.seconds.labels(path)
            self._of_requests[path, status] = both
        both[0].inc()
        both[1].observe(seconds)

    def note_batch(self, requests: int, rows: int, seconds: float) -> None:
        """Count a batch."""
        self.batch_requests.observe(requests)
        self.batch_rows.observe(rows)
        self.search_seconds.observe(seconds)

    def close(self) -> None:
        """What this process has at the moment is nothing any more: it ends."""
        if DIRECTORY in os.environ:
            forget_process(os.getpid())

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        if DIRECTORY in os.environ:
            everyone = CollectorRegistry()
            MultiProcessCollector(everyone)  # type: ignore[no-untyped-call]
            return generate_latest(everyone)
        return generate_latest(self._registry)


def forget_process(pid: int | None) -> None:
    """What a process had at the moment is nothing any more; what it counted stays."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
