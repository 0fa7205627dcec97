"""Which records a process knows to be there: 13 to 27 bytes a record, looked up without a system call.

An open-addressed table, at most 60 % full, of 64-bit fingerprints of the keys. A fingerprint may stand for two keys
(once in 2**64 / n): the record's header has the whole key, so the worst that follows is a load that ends as a miss.
"""

from __future__ import annotations

import struct
import threading
from array import array

from rewarm.engine.scan import add_to_table

U64 = 0xFFFF_FFFF_FFFF_FFFF
_MIN_SLOTS = 1024
_MAX_LOAD = 0.6
ends = struct.Struct("<Q16xQ").unpack
"""The first and the last eight bytes of a key as numbers; in one call: slicing it was half of a look-up's time."""


def fingerprint(key: bytes) -> int:
    """64 bits of a 32-byte key, never 0: le64(key[0:8]) ^ rotl64(le64(key[24:32]), 1)."""
    head, tail = ends(key)
    return (head ^ (tail << 1 & U64 | tail >> 63)) or 1


def table_bytes(count: int) -> int:
    """Memory that an index of this many records takes: 13 to 27 bytes a record."""
    slots = _MIN_SLOTS
    while count > slots * _MAX_LOAD:
        slots *= 2
    return slots * 8


class KeyIndex:
    """A set of keys. ``contains`` takes no lock: while another thread changes the table it may miss a key, never
    invent one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.table = array("Q", bytes(8 * _MIN_SLOTS))
        """Fingerprints, each at its low bits or behind what stands there; 0: none. Others only read it."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def table_bytes(self) -> int:
        """Memory that the table takes."""
        return len(self.table) * 8

    def contains(self, key: bytes) -> bool:
        """Whether the key was added and not removed since."""
        wanted = fingerprint(key)
        table = self.table
        slot = wanted & (mask := len(table) - 1)
        while (found := table[slot]) != wanted and found:
            slot = slot + 1 & mask
        return bool(found)

    def add(self, key: bytes) -> None:
        """Add one key."""
        self.add_fingerprints(array("Q", (fingerprint(key),)))

    def add_fingerprints(self, fingerprints: array[int]) -> None:
        """Add many, an array('Q')."""
        with self._lock:
            need = self._count + len(fingerprints)
            if need > len(self.table) * _MAX_LOAD:
                self._grow(need)
            self._count += add_to_table(self.table, fingerprints)

    def discard(self, key: bytes) -> None:
        """Remove one key if it is there; what lay behind it moves up, so that no hole cuts a chain."""
        with self._lock:
            table = self.table
            mask = len(table) - 1
            wanted = fingerprint(key)
            slot = wanted & mask
            while table[slot] != wanted:
                if not table[slot]:
                    return
                slot = (slot + 1) & mask
            self._count -= 1
            hole = slot
            while True:
                slot = (slot + 1) & mask
                value = table[slot]
                if not value:
                    break
                if (slot - (value & mask)) & mask >= (slot - hole) & mask:
                    table[hole] = value
                    hole = slot
            table[hole] = 0

    def _grow(self, need: int) -> None:
        table = array("Q", bytes(table_bytes(need)))
        add_to_table(table, array("Q", filter(None, self.table)))
        self.table = table
