"""What a header page is, judged field by field from docs/format/volume-v1.md: the referee between the two parsers."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import google_crc32c

PAGE = 4096
TABLE = 1024
MOST_PIECES = 768


class Verdict(Enum):
    """What a parser has to say."""

    WHOLE = "whole"
    DAMAGE = "damage"
    VERSION = "another version"


@dataclass(frozen=True)
class Fields:
    """What a whole page says."""

    key: bytes
    namespace_id: bytes
    payload_bytes: int
    created_ns: int
    piece_crcs: tuple[int, ...]
    piece_bytes: int


def pieces(payload_bytes: int, piece_bytes: int) -> int:
    """Pieces of a file of header page and padded payload, cut at multiples of the piece in file offsets."""
    if payload_bytes == 0:
        return 0
    padded = -(-payload_bytes // PAGE) * PAGE
    return -(-(PAGE + padded) // piece_bytes)


def judge(page: bytes) -> Verdict:
    """The verdict on bytes that should be a header page."""
    if len(page) != PAGE:
        return Verdict.DAMAGE
    own = int(google_crc32c.value(page[8:]))
    if page[0:4] != b"RWR1" or int.from_bytes(page[4:8], "little") != own:
        return Verdict.DAMAGE
    if int.from_bytes(page[8:10], "little") != 1:
        return Verdict.VERSION
    kind, payload, piece, count = struct.unpack_from("<IQII", page, 12)
    if kind != 1 or count > MOST_PIECES:
        return Verdict.DAMAGE
    if piece < 2 * PAGE or piece % PAGE:  # the first piece lacks the header page and may not be empty
        return Verdict.DAMAGE
    if payload > MOST_PIECES * piece or pieces(payload, piece) != count:
        return Verdict.DAMAGE
    return Verdict.WHOLE


def fields(page: bytes) -> Fields:
    """The fields of a whole page."""
    payload, piece, count = struct.unpack_from("<QII", page, 16)
    crcs = struct.unpack_from(f"<{count}I", page, TABLE)
    created = int.from_bytes(page[96:104], "little")
    return Fields(page[32:64], page[64:96], payload, created, crcs, piece)
