"""The peer: vLLM's own file system tier, its real classes, on the same chunks.

``FileSystemTierManager`` is built with a stand-in for the offloading spec (it reads names and sizes from it, no more)
and with our memory as its primary view, then driven as the scheduler drives it: one job a request, keys in prefix
order. A turn starts at submit_load and ends when the tier has no job in flight. The look-ups that the scheduler makes
before are left out (they would only move the cold inodes out of the time), and so is the copy into the server's KV
blocks that follows. The tier checks no checksum.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rewarm.bench.arms import Shape, Side, Stopwatch, Turn, remove_files
from rewarm.bench.memory import Memory, requests_of
from rewarm.errors import StorageError, UnsupportedError

_TIERING = "vllm.v1.kv_offload.tiering"


class FsTierSide(Side):
    """Drives one FileSystemTierManager a chunk size."""

    def __init__(self, directory: Path, memory: Memory, *, name: str = "vLLM fs tier") -> None:
        """Import vLLM.

        Raises:
            UnsupportedError: vLLM is not installed, or is of a version that has no such tier.
        """
        logging.getLogger("vllm").setLevel(logging.ERROR)
        try:
            self._manager_class: Any = importlib.import_module(f"{_TIERING}.fs.manager").FileSystemTierManager
            self._job_class: Any = importlib.import_module(f"{_TIERING}.base").TransferJob
            self._base: Any = importlib.import_module("vllm.v1.kv_offload.base")
        except (ImportError, AttributeError) as problem:
            raise UnsupportedError(f"vLLM's fs tier is not here: {problem}") from problem
        self.name = name
        self._directory = directory
        self.memory: Memory = memory
        self._tiers: dict[int, Any] = {}
        self._views: list[memoryview] = []
        self._numbers = itertools.count()

    def fill(self, shape: Shape) -> None:
        """Store the shape's chunks, once."""
        if not all(path.exists() for path in self.files(shape)):
            self._store(shape, "kept")

    def files(self, shape: Shape) -> Sequence[Path]:
        """Files of the stored chunks."""
        return self._paths(shape, "kept")

    def load(self, shape: Shape) -> Turn:
        """One load job a request, all submitted at once."""
        tier = self._tier(shape)
        jobs = self._jobs(shape, "kept", first_row=0, is_load=True)
        with Stopwatch().running() as watch:
            for job in jobs:
                tier.submit_load(job)
            tier.drain_jobs()
        self._finish(tier, jobs)
        return Turn(watch.seconds, shape.num_bytes, watch.cpu_s, watch.read_bytes)

    def store(self, shape: Shape) -> Turn:
        """One store job a request, of keys never seen before."""
        label = f"written-{next(self._numbers)}"
        try:
            return self._store(shape, label)
        finally:
            remove_files(self._paths(shape, label))

    def close(self) -> None:
        """Stop the tiers' threads and release the views of the memory."""
        for tier in self._tiers.values():
            tier.shutdown()
        self._tiers.clear()
        for view in self._views:
            with suppress(BufferError):
                view.release()

    def _store(self, shape: Shape, label: str) -> Turn:
        tier = self._tier(shape)
        first_source_row = self.memory.half_bytes // shape.chunk_bytes
        jobs = self._jobs(shape, label, first_row=first_source_row, is_load=False)
        with Stopwatch().running() as watch:
            for job in jobs:
                tier.submit_store(job)
            tier.drain_jobs()
        self._finish(tier, jobs)
        return Turn(watch.seconds, shape.num_bytes, watch.cpu_s, watch.written_bytes)

    def _finish(self, tier: Any, jobs: Sequence[Any]) -> None:
        results = {result.job_id: result.success for result in tier.get_finished_jobs()}
        for job in jobs:
            if not results.get(job.job_id):
                raise StorageError(f"a job of {self.name} failed")
            tier.on_request_finished(job.req_context)

    def _jobs(self, shape: Shape, label: str, *, first_row: int, is_load: bool) -> list[Any]:
        jobs = []
        for chunks in requests_of(shape):
            number = next(self._numbers)
            jobs.append(
                self._job_class(
                    job_id=number,
                    keys=[self._key(shape, label, chunk) for chunk in chunks],
                    chunk_ids=[first_row + chunk for chunk in chunks],
                    is_promotion=is_load,
                    req_context=self._base.ReqContext(req_id=f"bench-{number}"),
                )
            )
        return jobs

    def _key(self, shape: Shape, label: str, chunk: int) -> bytes:
        digest = hashlib.sha256(f"{shape.chunk_bytes} {label} {chunk}".encode()).digest()
        return bytes(self._base.make_offload_key(digest, 0))

    def _paths(self, shape: Shape, label: str) -> list[Path]:
        mapper = self._tier(shape).file_mapper
        keys = (self._key(shape, label, chunk) for chunk in range(shape.num_chunks))
        return [Path(mapper.get_file_name(key)) for key in keys]

    def _tier(self, shape: Shape) -> Any:
        """The tier whose rows are the shape's chunks: a tier has one row size, as a server has one chunk size."""
        if shape.chunk_bytes not in self._tiers:
            view = self.memory.rows(shape.chunk_bytes)
            self._views.append(view)
            self._tiers[shape.chunk_bytes] = self._manager_class(
                offloading_spec=_stand_in_spec(shape.chunk_bytes),
                primary_kv_view=view,
                tier_type="fs",
                root_dir=str(self._directory),
            )
        return self._tiers[shape.chunk_bytes]


def _stand_in_spec(chunk_bytes: int) -> Any:
    """What FileMapper and the tier read of an OffloadingSpec; the model's name keeps chunk sizes apart."""
    parallel = SimpleNamespace(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",), group_id=0),),
        model=SimpleNamespace(name=f"bench-{chunk_bytes}", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
    )
    events = SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=events,
        extra_config={},
        replicated_layout=False,
    )
