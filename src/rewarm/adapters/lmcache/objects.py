"""LMCache's objects on a volume: looked up, loaded into its buffers, stored out of them, removed, listed.

No name of LMCache's stands here: the seats translate, and drive the handles that this file gives back.

A load goes through the engine's ring and is copied out by the worker that checked it, so that a buffer of LMCache gets
no byte that is not good, and is LMCache's again at the deadline whatever a device does. A record too large for a slot
of the ring is read in place. A store is written out of LMCache's buffer, or out of a copy where that is not aligned.
"""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rewarm.adapters.lmcache.catalog import Catalog
from rewarm.adapters.lmcache.names import Group, Layout, Naming, record_key
from rewarm.config import KvConfig
from rewarm.engine import AlignedBuffer, Engine, EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import BlockPlanes, RecordTarget, ToBlocks, ToMemory
from rewarm.engine.checks import MAX_PAYLOAD_BYTES
from rewarm.engine.record import record_bytes
from rewarm.engine.workers import num_workers_for
from rewarm.errors import RewarmError
from rewarm.kv.rank import open_volume
from rewarm.metrics import Counters
from rewarm.units import MIB, round_up
from rewarm.volume import LoadHandle, Namespace, Outcome, StoreHandle, Volume
from rewarm.volume.count import record_entries
from rewarm.volume.layout import namespace_ids, read_namespace_file
from rewarm.volume.quota import NO_TENANT, tenant_of
from rewarm.volume.remove import remove_records

PAGE_BYTES = 4096
LOAD_BYTES_A_SECOND = 128 * MIB
"""A load's deadline grows by a second for each of these: the slowest device that is still worth waiting for."""
UNKNOWN_OBJECT_BYTES = 64 * MIB
"""A slot of the ring where no object was seen yet."""
MIN_SLOTS = 4
MAX_COPIED_BYTES = 512 * MIB
"""Of stores that wait in copies; beyond that a store whose buffer is not aligned is dropped."""
REMOVE_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class ObjectName:
    """One object of LMCache's."""

    group: Group
    chunk_hash: bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where an object's bytes are or belong, and how they are to be read."""

    address: int
    room_bytes: int
    """From the address on, padding included."""
    layout: Layout
    owner: object
    """What keeps the memory; held until no I/O can touch it."""


