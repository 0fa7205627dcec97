"""The worker for KV caches on a device, whichever device torch knows: pinned host memory and side streams.

Load: the engine reads and checks into a pinned ring; a thread copies each good chunk into a staging buffer on the
device and scatters it into the server's blocks, on a side stream that waits for what the server had queued before. Two
lanes take turns, so that one chunk is scattered while the next crosses the host link.

Store: a chunk is gathered on the server's own stream, so before anything that may reuse its blocks; the copy to pinned
memory and the write follow behind.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rewarm.engine.base import ToSlot
from rewarm.errors import UnsupportedError
from rewarm.kv.chunks import LoadOrder, StoreOrder
from rewarm.kv.rows import chunk_rows
from rewarm.kv.worker import CLOSE_WAIT_S, Load, RankSetup, RankWorker, StoreBuffer
from rewarm.volume import Outcome

if TYPE_CHECKING:
    from rewarm.kv.planes import PlaneSet
    from rewarm.volume.tiered import AnyNamespace

PAGE_BYTES = 4096
NUM_LANES = 2
_POLL_MS = 100
"""Longest sleep of the load thread: an engine may find a deadline passed only when it is asked."""

logger = logging.getLogger(__name__)


class PinnedMemory:
    """Page-locked host memory that a device copies from and to without a detour; aligned to 4096."""

    def __init__(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes: How much.
        Raises:
            UnsupportedError: There is not so much that may be locked.
        """
        try:
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            if self._tensor.data_ptr() % PAGE_BYTES:
                padded = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
                self._tensor = padded[-padded.data_ptr() % PAGE_BYTES :][:num_bytes]
        except RuntimeError as error:
            raise UnsupportedError(
                f"{num_bytes} bytes of host memory cannot be locked for the device: {str(error).splitlines()[0]}",
                hint="lower ring_bytes or store_buffer_bytes, or raise the limit on locked memory (ulimit -l)",
            ) from error
        self.address = int(self._tensor.data_ptr())
        self.num_bytes = num_bytes

    def at(self, address: int, num_bytes: int) -> torch.Tensor:
        """The bytes at an address inside, as a tensor."""
        begin = address - self.address
        return self._tensor[begin : begin + num_bytes]


class _Lane:
    """A side stream with a staging buffer of one chunk on the device."""

    def __init__(self, planes: PlaneSet, chunk_blocks: int) -> None:
        self.stream = torch.Stream(planes.device)
        self.staging = torch.empty(planes.block_bytes * chunk_blocks, dtype=torch.uint8, device=planes.device)
        self.copied: torch.Event | None = None
        """Store lanes: the staging buffer may be filled again after it."""


@dataclass(slots=True)
class _Active:
    """A load as the load thread sees it."""

    load: Load
    ready: torch.Event
    """What the server had queued when the load was ordered, and ``where``; blocks may be written after it."""
    where: list[torch.Tensor]
    """Of each chunk, for ChunkRows."""
    num_queued: int = 0
    """Chunks whose copy is under way."""
    last: tuple[torch.Event, torch.Event] | None = None
    """Before and after the scatter of its last chunk."""


