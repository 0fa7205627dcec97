"""What is measured of a rank: the plain copies that nothing can beat, each step of a load alone, loads, stores."""

from __future__ import annotations

import hashlib
import select
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rewarm.bench.device_marks import MarkedWorker, make_marked
from rewarm.engine.base import ToSlot
from rewarm.errors import StorageError
from rewarm.kv.chunks import ChunkLoad, LoadOrder, StepOrders, StoreOrder
from rewarm.kv.identity import canonical_json, with_layout
from rewarm.kv.keys import shard_key
from rewarm.kv.rank import RankSide
from rewarm.kv.rows import chunk_rows
from rewarm.metrics import Counters
from rewarm.units import GIB, round_up
from rewarm.volume import Outcome
from rewarm.volume.evict import purge
from rewarm.volume.tiered import AnyNamespace

if TYPE_CHECKING:
    from rewarm.bench.device_cache import KvCache
    from rewarm.config import KvConfig

_POLL_S = 0.005
_STORE_POLL_S = 0.0005
_STALL_S = 60.0
"""Without a chunk stored in so long, something is wrong with the device below the volume."""
_FILLED, _WRITTEN = "filled", "written"


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """Loads that were started together; times in ms from their start."""

    returned: float
    """The call that started them returned to the server."""
    ended: list[float]
    """Each request, in the order in which they ended."""
    marks: dict[str, float]
    """first_read, last_read, in_place and queueing; empty in host memory."""


