"""LMCache's memory objects as Rewarm sees them: an address, how much room there is, how the bytes are to be read."""

from __future__ import annotations

import ctypes
from typing import Any

from rewarm.adapters.lmcache.names import Layout
from rewarm.adapters.lmcache.objects import Buffer
from rewarm.errors import AdapterError


def buffer_of(memory_obj: Any, *, has_format: bool) -> Buffer:
    """The buffer of a memory object in host memory; it stays LMCache's.

    Args:
        memory_obj: LMCache's.
        has_format: Whether the order of its dimensions is told. The multi-process server never sets it: there the
            shapes say it.
    Raises:
        AdapterError: It lies on a device or in a file.
    """
    raw = getattr(memory_obj, "raw_tensor", None)
    if raw is not None and not getattr(raw, "is_cpu", True):
        raise AdapterError(f"an object of LMCache's lies on {raw.device}: only host memory can be served")
    if raw is None:  # no tensor: what every object has is its bytes
        view = memory_obj.byte_array
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return Buffer(address, len(view), Layout(len(view), ((len(view),),), ("uint8",), ""), view)
    layout = layout_of(memory_obj, has_format=has_format)
    return Buffer(int(memory_obj.data_ptr), int(memory_obj.get_physical_size()), layout, memory_obj)


def layout_of(memory_obj: Any, *, has_format: bool) -> Layout:
    """How a memory object's bytes are to be read."""
    meta = memory_obj.metadata
    shapes = meta.shapes or [meta.shape]
    dtypes = meta.dtypes or [meta.dtype]
    return Layout(
        payload_bytes=int(memory_obj.get_size()),
        shapes=tuple(tuple(int(length) for length in shape) for shape in shapes),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        format=str(meta.fmt.name) if has_format else "",
    )
