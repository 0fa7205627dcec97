"""What one rank keeps open for its KV: the ring, the engine, the volume and the worker over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from rewarm.engine import Engine, EngineConfig, open_engine
from rewarm.engine.record import record_bytes
from rewarm.engine.workers import num_workers_for
from rewarm.errors import AdapterError
from rewarm.kv.worker import HostWorker, RankSetup, RankWorker
from rewarm.units import GIB, MIB
from rewarm.volume import Volume

if TYPE_CHECKING:
    from rewarm.config import KvConfig
    from rewarm.kv.planes import PlaneSet
    from rewarm.metrics import Counters

MIN_STORE_BUFFER_BYTES = 64 * MIB
MAX_STORE_BUFFER_BYTES = 2 * GIB

MakeWorker: TypeAlias = "Callable[[RankSetup, Any], RankWorker]"
"""A worker from its setup and its pinned ring, which is None for a KV cache in host memory."""


def make_worker(setup: RankSetup, ring: Any) -> RankWorker:
    """The worker for where the KV cache lies."""
    if ring is None:
        return HostWorker(setup)
    from rewarm.kv.staged import StagedWorker

    return StagedWorker(setup, ring)


class RankSide:
    """The worker of one rank, with the engine and the volume that are its own."""

    def __init__(
        self,
        planes: PlaneSet,
        chunk_blocks: int,
        kv: KvConfig,
        counters: Counters,
        *,
        rank: int,
        may_store: bool,
        step_bytes: int,
        worker: MakeWorker = make_worker,
    ) -> None:
        """
        Args:
            planes: Where the rank's KV lies.
            chunk_blocks: KV blocks in a record.
            kv: Roots and settings.
            counters: Where this rank counts.
            rank: The rank that the keys name.
            may_store: False where another rank stores the same bytes.
            step_bytes: What one step of the server may ask to have stored, for the store buffer.
            worker: What makes the worker.
        Raises:
            AdapterError: Planes that cannot be served.
            UnsupportedError: Too little memory that may be locked, or an engine that is not here.
            StorageError, UsageError: The volume cannot be opened.
        """
        self.slot_bytes = record_bytes(planes.block_bytes * chunk_blocks)
        self.ring_bytes = max(kv.ring_bytes // self.slot_bytes, 2) * self.slot_bytes
        self.ring = _pinned_ring(planes, self.ring_bytes)
        self.engine = open_engine(
            EngineConfig(
                kind=kv.engine,
                num_workers=kv.num_workers or num_workers_for(kv.roots),
                ring_bytes=self.ring_bytes,
                slot_bytes=self.slot_bytes,
                ring_address=self.ring.address if self.ring else 0,
            )
        )
        self.volume = open_volume(kv, self.engine, counters, janitor=False)
        self.setup = RankSetup(
            planes=planes,
            chunk_blocks=chunk_blocks,
            rank=rank,
            may_store=may_store and not kv.read_only,
            volume=self.volume,
            engine=self.engine,
            store_buffer_bytes=kv.store_buffer_bytes
            or max(MIN_STORE_BUFFER_BYTES, min(step_bytes, MAX_STORE_BUFFER_BYTES)),
            load_deadline_s=kv.load_deadline_s,
            counters=counters,
        )
        self.worker = worker(self.setup, self.ring)

    def close(self) -> None:
        """Wait a bounded time for stores, then let go of everything."""
        self.worker.close()
        self.volume.close()
        self.engine.close()


def open_volume(kv: KvConfig, engine: Engine, counters: Counters, *, janitor: bool) -> Volume:
    """The configured volume; raises as Volume.open()."""
    return Volume.open(
        kv.roots,
        engine=engine,
        counters=counters,
        read_only=kv.read_only,
        durable=kv.durable,
        janitor=janitor and not kv.read_only,
        may_be_away=True,
        store_bytes_per_day=kv.store_bytes_per_day,
        rated_dwpd=kv.dwpd,
    )


def _pinned_ring(planes: PlaneSet, ring_bytes: int) -> Any:
    """The engine's ring for a KV cache on a device; None where the KV cache is host memory, which needs no detour."""
    if planes.device.type != "cpu":
        from rewarm.kv.staged import PinnedMemory

        return PinnedMemory(ring_bytes)
    if not planes.page_bytes:
        raise AdapterError(
            "this model's layers keep pages of different sizes in host memory, which is not served yet",
            hint="run this model without --kv-transfer-config",
        )
    return None
