"""Every kind of transfer, done right."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rewarm.engine.base import Engine, Priority, Probe, Read, ToMemory, ToSlot, Unlink, Write
from rewarm.engine.checksum import crc32c
from rewarm.engine.memory import PAGE_BYTES, alloc_aligned
from rewarm.engine.record import RecordHeader, pack_header, piece_spans, record_bytes
from rewarm.testing.engine_contract.helpers import (
    CREATED_NS,
    KEY,
    LIMIT_S,
    NAMESPACE,
    NUM_SLOTS,
    SLOT_BYTES,
    Base,
    Cache,
    random_buffer,
    read_of,
    run,
    slot_payload,
    stored,
    write_of,
)
from rewarm.units import MIB

SIZES = (1, 4095, 4096, 4097, 131072, MIB - 4096, MIB - 4095, MIB, MIB + 200_000, 3 * MIB)


def expected_file(payload: bytes) -> bytes:
    """What docs/format/volume-v1.md says a record's file holds."""
    padded = payload + bytes(-len(payload) % PAGE_BYTES)
    crcs = tuple(
        crc32c(padded[offset - PAGE_BYTES : offset - PAGE_BYTES + length])
        for offset, length in piece_spans(len(payload))
    )
    return pack_header(RecordHeader(KEY, NAMESPACE, len(payload), CREATED_NS, crcs)) + padded


