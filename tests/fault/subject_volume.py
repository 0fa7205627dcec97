"""A volume as a subject: presence in its index, loads and stores through an engine, a janitor that is another process.

Evictions run in a child that may be killed; each such case has a root of its own, so that the whole of it is evicted.
"""

from __future__ import annotations

import os
import shutil
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from campaign import Outcome
from derived import POISON, derived_block
from faultlist import Fault, Layout, Record
from headerpage import USED_BYTES

import rewarm.volume.archive
import rewarm.volume.namespace
import rewarm.volume.volume
from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import RecordTarget, ToMemory, ToSlot
from rewarm.engine.memory import view_at
from rewarm.engine.record import PAGE_BYTES, record_bytes
from rewarm.metrics import Counters
from rewarm.volume import LoadHandle, Namespace, Volume, create_volume
from rewarm.volume import Outcome as Ended
from rewarm.volume.archive import export_archive, import_archive
from rewarm.volume.janitor.process import JanitorProcess
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths
from rewarm.volume.usage import read_usage

if TYPE_CHECKING:
    import random

    from zygote import Job

PAYLOAD = 55296
MOST_CHUNKS = 5
CAPACITY = 256 << 20
WAIT_S = 30.0
LOAD_DEADLINE_S = 300.0
ROUNDS = 5


