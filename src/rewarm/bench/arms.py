"""What a round is made of: a shape of load, the sides that carry it, and one side's measured turn."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rewarm.units import KIB, MIB

if TYPE_CHECKING:
    from rewarm.bench.memory import Memory


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """R requests at once, each of so many bytes in chunks of one size."""

    chunk_bytes: int
    num_requests: int
    request_bytes: int

    @property
    def num_chunks(self) -> int:
        """Chunks of all requests together."""
        return self.num_requests * (self.request_bytes // self.chunk_bytes)

    @property
    def num_bytes(self) -> int:
        """Payload of all requests together."""
        return self.num_chunks * self.chunk_bytes

    @property
    def label(self) -> str:
        """``1MiB.x4``: chunk size and requests at once, as figures are named."""
        return f"{size_label(self.chunk_bytes)}.x{self.num_requests}"


def size_label(num_bytes: int) -> str:
    """``128KiB`` or ``4MiB``."""
    return f"{num_bytes // MIB}MiB" if num_bytes >= MIB else f"{num_bytes // KIB}KiB"


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's measured turn."""

    seconds: float
    num_bytes: int
    cpu_s: float
    """User and system time of every thread of the process that moved the bytes."""
    device_bytes: int | None = None
    """Bytes that the kernel fetched from (or sent to) storage for that process meanwhile; None: not told."""

    @property
    def gib_s(self) -> float:
        """Payload over time."""
        return self.num_bytes / 1024**3 / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for 10^9 bytes of payload."""
        return self.cpu_s / (self.num_bytes / 1e9)


class Side(Protocol):
    """One side of the comparison. The bench calls its methods from one thread, one side at a time."""

    name: str
    """Shown in tables: ``rewarm io_uring``, ``vLLM fs tier``, ``fio``."""
    memory: Memory | None
    """Where loads go, to be cleared before and compared after; None: its bytes are not looked at."""

    def fill(self, shape: Shape) -> None:
        """Make the files that ``load(shape)`` reads; once, not timed."""

    def files(self, shape: Shape) -> Sequence[Path]:
        """Those files, for the proof that they are cold."""

    def load(self, shape: Shape) -> Turn:
        """Read all chunks of a shape once, all requests submitted together."""

    def store(self, shape: Shape) -> Turn:
        """Write chunks that were not there before; they are removed again, which is not timed."""

    def close(self) -> None:
        """Give back threads and memory; files are the bench's to remove."""


class Stopwatch:
    """Time, CPU time of this process and storage bytes of this process between start and stop."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    read_bytes: int | None = None
    written_bytes: int | None = None

    @contextmanager
    def running(self) -> Iterator[Stopwatch]:
        """Measure the body."""
        storage, cpu_s, start = _storage_bytes(), _cpu_seconds(), time.perf_counter()
        yield self
        self.seconds = time.perf_counter() - start
        self.cpu_s = _cpu_seconds() - cpu_s
        after = _storage_bytes()
        if storage and after:
            self.read_bytes, self.written_bytes = after[0] - storage[0], after[1] - storage[1]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _storage_bytes() -> tuple[int, int] | None:
    """(read_bytes, write_bytes) of /proc/self/io: what reached the block layer, page cache hits left out."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def remove_files(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Unlink what is there."""
    for path in paths:
        Path(path).unlink(missing_ok=True)
