"""What one rank keeps open for its KV: the ring, the engine, the volume and the worker over them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from rewarm.engine import Engine, EngineConfig, open_engine
from rewarm.engine.record import record_bytes
from rewarm.engine.workers import num_workers_for, num_workers_in_memory
from rewarm.errors import AdapterError
from rewarm.kv.worker import HostWorker, RankSetup, RankWorker
from rewarm.units import GIB, MIB
from rewarm.volume import Volume
from rewarm.volume.host_tier import with_host_tier

if TYPE_CHECKING:
    from rewarm.config import KvConfig
    from rewarm.kv.planes import PlaneSet
    from rewarm.metrics import Counters
    from rewarm.volume.tiered import AnyVolume

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
        self.ring = _pinned_ring(planes, self.ring_bytes * (2 if kv.host_bytes else 1))
        with ExitStack() as undo:
            self.engine = self._open_engine(kv, num_workers_for(kv.roots), 0)
            undo.callback(self.engine.close)
            self.engines = [self.engine]
            if kv.host_bytes:  # its own workers and ring: what is in memory waits for no device
                self.engines.append(self._open_engine(kv, num_workers_in_memory(), self.ring_bytes))
                undo.callback(self.engines[-1].close)
            self.volume = open_volume(kv, self.engine, counters, janitor=False, host_engine=self.engines[-1])
            undo.callback(self.volume.close)
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
            undo.pop_all()

    def close(self) -> None:
        """Wait a bounded time for stores, then let go of everything."""
        self.worker.close()
        self.volume.close()
        for engine in self.engines:
            engine.close()

    def _open_engine(self, kv: KvConfig, num_workers: int, ring_offset_bytes: int) -> Engine:
        return open_engine(
            EngineConfig(
                kind=kv.engine,
                num_workers=kv.num_workers or num_workers,
                ring_bytes=self.ring_bytes,
                slot_bytes=self.slot_bytes,
                ring_address=self.ring.address + ring_offset_bytes if self.ring else 0,
            )
        )


def open_volume(
    kv: KvConfig, engine: Engine, counters: Counters, *, janitor: bool, host_engine: Engine | None = None
) -> AnyVolume:
    """The configured volume, with the host tier that is configured; raises as Volume.open() and with_host_tier().

    Args:
        kv: Roots and settings.
        engine: For what lies on flash.
        counters: Where this process counts.
        janitor: Start the processes that evict, unless the volume is only read.
        host_engine: For what lies in the host tier; default: the other one.
    """
    flash = Volume.open(
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
    if not kv.host_bytes:
        return flash
    try:
        return with_host_tier(
            flash,
            capacity_bytes=kv.host_bytes,
            place=kv.host_root,
            engine=host_engine or engine,
            counters=counters,
            janitor=janitor,
        )
    except BaseException:
        flash.close()
        raise


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
