"""The file operations of the pure engine: one function a kind of transfer, each ends with 0 or an errno.

``stop()`` is asked between pieces; a number other than 0 ends the transfer with it before the next piece is submitted.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rewarm.engine.base import Read, ReadRecord, Write, WriteRecord
from rewarm.engine.checksum import crc32c
from rewarm.engine.memory import PAGE_BYTES, view_at
from rewarm.engine.record import (
    PIECE_BYTES,
    RecordHeader,
    pack_header,
    parse_header,
    piece_spans,
)
from rewarm.errors import DamageError, FormatVersionError
from rewarm.units import round_up

T = TypeVar("T")
Stop = Callable[[], int]

# A planted symlink or FIFO is refused, not followed or waited for.
_RECORD_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_A_RECORD = {errno.ENODATA, errno.ELOOP, errno.ESPIPE, errno.EISDIR}
_FILE_MODE, _DIR_MODE = 0o600, 0o700
_MKDIR_TRIES = 3


class _Stopped(OSError):
    """The transfer was cut between two pieces."""


class _File:
    """An open file: O_DIRECT where the file system takes it, the page cache where it says EINVAL."""

    def __init__(self, path: str, flags: int, *, direct: bool) -> None:
        flags |= os.O_CLOEXEC
        self.direct = direct
        try:
            self.fd = os.open(path, flags | (os.O_DIRECT if direct else 0), _FILE_MODE)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.direct = False
            if flags & os.O_CREAT:  # Linux makes the file before it refuses O_DIRECT
                flags &= ~os.O_EXCL
            self.fd = os.open(path, flags, _FILE_MODE)

    def _buffered(self, error: OSError) -> bool:
        if not self.direct or error.errno != errno.EINVAL:
            return False
        self.direct = False
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return True

    def move(self, call: Callable[[int, list[memoryview], int], int], views: list[memoryview], offset: int) -> None:
        """preadv or pwritev all of ``views`` at ``offset``; ENODATA where the file ends before."""
        while views:
            try:
                moved = call(self.fd, views, offset)
            except OSError as error:
                if self._buffered(error):
                    continue
                raise
            if moved == 0:
                raise OSError(errno.ENODATA, "the file ends before the transfer does")
            offset += moved
            views = _rest(views, moved)


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    rest = []
    for view in views:
        if moved < len(view):
            rest.append(view[moved:])
        moved = max(0, moved - len(view))
    return rest


@contextmanager
def _opened(path: str, flags: int, *, direct: bool) -> Iterator[_File]:
    file = _File(path, flags, direct=direct)
    try:
        yield file
    finally:
        os.close(file.fd)


def _check_stop(stop: Stop) -> None:
    if reason := stop():
        raise _Stopped(reason, "cut")


def move_bytes(transfer: Read | Write, stop: Stop) -> int:
    """Read or Write, piece by piece."""
    fields = (transfer.offset_bytes, transfer.length_bytes, transfer.address)
    direct = not any(field % PAGE_BYTES for field in fields)
    flags, call = (os.O_RDONLY, os.preadv) if isinstance(transfer, Read) else (os.O_WRONLY, os.pwritev)
    position, end = transfer.offset_bytes, transfer.offset_bytes + transfer.length_bytes
    try:
        with _opened(transfer.path, flags, direct=direct) as file:
            while position < end:
                _check_stop(stop)
                cut = min(end, (position // PIECE_BYTES + 1) * PIECE_BYTES)
                view = view_at(transfer.address + position - transfer.offset_bytes, cut - position)
                file.move(call, [view], position)
                position = cut
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def read_record(
    transfer: ReadRecord, header_page: memoryview, payload: memoryview, stop: Stop, moved: Callable[[int], None]
) -> int:
    """Read a record and check header page, name and every piece.

    Args:
        header_page: 4096 aligned bytes.
        payload: Room for the padded payload, aligned.
        moved: Told the bytes of each piece that was read and checked.
    Returns:
        0, ENOENT, EBADMSG for anything but this record whole, or the errno of the I/O.
    """
    try:
        with _opened(transfer.path, os.O_RDONLY | _RECORD_FLAGS, direct=True) as file:
            header: RecordHeader | None = None
            for piece, (offset, length) in enumerate(piece_spans(transfer.payload_bytes)):
                _check_stop(stop)
                view = payload[offset - PAGE_BYTES : offset - PAGE_BYTES + length]
                if header is None:
                    file.move(os.preadv, [header_page, view], 0)
                    header = parse_header(bytes(header_page))
                    if not _is_named(header, transfer):
                        return errno.EBADMSG
                else:
                    file.move(os.preadv, [view], offset)
                if crc32c(view) != header.piece_crcs[piece]:
                    return errno.EBADMSG
                moved(length if piece else PAGE_BYTES + length)
    except (DamageError, FormatVersionError):
        return errno.EBADMSG
    except OSError as error:
        return errno.EBADMSG if error.errno in _NOT_A_RECORD else error.errno or errno.EIO
    return 0


def _is_named(header: RecordHeader, transfer: ReadRecord) -> bool:
    same = (header.key, header.namespace_id) == (transfer.key, transfer.namespace_id)
    return same and (header.payload_bytes, header.piece_bytes) == (transfer.payload_bytes, PIECE_BYTES)


def write_record(transfer: WriteRecord, scratch_page: memoryview, stop: Stop) -> int:
    """Write to the temporary name, rename; nothing is left of a write that failed."""
    made: list[str] = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    owned = False
    try:
        file = _with_parents(transfer.temporary_path, made, lambda: _File(transfer.temporary_path, flags, direct=True))
        owned = True
        try:
            _write_temporary(transfer, file, scratch_page, stop)
        finally:
            os.close(file.fd)
        _with_parents(transfer.path, made, lambda: os.rename(transfer.temporary_path, transfer.path))
        owned = False
        if transfer.durable:
            for directory in [str(Path(transfer.path).parent), *made]:
                _sync_directory(directory)
    except OSError as error:
        if owned:
            with suppress(OSError):
                os.unlink(transfer.temporary_path)
        return error.errno or errno.EIO
    return 0


def _write_temporary(transfer: WriteRecord, file: _File, page: memoryview, stop: Stop) -> None:
    """Payload first and header last, so that a torn write has no valid header."""
    payload = view_at(transfer.address, round_up(transfer.payload_bytes, PAGE_BYTES))
    payload[transfer.payload_bytes :] = bytes(len(payload) - transfer.payload_bytes)
    crcs = []
    for offset, length in piece_spans(transfer.payload_bytes):
        _check_stop(stop)
        view = payload[offset - PAGE_BYTES : offset - PAGE_BYTES + length]
        crcs.append(crc32c(view))
        file.move(os.pwritev, [view], offset)
    _check_stop(stop)
    page[:] = pack_header(
        RecordHeader(transfer.key, transfer.namespace_id, transfer.payload_bytes, transfer.created_ns, tuple(crcs))
    )
    file.move(os.pwritev, [page], 0)
    if transfer.durable:
        os.fsync(file.fd)


def _with_parents(path: str, made: list[str], action: Callable[[], T]) -> T:
    """Do what needs the directories of ``path``; make them where they are missing, even while somebody removes them."""
    for _ in range(_MKDIR_TRIES):
        with suppress(FileNotFoundError):
            return action()
        _make_directories(Path(path).parent, made)
    return action()


def _make_directories(directory: Path, made: list[str]) -> None:
    try:
        directory.mkdir(_DIR_MODE)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directories(directory.parent, made)
        with suppress(FileExistsError):
            directory.mkdir(_DIR_MODE)
    made.append(str(directory.parent))


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def probe(path: str) -> int:
    """0 where something has this name; never opens it."""
    try:
        os.stat(path, follow_symlinks=False)
    except OSError as error:
        return errno.ENOENT if error.errno == errno.ENOTDIR else error.errno or errno.EIO
    return 0


def unlink(path: str) -> int:
    """0, or ENOENT where it was gone."""
    try:
        os.unlink(path)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
