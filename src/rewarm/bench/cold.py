"""Page cache dropped, and proof of it.

As root: ``/proc/sys/vm/drop_caches``, which takes inodes and directory entries along. Else ``POSIX_FADV_DONTNEED`` on
each file, which leaves those. Either way the residency of files is asked of the kernel afterwards (cachestat since
Linux 6.5, else mincore) and must be 0 pages; as root of a few files only, since the question itself makes a file's
inode warm again. The second proof is the reader's own: storage bytes of /proc/self/io must reach the payload.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewarm.errors import StorageError

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SYS_CACHESTAT = 451
_ASKED_FILES = 16
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class ColdCache:
    """Drops the page cache before each turn and counts what it saw."""

    as_root: bool
    drops: int = 0
    files_asked: int = 0
    asked_with: str = ""

    @classmethod
    def detect(cls) -> ColdCache:
        """Root's way where drop_caches can be written, else the way of everybody."""
        return cls(as_root=os.access(_DROP_CACHES, os.W_OK))

    @property
    def method(self) -> str:
        """What is done, in words, for the environment of a report."""
        if self.as_root:
            return "drop_caches 3 before each turn (pages, inodes, directory entries)"
        return "POSIX_FADV_DONTNEED on each file before each turn (inodes and directory entries stay warm)"

    def drop(self, files: Sequence[Path]) -> None:
        """Make these files cold; nothing is done for none.

        Raises:
            StorageError: Pages are still resident afterwards.
        """
        if not files:
            return
        if self.as_root:
            _DROP_CACHES.write_text("3", encoding="ascii")
            asked = files[:: max(1, len(files) // _ASKED_FILES)]
        else:
            for path in files:
                _advise_dontneed(path)
            asked = files
        for path in asked:
            pages, self.asked_with = resident_pages(path)
            if pages:
                raise StorageError(
                    f"{pages} pages of {path} stayed in the page cache",
                    path=str(path),
                    hint="a figure of warm files would mean nothing; run as root, or on a local file system",
                )
        self.files_asked += len(asked)
        self.drops += 1


def resident_pages(path: Path) -> tuple[int, str]:
    """Pages of a file in the page cache, and which system call told."""
    fd = os.open(path, os.O_RDONLY)
    try:
        pages = _cachestat(fd)
        return (pages, "cachestat") if pages is not None else (_mincore(fd), "mincore")
    finally:
        os.close(fd)


def _advise_dontneed(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)  # dirty pages are not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _cachestat(fd: int) -> int | None:
    """Cached pages by cachestat(2); None where the kernel has none."""
    file_range = (ctypes.c_uint64 * 2)(0, 0)  # off, len; 0: to the end
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, writeback, evicted, recently evicted
    if _libc.syscall(_SYS_CACHESTAT, fd, file_range, found, 0) == 0:
        return int(found[0])
    if ctypes.get_errno() in {errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP}:
        return None
    raise OSError(ctypes.get_errno(), "cachestat")


def _mincore(fd: int) -> int:
    """Cached pages by mincore(2) on a mapping that is never touched."""
    length = os.fstat(fd).st_size
    if length == 0:
        return 0
    with mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        marks = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        window = ctypes.c_char.from_buffer(mapping)
        try:
            if _libc.mincore(ctypes.byref(window), ctypes.c_size_t(length), marks):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del window
        return sum(mark & 1 for mark in marks)
