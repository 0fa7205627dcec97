"""Drives the seats as LMCache's controllers do: tasks, eventfds with a time limit, and memory objects of its kind."""

from __future__ import annotations

import enum
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rewarm.engine import alloc_aligned

WAIT_S = 20.0
MODEL = "test/model"
WEIGHTS = {MODEL: "label:tests"}
_SPARE = 8192


class Format(enum.Enum):
    """Stands for LMCache's MemoryFormat, of which the seats take the name."""

    KV_2LTD = 1


class HostObject:
    """A memory object of LMCache's: bytes in host memory, with a shape."""

    def __init__(self, num_bytes: int, fill: int = 0, *, offset: int = 0, dtype: str = "torch.bfloat16") -> None:
        self._buffer = alloc_aligned(num_bytes + _SPARE)
        self.view = self._buffer.view[offset : offset + num_bytes]
        self.view[:] = bytes([fill]) * num_bytes
        self.data_ptr = self._buffer.address + offset
        self.raw_tensor = SimpleNamespace(is_cpu=True)
        self.metadata = SimpleNamespace(
            shape=(2, 4, num_bytes // 16), dtype=dtype, shapes=None, dtypes=None, fmt=Format.KV_2LTD
        )
        self.references = 1
        self._num_bytes = num_bytes

    def get_size(self) -> int:
        return self._num_bytes

    def get_physical_size(self) -> int:
        return -(-self._num_bytes // 4096) * 4096

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1

    def holds(self, fill: int) -> bool:
        return self.view == bytes([fill]) * self._num_bytes


def object_key(number: int, *, salt: str = "", rank: int = 0x01000100, model: str = MODEL) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=number.to_bytes(2, "big") * 16, model_name=model, kv_rank=rank, cache_salt=salt)


class Listener:
    """What an eviction controller hears."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []
        self.changed = threading.Condition()

    def _note(self, heard: list[Any], keys: Sequence[Any]) -> None:
        with self.changed:
            heard.extend(keys)
            self.changed.notify_all()

    def on_l2_keys_stored(self, keys: Sequence[Any], sizes: Sequence[int] = ()) -> None:  # sizes from 0.5.0 on
        self._note(self.stored, keys)

    def on_l2_keys_accessed(self, keys: Sequence[Any]) -> None:
        self._note(self.accessed, keys)

    def on_l2_keys_deleted(self, keys: Sequence[Any]) -> None:
        self._note(self.deleted, keys)

    def wait_stored(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.stored) >= count, WAIT_S), "no notice of what is there"


def _wait(descriptor: int, ask: Callable[[], Any]) -> Any:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        assert poll.poll(WAIT_S * 1000), "the eventfd was not signalled in time"
        os.eventfd_read(descriptor)
        found = ask()
        if found:
            return found


def store(seat: Any, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
    """The L2StoreResult of one task."""
    task = seat.submit_store_task(list(keys), list(objects))
    return _wait(seat.get_store_event_fd(), seat.pop_completed_store_tasks)[task]


def look_up(seat: Any, keys: Sequence[Any]) -> list[bool]:
    """What one lookup finds."""
    task = seat.submit_lookup_and_lock_task(list(keys), {})
    bitmap = _wait(seat.get_lookup_and_lock_event_fd(), lambda: _once(seat.query_lookup_and_lock_result(task)))[0]
    return [bitmap.test(index) for index in range(len(keys))]


def load(seat: Any, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
    """What one load brings."""
    task = seat.submit_load_task(list(keys), list(objects))
    bitmap = _wait(seat.get_load_event_fd(), lambda: _once(seat.query_load_result(task)))[0]
    assert seat.query_load_result(task) is None, "a result is given once"
    return [bitmap.test(index) for index in range(len(keys))]


def _once(found: Any) -> list[Any]:
    return [] if found is None else [found]


def until(holds: Callable[[], Any], what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.001)
