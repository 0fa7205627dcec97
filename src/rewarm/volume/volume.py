"""An open volume: its roots, its namespaces, and what runs beside the server's thread."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from rewarm.engine.base import Engine
from rewarm.errors import BusyError, DamageError, StorageError, UsageError, VolumeClosed
from rewarm.metrics import Counters
from rewarm.units import MIB
from rewarm.volume.access import write_error
from rewarm.volume.count import recount
from rewarm.volume.evict import evict_until
from rewarm.volume.handles import StoreHandle
from rewarm.volume.janitor.process import JanitorProcess
from rewarm.volume.layout import (
    NamespaceFile,
    RootFile,
    RootPaths,
    identity_id,
    read_namespace_file,
    read_roots,
    write_namespace_file,
)
from rewarm.volume.namespace import Namespace
from rewarm.volume.open_root import Root, device_bytes, file_identity
from rewarm.volume.placement import Placement
from rewarm.volume.recovery import recover_root
from rewarm.volume.session import Did, Session
from rewarm.volume.store_thread import StoreItem, StoreThread
from rewarm.volume.usage import UsageFile, read_usage
from rewarm.volume.wear import DAY_HOURS, WearFile, new_wear_file, read_wear

_log = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0
ROOM_TO_OPEN_BYTES = 4 * MIB
"""Evicted where a full disk has no room for a session's few files."""
_MAX_DAMAGED = 10_000


