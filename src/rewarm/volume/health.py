"""Whether a root is used now: one that fails or hangs is left alone for a while, longer each time."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Iterable

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
_MAX_FAILED = 1000
_OF_THE_DEVICE = {
    errno.EIO,
    errno.ETIMEDOUT,
    errno.ENODEV,
    errno.ENXIO,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
}
"""Errors that speak of the root, not of one record."""
_OF_ONE_NAME = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ECANCELED}
"""Something else stands where one record should be: the others can be written."""


class Pause:
    """A way that is closed after an error, for a time that doubles until it works again. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._next_s = FIRST_PAUSE_S
        self.count = 0
        """How often it began."""

    @property
    def is_on(self) -> bool:
        """Whether to stay away now; when the time is over, the next user tries."""
        return self._until > 0 and self._clock() < self._until

    def failed(self) -> None:
        """It did not work: stay away. Failures during a pause belong to the same trouble."""
        with self._lock:
            if not self.is_on:
                self.count += 1
                self._until = self._clock() + self._next_s
                self._next_s = min(2 * self._next_s, MAX_PAUSE_S)

    def follow(self) -> None:
        """Another process of the server stays away now: so does this one, for a second, or until it is told again."""
        with self._lock:
            self._until = max(self._until, self._clock() + FIRST_PAUSE_S)

    def close(self) -> None:
        """Stay away for good."""
        with self._lock:
            self._until = math.inf

    def worked(self) -> None:
        """It works."""
        if self._until > 0 and not self.is_on:
            with self._lock:
                self._until, self._next_s = 0.0, FIRST_PAUSE_S


class BadRecords:
    """Tells records that cannot be read from roots that cannot. Thread-safe.

    A bad sector gives EIO each time that its record is read, while the root works for all others: the second time the
    record is damaged, and the root has nothing to do with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: dict[bytes, int] = {}
        self._num_delivered = 0

    def failed(self, name: bytes) -> bool:
        """A read ended with EIO; returns whether it did before, and the root has delivered something since."""
        with self._lock:
            is_bad = self._failed.pop(name, self._num_delivered) < self._num_delivered
            if not is_bad:
                self._failed[name] = self._num_delivered
                if len(self._failed) > _MAX_FAILED:
                    del self._failed[next(iter(self._failed))]
            return is_bad

    def delivered(self, names: Iterable[bytes]) -> None:
        """These were read whole."""
        if self._failed:  # else nothing would be compared with the number
            with self._lock:
                for name in names:
                    self._num_delivered += 1
                    self._failed.pop(name, None)


class RootHealth:
    """Of one root."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.loads = Pause(clock)
        self.stores = Pause(clock)
        self.bad_records = BadRecords()
        self.is_slow = False
        """It delivered far less than it used to, and has not been seen to deliver as before since."""
        self.store_error = 0
        """errno of the last store, 0 when it worked; for reports."""

    def retire(self) -> None:
        """The root was removed from the volume."""
        self.loads.close()
        self.stores.close()

    def note_load(self, result: int) -> None:
        """Learn from the result of a read or a probe: 0 or errno."""
        if result in _OF_THE_DEVICE:
            self.loads.failed()
        elif result in {0, errno.ENOENT} and not self.is_slow:
            self.loads.worked()

    def note_pace(self, *, is_slow: bool) -> None:
        """Learn that it delivers far less than it used to, or as before again."""
        self.is_slow = is_slow
        if is_slow:
            self.loads.failed()
        else:
            self.loads.worked()

    def note_store(self, result: int) -> None:
        """Learn from the result of a write: 0 or errno."""
        self.store_error = result
        if result == 0:
            self.stores.worked()
        elif result not in _OF_ONE_NAME:
            self.stores.failed()
