"""A volume against a model: any sequence of stores, loads, evictions, damage, faults and restarts."""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from volumes import MIB, RECORD_BYTES, Bench, key, load, namespace_of, record_path, store

from rewarm.engine import EngineConfig, open_engine
from rewarm.engine.base import Transfer, WriteRecord
from rewarm.testing.engines import Faulty
from rewarm.volume import Outcome, create_volume, store_thread
from rewarm.volume.health import RootHealth
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths
from rewarm.volume.usage import read_usage
from rewarm.volume.verify import verify_volume

CAPACITY = 2 * MIB
NUMBERS = st.integers(0, 39)
BATCHES = st.lists(NUMBERS, min_size=1, max_size=12)
DAMAGES = {
    "flip": lambda content: content[:7000] + bytes([content[7000] ^ 4]) + content[7001:],
    "cut": lambda content: content[:8192],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


class VolumeMachine(RuleBasedStateMachine):
    """The model: which records are whole, and which files are damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="rewarm-model-")
        self.root = f"{self.folder}/kv"
        create_volume([self.root], capacity_bytes=CAPACITY)
        self.whole: set[int] = set()
        self.damaged: set[int] = set()
        self.fault = 0
        """The errno with which writes end now."""
        inner = open_engine(EngineConfig(kind="pure", num_workers=2))
        self.bench = Bench(Faulty(inner, fail_at=self.fail))
        self.room_wait_s, store_thread.ROOM_WAIT_S = store_thread.ROOM_WAIT_S, 0.02  # no janitor makes room meanwhile
        self.open()

    def fail(self, _number: int, transfer: Transfer) -> int:
        return self.fault if isinstance(transfer, WriteRecord) else 0

    def open(self) -> None:
        self.volume = self.bench.open(self.root)
        self.namespace = namespace_of(self.volume)
        self.seen: set[int] = set()
        """Damaged ones that this life of the server has met: it writes them anew."""

    @rule()
    def reopen(self) -> None:
        """A restart of the server."""
        self.volume.close()
        self.open()
        assert len(self.namespace) == len(self.whole | self.damaged)

    @rule(numbers=BATCHES)
    def store(self, numbers: list[int]) -> None:
        self.volume.roots[0].health = RootHealth()  # the pauses have tests of their own
        used = read_usage(RootPaths(self.root).usage).used_bytes
        missing = len(set(numbers)) - (CAPACITY - used) // RECORD_BYTES
        if missing > 0:
            self.evict(missing)
        results = store(self.namespace, numbers)
        written = {number for number, is_stored in zip(numbers, results, strict=True) if is_stored}
        written -= self.damaged - self.seen  # there, as far as is known: not written again
        self.whole |= written
        self.damaged -= written
        self.seen -= written
        assert self.fault or all(results), "there was room and no fault"

    @rule(numbers=BATCHES)
    def load(self, numbers: list[int]) -> None:
        """The bytes of a HIT are compared in load()."""
        for number, outcome in zip(numbers, load(self.namespace, numbers), strict=True):
            expected = Outcome.HIT if number in self.whole else Outcome.MISS
            if number in self.damaged:
                expected = Outcome.DAMAGED
                self.seen.add(number)
            assert outcome is expected, number

    @rule(numbers=BATCHES)
    def touch(self, numbers: list[int]) -> None:
        self.namespace.touch([key(number) for number in numbers])

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        """By a janitor; the process that has them indexed learns of it when it loads."""
        janitor = RootJanitor(self.root)
        janitor.prepare()
        evicted = read_usage(RootPaths(self.root).usage).evicted_records
        janitor.step()  # puts damaged records aside, and makes room that a store waited for
        evicted = read_usage(RootPaths(self.root).usage).evicted_records - evicted
        before = self.present()
        assert len(self.whole - before) <= evicted, "a whole record was put aside"
        self.whole &= before
        self.damaged &= before
        freed = janitor.evict(count * RECORD_BYTES)
        janitor.finish()
        gone = before - self.present()
        assert freed == len(gone) * RECORD_BYTES
        assert len(gone) >= min(count, len(before))
        self.whole -= gone
        self.damaged -= gone

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), how=st.sampled_from(sorted(DAMAGES)))
    def damage(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.whole)))
        path = record_path(self.root, self.namespace, number)
        path.write_bytes(DAMAGES[how](path.read_bytes()))
        self.whole.remove(number)
        self.damaged.add(number)

    @rule(error=st.sampled_from([0, 0, errno.ENOSPC, errno.EIO]))
    def set_fault(self, error: int) -> None:
        self.fault = error

    @rule()
    def repair(self) -> None:
        report = verify_volume([self.root], repair=True)
        assert len(report.damaged) == len(self.damaged)
        assert report.num_records == len(self.whole) + len(self.damaged)
        self.damaged.clear()

    @invariant()
    def the_files_are_those_of_the_model(self) -> None:
        assert self.present() == self.whole | self.damaged

    @invariant()
    def the_budget_is_never_too_small_nor_above_the_capacity(self) -> None:
        used = read_usage(RootPaths(self.root).usage).used_bytes
        assert len(self.whole) * RECORD_BYTES <= used <= CAPACITY

    def present(self) -> set[int]:
        return {number for number in range(40) if record_path(self.root, self.namespace, number).exists()}

    def teardown(self) -> None:
        self.bench.close()
        store_thread.ROOM_WAIT_S = self.room_wait_s
        shutil.rmtree(self.folder)


TestVolumeModel = VolumeMachine.TestCase
TestVolumeModel.settings = settings(max_examples=15, stateful_step_count=25, deadline=None, print_blob=True)
