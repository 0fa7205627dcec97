"""What routers are told of a volume: which chunks are on it, and which are known to be gone.

The scheduler's side, without I/O on its thread. A chunk is announced once: when all its records are written, or when a
lookup finds them, whoever wrote them. That it is gone is announced when a load shows it, or when a look at the file
system does: a few chunks are looked at every now and then, in turn, since nobody tells a server what a janitor evicts.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from rewarm.kv.chunks import StepReport
from rewarm.kv.presence import ChunkPresence, ProbeHandle
from rewarm.volume import Outcome

logger = logging.getLogger("vllm.rewarm")

MAX_BLOCKS = 500_000
"""Block hashes of announced chunks that are kept to announce their end: about 35 MB. What is above is announced as
gone, the oldest first: a router then expects too little, never too much."""
MAX_PENDING = 10_000
"""Chunks whose stores are under way, with the event that will announce them."""
LOOK_S = 5.0
"""Between two looks at the file system."""
LOOK_CHUNKS = 1024
"""Looked at at once: about 200 a second, which no device notices; a full memory of 16-block chunks takes 3 minutes."""


class EventMaker(Protocol):
    """Makes a server's own events. A chunk is named by a request and its index in it."""

    def hashes(self, request: Any, index: int) -> list[bytes]:
        """The block hashes of a chunk, each of the same length."""

    def stored(self, request: Any, index: int) -> Any:
        """The event that a chunk is on the volume."""

    def removed(self, hashes: list[bytes]) -> Any:
        """The event that the blocks of a chunk are on it no more."""


@dataclass(slots=True)
class _Look:
    chunks: list[bytes]
    probes: Sequence[ProbeHandle]


M = TypeVar("M", bound=Callable[..., None])


def _never_throws(method: M) -> M:
    """Events are advice: what goes wrong in making them ends them, with one line in the log, and nothing else."""

    @functools.wraps(method)
    def guarded(self: Announcer, *args: Any) -> None:
        if self.is_off:
            return
        try:
            method(self, *args)
        except Exception:
            self.is_off = True
            logger.exception("Rewarm: routers are told nothing of the volume from now on")

    return cast("M", guarded)


class Announcer:
    """One thread; calls that are made for each chunk do nothing but look into a dictionary where it is announced."""

    def __init__(self, presence: ChunkPresence, events: EventMaker, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._presence = presence
        self._maker = events
        self._max_blocks = max_blocks
        self._pending: dict[bytes, tuple[list[bytes], Any]] = {}
        self._announced: dict[bytes, tuple[int, bytes]] = {}
        """Chunk -> number of its blocks, their hashes one after another."""
        self._num_blocks = 0
        self._events: deque[Any] = deque()
        self._look: _Look | None = None
        self._next_look = 0.0
        self.is_off = False
        """Something went wrong in here."""

    @_never_throws
    def ordered(self, chunk: bytes, request: Any, index: int) -> None:
        """A chunk is about to be stored; its request may be gone when it is."""
        if chunk not in self._announced:
            self._pending[chunk] = (self._maker.hashes(request, index), self._maker.stored(request, index))
            if len(self._pending) > MAX_PENDING:
                del self._pending[next(iter(self._pending))]

    @_never_throws
    def found(self, chunk: bytes, request: Any, index: int) -> None:
        """A chunk is on the volume."""
        if chunk not in self._announced:
            self._announce(chunk, self._maker.hashes(request, index), self._maker.stored(request, index))

    @_never_throws
    def take(self, report: StepReport) -> None:
        """Learn what the ranks did; after the presence has."""
        for chunk in report.stored:
            ready = None if self._presence.is_storing(chunk) else self._pending.pop(chunk, None)
            if ready is not None and self._presence.is_present(chunk):
                self._announce(chunk, *ready)
        for chunk in (*report.dropped, *report.put_off):
            self._pending.pop(chunk, None)
        for chunk, outcome in report.failed.items():
            if outcome in (Outcome.MISS, Outcome.DAMAGED):
                self._gone(chunk)

    @_never_throws
    def forget(self) -> None:
        """Nothing that was announced is served any more."""
        self._pending.clear()
        for chunk in list(self._announced):
            self._gone(chunk)

    def take_events(self) -> list[Any]:
        """The events since the last call, in order."""
        self._look_around()
        events = list(self._events)
        self._events.clear()
        return events

    def _announce(self, chunk: bytes, hashes: list[bytes], event: Any) -> None:
        self._events.append(event)
        self._announced[chunk] = (len(hashes), b"".join(hashes))
        self._num_blocks += len(hashes)
        while self._num_blocks > self._max_blocks:
            self._gone(next(iter(self._announced)))

    def _gone(self, chunk: bytes) -> None:
        known = self._announced.pop(chunk, None)
        if known is not None:
            num_blocks, joined = known
            self._num_blocks -= num_blocks
            size = len(joined) // num_blocks
            self._events.append(
                self._maker.removed([joined[start : start + size] for start in range(0, len(joined), size)])
            )

    @_never_throws
    def _look_around(self) -> None:
        """Take the last look's answer, or look at the next few chunks; those go to the end of the line."""
        if self._look is not None:
            if all(probe.done() for probe in self._look.probes):
                for chunk in self._look.chunks:
                    if not self._presence.is_present(chunk):
                        self._gone(chunk)
                self._look = None
        elif self._announced and self._presence.clock() >= self._next_look:
            self._next_look = self._presence.clock() + LOOK_S
            chunks = [chunk for chunk, _ in zip(self._announced, range(LOOK_CHUNKS), strict=False)]
            for chunk in chunks:
                self._announced[chunk] = self._announced.pop(chunk)
            self._look = _Look(chunks, self._presence.probe(chunks))
