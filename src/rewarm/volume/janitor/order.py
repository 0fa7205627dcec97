"""In which order records are evicted: S3-FIFO, which many new records do not empty.

New records enter a small queue (a tenth of the bytes). Those that were used again by the time they reach its end move
on to the main queue, the others are evicted and remembered for a while: a record that comes back enters the main queue
at once. In the main queue each use buys one more round, three at most. J. Yang et al., "FIFO queues are all you need
for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

SMALL_SHARE = 0.1
MAX_USES = 3
_IN_MAIN = 4
"""Bit beside the number of uses."""


class EvictionOrder:
    """Of one root. A name is any bytes object; one record takes about 150 bytes here."""

    def __init__(self) -> None:
        self._small: deque[bytes] = deque()
        self._main: deque[bytes] = deque()
        self._state: dict[bytes, int] = {}
        self._sizes: dict[bytes, int] = {}
        self._ghosts: dict[bytes, None] = {}
        self.small_bytes = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, name: bytes) -> bool:
        return name in self._state

    def set_size(self, prefix: bytes, num_bytes: int) -> None:
        """Records whose name starts with these two bytes have this size."""
        self._sizes[prefix] = num_bytes

    def size_of(self, name: bytes) -> int:
        """Bytes of a record's file."""
        return self._sizes.get(name[:2], 0)

    def add(self, name: bytes) -> None:
        """A record was stored."""
        if name in self._state:
            return
        in_main = name in self._ghosts
        if in_main:
            del self._ghosts[name]
        self._enter(name, 0, in_main=in_main)

    def touch(self, name: bytes) -> None:
        """A record was used."""
        state = self._state.get(name)
        if state is not None and state & 3 < MAX_USES:
            self._state[name] = state + 1

    def discard(self, name: bytes) -> None:
        """A record is gone."""
        state = self._state.pop(name, None)
        if state is not None:
            self._leave(name, in_main=bool(state & _IN_MAIN))

    def pop(self) -> bytes | None:
        """The record to evict now; None: there is none."""
        while self._small or self._main:
            if self._small and (self.small_bytes > SMALL_SHARE * self.total_bytes or not self._main):
                name = self._small.popleft()
                state = self._state.get(name)
                if state is None or state & _IN_MAIN:
                    continue  # gone, or entered anew since
                del self._state[name]
                self._leave(name, in_main=False)
                if state & 3:
                    self._enter(name, 0, in_main=True)
                    continue
                self._remember(name)
                return name
            name = self._main.popleft()
            state = self._state.get(name)
            if state is None or not state & _IN_MAIN:
                continue
            if state & 3:
                self._state[name] = state - 1
                self._main.append(name)
                continue
            del self._state[name]
            self._leave(name, in_main=True)
            return name
        return None

    def dump(self) -> Iterator[tuple[bytes, int]]:
        """(name, state) of every record, the first to go first; restore() takes it back."""
        for queue, flag in ((self._small, 0), (self._main, _IN_MAIN)):
            for name in queue:
                state = self._state.get(name)
                if state is not None and state & _IN_MAIN == flag:
                    yield name, state

    def restore(self, saved: Mapping[bytes, int], present: set[bytes]) -> None:
        """Take in what is missing here: first what was saved and is present, in its old place, then what else is."""
        for name, state in saved.items():
            if name in present and name not in self._state:
                self._enter(name, min(state & 3, MAX_USES), in_main=bool(state & _IN_MAIN))
        for name in present:
            if name not in self._state:
                self._enter(name, 0, in_main=False)

    def _enter(self, name: bytes, uses: int, *, in_main: bool) -> None:
        self._state[name] = uses | (_IN_MAIN if in_main else 0)
        (self._main if in_main else self._small).append(name)
        size = self.size_of(name)
        self.total_bytes += size
        self.small_bytes += 0 if in_main else size

    def _leave(self, name: bytes, *, in_main: bool) -> None:
        size = self.size_of(name)
        self.total_bytes -= size
        self.small_bytes -= 0 if in_main else size

    def _remember(self, name: bytes) -> None:
        self._ghosts[name] = None
        while len(self._ghosts) > max(1000, len(self._state)):
            del self._ghosts[next(iter(self._ghosts))]
