"""The little of tar that an archive of records is: plain files with short names, read from and written to a stream.

Reading is strict, since an archive may come from anybody: whatever is not such a file is damage, and no name of an
archive ever becomes a path. Python's tarfile would read links, devices and headers of any length.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from rewarm.errors import DamageError
from rewarm.units import round_up

BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(slots=True)
class Member:
    """One file of an archive; its bytes are taken in order, and all of them before the next member."""

    name: str
    num_bytes: int
    read_into: Callable[[memoryview], None]
    """Fill a buffer with the next bytes. DamageError when there are fewer."""


def read_members(stream: BinaryIO) -> Iterator[Member]:
    """The files of an archive, in order, until its end.

    Raises:
        DamageError: The archive is cut, or has anything but plain files.
    """
    while True:
        block = _exactly(stream, BLOCK_BYTES)
        if block == bytes(BLOCK_BYTES):
            return
        info = _parse(block)
        left = info.size

        def read_into(view: memoryview) -> None:
            nonlocal left
            if len(view) > left:
                raise DamageError("an entry of the archive is shorter than it should be")
            left -= len(view)
            _fill(stream, view)

        yield Member(info.name, info.size, read_into)
        if left:
            raise DamageError("an entry of the archive is longer than it should be")
        _exactly(stream, -info.size % BLOCK_BYTES)


def write_member(stream: BinaryIO, name: str, num_bytes: int, created_s: int, pieces: Iterator[memoryview]) -> None:
    """Append a file."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = num_bytes, created_s, 0o600
    stream.write(info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict"))
    stream.writelines(pieces)
    stream.write(bytes(round_up(num_bytes, BLOCK_BYTES) - num_bytes))


def write_end(stream: BinaryIO) -> None:
    """Say that no more comes."""
    stream.write(bytes(2 * BLOCK_BYTES))


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise DamageError(f"the archive is damaged: {error}") from error
    if info.type != tarfile.REGTYPE or info.linkname or info.size < 0:
        raise DamageError("the archive has something that is not a plain file")
    return info


def _exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    _fill(stream, memoryview(buffer))
    return bytes(buffer)


def _fill(stream: BinaryIO, view: memoryview) -> None:
    while view:
        chunk = stream.read(len(view))
        if not chunk:
            raise DamageError("the archive is cut short", hint="copy it again; what was imported stays")
        view[: len(chunk)] = chunk
        view = view[len(chunk) :]
