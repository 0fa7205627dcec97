"""Header pages made and altered by hand, from docs/format/volume-v1.md and not from the code under test."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import google_crc32c

if TYPE_CHECKING:
    import random

PAGE = 4096
USED_BYTES = 104
TABLE = 1024
FIELDS = {
    "version": (8, "<H"), "kind": (12, "<I"), "payload": (16, "<Q"), "piece": (24, "<I"), "count": (28, "<I"),
    "key": (32, "32s"), "namespace": (64, "32s"), "created": (96, "<Q"), "crc": (TABLE, "<I"),
}  # fmt: skip
"""(offset, struct) of each field; "crc" is the first piece's."""


def seal(page: bytearray) -> bytes:
    """The page with its own checksum made right."""
    struct.pack_into("<I", page, 4, google_crc32c.value(bytes(page[8:])))
    return bytes(page)


def wrong_value(rng: random.Random, field: str, old: int | bytes) -> int | bytes:
    """A value that this field must not have in a record that was stored with ``old``."""
    if isinstance(old, bytes):
        new = bytearray(old)
        new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
        return bytes(new)
    choices = {
        "version": [0, 2, 3, 255, 65535],
        "kind": [0, 2, 3, 1 << 31],
        "payload": [0, 1, old - 1, old + 1, old + 4096, old * 2, 1 << 40, (1 << 64) - 1],
        "piece": [0, 1, 4095, 4097, 8192, (1 << 32) - 1],
        "count": [0, old + 1, 768, 769, 1 << 16, (1 << 32) - 1],
        "crc": [old ^ (1 << rng.randrange(32))],
    }[field]
    return rng.choice([value for value in choices if value != old])


def reseal(rng: random.Random, page: bytes, field: str) -> bytes:
    """A header page with one wrong field under a right checksum; field "any" picks one that a reader must check."""
    if field == "any":
        field = rng.choice([name for name in FIELDS if name not in ("version", "created")])
    offset, form = FIELDS[field]
    new = bytearray(page)
    (old,) = struct.unpack_from(form, page, offset)
    struct.pack_into(form, new, offset, wrong_value(rng, field, old))
    return seal(new)
