"""The thread that stores on one root: reserves room, writes, keeps the log. It waits for the disk, nobody for it."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewarm.engine.base import NUM_ROOTS, Priority, WriteRecord
from rewarm.errors import RewarmError
from rewarm.volume.handles import as_they_end
from rewarm.volume.session import Did
from rewarm.volume.usage import UsageFile
from rewarm.volume.wear import DAY_HOURS, Wear

if TYPE_CHECKING:
    from rewarm.volume.handles import StoreHandle
    from rewarm.volume.namespace import Namespace
    from rewarm.volume.open_root import Root
    from rewarm.volume.volume import Volume

MAX_BATCH_RECORDS = 64
ROOM_WAIT_S = 1.0
"""How long a store waits for the janitor to make room before it is given up."""
MAX_ROOM_WAIT_S = 10.0
"""How much longer it waits while the janitor evicts and other writers take the room."""
_ROOM_STEP_S = 0.01
_GROUPS = 8
"""A group that waits for room is at most this part of the capacity: else one request could empty the volume."""
HOUSEKEEPING_S = 1.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
_OF_NO_DEVICE = {*_FULL, errno.ENODEV}
"""Errors of stores with which a look at the root's directory does not hang."""


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One record that waits to be written."""

    namespace: Namespace
    key: bytes
    address: int
    handle: StoreHandle
    index: int
    put_at: float
    """When it was queued, by the volume's clock."""

    def settle(self, *, is_stored: bool, is_written: bool = False) -> None:
        """Tell the caller."""
        self.handle.settle(self.index, is_stored=is_stored, is_written=is_written)


