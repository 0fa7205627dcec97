"""A server's worker that notes when each part of a load was done."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rewarm.kv.rank import make_worker
from rewarm.kv.staged import PinnedMemory, StagedWorker

if TYPE_CHECKING:
    from rewarm.kv.worker import RankSetup, RankWorker


@dataclass(slots=True)
class Marks:
    """time.perf_counter() of what happened first and last; 0: it did not."""

    first_read: float = 0.0
    """The load thread has taken up the first chunk that is read and checked."""
    last_read: float = 0.0
    in_place: float = 0.0
    """The last copy into the server's blocks has ended."""
    queueing_s: float = 0.0
    """What queueing the copies took of the interpreter, all chunks together."""

    def clear(self) -> None:
        """Before the next load."""
        for field in fields(self):
            setattr(self, field.name, 0.0)


class MarkedWorker(StagedWorker):
    """Two clock readings a chunk more than the worker of a server."""

    def __init__(self, setup: RankSetup, ring: PinnedMemory) -> None:
        """See StagedWorker."""
        self.marks = Marks()
        super().__init__(setup, ring)

    def _copy(self, active: Any, index: int) -> None:
        begin = self.marks.last_read = time.perf_counter()
        self.marks.first_read = self.marks.first_read or begin
        super()._copy(active, index)
        self.marks.queueing_s += time.perf_counter() - begin

    def _retire(self) -> None:
        self.marks.in_place = time.perf_counter()
        super()._retire()


def make_marked(setup: RankSetup, ring: Any) -> RankWorker:
    """The worker of a server; in host memory, where the engine's own workers do all of a load, without marks."""
    return make_worker(setup, ring) if ring is None else MarkedWorker(setup, ring)
