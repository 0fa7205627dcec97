"""Reads one record whole and says whether it is what its name says."""

from __future__ import annotations

import errno
import os
import shutil

from rewarm.engine import pure_io
from rewarm.engine.base import ReadRecord, ToMemory
from rewarm.engine.memory import PAGE_BYTES, AlignedBuffer
from rewarm.volume.layout import NamespaceFile

NOT_A_RECORD = frozenset({errno.EBADMSG, errno.EISDIR, errno.ELOOP, errno.ESPIPE})
"""Results of a read that mean: what has the record's name is not the record."""


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
        result = pure_io.read_record(transfer, view[:PAGE_BYTES], view[PAGE_BYTES:], lambda: 0)
        return errno.EBADMSG if result in NOT_A_RECORD else result

    @property
    def payload(self) -> memoryview:
        """The payload of the record that was checked last; valid until the next one."""
        return self._buffer.view[PAGE_BYTES : PAGE_BYTES + self._namespace.payload_bytes]

    @property
    def payload_address(self) -> int:
        """Where the payload lies, aligned to 4096, with room for the padded one."""
        return self._buffer.address + PAGE_BYTES
