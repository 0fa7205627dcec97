"""The floor, the peer, cold files and the guard, each on a few small files; no time is asserted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rewarm.bench.arms import Shape, Turn
from rewarm.bench.cold import ColdCache, resident_pages
from rewarm.bench.floor import FioFloor, FloorSide, OwnFloor, Setting, open_floor
from rewarm.bench.memory import Memory
from rewarm.errors import DamageError, StorageError, UnsupportedError
from rewarm.units import KIB, MIB

SHAPE = Shape(128 * KIB, 2, 1 * MIB)


@pytest.fixture
def memory() -> Memory:
    return Memory(2 * MIB)


def _probe_direct(directory: Path) -> None:
    try:
        os.close(os.open(directory / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"no O_DIRECT below {directory}")


def test_memory_tells_right_bytes_from_wrong_and_missing_ones(memory: Memory) -> None:
    with pytest.raises(DamageError, match="reader delivered other bytes"):
        memory.check(MIB, "reader")
    with memory.rows(MIB) as rows:
        flat = rows.cast("B")
        flat[:MIB] = flat[2 * MIB : 3 * MIB]
        memory.check(MIB, "reader")
        flat[MIB - 1] ^= 1
        with pytest.raises(DamageError):
            memory.check(MIB, "reader")
        flat[:MIB] = flat[3 * MIB : 4 * MIB]  # the second chunk where the first belongs
        with pytest.raises(DamageError):
            memory.check(MIB, "reader")
        flat.release()
    memory.close()


@pytest.mark.parametrize("tool", ["own", "fio"])
def test_a_floor_reads_and_writes_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    _probe_direct(tmp_path)
    if tool == "fio" and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    monkeypatch.setattr("rewarm.bench.floor._SETTING_TURNS", 1)
    floor = open_floor(tmp_path, file_bytes=4 * MIB, calibration_bytes=1 * MIB, tool=tool)
    for turn in (floor.load(SHAPE), floor.store(SHAPE)):
        assert turn.num_bytes == SHAPE.num_bytes
        assert turn.seconds > 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("floor")] == ["floor.dat"]


def test_the_own_floor_reports_a_short_file(tmp_path: Path) -> None:
    _probe_direct(tmp_path)
    floor = OwnFloor(tmp_path, "own", 2 * MIB)
    floor.setting_read = Setting(64 * KIB, 2)
    (tmp_path / "floor.dat").write_bytes(bytes(64 * KIB))
    with pytest.raises(StorageError, match="short read"):
        floor.load(SHAPE)


def test_fio_asked_for_by_name_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="fio is not installed"):
        open_floor(tmp_path, file_bytes=MIB, calibration_bytes=MIB, tool="fio")
    _probe_direct(tmp_path)
    assert open_floor(tmp_path, file_bytes=MIB, calibration_bytes=MIB).name == "O_DIRECT reader"


@pytest.mark.parametrize("faster", ["fio", "O_DIRECT reader"])
def test_the_faster_tool_is_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    def transfer(self: FloorSide, what: str, path: Path, num_bytes: int, setting: Setting) -> Turn:
        path.touch()
        return Turn(1.0 if self.name == faster else 2.0, num_bytes, cpu_s=0.1)

    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/fio")
    monkeypatch.setattr(FioFloor, "_transfer", transfer)
    monkeypatch.setattr(OwnFloor, "_transfer", transfer)
    assert open_floor(tmp_path, file_bytes=MIB, calibration_bytes=MIB).name == faster


def test_cold_by_advice_leaves_no_page(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * KIB))
    if resident_pages(path)[0] == 0:
        pytest.skip("this file system caches no pages")
    cold = ColdCache(as_root=False)
    try:
        cold.drop([path])
    except StorageError:
        pytest.skip(f"pages below {tmp_path} cannot be dropped, as on tmpfs")
    assert resident_pages(path)[0] == 0
    assert (cold.drops, cold.files_asked) == (1, 1)


def test_pages_that_stay_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * KIB))
    monkeypatch.setattr("rewarm.bench.cold._advise_dontneed", lambda path: None)
    if resident_pages(path)[0] == 0:
        pytest.skip("this file system caches no pages")
    with pytest.raises(StorageError, match="stayed in the page cache"):
        ColdCache(as_root=False).drop([path])


def test_cachestat_and_mincore_agree(tmp_path: Path) -> None:
    from rewarm.bench import cold

    path = tmp_path / "file"
    path.write_bytes(bytes(64 * KIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        by_cachestat = cold._cachestat(fd)
        if by_cachestat is None:
            pytest.skip("this kernel has no cachestat")
        assert by_cachestat == cold._mincore(fd)
    finally:
        os.close(fd)


@pytest.mark.vllm
def test_the_peer_loads_what_it_stored(tmp_path: Path, memory: Memory) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from rewarm.bench.fs_tier import FsTierSide

    side = FsTierSide(tmp_path, memory)
    try:
        side.fill(SHAPE)
        assert len({path for path in side.files(SHAPE) if path.stat().st_size == SHAPE.chunk_bytes}) == 16
        memory.clear(SHAPE.num_bytes)
        side.load(SHAPE)
        memory.check(SHAPE.num_bytes, side.name)
        assert side.store(SHAPE).num_bytes == SHAPE.num_bytes
        side.files(SHAPE)[3].unlink()
        with pytest.raises(StorageError, match="a job of vLLM fs tier failed"):
            side.load(SHAPE)
    finally:
        side.close()


_GUARDED = """
import os, sys
from rewarm.bench.no_file_calls import forbid_file_calls
forbid_file_calls()
sum(range(1000))
if sys.argv[1] == "stat":
    os.path.exists("/")
os.write(1, b"alive")
os._exit(0)
"""


@pytest.mark.parametrize(("mode", "code", "said"), [("none", 0, "alive"), ("stat", -signal.SIGSYS, "")])
def test_the_guard_kills_whoever_asks_for_a_file(mode: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", _GUARDED, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "UnsupportedError" in done.stderr:
        pytest.skip("seccomp filters are refused here")
    assert (done.returncode, done.stdout) == (code, said)
