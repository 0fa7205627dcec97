"""The declarations of native/rewarm_io.h for ctypes; tests/contract/test_engine_header.py compares the two."""

from __future__ import annotations

import ctypes
import struct
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ABI = 3
PAGE_BYTES = 4096
PIECE_BYTES = 1048576
MAX_PIECES = 768
NUM_ROOTS = 256

READ, WRITE, READ_RECORD, WRITE_RECORD, PROBE, UNLINK = range(1, 7)
TO_MEMORY, TO_BLOCKS, TO_SLOT = range(3)
LOAD, STORE = range(2)
THREADS, URING = range(1, 3)

TRANSFER = struct.Struct("<BBBB4xQQQQQQIIII32s32s")
"""rw_transfer, packed by hand: filling a ctypes structure costs ten times as much."""
RESULT = struct.Struct("=Ii")
"""rw_result, for the same reason."""


class Transfer(Structure):
    """rw_transfer; tells the test where its fields lie."""

    _fields_ = (
        ("kind", c_uint8),
        ("target", c_uint8),
        ("durable", c_uint8),
        ("root", c_uint8),
        ("reserved", c_uint8 * 4),
        ("address", c_uint64),
        ("length", c_uint64),
        ("offset", c_uint64),
        ("planes", c_uint64),
        ("blocks", c_uint64),
        ("page_bytes", c_uint64),
        ("num_planes", c_uint32),
        ("num_blocks", c_uint32),
        ("skip_blocks", c_uint32),
        ("reserved2", c_uint32),
        ("key", c_uint8 * 32),
        ("namespace_id", c_uint8 * 32),
    )


class Config(Structure):
    """rw_config."""

    _fields_ = (
        ("kind", c_uint32),
        ("num_workers", c_uint32),
        ("ring_bytes", c_uint64),
        ("slot_bytes", c_uint64),
        ("ring_address", c_uint64),
    )


class Usage(Structure):
    """rw_usage."""

    _fields_ = (
        ("num_workers", c_uint32),
        ("stuck_workers", c_uint32),
        ("num_slots", c_uint32),
        ("free_slots", c_uint32),
        ("lost_slots", c_uint32),
        ("queued", c_uint32),
    )


class Times(Structure):
    """rw_times."""

    _fields_ = (("waited_ns", c_int64), ("total_ns", c_int64))


class Flow(Structure):
    """rw_flow."""

    _fields_ = (("bytes", c_uint64), ("busy_ns", c_int64))


class Result(Structure):
    """rw_result."""

    _fields_ = (("index", c_uint32), ("result", c_int32))


class Header(Structure):
    """rw_header."""

    _fields_ = (
        ("payload_bytes", c_uint64),
        ("created_ns", c_uint64),
        ("piece_bytes", c_uint32),
        ("num_pieces", c_uint32),
        ("key", c_uint8 * 32),
        ("namespace_id", c_uint8 * 32),
        ("crcs", c_uint32 * MAX_PIECES),
    )


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rw_abi": (c_uint32, ()),
    "rw_engine_open": (c_int, (POINTER(Config), POINTER(c_void_p))),
    "rw_engine_close": (c_int, (c_void_p, c_int64)),
    "rw_engine_usage": (c_int, (c_void_p, POINTER(Usage))),
    "rw_engine_flow": (c_int, (c_void_p, c_uint32, POINTER(Flow))),
    "rw_submit": (
        c_int,
        (c_void_p, c_char_p, c_uint32, c_char_p, c_uint64, c_uint32, c_int64, POINTER(c_void_p), POINTER(c_uint32)),
    ),
    "rw_done": (c_int, (c_void_p,)),
    "rw_take": (c_int, (c_void_p, POINTER(Result), c_uint32)),
    "rw_results": (c_int, (c_void_p, POINTER(c_int32))),
    "rw_wait": (c_int, (c_void_p, c_int64)),
    "rw_cancel": (c_int, (c_void_p,)),
    "rw_batch_times": (c_int, (c_void_p, POINTER(Times))),
    "rw_fileno": (c_int, (c_void_p,)),
    "rw_slot_address": (c_uint64, (c_void_p, c_uint32)),
    "rw_release": (c_int, (c_void_p, c_uint32)),
    "rw_free": (None, (c_void_p,)),
    "rw_gather": (None, (c_void_p, c_uint32, c_uint64, c_void_p, c_uint32, c_void_p)),
    "rw_crc32c": (c_uint32, (c_uint32, c_void_p, c_size_t)),
    "rw_crc32c_table": (c_uint32, (c_uint32, c_void_p, c_size_t)),
    "rw_crc32c_kind": (c_char_p, ()),
    "rw_record_pack": (None, (POINTER(Header), c_void_p)),
    "rw_record_parse": (c_int, (c_void_p, POINTER(Header))),
    "rw_scan": (c_int64, (c_char_p, c_uint32, c_void_p, c_uint64)),
    "rw_index_add": (c_uint64, (c_void_p, c_uint64, c_void_p, c_uint64)),
    "rw_test_hold": (c_int, (c_void_p, c_char_p)),
}
"""Name -> result, arguments. rw_transfer arrays go as bytes."""

KEEP_THE_GIL = frozenset(
    (
        "rw_engine_flow",
        "rw_submit",
        "rw_done",
        "rw_take",
        "rw_results",
        "rw_cancel",
        "rw_batch_times",
        "rw_fileno",
        "rw_slot_address",
        "rw_release",
        "rw_free",
    )
)
"""Calls of some microseconds. To get the GIL back beside a busy Python thread can take 5 ms and more: a submit of 200
transfers took 8 ms at its p95 when it gave the GIL up, and 0.2 ms since it keeps it. No thread of the library asks for
the GIL, so nothing can lock up."""

LIBRARY_PATH = Path(__file__).with_name("librewarm_io.so")


class Library:
    """The loaded library, or the reason why there is none."""

    def __init__(self) -> None:
        self.calls: Any = None
        self.reason = ""
        if not LIBRARY_PATH.exists():
            self.reason = "librewarm_io.so was not built: no C compiler or CMake at install"
            return
        try:
            free, keeping = ctypes.CDLL(str(LIBRARY_PATH)), ctypes.PyDLL(str(LIBRARY_PATH))
            calls = SimpleNamespace()
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(keeping if name in KEEP_THE_GIL else free, name)
                function.restype, function.argtypes = result, arguments
                setattr(calls, name, function)
        except (OSError, AttributeError) as error:
            self.reason = f"librewarm_io.so cannot be loaded: {error}"
            return
        if (found := calls.rw_abi()) != ABI:
            self.reason = f"librewarm_io.so has interface {found}, this release needs {ABI}: install Rewarm again"
            return
        self.calls = calls


library = Library()
