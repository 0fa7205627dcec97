"""The engine without native code: Python threads. Slower, and the same promise (engine/base.py)."""

from __future__ import annotations

import errno
import os
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rewarm.engine import memory, pure_io
from rewarm.engine.base import (
    BlockPlanes,
    EngineConfig,
    Flow,
    Priority,
    Probe,
    Read,
    ReadRecord,
    Times,
    ToBlocks,
    ToMemory,
    ToSlot,
    Transfer,
    Unlink,
    Write,
    WriteRecord,
)
from rewarm.engine.checks import check_arrays, check_ring, check_root, check_transfer
from rewarm.engine.memory import PAGE_BYTES, AlignedBuffer, alloc_aligned, view_at
from rewarm.engine.pure_queue import Job, Lanes
from rewarm.errors import BusyError, UsageError, VolumeClosed
from rewarm.units import round_up

_DEFAULT_WORKERS = 8
_CLOSE_WAIT_S = 5.0
"""How long close() waits for reads in place that hang; after it their memory must stay where it is for good."""
_QUEUED, _RUNNING, _DELIVERING, _FINAL = range(4)


@dataclass(eq=False)
class _Batch:
    """State of one submitted batch; every field is guarded by the engine's lock."""

    transfers: Sequence[Transfer]
    deadline: float | None
    states: list[int]
    results: list[int]
    open_count: int
    changed: threading.Condition
    cut: int = 0
    """0, or the errno with which what is not final has to end."""
    ended: deque[int] = field(default_factory=deque)
    """Indices that are final and not taken yet."""
    slots: dict[int, int] = field(default_factory=dict)
    """Index -> ring slot that its caller holds."""
    event_fd: int = -1
    dropped: bool = False
    """Nobody holds the completion any more."""
    num_running: int = 0
    """Transfers whose I/O is under way, abandoned ones among them."""
    submitted_at: float = field(default_factory=time.monotonic)
    idle_since: float = field(init=False)
    """Since when none is, while the batch is open."""
    done_at: float = field(init=False)
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.idle_since = self.done_at = self.submitted_at

    def begin_one(self) -> None:
        """A transfer was taken."""
        if not self.num_running and self.open_count:
            self.waited_s += time.monotonic() - self.idle_since
        self.num_running += 1

    def end_one(self) -> None:
        """Its I/O has returned."""
        self.num_running -= 1
        if not self.num_running:
            self.idle_since = time.monotonic()

    def close(self) -> None:
        """The last transfer is final."""
        self.done_at = time.monotonic()
        if not self.num_running:
            self.waited_s += self.done_at - self.idle_since

    def times(self) -> Times:
        """See engine.base.Completion."""
        now = time.monotonic() if self.open_count else self.done_at
        idle_s = now - self.idle_since if self.open_count and not self.num_running else 0.0
        return Times(self.waited_s + idle_s, now - self.submitted_at)


