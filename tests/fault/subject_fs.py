"""vLLM's fs tier as a subject of the campaign; its counts go into the table of docs/guides/faults.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.v1.kv_offload.tiering.fs.manager  # noqa: F401 - now, so that forked children need not
from campaign import Outcome
from faultlist import Fault, Phase, Record
from peer_fs import FsTier

if TYPE_CHECKING:
    import random

    from zygote import Job


def store_in_child(root: str, chunks: list[bytes]) -> None:
    """A server's life that ends in the middle of a store."""
    FsTier(Path(root), "model").store(chunks)


class FsSubject:
    """One tier object on the root, and one of another model beside it."""

    name = "vllm fs tier"
    counts = False
    stores_what_it_computes = False
    record_infix = ".bin"

    def applies(self, fault: Fault) -> bool:
        """It has no header page, no padding, no eviction and no import."""
        return not fault.needs_header and fault.phase not in (Phase.KILL_EVICT, Phase.KILL_IMPORT)

    def twin(self) -> FsSubject:
        """Another one; nothing here needs it."""
        return FsSubject()

    def make_archive(self, prompt: list[bytes]) -> None:
        """It has no archives."""

    def expect_full(self) -> None:
        """It has nothing that makes room."""

    def begin(self, root: Path) -> None:
        """Start on an empty root."""
        self.root = root
        self.tier, self.stranger = FsTier(root, "model"), FsTier(root, "other")

    def end(self) -> None:
        """Stop the threads."""
        self.tier.close()
        self.stranger.close()

    def reopen(self) -> None:
        """A restart."""
        self.tier.close()
        self.tier = FsTier(self.root, "model")

    def prompt(self, rng: random.Random) -> list[bytes]:
        """Chunk hashes."""
        return [rng.randbytes(32) for _ in range(rng.randint(2, 5))]

    def chunks(self, prompt: list[bytes]) -> int:
        """Chunks of a prompt."""
        return len(prompt)

    def store(self, prompt: list[bytes]) -> None:
        """Store; whether the tier calls it a success is its affair."""
        self.tier.store(prompt)

    def store_as_stranger(self, prompt: list[bytes]) -> None:
        """The same chunks by the other model."""
        self.stranger.store(prompt)

    def load(self, prompt: list[bytes]) -> Outcome:
        """Look up, load, compare."""
        return Outcome(*self.tier.load(prompt))

    def record(self, prompt: list[bytes], index: int, sibling: int) -> Record:
        """The file of a chunk."""
        return self.tier.record(prompt[index], prompt[sibling], self.stranger)

    def job(self, name: str, prompt: list[bytes]) -> tuple[Job, tuple[Any, ...]]:
        """Only stores can be killed here."""
        return store_in_child, (str(self.root), prompt)

    def untidy(self) -> list[str]:
        """Temporary files that nobody will remove."""
        left = list(self.root.rglob("*.tmp"))
        for path in left:
            path.unlink()
        return [f"{len(left)} temporary files left for ever"] if left else []
