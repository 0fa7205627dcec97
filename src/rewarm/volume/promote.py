"""What is copied from flash into the host volume, and the thread that does it: behind all loads, one after the other.

A record is copied when it is read from flash the second time. Copying each at its first read had a little more of the
loads served from memory in replays, and had flash read half as much again as without a host tier, since each copy is a
read; what is read twice costs a quarter of that or less, but for documents (docs/guides/host-tier.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rewarm.engine.base import Priority, ToMemory
from rewarm.engine.memory import AlignedBuffer, alloc_aligned
from rewarm.errors import RewarmError
from rewarm.metrics import Counters
from rewarm.volume.handles import Outcome
from rewarm.volume.index import fingerprint
from rewarm.volume.namespace import Namespace

MAX_WAITING = 4096
"""Records that may wait to be promoted; what is used while so many wait is not, this time."""
MAX_REMEMBERED = 1 << 17
"""Records that were read once, whose second read will have them copied: about 16 MB."""
READ_DEADLINE_S = 30.0
CLOSE_WAIT_S = 10.0
_STEP_S = 0.1


class Promoter:
    """Reads each record anew, checked as any load is: the memory that a load filled is the server's at once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._changed = threading.Condition()
        self._read_once: dict[int, None] = {}
        self._waiting: dict[tuple[bytes, bytes], tuple[Namespace, Namespace]] = {}
        self._is_busy = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="rewarm-promote", daemon=True)
        self._thread.start()

    def put(self, flash: Namespace, host: Namespace, keys: Iterable[bytes]) -> None:
        """Note records that were read from flash; returns at once."""
        with self._changed:
            for key in keys:
                if not self._was_read(flash, key):
                    continue
                if len(self._waiting) < MAX_WAITING:
                    self._waiting.setdefault((flash.id, key), (flash, host))
                else:
                    self._counters.add("rewarm_host_promotions_total", 1, "dropped")
            self._changed.notify_all()

    def _was_read(self, flash: Namespace, key: bytes) -> bool:
        """Whether a record was read before, as far as is remembered."""
        mark = fingerprint(flash.id) ^ fingerprint(key)
        if mark in self._read_once:
            return True
        self._read_once[mark] = None
        if len(self._read_once) > MAX_REMEMBERED:
            del self._read_once[next(iter(self._read_once))]
        return False

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or is under way. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout_s)

    def close(self) -> None:
        """End soon; a device that hangs is not waited for."""
        with self._changed:
            self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        buffer: AlignedBuffer | None = None  # this thread's alone: a store that hangs keeps it alive
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                (_, key), (flash, host) = entry = next(iter(self._waiting.items()))
                del self._waiting[entry[0]]
                self._is_busy = True
            if buffer is None or buffer.num_bytes < flash.file.record_bytes:
                buffer = alloc_aligned(flash.file.record_bytes)
            self._counters.add("rewarm_host_promotions_total", 1, self._copy(flash, host, key, buffer))

    def _copy(self, flash: Namespace, host: Namespace, key: bytes, buffer: AlignedBuffer) -> str:
        """Promote one record; returns how that ended."""
        try:
            if not host.may_store(key):
                return "skipped"
            load = flash.load([(key, ToMemory(buffer.address))], READ_DEADLINE_S, priority=Priority.STORE)
            while not load.wait(_STEP_S):
                if self._is_closing:
                    load.cancel()
            if load.results() != [Outcome.HIT]:
                return "failed"
            store = host.store([(key, buffer.address)])
            store.wait()
            return "promoted" if store.results()[0] else "failed"
        except (OSError, RewarmError):  # the volume was closed; else both sides have counted what is wrong
            return "failed"