@dataclass(slots=True)
class _Reads:
    """Those of one root; guarded by the engine's lock."""

    num_bytes: int = 0
    busy_s: float = 0.0
    num_running: int = 0
    busy_since: float = 0.0

    def begin(self) -> None:
        if not self.num_running:
            self.busy_since = time.monotonic()
        self.num_running += 1

    def end(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self.busy_s += time.monotonic() - self.busy_since

    def flow(self) -> Flow:
        """So far."""
        return Flow(self.num_bytes, self.busy_s + (time.monotonic() - self.busy_since if self.num_running else 0.0))


class PureEngine:
    """Python threads over preadv and pwritev."""

    name = "pure"

    def __init__(self, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        check_ring(config)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a completion's __del__ may run while its thread holds it
        self._work = threading.Condition(self._lock)
        self._timer_wake = threading.Condition(self._lock)
        self._live: set[_Batch] = set()
        self._timer: threading.Thread | None = None
        self._reads: defaultdict[int, _Reads] = defaultdict(_Reads)
        self._closed = False
        self._held = ""
        self._hold_changed = threading.Condition(self._lock)
        self._slot_bytes = config.slot_bytes
        self._ring: AlignedBuffer | None = None
        self._ring_address = config.ring_address
        if config.ring_bytes and not config.ring_address:
            self._ring = alloc_aligned(config.ring_bytes)
            self._ring_address = self._ring.address
        num_workers = config.num_workers or _DEFAULT_WORKERS
        num_slots = config.ring_bytes // config.slot_bytes if config.ring_bytes else 0
        self._lanes: Lanes[_Batch] = Lanes(num_workers, num_slots)
        self._threads = [
            threading.Thread(target=self._run, name=f"rewarm-io-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> PureCompletion:
        """See engine.base.Engine."""
        self._check_process()
        for transfer in transfers:
            check_transfer(transfer, self._slot_bytes)
        with self._lock:
            if self._closed:
                raise VolumeClosed("the engine is closed")
            count = len(transfers)
            deadline = None if deadline_s is None else time.monotonic() + deadline_s
            changed = threading.Condition(self._lock)
            batch = _Batch(list(transfers), deadline, [_QUEUED] * count, [0] * count, count, changed)
            for index, transfer in enumerate(transfers):
                root = getattr(transfer, "root", 0)
                self._lanes.put(Job(batch, index, root, _needs_slot(transfer)), priority)
            self._work.notify(count)
            if count:
                self._live.add(batch)
            if deadline is not None:
                self._watch_deadlines()
        return PureCompletion(self, batch)

    def gather(self, planes: BlockPlanes, block_ids: array[int], address: int) -> None:
        """See engine.base.Engine."""
        self._check_process()
        check_arrays(planes, block_ids)
        memory.gather(planes, block_ids, address)

    def close(self) -> None:
        """See engine.base.Engine. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for batch in list(self._live):
                self._cut(batch, errno.ECANCELED)
            self._work.notify_all()
            self._timer_wake.notify_all()
        end = time.monotonic() + _CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            # Slots that a hung read or a caller still holds keep the ring: freeing it would hand its pages to others.
            if self._ring is not None and not self._lanes.num_taken_slots:
                self._ring.close()
                self._ring = None

    def usage(self) -> dict[str, int]:
        """Queued transfers and slots now; what of the native engines' usage() there is here."""
        with self._lock:
            free_slots = len(self._lanes.free_slots)
            num_slots = self._lanes.num_taken_slots + free_slots
            return {"num_slots": num_slots, "free_slots": free_slots, "queued": len(self._lanes)}

    def flow(self, root: int) -> Flow:
        """See engine.base.Engine."""
        self._check_process()
        check_root(root)
        with self._lock:
            return self._reads[root].flow()

    def hold(self, part: str | None) -> None:
        """For tests: hold the I/O of files whose path contains ``part``, once it counts as submitted; None ends it."""
        with self._lock:
            self._held = part or ""
            self._hold_changed.notify_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise BusyError("this engine belongs to the parent process", hint="open an engine after fork()")

    # Everything below runs with the lock held, unless its name says otherwise.

    def _watch_deadlines(self) -> None:
        if self._timer is None:
            self._timer = threading.Thread(target=self._run_timer, name="rewarm-deadlines", daemon=True)
            self._timer.start()
        self._timer_wake.notify()

    def _run_timer(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                for batch in list(self._live):
                    self._expire(batch, now)
                waits = [at - now for at in (batch.deadline for batch in self._live if not batch.cut) if at is not None]
                self._timer_wake.wait(max(0.0, min(waits)) if waits else None)

    def _expire(self, batch: _Batch, now: float) -> None:
        if batch.deadline is not None and not batch.cut and now >= batch.deadline:
            self._cut(batch, errno.ETIMEDOUT)

    def _cut(self, batch: _Batch, reason: int) -> None:
        """End what is queued and what reads into the ring; the rest ends before its next piece."""
        if batch.cut or not batch.open_count:
            return
        batch.cut = reason
        for index, state in enumerate(batch.states):
            abandoned = state == _RUNNING and _needs_slot(batch.transfers[index])
            if state == _QUEUED or abandoned:
                self._end(batch, index, reason)
        self._lanes.drop(batch)

    def _end(self, batch: _Batch, index: int, result: int) -> None:
        batch.states[index] = _FINAL
        batch.results[index] = result
        batch.open_count -= 1
        if not batch.open_count:
            batch.close()
            self._live.discard(batch)
        batch.ended.append(index)
        if batch.event_fd >= 0:
            os.eventfd_write(batch.event_fd, 1)
        batch.changed.notify_all()

    def _next(self) -> Job[_Batch] | None:
        """The next job; None: no more will come."""
        while True:
            job = self._lanes.take()
            if job is not None:
                job.batch.states[job.index] = _RUNNING
                job.batch.begin_one()
                if isinstance(transfer := job.batch.transfers[job.index], ReadRecord):
                    self._reads[transfer.root].begin()
                return job
            if self._closed:
                return None
            self._work.wait()

    def _free(self, slot: int) -> None:
        self._lanes.free(slot)
        self._work.notify()
        if self._closed and not self._lanes.num_taken_slots and self._ring is not None:
            self._ring.close()
            self._ring = None

    def _run(self) -> None:
        scratch = alloc_aligned(PAGE_BYTES)
        while True:
            with self._lock:
                job = self._next()
                if job is None:
                    return
                batch, index, slot = job.batch, job.index, job.slot
                while self._held and self._held in batch.transfers[index].path:
                    self._hold_changed.wait()
            try:
                result = self._perform(batch, index, slot, scratch.view)
            except Exception:  # noqa: BLE001 - a defect here must end the transfer, not hang its caller
                result = errno.EIO
            with self._lock:
                batch.end_one()
                if isinstance(transfer := batch.transfers[index], ReadRecord):
                    self._reads[transfer.root].end()
                self._lanes.ended(job)
                self._work.notify()
                if batch.states[index] != _FINAL:
                    if batch.states[index] == _RUNNING and isinstance(
                        batch.transfers[index], (Read, Write, ReadRecord)
                    ):
                        result = batch.cut or result
                    if slot >= 0 and not result and _stays_in_slot(batch.transfers[index]):
                        batch.slots[index] = slot
                        slot = -1
                    self._end(batch, index, result)
                    if batch.dropped:
                        self._release_all(batch)
                if slot >= 0:
                    self._free(slot)
            del job, batch

    def _perform(self, batch: _Batch, index: int, slot: int, scratch: memoryview) -> int:
        """One transfer, without the lock."""
        transfer = batch.transfers[index]

        def stop() -> int:
            return batch.cut

        if isinstance(transfer, ReadRecord):

            def moved(num_bytes: int) -> None:
                with self._lock:
                    self._reads[transfer.root].num_bytes += num_bytes

            padded = round_up(transfer.payload_bytes, PAGE_BYTES)
            if isinstance(transfer.target, ToMemory):
                return pure_io.read_record(transfer, scratch, view_at(transfer.target.address, padded), stop, moved)
            address = self.slot_start(slot)
            page, payload = view_at(address, PAGE_BYTES), view_at(address + PAGE_BYTES, padded)
            result = pure_io.read_record(transfer, page, payload, stop, moved)
            if result == 0 and isinstance(transfer.target, ToBlocks):
                return self._deliver(batch, index, address + PAGE_BYTES, transfer.target)
            return result
        if isinstance(transfer, WriteRecord):
            return pure_io.write_record(transfer, scratch, stop)
        if isinstance(transfer, (Read, Write)):
            return pure_io.move_bytes(transfer, stop)
        if isinstance(transfer, Probe):
            return pure_io.probe(transfer.path)
        assert isinstance(transfer, Unlink)
        return pure_io.unlink(transfer.path)

    def _deliver(self, batch: _Batch, index: int, payload_address: int, target: ToBlocks) -> int:
        """Scatter a checked payload, unless the batch was cut meanwhile; a cut from here on waits for the copy."""
        with self._lock:
            if batch.cut:
                return batch.cut
            batch.states[index] = _DELIVERING
        memory.scatter(payload_address, target.planes, target.block_ids, target.skip_blocks)
        return 0

    def slot_start(self, slot: int) -> int:
        """Address of a slot's header page."""
        return self._ring_address + slot * self._slot_bytes

    def _release_all(self, batch: _Batch) -> None:
        for slot in batch.slots.values():
            self._free(slot)
        batch.slots.clear()


class PureCompletion:
    """A batch of the pure engine."""

    def __init__(self, engine: PureEngine, batch: _Batch) -> None:
        self._engine = engine
        self._batch = batch

    def done(self) -> bool:
        """See engine.base.Completion."""
        self._engine._check_process()
        with self._engine._lock:
            self._engine._expire(self._batch, time.monotonic())
            return self._batch.open_count == 0

    def take(self) -> list[tuple[int, int]]:
        """See engine.base.Completion."""
        self._engine._check_process()
        with self._engine._lock:
            batch = self._batch
            self._engine._expire(batch, time.monotonic())
            taken = [(index, batch.results[index]) for index in batch.ended]
            batch.ended.clear()
            if batch.event_fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_read(batch.event_fd)
            return taken

    def results(self) -> list[int]:
        """See engine.base.Completion."""
        if not self.done():
            raise BusyError("the batch is not done", hint="wait() for it first")
        return list(self._batch.results)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See engine.base.Completion."""
        self._engine._check_process()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._engine._lock:
            batch = self._batch
            while True:
                now = time.monotonic()
                self._engine._expire(batch, now)
                if not batch.open_count or (end is not None and now >= end):
                    return not batch.open_count
                limits = [at - now for at in (end, None if batch.cut else batch.deadline) if at is not None]
                batch.changed.wait(min(limits) if limits else None)

    def cancel(self) -> None:
        """See engine.base.Completion."""
        self._engine._check_process()
        with self._engine._lock:
            self._engine._cut(self._batch, errno.ECANCELED)
            while self._batch.open_count:
                self._batch.changed.wait()

    def times(self) -> Times:
        """See engine.base.Completion."""
        self._engine._check_process()
        with self._engine._lock:
            return self._batch.times()

    def fileno(self) -> int:
        """See engine.base.Completion."""
        self._engine._check_process()
        with self._engine._lock:
            batch = self._batch
            if batch.event_fd < 0:
                batch.event_fd = os.eventfd(len(batch.ended), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return batch.event_fd

    def slot_address(self, index: int) -> int:
        """See engine.base.Completion."""
        with self._engine._lock:
            return self._engine.slot_start(self._slot(index)) + PAGE_BYTES

    def release(self, index: int) -> None:
        """See engine.base.Completion."""
        with self._engine._lock:
            slot = self._slot(index)
            del self._batch.slots[index]
            self._engine._free(slot)

    def _slot(self, index: int) -> int:
        if index not in self._batch.slots:
            raise UsageError(f"transfer {index} of this batch holds no ring slot")
        return self._batch.slots[index]

    def __del__(self) -> None:
        batch = getattr(self, "_batch", None)
        if batch is None or os.getpid() != self._engine._pid:
            return
        with self._engine._lock:
            batch.dropped = True
            self._engine._release_all(batch)
            if batch.event_fd >= 0:
                os.close(batch.event_fd)
                batch.event_fd = -1


def _needs_slot(transfer: Transfer) -> bool:
    return isinstance(transfer, ReadRecord) and not isinstance(transfer.target, ToMemory)


def _stays_in_slot(transfer: Transfer) -> bool:
    return isinstance(transfer, ReadRecord) and isinstance(transfer.target, ToSlot)
