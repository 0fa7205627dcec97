"""One rank's side of the KV tier: loads into the server's KV blocks, stores out of them.

This file holds what every device has in common, and the worker for KV caches in host memory, where the engine itself
scatters and gathers. ``staged.py`` has the worker for all others. A worker is called by its server's thread only.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rewarm.engine.base import BlockPlanes, Flow, Times, ToBlocks
from rewarm.engine.memory import AlignedBuffer, alloc_aligned
from rewarm.errors import RewarmError
from rewarm.kv.chunks import LoadOrder, LoadTimes, StepOrders, StepReport, StoreOrder
from rewarm.kv.identity import canonical_json, with_layout
from rewarm.kv.keys import shard_key
from rewarm.metrics import LOAD_PARTS
from rewarm.units import MIB, round_up
from rewarm.volume import Outcome

if TYPE_CHECKING:
    from rewarm.engine import Engine
    from rewarm.kv.planes import PlaneSet
    from rewarm.metrics import Counters
    from rewarm.volume import LoadHandle, StoreHandle
    from rewarm.volume.tiered import AnyNamespace, AnyVolume

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0
"""How long close() waits for stores that are under way."""
LOAD_BYTES_A_SECOND = 128 * MIB
"""A load's deadline grows by a second for each of these: the slowest device that is still worth waiting for."""


@dataclass(slots=True)
class Load:
    """A request's load that is under way on this rank."""

    order: LoadOrder
    started: float
    left: int
    """Chunks that are neither in place nor failed."""
    handle: LoadHandle | None = None
    failed: dict[int, Outcome] = field(default_factory=dict)
    """Index of the chunk -> how it ended, where that was not HIT."""
    num_told: int = 0
    """Chunks in place that the scheduler's side knows of."""
    placed_at: float = 0.0
    """When ``left`` came to 0; 0: the engine puts the bytes in place itself, and tells when."""
    scatter_s: float = 0.0
    """Of its last chunk, where the device tells."""
    is_cut: bool = False
    """It was ended on purpose: its chunks are no worse for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a worker is made of."""

    planes: PlaneSet
    chunk_blocks: int
    rank: int
    """The rank that the keys name: the first of those that hold the same bytes."""
    may_store: bool
    """False where another rank stores the same bytes, or the volume is only read."""
    volume: AnyVolume
    engine: Engine
    store_buffer_bytes: int
    load_deadline_s: float
    counters: Counters

    @property
    def payload_bytes(self) -> int:
        """Bytes of one chunk of this rank."""
        return self.planes.block_bytes * self.chunk_blocks


