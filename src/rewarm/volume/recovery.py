"""After an unclean boot: look at what was written last before any of it counts as present.

KV records are renamed into place without an fsync. A power cut may leave names of the last seconds on files that are
empty, short or hold zeros (XFS does). Each host keeps a mark of its boot and of the time up to which it has synced; a
mark of another boot means that records written since are checked whole, once, at the next open.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256

from rewarm.errors import RewarmError
from rewarm.volume.check import RecordChecker, remove_record
from rewarm.volume.count import record_entries
from rewarm.volume.layout import (
    NamespaceFile,
    RootPaths,
    namespace_ids,
    open_state,
    read_namespace_file,
    read_small_file,
    replace_file,
    to_text,
)

_CLOCK_SLACK_NS = 10 * 10**9
"""Time stamps of files and of the mark come from clocks that may differ a little (NFS)."""


@dataclass(frozen=True, slots=True)
class SyncMark:
    """What one host's mark says."""

    boot_id: str
    synced_ns: int
    """What was written before is on the device."""


@dataclass(slots=True)
class Recovery:
    """What a recovery did."""

    num_records: int = 0
    """Records looked at by name and size."""
    num_checked: int = 0
    """Of these: read and checked whole."""
    num_removed: int = 0
    """Of these: no whole record, removed."""


def boot_id() -> str:
    """Of the running kernel; empty where it does not tell."""
    with suppress(OSError):
        return read_small_file("/proc/sys/kernel/random/boot_id").decode().strip()
    return ""


def host_name() -> str:
    """16 characters that stay the same for this machine over reboots; one for all where it has no id of its own."""
    machine = b""
    with suppress(OSError):
        machine = read_small_file("/etc/machine-id").strip()
    return sha256(machine).hexdigest()[:16]


def read_mark(paths: RootPaths, host: str) -> SyncMark | None:
    """A host's mark; None: it never wrote here, or the mark says nothing sensible."""
    try:
        found = json.loads(read_small_file(paths.sync_mark(host)))
        return SyncMark(str(found["boot_id"]), int(found["synced_ns"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return SyncMark("", 0)


def write_mark(paths: RootPaths, host: str) -> None:
    """Sync the file system below a root and note that it was done.

    Raises:
        OSError: The sync failed, or the mark could not be written.
    """
    now = time.time_ns()
    _sync_file_system(paths.root)
    _replace_mark(paths, host, now)


def recover_root(paths: RootPaths) -> Recovery | None:
    """Bring a root that this host last wrote in an earlier boot back into order; None: there was nothing to do.

    One process does it, others wait for it.
    """
    host = host_name()
    if not _needs_recovery(paths, host):
        return None
    with _lock(paths.recovery_lock):
        if not _needs_recovery(paths, host):
            return None
        mark = read_mark(paths, host)
        done = Recovery()
        if mark is not None:
            done = _check_since(paths, mark.synced_ns - _CLOCK_SLACK_NS)
            write_mark(paths, host)
        else:
            _replace_mark(paths, host, time.time_ns())
        return done


def _needs_recovery(paths: RootPaths, host: str) -> bool:
    mark = read_mark(paths, host)
    return mark is None or mark.boot_id != boot_id()


def _check_since(paths: RootPaths, since_ns: int) -> Recovery:
    done = Recovery()
    for namespace_id in namespace_ids(paths.root):
        try:
            namespace = read_namespace_file(paths.root, namespace_id)
        except RewarmError:
            continue  # described again by the next server that uses it; its records are checked when they are read
        _check_namespace(paths, namespace, since_ns, done)
    return done


def _check_namespace(paths: RootPaths, namespace: NamespaceFile, since_ns: int, done: Recovery) -> None:
    with closing(RecordChecker(namespace)) as checker:
        for key, entry in record_entries(paths.namespace(namespace.id)):
            done.num_records += 1
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            good = stat.S_ISREG(found.st_mode) and found.st_size == namespace.record_bytes
            if good and found.st_mtime_ns >= since_ns:
                done.num_checked += 1
                good = checker.check(entry.path, key) == 0
            if not good:
                with suppress(FileNotFoundError):
                    remove_record(entry.path)
                    done.num_removed += 1


def _replace_mark(paths: RootPaths, host: str, synced_ns: int) -> None:
    content = to_text({"boot_id": boot_id(), "synced_ns": synced_ns})
    replace_file(paths.sync_mark(host), content, durable=True)


def _sync_file_system(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(descriptor):
            number = ctypes.get_errno() or errno.EIO
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: str) -> Iterator[None]:
    descriptor = open_state(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
