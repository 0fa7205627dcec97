"""Where the bytes of a bench come from and go to: one region, written once, compared after each turn."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rewarm.bench.arms import Shape
from rewarm.errors import DamageError
from rewarm.units import KIB, MIB

_libc = ctypes.CDLL(None)
_STAMP_EVERY_BYTES = 64 * KIB
HUGE_PAGE_BYTES = 2 * MIB


def _map_shared(num_bytes: int) -> mmap.mmap:
    """Shared memory, as vLLM's primary tier is; from memfd, so that a small /dev/shm does not matter."""
    fd = os.memfd_create("rewarm-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)


def map_huge(num_bytes: int) -> mmap.mmap:
    """Private memory, aligned to a page, in huge pages where the kernel gives them."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class Memory:
    """Two halves of one aligned mapping: targets that reads fill, and the sources they are compared with.

    Chunk i of a shape lies at ``i * chunk_bytes`` of either half. Every 64 KiB of the sources carry their own number,
    so that a chunk in another chunk's place never compares equal.

    Pages matter: a device takes one segment for a huge page and 512 for small ones. On a virtio disk of 254 segments a
    request, reads of 1 MiB into huge pages were twice as fast. ``shared`` memory has small pages on most machines.
    """

    def __init__(self, half_bytes: int, *, shared: bool = False, seed: int = 1) -> None:
        self.half_bytes = half_bytes
        self._mapping = _map_shared(2 * half_bytes) if shared else map_huge(2 * half_bytes + HUGE_PAGE_BYTES)
        window = ctypes.c_char.from_buffer(self._mapping)
        start = ctypes.addressof(window)
        del window
        self._skip = -start % HUGE_PAGE_BYTES if not shared else 0
        self.target_address = start + self._skip
        self.source_address = self.target_address + half_bytes
        self.clear(half_bytes)
        self._write_sources(random.Random(seed).randbytes(min(16 * MIB, half_bytes)))

    def _write_sources(self, noise: bytes) -> None:
        first = self._skip + self.half_bytes
        with memoryview(self._mapping) as view:
            for start in range(0, self.half_bytes, len(noise)):
                length = min(len(noise), self.half_bytes - start)
                view[first + start : first + start + length] = noise[:length]
            for start in range(0, self.half_bytes, _STAMP_EVERY_BYTES):
                view[first + start : first + start + 8] = start.to_bytes(8, "little")

    def clear(self, num_bytes: int) -> None:
        """Zero the first bytes of the targets: what a read does not fill differs from its source."""
        ctypes.memset(self.target_address, 0, num_bytes)

    def check(self, num_bytes: int, whose: str) -> None:
        """Compare the first bytes of the targets with their sources.

        Raises:
            DamageError: A byte differs.
        """
        size = ctypes.c_size_t(num_bytes)
        if _libc.memcmp(ctypes.c_void_p(self.target_address), ctypes.c_void_p(self.source_address), size):
            raise DamageError(f"{whose} delivered other bytes than were stored")

    def rows(self, row_bytes: int) -> memoryview:
        """Both halves as a writable 2-D view of signed bytes, targets first: what vLLM calls its primary view."""
        count = 2 * self.half_bytes // row_bytes
        whole = memoryview(self._mapping)[self._skip : self._skip + count * row_bytes]
        return whole.cast("b", (count, row_bytes))

    def close(self) -> None:
        """Unmap. Views that were handed out must be released before."""
        self._mapping.close()


def requests_of(shape: Shape) -> Iterator[Sequence[int]]:
    """Chunk numbers of each request of a shape, in prefix order."""
    per_request = shape.request_bytes // shape.chunk_bytes
    for request in range(shape.num_requests):
        yield range(request * per_request, (request + 1) * per_request)
