"""vLLM's own file system tier under the same faults: its real classes, driven as its tiering manager drives them.

The tier has no header, no eviction and no import, so those faults do not apply to it. Its primary tier is a numpy array
here, and the offloading spec around it carries just the fields that the tier reads.
"""

from __future__ import annotations

import mmap
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from derived import POISON, derived_block
from faultlist import Layout, Record

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_BYTES = 32768
NUM_SLOTS = 16
WAIT_S = 30.0


def _spec(model: str) -> Any:
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("attn",), group_id=0),),
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, world_size=1, is_parallelism_agnostic=False
        ),
        model=SimpleNamespace(name=model, dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=4),
        canonical_layout=False, kv_cache_layout=None, replicated_layout=False, extra_config={},
    )  # fmt: skip
    return SimpleNamespace(config=config, blocks_per_chunk=4, kv_events_config=None)


class FsTier:
    """One tier object on a root, and the primary memory that it moves chunks to and from."""

    layout = Layout(header_bytes=0, used_header_bytes=0, payload_bytes=CHUNK_BYTES, file_bytes=CHUNK_BYTES)

    def __init__(self, root: Path, model: str) -> None:
        self.model = model
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        pages = mmap.mmap(-1, NUM_SLOTS * CHUNK_BYTES)  # aligned, since the tier reads with O_DIRECT where it can
        self.primary = np.frombuffer(pages, dtype=np.uint32).reshape(NUM_SLOTS, -1)
        self.tier = FileSystemTierManager(
            _spec(model), memoryview(self.primary), "fs", str(root), n_read_threads=2, n_write_threads=2
        )
        self._jobs = 0

    @staticmethod
    def key(chunk: bytes) -> Any:
        """The offload key of a chunk."""
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(chunk, 0)

    def path(self, chunk: bytes) -> Path:
        """The file of a chunk."""
        from pathlib import Path

        return Path(self.tier.file_mapper.get_file_name(self.key(chunk)))

    def record(self, chunk: bytes, sibling: bytes, other: FsTier) -> Record:
        """What a fault may touch."""
        return Record(self.path(chunk), self.layout, self.path(sibling), other.path(chunk))

    def store(self, chunks: list[bytes]) -> bool:
        """Store chunks of derived bytes; whether the tier says that it succeeded."""
        for slot, chunk in enumerate(chunks):
            self.primary[slot] = derived_block(chunk, CHUNK_BYTES // 4, self.model)
        return bool(self._run("submit_store", chunks).success)

    def load(self, chunks: list[bytes]) -> tuple[int, int]:
        """Look up and load a prefix: (chunks reported good, of these the ones with a wrong byte)."""
        hits = self._lookup(chunks)
        self.primary.fill(POISON)
        if not hits:
            return 0, 0
        result = self._run("submit_load", chunks[:hits])
        good = hits if result.success else len(result.successful_keys or ())
        want = [derived_block(chunk, CHUNK_BYTES // 4, self.model) for chunk in chunks[:good]]
        wrong = sum(not np.array_equal(self.primary[i], want[i]) for i in range(good))
        return good, wrong

    def _lookup(self, chunks: list[bytes]) -> int:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        self._jobs += 1
        request = ReqContext(req_id=f"lookup{self._jobs}")
        until = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < until:
                answers = [self.tier.lookup(self.key(chunk), request) for chunk in chunks]
                if LookupResult.RETRY not in answers:
                    return next((i for i, a in enumerate(answers) if a is not LookupResult.HIT), len(chunks))
                self.tier.on_schedule_end(ScheduleEndContext((), ()))
                time.sleep(0.0002)
        finally:
            self.tier.on_request_finished(request)
        raise AssertionError(f"waited {WAIT_S} s for the tier's lookup")

    def _run(self, call: str, chunks: list[bytes]) -> Any:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        job = TransferJob(
            self._jobs, [self.key(c) for c in chunks], np.arange(len(chunks)), call == "submit_load", ReqContext("r")
        )
        getattr(self.tier, call)(job)
        self.tier.drain_jobs()
        results = list(self.tier.get_finished_jobs())
        if len(results) != 1:
            raise AssertionError(f"the tier reported {len(results)} jobs, 1 was submitted")
        return results[0]

    def close(self) -> None:
        """Stop the tier's threads."""
        self.tier.shutdown()