class StagedWorker(RankWorker):
    """See the head of this file."""

    def __init__(self, setup: RankSetup, ring: PinnedMemory) -> None:
        """
        Args:
            setup: As for every worker.
            ring: The memory that the engine's ring was made of.
        """
        super().__init__(setup)
        planes = setup.planes
        self._ring = ring
        self._rows = chunk_rows(planes, setup.chunk_blocks)
        self._load_lanes = [_Lane(planes, setup.chunk_blocks) for _ in range(NUM_LANES)]
        self._can_time = self._keeps_time()
        self._store_lanes = [_Lane(planes, setup.chunk_blocks) for _ in range(NUM_LANES)] if setup.may_store else []
        num_slots = max(1, setup.store_buffer_bytes // self._slot_bytes)
        self._memory = PinnedMemory(num_slots * self._slot_bytes) if setup.may_store else None
        self._buffer = StoreBuffer(self._memory.address if self._memory else 0, num_slots, self._slot_bytes)
        self._copies: deque[tuple[torch.Event, _Active, int]] = deque()
        self._incoming: deque[_Active] = deque()
        self._active: list[_Active] = []
        self._cuts: deque[Load] = deque()
        self._num_copied = 0
        self._ended = threading.Event()
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._gathered: queue.SimpleQueue[tuple[AnyNamespace, bytes, int, torch.Event] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_loads, name="rewarm-kv-loads", daemon=True),
            threading.Thread(target=self._run_stores, name="rewarm-kv-stores", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """See RankWorker."""
        if self._is_closing:
            return
        for load in self._loads.values():
            self._cut(load)
        deadline = time.monotonic() + CLOSE_WAIT_S
        self._gathered.put(None)
        self._threads[1].join(CLOSE_WAIT_S)
        while self._buffer.is_used and time.monotonic() < deadline:
            self._reap(self._buffer, deadline - time.monotonic())
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._threads[0].join(max(0.0, deadline - time.monotonic()))

    # The server's thread.

    def _start_load(self, namespace: AnyNamespace, order: LoadOrder, deadline_s: float) -> Load:
        started = time.monotonic()
        handle = namespace.load([(self._key(c.chunk), ToSlot()) for c in order.chunks], deadline_s=deadline_s)
        where = self._rows.locate([c.block_ids for c in order.chunks])
        ready = torch.accelerator.current_stream(self._setup.planes.device).record_event()
        load = Load(order, started, len(order.chunks), handle)
        self._incoming.append(_Active(load, ready, where))
        os.eventfd_write(self._wake_fd, 1)
        return load

    def _cut(self, load: Load) -> None:
        self._cuts.append(load)  # a handle belongs to one thread
        os.eventfd_write(self._wake_fd, 1)

    def _save(self, namespace: AnyNamespace, orders: Sequence[StoreOrder]) -> None:
        assert self._memory is not None
        put_off: list[bytes] = []
        with torch.inference_mode():
            places = self._rows.locate([order.block_ids for order in orders])
            for number, (order, where) in enumerate(zip(orders, places, strict=True)):
                address = self._take_slot(self._buffer)
                if address:
                    copied = self._gather(self._store_lanes[number % NUM_LANES], where, address)
                    self._gathered.put((namespace, order.chunk, address, copied))
                else:
                    put_off.append(order.chunk)
        self._note_put_off(put_off)

    def _gather(self, lane: _Lane, where: torch.Tensor, address: int) -> torch.Event:
        """Queue a chunk's way out of its blocks into pinned memory; after the event it is there."""
        assert self._memory is not None
        current = torch.accelerator.current_stream(self._setup.planes.device)
        if lane.copied is not None:
            current.wait_event(lane.copied)
        self._rows.gather(where, lane.staging)
        lane.stream.wait_event(current.record_event())
        with lane.stream:
            self._memory.at(address, self._setup.payload_bytes).copy_(lane.staging, non_blocking=True)
        lane.copied = lane.stream.record_event()
        return lane.copied

    def _advance(self, wait_s: float) -> None:
        if wait_s > 0 and self._loads:
            self._ended.wait(wait_s)
        self._ended.clear()
        self._reap(self._buffer, 0.0 if self._loads else wait_s)

    # The store thread.

    def _run_stores(self) -> None:
        while (entry := self._gathered.get()) is not None:
            namespace, chunk, address, copied = entry
            copied.synchronize()
            self._buffer.write(namespace.store([(self._key(chunk), address)]), [(chunk, address)])

    # The load thread.

    def _run_loads(self) -> None:
        device = self._setup.planes.device
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)
        with torch.inference_mode():
            while not self._is_closing:
                try:
                    self._move_loads()
                except Exception:  # noqa: PERF203
                    # Without this thread no load would ever end: those under way fail, and are computed.
                    logger.exception("moving KV chunks to the device failed")
                    self._fail_active()

    def _move_loads(self) -> None:
        while self._incoming:
            self._active.append(self._incoming.popleft())
        while self._cuts:
            cut = self._cuts.popleft()
            if cut.handle is not None:
                cut.handle.cancel()
        has_moved = False
        for active in self._active:
            for index in self._take_results(active.load):
                self._copy(active, index)
                has_moved = True
            self._note_end(active)
        while self._copies and self._copies[0][0].query():
            self._retire()
        if has_moved:
            return
        if self._copies:
            self._copies[0][0].synchronize()
            self._retire()
        else:
            self._sleep()

    def _copy(self, active: _Active, index: int) -> None:
        """Queue one checked chunk's way from its ring slot into the server's blocks."""
        handle = active.load.handle
        assert handle is not None
        lane = self._load_lanes[self._num_copied % NUM_LANES]
        self._num_copied += 1
        skip_blocks = active.load.order.chunks[index].skip_blocks
        active.num_queued += 1
        is_timed = self._can_time and active.num_queued == active.load.left
        lane.stream.wait_event(active.ready)
        with lane.stream:
            lane.staging.copy_(self._ring.at(handle.slot_address(index), self._setup.payload_bytes), non_blocking=True)
            copied = self._timed(lane.stream) if is_timed else None
            self._rows.scatter(lane.staging, active.where[index], skip_blocks)
        if copied is None:
            done = lane.stream.record_event()
        else:
            done = self._timed(lane.stream)
            active.last = (copied, done)
        self._copies.append((done, active, index))

    def _timed(self, stream: torch.Stream) -> torch.Event:
        """An event that can tell the time since another one."""
        event = torch.Event(self._setup.planes.device, enable_timing=True)
        stream.record_event(event)
        return event

    def _keeps_time(self) -> bool:
        """Whether the device's events tell times; where they do not, a scatter counts as a copy."""
        try:
            first, second = self._timed(self._load_lanes[0].stream), self._timed(self._load_lanes[0].stream)
            second.synchronize()
            first.elapsed_time(second)
        except (RuntimeError, TypeError, NotImplementedError):
            return False
        return True

    def _retire(self) -> None:
        """The oldest copy has ended: its slot goes back, and its chunk is in place."""
        _, active, index = self._copies.popleft()
        assert active.load.handle is not None
        active.load.handle.release(index)
        active.num_queued -= 1
        if active.load.left == 1:  # told before the server's thread may see that it has ended
            active.load.scatter_s = active.last[0].elapsed_time(active.last[1]) / 1000 if active.last else 0.0
            active.load.placed_at = time.monotonic()
        active.load.left -= 1
        self._note_end(active)

    def _note_end(self, active: _Active) -> None:
        if not active.load.left:
            self._ended.set()
            self._active = [other for other in self._active if other is not active]

    def _sleep(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake_fd, select.POLLIN)
        for active in self._active:
            if active.load.handle is not None:
                waiting.register(active.load.handle.fileno(), select.POLLIN)
        ready = waiting.poll(_POLL_MS if self._active else None)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def _fail_active(self) -> None:
        self._copies.clear()
        for active in self._active:
            if active.load.handle is not None:
                active.load.handle.cancel()
            for index in range(len(active.load.order.chunks)):
                active.load.failed.setdefault(index, Outcome.IO_ERROR)
            active.load.left = 0
            self._note_end(active)
