"""One process's part of a root: a lock that tells whether it lives, its temporaries, and the log of what it did.

The log tells the janitor in which order to evict. Whoever gets the lock of a session knows that its process is gone.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum

from rewarm.volume.layout import DIR_MODE, RootPaths, open_regular, read_small_file
from rewarm.volume.live import LIVE_FILE
from rewarm.volume.quota import NO_TENANT

ENTRY = struct.Struct("<B7s32s32s")
"""Kind, tenant, namespace id, key: 72 bytes."""
NEW_PREFIX = "new-"
"""Of a session's directory until its lock is held."""
_LOG_PREFIX, _TEMPORARY_PREFIX = "log-", "tmp-"
_OWN_PREFIXES = (_LOG_PREFIX, _TEMPORARY_PREFIX)
_UNNAMED_S = 3600.0
_ROTATE_BYTES = 1 << 20
_MAX_LOG_FILES = 64
"""Without a janitor that removes those it has read, the oldest history is all that is kept: the log is advice, its loss
costs a worse order."""


class Did(IntEnum):
    """What a log entry says about a record."""

    STORED = 1
    TOUCHED = 2
    DAMAGED = 3
    """Its check failed: the janitor looks at it and quarantines it."""
    OWNED = 4
    """It is a tenant's; this may stand before the entry that it was stored."""


class Session:
    """Made by a process that stores or loads, on each of its roots. Thread-safe; only flush() and tell() do I/O."""

    def __init__(self, paths: RootPaths) -> None:
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        self.directory = os.path.join(paths.sessions, name)
        self._lock = threading.Lock()
        self._entries: list[bytes] = []
        self._file_number = 0
        self._file_bytes = 0
        self._temporary_number = 0
        self._lock_descriptor = self._log_descriptor = self._live_descriptor = -1
        # Locked before it has its name, so that no janitor takes it for a dead one.
        unnamed = os.path.join(paths.sessions, f"{NEW_PREFIX}{name}")
        os.mkdir(unnamed, DIR_MODE)
        try:
            self._lock_descriptor = open_regular(os.path.join(unnamed, "lock"), os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.set_inflight(0)  # while there is room for it
            os.rename(unnamed, self.directory)
        except BaseException:
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
            SessionReader(unnamed).remove()
            raise

    def note(self, did: Did, namespace_id: bytes, keys: Iterable[bytes], tenant: bytes = NO_TENANT) -> None:
        """Remember for the log; in memory until flush()."""
        entries = [ENTRY.pack(did, tenant, namespace_id, key) for key in keys]
        with self._lock:
            if len(self._entries) * ENTRY.size < _ROTATE_BYTES:
                self._entries += entries

    def flush(self) -> None:
        """Append what was noted to the log.

        Raises:
            OSError: It could not be written; what was noted is dropped.
        """
        with self._lock:
            content, self._entries = b"".join(self._entries), []
        if not content:
            return
        if self._log_descriptor < 0 or self._file_bytes >= _ROTATE_BYTES:
            if sum(name.startswith(_LOG_PREFIX) for name in os.listdir(self.directory)) >= _MAX_LOG_FILES:
                return
            self._close_log()
            path = os.path.join(self.directory, f"{_LOG_PREFIX}{self._file_number:06}")
            self._log_descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._file_number += 1
            self._file_bytes = 0
        num_written = os.write(self._log_descriptor, content)
        # What follows an entry that was cut (a full disk) goes into another file, where entries begin anew.
        self._file_bytes += _ROTATE_BYTES if num_written < len(content) else num_written

    def set_inflight(self, num_bytes: int) -> None:
        """Say how many bytes this process has reserved and not yet in place: who counts the root adds them."""
        os.pwrite(self._lock_descriptor, num_bytes.to_bytes(8, "little"), 0)

    def tell(self, content: bytes) -> None:
        """Say how this process does, to whoever watches.

        Raises:
            OSError: It could not be written.
        """
        if not content:
            return
        if self._live_descriptor < 0:
            self._live_descriptor = open_regular(os.path.join(self.directory, LIVE_FILE), os.O_RDWR | os.O_CREAT)
        os.pwrite(self._live_descriptor, content, 0)

    def temporary_path(self) -> str:
        """A name for a record while it is written; the janitor removes it if this process dies."""
        with self._lock:
            self._temporary_number += 1
            return f"{self.directory}/{_TEMPORARY_PREFIX}{self._temporary_number}"

    def close(self) -> None:
        """Flush, and let the janitor fold the log in and remove the directory. Idempotent."""
        with suppress(OSError):
            self.flush()
        self._close_log()
        if self._live_descriptor >= 0:
            os.close(self._live_descriptor)
            self._live_descriptor = -1
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _close_log(self) -> None:
        if self._log_descriptor >= 0:
            os.close(self._log_descriptor)
            self._log_descriptor = -1


class SessionReader:
    """The janitor's side: reads each log once, from where it stopped."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._offsets: dict[str, int] = {}

    def read(self) -> Iterator[tuple[Did, bytes, bytes, bytes]]:
        """(what, namespace id, key, tenant) of entries that were appended since; files that were read are removed, but
        not the newest.
        """
        names = sorted(name for name in os.listdir(self.directory) if name.startswith(_LOG_PREFIX))
        for name in names:
            path = os.path.join(self.directory, name)
            offset = self._offsets.get(name, 0)
            with os.fdopen(open_regular(path), "rb") as file:
                file.seek(offset)
                content = file.read()
            whole = len(content) - len(content) % ENTRY.size
            for kind, tenant, namespace_id, key in ENTRY.iter_unpack(content[:whole]):
                if kind in _KINDS:
                    yield Did(kind), namespace_id, key, tenant
            self._offsets[name] = offset + whole
            if name != names[-1]:
                os.unlink(path)
                del self._offsets[name]

    def is_dead(self) -> bool:
        """Whether the process is gone."""
        try:
            descriptor = open_regular(os.path.join(self.directory, "lock"), os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def inflight_bytes(self) -> int:
        """What the process has reserved and not in place, or had when it died.

        Raises:
            OSError: It does not say.
        """
        return int.from_bytes(read_small_file(os.path.join(self.directory, "lock"))[:8], "little")

    def remove(self) -> None:
        """Remove the directory of a dead session with its temporaries."""
        own = {"lock", LIVE_FILE}
        names = [name for name in os.listdir(self.directory) if name in own or name.startswith(_OWN_PREFIXES)]
        for name in sorted(names, key="lock".__eq__):  # the lock last: a half-removed session is still a dead one
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))
        with suppress(OSError):
            os.rmdir(self.directory)


def session_directories(paths: RootPaths) -> list[str]:
    """Of the sessions of a root, dead ones among them; nothing that is not a directory."""
    with suppress(FileNotFoundError), os.scandir(paths.sessions) as entries:
        return sorted(
            entry.path
            for entry in entries
            if not entry.name.startswith(NEW_PREFIX) and entry.is_dir(follow_symlinks=False)
        )
    return []


def remove_unnamed(paths: RootPaths) -> None:
    """Remove what processes left that were killed before their session had its name."""
    with suppress(FileNotFoundError), os.scandir(paths.sessions) as entries:
        for entry in entries:
            if entry.name.startswith(NEW_PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age_s > _UNNAMED_S and SessionReader(entry.path).is_dead():
                        SessionReader(entry.path).remove()


def inflight_bytes(directory: str) -> int:
    """What the process of a session is writing; 0 when it is gone."""
    reader = SessionReader(directory)
    try:
        return 0 if reader.is_dead() else reader.inflight_bytes()
    except OSError:
        return 0


_KINDS = set(Did)
