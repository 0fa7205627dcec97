"""What was written to a root, hour by hour, over a month: for the wear of the flash, and for a budget of bytes a day.

One small file a root, changed under its lock by every process that stores, so that a budget holds for all of them
together and over restarts. Bytes count when their writing begins.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rewarm.engine.checksum import crc32c
from rewarm.volume.layout import open_regular, open_state, write_new

HOUR_S = 3600
DAY_HOURS = 24
NUM_HOURS = 31 * DAY_HOURS
"""Kept: a month, and the hour that goes on."""
_LAYOUT = struct.Struct("<4sI")
_NUMBERS = struct.Struct(f"<QQQ{NUM_HOURS}Q")
_MAGIC = b"RWW1"
WEAR_BYTES = _LAYOUT.size + _NUMBERS.size
_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Wear:
    """What the file says."""

    total_bytes: int = 0
    """Since the file was made."""
    first_hour: int = 0
    """In which it was made, counted from 1970; 0: nothing was written yet."""
    last_hour: int = 0
    """Of the last write."""
    hours: list[int] = field(default_factory=lambda: [0] * NUM_HOURS)
    """Bytes of hour h at h % NUM_HOURS, of the NUM_HOURS up to the last one."""

    def written_since(self, num_hours: int, now_s: float) -> int:
        """Bytes of the hour that goes on and of so many whole hours before it, NUM_HOURS - 1 at most."""
        now = max(int(now_s // HOUR_S), self.last_hour)  # a clock that was set back hides nothing
        hours = range(max(now - num_hours, self.last_hour - NUM_HOURS + 1), self.last_hour + 1)
        return sum(self.hours[hour % NUM_HOURS] for hour in hours)

    def mean_per_day(self, now_s: float) -> float:
        """Bytes a day over the month, or since the first write where that is less long ago; at least over a day."""
        age = max(int(now_s // HOUR_S), self.last_hour) - self.first_hour + 1
        hours = min(age, NUM_HOURS)
        return self.written_since(NUM_HOURS - 1, now_s) / max(hours, DAY_HOURS) * DAY_HOURS

    def add(self, num_bytes: int, now_s: float) -> None:
        """Count a write, or take one back that was not begun."""
        now = max(int(now_s // HOUR_S), self.last_hour)
        for hour in range(max(self.last_hour + 1, now - NUM_HOURS + 1), now + 1):
            self.hours[hour % NUM_HOURS] = 0
        self.first_hour, self.last_hour = self.first_hour or now, now
        self.hours[now % NUM_HOURS] = max(0, self.hours[now % NUM_HOURS] + num_bytes)
        self.total_bytes = max(0, self.total_bytes + num_bytes)


class WearFile:
    """The file of one root. One object is used by one thread at a time; the lock keeps processes apart."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._descriptor = -1

    def spend(self, record_bytes: int, count: int, budget_bytes: int) -> int:
        """Count up to ``count`` records as written; returns for how many the budget has room.

        Args:
            record_bytes: Of each.
            count: How many are to be written.
            budget_bytes: For any 24 hours; 0: no bound.
        Raises:
            OSError: The file cannot be written to; nothing is counted.
        """
        with self._update() as wear:
            now_s = self._clock()
            if budget_bytes:
                room = budget_bytes - wear.written_since(DAY_HOURS, now_s)
                count = min(count, max(0, room) // record_bytes)
            if count:
                wear.add(count * record_bytes, now_s)
        return count

    def give_back(self, num_bytes: int) -> None:
        """Take back what was counted and not begun."""
        with self._update() as wear:
            wear.add(-num_bytes, self._clock())

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextmanager
    def _update(self) -> Iterator[Wear]:
        if self._descriptor < 0:
            self._descriptor = open_state(self._path)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            wear = _parse(os.pread(self._descriptor, WEAR_BYTES, 0))
            yield wear
            os.pwrite(self._descriptor, _pack(wear), 0)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def new_wear_file(path: str) -> None:
    """Make the file with its whole length, so that later a full disk has room for it; it must not exist."""
    write_new(path, _pack(Wear()), durable=False)


def read_wear(path: str) -> Wear:
    """The numbers of a root, for reports; zeros where the file is missing or unsound."""
    with suppress(OSError):
        descriptor = open_regular(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            return _parse(os.pread(descriptor, WEAR_BYTES, 0))
        finally:
            os.close(descriptor)
    return Wear()


def _pack(wear: Wear) -> bytes:
    numbers = _NUMBERS.pack(min(wear.total_bytes, _MAX), wear.first_hour, wear.last_hour, *wear.hours)
    return _LAYOUT.pack(_MAGIC, crc32c(numbers)) + numbers


def _parse(content: bytes) -> Wear:
    """A file that is new or unsound counts from zero."""
    if len(content) != WEAR_BYTES:
        return Wear()
    magic, checksum = _LAYOUT.unpack_from(content)
    if magic != _MAGIC or crc32c(content[_LAYOUT.size :]) != checksum:
        return Wear()
    total_bytes, first_hour, last_hour, *hours = _NUMBERS.unpack_from(content, _LAYOUT.size)
    if max(total_bytes, first_hour, last_hour, *hours) > _MAX:
        return Wear()
    return Wear(total_bytes, first_hour, last_hour, hours)
