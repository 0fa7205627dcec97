"""What was evicted lately, by a fingerprint each: 8 bytes in a table of small buckets; the new push out the old."""

from __future__ import annotations

from array import array

from rewarm.volume.janitor.names import name_hash

_WAYS = 8
_MIN_ENTRIES = 1024
_TAG_BITS = 31
_TIME_BITS = 32
_TIME_MASK = (1 << _TIME_BITS) - 1
_U64 = 0xFFFF_FFFF_FFFF_FFFF


class Ghosts:
    """Names that were evicted, as many as there are records, and which queue each was in.

    A name is taken for another one in about one of 2**28 questions.
    """

    def __init__(self) -> None:
        self._entries = array("Q", bytes(8 * _MIN_ENTRIES))  # tag, queue, time; 0: none
        self._time = 0
        self.counts = [0, 0]
        """Of those evicted lately, how many were in the small queue, and in the main one."""

    def put(self, name: bytes, *, was_in_main: bool, keep: int) -> None:
        """Remember a name; of those before, the last ``keep`` count."""
        if keep > len(self._entries):
            self._grow()
        self._time += 1
        tag, start = self._where(name)
        entries = self._entries
        oldest = min(range(start, start + _WAYS), key=lambda index: self._order(entries[index]))
        entries[oldest] = (tag << 1 | was_in_main) << _TIME_BITS | self._time & _TIME_MASK
        self.counts[was_in_main] += 1
        if sum(self.counts) > max(_MIN_ENTRIES, keep):  # they fade as what they count does
            self.counts = [count - count // 2 for count in self.counts]

    def take(self, name: bytes, keep: int) -> bool | None:
        """Whether a name was in the main queue when it was evicted, and forget it; None: it was not lately."""
        tag, start = self._where(name)
        for index in range(start, start + _WAYS):
            entry = self._entries[index]
            if entry >> _TIME_BITS + 1 == tag:
                self._entries[index] = 0
                age = self._time - entry & _TIME_MASK
                return bool(entry >> _TIME_BITS & 1) if age <= max(_MIN_ENTRIES, keep) else None
        return None

    def _order(self, entry: int) -> int:
        """The first to go has the least."""
        return -(self._time - entry & _TIME_MASK) if entry else -_U64

    def _where(self, name: bytes) -> tuple[int, int]:
        """(tag, first entry of the bucket); the tag is never 0."""
        digest = name_hash(name)
        tag = digest >> 64 - _TAG_BITS or 1
        return tag, (digest & len(self._entries) // _WAYS - 1) * _WAYS

    def _grow(self) -> None:
        """Twice as large. Which half a bucket's entries belong to is not known, so each stands in both; one is never
        asked for, and is pushed out.
        """
        self._entries += self._entries
