"""One rank's side of the connector: from vLLM's KV cache tensors and configuration to a worker of rewarm.kv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rewarm.adapters.vllm import describe
from rewarm.engine import Engine, EngineConfig, open_engine
from rewarm.engine.record import record_bytes
from rewarm.engine.workers import num_workers_for
from rewarm.errors import AdapterError
from rewarm.kv.planes import PlaneSet, find_planes
from rewarm.kv.worker import HostWorker, RankSetup, RankWorker
from rewarm.units import GIB, MIB
from rewarm.volume import Volume

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rewarm.config import KvConfig
    from rewarm.metrics import Counters

MIN_STORE_BUFFER_BYTES = 64 * MIB
MAX_STORE_BUFFER_BYTES = 2 * GIB


class RankSide:
    """The worker of one rank, with the engine and the volume that are its own."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv: KvConfig,
        counters: Counters,
        kv_caches: Mapping[str, Any],
    ) -> None:
        """
        Args:
            config: The server's configuration, as this rank has it.
            kv_cache_config: The server's KV cache.
            kv: Rewarm's configuration.
            counters: Where this rank counts.
            kv_caches: What vLLM registers: layer name to tensor or tensors.
        Raises:
            AdapterError: A KV cache layout that cannot be served.
            StorageError, UsageError: The volume cannot be opened.
        """
        planes = find_planes(kv_caches, int(kv_cache_config.num_blocks))
        chunk_tokens = describe.chunk_tokens(config, kv_cache_config, kv.chunk_tokens)
        chunk_blocks = chunk_tokens // describe.block_tokens(config, kv_cache_config)
        payload_bytes = planes.block_bytes * chunk_blocks
        rank = int(config.parallel_config.rank)
        holder = describe.holder_rank(config, rank)
        slot_bytes = record_bytes(payload_bytes)
        ring_bytes = max(kv.ring_bytes // slot_bytes, 2) * slot_bytes
        ring = _pinned_ring(planes, ring_bytes)
        self.engine: Engine = open_engine(
            EngineConfig(
                kind=kv.engine,
                num_workers=kv.num_workers or num_workers_for(kv.roots),
                ring_bytes=ring_bytes,
                slot_bytes=slot_bytes,
                ring_address=ring.address if ring else 0,
            )
        )
        self.volume = open_volume(kv, self.engine, counters, janitor=False)
        setup = RankSetup(
            planes=planes,
            chunk_blocks=chunk_blocks,
            rank=holder,
            may_store=not kv.read_only and rank == holder,
            volume=self.volume,
            engine=self.engine,
            store_buffer_bytes=kv.store_buffer_bytes or _step_bytes(config, chunk_tokens, payload_bytes),
            load_deadline_s=kv.load_deadline_s,
            counters=counters,
        )
        self.worker: RankWorker
        if ring is None:
            self.worker = HostWorker(setup)
        else:
            from rewarm.kv.staged import StagedWorker

            self.worker = StagedWorker(setup, ring)

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


def _step_bytes(config: VllmConfig, chunk_tokens: int, payload_bytes: int) -> int:
    """What one step of the server can compute, and so ask to have stored at once, within bounds."""
    num_chunks = int(config.scheduler_config.max_num_batched_tokens) // chunk_tokens + 2
    return max(MIN_STORE_BUFFER_BYTES, min(num_chunks * payload_bytes, MAX_STORE_BUFFER_BYTES))
