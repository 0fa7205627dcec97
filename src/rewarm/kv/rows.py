"""Moving chunks between a staging buffer on the device and the pages of the server's KV blocks.

One launch a chunk where the device's memory can be seen as one tensor (CUDA and ROCm, by ``__cuda_array_interface__``)
and the planes lie on a common raster; else one launch a plane. A model of 64 layers has 64 to 128 planes, and a launch
takes some microseconds from the server's interpreter: on an H200, 4.3 GB in 64 planes were scattered in 3 ms.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from rewarm.kv.planes import PlaneSet

WORD_BYTES = 8
ONE_TENSOR = {"cuda", "cpu"}
"""Devices, as torch names them, whose memory can be seen as one tensor; ROCm's are ``cuda`` too."""
MIN_ROW_BYTES = 512
"""A raster finer than this would make the list of rows a burden of its own."""


class ChunkRows(Protocol):
    """Where a chunk's bytes belong on the device. Its calls only queue work on the current stream."""

    def locate(self, block_ids: Sequence[array[int]]) -> list[torch.Tensor]:
        """What scatter() and gather() want to know of each of C chunks.

        Args:
            block_ids: C arrays('q') of blocks, in chunk order.
        """

    def scatter(self, staging: torch.Tensor, where: torch.Tensor, skip_blocks: int) -> None:
        """Copy a chunk, [plane][block][page] of all its blocks, but for its first ``skip_blocks``, into its blocks."""

    def gather(self, where: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy a whole chunk out of its blocks."""


def chunk_rows(planes: PlaneSet, chunk_blocks: int) -> ChunkRows:
    """The way with the fewest launches that these planes allow."""
    rows = _raster(planes)
    return _AllPlanes(planes, chunk_blocks, rows) if rows is not None else _EachPlane(planes, chunk_blocks)


class _EachPlane:
    """On every device that torch knows: index_copy_ and index_select, plane by plane."""

    def __init__(self, planes: PlaneSet, chunk_blocks: int) -> None:
        self._planes = planes
        self._chunk_blocks = chunk_blocks

    def locate(self, block_ids: Sequence[array[int]]) -> list[torch.Tensor]:
        """See ChunkRows."""
        lengths = [len(ids) for ids in block_ids]
        return list(_on_device(block_ids, self._planes.device).split(lengths))

    def scatter(self, staging: torch.Tensor, where: torch.Tensor, skip_blocks: int) -> None:
        """See ChunkRows."""
        for words, part in self._parts(staging):
            words.index_copy_(0, where, part[skip_blocks:])

    def gather(self, where: torch.Tensor, staging: torch.Tensor) -> None:
        """See ChunkRows."""
        for words, part in self._parts(staging):
            torch.index_select(words, 0, where, out=part)

    def _parts(self, staging: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each plane's words, and its [chunk blocks, page words] of the staging buffer."""
        parts, begin = [], 0
        for plane in self._planes.planes:
            end = begin + plane.page_bytes * self._chunk_blocks
            parts.append((plane.words, staging[begin:end].view(plane.words.dtype).view(self._chunk_blocks, -1)))
            begin = end
        return parts


class _AllPlanes:
    """All planes as one tensor of rows, from the lowest address to the highest; what lies between is never touched."""

    def __init__(self, planes: PlaneSet, chunk_blocks: int, row_bytes: int) -> None:
        begins = [plane.words.data_ptr() for plane in planes.planes]
        page_bytes = planes.planes[0].page_bytes
        base, end = min(begins), max(map(_end, planes.planes))
        self._planes = planes
        self._chunk_blocks = chunk_blocks
        self._row_words = row_bytes // WORD_BYTES
        self._rows_a_page = page_bytes // row_bytes
        self._all = _see_memory(base, end - base, planes.device).view(-1, self._row_words)
        firsts = [(begin - base) // row_bytes for begin in begins]
        strides = [_stride(plane) // row_bytes for plane in planes.planes]
        shape = (len(firsts), 1, 1)
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=planes.device).view(shape)
        self._strides = torch.tensor(strides, dtype=torch.int64, device=planes.device).view(shape)
        self._steps = torch.arange(self._rows_a_page, dtype=torch.int64, device=planes.device).view(1, 1, -1)

    def locate(self, block_ids: Sequence[array[int]]) -> list[torch.Tensor]:
        """See ChunkRows."""
        places: list[torch.Tensor] = []
        for length, alike in groupby(block_ids, len):
            ids = _on_device(alike, self._planes.device).view(-1, 1, length, 1)
            rows = self._firsts + ids * self._strides + self._steps
            places += rows.view(len(ids), -1).unbind()
        return places

    def scatter(self, staging: torch.Tensor, where: torch.Tensor, skip_blocks: int) -> None:
        """See ChunkRows."""
        rows = staging.view(torch.int64).view(-1, self._row_words)
        if skip_blocks:
            by_plane = rows.view(len(self._firsts), self._chunk_blocks, -1)
            rows = by_plane[:, skip_blocks:].reshape(-1, self._row_words)
        self._all.index_copy_(0, where, rows)

    def gather(self, where: torch.Tensor, staging: torch.Tensor) -> None:
        """See ChunkRows."""
        torch.index_select(self._all, 0, where, out=staging.view(torch.int64).view(-1, self._row_words))


class _DeviceMemory:
    """Device memory by its address, as torch.as_tensor() understands it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes // WORD_BYTES,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
        }


def _see_memory(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that is somebody else's as one int64 tensor; holds as long as it does."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.int64)
    return torch.as_tensor(_DeviceMemory(address, num_bytes), device=device)


def _raster(planes: PlaneSet) -> int | None:
    """Bytes of the largest row of which all pages, and the distances between them, are multiples; None: no such."""
    if planes.device.type not in ONE_TENSOR or len({plane.page_bytes for plane in planes.planes}) != 1:
        return None
    base = min(plane.words.data_ptr() for plane in planes.planes)
    distances = [distance for p in planes.planes for distance in (p.words.data_ptr() - base, _stride(p), p.page_bytes)]
    row_bytes = gcd(*distances)
    return row_bytes if row_bytes >= MIN_ROW_BYTES and base % WORD_BYTES == 0 else None


def _stride(plane: Any) -> int:
    return int(plane.words.stride(0)) * int(plane.words.element_size())


def _end(plane: Any) -> int:
    """Address after a plane's last page."""
    return int(plane.words.data_ptr()) + (len(plane.words) - 1) * _stride(plane) + int(plane.page_bytes)


def _on_device(block_ids: Iterable[array[int]], device: torch.device) -> torch.Tensor:
    """All of them, one after the other."""
    flat = array("q")
    for ids in block_ids:
        flat.extend(ids)
    host = torch.frombuffer(flat, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
