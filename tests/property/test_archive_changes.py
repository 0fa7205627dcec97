"""Archives that were changed anywhere: a reader gives whole records of the original, or says that it is damaged."""

from __future__ import annotations

import io
import random
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from volumes import MIB, Bench, key, namespace_of, payload, store

from rewarm.errors import DamageError, FormatVersionError
from rewarm.volume import create_volume
from rewarm.volume.archive import ArchiveReader, export_archive

PAYLOAD_BYTES = 100
SAMPLE, FULL = 5_000, 1_000_000
BUFFER = memoryview(bytearray(8192))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Three records of 8 KiB."""
    root = str(tmp_path_factory.mktemp("source") / "kv")
    create_volume([root], capacity_bytes=MIB)
    bench = Bench()
    assert all(store(namespace_of(bench.open(root), payload_bytes=PAYLOAD_BYTES), range(3)))
    bench.close()
    stream = io.BytesIO()
    export_archive([root], stream)
    return stream.getvalue()


def read(archive: bytes) -> bool:
    """Whether it was read to its end. Whatever comes out is one of the three records."""
    whole = {key(number): payload(number, PAYLOAD_BYTES) for number in range(3)}
    try:
        reader = ArchiveReader(io.BytesIO(archive))
        while found := reader.read_record(BUFFER):
            assert bytes(BUFFER[4096 : 4096 + PAYLOAD_BYTES]) == whole[found[1]]
    except (DamageError, FormatVersionError):
        return False
    return True


def change(archive: bytes, seed: int) -> bytes:
    """Flip, set, cut, repeat or swap some of it; where a tar header is hit, its checksum is often made good."""
    draw = random.Random(seed)
    content = bytearray(archive)
    blocks = len(content) // 512
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(content))
        kind = draw.randrange(6)
        if kind == 0:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            content[at : at + draw.randrange(1, 24)] = draw.randbytes(draw.randrange(1, 24))
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            first = draw.randrange(blocks) * 512
            content[first:first] = content[first : first + 512 * draw.randrange(1, 20)]
        elif kind == 4:
            one, other = (draw.randrange(blocks) * 512 for _ in range(2))
            content[one : one + 512], content[other : other + 512] = (
                content[other : other + 512],
                content[one : one + 512],
            )
        else:
            head = draw.choice(HEADS)
            field = draw.choice(((0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
            start = head + field[0] + draw.randrange(field[1])
            content[start : start + 1] = draw.choice((b"\0", b"/", b".", b"7", b"\x80", b"\xff", draw.randbytes(1)))
            if len(content) >= head + 512:
                content[head + 148 : head + 156] = b" " * 8
                content[head + 148 : head + 156] = b"%06o\0 " % sum(content[head : head + 512])
        if not content:
            return b""
        blocks = max(1, len(content) // 512)
    return bytes(content)


HEADS: list[int] = []


def run(archive: bytes, seeds: range) -> int:
    """How many of them were read to their end."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        HEADS[:] = [info.offset for info in tar.getmembers()]
    return sum(read(change(archive, seed)) for seed in seeds)


def test_a_seeded_sample(archive: bytes) -> None:
    assert read(archive)
    whole = run(archive, range(SAMPLE))
    assert whole < SAMPLE // 2, "most changes matter"


@pytest.mark.deep
def test_a_million(archive: bytes) -> None:
    assert run(archive, range(FULL)) < FULL // 2
