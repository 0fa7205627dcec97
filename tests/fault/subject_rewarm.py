"""Rewarm in vLLM as a subject: RewarmConnector's scheduler and worker halves below vLLM's own scheduler.

Each life of the server would start a janitor of its own. Here one janitor process serves all lives on a root, as that
of another server on the node would, and is started where a root may be full: what the campaign restarts thousands of
times is the server, not Python.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import Outcome
from faultlist import Layout, Record
from headerpage import USED_BYTES
from mini_server import (
    BLOCK_TOKENS,
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    HEAD_SIZE,
    NUM_KV_HEADS,
    NUM_LAYERS,
    MiniServer,
    Served,
    make_vllm_config,
    write_tiny_model,
)
from subject_volume import CAPACITY, LOAD_DEADLINE_S, WAIT_S, VolumeSubject

from rewarm.engine.record import PAGE_BYTES, record_bytes
from rewarm.kv.keys import chunk_id, shard_key
from rewarm.volume import create_volume
from rewarm.volume.layout import RootPaths, namespace_ids

if TYPE_CHECKING:
    import random

    from zygote import Job

for _name in ("config.device", "distributed.kv_transfer.kv_connector.factory", "forward_context", "utils.hashing",
              "model_executor.models.config", "v1.attention.backends.utils", "v1.core.sched.scheduler",
              "v1.executor.uniproc_executor", "v1.outputs", "v1.request", "v1.structured_output"):  # fmt: skip
    importlib.import_module(f"vllm.{_name}")
importlib.import_module("rewarm.adapters.vllm.connector")  # all of them now, so that forked children need not

NUM_BLOCKS = 64
PAYLOAD = NUM_LAYERS * CHUNK_BLOCKS * 2 * NUM_KV_HEADS * BLOCK_TOKENS * HEAD_SIZE * 4
SESSIONS_A_SERVER = 2
"""One of the scheduler's half, one of the rank."""


class Server:
    """One life of a server, in the tokens and chunks that the campaign speaks of."""

    def __init__(self, config: Any, model: str) -> None:
        self.mini = MiniServer(config, NUM_BLOCKS, model)
        self.scheduler = self.mini.scheduler.connector
        self.counters = self.mini.worker._counters
        # What a case expects must not hang on how soon the scan of this life has ended.
        self.mini.drain(lambda: self.scheduler._scheduler._presence is not None, "the rank's layout")
        assert self.scheduler._volume.wait_scanned(WAIT_S)

    def serve(self, prompt: list[int]) -> Served:
        """Serve a prompt and wait until its stores are written or given up."""
        self.mini.forget_device_cache()
        (served,) = self.mini.run([prompt], until=lambda: not self.scheduler._scheduler._stores)
        return served

    def counted(self, what: str, root: str) -> int:
        """A counter of the rank."""
        return int(self.counters.value(f"rewarm_{what}_total", root))

    def block_hashes(self, prompt: list[int]) -> list[bytes]:
        """As vLLM hashes the prompt's blocks."""
        return [bytes(block_hash) for block_hash in self.mini.make_request(prompt).block_hashes]

    def record_path(self, prompt: list[int], chunk: int) -> str:
        """Below which name, in any root and namespace, a chunk lies."""
        return shard_key(chunk_id(self.block_hashes(prompt)[(chunk + 1) * CHUNK_BLOCKS - 1]), rank=0).hex() + ".rec"

    def close(self) -> None:
        """The end of the process."""
        self.mini.close()