class TransferContract(Base):
    """Round trips, and what stands in the files."""

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_a_record_comes_back_as_it_was_stored(self, engine: Engine, tmp_path: Path, num_bytes: int) -> None:
        payload = stored(engine, tmp_path / "r.rec", num_bytes)
        out = random_buffer(num_bytes, seed=1)
        completion = engine.submit(
            [read_of(tmp_path / "r.rec", num_bytes, target) for target in (ToMemory(out.address), ToSlot())]
        )
        assert completion.wait(LIMIT_S)
        assert completion.results() == [0, 0]
        assert bytes(out.view[:num_bytes]) == payload
        assert slot_payload(completion, 1, num_bytes) == payload

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_the_file_is_what_the_format_says(self, engine: Engine, tmp_path: Path, num_bytes: int) -> None:
        payload = stored(engine, tmp_path / "r.rec", num_bytes)
        assert (tmp_path / "r.rec").read_bytes() == expected_file(payload)
        assert [path.name for path in tmp_path.iterdir()] == ["r.rec"]

    def test_a_file_that_the_format_describes_is_read(self, engine: Engine, tmp_path: Path) -> None:
        payload = bytes(random_buffer(2 * MIB + 5).view[: 2 * MIB + 5])
        (tmp_path / "r.rec").write_bytes(expected_file(payload))
        out = random_buffer(len(payload), seed=1)
        assert run(engine, read_of(tmp_path / "r.rec", len(payload), ToMemory(out.address))) == [0]
        assert bytes(out.view[: len(payload)]) == payload

    def test_a_record_of_many_pieces(self, engine: Engine, tmp_path: Path) -> None:
        payload = stored(engine, tmp_path / "r.rec", 40 * MIB)
        out = alloc_aligned(40 * MIB)
        assert run(engine, read_of(tmp_path / "r.rec", 40 * MIB, ToMemory(out.address))) == [0]
        assert bytes(out.view) == payload

    def test_the_padding_of_a_payload_is_zeroed(self, engine: Engine, tmp_path: Path) -> None:
        buffer = random_buffer(5000)
        assert run(engine, write_of(tmp_path / "r.rec", buffer, 5000)) == [0]
        assert not any(buffer.view[5000:8192])

    @pytest.mark.parametrize("skip_blocks", [0, 1, 5])
    def test_blocks_are_filled_and_no_other_byte(self, engine: Engine, tmp_path: Path, skip_blocks: int) -> None:
        cache, ids = Cache(num_planes=3, num_blocks=32, page_bytes=30_000), [7, 8, 9, 3, 20, 21, 0, 31]
        num_bytes = 3 * len(ids) * 30_000
        payload = stored(engine, tmp_path / "r.rec", num_bytes)
        wanted = Cache(num_planes=3, num_blocks=32, page_bytes=30_000)
        for plane in range(3):
            for position, block in list(enumerate(ids))[skip_blocks:]:
                start = (plane * len(ids) + position) * 30_000
                wanted.page(plane, block)[:] = payload[start : start + 30_000]
        target = cache.target(ids[skip_blocks:], skip_blocks)
        assert run(engine, read_of(tmp_path / "r.rec", num_bytes, target)) == [0]
        assert cache.bytes() == wanted.bytes()

    def test_blocks_that_are_all_resident_are_checked_and_left(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", 2 * 4096)
        cache = Cache(num_planes=1, num_blocks=2, page_bytes=4096)
        before = cache.bytes()
        assert run(engine, read_of(tmp_path / "r.rec", 2 * 4096, cache.target([], skip_blocks=2))) == [0]
        assert cache.bytes() == before

    def test_pages_larger_than_a_piece(self, engine: Engine, tmp_path: Path) -> None:
        cache = Cache(num_planes=1, num_blocks=2, page_bytes=MIB + 4096)
        payload = stored(engine, tmp_path / "r.rec", 2 * (MIB + 4096))
        assert run(engine, read_of(tmp_path / "r.rec", len(payload), cache.target([1, 0]))) == [0]
        assert bytes(cache.page(0, 1)) + bytes(cache.page(0, 0)) == payload

    def test_gather_is_the_inverse_of_blocks(self, engine: Engine, tmp_path: Path) -> None:
        cache, ids = Cache(num_planes=2, num_blocks=16, page_bytes=9000), [4, 5, 6, 1, 15]
        chunk = alloc_aligned(2 * len(ids) * 9000)
        engine.gather(cache.planes, array("q", ids), chunk.address)
        pages = [bytes(cache.page(plane, block)) for plane in range(2) for block in ids]
        assert bytes(chunk.view) == b"".join(pages)

    def test_missing_directories_are_made_for_the_owner_alone(self, engine: Engine, tmp_path: Path) -> None:
        path, temporary = tmp_path / "a" / "b" / "r.rec", tmp_path / "c" / "d" / "tmp"
        buffer = random_buffer(100)
        for durable in (False, True):
            transfer = write_of(path, buffer, 100, temporary_path=str(temporary), durable=durable)
            assert run(engine, transfer) == [0]
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert not list(temporary.parent.iterdir())

    def test_a_store_replaces_what_had_the_name(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", MIB)
        payload = stored(engine, tmp_path / "r.rec", 5000, seed=9)
        assert (tmp_path / "r.rec").read_bytes() == expected_file(payload)

    @pytest.mark.parametrize(("offset", "num_bytes"), [(0, 2 * MIB), (8192, 4096), (5, 100), (MIB - 1, MIB + 2)])
    def test_plain_bytes(self, engine: Engine, tmp_path: Path, offset: int, num_bytes: int) -> None:
        path = tmp_path / "plain"
        before = bytes(random_buffer(3 * MIB, seed=5).view[: 3 * MIB])
        path.write_bytes(before)
        source, back = random_buffer(num_bytes, seed=1), random_buffer(num_bytes, seed=2)
        assert run(engine, Write(str(path), offset, source.address, num_bytes)) == [0]
        assert run(engine, Read(str(path), offset, back.address, num_bytes)) == [0]
        written = bytes(source.view[:num_bytes])
        assert bytes(back.view[:num_bytes]) == written
        assert path.read_bytes() == before[:offset] + written + before[offset + num_bytes :]

    def test_plain_reads_and_writes_that_cannot_be(self, engine: Engine, tmp_path: Path) -> None:
        buffer = alloc_aligned(8192)
        (tmp_path / "short").write_bytes(bytes(5000))
        short, missing = str(tmp_path / "short"), str(tmp_path / "missing")
        reads = [Read(short, 0, buffer.address, 8192), Read(short, 8192, buffer.address, 1)]
        assert run(engine, *reads, Read(missing, 0, buffer.address, 1)) == [errno.ENODATA] * 2 + [errno.ENOENT]
        assert run(engine, Write(missing, 0, buffer.address, 1)) == [errno.ENOENT]
        assert run(engine, Read(short, 0, buffer.address, 0)) == [0]

    def test_probe_looks_and_never_opens(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        names = ("file", "fifo", "dangling", "missing", "file/below", "no/where")
        assert run(engine, *(Probe(str(tmp_path / name)) for name in names)) == [0, 0, 0] + [errno.ENOENT] * 3

    def test_unlink(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert run(engine, Unlink(str(tmp_path / "file"))) == [0]
        assert run(engine, Unlink(str(tmp_path / "file"))) == [errno.ENOENT]
        assert run(engine, Unlink(str(tmp_path))) == [errno.EISDIR]

    def test_an_empty_batch_is_done(self, engine: Engine) -> None:
        completion = engine.submit([])
        assert completion.done()
        assert completion.wait(0)
        assert completion.results() == []
        assert completion.take() == []

    def test_results_of_a_large_batch_keep_their_places(self, engine: Engine, tmp_path: Path) -> None:
        for number in range(0, 400, 2):
            (tmp_path / str(number)).touch()
        completion = engine.submit([Probe(str(tmp_path / str(number))) for number in range(400)])
        assert completion.wait(LIMIT_S)
        wanted = [0, errno.ENOENT] * 200
        assert completion.results() == wanted
        assert sorted(completion.take()) == list(enumerate(wanted))
        assert completion.take() == []

    def test_more_reads_than_slots(self, engine: Engine, tmp_path: Path) -> None:
        cache = Cache(num_planes=1, num_blocks=64, page_bytes=65536)
        records = [stored(engine, tmp_path / str(number), 2 * 65536, seed=number) for number in range(30)]
        ids = [[2 * number, 2 * number + 1] for number in range(30)]
        reads = [read_of(tmp_path / str(n), 2 * 65536, cache.target(ids[n])) for n in range(30)]
        assert run(engine, *reads) == [0] * 30
        assert bytes(cache.buffers[0].view[: 30 * 2 * 65536]) == b"".join(records)

    def test_the_ring_may_be_the_callers_memory(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        ring = alloc_aligned(NUM_SLOTS * SLOT_BYTES)
        engine = engines(ring_address=ring.address)
        payload = stored(engine, tmp_path / "r.rec", MIB)
        completion = engine.submit([read_of(tmp_path / "r.rec", MIB, ToSlot())])
        assert completion.wait(LIMIT_S)
        assert completion.results() == [0]
        offset = completion.slot_address(0) - ring.address
        assert bytes(ring.view[offset : offset + MIB]) == payload

    @pytest.mark.parametrize("num_bytes", [100, 2 * MIB + 7])
    def test_a_file_system_in_memory(self, engine: Engine, memory_folder: Path, num_bytes: int) -> None:
        payload = stored(engine, memory_folder / "r.rec", num_bytes)
        assert (memory_folder / "r.rec").stat().st_size == record_bytes(num_bytes)
        out = random_buffer(num_bytes, seed=1)
        assert run(engine, read_of(memory_folder / "r.rec", num_bytes, ToMemory(out.address))) == [0]
        assert bytes(out.view[:num_bytes]) == payload

    @pytest.fixture
    def memory_folder(self) -> Iterator[Path]:
        """A folder on a tmpfs; older kernels refuse O_DIRECT there."""
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("this machine has no writable /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder)

    def test_stores_and_loads_at_once(self, engine: Engine, tmp_path: Path) -> None:
        buffers = [random_buffer(300_000, seed) for seed in range(12)]
        writes = [write_of(tmp_path / f"{n}.rec", buffers[n], 300_000) for n in range(12)]
        first = engine.submit(writes[:6], priority=Priority.STORE)
        assert first.wait(LIMIT_S)
        second = engine.submit(writes[6:], priority=Priority.STORE)
        outs = [random_buffer(300_000, 50 + n) for n in range(6)]
        loads = engine.submit([read_of(tmp_path / f"{n}.rec", 300_000, ToMemory(outs[n].address)) for n in range(6)])
        assert loads.wait(LIMIT_S)
        assert second.wait(LIMIT_S)
        assert loads.results() == second.results() == [0] * 6
        for n in range(6):
            assert outs[n].view[:300_000] == buffers[n].view[:300_000]
