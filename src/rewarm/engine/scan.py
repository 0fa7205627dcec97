"""Which records lie below a namespace's directory, and the table that remembers them: native where it is loaded."""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from pathlib import Path

from rewarm.engine import _native

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_NAME_CHARACTERS = 64 + len(".rec")
_FIRST_ROOM = 1 << 17
"""Fingerprints, 1 MiB: what a first call has room for."""
_THREADS = 4
"""200,000 names on ext4, cold: 0.2 s; more threads gained nothing."""


def scan_keys(directory: str) -> array[int]:
    """Fingerprints of the records below ``directory``/<hh>/, in no order. Names only, never a stat.

    Returns:
        array('Q'): le64(key[0:8]) ^ rotl64(le64(key[24:32]), 1), 1 where that is 0, of each file called <64 lower-case
        hexadecimal digits>.rec in the directory of its first two digits.
    Raises:
        OSError: The directory cannot be listed; one that is not there has no records.
    """
    calls = _native.library.calls
    if calls is None:
        return scan_keys_pure(directory)
    room = _FIRST_ROOM
    while True:
        found = array("Q", bytes(8 * room))
        count = int(calls.rw_scan(os.fsencode(directory), _THREADS, found.buffer_info()[0], room))
        if count < 0:
            if isinstance(error := OSError(-count, os.strerror(-count), directory), FileNotFoundError):
                return array("Q")
            raise error
        if count <= room:
            return found[:count]
        room = count + count // 8  # others may be writing


def scan_keys_pure(directory: str) -> array[int]:
    """scan_keys() without native code."""
    found = array("Q")
    try:
        names = set(os.listdir(directory))
    except FileNotFoundError:
        return found
    for name in (f"{first:02x}" for first in range(256)):
        if name in names:
            _scan_into(found, Path(directory) / name)
    return found


def _scan_into(found: array[int], directory: Path) -> None:
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        whole = len(name) == _NAME_CHARACTERS and name.endswith(".rec") and name.startswith(directory.name)
        if whole and name == name.lower():
            with suppress(ValueError):
                key = bytes.fromhex(name[:64])
                if len(key) == 32:  # fromhex() skips blanks
                    found.append(_fingerprint(key))


def _fingerprint(key: bytes) -> int:
    tail = int.from_bytes(key[24:], "little")
    return (int.from_bytes(key[:8], "little") ^ (tail << 1 & _U64 | tail >> 63)) or 1


def add_to_table(table: array[int], fingerprints: array[int]) -> int:
    """Add fingerprints to an open-addressed table.

    Args:
        table: array('Q'); its length is a power of two and greater than what it will hold. Linear probing from
            ``fingerprint & (len(table) - 1)``; 0 is an empty slot.
        fingerprints: array('Q'); 0 is kept as 1.
    Returns:
        How many of them were not there yet.
    """
    calls = _native.library.calls
    if calls is None:
        return add_to_table_pure(table, fingerprints)
    return int(calls.rw_index_add(table.buffer_info()[0], len(table), *fingerprints.buffer_info()))


def add_to_table_pure(table: array[int], fingerprints: array[int]) -> int:
    """add_to_table() without native code."""
    mask = len(table) - 1
    added = 0
    for value in fingerprints:
        wanted = value or 1
        slot = wanted & mask
        while table[slot] and table[slot] != wanted:
            slot = (slot + 1) & mask
        added += not table[slot]
        table[slot] = wanted
    return added
