"""Systems made ready to search: designs by the builder, other libraries' indexes built once and kept."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from amips.backends import MANIFEST, Backend, DropIn, backend_class
from amips.backends import build as build_backend
from amips.backends import load as load_backend
from amips.bench.searchers import BackendSearch, CellSearch, GraphSearch, SystemSearch, budgets, open_exact
from amips.bench.systems import EXACT, SLUG_DIGEST, System, searches_by_itself
from amips.builder import Builder, graph_searcher
from amips.cells import fingerprint_of
from amips.design import OWN
from amips.errors import AmipsError, BundleError, ResultsError, RunError
from amips.nets import Model, load_model
from amips.routers import check_fits
from amips.search import Searcher, estimate_routing
from amips.vectors import Floats

LEARN_BYTES = 1 << 32  # of queries for backends that learn: all that amips learns from, in most logs
PREDICT_ROWS = 20_000  # queries whose keys a model predicts at a time


class Opener:
    """Opens systems on one task. The last index and the last backend stay open: several systems may use them.

    Args:
        builder: makes the cells, routers and indexes of designs.
        work: a directory that backends are kept in.
    """

    def __init__(self, builder: Builder, work: Path) -> None:
        self.builder, self.task, self.work = builder, builder.task, work
        self._backend: tuple[Path, Backend] | None = None

    def check(self, system: System) -> None:
        """Refuse what cannot be run, before anything is."""
        if system.backend not in (None, EXACT):
            assert system.backend is not None
            backend_class(system.backend).require()
        if system.design is not None:
            try:
                self.builder.check(system.design)
            except AmipsError as problem:
                raise AmipsError(f"{system.name}: {problem}") from None
        if system.run:
            self._check_model(system, load_model(system.run))

    def _check_model(self, system: System, model: Model) -> None:
        if model.d != self.task.d or model.c not in (1, system.cells if system.routed else 1):
            raise RunError(
                f"{system.run} scores {model.c} cells in dimension {model.d}: it does not fit "
                f"{system.cells} cells in dimension {self.task.d}"
            )
        if system.mode != "cells" and model.c != 1:
            raise RunError(f"{system.run} scores cells: mode={system.mode!r} needs a model of one key")
        cells = ""
        if model.c > 1 and system.design is not None:
            # Made here if need be: a model of other cells is refused before anything is run.
            cells = fingerprint_of(self.builder.cells(system.design).assignment)
        try:
            check_fits(model, self.task.fingerprint, cells)
        except RunError as problem:
            raise RunError(f"{system.name}: {problem}") from None

    def open(self, system: System) -> SystemSearch:
        """A system ready to search."""
        if system.backend == EXACT:
            return open_exact(self.task.key_vectors)
        if searches_by_itself(system):
            return self._by_itself(system)
        if system.graph and system.design is not None:
            return GraphSearch(graph_searcher(self.builder, self.builder.resolved(system.design)))
        return CellSearch(system, self.searcher(system))

    def searcher(self, system: System) -> Searcher:
        """A system whose cells amips chooses, with the temperature of its stopping rule."""
        if not system.routed or system.design is None or system.graph:
            raise AmipsError(f"{system.name} has no cells that amips chooses: it cannot be a bundle")
        model: Any = load_model(system.run) if system.run else OWN
        if system.backend is None:
            return self.builder.searcher(system.design, model)
        model = model if system.run else self.builder.model(system.design)
        # A backend whose cells a system routes is a `RoutableBackend`: the system has seen to that.
        store: Any = self.backend(system)
        searcher = Searcher(store, model, fingerprint=self.task.fingerprint, design=system.design)
        check_fits(model, self.task.fingerprint, searcher.cells_fingerprint)
        return replace(searcher, temperature=estimate_routing(searcher, self.task.val).temperature)

    def ladder(self, system: System) -> list[int]:
        """The budgets of a system, from cheap to dear."""
        return self.backend(system).budgets() if searches_by_itself(system) else budgets(system)

    def _by_itself(self, system: System) -> BackendSearch:
        backend = self.backend(system)
        if not system.run:
            return BackendSearch(backend)
        model = load_model(system.run)
        check_fits(model, self.task.fingerprint, "")
        rescore = system.mode == "drop-in-rescored"
        return BackendSearch(DropIn(backend, model, np.asarray(self.task.keys), rescore=rescore))

    def backend(self, system: System) -> Backend:
        """The backend of a system, kept on disk, and open until another is asked for.

        One that learns from queries has all training queries, as amips does, and learns from what it will be
        asked: x, or predicted keys. Both may be searched in turns: such backends are libraries, which have
        nothing to close.
        """
        assert system.backend is not None
        folder = self.work / self._folder(system)
        if self._backend is not None and self._backend[0] == folder:
            return self._backend[1]
        self.close()
        if (folder / MANIFEST).exists():
            try:
                backend = load_backend(folder)
            except BundleError as problem:
                raise ResultsError(f"{problem}; delete {folder}") from None
        else:
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left
            queries = np.asarray(self.task.train.queries[: max(1, LEARN_BYTES // (4 * self.task.d))])
            if _learns_mapped(system):
                queries = _predicted(load_model(system.run), queries)
            cells = None if system.design is None else self.builder.cells(system.design)
            settings = dict(system.settings)
            keys = self.task.key_vectors
            backend = build_backend(system.backend, keys, folder, queries=queries, cells=cells, **settings)
        self._backend = (folder, backend)
        return backend

    def _folder(self, system: System) -> str:
        """Systems that differ only in what chooses cells share one backend."""
        words = [str(system.backend), *(f"{name}-{value}" for name, value in system.settings)]
        if system.design is not None:
            words += [str(system.cells), system.design.part("cells")]
        return "-".join([*words, system.slug[-SLUG_DIGEST:]] if _learns_mapped(system) else words)

    def close(self) -> None:
        """Let go of the backend that is open, and of its server."""
        if self._backend is not None:
            self._backend[1].close()
            self._backend = None


def _predicted(model: Model, queries: Floats) -> Floats:
    """The predicted top key of each query, [m, d]; a block of queries at a time, as layers take memory."""
    starts = range(0, len(queries), PREDICT_ROWS)
    return np.concatenate([model.keys(queries[low : low + PREDICT_ROWS])[:, 0] for low in starts])


def _learns_mapped(system: System) -> bool:
    """Whether a backend learns from queries, and will be asked predicted keys."""
    assert system.backend is not None
    return backend_class(system.backend).learns and system.mode != "cells"