class DeviceRank:
    """A rank of a server without the server: its KV cache, its worker, and a volume."""

    def __init__(self, cache: KvCache, kv: KvConfig, *, request_blocks: int, chunk_blocks: int) -> None:
        """
        Args:
            cache: The KV cache.
            kv: Root and settings; a volume is there.
            request_blocks: KV blocks of a request.
            chunk_blocks: KV blocks of a record.
        Raises:
            UnsupportedError, StorageError, UsageError: As RankSide.
        """
        self.cache = cache
        self.device = cache.planes.device
        self.payload_bytes = cache.planes.block_bytes * chunk_blocks
        self.num_chunks = request_blocks // chunk_blocks
        self.request_bytes = self.num_chunks * self.payload_bytes
        self._chunk_blocks = chunk_blocks
        self._roots = kv.roots
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)
        begin = time.perf_counter()
        self.side = RankSide(
            cache.planes,
            chunk_blocks,
            kv,
            Counters(),
            rank=0,
            may_store=True,
            step_bytes=self.request_bytes,
            worker=make_marked,
        )
        self.open_s = time.perf_counter() - begin
        """Most of it is locking memory for the device."""
        self.rows = chunk_rows(cache.planes, chunk_blocks)
        self._staging = torch.zeros(self.payload_bytes, dtype=torch.uint8, device=self.device)
        self._host = self._host_memory()
        self._num_host = self.side.ring_bytes // self.side.slot_bytes

    @property
    def device_name(self) -> str:
        """What the device calls itself; ``cpu`` for host memory."""
        if self.device.type == "cpu":
            return "cpu"
        return str(torch.get_device_module(self.device).get_device_name(self.device))

    def close(self) -> None:
        """See RankSide."""
        self.side.close()

    def record_files(self) -> list[Path]:
        """Those of the requests that fill() stored."""
        return sorted(Path(self._roots[0], self._namespace(_FILLED).id.hex()).rglob("*.rec"))

    # Floors.

    def link_in_ms(self, num_chunks: int) -> float:
        """Plain copies of so many chunks from the ring to the device; in host memory, within it."""
        return self._timed(lambda number: self._staging.copy_(self._host_chunk(number), non_blocking=True), num_chunks)

    def link_out_ms(self, num_chunks: int) -> float:
        """The same in the other direction."""
        return self._timed(lambda number: self._host_chunk(number).copy_(self._staging, non_blocking=True), num_chunks)

    def warm_up(self) -> None:
        """What is done for the first time is not what is measured."""
        self.link_in_ms(self.num_chunks)
        self.link_out_ms(self.num_chunks)
        self.scatter_ms(0)

    # Steps alone.

    def read_ms(self, request: int) -> float:
        """Records read and checked into the ring, each slot given back at once."""
        targets = [(shard_key(chunk, 0), ToSlot()) for chunk in self._chunks(_FILLED, request)]
        deadline_s = self.side.setup.load_deadline_s
        begin = time.perf_counter()
        handle = self._namespace(_FILLED).load(targets, deadline_s=deadline_s)
        ready = select.poll()
        ready.register(handle.fileno(), select.POLLIN)
        left = len(targets)
        while left:
            for index, outcome in handle.take():
                if outcome is not Outcome.HIT:
                    handle.cancel()
                    raise self._failed(f"a record was not read: {outcome.name}")
                handle.release(index)
                left -= 1
            if left:
                ready.poll(_POLL_S * 1000)
        return (time.perf_counter() - begin) * 1000

    def scatter_ms(self, request: int) -> float:
        """Chunks that are on the device already into their blocks, whose bytes are lost."""
        where = self.rows.locate([blocks for _, blocks in self._parts(_FILLED, request)])
        return self._timed(lambda number: self.rows.scatter(self._staging, where[number], 0), len(where))

    # All of it.

    def load(self, requests: Sequence[int]) -> LoadTurn:
        """Requests that were filled, loaded at once into the blocks where the cache has them now."""
        worker = self.side.worker
        marks = worker.marks if isinstance(worker, MarkedWorker) else None
        loads = [
            LoadOrder(str(request), [ChunkLoad(chunk, blocks) for chunk, blocks in self._parts(_FILLED, request)])
            for request in requests
        ]
        self._synchronize()
        if marks:
            marks.clear()
        begin = time.perf_counter()
        worker.start(StepOrders(loads=loads, identity=_identity(_FILLED)))
        returned = time.perf_counter()
        ended: list[float] = []
        while len(ended) < len(requests):
            now_ended = worker.poll(_POLL_S)
            ended += [(time.perf_counter() - begin) * 1000] * len(now_ended)
        if worker.take_invalid_blocks():
            outcomes = sorted({Outcome(outcome).name for outcome in worker.take_report().failed.values()})
            raise self._failed(f"chunks were not loaded: {', '.join(outcomes)}")
        found = {}
        if marks:
            found = {name: (getattr(marks, name) - begin) * 1000 for name in ("first_read", "last_read", "in_place")}
            found["queueing"] = marks.queueing_s * 1000
        return LoadTurn((returned - begin) * 1000, ended, found)

    def fill(self, request: int) -> float:
        """Store a request for load(); GiB/s."""
        return self._store(_FILLED, request)

    def store_gib_s(self, request: int) -> float:
        """Store a request from its blocks under new names, which are removed again."""
        try:
            return self._store(_WRITTEN, request)
        finally:
            purge(self._roots, [self._namespace(_WRITTEN).id])

    def _store(self, name: str, request: int) -> float:
        """As many chunks at once as the store buffer takes: gathered, copied out, written."""
        worker, setup = self.side.worker, self.side.setup
        waiting = dict(self._parts(name, request))
        num_slots = max(1, setup.store_buffer_bytes // round_up(self.payload_bytes, 4096))
        under_way: dict[bytes, StoreOrder] = {}
        self._synchronize()
        begin = last = time.perf_counter()
        while waiting or under_way:
            now = list(waiting)[: num_slots - len(under_way)]
            orders = {chunk: StoreOrder(chunk, waiting.pop(chunk)) for chunk in now}
            step = StepOrders(stores=list(orders.values()), identity=_identity(name))
            worker.start(step)
            worker.save(step)
            under_way |= orders
            worker.poll()
            report = worker.take_report()
            if report.dropped or time.perf_counter() > last + _STALL_S:
                raise self._failed("chunks were not stored")
            if report.stored:
                last = time.perf_counter()
            for chunk in report.put_off:
                waiting[chunk] = under_way.pop(chunk).block_ids
            for chunk in report.stored:
                del under_way[chunk]
            if not report.stored:
                time.sleep(_STORE_POLL_S)
        return self.request_bytes / GIB / (time.perf_counter() - begin)

    # Names and places.

    def _chunks(self, name: str, request: int) -> list[bytes]:
        return [hashlib.sha256(f"{name} {request} {i}".encode()).digest() for i in range(self.num_chunks)]

    def _parts(self, name: str, request: int) -> list[tuple[bytes, array[int]]]:
        """Chunk ids of a request, and the blocks of each."""
        size = self._chunk_blocks
        chunks = enumerate(self._chunks(name, request))
        return [(chunk, self.cache.blocks(request, number * size, size)) for number, chunk in chunks]

    def _namespace(self, name: str) -> AnyNamespace:
        identity = with_layout(_identity(name), canonical_json(self.cache.planes.layout))
        return self.side.volume.namespace(identity, payload_bytes=self.payload_bytes)

    # Clocks and memory.

    def _timed(self, queue_one: Callable[[int], object], count: int) -> float:
        self._synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            for number in range(count):
                queue_one(number)
        self._synchronize()
        return (time.perf_counter() - begin) * 1000

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _host_memory(self) -> Callable[[int, int], torch.Tensor]:
        if self.side.ring is not None:
            ring = self.side.ring
            return lambda begin, num_bytes: ring.at(ring.address + begin, num_bytes)
        memory = torch.zeros(self.side.ring_bytes, dtype=torch.uint8)
        return lambda begin, num_bytes: memory[begin : begin + num_bytes]

    def _host_chunk(self, number: int) -> torch.Tensor:
        """Memory of a chunk in the ring, or as large as the ring: one after the other, as loads use it."""
        return self._host(number % self._num_host * self.side.slot_bytes, self.payload_bytes)

    def _failed(self, what: str) -> StorageError:
        return StorageError(what, path=self._roots[0], hint="see the kernel's log of the device below it")


def _identity(name: str) -> str:
    return canonical_json({"kind": "bench device", "stage": name})
