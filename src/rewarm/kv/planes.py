"""Finding the bytes of each KV block in whatever tensors a server keeps its KV cache in.

B blocks; a plane is an array of B pages of equal size at a constant distance, most often the K or the V of one layer.
Nothing is assumed of the order of a tensor's dimensions but that one of its first two counts the blocks: the physical
order follows from the strides. A block of a plane is a run of bytes, so one code moves every layout and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise, product
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from rewarm.errors import AdapterError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Plane:
    """The pages of one run of bytes a block."""

    words: torch.Tensor
    """[B, page words] of an integer type; a view of the server's memory, rows at a constant distance."""
    page_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether the pages follow each other without a gap."""
        return bool(self.words.is_contiguous())


@dataclass(frozen=True, slots=True)
class PlaneSet:
    """All planes of one rank's KV cache, in the order in which a record holds them."""

    planes: tuple[Plane, ...]
    num_blocks: int
    layout: Mapping[str, Any]
    """What an identity says of them: physical order, sizes, dtypes and names; nothing that depends on num_blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all planes."""
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        """Bytes a page where all planes are dense and have pages of one size; else 0."""
        sizes = {plane.page_bytes for plane in self.planes}
        return sizes.pop() if len(sizes) == 1 and all(plane.is_dense for plane in self.planes) else 0

    @property
    def device(self) -> torch.device:
        """Where the planes lie."""
        return self.planes[0].words.device


@dataclass(frozen=True, slots=True, order=True)
class _Run:
    """Bytes at ``base + b * stride`` of a storage, for each block b."""

    storage: int
    stride: int
    base: int
    length: int


def find_planes(kv_caches: Mapping[str, Any], num_blocks: int) -> PlaneSet:
    """The planes of a KV cache.

    Args:
        kv_caches: Layer name to its tensor, or to a tuple or list of tensors (K and V apart, as on Ascend).
        num_blocks: KV blocks that the server manages; a tensor may split each into equal smaller ones.
    Raises:
        AdapterError: A tensor whose blocks cannot be found, or are not runs of bytes; it is named.
    """
    runs: dict[_Run, torch.Tensor] = {}
    shapes: dict[str, int] = {}
    names = sorted(kv_caches, key=_natural)
    for name in names:
        for tensor in _tensors(kv_caches[name]):
            if tensor.numel() == 0:
                continue
            order, block_dim = _physical_order(name, tensor, num_blocks)
            shape = _describe(tensor, order, block_dim, num_blocks)
            shapes[shape] = shapes.get(shape, 0) + 1
            for run in _runs(name, tensor, order, block_dim, num_blocks):
                runs.setdefault(run, tensor)
    if not runs:
        raise AdapterError("the server keeps no KV cache that can be stored", hint="run it without the KV tier")
    _check_apart(runs)
    merged = list(_merge(runs))
    planes = tuple(_plane(run, runs[first], num_blocks) for run, first in merged)
    layout = {
        "layers": len(names),
        "names": sha256("\n".join(names).encode()).hexdigest()[:32],
        "tensors": [f"{count} x {shape}" for shape, count in shapes.items()],
        "page_bytes": _run_lengths([plane.page_bytes for plane in planes]),
    }
    return PlaneSet(planes, num_blocks, layout)


