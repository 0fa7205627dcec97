"""Names of records in little memory: a number each, and back, in arrays instead of one object a name."""

from __future__ import annotations

import struct
from array import array

NAME_BYTES = 34
"""Number of the namespace, key."""
NONE = 0xFFFF_FFFF
"""No number."""
_MIN_PLACES = 1024
_MAX_LOAD = 0.7
_middle_of_key = struct.Struct("<18xQ8x").unpack


def name_hash(name: bytes) -> int:
    """64 bits of the key, which is a digest: of its middle, since names come sorted by its beginning. The same in every
    process, so that replays can be repeated.
    """
    middle: int = _middle_of_key(name)[0]
    return middle


class NameTable:
    """A set of names; each has a number from when it is added until the number is released. 44 to 50 bytes a name."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._free: list[int] = []
        self._places = array("I", bytes(4 * _MIN_PLACES))  # an open-addressed table of number + 1, 0 where none is
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def end(self) -> int:
        """One above the highest number that was ever given out."""
        return len(self._names) // NAME_BYTES

    def find(self, name: bytes) -> int:
        """The number of a name; NONE: it is not in the set."""
        places, names = self._places, self._names
        mask = len(places) - 1
        place = name_hash(name) & mask
        while entry := places[place]:
            if names[(entry - 1) * NAME_BYTES : entry * NAME_BYTES] == name:
                return entry - 1
            place = (place + 1) & mask
        return NONE

    def name(self, number: int) -> bytes:
        """The name of a number that is not released."""
        return bytes(self._names[number * NAME_BYTES : (number + 1) * NAME_BYTES])

    def add(self, name: bytes) -> int:
        """The number of a name that is new to the set."""
        if self._free:
            number = self._free.pop()
            self._names[number * NAME_BYTES : (number + 1) * NAME_BYTES] = name
        else:
            number = self.end
            self._names += name
        self._count += 1
        if self._count > len(self._places) * _MAX_LOAD:
            old, self._places = self._places, array("I", bytes(8 * len(self._places)))
            for entry in filter(None, old):
                self._place(self.name(entry - 1), entry)
        self._place(name, number + 1)
        return number

    def remove(self, name: bytes) -> None:
        """Take a name that is in it out of the set; its number stays taken until it is released."""
        places = self._places
        mask = len(places) - 1
        wanted = self.find(name) + 1
        hole = name_hash(name) & mask
        while places[hole] != wanted:
            hole = (hole + 1) & mask
        place = hole
        while entry := places[place := (place + 1) & mask]:  # what lies behind moves up, so that no hole cuts a chain
            if (place - name_hash(self.name(entry - 1))) & mask >= (place - hole) & mask:
                places[hole] = entry
                hole = place
        places[hole] = 0
        self._count -= 1

    def release(self, number: int) -> None:
        """The number of a removed name may be given to another one."""
        self._free.append(number)

    def _place(self, name: bytes, entry: int) -> None:
        mask = len(self._places) - 1
        place = name_hash(name) & mask
        while self._places[place]:
            place = (place + 1) & mask
        self._places[place] = entry
