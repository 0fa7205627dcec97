"""What a server's processes read from below the page cache, sampled while a block runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

EVERY_S = 0.02


class ReadMeter:
    """Samples ``read_bytes`` in a thread of its own while the context is open.

    Args:
        read_bytes: Bytes read so far, or None where the kernel does not say.
    """

    def __init__(self, read_bytes: Callable[[], int | None]) -> None:
        self._read_bytes = read_bytes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="rewarm-trial-meter")
        self.samples: list[tuple[float, int]] = []
        """(seconds since the start, bytes since the start), one for each change."""

    @property
    def total(self) -> int | None:
        """Bytes read while the context was open; None where the kernel does not say."""
        return self.samples[-1][1] if self.samples else None

    def __enter__(self) -> ReadMeter:  # noqa: PYI034 - typing.Self is not in Python 3.10
        self._begin_s = time.perf_counter()
        self._first = self._read_bytes()
        self._add(self._first)
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._add(self._read_bytes())

    def _sample(self) -> None:
        while not self._done.wait(EVERY_S):
            self._add(self._read_bytes())

    def _add(self, now: int | None) -> None:
        if now is None or self._first is None:
            return
        since = max(now - self._first, 0)
        if not self.samples or since != self.samples[-1][1]:
            self.samples.append((round(time.perf_counter() - self._begin_s, 4), since))
