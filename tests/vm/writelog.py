"""What a drive holds after a power cut, rebuilt from the log of its writes and flushes.

The log is QEMU's blklogwrites, in the format of dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst):
a super block, then entries of one head sector and their data, in the order in which they reached the drive. A cut may
come after any entry. What was written before the last flush in front of the cut is on the medium; of what was written
after it, a drive with a volatile cache keeps any part, block by block.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

MAGIC, VERSION = 0x6A736677736872, 1
FLUSH, FUA, DISCARD = 1, 2, 4
_SUPER = struct.Struct("<QQQI")
_HEAD = struct.Struct("<QQQQ")


class Loss(Enum):
    """What becomes of the writes that no flush followed before the cut."""

    ALL = "all"
    """Lost, every one."""
    SOME = "some"
    """Each block of each write is lost or kept by the toss of a coin, so that later ones survive earlier ones."""
    NONE = "none"
    """Kept: the operating system died, the drive did not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log."""

    offset_bytes: int
    length_bytes: int
    flags: int
    data_at: int
    """Where the data lies in the log."""

    @property
    def flushes(self) -> bool:
        """What came before this entry is on the medium once it is done."""
        return bool(self.flags & FLUSH)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What rebuild() did."""

    volatile_writes: int
    lost_bytes: int
    """Bytes of volatile writes that the cut took."""


def read_entries(log: Path) -> list[Entry]:
    """All whole entries, in order."""
    with log.open("rb") as source:
        return list(_entries(source, log.stat().st_size))


def _entries(source: BinaryIO, end: int) -> Iterator[Entry]:
    magic, version, _, sector_bytes = _SUPER.unpack(source.read(_SUPER.size))
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not a write log: magic {magic:#x}, version {version}")
    at = sector_bytes
    while at + sector_bytes <= end:
        source.seek(at)
        sector, sectors, flags, _ = _HEAD.unpack(source.read(_HEAD.size))
        if not (sector or sectors or flags):  # the file was extended, but the head not yet written
            return
        at += sector_bytes
        length = sectors * sector_bytes
        stored = 0 if flags & DISCARD else length
        if at + stored > end:
            return
        yield Entry(sector * sector_bytes, length, flags, at)
        at += stored


def notes(log: Path, entries: Sequence[Entry], offset_bytes: int, length_bytes: int) -> list[tuple[int, bytes]]:
    """(entry number, data) of each write to just these bytes: what the guest noted in the log for the host."""
    with log.open("rb") as source:
        found = []
        for number, entry in enumerate(entries):
            if (entry.offset_bytes, entry.length_bytes) == (offset_bytes, length_bytes):
                source.seek(entry.data_at)
                found.append((number, source.read(length_bytes)))
        return found


def rebuild(
    log: Path, entries: Sequence[Entry], cut: int, loss: Loss, target: Path, *,
    drive_bytes: int, block_bytes: int, seed: int = 0,
) -> Rebuilt:  # fmt: skip
    """Write the drive as a cut right before ``entries[cut]`` leaves it (a sparse file)."""
    before = entries[:cut]
    last_flush = max((number for number, entry in enumerate(before) if entry.flushes), default=-1)
    durable = [e for n, e in enumerate(before) if e.length_bytes and (n < last_flush or e.flags & FUA)]
    volatile = [e for n, e in enumerate(before) if e.length_bytes and n >= last_flush and not e.flags & FUA]
    coin = random.Random(seed)
    lost_bytes = 0
    with log.open("rb") as source, target.open("wb") as drive:
        drive.truncate(drive_bytes)
        for entry in durable:
            drive.seek(entry.offset_bytes)
            drive.write(_data(source, entry))
        for entry in volatile:
            data = _data(source, entry)
            for start in range(0, len(data), block_bytes):
                block = data[start : start + block_bytes]
                if loss is Loss.ALL or (loss is Loss.SOME and coin.random() < 0.5):
                    lost_bytes += len(block)
                    continue
                drive.seek(entry.offset_bytes + start)
                drive.write(block)
    return Rebuilt(len(volatile), lost_bytes)


def _data(source: BinaryIO, entry: Entry) -> bytes:
    if entry.flags & DISCARD:
        return bytes(entry.length_bytes)
    source.seek(entry.data_at)
    return source.read(entry.length_bytes)


def choose_cuts(entries: Sequence[Entry], first: int, last: int, count: int, seed: int) -> list[int]:
    """``count`` cuts in (first, last], one in each of as many equal stretches of the log.

    Of each four: one right after a flush (nothing is volatile), one right before a flush (most is), two anywhere.
    """
    pick = random.Random(seed)
    cuts = []
    for number in range(count):
        low = first + 1 + (last - first) * number // count
        high = max(low + 1, first + 1 + (last - first) * (number + 1) // count)
        after_flush = [at for at in range(low, high) if entries[at - 1].flushes]
        before_flush = [at for at in range(low, min(high, len(entries))) if entries[at].flushes]
        places = (after_flush, before_flush, [], [])[number % 4]
        cuts.append(pick.choice(places or range(low, high)))
    return cuts
