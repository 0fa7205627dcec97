"""Drop the page cache of files, and look whether it is gone.

No root needed: written pages are brought to the disk, POSIX_FADV_DONTNEED drops them, and cachestat (Linux 6.5) or
mincore counts what is left. Where pages stay and the process is root, all of the machine's page cache is dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

KV_SUFFIXES = (".rec", ".bin")
"""Of Rewarm's records and of the files of vLLM's tier; locks and logs beside them hold none."""

_CACHESTAT = 451
"""Number of the system call, the same on every architecture that has it."""
_DROP = Path("/proc/sys/vm/drop_caches")


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def drop_page_cache(folder: Path) -> dict[str, Any]:
    """Drop the pages of every file with KV under a folder.

    Returns:
        How it was done and what is left: method, files, bytes, resident_pages.
    """
    method = "POSIX_FADV_DONTNEED"
    files, num_bytes = 0, 0
    for path in _files(folder):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            files, num_bytes = files + 1, num_bytes + os.fstat(file.fileno()).st_size
    resident, counted_by = resident_pages(folder)
    if resident and os.access(_DROP, os.W_OK):
        os.sync()
        _DROP.write_text("3", encoding="ascii")
        method = "drop_caches"
        resident, counted_by = resident_pages(folder)
    return {"method": f"{method}, {counted_by}", "files": files, "bytes": num_bytes, "resident_pages": resident}


def resident_pages(folder: Path) -> tuple[int, str]:
    """Pages of the files with KV under a folder that are in memory, and which call counted them."""
    total, counted_by = 0, "cachestat"
    for path in _files(folder):
        with path.open("rb") as file:
            pages = _cachestat(file.fileno())
            if pages is None:
                pages, counted_by = _mincore(file.fileno()), "mincore"
            total += pages
    return total, counted_by


def _files(folder: Path) -> Iterator[Path]:
    """Files with KV in them; one that goes away meanwhile is left out."""
    for suffix in KV_SUFFIXES:
        for path in folder.rglob(f"*{suffix}"):
            with suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_size:
                    yield path


def _cachestat(file: int) -> int | None:
    """None where the kernel has no such call."""
    stat = _Stat()
    whole = _Range(0, 0)
    if _libc.syscall(_CACHESTAT, file, ctypes.byref(whole), ctypes.byref(stat), 0) != 0:
        return None
    return int(stat.cache)


def _mincore(file: int) -> int:
    num_bytes = os.fstat(file).st_size
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        pages = ctypes.create_string_buffer(-(-num_bytes // mmap.PAGESIZE))
        if _libc.mincore(address, num_bytes, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(byte & 1 for byte in pages.raw)
    finally:
        _libc.munmap(address, num_bytes)
