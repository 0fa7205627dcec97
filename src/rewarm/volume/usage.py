"""How many bytes a root holds: one small file that every process of the volume adds to under a lock.

Space is reserved before a record is written, so that the budget holds with any number of writers. What a killed process
had reserved and not written stays counted until the janitor counts again; the error is always on the safe side.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rewarm.engine.checksum import crc32c
from rewarm.volume.layout import open_regular, open_state, write_new

_NUMBERS = struct.Struct("<5Q")
_LAYOUT = struct.Struct("<4sI")
_MAGIC = b"RWU1"
USAGE_BYTES = _LAYOUT.size + _NUMBERS.size
_MAX_U64 = (1 << 64) - 1


@dataclass(slots=True)
class Usage:
    """What the file says."""

    used_bytes: int = 0
    """Bytes of record files, and of those being written."""
    pressure_bytes: int = 0
    """Bytes that a writer needs and does not find, in the budget or on the disk: the janitor evicts as many."""
    reserved_bytes: int = 0
    """Bytes reserved since the volume was made, written or not. Only grows: who counts sees what came meanwhile."""
    evicted_records: int = 0
    """Records evicted since the volume was made."""
    evicted_bytes: int = 0
    is_known: bool = True
    """False: the file was missing or damaged, and somebody must count."""


def new_usage_file(path: str, usage: Usage) -> None:
    """Make the file; it must not exist."""
    write_new(path, _pack(usage), durable=False)


class UsageFile:
    """The file of one root. One object is used by one thread at a time; the lock keeps processes apart."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1

    def read(self) -> Usage:
        """The numbers, without a lock: a torn read shows as unknown and is read again by who needs to know."""
        return _parse(os.pread(self._open(), USAGE_BYTES, 0))

    @contextmanager
    def update(self) -> Iterator[Usage]:
        """Change the numbers under the lock; they are written when the block ends well."""
        descriptor = self._open()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            usage = _parse(os.pread(descriptor, USAGE_BYTES, 0))
            yield usage
            os.pwrite(descriptor, _pack(usage), 0)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def reserve(self, record_bytes: int, count: int, capacity_bytes: int) -> int:
        """Reserve room for up to ``count`` records; returns for how many there is. The janitor is told of the rest."""
        with self.update() as usage:
            room = max(0, capacity_bytes - usage.used_bytes) // record_bytes
            granted = min(count, room) if usage.is_known else 0
            usage.used_bytes += granted * record_bytes
            usage.reserved_bytes += granted * record_bytes
            usage.pressure_bytes = max(usage.pressure_bytes, (count - granted) * record_bytes)
        return granted

    def give_back(self, num_bytes: int, *, pressure_bytes: int = 0) -> None:
        """Return what was reserved and not written."""
        with self.update() as usage:
            usage.used_bytes = max(0, usage.used_bytes - num_bytes)
            usage.pressure_bytes = max(usage.pressure_bytes, pressure_bytes)

    def free(self, num_bytes: int) -> None:
        """Note that records were removed."""
        with self.update() as usage:
            usage.used_bytes = max(0, usage.used_bytes - num_bytes)

    def ask_for_room(self, num_bytes: int) -> None:
        """Tell the janitor how many bytes to evict."""
        with self.update() as usage:
            usage.pressure_bytes = max(usage.pressure_bytes, num_bytes)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        if self._descriptor < 0:
            self._descriptor = open_state(self._path)
        return self._descriptor


def read_usage(path: str) -> Usage:
    """The numbers of a root, for reports; unknown where the file cannot be read."""
    with suppress(OSError):
        descriptor = open_regular(path)
        try:
            return _parse(os.pread(descriptor, USAGE_BYTES, 0))
        finally:
            os.close(descriptor)
    return Usage(is_known=False)


def _pack(usage: Usage) -> bytes:
    numbers = (
        usage.used_bytes,
        usage.pressure_bytes,
        usage.reserved_bytes,
        usage.evicted_records,
        usage.evicted_bytes,
    )
    packed = _NUMBERS.pack(*(min(number, _MAX_U64) for number in numbers))
    checksum = crc32c(packed) if usage.is_known else ~crc32c(packed) & 0xFFFFFFFF
    return _LAYOUT.pack(_MAGIC, checksum) + packed


def _parse(content: bytes) -> Usage:
    if len(content) != USAGE_BYTES:
        return Usage(is_known=False)
    magic, checksum = _LAYOUT.unpack_from(content)
    numbers = content[_LAYOUT.size :]
    if magic != _MAGIC or crc32c(numbers) != checksum:
        return Usage(is_known=False)
    usage = Usage(*_NUMBERS.unpack(numbers))
    usage.is_known = max(_NUMBERS.unpack(numbers)) < _MAX_U64 // 2  # more no volume ever counted
    return usage
