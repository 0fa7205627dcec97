"""Engines broken on purpose, so that it is seen that the campaign notices."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rewarm.engine import pure_io
from rewarm.engine.memory import PAGE_BYTES, view_at
from rewarm.units import round_up

if TYPE_CHECKING:
    from rewarm.engine.base import ReadRecord, WriteRecord


_whole = pure_io.write_record


def _believe(
    transfer: ReadRecord,
    header_page: memoryview,
    payload: memoryview,
    stop: pure_io.Stop,
    moved: Callable[[int], None],
) -> int:
    """Reads what lies under the name and checks nothing."""
    try:
        fd = os.open(transfer.path, os.O_RDONLY)
    except OSError as error:
        return error.errno or 0
    try:
        os.preadv(fd, [header_page, payload], 0)
    except OSError as error:
        return error.errno or 0
    finally:
        os.close(fd)
    return 0


def _in_place(transfer: WriteRecord, scratch_page: memoryview, stop: pure_io.Stop) -> int:
    """Writes under the record's own name, a half first, so that whoever is killed leaves half a record."""
    try:
        os.makedirs(os.path.dirname(transfer.path), exist_ok=True)
        fd = os.open(transfer.path, os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        return error.errno or 0
    try:
        half = round_up(transfer.payload_bytes // 2, PAGE_BYTES)
        os.pwrite(fd, view_at(transfer.address, half), PAGE_BYTES)
    except OSError as error:
        return error.errno or 0
    finally:
        os.close(fd)
    return _whole(transfer, scratch_page, stop)


def install(name: str) -> None:
    """From now on the pure engine of this process is broken like that."""
    if name == "reader":
        pure_io.read_record = _believe
    elif name == "writer":
        pure_io.write_record = _in_place
