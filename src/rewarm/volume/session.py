"""One process's part of a root: a lock that tells whether it lives, its temporaries, and the log of what it did.

The log tells the janitor in which order to evict. Whoever gets the lock of a session knows that its process is gone.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from rewarm.volume.layout import DIR_MODE, FILE_MODE, RootPaths

ENTRY = struct.Struct("<B7x32s32s")
"""Kind, namespace id, key: 72 bytes."""
NEW_PREFIX = "new-"
"""Of a session's directory until its lock is held."""
_ROTATE_BYTES = 1 << 20
_MAX_LOG_FILES = 64
"""Without a janitor the oldest history is all that is kept: the log is advice, its loss costs a worse order."""


class Did(IntEnum):
    """What a log entry says about a record."""

    STORED = 1
    TOUCHED = 2
    DAMAGED = 3
    """Its check failed: the janitor looks at it and quarantines it."""


class Session:
    """Made by a process that stores or loads, on each of its roots. Thread-safe; only flush() does I/O."""

    def __init__(self, paths: RootPaths) -> None:
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        self.directory = os.path.join(paths.sessions, name)
        self._lock = threading.Lock()
        self._entries: list[bytes] = []
        self._file_number = 0
        self._file_bytes = 0
        self._temporary_number = 0
        self._log_descriptor = -1
        # Locked before it has its name, so that no janitor takes it for a dead one.
        unnamed = os.path.join(paths.sessions, f"{NEW_PREFIX}{name}")
        os.mkdir(unnamed, DIR_MODE)
        self._lock_descriptor = _open(os.path.join(unnamed, "lock"), 0)
        fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unnamed, self.directory)

    def note(self, did: Did, namespace_id: bytes, keys: Iterable[bytes]) -> None:
        """Remember for the log; in memory until flush()."""
        entries = [ENTRY.pack(did, namespace_id, key) for key in keys]
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
        if not content or self._file_number >= _MAX_LOG_FILES:
            return
        if self._log_descriptor < 0 or self._file_bytes >= _ROTATE_BYTES:
            self._close_log()
            self._log_descriptor = _open(os.path.join(self.directory, f"log-{self._file_number:06}"), os.O_APPEND)
            self._file_number += 1
            self._file_bytes = 0
        self._file_bytes += os.write(self._log_descriptor, content)

    def set_inflight(self, num_bytes: int) -> None:
        """Say how many bytes this process has reserved and not yet in place: who counts the root adds them."""
        os.pwrite(self._lock_descriptor, num_bytes.to_bytes(8, "little"), 0)

    def temporary_path(self) -> str:
        """A name for a record while it is written; the janitor removes it if this process dies."""
        with self._lock:
            self._temporary_number += 1
            return f"{self.directory}/tmp-{self._temporary_number}"

    def close(self) -> None:
        """Flush, and let the janitor fold the log in and remove the directory. Idempotent."""
        with suppress(OSError):
            self.flush()
        self._close_log()
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

    def read(self) -> Iterator[tuple[Did, bytes, bytes]]:
        """(what, namespace id, key) of entries that were appended since; folded files are removed but the newest."""
        names = sorted(name for name in os.listdir(self.directory) if name.startswith("log-"))
        for name in names:
            path = os.path.join(self.directory, name)
            offset = self._offsets.get(name, 0)
            with Path(path).open("rb") as file:
                file.seek(offset)
                content = file.read()
            whole = len(content) - len(content) % ENTRY.size
            for kind, namespace_id, key in ENTRY.iter_unpack(content[:whole]):
                if kind in _KINDS:
                    yield Did(kind), namespace_id, key
            self._offsets[name] = offset + whole
            if name != names[-1]:
                os.unlink(path)
                del self._offsets[name]

    def is_dead(self) -> bool:
        """Whether the process is gone."""
        try:
            descriptor = os.open(os.path.join(self.directory, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def remove(self) -> int:
        """Remove the directory of a dead session with its temporaries; returns how many of those there were."""
        names = os.listdir(self.directory)
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))
        with suppress(OSError):
            os.rmdir(self.directory)
        return sum(name.startswith("tmp-") for name in names)


def inflight_bytes(directory: str) -> int:
    """What the process of a session is writing; 0 when it is gone."""
    if SessionReader(directory).is_dead():
        return 0
    try:
        return int.from_bytes(Path(directory, "lock").read_bytes()[:8], "little")
    except FileNotFoundError:
        return 0


_KINDS = set(Did)


def _open(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flags, FILE_MODE)