class StoreThread:
    """Of one root that is written to."""

    def __init__(self, volume: Volume, number: int, housekeep: Callable[[], None]) -> None:
        """
        Args:
            volume: Its volume.
            number: Of the root in it.
            housekeep: Called about once a second.
        """
        self._volume = volume
        self._number = number
        self._root: Root = volume.roots[number]
        self._usage: UsageFile = self._root.usage
        self._housekeep = housekeep
        self._queue: queue.SimpleQueue[StoreItem | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closing = False
        self.is_full = False
        """Whether the last store found no room."""
        self.refused_bytes = 0
        """Length of the record that the store budget had no room for; 0: it has some."""
        self.queued_bytes = 0
        """Of all records that wait to be written, or are being written."""
        self._since: float | None = None
        """When the oldest record was queued that is being written; None: none is."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rewarm-store-{number}", daemon=True)
        self._thread.start()

    def lag_s(self, now: float) -> float:
        """For how long the oldest record that is being written has been waiting; 0: nothing is being written."""
        since = self._since
        return 0.0 if since is None else now - since

    def put(self, item: StoreItem) -> None:
        """Queue a record; returns at once."""
        with self._closing:
            if not self._is_closing:
                self.queued_bytes += item.namespace.file.record_bytes
                self._queue.put(item)
                return
        item.settle(is_stored=False)

    def close(self, timeout_s: float) -> bool:
        """End after what is queued by now; what is not written in time is given up. False: it hangs in the disk."""
        with self._closing:
            self._is_closing = True
            self._queue.put(None)
        self._thread.join(timeout_s)
        self._stop.set()
        self._thread.join(timeout_s / 2)
        return not self._thread.is_alive()

    def _run(self) -> None:
        next_housekeeping = time.monotonic()
        is_open = True
        while is_open:
            items, is_open = self._next()
            self._since = items[0].put_at if items else None
            try:
                self._store(items)
            except (OSError, RewarmError) as error:
                self._root.health.note_store(getattr(error, "errno", None) or errno.EIO)
            finally:
                for item in items:  # whatever happened, nobody waits for ever; the settled ones stay as they are
                    item.settle(is_stored=False)
                self._since = None
                with self._closing:
                    self.queued_bytes -= sum(item.namespace.file.record_bytes for item in items)
            if time.monotonic() >= next_housekeeping or not is_open:
                self._flush()
                self._tell()
                self._housekeep()
                next_housekeeping = time.monotonic() + HOUSEKEEPING_S

    def _next(self) -> tuple[list[StoreItem], bool]:
        """What is queued, up to a batch; False: the last there will be."""
        items: list[StoreItem] = []
        with suppress(queue.Empty):
            item = self._queue.get(timeout=HOUSEKEEPING_S)
            while item is not None:
                items.append(item)
                if len(items) == MAX_BATCH_RECORDS:
                    return items, True
                item = self._queue.get_nowait()
            return items, False
        return items, True

    def _store(self, items: Sequence[StoreItem]) -> None:
        if not items or self._stop.is_set() or self._root.health.stores.is_on:
            return
        if not self._root.is_mounted():
            self._root.health.note_store(errno.ENODEV)
            return
        by_namespace: dict[bytes, dict[bytes, StoreItem]] = {}
        again: list[StoreItem] = []
        for item in items:
            if self._is_there(item):
                self._learn(item, is_written=False)
            elif by_namespace.setdefault(item.namespace.id, {}).setdefault(item.key, item) is not item:
                again.append(item)
        for by_key in by_namespace.values():
            group = list(by_key.values())
            group_records = self._root.file.capacity_bytes // _GROUPS // group[0].namespace.file.record_bytes
            for start in range(0, len(group), max(1, group_records)):
                self._store_group(group[start : start + max(1, group_records)])
        for item in again:
            if self._is_there(item):
                self._learn(item, is_written=False)

    def _store_group(self, group: Sequence[StoreItem]) -> None:
        """Store records of one namespace."""
        if self._stop.is_set() or self._root.health.stores.is_on:
            return
        if group[0].namespace.file.record_bytes > self._root.file.capacity_bytes:
            return  # nothing that could be evicted makes room for it
        group = self._within_budget(group)
        if not group:
            return
        granted = self._reserve(group)
        if granted < len(group):
            self._root.wear.give_back((len(group) - granted) * group[0].namespace.file.record_bytes)
        full = self._write(group, granted)
        if full and not self._stop.is_set():
            self._make_room()
            full = self._write(full, self._reserve(full))
        self.is_full = bool(full) or not granted
        if self.is_full:
            self._root.health.note_store(errno.ENOSPC)

    def _within_budget(self, group: Sequence[StoreItem]) -> Sequence[StoreItem]:
        """Those that the store budget of the day has room for; they count as written."""
        record_bytes = group[0].namespace.file.record_bytes
        num_within = self._root.wear.spend(record_bytes, len(group), self._volume.store_budget_bytes(self._number))
        self.refused_bytes = 0 if num_within == len(group) else record_bytes
        self._volume.counters.add("rewarm_kv_stores_over_budget_total", len(group) - num_within)
        return group[:num_within]

    def note_wear(self, wear: Wear, now_s: float) -> None:
        """Look whether there is room in the store budget again."""
        budget_bytes = self._volume.store_budget_bytes(self._number)
        if self.refused_bytes and wear.written_since(DAY_HOURS, now_s) + self.refused_bytes <= budget_bytes:
            self.refused_bytes = 0

    def _is_there(self, item: StoreItem) -> bool:
        if self._volume.is_damaged(item.namespace.id, item.key):
            return False
        return os.path.exists(self._root.paths.record(item.namespace.id, item.key))

    def _reserve(self, group: Sequence[StoreItem]) -> int:
        """For how many records there is room now, or soon."""
        record_bytes = group[0].namespace.file.record_bytes
        capacity_bytes = self._root.file.capacity_bytes
        assert self._root.session is not None
        self._root.session.set_inflight(len(group) * record_bytes)
        granted = self._usage.reserve(record_bytes, len(group), capacity_bytes)
        if granted < len(group):
            self._flush()  # the janitor has to know what it may evict
        evicted = self._usage.read().evicted_bytes
        end = time.monotonic() + ROOM_WAIT_S
        last = end + MAX_ROOM_WAIT_S
        while granted < len(group) and time.monotonic() < min(end, last) and not self._stop.wait(_ROOM_STEP_S):
            granted += self._usage.reserve(record_bytes, len(group) - granted, capacity_bytes)
            now = self._usage.read().evicted_bytes
            if now != evicted:  # a janitor works; other writers were first this time
                evicted, end = now, time.monotonic() + ROOM_WAIT_S
        return granted

    def _write(self, group: Sequence[StoreItem], granted: int) -> list[StoreItem]:
        """Write the first ``granted`` records; returns those that found the disk full, their room given back."""
        session = self._root.session
        assert session is not None
        if not granted:
            session.set_inflight(0)
            return []
        record_bytes = group[0].namespace.file.record_bytes
        created_ns = time.time_ns()
        transfers = [
            WriteRecord(
                path=self._root.paths.record(item.namespace.id, item.key),
                temporary_path=session.temporary_path(),
                key=item.key,
                namespace_id=item.namespace.id,
                address=item.address,
                payload_bytes=item.namespace.payload_bytes,
                created_ns=created_ns,
                durable=self._volume.durable,
                root=self._number % NUM_ROOTS,
            )
            for item in group[:granted]
        ]
        counters = self._volume.counters
        write_s = 0.0
        written: list[int] = []
        full: list[StoreItem] = []
        try:
            completion = self._volume.engine.submit(transfers, priority=Priority.STORE)
            try:
                for index, result in as_they_end(completion, granted):
                    item = group[index]
                    before_s, write_s = write_s, completion.times().total_s
                    counters.add("rewarm_root_write_seconds_total", write_s - before_s, self._root.name)
                    if result == 0:
                        written.append(index)
                        counters.add("rewarm_root_written_bytes_total", record_bytes, self._root.name)
                        self._learn(item, is_written=True)
                    elif result in _FULL:
                        full.append(item)
                        continue
                    else:
                        counters.add("rewarm_io_errors_total", 1, self._root.name)
                    self._root.health.note_store(result)
            finally:
                completion.wait()  # nobody may be told that a record's memory is free while it is read
                for index in sorted(written):  # in the order of their context, whichever ended first
                    session.note(Did.STORED, group[index].namespace.id, (group[index].key,))
        finally:
            # In this order: who counts in between counts too much, never too little.
            if not_written := granted - len(written):
                self._usage.give_back(not_written * record_bytes, pressure_bytes=2 * len(full) * record_bytes)
            session.set_inflight(0)
        return full

    def _learn(self, item: StoreItem, *, is_written: bool) -> None:
        item.namespace.learn(self._number, item.key)
        if self._number != self._volume.placement.order(item.key)[0]:
            item.handle.elsewhere[item.key] = self._root.file.root_id
        self._volume.note_written(item.namespace.id, item.key)
        item.settle(is_stored=True, is_written=is_written)

    def _make_room(self) -> None:
        """The disk is full although the budget is not: wait until the janitor has evicted something."""
        end = time.monotonic() + ROOM_WAIT_S
        while self._usage.read().pressure_bytes and time.monotonic() < end and not self._stop.wait(_ROOM_STEP_S):
            pass

    def _tell(self) -> None:
        """Look whether the root is there, and say how this process does, to whoever watches; on a root that fails, what
        was said there last stays.
        """
        session, health = self._root.session, self._root.health
        if health.loads.is_on or (health.stores.is_on and health.store_error not in _OF_NO_DEVICE):
            return
        self._root.is_away = not self._root.is_mounted()
        if session is not None and not self._root.is_away:
            with suppress(OSError):
                session.tell(self._volume.live_report())

    def _flush(self) -> None:
        session = self._root.session
        if session is not None and not self._root.health.stores.is_on:
            try:
                if self._root.is_mounted():
                    session.flush()
            except OSError as error:
                self._root.health.note_store(error.errno or errno.EIO)
