"""Makes the golden volume of version 1 in tests/format/v1: ``python tests/format/make_golden.py``.

It was made once, by the release that wrote version 1 first, and is never made anew: a release that would write other
bytes must still read these. test_golden.py compares what today's code would make, so that a change is noticed.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from rewarm.engine.checksum import crc32c
from rewarm.engine.record import RecordHeader, pack_header, piece_spans, record_bytes
from rewarm.volume.janitor import root_janitor as janitor
from rewarm.volume.layout import NamespaceFile, RootFile, RootPaths, identity_id, to_text
from rewarm.volume.session import ENTRY, Did
from rewarm.volume.usage import Usage, new_usage_file

PLACE = Path(__file__).parent / "v1"
CREATED_NS = 1764547200000000000
IDENTITIES = ({"dtype": "float16", "model": "example"}, {"dtype": "float16", "model": "another", "salt": "é"})
PAYLOAD_BYTES = (14, 5000)
ROOT = RootFile("0f0e0d0c0b0a09080706050403020100", "00112233445566778899aabbccddeeff", 1 << 20, CREATED_NS)


def key(number: int) -> bytes:
    """Of the golden records; 0 is the one in the format's page."""
    return hashlib.sha256(b"example" if number == 0 else b"example %d" % number).digest()


def payload(number: int, num_bytes: int) -> bytes:
    """Of the golden records."""
    return b"hello, rewarm\n" if number == 0 else hashlib.shake_128(b"%d" % number).digest(num_bytes)


def record(namespace_id: bytes, number: int, num_bytes: int) -> bytes:
    """A record's file."""
    padded = payload(number, num_bytes)
    padded += bytes(record_bytes(num_bytes) - 4096 - len(padded))
    crcs = tuple(crc32c(padded[offset - 4096 : offset - 4096 + length]) for offset, length in piece_spans(num_bytes))
    return pack_header(RecordHeader(key(number), namespace_id, num_bytes, CREATED_NS, crcs)) + padded


def make(place: Path) -> None:
    """All files of it."""
    paths = RootPaths(str(place))
    for directory in (paths.root, paths.state, paths.sessions, f"{paths.sessions}/1-0a0b0c0d0e0f"):
        Path(directory).mkdir()
    Path(paths.volume_file).write_bytes(to_text(ROOT.to_json()))
    names = []
    for identity, num_bytes, numbers in zip(IDENTITIES, PAYLOAD_BYTES, ((0,), (1, 2)), strict=True):
        namespace = NamespaceFile(identity_id(identity), num_bytes, identity)
        directory = Path(paths.namespace(namespace.id))
        directory.mkdir()
        (directory / "namespace.json").write_bytes(to_text(namespace.to_json()))
        for number in numbers:
            path = Path(paths.record(namespace.id, key(number)))
            path.parent.mkdir()
            path.write_bytes(record(namespace.id, number, num_bytes))
            names.append((namespace.id, key(number)))
    new_usage_file(paths.usage, Usage(2 * 12288 + 8192, 0, 5 * 12288, 1, 12288))
    body = b"".join(
        janitor.ORDER_ENTRY.pack(state, bytes(7), *name) for state, name in zip((0, 2, 5), names, strict=True)
    )
    Path(paths.order).write_bytes(janitor.ORDER_MAGIC + crc32c(body).to_bytes(4, "little") + body)
    Path(paths.sync_mark("0123456789abcdef")).write_bytes(to_text({"boot_id": "golden", "synced_ns": CREATED_NS}))
    session = Path(paths.sessions) / "1-0a0b0c0d0e0f"
    (session / "lock").write_bytes(bytes(8))
    (session / "log-000000").write_bytes(
        ENTRY.pack(Did.TOUCHED, bytes(7), *names[0]) + ENTRY.pack(Did.STORED, bytes(7), *names[2])
    )


if __name__ == "__main__":
    if PLACE.exists():
        sys.exit(f"{PLACE} is there: golden volumes stay as they are")
    make(PLACE)
