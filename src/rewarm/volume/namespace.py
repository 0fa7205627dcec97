"""The records of one identity: presence, loads, stores."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rewarm.engine.base import NUM_ROOTS, Priority, Probe, ReadRecord, RecordTarget, ToMemory, Transfer
from rewarm.engine.record import KEY_BYTES
from rewarm.engine.scan import scan_keys
from rewarm.errors import UsageError
from rewarm.volume.handles import Again, LoadHandle, Note, Outcome, Part, ProbeHandle, StoreHandle, outcome_of
from rewarm.volume.index import U64, KeyIndex, ends
from rewarm.volume.layout import NamespaceFile
from rewarm.volume.open_root import Root
from rewarm.volume.quota import NO_TENANT
from rewarm.volume.session import Did

if TYPE_CHECKING:
    from rewarm.volume.volume import Volume

PROBE_DEADLINE_S = 5.0
"""A root that does not answer by then is taken to hold nothing."""
FIRST_RECORDS = 64
"""Enough to keep a device busy for the 3 ms in which 2,000 more are prepared."""


Targets: TypeAlias = Sequence[tuple[bytes, RecordTarget]]
"""(key, where its payload is wanted)."""


BEHIND_LOADS = NUM_ROOTS - 1
"""The engine's number for reads that wait for all loads, of any root: what they bring, one by one, says little of how
fast a root is when much is asked of it."""


class Reads:
    """What one load is to read, on whichever roots."""

    def __init__(self, targets: Targets, deadline_s: float | None, priority: Priority) -> None:
        for key, _ in targets:
            _checked(key)
        self.targets = targets
        self.priority = priority
        self._end = None if deadline_s is None else time.monotonic() + deadline_s

    def left_s(self) -> float | None:
        """Until the deadline; None: there is none."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class Namespace:
    """Made by Volume.namespace(). Its calls are those of the server's thread: none but load, store and probe starts
    I/O, and none waits for any.
    """

    def __init__(self, volume: Volume, file: NamespaceFile) -> None:
        self._volume = volume
        self.file = file
        self.id = file.id
        self.payload_bytes = file.payload_bytes
        self._indexes = [KeyIndex() for _ in volume.roots]
        self._looks = [(index, root.health.loads) for index, root in zip(self._indexes, volume.roots, strict=True)]
        roots = list(zip(volume.roots, self._indexes, strict=True))
        self._scanned = threading.Event()
        threading.Thread(target=self._scan, args=(roots,), name="rewarm-scan", daemon=True).start()

    def add_root(self, root: Root) -> None:
        """The volume's: there is one more, numbered after the others; what it holds is looked for in the background."""
        index = KeyIndex()
        self._indexes.append(index)
        self._looks = [*self._looks, (index, root.health.loads)]
        threading.Thread(target=self._scan_root, args=(root, index), name="rewarm-scan", daemon=True).start()

    def drop_root(self, number: int) -> None:
        """The volume's: a root was removed, and what it holds is gone."""
        gone, self._indexes[number] = self._indexes[number], KeyIndex()
        self._looks = [look for look in self._looks if look[0] is not gone]

    def __len__(self) -> int:
        """Records that this process knows."""
        return sum(len(index) for index in self._indexes)

    @property
    def index_bytes(self) -> int:
        """Memory that the index takes."""
        return sum(index.table_bytes for index in self._indexes)

    def wait_scanned(self, timeout_s: float | None = None) -> bool:
        """Whether the names that were there at open are known; until then contains() may say no to a record."""
        return self._scanned.wait(timeout_s)

    def contains(self, key: bytes) -> bool:
        """Whether this process knows the record to be there; in memory only."""
        # fingerprint() and KeyIndex.contains(), written out: with four roots the calls were two thirds of the time.
        head, tail = ends(key)
        wanted = (head ^ (tail << 1 & U64 | tail >> 63)) or 1
        for index, pause in self._looks:
            table = index.table
            slot = wanted & (mask := len(table) - 1)
            while (found := table[slot]) != wanted and found:
                slot = slot + 1 & mask
            if found and not pause.is_on:
                return True
        return False

    def is_in_host(self, _key: bytes) -> bool:
        """Whether there is a copy in a host tier: a volume by itself has none."""
        return False

    def probe(self, keys: Sequence[bytes]) -> ProbeHandle:
        """Look into the file system for records, on every root that answers; the index learns what is there."""
        return ProbeHandle(len(keys), self.look(keys))

    def look(self, keys: Sequence[bytes]) -> list[Part]:
        """The parts of a probe."""
        self._volume.check_usable()
        parts = []
        for number, (root, _) in enumerate(zip(self._volume.roots, self._indexes, strict=False)):
            if root.health.loads.is_on or not keys:
                continue
            transfers = [Probe(root.paths.record(self.id, _checked(key)), number % NUM_ROOTS) for key in keys]
            completion = self._volume.engine.submit(transfers, deadline_s=PROBE_DEADLINE_S)
            parts.append(Part(completion, range(len(keys)), self._probe_note(number, keys)))
        return parts

    def note_present(self, keys: Sequence[bytes], root_id: str = "") -> None:
        """Another part of the server stored these records: on this root, or each on its first one where it is empty."""
        elsewhere = self._volume.number_of(root_id) if root_id else None
        for key in keys:
            self._indexes[self._volume.placement.order(key)[0] if elsewhere is None else elsewhere].add(key)

    def note_absent(self, keys: Sequence[bytes]) -> None:
        """These records are gone, or no good."""
        for key in keys:
            for index in self._indexes:
                index.discard(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of records, for the order of eviction; in memory, written to the log later."""
        self._log(Did.TOUCHED, keys, NO_TENANT)

    def own(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """Note that records are a tenant's, now or once they are stored; in memory, written to the log later."""
        self._log(Did.OWNED, keys, tenant)

    def _log(self, did: Did, keys: Sequence[bytes], tenant: bytes) -> None:
        by_root: dict[int, list[bytes]] = {}
        for key in keys:
            by_root.setdefault(self._root_of(key), []).append(key)
        for number, noted in by_root.items():
            session = self._volume.roots[number].session
            if session is not None:
                session.note(did, self.id, noted, tenant)

    def load(
        self,
        targets: Targets,
        deadline_s: float | None = None,
        *,
        priority: Priority = Priority.LOAD,
    ) -> LoadHandle:
        """Start to load records.

        Args:
            targets: N (key, target) in the order in which they are wanted; target memory is ours until done.
            deadline_s: Seconds from now; what is not there by then is a TIMEOUT.
            priority: STORE: behind all loads.
        Raises:
            VolumeClosed: The volume was closed.
            UsageError: A malformed key or target.
        """
        order = Reads(targets, deadline_s, priority)
        parts, refused = self.read(order, range(len(targets)))
        return LoadHandle(len(targets), parts, refused, self.finder(order))

    def read(self, order: Reads, positions: Sequence[int]) -> tuple[list[Part], list[int]]:
        """Start to read some of the records of an order.

        Returns:
            The parts of a load, and those positions whose root cannot be asked now.
        Raises:
            VolumeClosed: The volume was closed.
            UsageError: A malformed target; nothing is under way then.
        """
        self._volume.check_usable()
        refused: list[int] = []
        parts: list[Part] = []
        try:
            for number, there in self._by_root(order.targets, positions):
                if self._volume.roots[number].health.loads.is_on:
                    refused += there
                    continue
                for some in _first_few_first(there):
                    parts.append(self._submit(number, order, some))  # noqa: PERF401 - the next may be refused
        except BaseException:
            for part in parts:
                part.completion.cancel()  # the targets are the caller's again
            raise
        return parts, refused

    def _submit(self, number: int, order: Reads, positions: Sequence[int]) -> Part:
        lane = number % NUM_ROOTS if order.priority is Priority.LOAD else BEHIND_LOADS
        reads = self._reads(number, order.targets, positions, lane)
        completion = self._volume.engine.submit(reads, priority=order.priority, deadline_s=order.left_s())
        part = Part(completion, positions, self._load_note(number, order.targets), number)
        if not isinstance(order.targets[positions[0]][1], ToMemory):
            self._volume.read_watch.add(part)
        return part

    def finder(self, order: Reads) -> Again | None:
        """What looks on the other roots for records that this process does not know: another one may have stored them
        there, since their first root failed or did not keep up then.
        """
        if len(self._indexes) == 1:
            return None
        left: dict[int, list[int]] = {}
        for position, (key, _) in enumerate(order.targets):
            if not any(index.contains(key) for index in self._indexes):
                left[position] = self._usable(key)[1:]

        def again(missed: Sequence[int]) -> list[Part]:
            by_root: dict[int, list[int]] = {}
            for position in missed:
                if left.get(position):
                    by_root.setdefault(left[position].pop(0), []).append(position)
            return [self._submit(number, order, positions) for number, positions in by_root.items()]

        return again if any(left.values()) else None

    def _usable(self, key: bytes) -> list[int]:
        """The roots that a key may be on and that can be asked now, its own first."""
        order = self._volume.placement.order(key)
        return [number for number in order if not self._volume.roots[number].health.loads.is_on]

    def _by_root(self, targets: Targets, positions: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        """Those of the positions whose records are on each root, as far as is known."""
        if len(self._indexes) == 1:
            return [(0, positions)] if positions else []
        by_root: dict[int, list[int]] = {}
        for position in positions:
            by_root.setdefault(self._root_of(targets[position][0]), []).append(position)
        return by_root.items()

    def _reads(self, number: int, targets: Targets, positions: Sequence[int], lane: int) -> list[Transfer]:
        record_path = self._volume.roots[number].paths.records(self.id)
        namespace_id, payload_bytes = self.id, self.payload_bytes
        return [
            ReadRecord(record_path(key), key, namespace_id, payload_bytes, target, lane)
            for key, target in map(targets.__getitem__, positions)
        ]

    def store(self, payloads: Sequence[tuple[bytes, int]]) -> StoreHandle:
        """Start to store records, behind all loads.

        Args:
            payloads: N (key, address): payload_bytes at an address aligned to 4096, with room for the padded payload;
                the memory is ours until done. A key that is there already is not written again.
        Raises:
            VolumeClosed: The volume was closed.
            UsageError: A malformed key or address, or a volume that was opened read-only.
        """
        self._volume.check_usable()
        for key, address in payloads:
            _checked(key)
            if address <= 0 or address % 4096:
                raise UsageError(
                    f"address {address:#x} is not aligned to 4096", hint="alloc_aligned() gives such memory"
                )
        handle = StoreHandle(len(payloads))
        self._volume.queue_stores(self, payloads, handle)
        return handle

    def may_store(self, key: bytes) -> bool:
        """Whether storing a record would write it now: its root takes stores, and does not have it. Asks the file
        system.
        """
        root = self._volume.roots[self._root_of(key)]
        if root.health.stores.is_on:
            return False
        is_there = os.path.exists(root.paths.record(self.id, key)) and not self._volume.is_damaged(self.id, key)
        if is_there:
            self._indexes[self._root_of(key)].add(key)
        return not is_there

    def learn(self, root_number: int, key: bytes) -> None:
        """The volume's: a record is on a root now."""
        self._indexes[root_number].add(key)

    def _root_of(self, key: bytes) -> int:
        """The root that a key is on, as far as is known; else the one where it should be."""
        if len(self._indexes) == 1:
            return 0
        usable = self._usable(key)
        for number in usable:
            if self._indexes[number].contains(key):
                return number
        return (usable or self._volume.placement.order(key))[0]

    def rescan(self) -> None:
        """Learn anew which records are there; waits for the file system, while lookups go on with what was known."""
        for number, root in enumerate(list(self._volume.roots)):
            index = KeyIndex()
            self._scan_root(root, index)
            gone, self._indexes[number] = self._indexes[number], index
            self._looks = [(index if look is gone else look, pause) for look, pause in self._looks]

    def _scan(self, roots: Sequence[tuple[Root, KeyIndex]]) -> None:
        started = time.monotonic()
        try:
            for root, index in roots:
                self._scan_root(root, index)
            self._volume.counters.set("rewarm_volume_scan_seconds", time.monotonic() - started)
        finally:
            self._scanned.set()

    def _scan_root(self, root: Root, index: KeyIndex) -> None:
        try:
            index.add_fingerprints(scan_keys(root.paths.namespace(self.id)))
        except OSError as error:
            root.health.note_load(error.errno or errno.EIO)
            self._volume.counters.add("rewarm_io_errors_total", 1, root.name)

    def _load_note(self, number: int, targets: Targets) -> Note:
        root = self._volume.roots[number]

        def note(ended: Sequence[tuple[int, int]]) -> None:
            bad_records = root.health.bad_records
            bad = {index for index, result in ended if result == errno.EIO and bad_records.failed(name(index))}
            bad_records.delivered(name(index) for index, result in ended if not result)
            results = {result for index, result in ended if index not in bad}
            for result in sorted(results - {errno.ECANCELED}, reverse=True):  # 0 last
                root.health.note_load(result)
            for index, result in ended:
                if result:
                    outcome = Outcome.DAMAGED if index in bad else outcome_of(result)
                    self._note_no_hit(number, targets[index][0], outcome)

        def name(index: int) -> bytes:
            return self.id + targets[index][0]

        return note

    def _note_no_hit(self, number: int, key: bytes, outcome: Outcome) -> None:
        root = self._volume.roots[number]
        if outcome in {Outcome.MISS, Outcome.DAMAGED}:
            self._indexes[number].discard(key)
        if outcome is Outcome.DAMAGED:
            self._volume.note_damaged(root, self.id, key)
        elif outcome is Outcome.IO_ERROR:
            self._volume.counters.add("rewarm_io_errors_total", 1, root.name)

    def _probe_note(self, number: int, keys: Sequence[bytes]) -> Note:
        root = self._volume.roots[number]

        def note(ended: Sequence[tuple[int, int]]) -> None:
            for index, result in ended:
                if result != errno.ECANCELED:
                    root.health.note_load(result)
                if result == 0 and not self._volume.is_damaged(self.id, keys[index]):
                    self._indexes[number].add(keys[index])
                elif result == errno.ENOENT:
                    self._indexes[number].discard(keys[index])

        return note


def _first_few_first(positions: Sequence[int]) -> Sequence[Sequence[int]]:
    """A large load's first records on their own, so that the device works while the others are prepared."""
    if len(positions) < 2 * FIRST_RECORDS:
        return [positions]
    return [positions[:FIRST_RECORDS], positions[FIRST_RECORDS:]]


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise UsageError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key
