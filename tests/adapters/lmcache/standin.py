"""What the seats need of LMCache, where it is not installed: its names, and the promises of its base classes.

Written from the interface of 0.5.6 (l2_adapters/base.py, abstract_backend.py, api.py, memory_management.py). The tests
take the real LMCache where there is one; see conftest.py.
"""

from __future__ import annotations

import enum
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any

VERSION = "0.5.6"


class Bitmap:
    """As many bits as there are keys."""

    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, index: int) -> None:
        self._bits[index] = True

    def test(self, index: int) -> bool:
        return self._bits[index]

    def popcount(self) -> int:
        return sum(self._bits)


@dataclass(frozen=True)
class ObjectKey:
    """Of the multi-process server."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class EncodedObjectKey:
    """The same, as JSON can hold it."""

    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class KeyEntry:
    """Of a listing."""

    key: EncodedObjectKey
    size_bytes: int


@dataclass(frozen=True)
class KeyListPage:
    """Of a listing."""

    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


class L2StoreResult(int):
    """-1: failed, else the bytes that were written."""

    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:  # noqa: PYI034 - Self is not in Python 3.10
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return int(self) >= 0

    def bytes_transferred(self) -> int:
        return max(0, int(self))


@dataclass(frozen=True)
class AdapterUsage:
    """What an adapter holds."""

    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: dict[str, int] = field(default_factory=dict)


class L2AdapterInterface:
    """The accounting of the base class."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._listeners: list[Any] = []
        self._max_capacity_bytes = max_capacity_bytes
        self._by_salt: dict[str, int] = {}
        self._usage_lock = threading.Lock()

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def _add(self, keys: list[ObjectKey], sizes: list[int], sign: int) -> None:
        with self._usage_lock:
            for key, size in zip(keys, sizes, strict=True):
                self._by_salt[key.cache_salt] = self._by_salt.get(key.cache_salt, 0) + sign * size

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._add(keys, sizes, 1)
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._add(keys, sizes, -1)
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)

    def get_usage(self) -> AdapterUsage:
        with self._usage_lock:
            by_salt = {salt: size for salt, size in self._by_salt.items() if size > 0}
            return AdapterUsage(sum(by_salt.values()), self._max_capacity_bytes, by_salt)


class MemoryFormat(enum.Enum):
    """The orders of dimensions that the tests use."""

    UNDEFINED = 0
    KV_2LTD = enum.auto()


class StoragePluginInterface:
    """Keeps what the loader gives."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        self.dst_device = dst_device
        self.config = config
        self.metadata = metadata
        self.local_cpu_backend = local_cpu_backend
        self.loop = loop


@dataclass(frozen=True)
class CacheEngineKey:
    """Of the in-process engine."""

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int
    dtype: Any
    tags: tuple[tuple[str, str], ...] | None = None


_MODULES = {
    "lmcache": {"__version__": VERSION},
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.utils": {"CacheEngineKey": CacheEngineKey},
    "lmcache.v1": {},
    "lmcache.v1.memory_management": {"MemoryFormat": MemoryFormat},
    "lmcache.v1.storage_backend": {},
    "lmcache.v1.storage_backend.abstract_backend": {"StoragePluginInterface": StoragePluginInterface},
    "lmcache.v1.distributed": {},
    "lmcache.v1.distributed.api": {
        "ObjectKey": ObjectKey,
        "EncodedObjectKey": EncodedObjectKey,
        "KeyEntry": KeyEntry,
        "KeyListPage": KeyListPage,
    },
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
    "lmcache.v1.distributed.l2_adapters": {},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
}


def install() -> None:
    """Put the stand-in where imports find it."""
    for name, contents in _MODULES.items():
        module = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
