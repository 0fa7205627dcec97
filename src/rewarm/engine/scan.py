"""Which records lie below a namespace's directory: names only, never a stat."""

from __future__ import annotations

import os
from array import array
from contextlib import suppress

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_NAME_CHARACTERS = 64 + len(".rec")


def scan_keys(directory: str) -> array[int]:
    """Fingerprints of the records below ``directory``/<hh>/, in no order.

    Returns:
        array('Q'): le64(key[0:8]) ^ rotl64(le64(key[24:32]), 1) of each file called <64 hexadecimal digits>.rec.
    Raises:
        OSError: The directory cannot be listed; one that is not there has no records.
    """
    found = array("Q")
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return found
    for name in names:
        if len(name) == 2:
            _scan_into(found, os.path.join(directory, name))
    return found


def _scan_into(found: array[int], directory: str) -> None:
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if len(name) == _NAME_CHARACTERS and name.endswith(".rec"):
            with suppress(ValueError):
                key = bytes.fromhex(name[:64])
                tail = int.from_bytes(key[24:], "little")
                found.append((int.from_bytes(key[:8], "little") ^ (tail << 1 & _U64 | tail >> 63)) or 1)
