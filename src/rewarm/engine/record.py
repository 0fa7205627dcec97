"""The header page of a record, and the checksums that stand in it.

The layout is docs/format/volume-v1.md, "Record"; native/record.c is the twin of this file, and
tests/contract compares the two on the same bytes.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

from rewarm.engine.checksum import crc32c
from rewarm.errors import DamageError, FormatVersionError
from rewarm.units import MIB, round_up

PAGE_BYTES = 4096
MAGIC = b"RWR1"
FORMAT_VERSION = 1
KEY_BYTES = 32
NAMESPACE_BYTES = 32
CHECKSUM_CRC32C = 1
PIECE_BYTES = MIB
"""Default piece. Pieces are cut at multiples of it in FILE offsets, so the first payload piece is one page shorter."""

_HEAD = struct.Struct("<4sIHHIQII32s32sQ")
_TABLE_OFFSET = 1024
MAX_PIECES = (PAGE_BYTES - _TABLE_OFFSET) // 4
"""Piece checksums that fit the header page: 768, so 768 MiB at 1 MiB a piece."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What the header page of one record says."""

    key: bytes
    """32 bytes; what the record is called."""
    namespace_id: bytes
    """32 bytes; sha256 of all that decides how the payload is to be read."""
    payload_bytes: int
    created_ns: int
    """Unix time of the store, nanoseconds."""
    piece_crcs: tuple[int, ...]
    """CRC32C of each piece of the padded payload, in file order."""
    piece_bytes: int = PIECE_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Length of the file that holds a payload: header page, payload, zeros up to a whole page."""
    return PAGE_BYTES + round_up(payload_bytes, PAGE_BYTES)


def piece_spans(payload_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """(file offset, length) of each checksummed piece; together they cover the padded payload and nothing else."""
    end = record_bytes(payload_bytes)
    cuts = [PAGE_BYTES, *range(piece_bytes, end, piece_bytes), end] if end > PAGE_BYTES else [PAGE_BYTES]
    return [(lo, hi - lo) for lo, hi in itertools.pairwise(cuts)]


def num_pieces(payload_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """How many pieces ``piece_spans`` gives."""
    return len(piece_spans(payload_bytes, piece_bytes))


def pack_header(header: RecordHeader) -> bytes:
    """The 4096 bytes of the header page."""
    body = bytearray(PAGE_BYTES)
    head = (MAGIC, 0, FORMAT_VERSION, 0, CHECKSUM_CRC32C, header.payload_bytes, header.piece_bytes)
    _HEAD.pack_into(body, 0, *head, len(header.piece_crcs), header.key, header.namespace_id, header.created_ns)
    struct.pack_into(f"<{len(header.piece_crcs)}I", body, _TABLE_OFFSET, *header.piece_crcs)
    struct.pack_into("<I", body, 4, crc32c(bytes(body[8:])))
    return bytes(body)


def parse_header(page: bytes) -> RecordHeader:
    """What a header page says, once its own checksum holds.

    Raises:
        DamageError: Not a header page, a checksum mismatch, or fields that contradict each other.
        FormatVersionError: A whole header page of a version that this release does not read.
    """
    if len(page) != PAGE_BYTES or page[:4] != MAGIC:
        raise DamageError("no record header")
    magic_crc = struct.unpack_from("<I", page, 4)[0]
    if crc32c(page[8:]) != magic_crc:
        raise DamageError("header page checksum mismatch")
    _, _, version, _, kind, payload_bytes, piece_bytes, count, key, namespace_id, created_ns = _HEAD.unpack_from(page)
    if version != FORMAT_VERSION:
        raise FormatVersionError("record", found=version, known=FORMAT_VERSION)
    if kind != CHECKSUM_CRC32C or count > MAX_PIECES or piece_bytes < 2 * PAGE_BYTES or piece_bytes % PAGE_BYTES:
        raise DamageError("header page fields contradict each other")
    if payload_bytes > MAX_PIECES * piece_bytes or count != num_pieces(payload_bytes, piece_bytes):
        raise DamageError("header page fields contradict each other")
    crcs = struct.unpack_from(f"<{count}I", page, _TABLE_OFFSET)
    return RecordHeader(key, namespace_id, payload_bytes, created_ns, crcs, piece_bytes)