class RewarmSubject(VolumeSubject):
    """One server at a time on the root; a stranger with other weights now and then."""

    stores_what_it_computes = True
    num_sessions = SESSIONS_A_SERVER

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind)
        self.name = f"rewarm in vLLM, {kind} engine"
        self.layout = Layout(PAGE_BYTES, USED_BYTES, PAYLOAD, record_bytes(PAYLOAD))
        self.folder = folder

    def twin(self) -> RewarmSubject:
        """Another one, for a root of its own."""
        return RewarmSubject(self.kind, self.folder)

    def begin(self, root: Path) -> None:
        """Make a volume and start a server."""
        self.root = root
        create_volume([str(root)], capacity_bytes=CAPACITY)
        self.janitor = None
        self.config = make_config(self.folder, root, self.kind, "model")
        self.server = Server(self.config, "model")

    def end(self) -> None:
        """Stop all."""
        self.server.close()
        if self.janitor:
            self.janitor.close()

    def reopen(self) -> None:
        """A restart."""
        self.server.close()
        self.server = Server(self.config, "model")

    def prompt(self, rng: random.Random) -> list[int]:
        """Tokens of 2 to 5 chunks, and one more, which the server always computes."""
        return [rng.randrange(3, 500) for _ in range(rng.randint(2, 5) * CHUNK_TOKENS + 1)]

    def chunks(self, prompt: list[int]) -> int:
        """Chunks of a prompt."""
        return len(prompt) // CHUNK_TOKENS

    def store(self, prompt: list[int]) -> None:
        """Serve it."""
        served = self.server.serve(prompt)
        assert not served.wrong_blocks, f"{served.wrong_blocks} wrong blocks served before a store"

    def store_as_stranger(self, prompt: list[int]) -> None:
        """A server of a model with other weights serves it."""
        stranger = Server(make_config(self.folder, self.root, self.kind, "other"), "other")
        stranger.serve(prompt)
        stranger.close()

    def load(self, prompt: list[int]) -> Outcome:
        """Serve it with nothing in the device's cache."""
        root = str(self.root)
        damaged, errors = self.server.counted("damaged_records", root), self.server.counted("io_errors", root)
        served = self.server.serve(prompt)
        return Outcome(
            served.good_blocks // CHUNK_BLOCKS,
            served.wrong_blocks,
            self.server.counted("damaged_records", root) - damaged,
            self.server.counted("io_errors", root) - errors,
        )

    def record(self, prompt: list[int], index: int, sibling: int) -> Record:
        """The file of a chunk."""
        hashes = self.server.block_hashes(prompt)
        paths = RootPaths(str(self.root))

        def path(chunk: int, *, mine: bool) -> Path:
            key = shard_key(chunk_id(hashes[(chunk + 1) * CHUNK_BLOCKS - 1]), rank=0)
            found = [Path(paths.record(namespace, key)) for namespace in namespace_ids(str(self.root))]
            own = [p for p in found if (self._is_mine(p)) == mine]
            return own[0] if own else self.root / "nowhere"

        return Record(path(index, mine=True), self.layout, path(sibling, mine=True), path(index, mine=False))

    def _is_mine(self, path: Path) -> bool:
        presence = self.server.scheduler._scheduler._presence
        return bool(presence._shards[0].namespace.id.hex() == path.parts[-3])

    def job(self, name: str, prompt: list[int]) -> tuple[Job, tuple[Any, ...]]:
        """What a child does until it is killed."""
        if name == "store":
            return store_in_child, (self.kind, str(self.folder), str(self.root), prompt)
        return super().job(name, [])


def make_config(folder: Path, root: Path, kind: str, model: str, **more: Any) -> Any:
    """The configuration of a server of a model on a root."""
    where = folder / model
    if not where.exists():
        write_tiny_model(where, tag=model)
    extra = {"roots": [str(root)], "chunk_tokens": CHUNK_TOKENS, "engine": kind, "ring_bytes": 1 << 20}
    extra |= {"store_buffer_bytes": 1 << 20, "load_deadline_s": LOAD_DEADLINE_S}
    return make_vllm_config(
        where, extra | more, NUM_BLOCKS,
        kv_connector="RewarmConnector", kv_connector_module_path="rewarm.adapters.vllm",
    )  # fmt: skip


def store_in_child(kind: str, folder: str, root: str, prompt: list[int]) -> None:
    """A server's life that ends in the middle of a store."""
    server = Server(make_config(Path(folder), Path(root), kind, "model"), "model")
    server.serve(prompt)
    server.close()
