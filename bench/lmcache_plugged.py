"""In LMCache's own tests of L2 adapters: Rewarm's seat in place of its mock and its fs adapter.

A pytest plug-in of lmcache_suite.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import Counter
from typing import Any

import lmcache
import pytest
import torch
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, mock_l2_adapter

from rewarm.adapters.lmcache import RewarmL2
from rewarm.volume import create_volume

MODELS = ("test_model", "llama", "model", "m", "test-model")
"""That LMCache's tests name; they have no weights to look into."""
_HIDDEN: pytest.StashKey[Any] = pytest.StashKey()


class Plugged(RewarmL2):
    """The seat, made from the configuration of the adapter that it stands in for."""

    def __init__(self, config: Any) -> None:
        base = getattr(config, "base_path", None)
        self._own = None if base else tempfile.mkdtemp(prefix="rewarm-suite-")
        root = os.path.join(base or self._own, "volume")
        if not os.path.exists(root):
            create_volume([root], capacity_bytes=1 << 30)
        super().__init__({"roots": [root], "weights": dict.fromkeys(MODELS, "label:suite")})
        self._asked: dict[int, Any] = {}
        self._locked: Counter[Any] = Counter()
        self._bytes_a_second = getattr(config, "mock_bandwidth_gb", 1000) * 1e9
        if not base:
            self._max_capacity_bytes = int(config.max_size_gb * (1 << 30))

    def submit_load_task(self, keys: Any, objects: Any) -> int:
        """As slow as the mock was asked to be: tests look at loads that are under way."""
        task_id = self._new_task()
        delay_s = sum(len(memory_obj.byte_array) for memory_obj in objects) / self._bytes_a_second

        def submit() -> None:
            self._loads.put((task_id, keys, objects))
            os.eventfd_write(self._wake_fd, 1)

        if delay_s > 0.01:
            threading.Timer(delay_s, submit).start()
        else:
            submit()
        return task_id

    def debug_get_stored_object_count(self) -> int:
        return len(self._sizes)

    def submit_lookup_and_lock_task(self, keys: Any, *hints: Any) -> int:
        task_id = super().submit_lookup_and_lock_task(keys, *hints)
        self._asked[task_id] = keys
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The seat locks nothing; what the caller believes to be locked is counted here, for its tests."""
        bitmap = super().query_lookup_and_lock_result(task_id)
        if bitmap is not None:
            keys = self._asked.pop(task_id)
            self._locked.update(keys[index] for index in bitmap.get_indices_list())
        return bitmap

    def submit_unlock(self, keys: Any) -> None:
        self._locked.subtract(keys)

    def debug_get_locked_key_count(self) -> int:
        return len(+self._locked)

    def debug_has_key(self, key: Any) -> bool:
        return key in self._sizes

    def close(self) -> None:
        super().close()
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)


def pytest_configure(config: Any) -> None:
    """Before anything is collected: put the seat where LMCache's tests take their adapters from."""
    mock_l2_adapter.MockL2Adapter = Plugged
    fs_l2_adapter.FSL2Adapter = Plugged
    # Without an accelerator its tests are left out, though they use no more than host memory.
    devices = [device for device in (lmcache.torch_dev, torch.cuda) if not device.is_available()]
    config.stash[_HIDDEN] = [(device, device.is_available) for device in devices]
    for device in devices:
        device.is_available = lambda: True


def pytest_collection_finish(session: Any) -> None:
    """LMCache itself is told the truth about its device."""
    for device, is_available in session.config.stash[_HIDDEN]:
        device.is_available = is_available
