"""Host memory by address: aligned buffers, views, and chunks of KV blocks."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from contextlib import suppress

from rewarm.engine.base import BlockPlanes
from rewarm.errors import UsageError
from rewarm.units import round_up

PAGE_BYTES = 4096


class AlignedBuffer:
    """Zeroed private memory, aligned to 4096 bytes; freed by close(), or with the object and all slices of its view."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise UsageError(f"a buffer of {num_bytes} bytes was asked for", hint="ask for at least one byte")
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = mmap.mmap(-1, round_up(num_bytes, PAGE_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANON)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)[:num_bytes]

    def close(self) -> None:
        """Free the memory. No engine may have a transfer under way in it, nobody may use the address after."""
        if self._map is not None:
            self.view.release()
            with suppress(BufferError):  # a slice of the view is alive: it keeps the memory
                self._map.close()
            self._map = None


def alloc_aligned(num_bytes: int) -> AlignedBuffer:
    """Memory for transfers, for callers without torch.

    Raises:
        UsageError: Fewer than one byte.
    """
    return AlignedBuffer(num_bytes)


def view_at(address: int, num_bytes: int) -> memoryview:
    """A writable view of memory that somebody else keeps alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _pages(planes: BlockPlanes, block_ids: array[int], skip_blocks: int) -> list[tuple[int, int]]:
    """(offset in the payload, address of the block's page) of every page of a chunk, in payload order."""
    page_bytes = planes.page_bytes
    num_blocks = skip_blocks + len(block_ids)
    return [
        ((plane * num_blocks + skip_blocks + i) * page_bytes, base + block * page_bytes)
        for plane, base in enumerate(planes.plane_addresses)
        for i, block in enumerate(block_ids)
    ]


def scatter(payload_address: int, planes: BlockPlanes, block_ids: array[int], skip_blocks: int) -> None:
    """Copy a chunk's payload into its KV blocks; the GIL is given up for each page only."""
    for offset, page in _pages(planes, block_ids, skip_blocks):
        ctypes.memmove(page, payload_address + offset, planes.page_bytes)


def gather(planes: BlockPlanes, block_ids: array[int], payload_address: int) -> None:
    """Copy a chunk's KV blocks into a payload."""
    for offset, page in _pages(planes, block_ids, 0):
        ctypes.memmove(payload_address + offset, page, planes.page_bytes)
