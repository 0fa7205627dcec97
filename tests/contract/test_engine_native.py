"""What only the native engines have: twins in Python, spare workers, a library that may be missing."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from rewarm import engine as engine_package
from rewarm.engine import _native, checksum, native, open_engine, probe_engines
from rewarm.engine.base import EngineConfig, Priority, Probe, ToMemory, ToSlot
from rewarm.engine.native import NativeEngine
from rewarm.engine.record import MAX_PIECES, PIECE_BYTES, RecordHeader, num_pieces, pack_header
from rewarm.errors import UnsupportedError, UsageError
from rewarm.testing.engine_contract.helpers import (
    KEY,
    LIMIT_S,
    NAMESPACE,
    finished,
    random_buffer,
    read_of,
    run,
    stored,
    until,
)
from rewarm.units import MIB

Opener = Callable[..., NativeEngine]
needs_library = pytest.mark.skipif(_native.library.calls is None, reason=_native.library.reason)


@pytest.fixture(params=["threads", "io_uring"])
def opener(request: pytest.FixtureRequest) -> Iterator[Opener]:
    if reason := native.missing(request.param):
        pytest.skip(f"{request.param}: {reason}")
    made: list[NativeEngine] = []

    def open_one(**fields: Any) -> NativeEngine:
        made.append(NativeEngine(EngineConfig(kind=request.param, **fields)))
        return made[-1]

    yield open_one
    for engine in made:
        engine.hold(None)
        engine.close()


@needs_library
def test_the_checksums_agree_with_another_implementation() -> None:
    whole = random.Random(1).randbytes(200_000)
    calls = _native.library.calls
    for length in (0, 1, 7, 8, 255, 768, 4096, 24 * 1024 - 1, 24 * 1024, 50_000, 200_000):
        part = whole[:length]
        wanted = google_crc32c.value(part)
        assert checksum.crc32c(part) == wanted
        assert checksum.crc32c(memoryview(bytearray(part))) == wanted
        assert checksum.crc32c(memoryview(part)) == wanted
        assert calls.rw_crc32c_table(0, part, length) == wanted


@needs_library
@pytest.mark.parametrize("payload_bytes", [1, 4096, MIB, 768 * MIB - 4096])
def test_header_pages_are_the_twins(payload_bytes: int) -> None:
    count = num_pieces(payload_bytes)
    crcs = tuple(random.Random(payload_bytes).getrandbits(32) for _ in range(count))
    twin = pack_header(RecordHeader(KEY, NAMESPACE, payload_bytes, 77, crcs))
    header = _native.Header(payload_bytes=payload_bytes, created_ns=77, piece_bytes=PIECE_BYTES, num_pieces=count)
    header.key[:], header.namespace_id[:] = KEY, NAMESPACE
    header.crcs[:count] = crcs
    page = ctypes.create_string_buffer(4096)
    _native.library.calls.rw_record_pack(header, page)
    assert page.raw == twin
    found = _native.Header()
    assert _native.library.calls.rw_record_parse(twin, found) == 0
    assert bytes(found)[: -4 * (MAX_PIECES - count) or None] == bytes(header)[: -4 * (MAX_PIECES - count) or None]


def test_a_stuck_worker_is_replaced(opener: Opener, tmp_path: Path) -> None:
    """Takes the two seconds after which a worker counts as stuck."""
    engine = opener(num_workers=1, ring_bytes=MIB, slot_bytes=MIB)
    stored(engine, tmp_path / "slow.rec", 4096)
    engine.hold("slow")
    stuck = engine.submit([read_of(tmp_path / "slow.rec", 4096, ToSlot())])
    assert run(engine, Probe(str(tmp_path))) == [0]
    usage = engine.usage()
    assert (usage["num_workers"], usage["stuck_workers"], usage["free_slots"]) == (2, 1, 0)
    stuck.cancel()
    assert engine.usage()["lost_slots"] == 1
    engine.hold(None)
    assert run(engine, read_of(tmp_path / "slow.rec", 4096, ToSlot())) == [0]
    assert engine.usage()["lost_slots"] == 0


def test_stores_leave_workers_to_loads(opener: Opener, tmp_path: Path) -> None:
    engine = opener(num_workers=2)
    engine.hold("slow")
    stores = engine.submit([Probe(str(tmp_path / f"slow-{n}")) for n in range(5)], priority=Priority.STORE)
    assert run(engine, Probe(str(tmp_path))) == [0]
    engine.hold(None)
    assert finished(stores) == [errno.ENOENT] * 5


def test_other_workers_take_pieces_of_a_record(opener: Opener, tmp_path: Path) -> None:
    engine = opener(num_workers=4)
    payload = stored(engine, tmp_path / "r.rec", 64 * MIB)
    out = random_buffer(64 * MIB, seed=1)
    assert run(engine, read_of(tmp_path / "r.rec", 64 * MIB, ToMemory(out.address))) == [0]
    assert bytes(out.view[: 64 * MIB]) == payload
    switches = [int(status["voluntary_ctxt_switches"]) for status in threads_of("rewarm-io")]
    assert sum(count > 3 for count in switches) >= 2, "one worker did it all"


def threads_of(name: str) -> list[dict[str, str]]:
    """What /proc says of each thread of this name."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = (task / "status").read_text().splitlines()
            found.append(dict(line.split(":\t", 1) for line in lines if ":\t" in line))
    return [status for status in found if status["Name"] == name]


def test_a_closed_engine_leaves_no_thread(opener: Opener, tmp_path: Path) -> None:
    engine = opener()
    run(engine, Probe(str(tmp_path)))
    engine.close()
    until(lambda: not threads_of("rewarm-io") + threads_of("rewarm-watch"), "the engine's threads to be gone")


def test_missing_by_name_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native.library, "calls", None)
    monkeypatch.setattr(_native.library, "reason", "was not built")
    engine_package._best_kind.cache_clear()
    try:
        assert probe_engines() == {"io_uring": "was not built", "threads": "was not built", "pure": ""}
        for kind in ("threads", "io_uring"):
            with pytest.raises(UnsupportedError, match="was not built"):
                open_engine(EngineConfig(kind=kind))
        engine = open_engine(EngineConfig())
        assert engine.name == "pure"
        engine.close()
        assert checksum.crc32c(b"123456789") == 0xE3069283
    finally:
        engine_package._best_kind.cache_clear()


def test_the_best_kind_is_the_first_that_is_there() -> None:
    reasons = probe_engines()
    engine = open_engine(EngineConfig())
    assert engine.name == next(kind for kind in engine_package.ENGINE_KINDS if not reasons[kind])
    engine.close()
    with pytest.raises(UsageError):
        open_engine(EngineConfig(kind="aio"))


def test_a_wait_can_be_interrupted(opener: Opener, tmp_path: Path) -> None:
    """Ctrl-C is heard in a wait for I/O that hangs."""
    engine = opener()
    engine.hold("slow")
    completion = engine.submit([Probe(str(tmp_path / "slow"))])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            completion.wait(LIMIT_S)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "LIBRARY_PATH", tmp_path / "librewarm_io.so")
    assert "was not built" in _native.Library().reason
    (tmp_path / "librewarm_io.so").write_bytes(os.urandom(100))
    assert "cannot be loaded" in _native.Library().reason
    if _native.library.calls is not None:
        monkeypatch.undo()
        monkeypatch.setattr(_native, "ABI", 999)
        assert "interface" in _native.Library().reason


def test_configurations_that_only_the_library_refuses(opener: Opener) -> None:
    with pytest.raises(UsageError):
        opener(num_workers=100_000)