class RankWorker(ABC):
    """See the head of this file. ``start``, ``save``, ``poll`` are called once a step, in this order."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._slot_bytes = round_up(setup.payload_bytes, 4096)
        self._shared_identity = ""
        self._namespace: AnyNamespace | None = None
        self._loads: dict[str, Load] = {}
        self._invalid_blocks: set[int] = set()
        self.failed_requests: set[str] = set()
        """Of those that the last poll() named, the ones whose load is not whole."""
        self._flows: dict[str, Flow] = {}
        """root_id -> what was told of it."""
        self._buffer: StoreBuffer
        self._layout = canonical_json(setup.planes.layout)
        self._report = StepReport(layouts={setup.rank: (self._layout, setup.payload_bytes)})

    def start(self, orders: StepOrders) -> None:
        """Start the loads of a step, end those that are to be cut, and take late stores out of their blocks."""
        self._bind(orders)
        self._report.step = orders.step
        for order in orders.loads:
            self._loads[order.request_id] = self._load(order)
        self._cut_all(orders.cuts)
        self._save_all(orders.late_stores)

    def save(self, orders: StepOrders) -> None:
        """Take the step's stores out of the KV blocks; nothing is read from a block after this returns, or after what
        the device's current stream holds by then.
        """
        self._bind(orders)
        self._save_all(orders.stores)

    def _save_all(self, stores: Sequence[StoreOrder]) -> None:
        if stores and self._setup.may_store:
            if self._namespace is None or self._setup.volume.is_over_budget:
                self._report.dropped.update({order.chunk: 1 for order in stores})
                self._setup.counters.add("rewarm_kv_stores_total", len(stores), "dropped")
            else:
                self._save(self._namespace, stores)

    def poll(self, wait_s: float = 0.0, ended_requests: Iterable[str] = ()) -> set[str]:
        """Requests whose load has ended, well or not, since the last call.

        Args:
            wait_s: Wait up to this long while loads or stores are under way and none has ended.
            ended_requests: Requests that the server gave up; their loads are cut short, and reported like the rest.
        """
        self._cut_all(ended_requests)
        self._advance(wait_s)
        ended = {request_id for request_id, load in self._loads.items() if not load.left}
        self.failed_requests = {request_id for request_id in ended if self._loads[request_id].failed}
        for request_id in ended:
            self._finish(self._loads.pop(request_id))
        return ended

    def take_invalid_blocks(self) -> set[int]:
        """KV blocks whose load failed, since the last call."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> StepReport:
        """What the scheduler's side should know, since the last call."""
        for request_id, load in self._loads.items():
            self._note_placed(request_id, load)
        report, self._report = self._report, StepReport(step=self._report.step)
        report.told_at = time.monotonic()
        report.delivered = self._take_flows()
        report.store_room = self._buffer.num_free
        report.store_stuck_s = self._buffer.stuck_s()
        report.paused = self._setup.volume.paused()
        counters = self._setup.counters
        num_open = sum(load.left for load in self._loads.values())
        counters.set("rewarm_kv_load_queue_bytes", num_open * self._setup.payload_bytes)
        counters.set("rewarm_kv_store_queue_bytes", self._buffer.num_used * self._setup.payload_bytes)
        return report

    def _take_flows(self) -> dict[str, Flow]:
        """root_id -> what it delivered since the last call; roots that had nothing to do are left out."""
        counters = self._setup.counters
        taken = {}
        for number, root in enumerate(self._setup.volume.roots):
            root_id, total = root.file.root_id, self._setup.volume.flow(number)
            flow = total - self._flows.get(root_id, Flow())
            if flow.busy_s > 0:
                self._flows[root_id] = total
                taken[root_id] = flow
                counters.add("rewarm_root_read_bytes_total", flow.num_bytes, root.name)
                counters.add("rewarm_root_read_seconds_total", flow.busy_s, root.name)
        return taken

    @abstractmethod
    def close(self) -> None:
        """Wait a bounded time for stores, end loads, free the buffers. The engine and the volume stay open."""

    @abstractmethod
    def _start_load(self, namespace: AnyNamespace, order: LoadOrder, deadline_s: float) -> Load: ...

    @abstractmethod
    def _save(self, namespace: AnyNamespace, orders: Sequence[StoreOrder]) -> None: ...

    def _cut(self, load: Load) -> None:
        """End a load early: what is not in place yet fails."""
        if load.handle is not None:
            load.handle.cancel()

    @abstractmethod
    def _advance(self, wait_s: float) -> None:
        """Bring loads and stores up to date; wait at most ``wait_s`` for a load, else for a store, to end."""

    def _bind(self, orders: StepOrders) -> None:
        if orders.identity and orders.identity != self._shared_identity:
            self._shared_identity = orders.identity
            identity = with_layout(orders.identity, self._layout)
            try:
                self._namespace = self._setup.volume.namespace(identity, payload_bytes=self._setup.payload_bytes)
            except RewarmError as error:
                logger.warning("Rewarm: nothing is loaded or stored here: %s", error.message)

    def _load(self, order: LoadOrder) -> Load:
        if self._namespace is None:
            failed = dict.fromkeys(range(len(order.chunks)), Outcome.IO_ERROR)
            return Load(order, time.monotonic(), 0, None, failed)
        deadline_s = self._setup.load_deadline_s + len(order.chunks) * self._setup.payload_bytes / LOAD_BYTES_A_SECOND
        return self._start_load(self._namespace, order, deadline_s)

    def _key(self, chunk: bytes) -> bytes:
        return shard_key(chunk, self._setup.rank)

    def _cut_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is not None:
                load.is_cut = True
                self._cut(load)

    def _note_placed(self, request_id: str, load: Load) -> None:
        num_placed = len(load.order.chunks) - load.left - len(load.failed)
        if num_placed > load.num_told:
            placed = self._report.placed
            placed[request_id] = placed.get(request_id, 0) + num_placed - load.num_told
            load.num_told = num_placed

    def _finish(self, load: Load) -> None:
        counters = self._setup.counters
        self._note_placed(load.order.request_id, load)
        if load.failed:
            self._report.short[load.order.request_id] = min(load.failed)
        for index, outcome in load.failed.items():
            chunk = load.order.chunks[index]
            self._invalid_blocks.update(chunk.block_ids)
            if not (load.is_cut and outcome is Outcome.TIMEOUT):
                self._report.failed[chunk.chunk] = max(self._report.failed.get(chunk.chunk, 0), int(outcome))
        num_hits = len(load.order.chunks) - len(load.failed)
        page_bytes = self._setup.planes.block_bytes
        num_blocks = sum(len(c.block_ids) for i, c in enumerate(load.order.chunks) if i not in load.failed)
        counters.add("rewarm_kv_loads_total", num_hits, "hit")
        for outcome in load.failed.values():
            is_cut = load.is_cut and outcome is Outcome.TIMEOUT
            counters.add("rewarm_kv_loads_total", 1, "cut" if is_cut else outcome.name.lower())
        counters.add("rewarm_kv_load_bytes_total", num_blocks * page_bytes)
        self._note_times(load, time.monotonic())

    def _note_times(self, load: Load, now: float) -> None:
        """Tell where the time of a load went."""
        total_s = max(0.0, now - load.started)
        times = load.handle.times() if load.handle is not None else Times()
        engine_s = min(times.total_s, total_s)
        queue_s = min(times.waited_s, engine_s)
        placed_s = max(engine_s, min(load.placed_at - load.started, total_s)) if load.placed_at else engine_s
        scatter_s = min(load.scatter_s, placed_s - engine_s)
        parts = (queue_s, engine_s - queue_s, placed_s - engine_s - scatter_s, scatter_s, total_s - placed_s)
        counters = self._setup.counters
        counters.observe("rewarm_kv_load_seconds", total_s)
        for name, seconds in zip(LOAD_PARTS, parts, strict=True):
            counters.observe("rewarm_kv_load_part_seconds", seconds, name)
        root_bytes: dict[str, int] = {}
        for index in range(len(load.order.chunks)):
            if load.handle is not None and index not in load.failed:
                root_id = self._setup.volume.roots[load.handle.root_of(index)].file.root_id
                root_bytes[root_id] = root_bytes.get(root_id, 0) + self._setup.payload_bytes
        self._report.times[load.order.request_id] = LoadTimes(parts, root_bytes)

    def _take_results(self, load: Load) -> list[int]:
        """Indices of chunks that are delivered since the last call; failed ones are noted in ``load``."""
        delivered = []
        if load.handle is not None:
            for index, outcome in load.handle.take():
                if outcome is Outcome.HIT:
                    delivered.append(index)
                else:
                    load.failed[index] = outcome
                    load.left -= 1
        return delivered

    def _note_stored(self, chunk: bytes, *, is_stored: bool, is_written: bool) -> None:
        counts = self._report.stored if is_stored else self._report.dropped
        counts[chunk] = counts.get(chunk, 0) + 1
        outcome = "stored" if is_written else "skipped" if is_stored else "failed"
        self._setup.counters.add("rewarm_kv_stores_total", 1, outcome)
        self._setup.counters.add("rewarm_kv_store_bytes_total", is_written * self._setup.payload_bytes)

    def _reap(self, buffer: StoreBuffer, wait_s: float) -> None:
        for chunk, handle, is_stored, is_written in buffer.reap(wait_s):
            self._note_stored(chunk, is_stored=is_stored, is_written=is_written)
            if root_id := handle.elsewhere.get(self._key(chunk)):
                self._report.elsewhere[self._key(chunk)] = root_id

    def _take_slot(self, buffer: StoreBuffer) -> int:
        """Address of a slot for one payload; 0: none is free, and the step does not wait for one."""
        address = buffer.take()
        if not address:
            self._reap(buffer, 0.0)
            address = buffer.take()
        return address

    def _note_put_off(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            self._setup.counters.add("rewarm_kv_stores_put_off_total")
            self._report.put_off[chunk] = self._report.put_off.get(chunk, 0) + 1


@dataclass(slots=True)
class _Writes:
    """Writes that were handed over together."""

    handle: StoreHandle
    staged: list[tuple[bytes, int]]
    """Chunk id and slot of each."""
    left: int
    """How many have not ended."""


class StoreBuffer:
    """Host memory in slots of one payload each, and the writes that are under way out of them. Thread-safe."""

    def __init__(
        self, address: int, num_slots: int, slot_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._free = [address + slot * slot_bytes for slot in reversed(range(num_slots))]
        self._num_slots = num_slots
        self._writes: deque[_Writes] = deque()
        self._got_on = 0.0
        """When a write ended last, or began to be the only one."""

    def take(self) -> int:
        """Address of a free slot; 0: none is free."""
        with self._lock:
            return self._free.pop() if self._free else 0

    def write(self, handle: StoreHandle, staged: list[tuple[bytes, int]]) -> None:
        """Note a write of ``staged`` (chunk id, slot); the slots come back when it ends."""
        with self._lock:
            if not self._writes:
                self._got_on = self._clock()
            self._writes.append(_Writes(handle, staged, len(staged)))

    def reap(self, wait_s: float = 0.0) -> list[tuple[bytes, StoreHandle, bool, bool]]:
        """(chunk id, handle, whether it is in the volume now, whether that was written) of writes that have ended.

        Waits at most ``wait_s`` for the oldest.
        """
        with self._lock:
            oldest = self._writes[0].handle if self._writes else None
        if wait_s > 0 and oldest is not None:
            oldest.wait(wait_s)
        ended = []
        with self._lock:
            for writes in self._writes:
                for index, is_stored, is_written in writes.handle.take():
                    chunk, address = writes.staged[index]
                    self._free.append(address)
                    ended.append((chunk, writes.handle, is_stored, is_written))
                    writes.left -= 1
            if ended:
                self._got_on = self._clock()
                self._writes = deque(writes for writes in self._writes if writes.left)
        return ended

    def stuck_s(self) -> float:
        """Seconds in which none of the writes that are under way has ended, as far as reap() saw; 0: there is none."""
        with self._lock:
            return self._clock() - self._got_on if self._writes else 0.0

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        with self._lock:
            return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that are taken."""
        return self._num_slots - self.num_free

    @property
    def is_used(self) -> bool:
        """Whether any slot is taken."""
        return self.num_used > 0


class HostWorker(RankWorker):
    """For KV caches in host memory with pages of one size: no copy but the engine's own, no thread here."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        addresses = array("Q", [plane.words.data_ptr() for plane in setup.planes.planes])
        self._block_planes = BlockPlanes(addresses, setup.planes.page_bytes)
        num_slots = max(1, setup.store_buffer_bytes // self._slot_bytes)
        self._memory: AlignedBuffer = alloc_aligned(num_slots * self._slot_bytes)
        self._buffer = StoreBuffer(self._memory.address, num_slots, self._slot_bytes)

    def close(self) -> None:
        """See RankWorker."""
        for load in self._loads.values():
            self._cut(load)
        deadline = time.monotonic() + CLOSE_WAIT_S
        while self._buffer.is_used and time.monotonic() < deadline:
            self._reap(self._buffer, deadline - time.monotonic())
        if not self._buffer.is_used:
            self._memory.close()

    def _start_load(self, namespace: AnyNamespace, order: LoadOrder, deadline_s: float) -> Load:
        targets = [
            (self._key(chunk.chunk), ToBlocks(self._block_planes, chunk.block_ids, chunk.skip_blocks))
            for chunk in order.chunks
        ]
        started = time.monotonic()
        return Load(order, started, len(order.chunks), namespace.load(targets, deadline_s=deadline_s))

    def _advance(self, wait_s: float) -> None:
        oldest = next(iter(self._loads.values()), None)
        if wait_s > 0 and oldest is not None and oldest.handle is not None:
            oldest.handle.wait(wait_s)
        for load in self._loads.values():
            num_delivered = len(self._take_results(load))  # first: it counts failed ones off
            load.left -= num_delivered
        self._reap(self._buffer, 0.0 if oldest is not None else wait_s)

    def _save(self, namespace: AnyNamespace, orders: Sequence[StoreOrder]) -> None:
        staged: list[tuple[bytes, int]] = []
        put_off: list[bytes] = []
        for order in orders:
            address = self._take_slot(self._buffer)
            if not address:
                put_off.append(order.chunk)
                continue
            self._setup.engine.gather(self._block_planes, order.block_ids, address)
            staged.append((order.chunk, address))
        if staged:
            handle = namespace.store([(self._key(chunk), address) for chunk, address in staged])
            self._buffer.write(handle, staged)
        self._note_put_off(put_off)
