"""The engines of native/: one call in, one call out, and no GIL while bytes move."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import struct
import time
from array import array
from collections.abc import Sequence
from typing import Any

from rewarm.engine import _native as rw
from rewarm.engine.base import (
    BlockPlanes,
    EngineConfig,
    Flow,
    Priority,
    Probe,
    Read,
    ReadRecord,
    Times,
    ToBlocks,
    ToMemory,
    Transfer,
    Write,
    WriteRecord,
)
from rewarm.engine.checks import check_arrays, check_ring, check_root, check_transfer
from rewarm.engine.record import KEY_BYTES, NAMESPACE_BYTES
from rewarm.errors import BusyError, StorageError, UnsupportedError, UsageError, VolumeClosed

KINDS = {"threads": rw.THREADS, "io_uring": rw.URING}
_CLOSE_WAIT_S = 5.0
"""How long close() waits for I/O in place that hangs; after it its memory must stay where it is for good."""
_WAIT_SLICE_S = 0.5
_NO_NAME = bytes(32)
_NO_BLOCKS = (0,) * 8
"""From ``offset`` on, where nothing is scattered."""
_pack = rw.TRANSFER.pack


def missing(kind: str) -> str:
    """Why this machine cannot run a native engine of this kind; "" where it can."""
    if rw.library.calls is None:
        return rw.library.reason
    handle = ctypes.c_void_p()
    error = rw.library.calls.rw_engine_open(rw.Config(kind=KINDS[kind], num_workers=1), handle)
    if error:
        return _refusal(-error)
    rw.library.calls.rw_engine_close(handle, -1)
    return ""


_REFUSALS = {
    errno.ENOSYS: "this kernel has no io_uring",
    errno.EPERM: "kernel.io_uring_disabled, or a container's seccomp profile",
    errno.EACCES: "a security module",
    errno.ENOMEM: "RLIMIT_MEMLOCK is too low for this kernel",
}


def _refusal(error: int) -> str:
    reason = _REFUSALS.get(error)
    return f"io_uring_setup: {os.strerror(error)}" + (f" ({reason})" if reason else "")


class NativeEngine:
    """C threads or io_uring, by ``config.kind`` (not ``auto``)."""

    def __init__(self, config: EngineConfig) -> None:
        check_ring(config)
        self.name = config.kind
        if rw.library.calls is None:
            raise UnsupportedError(f"engine {config.kind} is missing here: {rw.library.reason}")
        self._calls = rw.library.calls
        self._pid = os.getpid()
        self._slot_bytes = config.slot_bytes
        self._handle = ctypes.c_void_p()
        settings = rw.Config(
            kind=KINDS[config.kind],
            num_workers=config.num_workers,
            ring_bytes=config.ring_bytes,
            slot_bytes=config.slot_bytes,
            ring_address=config.ring_address,
        )
        error = -self._calls.rw_engine_open(settings, self._handle)
        if error == errno.EINVAL:
            raise UsageError(f"the library refuses {config}")
        if error in {errno.EAGAIN, errno.ENOMEM}:
            raise StorageError(f"no memory or no thread for engine {config.kind}: {os.strerror(error)}", errno=error)
        if error:
            raise UnsupportedError(f"engine {config.kind} is missing here: {_refusal(error)}")

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> NativeCompletion:
        """See engine.base.Engine."""
        paths: list[str] = []
        try:
            packed = b"".join([_packed(transfer, paths) for transfer in transfers])
        except struct.error as error:
            self._explain(transfers)
            raise UsageError(f"a number of a transfer is out of range: {error}") from error
        names = os.fsencode("\0".join([*paths, ""]))
        batch, bad = ctypes.c_void_p(), ctypes.c_uint32()
        count = len(transfers)
        found = self._calls.rw_submit(
            self._handle, packed, count, names, len(names), priority, _nanoseconds(deadline_s), batch, bad
        )
        if found == -errno.EINVAL:
            self._explain(transfers[bad.value :])
            raise UsageError("a path of the batch holds a NUL character")
        _checked(found)
        return NativeCompletion(self, batch, count)

    def _explain(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            check_transfer(transfer, self._slot_bytes)

    def gather(self, planes: BlockPlanes, block_ids: array[int], address: int) -> None:
        """See engine.base.Engine."""
        if os.getpid() != self._pid:
            raise _error(errno.ECHILD)
        check_arrays(planes, block_ids)
        bases, num_planes = planes.plane_addresses.buffer_info()
        blocks, num_blocks = block_ids.buffer_info()
        self._calls.rw_gather(bases, num_planes, planes.page_bytes, blocks, num_blocks, address)

    def usage(self) -> dict[str, int]:
        """Workers, slots and queued transfers now; the fields of rw_usage."""
        usage = rw.Usage()
        _checked(self._calls.rw_engine_usage(self._handle, usage))
        return {name: int(getattr(usage, name)) for name, _ in usage._fields_}

    def flow(self, root: int) -> Flow:
        """See engine.base.Engine."""
        check_root(root)
        flow = rw.Flow()
        _checked(self._calls.rw_engine_flow(self._handle, root, flow))
        return Flow(int(flow.bytes), flow.busy_ns / 1e9)

    def close(self) -> None:
        """See engine.base.Engine. In a forked child it does nothing."""
        self._calls.rw_engine_close(self._handle, _nanoseconds(_CLOSE_WAIT_S))

    def hold(self, part: str | None) -> None:
        """For tests: hold the I/O of files whose path contains ``part``, once it counts as submitted; None ends it."""
        self._calls.rw_test_hold(self._handle, None if part is None else os.fsencode(part))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._calls.rw_engine_close(self._handle, 0)


def _nanoseconds(seconds: float | None) -> int:
    """-1 for None; nothing below 0, nothing that does not fit."""
    return -1 if seconds is None else int(min(max(seconds, 0.0), 1e9) * 1e9)


def _error(error: int) -> Exception:
    if error == errno.ECHILD:
        return BusyError("this engine belongs to the parent process", hint="open an engine after fork()")
    if error == errno.ESHUTDOWN:
        return VolumeClosed("the engine is closed")
    return StorageError(f"the engine failed: {os.strerror(error)}", errno=error)


def _packed(transfer: Transfer, paths: list[str]) -> bytes:
    """One rw_transfer as bytes; its paths go to ``paths``."""
    paths.append(transfer.path)
    if isinstance(transfer, ReadRecord):
        return _packed_read(transfer)
    if isinstance(transfer, WriteRecord):
        paths.append(transfer.temporary_path)
        t = transfer
        _check_names(t)
        numbers = (t.address, t.payload_bytes, t.created_ns)
        return _pack(rw.WRITE_RECORD, 0, t.durable, t.root, *numbers, 0, 0, 0, 0, 0, 0, 0, t.key, t.namespace_id)
    if isinstance(transfer, (Read, Write)):
        kind = rw.READ if isinstance(transfer, Read) else rw.WRITE
        numbers = (transfer.address, transfer.length_bytes, transfer.offset_bytes)
        return _pack(kind, 0, 0, 0, *numbers, 0, 0, 0, 0, 0, 0, 0, _NO_NAME, _NO_NAME)
    kind, root = (rw.PROBE, transfer.root) if isinstance(transfer, Probe) else (rw.UNLINK, 0)
    return _pack(kind, 0, 0, root, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, _NO_NAME, _NO_NAME)


def _packed_read(t: ReadRecord) -> bytes:
    _check_names(t)
    target = t.target
    if isinstance(target, ToBlocks):
        planes = target.planes
        check_arrays(planes, target.block_ids)
        bases, num_planes = planes.plane_addresses.buffer_info()
        blocks, num_blocks = target.block_ids.buffer_info()
        numbers = (bases, blocks, planes.page_bytes, num_planes, num_blocks, target.skip_blocks)
        return _pack(rw.READ_RECORD, rw.TO_BLOCKS, 0, t.root, 0, t.payload_bytes, 0, *numbers, 0, t.key, t.namespace_id)
    where, address = (rw.TO_MEMORY, target.address) if isinstance(target, ToMemory) else (rw.TO_SLOT, 0)
    return _pack(rw.READ_RECORD, where, 0, t.root, address, t.payload_bytes, *_NO_BLOCKS, t.key, t.namespace_id)


def _check_names(transfer: ReadRecord | WriteRecord) -> None:
    """struct would cut or fill them in silence."""
    if len(transfer.key) != KEY_BYTES or len(transfer.namespace_id) != NAMESPACE_BYTES:
        check_transfer(transfer, 0)


class NativeCompletion:
    """A batch of a native engine."""

    def __init__(self, engine: NativeEngine, batch: ctypes.c_void_p, count: int) -> None:
        self._engine = engine
        self._calls = engine._calls
        self._batch = batch
        self._count = count
        self._taken: Any = None

    def done(self) -> bool:
        """See engine.base.Completion."""
        return _checked(self._calls.rw_done(self._batch)) == 1

    def take(self) -> list[tuple[int, int]]:
        """See engine.base.Completion."""
        if self._taken is None:
            self._taken = (rw.Result * max(1, self._count))()
        count = _checked(self._calls.rw_take(self._batch, self._taken, self._count))
        return list(rw.RESULT.iter_unpack(memoryview(self._taken).cast("B")[: count * rw.RESULT.size]))

    def results(self) -> list[int]:
        """See engine.base.Completion."""
        results = (ctypes.c_int32 * self._count)()
        if -(found := self._calls.rw_results(self._batch, results)) == errno.EBUSY:
            raise BusyError("the batch is not done", hint="wait() for it first")
        _checked(found)
        return list(results)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See engine.base.Completion. In slices, so that Ctrl-C is heard."""
        left = math.inf if timeout_s is None else max(0.0, timeout_s)
        end = time.monotonic() + left
        while True:
            if _checked(self._calls.rw_wait(self._batch, _nanoseconds(min(left, _WAIT_SLICE_S)))):
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False

    def cancel(self) -> None:
        """See engine.base.Completion."""
        if not _checked(self._calls.rw_cancel(self._batch)):
            self.wait()

    def times(self) -> Times:
        """See engine.base.Completion."""
        times = rw.Times()
        _checked(self._calls.rw_batch_times(self._batch, times))
        return Times(times.waited_ns / 1e9, times.total_ns / 1e9)

    def fileno(self) -> int:
        """See engine.base.Completion."""
        return _checked(self._calls.rw_fileno(self._batch))

    def slot_address(self, index: int) -> int:
        """See engine.base.Completion."""
        address = int(self._calls.rw_slot_address(self._batch, index)) if index >= 0 else 0
        if not address:
            raise _no_slot(index)
        return address

    def release(self, index: int) -> None:
        """See engine.base.Completion."""
        found = self._calls.rw_release(self._batch, index) if index >= 0 else -errno.EINVAL
        if found == -errno.EINVAL:
            raise _no_slot(index)
        _checked(found)

    def __del__(self) -> None:
        self._calls.rw_free(self._batch)


def _checked(found: int) -> int:
    if found < 0:
        raise _error(-found)
    return found


def _no_slot(index: int) -> UsageError:
    return UsageError(f"transfer {index} of this batch holds no ring slot")
