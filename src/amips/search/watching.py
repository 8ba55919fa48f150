"""An index that looks after itself: it keeps what it is asked, and adapts when that is unlike its log."""

import logging
import os
import threading
import time
from typing import Any, Literal

from amips.arguments import refused
from amips.errors import AmipsError
from amips.search.adapting import Adaptation, adaptation
from amips.search.changes import Place
from amips.search.changing import ChangingIndex, State
from amips.search.drift import Drift, Reference, drawn, growth
from amips.search.memory_searcher import Snapshot
from amips.search.traffic import Traffic
from amips.vectors import Floats

Watch = Literal["report"] | bool

REST = 20  # times as long as a look in the background took, nothing is looked at again

log = logging.getLogger("amips")


class WatchedIndex(ChangingIndex):
    """An index that keeps a ring of its queries; `amips.search.Index` is what a user holds."""

    def __init__(self, snapshot: Snapshot, opened: Any = None, place: Place | None = None) -> None:
        super().__init__(snapshot, opened, place)
        self._adaptation: Adaptation | None = None
        self._served: tuple[Snapshot, Snapshot, Adaptation] | None = None  # as adapted, of a snapshot
        self._reference: Reference | None = None
        self._looks = Looks()
        self._traffic: Traffic | None = None
        self._mode: Watch = False
        self.watch(True)

    def renew_locks(self) -> None:
        """In a forked child; see `ChangingIndex`."""
        super().renew_locks()
        if self._traffic is not None:
            self._traffic = Traffic(self.d)

    def watch(self, mode: Watch = True) -> None:
        """Keep a ring of recent queries, and adapt under drift, in the background, once each ring.

        Args:
            mode: "report" only says of drift, to the log of Python ("amips"); False keeps nothing, and goes
                back to how the index was fitted.
        """
        if not isinstance(mode, bool) and not (isinstance(mode, str) and mode == "report"):
            raise refused("watch", mode, "True, False or 'report'")
        self._mode = mode
        if mode is False:
            self._traffic = self._adaptation = None
        elif self._traffic is None:
            self._traffic = Traffic(self.d)

    @property
    def serving(self) -> Snapshot:
        """What answers: the present snapshot, as it was adapted to traffic if it was."""
        return self._as_served(self._state.snapshot)

    def _show(self, state: State) -> None:
        super()._show(state)
        self._served = self._reference = None  # which keep the keys of the snapshot before

    def _as_served(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot as it answers now."""
        to = self._adaptation
        if to is None or not to.fits(snapshot):
            return snapshot
        served = self._served
        if served is None or served[0] is not snapshot or served[2] is not to:
            served = self._served = (snapshot, to.on(snapshot), to)
            if self._state.snapshot is not snapshot:
                self._served = None
        return served[1]

    @property
    def adaptation(self) -> Adaptation | None:
        """How it serves while traffic is another than its log; None while it serves as it was fitted."""
        return self._adaptation

    @property
    def growth(self) -> str | None:
        """What to do about keys that have become half as many again since the fit; None if they have not."""
        return growth(self.snapshot)

    def drift(self, queries: Any = None, *, seed: int = 0) -> Drift:
        """Does traffic still look like the log? A two-sample test, in words and numbers.

        Both are looked at with the index and the keys of now. Traffic like the log is called drift in at most
        1 % of the looks, however often queries come again. AmipsError if the index has no sample of its log,
        or too few queries came.

        Args:
            queries: [m, d], an array or a file, of which 1,024 are looked at; by default the last that the
                index was asked.
            seed: of the draw.
        """
        return self._compare(self._recent(queries, seed))

    def adapt(self, queries: Any = None, *, seed: int = 0) -> Adaptation | None:
        """Serve recalls as recent queries need it, if they are unlike the log; as it was fitted otherwise.

        A sample of recent queries is searched exactly. The recall is kept and the cost rises, never the
        reverse; centroids choose the cells if that has become cheaper. This lasts until traffic is as it was,
        the index is refitted, or the process ends: `adopt` an audit to keep it. An index that watches
        (`watch`) does this by itself, in the background.

        Args:
            queries: as in `drift`.

        Returns what it does now; None if that is what it was fitted for.
        """
        recent = self._recent(queries, seed)
        drift, snapshot = self._compare(recent), self._state.snapshot
        self._adaptation = adaptation(snapshot, recent, drift, seed) if drift.drifted else None
        return self._adaptation

    def _recent(self, queries: Any, seed: int) -> Floats:
        if queries is not None:
            return drawn(queries, self.d, seed=seed)
        if self._traffic is None:
            raise AmipsError("this index does not watch its queries: call watch(), or give some")
        return self._traffic.recent()

    def _compare(self, recent: Floats) -> Drift:
        reference, snapshot = self._reference, self._state.snapshot
        if reference is None or reference.snapshot is not snapshot:
            reference = self._reference = Reference(snapshot)
            if self._state.snapshot is not snapshot:
                self._reference = None
        return reference.compare(recent)

    def _note(self, x: Any) -> None:
        """Keep what is due of queries that were answered; after a ring of them, look in the background."""
        traffic = self._traffic
        if traffic is not None and traffic.note(x) and self._can_look:
            self._looks.start(self._look)

    @property
    def _can_look(self) -> bool:
        return self._state.snapshot.origin.log is not None and self._state.snapshot.target_recall is not None

    def _look(self) -> None:
        """What the background does: compare, and adapt or go back."""
        before = self._adaptation
        try:
            if self._mode == "report":
                drift = self.drift()
                if drift.drifted:
                    log.warning("%s", str(drift).splitlines()[0])
                return
            now = self.adapt()
        except AmipsError as problem:  # too few different queries, for one
            log.info("traffic was not compared with the log: %s", problem)
            return
        if self._mode is not True:
            self._adaptation = None  # switched off meanwhile
        elif now is not None:
            log.warning("%s", "; ".join(str(now).splitlines()))
        elif before is not None:
            log.warning("traffic looks like the log again: it is served as the index was fitted")

    def wait(self) -> None:
        """Wait until nothing is looked at in the background."""
        self._looks.wait()


class Looks:
    """Looks in the background: one at a time, with rests between them."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._next = 0.0

    def start(self, look: Any) -> None:
        """Look, unless somebody is at it or it was done a little while ago."""
        if (
            os.getpid() != self._process
        ):  # a forked child has no threads, and a lock that nobody may let go of
            self.__init__()  # type: ignore[misc]
        if not self._lock.acquire(blocking=False):
            return
        if time.monotonic() < self._next:
            self._lock.release()
            return
        thread = threading.Thread(target=self._run, args=(look,), name="amips-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had, or the process is about to end
            self._lock.release()
            return
        self._thread = thread

    def _run(self, look: Any) -> None:
        started = time.monotonic()
        try:
            look()
        finally:
            ended = time.monotonic()
            self._next = ended + REST * (ended - started)
            self._lock.release()

    def wait(self) -> None:
        """Until the look under way has ended."""
        if self._thread is not None and os.getpid() == self._process:
            self._thread.join()
