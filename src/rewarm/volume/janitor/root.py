"""The janitor of one root: folds the logs in, evicts, quarantines, removes what dead processes left, syncs."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from rewarm.engine.checksum import crc32c
from rewarm.units import MIB
from rewarm.volume.check import RecordChecker
from rewarm.volume.count import described_namespaces, record_names, recount
from rewarm.volume.janitor.order import EvictionOrder
from rewarm.volume.layout import (
    FILE_MODE,
    NamespaceFile,
    RootPaths,
    read_root_file,
    replace_file,
)
from rewarm.volume.recovery import host_name, write_mark
from rewarm.volume.root import file_identity
from rewarm.volume.session import NEW_PREFIX, Did, SessionReader
from rewarm.volume.usage import Usage, UsageFile

_log = logging.getLogger(__name__)

STEP_S = 0.1
LOOK_AROUND_S = 2.0
"""Between two looks for new namespaces and dead sessions."""
SYNC_S = 300.0
"""Between two syncs of the file system: at most this much of the newest records is checked after an unclean stop."""
RECOUNT_S = 900.0
MAX_HEADROOM_BYTES = 256 * MIB
"""Kept free, so that a burst of stores need not wait: 2 % of the capacity, at most this."""
MAX_QUARANTINED = 8
UNBORN_S = 600.0
"""Age from which a session that was never locked belongs to no process."""
_UNLINK_BATCH = 64
_ORDER_ENTRY = struct.Struct("<B7x32s32s")
_ORDER_MAGIC = b"RWO1"


class RootJanitor:
    """Used by one thread. ``run`` works while it holds the lock; ``step`` is one round of it."""

    def __init__(self, root: str) -> None:
        self._paths = RootPaths(root)
        self._capacity_bytes = read_root_file(root).capacity_bytes
        self._identity = file_identity(self._paths.volume_file)
        self._usage = UsageFile(self._paths.usage)
        self._order = EvictionOrder()
        self._namespaces: list[NamespaceFile] = []
        self._numbers: dict[bytes, bytes] = {}
        self._readers: dict[str, SessionReader] = {}
        self._next_look = self._next_sync = self._next_recount = 0.0
        self._changed = False

    def run(self, stop: Callable[[float], bool]) -> None:
        """Wait for the lock, then work until ``stop(seconds)``, which waits that long, says True."""
        descriptor = os.open(self._paths.janitor_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            while not _try_lock(descriptor):
                if stop(STEP_S):
                    return
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            is_ready = False
            while True:
                try:
                    if not is_ready:
                        self.prepare()
                        is_ready = True
                    self.step()
                except OSError as error:
                    _log.warning("%s: %s", self._paths.root, error)
                    if stop(1.0):
                        break
                if stop(STEP_S):
                    break
            self._finish()
        finally:
            os.close(descriptor)

    def prepare(self) -> None:
        """Learn what is there, and in which order it was to go."""
        self._look_for_namespaces()
        self._order.restore(self._load_order(), self._present())
        recount(self._paths, self._usage)
        now = time.monotonic()
        self._next_sync, self._next_recount = now + SYNC_S, now + RECOUNT_S

    def step(self) -> None:
        """One round; cheap where nothing is to do."""
        if file_identity(self._paths.volume_file) != self._identity:
            raise OSError(errno.ENODEV, "another file system is mounted here now", self._paths.root)
        now = time.monotonic()
        usage = self._usage.read()
        needed = self._needed_bytes(usage)
        if now >= self._next_look or needed:
            self._look_for_namespaces()
            self._fold_sessions()
            self._next_look = now + LOOK_AROUND_S
        if needed:
            self.evict(needed)
        if now >= self._next_recount:
            recount(self._paths, self._usage)
            self._next_recount = now + RECOUNT_S
        if now >= self._next_sync:
            self._sync()
            self._next_sync = now + SYNC_S

    def evict(self, num_bytes: int) -> int:
        """Remove records until this many bytes are free that were not; returns how many are."""
        freed = 0
        while freed < num_bytes:
            batch_bytes = self._evict_batch(num_bytes - freed)
            freed += batch_bytes
            if not len(self._order):
                # The budget says that there is more: records that no log told of, or room that killed writers had.
                self._order.restore({}, self._present())
                recount(self._paths, self._usage)
                if not batch_bytes:
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
        with self._usage.update() as usage:
            usage.used_bytes = max(0, usage.used_bytes - freed)
            usage.pressure_bytes = max(0, usage.pressure_bytes - freed)
            usage.evicted_records += records
            usage.evicted_bytes += freed
        return freed

    def _present(self) -> set[bytes]:
        """Names of all records, from the directories."""
        return {
            self._numbers[namespace.id] + bytes.fromhex(name[:64])
            for namespace in self._namespaces
            for name in record_names(self._paths.namespace(namespace.id))
        }

    def _needed_bytes(self, usage: Usage) -> int:
        """Bytes to evict now: 0, or enough for the headroom to be whole again."""
        if not usage.is_known:
            recount(self._paths, self._usage)
            return 0
        headroom = min(self._capacity_bytes // 50, MAX_HEADROOM_BYTES)
        headroom = max(headroom, 2 * max((namespace.record_bytes for namespace in self._namespaces), default=0))
        headroom = min(headroom, self._capacity_bytes // 2)
        over = usage.used_bytes - (self._capacity_bytes - headroom)
        needed = over if over > headroom // 2 else 0
        return max(needed, usage.pressure_bytes, 0)

    def _unlink(self, name: bytes) -> bool:
        namespace = self._namespaces[int.from_bytes(name[:2], "little")]
        try:
            os.unlink(self._paths.record(namespace.id, name[2:]))
        except FileNotFoundError:
            return False
        return True

    def _look_for_namespaces(self) -> None:
        for namespace in described_namespaces(self._paths):
            if namespace.id not in self._numbers:
                number = len(self._namespaces).to_bytes(2, "little")
                self._numbers[namespace.id] = number
                self._namespaces.append(namespace)
                self._order.set_size(number, namespace.record_bytes)

    def _fold_sessions(self) -> None:
        for name in os.listdir(self._paths.sessions):
            if name.startswith(NEW_PREFIX):
                self._remove_unborn(os.path.join(self._paths.sessions, name))
                continue
            reader = self._readers.setdefault(name, SessionReader(os.path.join(self._paths.sessions, name)))
            is_dead = reader.is_dead()
            with suppress(FileNotFoundError):
                self._fold(reader)
                if is_dead:
                    if reader.remove():
                        self._next_recount = 0.0
                    del self._readers[name]

    @staticmethod
    def _remove_unborn(directory: str) -> None:
        """A session whose process died before its lock was held; a young one may be about to be locked."""
        with suppress(FileNotFoundError):
            if time.time() - os.stat(directory).st_mtime > UNBORN_S:
                SessionReader(directory).remove()

    def _fold(self, reader: SessionReader) -> None:
        """Newest stores first: the last chunk of a context, which no other one needs, is to go before its first."""
        entries = list(reader.read())
        for did, namespace_id, key in reversed(entries):
            number = self._numbers.get(namespace_id)
            if number is None:
                continue
            name = number + key
            if did is Did.STORED:
                self._order.add(name)
            elif did is Did.TOUCHED:
                self._order.touch(name)
            else:
                self._quarantine(namespace_id, key)
        self._changed = self._changed or bool(entries)

    def _quarantine(self, namespace_id: bytes, key: bytes) -> None:
        """Put a record aside for people to look at, unless it was written anew meanwhile."""
        namespace = self._namespaces[int.from_bytes(self._numbers[namespace_id], "little")]
        path = self._paths.record(namespace_id, key)
        with closing(RecordChecker(namespace)) as checker:
            if checker.check(path, key) != errno.EBADMSG:
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
                found = os.stat(path, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):  # somebody put it where a record should be
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
                self._usage.free(found.st_size)

    def _sync(self) -> None:
        write_mark(self._paths, host_name())
        self._save_order()

    def _finish(self) -> None:
        with suppress(OSError):
            if file_identity(self._paths.volume_file) == self._identity:
                self._fold_sessions()
                self._sync()
        self._usage.close()

    def _save_order(self) -> None:
        if not self._changed:
            return
        body = b"".join(
            _ORDER_ENTRY.pack(state, self._namespaces[int.from_bytes(name[:2], "little")].id, name[2:])
            for name, state in self._order.dump()
        )
        replace_file(self._paths.order, _ORDER_MAGIC + crc32c(body).to_bytes(4, "little") + body)
        self._changed = False

    def _load_order(self) -> dict[bytes, int]:
        try:
            content = Path(self._paths.order).read_bytes()
        except FileNotFoundError:
            return {}
        body = content[8:]
        whole = content[:4] == _ORDER_MAGIC and len(body) % _ORDER_ENTRY.size == 0
        if not whole or crc32c(body) != int.from_bytes(content[4:8], "little"):
            _log.warning("%s is damaged: records are evicted in another order than they were used", self._paths.order)
            return {}
        return {
            self._numbers[namespace_id] + key: state
            for state, namespace_id, key in _ORDER_ENTRY.iter_unpack(body)
            if namespace_id in self._numbers
        }


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