def _natural(name: str) -> list[tuple[int, str]]:
    """layers.2 before layers.10, whatever order the server hands them over in."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    else:
        yield value


def _physical_order(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[list[int], int]:
    """Dimensions by falling stride, and the one that counts the blocks."""
    found = [dim for dim in range(min(2, tensor.dim())) if tensor.shape[dim] and tensor.shape[dim] % num_blocks == 0]
    if not found:
        raise AdapterError(
            f"the KV cache of {name} has shape {tuple(tensor.shape)}, in which no dimension counts {num_blocks} blocks",
            hint="run this server without the KV tier, and please report the model and its attention backend",
        )
    block_dim = min(found, key=lambda dim: (int(tensor.shape[dim]), dim))
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    return [dim for dim in order if tensor.shape[dim] > 1 or dim == block_dim], block_dim


def _describe(tensor: torch.Tensor, order: Sequence[int], block_dim: int, num_blocks: int) -> str:
    """Such as ``float32 1:B 0:2 3:128 2:4``: logical dimension and size in physical order, B for the blocks."""
    split = tensor.shape[block_dim] // num_blocks
    sizes = [f"{d}:{('B' if split == 1 else f'B*{split}') if d == block_dim else tensor.shape[d]}" for d in order]
    return " ".join([str(tensor.dtype).removeprefix("torch."), *sizes])


def _runs(name: str, tensor: torch.Tensor, order: Sequence[int], block_dim: int, num_blocks: int) -> Iterator[_Run]:
    item = tensor.element_size()
    at = order.index(block_dim)
    outer, inner = order[:at], order[at + 1 :]
    split = tensor.shape[block_dim] // num_blocks
    stride = tensor.stride(block_dim) * split * item
    length = split * prod(tensor.shape[dim] for dim in inner) * item
    extent = (1 + sum((tensor.shape[dim] - 1) * tensor.stride(dim) for dim in inner)) * item
    extent += (split - 1) * tensor.stride(block_dim) * item
    if extent != length or length > stride:
        raise AdapterError(
            f"the bytes of a KV block of {name} do not lie together (shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()})",
            hint="run this server without the KV tier, or with another attention backend or KV cache layout",
        )
    storage = tensor.untyped_storage().data_ptr()
    for index in product(*(range(tensor.shape[dim]) for dim in outer)):
        offset = tensor.storage_offset() + sum(i * tensor.stride(dim) for i, dim in zip(index, outer, strict=True))
        yield _Run(storage, stride, offset * item, length)


def _check_apart(runs: Mapping[_Run, torch.Tensor]) -> None:
    """Layers of several groups take turns in the same bytes; where they see them in other shapes, no run is all of a
    block.
    """
    for run, after in pairwise(sorted(runs)):
        is_beside = (run.storage, run.stride) == (after.storage, after.stride)
        if is_beside and run.base + run.length > after.base and run.base // run.stride == after.base // run.stride:
            raise AdapterError(
                "layers of this model share memory in different shapes, which is not served yet",
                hint="run this server without the KV tier, or with --disable-hybrid-kv-cache-manager",
            )


def _merge(runs: Mapping[_Run, torch.Tensor]) -> Iterator[tuple[_Run, _Run]]:
    """Join runs that touch within a block (layers side by side in each block), in order of their first layer."""
    first_seen = {run: position for position, run in enumerate(runs)}
    joined: list[tuple[int, _Run, _Run]] = []
    for run in sorted(runs):
        if joined:
            position, last, first = joined[-1]
            touches = (last.storage, last.stride, last.base + last.length) == (run.storage, run.stride, run.base)
            if touches and last.length + run.length <= run.stride:
                whole = _Run(last.storage, last.stride, last.base, last.length + run.length)
                joined[-1] = (min(position, first_seen[run]), whole, first)
                continue
        joined.append((first_seen[run], run, run))
    for _, run, first in sorted(joined, key=lambda entry: entry[0]):
        yield run, first


def _plane(run: _Run, tensor: torch.Tensor, num_blocks: int) -> Plane:
    import torch

    common = gcd(run.base, run.stride, run.length, run.storage)
    dtype, item = next(
        (dtype, size)
        for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
        if common % size == 0
    )
    shape, strides = (num_blocks, run.length // item), (run.stride // item, 1)
    with torch.inference_mode():
        words = torch.empty(0, dtype=dtype, device=tensor.device)
        words.set_(tensor.untyped_storage(), run.base // item, shape, strides)
    return Plane(words, run.length)


def _run_lengths(values: Sequence[int]) -> list[str]:
    """[4, 4, 8] as ["2 x 4", "1 x 8"]."""
    out: list[list[int]] = []
    for value in values:
        if out and out[-1][1] == value:
            out[-1][0] += 1
        else:
            out.append([1, value])
    return [f"{count} x {value}" for count, value in out]
