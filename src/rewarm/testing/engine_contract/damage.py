"""What comes off flash is hostile; what cannot be stored leaves nothing behind."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rewarm.engine.base import Engine, RecordTarget, ToMemory, ToSlot
from rewarm.engine.checksum import crc32c
from rewarm.engine.memory import PAGE_BYTES
from rewarm.testing.engine_contract.helpers import (
    KEY,
    NAMESPACE,
    Base,
    Cache,
    random_buffer,
    read_of,
    run,
    stored,
    write_of,
)
from rewarm.units import MIB

NUM_BYTES = 2 * MIB + 300_000
"""Three pieces, and padding after them."""
FILE_BYTES = PAGE_BYTES + NUM_BYTES + -NUM_BYTES % PAGE_BYTES

PLACES = {
    "magic": 0,
    "header checksum": 4,
    "version": 8,
    "kind": 12,
    "payload length": 16,
    "piece length": 24,
    "piece count": 28,
    "key": 40,
    "namespace": 70,
    "creation time": 100,
    "between the fields": 900,
    "table of checksums": 1024,
    "end of the table": 4095,
    "first byte": 4096,
    "end of the first piece": MIB - 1,
    "second piece": MIB,
    "third piece": 2 * MIB + 5,
    "last byte": PAGE_BYTES + NUM_BYTES - 1,
    "padding": FILE_BYTES - 1,
}


def sign(page: bytearray) -> bytes:
    """Give a header page a right checksum, so that its fields are what is looked at."""
    page[4:8] = crc32c(bytes(page[8:])).to_bytes(4, "little")
    return bytes(page)


class DamageContract(Base):
    """Damage in every place ends as EBADMSG, and no block has a byte of it."""

    def refuse(self, engine: Engine, path: Path, num_bytes: int = NUM_BYTES, **names: bytes) -> None:
        """All three targets refuse the record; blocks are as they were."""
        cache = Cache(num_planes=1, num_blocks=1, page_bytes=num_bytes)
        before = cache.bytes()
        out = random_buffer(num_bytes)
        targets: list[RecordTarget] = [ToMemory(out.address), ToSlot(), cache.target([0])]
        found = run(engine, *(read_of(path, num_bytes, target, **names) for target in targets))
        assert found == [errno.EBADMSG] * 3
        assert cache.bytes() == before

    @pytest.mark.parametrize("place", PLACES)
    def test_one_bit(self, engine: Engine, tmp_path: Path, place: str) -> None:
        path = tmp_path / "r.rec"
        stored(engine, path, NUM_BYTES)
        content = bytearray(path.read_bytes())
        assert len(content) == FILE_BYTES
        content[PLACES[place]] ^= 0x10
        path.write_bytes(content)
        self.refuse(engine, path)

    @pytest.mark.parametrize("length", [0, 1, 4095, 4096, 5000, MIB, 2 * MIB + 1, FILE_BYTES - 4096, FILE_BYTES - 1])
    def test_a_file_that_ends_early(self, engine: Engine, tmp_path: Path, length: int) -> None:
        path = tmp_path / "r.rec"
        stored(engine, path, NUM_BYTES)
        os.truncate(path, length)
        self.refuse(engine, path)

    def test_another_name_or_length_than_asked_for(self, engine: Engine, tmp_path: Path) -> None:
        path = tmp_path / "r.rec"
        stored(engine, path, NUM_BYTES)
        self.refuse(engine, path, key=KEY[::-1])
        self.refuse(engine, path, namespace_id=NAMESPACE[::-1])
        for num_bytes in (NUM_BYTES - 1, NUM_BYTES + 1, 4096, NUM_BYTES + MIB // 2):
            self.refuse(engine, path, num_bytes)

    @pytest.mark.parametrize(
        ("offset", "value"),
        [(8, b"\x02\0"), (12, b"\2\0\0\0"), (16, b"\xff" * 8), (24, b"\0" * 4), (24, b"\0\x20\0\0"), (28, b"\xff" * 4)],
        ids=["newer version", "other checksum", "huge payload", "no piece length", "other pieces", "many pieces"],
    )
    def test_a_whole_header_that_lies(self, engine: Engine, tmp_path: Path, offset: int, value: bytes) -> None:
        path = tmp_path / "r.rec"
        stored(engine, path, NUM_BYTES)
        content = path.read_bytes()
        page = bytearray(content[:PAGE_BYTES])
        page[offset : offset + len(value)] = value
        path.write_bytes(sign(page) + content[PAGE_BYTES:])
        self.refuse(engine, path)

    def test_what_is_no_plain_file(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", NUM_BYTES)
        (tmp_path / "link").symlink_to(tmp_path / "r.rec")
        os.mkfifo(tmp_path / "fifo")
        self.refuse(engine, tmp_path / "link")
        self.refuse(engine, tmp_path / "fifo")
        (tmp_path / "folder").mkdir()
        out = random_buffer(NUM_BYTES)
        assert run(engine, read_of(tmp_path / "folder", NUM_BYTES, ToMemory(out.address))) != [0]

    def test_no_such_record(self, engine: Engine, tmp_path: Path) -> None:
        out = random_buffer(NUM_BYTES)
        reads = [read_of(tmp_path / "r.rec", NUM_BYTES, target) for target in (ToMemory(out.address), ToSlot())]
        assert run(engine, *reads) == [errno.ENOENT] * 2

    def test_a_store_that_fails_leaves_neither_name(self, engine: Engine, tmp_path: Path) -> None:
        buffer = random_buffer(4 * MIB)
        with file_size_limit(2 * MIB):
            assert run(engine, write_of(tmp_path / "r.rec", buffer, 4 * MIB)) == [errno.EFBIG]
        assert not list(tmp_path.iterdir())

    def test_a_store_whose_name_is_taken_by_a_directory(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "r.rec" / "full").mkdir(parents=True)
        assert run(engine, write_of(tmp_path / "r.rec", random_buffer(100), 100)) == [errno.EISDIR]
        assert [path.name for path in tmp_path.iterdir()] == ["r.rec"]

    def test_a_store_below_a_file(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert run(engine, write_of(tmp_path / "file" / "r.rec", random_buffer(100), 100)) == [errno.ENOTDIR]

    def test_a_temporary_name_that_is_taken_is_left_alone(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "taken").write_bytes(b"mine")
        transfer = write_of(tmp_path / "r.rec", random_buffer(100), 100, temporary_path=str(tmp_path / "taken"))
        assert run(engine, transfer) == [errno.EEXIST]
        assert (tmp_path / "taken").read_bytes() == b"mine"
        assert not (tmp_path / "r.rec").exists()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
