"""An engine alone as a subject: records written and read by their paths, with the least a volume does around them.

A case that fails on the whole and not here is no engine's fault.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from campaign import Outcome
from derived import POISON, derived_block
from faultlist import Fault, Layout, Phase, Record
from headerpage import USED_BYTES

from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import ReadRecord, ToMemory, ToSlot, WriteRecord
from rewarm.engine.record import PAGE_BYTES, record_bytes

if TYPE_CHECKING:
    import random

    from zygote import Job

PAYLOAD = 55296
MOST_CHUNKS = 5
_NUMBERS = itertools.count()


class EngineSubject:
    """One engine on the root; the stranger is another namespace."""

    counts = True
    stores_what_it_computes = False
    record_infix = "/tmp-"

    def __init__(self, kind: str) -> None:
        self.name = f"{kind} engine"
        self.kind = kind
        self.layout = Layout(PAGE_BYTES, USED_BYTES, PAYLOAD, record_bytes(PAYLOAD))
        self.to_slots = False

    def applies(self, fault: Fault) -> bool:
        """It neither evicts nor imports."""
        return fault.phase not in {Phase.KILL_EVICT, Phase.KILL_IMPORT}

    def twin(self) -> EngineSubject:
        """Another one; nothing here needs it."""
        return EngineSubject(self.kind)

    def make_archive(self, prompt: list[bytes]) -> None:
        """It has no archives."""

    def expect_full(self) -> None:
        """It has nothing that makes room."""

    def begin(self, root: Path) -> None:
        """Start on an empty root."""
        self.root = root
        slot = self.layout.file_bytes
        self.engine = open_engine(EngineConfig(kind=self.kind, ring_bytes=MOST_CHUNKS * slot, slot_bytes=slot))
        self.memory = alloc_aligned(MOST_CHUNKS * (slot - PAGE_BYTES))

    def end(self) -> None:
        """Stop it."""
        self.engine.close()

    def reopen(self) -> None:
        """A restart."""
        self.engine.close()
        self.begin(self.root)

    def prompt(self, rng: random.Random) -> list[bytes]:
        """Keys."""
        return [rng.randbytes(32) for _ in range(rng.randint(2, MOST_CHUNKS))]

    def chunks(self, prompt: list[bytes]) -> int:
        """Records of a prompt."""
        return len(prompt)

    def path(self, key: bytes, model: str = "model") -> Path:
        """The file of a record."""
        return self.root / model / key.hex()[:2] / f"{key.hex()}.rec"

    def store(self, prompt: list[bytes], model: str = "model") -> None:
        """Write every record."""
        room = self.layout.file_bytes - PAGE_BYTES
        batch = []
        for i, key in enumerate(prompt):
            words = np.frombuffer(self.memory.view, dtype=np.uint32)[i * room // 4 :][: PAYLOAD // 4]
            words[:] = derived_block(key, PAYLOAD // 4, model)
            temporary = self.root / f"tmp-{os.getpid()}-{next(_NUMBERS)}"
            batch.append(
                WriteRecord(str(self.path(key, model)), str(temporary), key, model.ljust(32).encode(),
                            self.memory.address + i * room, PAYLOAD, 1)
            )  # fmt: skip
        completion = self.engine.submit(batch)
        assert completion.wait(30)

    def store_as_stranger(self, prompt: list[bytes]) -> None:
        """The same keys in another namespace."""
        self.store(prompt, "other")

    def load(self, prompt: list[bytes]) -> Outcome:
        """Read all; what is neither whole nor gone is put out of the way, as a volume does."""
        room = self.layout.file_bytes - PAGE_BYTES
        words = np.frombuffer(self.memory.view, dtype=np.uint32)
        words.fill(POISON)
        self.to_slots = not self.to_slots
        completion = self.engine.submit(
            [ReadRecord(str(self.path(key)), key, b"model".ljust(32), PAYLOAD,
                        ToSlot() if self.to_slots else ToMemory(self.memory.address + i * room))
             for i, key in enumerate(prompt)]
        )  # fmt: skip
        assert completion.wait(30)
        results = completion.results()
        good = next((i for i, result in enumerate(results) if result), len(results))
        wrong = 0
        for i, result in enumerate(results):
            if result == 0:
                wrong += not np.array_equal(self._read(completion, i), derived_block(prompt[i], PAYLOAD // 4, "model"))
            elif result != errno.ENOENT:
                self._put_away(self.path(prompt[i]))
        damaged = results.count(errno.EBADMSG)
        errors = sum(result not in {0, errno.ENOENT, errno.EBADMSG} for result in results)
        return Outcome(good, wrong, damaged, errors)

    def _read(self, completion: Any, index: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        if not self.to_slots:
            room = self.layout.file_bytes - PAGE_BYTES
            return np.frombuffer(self.memory.view, dtype=np.uint32)[index * room // 4 :][: PAYLOAD // 4]
        from rewarm.engine.memory import view_at

        words = np.frombuffer(view_at(completion.slot_address(index), PAYLOAD), dtype=np.uint32).copy()
        completion.release(index)
        return words

    @staticmethod
    def _put_away(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def record(self, prompt: list[bytes], index: int, sibling: int) -> Record:
        """The file of a record."""
        key = prompt[index]
        return Record(self.path(key), self.layout, self.path(prompt[sibling]), self.path(key, "other"))

    def job(self, name: str, prompt: list[bytes]) -> tuple[Job, tuple[Any, ...]]:
        """Only stores can be killed here."""
        return store_in_child, (self.kind, str(self.root), prompt)

    def untidy(self) -> list[str]:
        """Temporaries of the dead are a volume's business; they must not stand in the way, though."""
        for path in self.root.glob("tmp-*"):
            path.unlink()
        return []


def store_in_child(kind: str, root: str, prompt: list[bytes]) -> None:
    """A life that ends in the middle of a store."""
    subject = EngineSubject(kind)
    subject.begin(Path(root))
    subject.store(prompt)
    subject.end()
