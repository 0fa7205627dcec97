"""Notices a root that delivers far less than it did while others go on, and leaves it alone for a while.

A load ends when its slowest root has delivered, so one device that turns ten times slower, or hangs, makes every load
so. What it holds is better computed anew, and stored on the others. Only a root that has changed counts: one that was
slow from the beginning is a matter of sizes, and where all roots slow down together the cause is elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from rewarm.engine.base import Flow
from rewarm.errors import VolumeClosed
from rewarm.units import MIB

if TYPE_CHECKING:
    from rewarm.volume.handles import Part
    from rewarm.volume.open_root import Root

_log = logging.getLogger(__name__)

LOOK_S = 0.1
SLOWER = 5.0
"""A root that delivers less than this part of what it used to is slow, if another one does MORE_WORK times as much."""
MORE_WORK = 3.0
"""Work is bytes by the root's own usual rate: the time that they would have taken it."""
LEAST_WORK_S = 0.02
MIN_BUSY_S = 0.25
MIN_EXPECTED_BYTES = 32 * MIB
"""What is under way at once may end at once: a root is judged by no less than what all workers can have asked of it."""
AGAIN = 0.25
"""Part of these two that is enough for a root which is tried again after it was slow."""
WINDOW_S = 1.0
KEPT_BUSY_S = 5.0
"""Seconds of reading after which what a root used to deliver weighs half."""
_FIRST_BYTES = 4 * MIB
_FIRST_BUSY_S = 0.05


class _Pace:
    """What one root delivers while reads of it are under way."""

    def __init__(self, flow: Flow) -> None:
        self._last = flow
        self._usual = Flow()
        self.work_s = 0.0
        """Of all that was delivered since the beginning."""
        self.window = Flow()
        """Since it was judged last, or idle."""
        self.since_slow = Flow()
        """Since it was seen to be slow."""
        self.others: dict[int, float] = {}
        """Number of each other root -> its work_s at the beginning of the window."""

    @property
    def bytes_a_s(self) -> float:
        """What it used to deliver; 0: not known yet."""
        known = self._usual.num_bytes >= _FIRST_BYTES and self._usual.busy_s >= _FIRST_BUSY_S
        return self._usual.num_bytes / self._usual.busy_s if known else 0.0

    def take(self, flow: Flow, passed_s: float) -> bool:
        """Learn what it has delivered by now; returns whether it had something to do meanwhile."""
        new, self._last = flow - self._last, flow
        self.window = self.window + new
        self.since_slow = self.since_slow + new
        if rate := self.bytes_a_s:
            self.work_s += new.num_bytes / rate
        return new.busy_s > passed_s / 2

    def close_window(self, others: dict[int, float]) -> None:
        """Take the window into what is usual, and begin another one."""
        kept = 0.5 ** (self.window.busy_s / KEPT_BUSY_S)
        usual = Flow(self._usual.num_bytes * kept, self._usual.busy_s * kept)
        self._usual = usual + self.window
        self.begin(others)

    def begin(self, others: dict[int, float]) -> None:
        """Begin another window, and forget this one."""
        self.window = Flow()
        self.others = others


class ReadWatch:
    """Of one volume. Thread-safe but for look(), which one thread calls."""

    def __init__(
        self, roots: Sequence[Root], flow: Callable[[int], Flow], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            roots: Those of the volume, by number; the list grows as roots are added.
            flow: Number of a root -> what it has delivered so far.
            clock: Seconds, never backwards.
        """
        self._roots = roots
        self._flow = flow
        self._clock = clock
        self._paces: dict[int, _Pace] = {}
        self._looked_at = clock()
        self._lock = threading.Lock()
        self._parts: WeakSet[Part] = WeakSet()
        self._is_needed = threading.Event()
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def add(self, part: Part) -> None:
        """Watch a part of a load; it is cut if its root turns slow. Its completion's cancel() must not have to wait."""
        if len(self._roots) < 2:
            return
        with self._lock:
            self._parts.add(part)
            if self._thread is None and not self._is_ending:
                self._thread = threading.Thread(target=self._run, name="rewarm-read-watch", daemon=True)
                self._thread.start()
        self._is_needed.set()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._is_ending = True
        self._is_needed.set()

    def look(self) -> None:
        """Judge every root by what it has delivered since the last look; every LOOK_S while loads are under way."""
        now = self._clock()
        passed_s, self._looked_at = now - self._looked_at, now
        members = {number: root for number, root in enumerate(self._roots) if root.is_member}
        work_s = {number: pace.work_s for number, pace in self._paces.items()}
        was_busy = {}
        for number in members:
            flow = self._flow(number)
            if number not in self._paces:
                self._paces[number] = _Pace(flow)
            was_busy[number] = self._paces[number].take(flow, passed_s)
        for number, root in members.items():
            pace = self._paces[number]
            if not pace.window.busy_s:
                pace.others = work_s
            elif self._is_slow(number, root):
                pace.begin(work_s)
                pace.since_slow = Flow()
                self._leave(number, root)
            else:
                self._note_healed(pace, root)
                if not was_busy[number] or pace.window.busy_s >= WINDOW_S:
                    pace.close_window(work_s)

    def _is_slow(self, number: int, root: Root) -> bool:
        pace = self._paces[number]
        rate, window = pace.bytes_a_s, pace.window
        enough = AGAIN if root.health.is_slow else 1.0
        expected = rate * window.busy_s
        if window.busy_s < enough * MIN_BUSY_S or expected < enough * MIN_EXPECTED_BYTES:
            return False
        if window.num_bytes * SLOWER > expected:
            return False
        most = max(
            (other.work_s - pace.others.get(n, 0.0) for n, other in self._paces.items() if n != number), default=0.0
        )
        return most >= max(LEAST_WORK_S, MORE_WORK * window.num_bytes / rate)

    def _note_healed(self, pace: _Pace, root: Root) -> None:
        expected = pace.bytes_a_s * pace.since_slow.busy_s
        if root.health.is_slow and AGAIN * MIN_EXPECTED_BYTES <= expected <= 2 * pace.since_slow.num_bytes:
            root.health.note_pace(is_slow=False)
            _log.warning("%s delivers as before, and is read again", root.name)

    def _leave(self, number: int, root: Root) -> None:
        if not root.health.is_slow:
            _log.warning("%s delivers far less than it did: what it holds is not read for a while", root.name)
        root.health.note_pace(is_slow=True)
        with self._lock:
            parts = [part for part in self._parts if part.root == number]
        for part in parts:
            part.completion.cancel()

    def _run(self) -> None:
        with suppress(VolumeClosed):  # the engine's end is that of all loads
            while self._is_needed.wait() and not self._is_ending:
                self._is_needed.clear()
                with self._lock:
                    is_idle = all(part.completion.done() for part in self._parts)
                self.look()
                if not is_idle:
                    self._is_needed.set()
                time.sleep(LOOK_S)
