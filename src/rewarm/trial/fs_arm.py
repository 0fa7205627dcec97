"""vLLM's own tier on a directory, made to run as the peer arm; the server imports this module, the trial does not.

Two small additions, nothing of the tier itself:

CpuTieringSpec   vLLM refuses its offload on the CPU platform in one place, the copies between its KV tensors and the
                 host tier. Here they are plain memory moves; scheduler, host tier and files are vLLM's own.
PacedFsTier      holds the result of a read back until a link of a given bandwidth would have carried it, one job
                 after another. The limit stands in a file, so that one server serves limited and unlimited blocks.

Written for and tried with vLLM 0.32.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _MemoryMoves(OffloadingWorker):  # type: ignore[misc]
    """Copies between the KV tensors and the host tier, done when the call returns. One group of KV caches."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        if len(kv_caches.group_data_refs) != 1:
            raise NotImplementedError("the peer arm on CPU serves models with one kind of KV cache")
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._finished: list[Any] = []
        self._layers = []
        for cache, ref in zip(kv_caches.tensors, kv_caches.group_data_refs[0], strict=True):
            host = region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            self._layers.append((cache.tensor, host, ref.page_size_bytes))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, to_host=False)

    def _move(self, job_id: int, kv_spec: Any, host_spec: Any, *, to_host: bool) -> bool:
        begin = time.monotonic()
        num_blocks = len(kv_spec.block_ids)
        skip = kv_spec.block_indices[0] % self._blocks_per_chunk
        kv_at: Any = np.empty(num_blocks, np.uint64)
        host_at: Any = np.empty(num_blocks, np.uint64)
        moved = 0
        for kv, host, num_bytes in self._layers:
            compute_sub_block_ptrs(kv_spec.block_ids, 1, kv_at, kv)
            compute_sub_block_ptrs(host_spec.block_ids, self._blocks_per_chunk, host_at, host, skip)
            source, target = (kv_at, host_at) if to_host else (host_at, kv_at)
            for at, to in zip(source.tolist(), target.tolist(), strict=True):
                ctypes.memmove(to, at, num_bytes)
            moved += num_blocks * num_bytes
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - begin))
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is done already."""

    def shutdown(self) -> None:
        self._layers.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with memory moves for copies."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _MemoryMoves(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class PacedFsTier(FileSystemTierManager):  # type: ignore[misc]
    """vLLM's tier on a directory, its reads held to the bytes a second that stand in ``limit_file``; 0: no limit."""

    def __init__(self, *args: Any, limit_file: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit_file = Path(limit_file)
        self._link_free_at = 0.0
        self._due: dict[int, float] = {}
        self._held: list[Any] = []

    def submit_load(self, job_metadata: Any) -> None:
        bytes_per_s = float(self._limit_file.read_text(encoding="ascii"))
        if bytes_per_s:
            begin = max(self._link_free_at, time.monotonic())
            self._link_free_at = begin + len(job_metadata.keys) * self._block_size / bytes_per_s
            self._due[job_metadata.job_id] = self._link_free_at
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        now = time.monotonic()
        jobs = [*self._held, *super().get_finished_jobs()]
        self._held = [job for job in jobs if self._due.get(job.job_id, 0.0) > now]
        ready = [job for job in jobs if self._due.get(job.job_id, 0.0) <= now]
        for job in ready:
            self._due.pop(job.job_id, None)
        return ready