class Volume:
    """Made by Volume.open(). Thread-safe; belongs to the process that opened it."""

    def __init__(
        self,
        roots: Sequence[Root],
        *,
        engine: Engine,
        counters: Counters,
        read_only: bool,
        durable: bool,
        janitor: JanitorProcess | None,
        store_bytes_per_day: int = 0,
        rated_dwpd: float = 0.0,
    ) -> None:
        """Use Volume.open()."""
        self.roots = list(roots)
        self.engine = engine
        self.counters = counters
        self.read_only = read_only
        self.durable = durable
        self._store_bytes_per_day = store_bytes_per_day
        self._rated_dwpd = rated_dwpd
        self.placement = Placement(
            [root.file.root_id for root in roots], [float(root.file.capacity_bytes) for root in roots]
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        self._damaged: dict[tuple[bytes, bytes], None] = {}
        self._used_bytes = dict.fromkeys((root.name for root in roots), 0)
        self._is_closed = False
        self._janitor = janitor
        self._housekeeping = threading.Lock()
        self.counters.set("rewarm_volume_capacity_bytes", self.capacity_bytes)
        self._store_threads: list[StoreThread] = []
        if not read_only:
            self._store_threads = [StoreThread(self, number, self._housekeep) for number in range(len(self.roots))]

    @classmethod
    def open(
        cls,
        roots: Sequence[str],
        *,
        engine: Engine,
        counters: Counters | None = None,
        read_only: bool = False,
        durable: bool = False,
        janitor: bool = True,
        store_bytes_per_day: int = 0,
        rated_dwpd: float = 0.0,
    ) -> Volume:
        """Open a volume that create_volume() made.

        Args:
            roots: Its directories, in any order; roots that are left out hold nothing for this process.
            engine: Moves the bytes; stays the caller's, and open until the volume is closed.
            counters: Where to count; default: a new one.
            read_only: Load only; nothing on the roots is changed, no trace is left.
            durable: fsync each record.
            janitor: Start a process that evicts while this one lives, if no other one does.
            store_bytes_per_day: What all processes together may have written in any 24 hours before this one stores no
                more; spread over the roots by their capacity. 0: no bound.
            rated_dwpd: Drive writes a day that the flash is rated for, for a metric; 0: not known.
        Raises:
            UsageError: No volume there, roots of different volumes, a root named twice.
            FormatVersionError: A newer format.
            DamageError: The file that names a root is damaged.
            StorageError: A root that cannot be read, or written to where that was asked for.
        """
        opened: list[Root] = []
        try:
            for path, file in read_roots(roots).items():
                opened.append(_open_root(path, file, read_only=read_only))
            process = JanitorProcess([root.name for root in opened]) if janitor and not read_only else None
            return cls(
                opened,
                engine=engine,
                counters=counters or Counters(),
                read_only=read_only,
                durable=durable,
                janitor=process,
                store_bytes_per_day=store_bytes_per_day,
                rated_dwpd=rated_dwpd,
            )
        except BaseException:
            for root in opened:
                _close_root(root)
            raise

    @property
    def id(self) -> str:
        """The volume's own name, 32 hexadecimal digits."""
        return self.roots[0].file.volume_id

    @property
    def capacity_bytes(self) -> int:
        """What the opened roots may hold."""
        return sum(root.file.capacity_bytes for root in self.roots)

    @property
    def is_over_budget(self) -> bool:
        """Whether every root's store budget is spent: what is stored now is refused."""
        return bool(self._store_threads) and all(thread.refused_bytes for thread in self._store_threads)

    def store_budget_bytes(self, root_number: int) -> int:
        """What may be written to one root in any 24 hours; 0: no bound."""
        share = self.roots[root_number].file.capacity_bytes / self.capacity_bytes
        return max(1, int(self._store_bytes_per_day * share)) if self._store_bytes_per_day else 0

    def used_bytes(self) -> int:
        """What the opened roots hold, of all namespaces and processes; asks the file system."""
        return sum(read_usage(root.paths.usage).used_bytes for root in self.roots)

    def namespace(self, identity: Mapping[str, Any], *, payload_bytes: int) -> Namespace:
        """The namespace of an identity; made where it is new, and the same object for the same identity.

        Args:
            identity: Plain JSON: all that decides how a record's bytes are to be read.
            payload_bytes: Of every record in it.
        Raises:
            UsageError: The namespace is there with another payload size, or the identity is not JSON.
            StorageError: It could not be made.
        """
        self.check_usable()
        file = NamespaceFile(identity_id(identity), payload_bytes, dict(identity))
        with self._lock:
            known = self._namespaces.get(file.id)
            if known is None:
                for root in self.roots:
                    self._describe(root, file)
                known = self._namespaces[file.id] = Namespace(self, file)
            _check_payload(known.payload_bytes, payload_bytes)
            return known

    def wait_scanned(self, timeout_s: float | None = None) -> bool:
        """Whether every namespace that was asked for knows the records that were there at open."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            namespaces = list(self._namespaces.values())
        return all(n.wait_scanned(None if end is None else max(0.0, end - time.monotonic())) for n in namespaces)

    def close(self) -> None:
        """Write what is queued, as far as that takes a bounded time; end the janitor. Idempotent.

        Call before the engine is closed. Memory of stores that hang in a disk stays in use: their handles are not done.
        """
        with self._lock:
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
        ended = [thread.close(CLOSE_WAIT_S) for thread in self._store_threads] or [True] * len(self.roots)
        for root, has_ended in zip(self.roots, ended, strict=True):
            if has_ended:
                _close_root(root)
        if self._janitor is not None:
            self._janitor.close()
            self._count_evicted(self._janitor)

    def check_usable(self) -> None:
        """Raises VolumeClosed, or BusyError in a forked child."""
        if self._is_closed:
            raise VolumeClosed("the volume is closed")
        if os.getpid() != self._pid:
            raise BusyError("this volume belongs to the parent process", hint="open the volume after fork()")

    # What follows is for the namespaces and the store threads of this volume.

    def queue_stores(self, namespace: Namespace, payloads: Sequence[tuple[bytes, int]], handle: StoreHandle) -> None:
        """Hand records to the threads of their roots."""
        if self.read_only:
            raise UsageError("this volume was opened read-only")
        for index, (key, address) in enumerate(payloads):
            order = self.placement.order(key)
            number = next((n for n in order if not self.roots[n].health.stores.is_on), order[0])
            self._store_threads[number].put(StoreItem(namespace, key, address, handle, index))

    def note_damaged(self, root: Root, namespace_id: bytes, key: bytes) -> None:
        """A record failed its check: absent from now on, until it is written again."""
        self.counters.add("rewarm_damaged_records_total", 1, root.name)
        with self._lock:
            self._damaged[namespace_id, key] = None
            if len(self._damaged) > _MAX_DAMAGED:
                del self._damaged[next(iter(self._damaged))]
        if root.session is not None:
            root.session.note(Did.DAMAGED, namespace_id, (key,))

    def is_damaged(self, namespace_id: bytes, key: bytes) -> bool:
        """Whether a record failed its check and was not written since."""
        return (namespace_id, key) in self._damaged

    def note_written(self, namespace_id: bytes, key: bytes) -> None:
        """A record was written, whole."""
        if self._damaged:
            with self._lock:
                self._damaged.pop((namespace_id, key), None)

    def _describe(self, root: Root, file: NamespaceFile) -> None:
        """Make sure that ``namespace.json`` is there."""
        try:
            found = read_namespace_file(root.name, file.id)
        except (UsageError, DamageError):
            if not self.read_only:
                try:
                    write_namespace_file(root.name, file)
                except OSError as error:
                    raise StorageError(
                        f"{root.name}: {error.strerror}", path=root.name, errno=error.errno or 0
                    ) from error
        else:
            _check_payload(found.payload_bytes, file.payload_bytes)

    def _housekeep(self) -> None:
        """About once a second, from a store thread: gauges, and the janitor's life."""
        if not self._housekeeping.acquire(blocking=False):
            return
        try:
            if self._janitor is not None and not self._is_closed:
                self._janitor.ensure()
                self._count_evicted(self._janitor)
            record_count = sum(len(namespace) for namespace in list(self._namespaces.values()))
            self.counters.set("rewarm_volume_records", record_count)
            self.counters.set("rewarm_kv_stores_paused", float(any(thread.is_full for thread in self._store_threads)))
            for number, root in enumerate(self.roots):
                self._count_root(root)
                if not root.health.stores.is_on:
                    self._count_wear(number, root)
            self.counters.set("rewarm_volume_used_bytes", sum(self._used_bytes.values()))
        finally:
            self._housekeeping.release()

    def _count_root(self, root: Root) -> None:
        self.counters.set("rewarm_root_healthy", float(not root.health.loads.is_on), root.name)
        if root.health.stores.is_on:
            return
        usage = read_usage(root.paths.usage)
        if usage.is_known:
            self._used_bytes[root.name] = usage.used_bytes

    def _count_wear(self, number: int, root: Root) -> None:
        wear, now_s = read_wear(root.paths.wear), time.time()
        self._store_threads[number].note_wear(wear, now_s)
        written, device = wear.written_since(DAY_HOURS, now_s), device_bytes(root.name)
        self.counters.set("rewarm_root_written_day_bytes", written, root.name)
        self.counters.set("rewarm_root_dwpd", written / device, root.name)
        if self._rated_dwpd:
            self.counters.set("rewarm_root_endurance_ratio", written / device / self._rated_dwpd, root.name)

    def _count_evicted(self, janitor: JanitorProcess) -> None:
        """What the own child evicted: of all the processes of a volume, one counts each record."""
        records, num_bytes = janitor.take_evicted()
        self.counters.add("rewarm_evicted_records_total", records)
        self.counters.add("rewarm_evicted_bytes_total", num_bytes)


def _check_payload(there: int, asked: int) -> None:
    if there != asked:
        raise UsageError(f"this namespace has records of {there} bytes, not {asked}")


def _open_root(path: str, file: RootFile, *, read_only: bool) -> Root:
    paths = RootPaths(path)
    try:
        identity = file_identity(paths.volume_file)
        session = None if read_only else _begin_session(paths)
    except OSError as error:
        refused = write_error(path, error)
        refused.hint += "; a server can open it read-only" if refused.hint else ""
        raise refused from error
    return Root(paths, file, session, UsageFile(paths.usage), WearFile(paths.wear), identity=identity)


def _begin_session(paths: RootPaths) -> Session:
    """Bring a root in order and begin; where the disk is full, some records make room for that first."""
    try:
        return _bring_in_order(paths)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
    used_bytes = read_usage(paths.usage).used_bytes
    evict_until([paths.root], lambda capacity: min(capacity, capacity - used_bytes + ROOM_TO_OPEN_BYTES))
    return _bring_in_order(paths)


def _bring_in_order(paths: RootPaths) -> Session:
    _make_state(paths)
    recovery = recover_root(paths)
    if recovery is not None and recovery.num_removed:
        _log.warning(
            "%s: %d of %d records were not whole after an unclean stop and were removed",
            paths.root,
            recovery.num_removed,
            recovery.num_records,
        )
    with closing(UsageFile(paths.usage)) as usage:
        if not usage.read().is_known or (recovery is not None and recovery.num_records):
            recount(paths, usage)
    return Session(paths)


def _make_state(paths: RootPaths) -> None:
    """What is missing of the directory for locks and logs is made again: nothing in it is needed to read a record."""
    for directory in (paths.state, paths.sessions, paths.quarantine):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    if not os.path.lexists(paths.wear):
        with suppress(FileExistsError):
            new_wear_file(paths.wear)


def _close_root(root: Root) -> None:
    if root.session is not None:
        root.session.close()
    root.usage.close()
    root.wear.close()