class _NoJanitor:
    """In the place of a janitor process of a volume's own: one janitor serves all lives on a root."""

    is_running = True

    def __init__(self, roots: list[str]) -> None: ...
    def ensure(self) -> None: ...
    def take_evicted(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def close(self) -> None: ...


def share_one_janitor() -> None:
    """From here on no volume of this process, and of those that it forks, starts a janitor of its own."""
    rewarm.volume.volume.JanitorProcess = _NoJanitor  # type: ignore[assignment,misc]


def wait_for_slow_machines() -> None:
    """From here on a process that stood still for seconds is not taken for a root that hangs."""
    rewarm.volume.namespace.PROBE_DEADLINE_S = LOAD_DEADLINE_S


class Life:
    """One process's use of a root: an engine, a volume, two namespaces, and memory for one prompt."""

    def __init__(self, root: Path, kind: str, *, durable: bool) -> None:
        slot = record_bytes(PAYLOAD)
        self.room = slot - PAGE_BYTES
        self.counters = Counters()
        self.engine = open_engine(EngineConfig(kind=kind, ring_bytes=MOST_CHUNKS * slot, slot_bytes=slot))
        self.volume = Volume.open(
            [str(root)], engine=self.engine, counters=self.counters, durable=durable, janitor=False
        )
        self.mine = self.volume.namespace({"model": "model"}, payload_bytes=PAYLOAD)
        self.other = self.volume.namespace({"model": "other"}, payload_bytes=PAYLOAD)
        assert self.volume.wait_scanned(WAIT_S)
        self.memory = alloc_aligned(MOST_CHUNKS * self.room)

    def close(self) -> None:
        """The end of the process."""
        self.volume.close()
        self.engine.close()

    def store(self, prompt: list[bytes], namespace: Namespace, model: str) -> None:
        """Store, and wait until each record is stored or given up."""
        for i, key in enumerate(prompt):
            self._words(self.memory.address + i * self.room)[:] = derived_block(key, PAYLOAD // 4, model)
        handle = namespace.store([(key, self.memory.address + i * self.room) for i, key in enumerate(prompt)])
        assert handle.wait(WAIT_S), "a store does not end"

    def load(self, prompt: list[bytes], *, to_slots: bool) -> tuple[int, int]:
        """Load the prefix that is said to be there: (leading chunks that were a hit, wrong ones among all hits)."""
        self._words(self.memory.address, MOST_CHUNKS * self.room).fill(POISON)
        known = list(takewhile(self.mine.contains, prompt))
        targets: list[tuple[bytes, RecordTarget]] = [
            (key, ToSlot() if to_slots else ToMemory(self.memory.address + i * self.room))
            for i, key in enumerate(known)
        ]
        handle = self.mine.load(targets, deadline_s=LOAD_DEADLINE_S)
        assert handle.wait(LOAD_DEADLINE_S), "a load does not end"
        ended = handle.results()
        wrong = 0
        for i, outcome in enumerate(ended):
            if outcome is Ended.HIT:
                wrong += not np.array_equal(
                    self._got(handle, i, to_slots), derived_block(known[i], PAYLOAD // 4, "model")
                )
        return next((i for i, outcome in enumerate(ended) if outcome is not Ended.HIT), len(ended)), wrong

    def _got(self, handle: LoadHandle, index: int, to_slots: bool) -> np.ndarray[Any, np.dtype[np.uint32]]:
        if not to_slots:
            return self._words(self.memory.address + index * self.room)
        words = self._words(handle.slot_address(index)).copy()
        handle.release(index)
        return words

    @staticmethod
    def _words(address: int, num_bytes: int = PAYLOAD) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.frombuffer(view_at(address, num_bytes), dtype=np.uint32)


class VolumeSubject:
    """One life at a time on the root; between them and beside them a janitor where something may be full."""

    counts = True
    stores_what_it_computes = False
    record_infix = "/tmp-"
    num_sessions = 1

    def __init__(self, kind: str, *, durable: bool = False) -> None:
        self.name = f"volume, {kind} engine"
        self.kind = kind
        self.durable = durable
        self.layout = Layout(PAGE_BYTES, USED_BYTES, PAYLOAD, record_bytes(PAYLOAD))
        self._to_slots = False

    def applies(self, fault: Fault) -> bool:
        """All of them do."""
        return True

    def twin(self) -> VolumeSubject:
        """Another one, for a root of its own."""
        return VolumeSubject(self.kind, durable=self.durable)

    def begin(self, root: Path) -> None:
        """Make a volume and open it."""
        self.root = root
        create_volume([str(root)], capacity_bytes=CAPACITY)
        self.janitor: JanitorProcess | None = None
        self.life = Life(root, self.kind, durable=self.durable)

    def end(self) -> None:
        """Stop all."""
        self.life.close()
        if self.janitor:
            self.janitor.close()

    def reopen(self) -> None:
        """A restart."""
        self.life.close()
        self.life = Life(self.root, self.kind, durable=self.durable)

    def expect_full(self) -> None:
        """A server has a janitor beside it, which makes room; another process, so the shim does not strike it."""
        if self.janitor is None:
            self.janitor = JanitorProcess([str(self.root)])

    def prompt(self, rng: random.Random) -> list[bytes]:
        """Keys."""
        return [rng.randbytes(32) for _ in range(rng.randint(2, MOST_CHUNKS))]

    def chunks(self, prompt: list[bytes]) -> int:
        """Records of a prompt."""
        return len(prompt)

    def store(self, prompt: list[bytes]) -> None:
        """What a server does: load what is there, store the rest."""
        good, wrong = self.life.load(prompt, to_slots=True)
        assert not wrong, f"{wrong} wrong records served before a store"
        self.life.store(prompt[good:], self.life.mine, "model")

    def store_as_stranger(self, prompt: list[bytes]) -> None:
        """The same keys in another namespace."""
        self.life.store(prompt, self.life.other, "other")

    def load(self, prompt: list[bytes]) -> Outcome:
        """Load what the index knows, in turn into caller's memory and into the ring."""
        self._to_slots = not self._to_slots
        damaged, errors = self._counted("damaged_records"), self._counted("io_errors")
        good, wrong = self.life.load(prompt, to_slots=self._to_slots)
        return Outcome(good, wrong, self._counted("damaged_records") - damaged, self._counted("io_errors") - errors)

    def _counted(self, what: str) -> int:
        return int(self.life.counters.value(f"rewarm_{what}_total", str(self.root)))

    def record(self, prompt: list[bytes], index: int, sibling: int) -> Record:
        """The file of a record."""
        path = RootPaths(str(self.root)).record
        mine, other, key = self.life.mine.id, self.life.other.id, prompt[index]
        return Record(Path(path(mine, key)), self.layout, Path(path(mine, prompt[sibling])), Path(path(other, key)))

    def make_archive(self, prompt: list[bytes]) -> None:
        """Store a prompt, export it, and start anew on an empty root."""
        self._begin_anew()
        self.store(prompt)
        with (self.root.parent / "archive.tar").open("wb") as stream:
            exported = export_archive([str(self.root)], stream)
        assert exported.num_records == self.chunks(prompt)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.end()
        shutil.rmtree(self.root)
        self.root.mkdir()
        self.begin(self.root)

    def job(self, name: str, prompt: list[bytes]) -> tuple[Job, tuple[Any, ...]]:
        """What a child does until it is killed."""
        if name == "evict":
            return evict_in_child, (str(self.root),)
        if name == "import":
            return import_in_child, (self.kind, str(self.root), str(self.root.parent / "archive.tar"))
        return store_in_child, (self.kind, self.durable, str(self.root), prompt)

    def untidy(self) -> list[str]:
        """After a janitor's round: no dead session, no temporary, and the budget is what the files add up to."""
        for session in (self.root / ".rewarm" / "sessions").glob("new-*"):  # of a process that was killed in between
            os.utime(session, (0, 0))
        found: list[str] = []
        for _ in range(ROUNDS):  # where two janitors look at one session, each may take it for a live one
            janitor = RootJanitor(str(self.root))
            janitor.prepare()
            janitor.step()
            janitor._usage.close()
            found = untidy_root(self.root, self.num_sessions)
            if not found:
                break
        return found


def untidy_root(root: Path, num_sessions: int) -> list[str]:
    """What is on a root that should not be, once a janitor has cleared away what the dead left."""
    paths = RootPaths(str(root))
    found = []
    sessions = os.listdir(paths.sessions)
    if len(sessions) != num_sessions:
        found.append(f"{len(sessions)} sessions are left, {num_sessions} live: {' '.join(sessions)}")
    found += [f"a temporary is left: {path.name}" for path in root.rglob("*tmp*")]
    held = record_bytes(PAYLOAD) * len(list(root.glob("*/??/*.rec")))
    held += sum(path.lstat().st_size for path in Path(paths.quarantine).iterdir())
    used = read_usage(paths.usage)
    if not used.is_known or used.used_bytes != held:
        found.append(f"the budget says {used.used_bytes} bytes, the files have {held}")
    return found


def store_in_child(kind: str, durable: bool, root: str, prompt: list[bytes]) -> None:
    """A server's life that ends in the middle of a store."""
    life = Life(Path(root), kind, durable=durable)
    life.store(prompt, life.mine, "model")
    life.close()


def import_in_child(kind: str, root: str, archive: str) -> None:
    """`rewarm volume import`, ended in the middle."""
    rewarm.volume.archive.open_engine = lambda _: open_engine(EngineConfig(kind=kind))  # type: ignore[assignment]
    with Path(archive).open("rb") as stream:
        import_archive(stream, [root])


def evict_in_child(root: str) -> None:
    """A janitor's life that ends in the middle of an eviction of all that there is."""
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.evict(CAPACITY)
    janitor.step()
