"""Reads one record whole and says whether it is what its name says."""

from __future__ import annotations

import os
import shutil

from rewarm.engine import pure_io
from rewarm.engine.base import ReadRecord, ToMemory
from rewarm.engine.checksum import crc32c
from rewarm.engine.memory import PAGE_BYTES, AlignedBuffer
from rewarm.engine.record import PIECE_BYTES, parse_header, piece_spans
from rewarm.errors import DamageError, FormatVersionError
from rewarm.volume.layout import NamespaceFile


def remove_record(path: str) -> None:
    """Remove what has a record's name, whatever it is.

    Raises:
        OSError: As unlink gives it.
    """
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


class RecordChecker:
    """Checks records of one namespace, one after the other, in memory of its own."""

    def __init__(self, namespace: NamespaceFile) -> None:
        self._namespace = namespace
        self._buffer = AlignedBuffer(namespace.record_bytes)

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()

    def check(self, path: str, key: bytes) -> int:
        """0; ENOENT; EBADMSG where it is anything but this record whole; else the errno of the I/O.

        After a 0 ``payload`` has the record's bytes.
        """
        namespace = self._namespace
        target = ToMemory(self._buffer.address + PAGE_BYTES)
        transfer = ReadRecord(path, key, namespace.id, namespace.payload_bytes, target)
        view = self._buffer.view
        return pure_io.read_record(transfer, view[:PAGE_BYTES], view[PAGE_BYTES:], lambda: 0, lambda _: None)

    @property
    def record(self) -> memoryview:
        """The file's bytes of the record that was checked last; valid until the next one."""
        return self._buffer.view[: self._namespace.record_bytes]

    @property
    def created_ns(self) -> int:
        """When that record was stored."""
        return parse_header(bytes(self._buffer.view[:PAGE_BYTES])).created_ns


def check_record(record: memoryview, key: bytes, namespace: NamespaceFile) -> None:
    """Check the bytes of a record that came from elsewhere.

    Raises:
        DamageError: They are not this record, whole.
    """
    try:
        header = parse_header(bytes(record[:PAGE_BYTES]))
    except FormatVersionError as error:
        raise DamageError(f"record {key.hex()} has a newer format") from error
    found = (header.key, header.namespace_id, header.payload_bytes, header.piece_bytes)
    if found != (key, namespace.id, namespace.payload_bytes, PIECE_BYTES):
        raise DamageError(f"record {key.hex()} says that it is another one")
    spans = piece_spans(namespace.payload_bytes)
    if any(
        crc32c(record[offset : offset + length]) != crc
        for (offset, length), crc in zip(spans, header.piece_crcs, strict=True)
    ):
        raise DamageError(f"record {key.hex()} does not match its checksum")
