"""In which order records are evicted: S3-FIFO whose small queue is as long as it pays.

New records enter the small queue. Those that were used again by the time they reach its end move on to the main queue,
the others are evicted and remembered for a while; a record that comes back enters the main queue at once. In the main
queue each use buys one more round, three at most. J. Yang et al., "FIFO queues are all you need for cache eviction",
SOSP 2023.

There the small queue has a tenth of the bytes. A session comes back after minutes, which is too long for a tenth where
many sessions are under way, and then they all miss twice; for documents that are asked for once, a tenth is right. So
what comes back after it was evicted votes, as in ARC (N. Megiddo, D. Modha, FAST 2003): from the small queue for a
longer one, from the main queue for a shorter one. What it brings: docs/guides/eviction.md.

A pinned record is never evicted: when its turn comes it is parked outside of both queues, and returns to the main one
when it is pinned no more.

A record takes 60 to 75 bytes here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain

from rewarm.volume.janitor.ghosts import Ghosts
from rewarm.volume.janitor.names import NAME_BYTES, NONE, NameTable
from rewarm.volume.quota import NO_TENANT

__all__ = ["NAME_BYTES", "EvictionOrder"]

MAX_USES = 3
FIRST_SHARE = 0.25
MIN_SHARE, MAX_SHARE = 0.1, 0.9
"""Of the bytes, that the small queue may have before the main one gives way."""
_VOTE = 4.0
"""Records that the border moves by with one that comes back, where both queues lose as many."""
_IN_MAIN, _UNPLACED, _GONE, _PARKED = 4, 8, 16, 32
"""Bits beside the number of uses."""
_MAX_TENANTS = 1 << 16
_MAX_EARLY = 100_000
_MAX_GONE = 1000
"""Places of discarded records that the queues keep beside a quarter of what is there."""


class EvictionOrder:
    """Of one root. A name is NAME_BYTES long."""

    def __init__(self) -> None:
        self._names = NameTable()
        self._states = bytearray()
        self._next = array("I")
        self._owners = array("H")
        self._tenants: dict[bytes, int] = {NO_TENANT: 0}
        self._held = [0]
        self._early: dict[bytes, int] = {}
        self._num_gone = 0
        self._small, self._main = _Queue(self._next), _Queue(self._next)
        self._ghosts = Ghosts()
        self._pinned: Container[bytes] = frozenset()
        self._parked: set[int] = set()
        self._sizes: dict[bytes, int] = {}
        self.small_share = FIRST_SHARE
        self.small_bytes = 0
        self.total_bytes = 0
        """Of all records but the parked ones."""
        self.num_unread = 0
        """Records given out to be evicted, so far, that were not used since they were stored."""

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return self._names.find(name) != NONE

    @property
    def can_pop(self) -> bool:
        """Whether a record is left that is not parked; it may be pinned."""
        return bool(self._small or self._main)

    def pin(self, names: Container[bytes]) -> None:
        """From now on these names, there or not, are pinned, and no others."""
        self._pinned = names
        for number in [number for number in self._parked if self._names.name(number) not in names]:
            name = self._names.name(number)
            self._parked.discard(number)
            self._held[self._owners[number]] -= self.size_of(name)  # _enter() adds it
            self._enter(number, name, self._states[number] & 3, in_main=True)

    def set_size(self, prefix: bytes, num_bytes: int) -> None:
        """Records whose name starts with these two bytes have this size."""
        self._sizes[prefix] = num_bytes

    def size_of(self, name: bytes) -> int:
        """Bytes of a record's file."""
        return self._sizes.get(name[:2], 0)

    def add(self, name: bytes) -> None:
        """A record was stored."""
        if name in self:
            return
        was_in_main = self._ghosts.take(name, len(self))
        if was_in_main is not None:
            self._vote(longer=not was_in_main)
        self._enter(self._new(name), name, 0, in_main=was_in_main is not None)

    def touch(self, name: bytes) -> None:
        """A record was used."""
        number = self._names.find(name)
        if number != NONE and self._states[number] & 3 < MAX_USES:
            self._states[number] += 1

    def own(self, name: bytes, tenant: bytes) -> None:
        """A record is a tenant's; one that is not there yet may come."""
        owner = self._tenants.get(tenant)
        if owner is None:
            if len(self._tenants) == _MAX_TENANTS:
                return
            owner = self._tenants[tenant] = len(self._tenants)
            self._held.append(0)
        number = self._names.find(name)
        if number == NONE:
            self._early[name] = owner
            if len(self._early) > _MAX_EARLY:
                del self._early[next(iter(self._early))]
            return
        size = self.size_of(name)
        self._held[self._owners[number]] -= size
        self._owners[number] = owner
        self._held[owner] += size

    def held(self) -> dict[bytes, int]:
        """Tenant to bytes of its records; of those that have any."""
        return {tenant: self._held[owner] for tenant, owner in self._tenants.items() if self._held[owner]}

    def pop_of(self, tenant: bytes, num_bytes: int) -> list[bytes]:
        """Records of one tenant to evict now, of so many bytes or all that it has: unused ones first."""
        owner = self._tenants.get(tenant)
        unused: list[int] = []
        used: list[int] = []
        found = 0
        for number in chain(self._small, self._main):
            state = self._states[number]
            if found >= num_bytes:
                break
            is_here = self._owners[number] == owner and not state & _GONE
            if is_here and self._names.name(number) not in self._pinned:
                (used if state & 3 else unused).append(number)
                found += 0 if state & 3 else self.size_of(self._names.name(number))
        chosen: list[bytes] = []
        for number in (*unused, *used):
            if num_bytes <= 0:
                break
            name = self._names.name(number)
            chosen.append(name)
            num_bytes -= self.size_of(name)
            self.discard(name)
        return chosen

    def discard(self, name: bytes) -> None:
        """A record is gone."""
        number = self._names.find(name)
        if number == NONE:
            return
        if number in self._parked:
            self._parked.discard(number)
            self._held[self._owners[number]] -= self.size_of(name)
            self._names.remove(name)
            self._names.release(number)
            return
        self._leave(number, name)
        self._names.remove(name)
        self._states[number] |= _GONE  # its number is free again when its turn in the queue comes
        self._num_gone += 1
        if self._num_gone > _MAX_GONE + len(self) // 4:
            for queue in (self._small, self._main):
                for gone in queue.sweep(lambda number: bool(self._states[number] & _GONE)):
                    self._names.release(gone)
            self._num_gone = 0

    def pop(self) -> bytes | None:
        """The record to evict now; None: there is none that is not pinned."""
        while True:
            is_long = self.small_bytes > self.small_share * self.total_bytes
            queue = self._small if self._small and (is_long or not self._main) else self._main
            number = queue.pop()
            if number == NONE:
                return None
            state, name = self._states[number], self._names.name(number)
            if state & _GONE:
                self._names.release(number)
                self._num_gone -= 1
                continue
            self._leave(number, name)
            if name in self._pinned:
                self._park(number, name)
                continue
            was_in_main = bool(state & _IN_MAIN)
            if state & 3:
                self._enter(number, name, (state & 3) - 1 if was_in_main else 0, in_main=True)
                continue
            self._names.remove(name)
            self._names.release(number)
            self._ghosts.put(name, was_in_main=was_in_main, keep=len(self))
            self.num_unread += not was_in_main
            return name

    def dump(self) -> Iterator[tuple[bytes, int, bytes]]:
        """(name, state, tenant) of every record, the first to go first; restore() takes it back."""
        tenants = list(self._tenants)
        for queue in (self._small, self._main):
            for number in queue:
                if not self._states[number] & _GONE:
                    yield self._names.name(number), self._states[number], tenants[self._owners[number]]
        for number in sorted(self._parked):
            state = self._states[number] & 3 | _IN_MAIN
            yield self._names.name(number), state, tenants[self._owners[number]]

    def restore(self, saved: Iterable[tuple[bytes, int, bytes]], present: Iterable[bytes]) -> None:
        """Take in what is missing here: first what was saved and is present, in its old place, then what else is."""
        for name in present:
            if name not in self:
                self._states[self._new(name)] = _UNPLACED
        for name, state, tenant in saved:
            number = self._names.find(name)
            if number != NONE and self._states[number] == _UNPLACED:
                self._enter(number, name, state & 3, in_main=bool(state & _IN_MAIN))
                if tenant != NO_TENANT:
                    self.own(name, tenant)
        for number, state in enumerate(self._states):
            if state == _UNPLACED:
                self._enter(number, self._names.name(number), 0, in_main=False)

    def _vote(self, *, longer: bool) -> None:
        """A record came back that the small queue lost, so a longer one had kept it; or that the main queue lost."""
        from_small, from_main = self._ghosts.counts
        mine, other = (from_small, from_main) if longer else (from_main, from_small)
        step = _VOTE * max(1.0, other / max(1, mine)) / (len(self) + 1)
        share = self.small_share + (step if longer else -step)
        self.small_share = min(MAX_SHARE, max(MIN_SHARE, share))

    def _new(self, name: bytes) -> int:
        number = self._names.add(name)
        if number == len(self._states):
            self._states.append(0)
            self._next.append(NONE)
            self._owners.append(0)
        self._owners[number] = self._early.pop(name, 0) if self._early else 0
        return number

    def _enter(self, number: int, name: bytes, uses: int, *, in_main: bool) -> None:
        self._states[number] = uses | (_IN_MAIN if in_main else 0)
        (self._main if in_main else self._small).append(number)
        size = self.size_of(name)
        self.total_bytes += size
        self.small_bytes += 0 if in_main else size
        self._held[self._owners[number]] += size

    def _park(self, number: int, name: bytes) -> None:
        """A record that has left its queue stays out of both."""
        self._states[number] = self._states[number] & 3 | _PARKED
        self._parked.add(number)
        self._held[self._owners[number]] += self.size_of(name)

    def _leave(self, number: int, name: bytes) -> None:
        size = self.size_of(name)
        self.total_bytes -= size
        self.small_bytes -= 0 if self._states[number] & _IN_MAIN else size
        self._held[self._owners[number]] -= size


class _Queue:
    """First in, first out; of numbers that are linked in an array which all queues share."""

    def __init__(self, links: array[int]) -> None:
        self._next = links
        self._first = self._last = NONE

    def __bool__(self) -> bool:
        return self._first != NONE

    def __iter__(self) -> Iterator[int]:
        number = self._first
        while number != NONE:
            yield number
            number = self._next[number]

    def append(self, number: int) -> None:
        """Put it behind all others; it is in no queue now."""
        self._next[number] = NONE
        if self._first == NONE:
            self._first = number
        else:
            self._next[self._last] = number
        self._last = number

    def sweep(self, is_gone: Callable[[int], bool]) -> list[int]:
        """Take out those for which it is so; returns them."""
        numbers = list(self)
        self._first = self._last = NONE
        for number in numbers:
            if not is_gone(number):
                self.append(number)
        return [number for number in numbers if is_gone(number)]

    def pop(self) -> int:
        """Take the first one out; NONE: it is empty."""
        number = self._first
        if number != NONE:
            self._first = self._next[number]
        return number
