"""The rebuilt drive is what a cut leaves, shown on a log made here; needs no guest."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import writelog
from writelog import DISCARD, FLUSH, FUA, Loss

SECTOR, BLOCK, DRIVE = 512, 4096, 1 << 20


def write_log(path: Path, entries: Sequence[tuple[int, bytes, int]]) -> None:
    body = struct.pack("<QQQI", writelog.MAGIC, writelog.VERSION, len(entries), SECTOR).ljust(SECTOR, b"\0")
    for block, data, flags in entries:
        head = (block * BLOCK // SECTOR, len(data) // SECTOR, flags, 0)
        body += struct.pack("<QQQQ", *head).ljust(SECTOR, b"\0") + (b"" if flags & DISCARD else data)
    path.write_bytes(body)


def blocks(drive: Path) -> str:
    """First byte of the first eight blocks; "." for a block of zeros."""
    content = drive.read_bytes()
    assert len(content) == DRIVE
    return "".join(chr(content[at * BLOCK] or ord(".")) for at in range(8))


def fill(text: str) -> bytes:
    return b"".join(letter.encode() * BLOCK for letter in text)


LOG = [
    (0, fill("ab"), 0),
    (0, b"", FLUSH),
    (1, fill("c"), 0),
    (3, fill("d"), FUA),
    (4, fill("ef"), 0),
    (0, b"", FLUSH),
    (4, fill("g"), 0),
    (0, fill("?"), DISCARD),
]


@pytest.mark.parametrize(
    ("cut", "loss", "expected"),
    [
        (0, Loss.ALL, "........"),
        (1, Loss.ALL, "........"),
        (1, Loss.NONE, "ab......"),
        (2, Loss.ALL, "ab......"),
        (3, Loss.ALL, "ab......"),
        (3, Loss.NONE, "ac......"),
        (5, Loss.ALL, "ab.d...."),
        (5, Loss.NONE, "ac.def.."),
        (6, Loss.ALL, "ac.def.."),
        (7, Loss.NONE, "ac.dgf.."),
        (8, Loss.NONE, ".c.dgf.."),
    ],
)
def test_a_cut_keeps_what_was_flushed_or_forced(tmp_path: Path, cut: int, loss: Loss, expected: str) -> None:
    write_log(tmp_path / "log", LOG)
    entries = writelog.read_entries(tmp_path / "log")
    assert len(entries) == len(LOG)
    rebuilt = writelog.rebuild(
        tmp_path / "log", entries, cut, loss, tmp_path / "drive", drive_bytes=DRIVE, block_bytes=BLOCK
    )
    assert blocks(tmp_path / "drive") == expected
    assert (rebuilt.lost_bytes > 0) == (loss is Loss.ALL and rebuilt.volatile_writes > 0)


def test_some_loss_tears_a_write_between_its_blocks(tmp_path: Path) -> None:
    write_log(tmp_path / "log", [(0, fill("abcdefgh"), 0)])
    entries = writelog.read_entries(tmp_path / "log")
    seen = set()
    for seed in range(8):
        writelog.rebuild(
            tmp_path / "log", entries, 1, Loss.SOME, tmp_path / "drive", drive_bytes=DRIVE, block_bytes=BLOCK, seed=seed
        )
        kept = blocks(tmp_path / "drive")
        assert all(found in (letter, ".") for letter, found in zip("abcdefgh", kept, strict=True))
        seen.add(kept)
    assert len(seen) > 1
    assert any(0 < kept.count(".") < 8 for kept in seen)


def test_a_torn_tail_of_the_log_is_left_out(tmp_path: Path) -> None:
    write_log(tmp_path / "log", LOG[:3])
    content = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(content[:-1])
    assert len(writelog.read_entries(tmp_path / "log")) == 2
    (tmp_path / "log").write_bytes(content + bytes(SECTOR))
    assert len(writelog.read_entries(tmp_path / "log")) == 3


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="not a write log"):
        writelog.read_entries(tmp_path / "log")


def test_notes_are_found_by_their_place(tmp_path: Path) -> None:
    write_log(tmp_path / "log", [(0, fill("a"), 0), (7, fill("n"), 0), (0, b"", FLUSH), (7, fill("o"), 0)])
    entries = writelog.read_entries(tmp_path / "log")
    found = writelog.notes(tmp_path / "log", entries, 7 * BLOCK, BLOCK)
    assert [(number, data[:1]) for number, data in found] == [(1, b"n"), (3, b"o")]


def test_cuts_spread_over_the_log_and_sit_beside_its_flushes(tmp_path: Path) -> None:
    write_log(tmp_path / "log", [(0, fill("a"), 0), (1, fill("b"), 0), (2, fill("c"), 0), (0, b"", FLUSH)] * 40)
    entries = writelog.read_entries(tmp_path / "log")
    cuts = writelog.choose_cuts(entries, 0, 160, 20, seed=1)
    assert len(cuts) == 20
    assert cuts == sorted(cuts)
    assert cuts[0] > 0
    assert cuts[-1] <= 160
    assert all(entries[cut - 1].flushes for cut in cuts[0::4])
    assert all(entries[cut].flushes for cut in cuts[1:-1:4])
    assert cuts == writelog.choose_cuts(entries, 0, 160, 20, seed=1)
    assert cuts != writelog.choose_cuts(entries, 0, 160, 20, seed=2)
