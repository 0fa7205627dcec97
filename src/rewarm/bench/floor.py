"""The floor: what a plain reader or writer with O_DIRECT gets from the same device.

fio where it is installed, and our own threads over preadv. Each tries a few block sizes and depths and keeps the
fastest, then the two take turns and the faster one stays: the floor is the device's, not a tool's or a setting's. One
file, read from its start: no opens, no metadata, no checksums.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rewarm.bench.arms import Shape, Side, Stopwatch, Turn, size_label
from rewarm.bench.memory import map_huge
from rewarm.errors import StorageError, UnsupportedError
from rewarm.units import KIB, MIB

_CANDIDATES = ((128 * KIB, 32), (1 * MIB, 4), (1 * MIB, 8), (1 * MIB, 16), (1 * MIB, 32), (4 * MIB, 4))
_SETTING_TURNS = 3
_TOOL_TURNS = 7
_FIO_LIMIT_S = 120

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Setting:
    """Block size and requests in flight of the floor tool."""

    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"blocks of {size_label(self.block_bytes)}, {self.depth} in flight"


class FloorSide(Side):
    """A Side that calibrates itself; ``setting_read`` and ``setting_write`` say what it ended with."""

    def __init__(self, directory: Path, name: str, file_bytes: int) -> None:
        self.name = name
        self._path = directory / "floor.dat"
        self._written_path = directory / "floor-written.dat"
        self._file_bytes = file_bytes
        self.memory = None
        self.setting_read = self.setting_write = Setting(*_CANDIDATES[0])

    def prepare(self, calibration_bytes: int) -> None:
        """Write the file if it is missing, then choose the fastest settings, by trials of so many bytes."""
        if not self._path.exists():
            self._transfer("write", self._path, self._file_bytes, Setting(1 * MIB, 8))
        size = min(calibration_bytes, self._file_bytes)
        settings = [Setting(*candidate) for candidate in _CANDIDATES]
        self.setting_read = _fastest(
            settings, lambda setting: self._transfer("read", self._path, size, setting), turns=_SETTING_TURNS
        )
        self.setting_write = _fastest(settings, lambda setting: self._write_new(size, setting), turns=_SETTING_TURNS)

    def fill(self, shape: Shape) -> None:
        """Nothing: prepare() wrote the one file."""

    def files(self, shape: Shape) -> Sequence[Path]:
        """None: it is read past the page cache, and has no metadata that matters."""
        return []

    def load(self, shape: Shape) -> Turn:
        """Read as many bytes as the shape has."""
        return self._transfer("read", self._path, shape.num_bytes, self.setting_read)

    def store(self, shape: Shape) -> Turn:
        """Write as many bytes as the shape has into a new file."""
        return self._write_new(shape.num_bytes, self.setting_write)

    def close(self) -> None:
        """Give back what is held."""

    def _write_new(self, num_bytes: int, setting: Setting) -> Turn:
        try:
            return self._transfer("write", self._written_path, num_bytes, setting)
        finally:
            self._written_path.unlink(missing_ok=True)

    def _transfer(self, what: str, path: Path, num_bytes: int, setting: Setting) -> Turn:
        raise NotImplementedError


def open_floor(directory: Path, *, file_bytes: int, calibration_bytes: int, tool: str = "auto") -> FloorSide:
    """The floor on a directory, with its file written and its settings chosen.

    Args:
        directory: Where its files go.
        file_bytes: Size of the file it reads, at least that of the largest shape.
        calibration_bytes: How much each trial of a setting reads and writes.
        tool: ``fio``, ``own``, or ``auto``: whichever of the two is faster here.
    Raises:
        UnsupportedError: fio was asked for by name and is not installed.
    """
    fio = shutil.which("fio")
    if tool == "fio" and fio is None:
        raise UnsupportedError("fio is not installed", hint="install it, or use --floor own")
    floors: list[FloorSide] = []
    if tool != "own" and fio is not None:
        floors.append(FioFloor(directory, "fio", file_bytes, fio=fio))
    if tool != "fio":
        floors.append(OwnFloor(directory, "O_DIRECT reader", file_bytes))
    for floor in floors:
        floor.prepare(calibration_bytes)
    shape = Shape(calibration_bytes, 1, calibration_bytes)
    chosen = _fastest(floors, lambda floor: floor.load(shape), turns=_TOOL_TURNS) if floors[1:] else floors[0]
    for floor in floors:
        if floor is not chosen:
            floor.close()
    return chosen


class FioFloor(FloorSide):
    """fio, one job, libaio, its buffers in huge pages where glibc (2.35) and the kernel give them."""

    def __init__(self, directory: Path, name: str, file_bytes: int, *, fio: str) -> None:
        super().__init__(directory, name, file_bytes)
        self._fio = fio

    def _transfer(self, what: str, path: Path, num_bytes: int, setting: Setting) -> Turn:
        block_bytes = min(setting.block_bytes, num_bytes)
        command = [self._fio, "--name=floor", f"--filename={path}", f"--rw={what}", f"--size={num_bytes}"]
        command += [f"--bs={block_bytes}", f"--iodepth={setting.depth}", "--ioengine=libaio", "--direct=1"]
        command += ["--thread", "--output-format=json"]
        huge_pages = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_FIO_LIMIT_S, env=huge_pages
        )
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise StorageError(f"fio failed: {' '.join(last)}", path=str(path))
        job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
        side = job[what]
        seconds = max(side["runtime"], 1) / 1000
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return Turn(seconds, side["io_bytes"], cpu_s)


class OwnFloor(FloorSide):
    """Threads over preadv and pwritev that take blocks in file order, each to or from its own place in memory.

    That memory is as large as the file, as a load's is. A reader that uses the same 8 MiB again and again (fio does)
    was 1.35 times as fast on a virtual machine: what the host copies stays in a cache. No load can have that.
    """

    def __init__(self, directory: Path, name: str, file_bytes: int) -> None:
        super().__init__(directory, name, file_bytes)
        self._mapping = map_huge(file_bytes)
        self._bytes = memoryview(self._mapping)
        self._bytes[:] = bytes(file_bytes)  # page faults are not the device's

    def close(self) -> None:
        """Unmap the memory."""
        self._bytes.release()
        self._mapping.close()

    def _transfer(self, what: str, path: Path, num_bytes: int, setting: Setting) -> Turn:
        flags = os.O_RDONLY if what == "read" else os.O_WRONLY | os.O_CREAT
        fd = _open_direct(path, flags)
        try:
            if what == "write":
                os.posix_fallocate(fd, 0, num_bytes)
            move = os.preadv if what == "read" else os.pwritev
            offsets = iter(range(0, num_bytes, setting.block_bytes))

            def take_blocks(_thread: int) -> None:
                for offset in offsets:  # one iterator for all threads: next() holds the GIL, the system call does not
                    length = min(setting.block_bytes, num_bytes - offset)
                    with self._bytes[offset : offset + length] as block:
                        if move(fd, [block], offset) != length:
                            raise StorageError(f"short {what} at {offset} of {path}", path=str(path))

            with ThreadPoolExecutor(setting.depth) as pool, Stopwatch().running() as watch:
                for _ in pool.map(take_blocks, range(setting.depth)):
                    pass
        finally:
            os.close(fd)
        moved = watch.read_bytes if what == "read" else watch.written_bytes
        return Turn(watch.seconds, num_bytes, watch.cpu_s, moved)


def _fastest(candidates: Sequence[C], transfer: Callable[[C], Turn], *, turns: int) -> C:
    """The candidate with the greatest median rate over turns that alternate."""
    rates: list[list[float]] = [[] for _ in candidates]
    for _ in range(turns):
        for candidate, found in zip(candidates, rates, strict=True):
            found.append(transfer(candidate).gib_s)
    return max(zip(candidates, rates, strict=True), key=lambda pair: median(pair[1]))[0]


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as problem:
        raise StorageError(
            f"{path} cannot be opened with O_DIRECT: {problem.strerror}",
            path=str(path),
            errno=problem.errno or 0,
            hint="tmpfs has none; choose a directory on the device that is to be measured",
        ) from problem