@dataclass(slots=True)
class ObjectLoad:
    """A load of N objects that is under way. One thread polls it."""

    count: int
    started: float
    num_bytes: int
    parts: list[tuple[LoadHandle, list[int], Namespace]] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    owners: Sequence[object] = ()
    """What keeps the memory that is read into."""

    def filenos(self) -> list[int]:
        """Descriptors that are readable when something ended."""
        return [number for handle, _, _ in self.parts if (number := handle.fileno()) >= 0]

    def done(self) -> bool:
        """True once every buffer is the caller's again, and ``outcomes`` has each index."""
        for handle, indices, _ in self.parts:
            if not handle.done():
                return False
            self.outcomes.update(zip(indices, handle.results(), strict=True))
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until done, or this long. Returns done()."""
        end = time.monotonic() + timeout_s
        for handle, _, _ in self.parts:
            handle.wait(max(0.0, end - time.monotonic()))
        return self.done()

    def cancel(self) -> None:
        """End what has not ended."""
        for handle, _, _ in self.parts:
            handle.cancel()

    def hits(self) -> list[bool]:
        """Of each object, whether its buffer has its bytes. Call when done."""
        return [self.outcomes.get(index, Outcome.MISS) is Outcome.HIT for index in range(self.count)]

    def gone(self) -> list[int]:
        """Indices of objects that are not on the volume any more, or no good."""
        lost = (Outcome.MISS, Outcome.DAMAGED)
        return [index for index in range(self.count) if self.outcomes.get(index, Outcome.MISS) in lost]


@dataclass(slots=True)
class ObjectStore:
    """A store of N objects that is under way. One thread polls it."""

    count: int
    started: float
    parts: list[tuple[StoreHandle, list[int]]] = field(default_factory=list)
    copies: list[AlignedBuffer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    owners: Sequence[object] = ()
    """What keeps the memory that is written from."""

    def done(self) -> bool:
        """True once every buffer is the caller's again."""
        return all(handle.done() for handle, _ in self.parts)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first part that is not done. Returns done()."""
        for handle, _ in self.parts:
            if not handle.done():
                handle.wait(timeout_s)
                break
        return self.done()

    def stored(self) -> list[bool]:
        """Of each object, whether it is on the volume now. Call when done."""
        found = [False] * self.count
        for handle, indices in self.parts:
            for index, is_stored in zip(indices, handle.results(), strict=True):
                found[index] = is_stored
        return found


class Objects:
    """An open volume as one server's seat uses it."""

    def __init__(self, kv: KvConfig, naming: Naming, *, object_bytes: int = 0) -> None:
        """
        Args:
            kv: Roots and settings.
            naming: Of this server.
            object_bytes: Of its objects, where that is known; 0: taken from the volume, or guessed.
        Raises:
            RewarmError: The volume or the engine cannot be opened as it is configured.
        """
        self.kv = kv
        self.naming = naming
        self.counters = Counters()
        slot_bytes = record_bytes(object_bytes or _largest_seen(kv.roots, naming) or UNKNOWN_OBJECT_BYTES)
        self.slot_bytes = slot_bytes
        self.engine: Engine = open_engine(
            EngineConfig(
                kind=kv.engine,
                num_workers=kv.num_workers or num_workers_for(kv.roots),
                ring_bytes=max(kv.ring_bytes // slot_bytes, MIN_SLOTS) * slot_bytes,
                slot_bytes=slot_bytes,
            )
        )
        try:
            volume = open_volume(kv, self.engine, self.counters, janitor=True)
            assert isinstance(volume, Volume)  # LMCache has a host tier of its own, so none was configured
            self.volume = volume
        except BaseException:
            self.engine.close()
            raise
        self.catalog = Catalog(self.volume, naming)
        self._lock = threading.Lock()
        self._copied_bytes = 0
        self._loading_bytes = 0

    def close(self) -> None:
        """Write what is queued, as far as that takes a bounded time. Nothing may be under way but stores."""
        self.catalog.close()
        self.volume.close()
        self.engine.close()

    def contains(self, name: ObjectName) -> bool:
        """Whether this process knows the object to be there; asks no disk once it knows the group."""
        key = record_key(name.chunk_hash)
        if key is None or self.kv.policy == "never":
            return False
        found = self.catalog.namespaces(name.group, len(name.chunk_hash))
        return any(self._holds(namespace, key) for _, namespace in found)

    def _holds(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a record is there and good; a scan that ends late finds the names of damaged ones too."""
        return namespace.contains(key) and not self.volume.is_damaged(namespace.id, key)

    def layout_of(self, name: ObjectName) -> Layout | None:
        """How an object that this process knows lies on the volume; None: it is not there."""
        key = record_key(name.chunk_hash)
        if key is None:
            return None
        found = self.catalog.namespaces(name.group, len(name.chunk_hash))
        return next((layout for layout, namespace in found if self._holds(namespace, key)), None)

    def find(self, names: Sequence[ObjectName], *, timeout_s: float) -> list[bool]:
        """Of each object, whether it is there. Asks the disk, which knows what other processes stored and evicted.

        Args:
            names: N names.
            timeout_s: How long a disk is waited for; what it does not say by then is as this process knew it.
        """
        by_group: dict[tuple[Group, int], list[bytes]] = {}
        for name in names:
            key = record_key(name.chunk_hash)
            if key is not None and self.kv.policy != "never":
                by_group.setdefault((name.group, len(name.chunk_hash)), []).append(key)
        probes = [
            namespace.probe(keys)
            for (group, hash_bytes), keys in by_group.items()
            for _, namespace in self.catalog.namespaces(group, hash_bytes)
        ]
        end = time.monotonic() + timeout_s
        for probe in probes:
            probe.wait(max(0.0, end - time.monotonic()))
            probe.cancel()
        found = [self.contains(name) for name in names]
        self._touch([name for name, is_there in zip(names, found, strict=True) if is_there])
        return found

    def _touch(self, names: Sequence[ObjectName]) -> None:
        by_group: dict[tuple[Group, int], list[bytes]] = {}
        for name in names:
            by_group.setdefault((name.group, len(name.chunk_hash)), []).append(_key(name))
        for (group, hash_bytes), keys in by_group.items():
            for _, namespace in self.catalog.namespaces(group, hash_bytes)[:1]:
                namespace.touch(keys)

    def load(self, names: Sequence[ObjectName], buffers: Sequence[Buffer]) -> ObjectLoad:
        """Start to load objects; what this volume has no namespace for is a miss already.

        Args:
            names: N names, in the order in which they are wanted.
            buffers: N buffers, ours until the load is done.
        """
        load = ObjectLoad(len(names), time.monotonic(), 0, owners=[buffer.owner for buffer in buffers])
        by_namespace: dict[bytes, tuple[Namespace, list[int], list[tuple[bytes, RecordTarget]]]] = {}
        for index, (name, buffer) in enumerate(zip(names, buffers, strict=True)):
            namespace = self._namespace(name, buffer.layout, make=False)
            target = self._target(buffer)
            if namespace is not None and target is not None:
                entry = by_namespace.setdefault(namespace.id, (namespace, [], []))
                entry[1].append(index)
                entry[2].append((_key(name), target))
                load.num_bytes += buffer.layout.payload_bytes
        with self._lock:
            self._loading_bytes += load.num_bytes
            deadline_s = self.kv.load_deadline_s + self._loading_bytes / LOAD_BYTES_A_SECOND
        for namespace, indices, targets in by_namespace.values():
            with suppress(RewarmError):
                load.parts.append((namespace.load(targets, deadline_s), indices, namespace))
        return load

    def ended(self, load: ObjectLoad) -> None:
        """Count a load that is done."""
        with self._lock:
            self._loading_bytes -= load.num_bytes
        for index in range(load.count):
            outcome = load.outcomes.get(index, Outcome.MISS)
            self.counters.add("rewarm_kv_loads_total", 1, outcome.name.lower())
        for handle, _, namespace in load.parts:
            hits = handle.results().count(Outcome.HIT)
            self.counters.add("rewarm_kv_load_bytes_total", hits * namespace.payload_bytes)
        self.counters.observe("rewarm_kv_load_seconds", time.monotonic() - load.started)

    def store(self, names: Sequence[ObjectName], buffers: Sequence[Buffer]) -> ObjectStore:
        """Start to store objects, behind all loads; may wait for the disk where a layout is new. For one thread.

        Args:
            names: N names.
            buffers: N buffers, ours until the store is done.
        """
        sizes = [buffer.layout.payload_bytes for buffer in buffers]
        owners = [buffer.owner for buffer in buffers]
        store = ObjectStore(len(names), time.monotonic(), sizes=sizes, owners=owners)
        if self.kv.read_only or self.volume.is_over_budget:
            self.counters.add("rewarm_kv_stores_total", len(names), "skipped")
            return store
        by_namespace: dict[bytes, tuple[Namespace, list[int], list[tuple[bytes, int]], bytes]] = {}
        for index, (name, buffer) in enumerate(zip(names, buffers, strict=True)):
            namespace = self._namespace(name, buffer.layout, make=True)
            address = self._payload(buffer, store) if namespace is not None else 0
            if namespace is not None and address:
                tenant = tenant_of(name.group.tenant)
                entry = by_namespace.setdefault(namespace.id, (namespace, [], [], tenant))
                entry[1].append(index)
                entry[2].append((_key(name), address))
        for namespace, indices, payloads, tenant in by_namespace.values():
            with suppress(RewarmError):
                if tenant != NO_TENANT:
                    namespace.own([key for key, _ in payloads], tenant)
                store.parts.append((namespace.store(payloads), indices))
        return store

    def settled(self, store: ObjectStore) -> None:
        """Count a store that is done, and free its copies."""
        stored = store.stored()
        is_written = [False] * store.count
        for handle, indices in store.parts:
            for index, _, was_written in handle.take():
                is_written[indices[index]] = was_written
        self.counters.add("rewarm_kv_stores_total", sum(is_written), "stored")
        self.counters.add("rewarm_kv_stores_total", sum(stored) - sum(is_written), "skipped")
        if store.parts or not (self.kv.read_only or self.volume.is_over_budget):
            self.counters.add("rewarm_kv_stores_total", store.count - sum(stored), "failed")
        num_bytes = sum(size for size, written in zip(store.sizes, is_written, strict=True) if written)
        self.counters.add("rewarm_kv_store_bytes_total", num_bytes)
        for copy in store.copies:
            self._copied_bytes -= copy.num_bytes
            copy.close()
        store.copies.clear()

    def remove(self, names: Sequence[ObjectName]) -> list[bool]:
        """Remove objects, in every layout; waits for the disk. Returns of each whether it is gone."""
        gone = [False] * len(names)
        by_group: dict[tuple[Group, int], list[int]] = {}
        for index, name in enumerate(names):
            if record_key(name.chunk_hash) is not None and not self.kv.read_only:
                by_group.setdefault((name.group, len(name.chunk_hash)), []).append(index)
        for (group, hash_bytes), indices in by_group.items():
            keys = [_key(names[index]) for index in indices]
            left = [True] * len(keys)
            for _, namespace in self.catalog.all_namespaces(group, hash_bytes):
                ended = remove_records(self.volume, namespace, keys, timeout_s=REMOVE_WAIT_S)
                left = [so_far and now for so_far, now in zip(left, ended, strict=True)]
            for index, is_gone in zip(indices, left, strict=True):
                gone[index] = is_gone
        return gone

    def listing(self, group: Group, hash_bytes: int) -> Iterator[tuple[bytes, int]]:
        """(chunk hash, bytes) of what the volume has of a group, as the file system says."""
        for layout, namespace in self.catalog.all_namespaces(group, hash_bytes):
            for root in list(self.volume.roots):
                if not root.is_member or root.health.loads.is_on:
                    continue
                directory = root.paths.namespace(namespace.id)
                with suppress(OSError):
                    for key, _ in record_entries(directory, on_error=lambda _error: None):
                        yield key[:hash_bytes], layout.payload_bytes

    def _namespace(self, name: ObjectName, layout: Layout, *, make: bool) -> Namespace | None:
        if record_key(name.chunk_hash) is None or not 0 < layout.payload_bytes <= MAX_PAYLOAD_BYTES:
            return None
        with suppress(RewarmError, OSError):
            return self.catalog.use(name.group, len(name.chunk_hash), layout, make=make)
        return None

    def _target(self, buffer: Buffer) -> RecordTarget | None:
        size = buffer.layout.payload_bytes
        if record_bytes(size) <= self.slot_bytes:
            return ToBlocks(BlockPlanes(array("Q", [buffer.address]), size), array("q", [0]))
        if buffer.address % PAGE_BYTES == 0 and buffer.room_bytes >= round_up(size, PAGE_BYTES):
            return ToMemory(buffer.address)
        return None

    def _payload(self, buffer: Buffer, store: ObjectStore) -> int:
        """Address to write from; 0: there is no memory for a copy now."""
        size = buffer.layout.payload_bytes
        if buffer.address % PAGE_BYTES == 0 and buffer.room_bytes >= round_up(size, PAGE_BYTES):
            return buffer.address
        if self._copied_bytes + size > MAX_COPIED_BYTES:
            return 0
        copy = alloc_aligned(size)
        ctypes.memmove(copy.address, buffer.address, size)
        self._copied_bytes += size
        store.copies.append(copy)
        return copy.address


def _key(name: ObjectName) -> bytes:
    key = record_key(name.chunk_hash)
    assert key is not None
    return key


def _largest_seen(roots: Sequence[str], naming: Naming) -> int:
    """Bytes of the largest object that this kind of seat has on the volume; 0: none yet."""
    sizes = [0]
    for root in roots:
        with suppress(OSError):
            for namespace_id in namespace_ids(root):
                with suppress(RewarmError):
                    file = read_namespace_file(root, namespace_id)
                    server = file.identity.get("server")
                    if isinstance(server, dict) and server.get("kind") == naming.seat:
                        sizes.append(file.payload_bytes)
    return max(sizes)
