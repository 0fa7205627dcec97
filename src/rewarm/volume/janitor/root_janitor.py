"""The janitor of one root: folds the logs in, evicts, quarantines, removes what dead processes left, syncs."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from rewarm.engine.checksum import crc32c
from rewarm.errors import DamageError, RewarmError, UsageError
from rewarm.units import GIB, MIB
from rewarm.volume.check import RecordChecker, remove_record
from rewarm.volume.count import described_namespaces, record_entries, recount
from rewarm.volume.janitor.order import MAX_SHARE, MIN_SHARE, EvictionOrder
from rewarm.volume.layout import (
    NamespaceFile,
    RootPaths,
    namespace_ids,
    open_state,
    read_namespace_file,
    read_root_file,
    read_small_file,
    remove_dead_temporaries,
    replace_file,
    to_text,
)
from rewarm.volume.members import is_removed
from rewarm.volume.open_root import file_identity
from rewarm.volume.pins import Pin, WatchedPins
from rewarm.volume.quota import NO_TENANT, WatchedQuotas
from rewarm.volume.recovery import host_name, write_mark
from rewarm.volume.session import Did, SessionReader, remove_unnamed, session_directories
from rewarm.volume.usage import Usage, UsageFile

_log = logging.getLogger(__name__)

STEP_S = 0.1
LOOK_AROUND_S = 2.0
"""Between two looks for new namespaces and dead sessions."""
SYNC_S = 300.0
"""Between two syncs of the file system: at most this much of the newest records is checked after an unclean stop."""
SYNC_BYTES = 8 * GIB
"""Stored since the last sync, that bring the next one forward: it bounds what is checked after an unclean stop."""
RECOUNT_S = 900.0
RECOUNT_SOON_S = 5.0
"""After a count while somebody wrote, which may be too high; at least 400 times as long as counting takes: four roots
of 250,000 records each then cost 1 % of a core."""
SAVE_S = 300.0
"""Between two times that the order is saved: 72 bytes and about 1.5 us a record."""
MAX_HEADROOM_BYTES = 256 * MIB
"""Kept free, so that a burst of stores need not wait: 2 % of the capacity, at most this."""
MAX_QUARANTINED = 8
_MAX_NAMESPACES = 1 << 16
_MAX_ORDER_BYTES = 4 * GIB
_MAX_PAUSE_S = 60.0
_UNLINK_BATCH = 64
ORDER_ENTRY = struct.Struct("<B7s32s32s")
"""State, tenant, namespace id, key."""
ORDER_MAGIC = b"RWO1"
_SHARE_ENTRY = (128, NO_TENANT, bytes(32))
"""State, tenant and namespace id of the entry that is no record."""
_SHARE = struct.Struct("<d24x")


class RootJanitor:
    """Used by one thread. ``run`` works while it holds the lock; ``step`` is one round of it."""

    def __init__(self, root: str, *, heeds_pins: bool = True) -> None:
        """
        Args:
            root: Directory.
            heeds_pins: False: what is pinned goes like the rest, because somebody asked for that.
        """
        self._paths = RootPaths(root)
        file = read_root_file(root)
        self._capacity_bytes = file.capacity_bytes
        self._root_id = file.root_id
        self._is_removed = False
        self._identity = file_identity(self._paths.volume_file)
        self._usage = UsageFile(self._paths.usage)
        self._order = EvictionOrder()
        self._namespaces: list[NamespaceFile] = []
        self._numbers: dict[bytes, bytes] = {}
        self._readers: dict[str, SessionReader] = {}
        self._next_look = self._next_sync = self._next_save = self._next_recount = 0.0
        self._synced_bytes = 0
        self._is_ready = self._is_exact = False
        self._changed = False
        self._quotas = WatchedQuotas(root)
        self._pins = WatchedPins(root) if heeds_pins else None
        self._pinned: list[Pin] = []
        self._num_pin_namespaces = 0
        self._told_tenants: dict[str, int] = {}
        self.evicted_records = self.evicted_bytes = 0
        """What this object evicted, so far; read by another thread."""

    @property
    def evicted_unread(self) -> int:
        """Of those records, how many nobody had used since they were stored."""
        return self._order.num_unread

    def run(self, stop: Callable[[float], bool]) -> None:
        """Wait for the lock, then work until ``stop(seconds)``, which waits that long, says True."""
        descriptor = open_state(self._paths.janitor_lock)
        try:
            while not self._lock(descriptor):
                if stop(STEP_S):
                    return
            self._work(stop)
            self.finish()
        finally:
            os.close(descriptor)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the lock for the length of the block; yields False where another janitor has it."""
        descriptor = open_state(self._paths.janitor_lock)
        try:
            yield self._lock(descriptor)
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with suppress(OSError):  # for people; a full disk is what a janitor is for
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return True

    def _work(self, stop: Callable[[float], bool]) -> None:
        """Rounds until the end; after an error with growing pauses, and one line for each new error."""
        pause_s, said = 0.0, ""
        while not self._is_removed and not stop(pause_s):
            trouble = self._try_step()
            if trouble and trouble != said:
                _log.warning("%s: %s", self._paths.root, trouble)
            pause_s = min(max(1.0, 2 * pause_s), _MAX_PAUSE_S) if trouble else STEP_S
            said = trouble

    def _try_step(self) -> str:
        """One round; returns what went wrong."""
        try:
            if not self._is_ready:
                self.prepare()
            self.step()
        except (OSError, RewarmError) as error:
            return str(error)
        return ""

    def prepare(self) -> None:
        """Learn what is there, and in which order it was to go."""
        self._remove_temporaries()
        self._look_for_namespaces()
        self._order.restore(self._load_order(), self._present())
        self._recount()
        self._synced_bytes = self._usage.read().reserved_bytes
        self._is_ready = True
        self._next_sync = time.monotonic() + SYNC_S
        self._next_save = time.monotonic() + SAVE_S

    def step(self) -> None:
        """One round; cheap where nothing is to do."""
        if file_identity(self._paths.volume_file) != self._identity:
            raise OSError(errno.ENODEV, "another file system is mounted here now", self._paths.root)
        now = time.monotonic()
        usage = self._usage.read()
        needed = self._needed_bytes(usage)
        if now >= self._next_look or needed:
            self._is_removed = is_removed(self._paths.root, self._root_id)
            self._look_for_namespaces()
            self._fold_sessions()
            self._next_look = now + LOOK_AROUND_S
            self._heed_pins()
            self._keep_quotas()
        if needed:
            self.evict(needed)
        if now >= self._next_recount:
            self._recount()
        if now >= self._next_sync or usage.reserved_bytes - self._synced_bytes >= SYNC_BYTES:
            self._next_sync, self._synced_bytes = now + SYNC_S, usage.reserved_bytes  # first: one that fails is not due
            write_mark(self._paths, host_name())
        if now >= self._next_save:
            self._next_save = now + SAVE_S
            self.save_order()

    def _recount(self) -> None:
        started = time.monotonic()
        self._is_exact = recount(self._paths, self._usage)
        now = time.monotonic()
        soon = min(RECOUNT_S, max(RECOUNT_SOON_S, 400 * (now - started)))
        self._next_recount = now + (RECOUNT_S if self._is_exact else soon)

    def evict(self, num_bytes: int) -> int:
        """Remove records until this many bytes are free that were not; returns how many are."""
        freed = self._evict_undescribed()
        while freed < num_bytes:
            batch_bytes = self._evict_batch(num_bytes - freed)
            freed += batch_bytes
            if not self._order.can_pop:
                # The budget says that there is more: records that no log told of, or room that killed writers had.
                self._order.restore((), self._present())
                self._recount()
                if not batch_bytes and not self._order.can_pop:
                    with self._usage.update() as usage:
                        usage.pressure_bytes = 0
                    break
        self._changed = self._changed or freed > 0
        return freed

    def _evict_batch(self, num_bytes: int) -> int:
        """One update of the budget's worth of evictions; returns the bytes that were freed."""
        freed = records = 0
        for _ in range(_UNLINK_BATCH):
            name = self._order.pop() if freed < num_bytes else None
            if name is None:
                break
            if self._unlink(name):
                freed += self._order.size_of(name)
                records += 1
        self._note_evicted(freed, records)
        return freed

    def _note_evicted(self, num_bytes: int, num_records: int) -> None:
        with self._usage.update() as usage:
            usage.used_bytes = max(0, usage.used_bytes - num_bytes)
            usage.pressure_bytes = max(0, usage.pressure_bytes - num_bytes)
            usage.evicted_records += num_records
            usage.evicted_bytes += num_bytes
        self.evicted_records += num_records
        self.evicted_bytes += num_bytes

    def _heed_pins(self) -> None:
        """Tell the order which records may not go. Those of a namespace that is not here yet wait for it."""
        if self._pins is None:
            return
        num_namespaces = len(self._namespaces)
        try:
            changed = self._pins.changed()
        except OSError as error:
            _log.warning("%s: the pins stay as they were: %s", self._paths.root, error)
            return
        if changed is None and num_namespaces == self._num_pin_namespaces:
            return
        self._pinned = self._pinned if changed is None else list(changed)
        self._num_pin_namespaces = num_namespaces
        entries = (entry for pin in self._pinned for entry in pin.entries)
        self._order.pin({self._numbers[place] + key for place, key in entries if place in self._numbers})

    def _keep_quotas(self) -> None:
        """Remove what tenants have above their quotas, and a little more, so that each look need not."""
        try:
            quotas = self._quotas.now()
        except RewarmError as error:
            _log.warning("%s: the quotas stay as they were: %s", self._paths.root, error)
            return
        held = self._order.held()
        for tenant, num_bytes in held.items():
            limit = quotas.limit_bytes(tenant, self._capacity_bytes)
            if num_bytes > limit:
                names = self._order.pop_of(tenant, num_bytes - limit + limit // 50)
                removed = [name for name in names if self._unlink(name)]
                self._note_evicted(sum(map(self._order.size_of, removed)), len(removed))
                self._changed = True
        told = {tenant.hex(): num_bytes for tenant, num_bytes in self._order.held().items() if tenant != NO_TENANT}
        if told != self._told_tenants:
            with suppress(OSError):  # for people; a full disk is what a janitor is for
                replace_file(self._paths.tenants, to_text(told))
                self._told_tenants = told

    def _evict_undescribed(self) -> int:
        """Remove records that no description tells how to read: no server that is to come can use them."""
        freed = records = 0
        for namespace_id in namespace_ids(self._paths.root):
            if namespace_id in self._numbers or not self._is_lost(namespace_id):
                continue
            for _, entry in record_entries(self._paths.namespace(namespace_id)):
                with suppress(FileNotFoundError):
                    freed += entry.stat(follow_symlinks=False).st_size
                    records += 1
                    remove_record(entry.path)
        if records:
            self._note_evicted(freed, records)
        return freed

    def _is_lost(self, namespace_id: bytes) -> bool:
        """Whether a namespace's description is missing or damaged; one of a newer format is neither."""
        try:
            read_namespace_file(self._paths.root, namespace_id)
        except (UsageError, DamageError):
            return True
        except RewarmError:
            return False
        return False

    def _present(self) -> Iterator[bytes]:
        """Names of all records, from the directories."""
        for namespace in self._namespaces:
            number = self._numbers[namespace.id]
            for key, _ in record_entries(self._paths.namespace(namespace.id)):
                yield number + key

    def _needed_bytes(self, usage: Usage) -> int:
        """Bytes to evict now: 0, or enough for the headroom to be whole again."""
        if not usage.is_known:
            self._recount()
            return 0
        headroom = min(self._capacity_bytes // 50, MAX_HEADROOM_BYTES)
        headroom = max(headroom, 2 * max((namespace.record_bytes for namespace in self._namespaces), default=0))
        headroom = min(headroom, self._capacity_bytes // 2)
        over = usage.used_bytes - (self._capacity_bytes - headroom)
        if usage.pressure_bytes:  # beyond the headroom, so that who waits beside the one that asked finds room too
            return usage.pressure_bytes + max(0, over)
        return over if over > headroom // 2 else 0

    def _unlink(self, name: bytes) -> bool:
        namespace = self._namespaces[int.from_bytes(name[:2], "little")]
        try:
            remove_record(self._paths.record(namespace.id, name[2:]))
        except FileNotFoundError:
            return False
        return True

    def _remove_temporaries(self) -> None:
        """Of small files whose writer was killed or lost its power; a record's own goes with its session."""
        with suppress(FileNotFoundError):
            now_s = os.stat(self._paths.janitor_lock).st_mtime  # written to when the lock was taken
            for directory in (
                self._paths.state,
                self._paths.pins,
                *map(self._paths.namespace, namespace_ids(self._paths.root)),
            ):
                remove_dead_temporaries(directory, now_s)

    def _look_for_namespaces(self) -> None:
        found = described_namespaces(self._paths, but=self._numbers.keys())
        for namespace in found[: _MAX_NAMESPACES - len(self._namespaces)]:
            number = len(self._namespaces).to_bytes(2, "little")
            self._numbers[namespace.id] = number
            self._namespaces.append(namespace)
            self._order.set_size(number, namespace.record_bytes)

    def _fold_sessions(self) -> None:
        directories = session_directories(self._paths)
        for directory in directories:
            reader = self._readers.setdefault(directory, SessionReader(directory))
            with suppress(OSError):  # gone meanwhile, or nothing that a session has: the next one is looked at
                is_dead = reader.is_dead()
                self._fold(reader)
                if is_dead:
                    if reader.inflight_bytes():
                        self._next_recount = 0.0
                    reader.remove()
        self._readers = {name: self._readers[name] for name in directories if os.path.isdir(name)}
        remove_unnamed(self._paths)

    def _fold(self, reader: SessionReader) -> None:
        """Newest stores first: the last chunk of a context, which no other one needs, is to go before its first."""
        entries = [entry for entry in reader.read() if entry[1] in self._numbers]
        for did, namespace_id, key, _ in reversed(entries):
            if did is Did.STORED:
                self._order.add(self._numbers[namespace_id] + key)
        for did, namespace_id, key, tenant in entries:
            if did is Did.OWNED:
                self._order.own(self._numbers[namespace_id] + key, tenant)
            elif did is Did.TOUCHED:
                self._order.touch(self._numbers[namespace_id] + key)
            elif did is Did.DAMAGED:
                self._quarantine(namespace_id, key)
        self._changed = self._changed or bool(entries)

    def _quarantine(self, namespace_id: bytes, key: bytes) -> None:
        """Put a record aside for people to look at, unless it was written anew meanwhile."""
        namespace = self._namespaces[int.from_bytes(self._numbers[namespace_id], "little")]
        path = self._paths.record(namespace_id, key)
        with closing(RecordChecker(namespace)) as checker:
            # EIO: a server has read it twice, and others in between.
            if checker.check(path, key) not in {errno.EBADMSG, errno.EIO}:
                return
        target = os.path.join(self._paths.quarantine, f"{time.time_ns()}-{namespace_id.hex()[:16]}-{key.hex()}.rec")
        with suppress(FileNotFoundError):
            os.rename(path, target)
            self._usage.free(namespace.record_bytes - os.stat(target, follow_symlinks=False).st_size)
        self._order.discard(self._numbers[namespace_id] + key)
        self._prune_quarantine()

    def _prune_quarantine(self) -> None:
        for name in sorted(os.listdir(self._paths.quarantine))[:-MAX_QUARANTINED]:
            path = os.path.join(self._paths.quarantine, name)
            with suppress(FileNotFoundError):
                num_bytes = os.stat(path, follow_symlinks=False).st_size
                remove_record(path)
                self._usage.free(num_bytes)

    def finish(self) -> None:
        """Save the order and close."""
        with suppress(OSError, RewarmError):
            if self._is_ready and file_identity(self._paths.volume_file) == self._identity:
                self._fold_sessions()
                if not self._is_exact or not self._next_recount:
                    self._recount()
                write_mark(self._paths, host_name())
                self.save_order()
        self._usage.close()

    def save_order(self) -> None:
        """Write down in which order the records are to go, if that has changed."""
        if not self._changed:
            return
        body = bytearray(ORDER_ENTRY.pack(*_SHARE_ENTRY, _SHARE.pack(self._order.small_share)))
        for name, state, tenant in self._order.dump():
            body += ORDER_ENTRY.pack(state, tenant, self._namespaces[int.from_bytes(name[:2], "little")].id, name[2:])
        replace_file(self._paths.order, ORDER_MAGIC + crc32c(memoryview(body)).to_bytes(4, "little") + body)
        self._changed = False

    def _load_order(self) -> Iterator[tuple[bytes, int, bytes]]:
        """(name, state, tenant) of what was saved; the share that the small queue had is taken over."""
        try:
            content = read_small_file(self._paths.order, _MAX_ORDER_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ELOOP, errno.EFBIG}:
                raise
            content = b""
        body = memoryview(content)[8:]
        whole = content[:4] == ORDER_MAGIC and len(body) % ORDER_ENTRY.size == 0
        if not whole or crc32c(body) != int.from_bytes(content[4:8], "little"):
            _log.warning("%s is damaged: records are evicted in another order than they were used", self._paths.order)
            return
        for state, tenant, namespace_id, key in ORDER_ENTRY.iter_unpack(body):
            if namespace_id in self._numbers:
                yield self._numbers[namespace_id] + key, state, tenant
            elif (state, tenant, namespace_id) == _SHARE_ENTRY:
                self._order.small_share = min(MAX_SHARE, max(MIN_SHARE, _SHARE.unpack(key)[0]))
