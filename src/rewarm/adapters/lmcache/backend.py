"""The seat in LMCache's in-process engine: a storage plug-in, loaded by ``storage_plugins``.

Loads land in buffers of LMCache's own CPU backend and are good when they are handed over; stores are written behind. A
damaged or missing chunk ends the prefix that is given back. What was stored is found again after a restart, which
LMCache's own local disk does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from rewarm.adapters.lmcache.keys import engine_name
from rewarm.adapters.lmcache.memory import buffer_of
from rewarm.adapters.lmcache.names import Layout, Naming
from rewarm.adapters.lmcache.objects import ObjectName, Objects, ObjectStore
from rewarm.adapters.lmcache.settings import Settings, read_settings
from rewarm.adapters.lmcache.versions import check_version, installed_version
from rewarm.adapters.seats import LMCACHE, claim, hinted, release
from rewarm.engine.checks import MAX_PAYLOAD_BYTES
from rewarm.errors import AdapterError, RewarmError
from rewarm.units import format_size

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger("lmcache.rewarm")

SEAT = "lmcache"
PREFIX = "rewarm."
"""Of this seat's keys in LMCache's extra_config."""
WHERE = "extra_config"
FIND_WAIT_S = 1.0
"""How long a lookup waits for a disk; what is not known by then is a miss."""
STALL_S = 30.0
"""A store that has waited so long, with none ending meanwhile, says that the disk hangs: what comes then is not taken,
so that it does not hold ever more of LMCache's memory."""
CLOSE_WAIT_S = 10.0
_POLL_S = 0.05

Callback = Callable[[Any], None]


class StartRefused(SystemExit):
    """Ends the process of a server that cannot be served as it is configured. LMCache's in-process loader logs every
    other exception and serves without the tier, which nobody would notice.
    """


class RewarmBackend(StoragePluginInterface):  # type: ignore[misc]
    """See the head of this file."""

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        """As LMCache's loader calls it.

        Raises:
            StartRefused: This server cannot be served as it is configured. No RewarmError: LMCache would log that and
                serve without a tier.
        """
        super().__init__(
            dst_device=dst_device, config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop
        )
        try:
            self._open(config, metadata)
        except RewarmError as error:
            logger.critical("Rewarm: %s", hinted(error))
            raise StartRefused(f"Rewarm: {error}") from None
        self._lock = threading.Lock()
        self._putting: set[CacheEngineKey] = set()
        self._is_closing = False
        self._oldest_store = 0.0
        self._stores: queue.SimpleQueue[_Put | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_stores, name="rewarm-lmcache-store", daemon=True)
        self._thread.start()
        logger.info(
            "Rewarm: storage plug-in, engine %s, volume %s", self._objects.engine.name, ":".join(self._objects.kv.roots)
        )

    def __str__(self) -> str:
        """What LMCache calls it in logs."""
        return "RewarmBackend"

    def _open(self, config: Any, metadata: Any) -> None:
        if config is None or metadata is None:
            raise AdapterError("LMCache gave no configuration", hint="load it by storage_plugins, not by hand")
        extra = config.extra_config or {}
        given = {name.removeprefix(PREFIX): value for name, value in extra.items() if name.startswith(PREFIX)}
        settings = read_settings(given, where=f"{WHERE} ({PREFIX}...)")
        version = installed_version()
        line = f"{PREFIX}allow_untested: true in {WHERE}"
        check_version(version, allow_untested=settings.kv.allow_untested, line=line)
        object_bytes = check_served(config, metadata, settings)
        weights = settings.weights[metadata.model_name]
        if weights.reason:
            logger.warning(
                "Rewarm: %s: what is stored in this run is not found by the next; name the weights in %s, like "
                '%sweights: {"%s": "/models/DIR"}',
                weights.reason,
                WHERE,
                PREFIX,
                metadata.model_name,
            )
        naming = Naming(SEAT, version, settings.weights, int(config.chunk_size), settings.kv.salt)
        self._objects = Objects(settings.kv, naming, object_bytes=object_bytes)
        try:
            role = getattr(metadata, "role", None) or "worker"
            self._seat = claim(LMCACHE, f"{SEAT} {self._objects.volume.id} {role} {metadata.worker_id}")
        except RewarmError:
            self._objects.close()
            raise

    # Lookups.

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """See LMCache's base class; asks no disk."""
        return self._objects.contains(engine_name(key))

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """See LMCache's base class. Waits for the disk, a bounded time, for what another process may have stored."""
        return self._prefix([engine_name(key) for key in keys])

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """See LMCache's base class."""
        return await asyncio.to_thread(self._prefix, [engine_name(key) for key in keys])

    def _prefix(self, names: Sequence[ObjectName]) -> int:
        """How many of the first names are there."""
        found = self._objects.find(names, timeout_s=FIND_WAIT_S)
        return found.index(False) if False in found else len(found)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """See LMCache's base class."""
        with self._lock:
            return key in self._putting

    def pin(self, key: CacheEngineKey) -> bool:
        """See LMCache's base class. A lookup makes a record the last to be evicted; nothing is locked."""
        return self.contains(key)

    def unpin(self, key: CacheEngineKey) -> bool:
        """See LMCache's base class."""
        return self.contains(key)

    def touch_cache(self) -> None:
        """See LMCache's base class; uses were noted when they were looked up."""

    # Loads.

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """See LMCache's base class."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """See LMCache's base class: the objects of the prefix that is there and whole, None for the rest."""
        loaded = self._load([engine_name(key) for key in keys], busy_loop=True)
        return [*loaded, *([None] * (len(keys) - len(loaded)))]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """See LMCache's base class: the objects of the prefix that is there and whole."""
        return await asyncio.to_thread(self._load, [engine_name(key) for key in keys], busy_loop=False)

    def _load(self, names: Sequence[ObjectName], *, busy_loop: bool) -> list[MemoryObj]:
        objects: list[MemoryObj] = []
        try:
            self._allocate(names, objects, busy_loop=busy_loop)
            load = self._objects.load(
                names[: len(objects)], [buffer_of(memory_obj, has_format=True) for memory_obj in objects]
            )
            while not load.wait(_POLL_S):  # a deadline passes only when somebody asks
                pass
            self._objects.ended(load)
            hits = load.hits()
            num_good = hits.index(False) if False in hits else len(hits)
        except Exception:
            logger.exception("Rewarm: a load failed")
            num_good = 0
        for memory_obj in objects[num_good:]:
            memory_obj.ref_count_down()
        return objects[:num_good]

    def _allocate(self, names: Sequence[ObjectName], objects: list[MemoryObj], *, busy_loop: bool) -> None:
        """Buffers for a prefix of names, each in the layout that its record has; ends where one is not to be had."""
        if self.local_cpu_backend is None:
            return
        for name in names:
            layout = self._objects.layout_of(name)
            if layout is None:
                return
            shapes, dtypes, fmt = _as_torch(layout)
            memory_obj = self.local_cpu_backend.allocate(shapes, dtypes, fmt, busy_loop=busy_loop)
            if memory_obj is None:
                return
            objects.append(memory_obj)

    # Stores.

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callback | None = None,
    ) -> None:
        """See LMCache's base class; written behind."""
        if self._is_closing or self._is_stalled():
            self._objects.counters.add("rewarm_kv_stores_total", len(keys), "failed")
            return
        put = _Put([], [], on_complete_callback)
        for key, memory_obj in zip(keys, objs, strict=False):
            with self._lock:
                if key in self._putting or self._objects.contains(engine_name(key)):
                    continue
                self._putting.add(key)
            memory_obj.ref_count_up()
            put.keys.append(key)
            put.objects.append(memory_obj)
        if put.keys:
            self._stores.put(put)

    def _run_stores(self) -> None:
        pending: list[tuple[_Put, ObjectStore]] = []
        is_open = True
        while is_open or pending:
            is_open = self._take_stores(pending, is_open)
            for entry in [entry for entry in pending if entry[1].done()]:
                pending.remove(entry)
                self._finish_store(*entry)
            self._oldest_store = min((store.started for _, store in pending), default=0.0)
            if pending:
                pending[0][1].wait(_POLL_S)

    def _take_stores(self, pending: list[tuple[_Put, ObjectStore]], is_open: bool) -> bool:
        """Start what was submitted; waits for it where nothing is under way. False: there will be no more."""
        while is_open:
            try:
                put = self._stores.get(block=not pending)
            except queue.Empty:
                return True
            if put is None:
                return False
            self._oldest_store = self._oldest_store or time.monotonic()
            try:
                names = [engine_name(key) for key in put.keys]
                pending.append(
                    (put, self._objects.store(names, [buffer_of(obj, has_format=True) for obj in put.objects]))
                )
            except Exception:
                logger.exception("Rewarm: a store failed")
                self._let_go(put)
        return False

    def _finish_store(self, put: _Put, store: ObjectStore) -> None:
        stored: list[Any] = []
        try:
            self._objects.settled(store)
            stored = [key for key, is_stored in zip(put.keys, store.stored(), strict=True) if is_stored]
        except Exception:
            logger.exception("Rewarm: a store failed")
        self._let_go(put)
        for key in stored:
            _call(put.callback, key)

    def _let_go(self, put: _Put) -> None:
        for memory_obj in put.objects:
            memory_obj.ref_count_down()
        with self._lock:
            self._putting.difference_update(put.keys)

    def _is_stalled(self) -> bool:
        return bool(self._oldest_store) and time.monotonic() - self._oldest_store > STALL_S

    # The rest.

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """See LMCache's base class; waits for the disk, a bounded time."""
        return self.batched_remove([key], force=force) == 1

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """See LMCache's base class; waits for the disk, a bounded time."""
        names = [name for name in map(engine_name, keys) if self._objects.contains(name)]
        try:
            return sum(self._objects.remove(names))
        except Exception:
            logger.exception("Rewarm: objects could not be removed")
            return 0

    def get_allocator_backend(self) -> Any:
        """See LMCache's base class."""
        if self.local_cpu_backend is None:
            raise AdapterError("a scheduler has no memory to load into")
        return self.local_cpu_backend

    def close(self) -> None:
        """See LMCache's base class. Waits a bounded time for what is being stored."""
        if self._is_closing:
            return
        self._is_closing = True
        self._stores.put(None)
        self._thread.join(CLOSE_WAIT_S)
        self._objects.close()
        release(self._seat)


def _call(callback: Callback | None, key: Any) -> None:
    """Tell LMCache that an object is stored; what it raises is logged, as its interface says."""
    if callback is not None:
        try:
            callback(key)
        except Exception:
            logger.exception("Rewarm: LMCache's callback after a store failed")


class _Put:
    """Objects on their way to the volume; their reference is held until they are there."""

    def __init__(self, keys: list[Any], objects: list[Any], callback: Callback | None) -> None:
        self.keys = keys
        self.objects = objects
        self.callback = callback


def check_served(config: Any, metadata: Any, settings: Settings) -> int:
    """Refuse by name what this seat cannot serve, before the first request.

    Returns:
        Bytes of one object, as far as LMCache can tell.
    Raises:
        AdapterError: Says what it is, and the line to change.
    """
    if getattr(config, "enable_blending", False):
        raise AdapterError(
            "enable_blending needs the positions of cached tokens, which a record does not hold",
            hint="set enable_blending: false and save_unfull_chunk: false in LMCache's configuration",
        )
    if config.save_unfull_chunk:
        raise AdapterError(
            "save_unfull_chunk makes chunks of every length, and a record has one length",
            hint="set save_unfull_chunk: false in LMCache's configuration",
        )
    if settings.chunk_tokens not in (0, int(config.chunk_size)):
        raise AdapterError(
            f"LMCache's chunk_size is {config.chunk_size}, and {PREFIX}chunk_tokens says {settings.chunk_tokens}",
            hint=f"set {PREFIX}chunk_tokens: {config.chunk_size} in {WHERE}, or leave it out",
        )
    _check_hashes(config)
    object_bytes = _object_bytes(metadata)
    if object_bytes > MAX_PAYLOAD_BYTES:
        tokens = int(config.chunk_size) * MAX_PAYLOAD_BYTES // object_bytes // 16 * 16
        raise AdapterError(
            f"a chunk of {config.chunk_size} tokens has {format_size(object_bytes)}, "
            f"and a record at most {format_size(MAX_PAYLOAD_BYTES)}",
            hint=f"set chunk_size: {max(16, tokens)} in LMCache's configuration",
        )
    return object_bytes


def _check_hashes(config: Any) -> None:
    """Refuse what names all chunks anew at every start: Python's own hash, and the seed of vLLM before 0.30."""
    if os.environ.get("PYTHONHASHSEED", "").isdigit():
        return
    algorithm = config.pre_caching_hash_algorithm
    if algorithm == "builtin" or "xxhash" in algorithm or not _seed_is_fixed():
        raise AdapterError(
            f"LMCache hashes tokens here ({algorithm}) from a seed that is another one in every process",
            hint="set PYTHONHASHSEED=0 in the environment of every process of the server",
        )


def _seed_is_fixed() -> bool:
    if "vllm" not in sys.modules:
        return True  # in another server LMCache starts from 0
    from vllm.v1.core import kv_cache_utils

    return getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None) is not None


def _object_bytes(metadata: Any) -> int:
    total = 0
    for shape, dtype in zip(metadata.get_shapes(), metadata.get_dtypes(), strict=False):
        num_bytes = int(dtype.itemsize)
        for length in shape:
            num_bytes *= int(length)
        total += num_bytes
    return total


def _as_torch(layout: Layout) -> tuple[Any, Any, Any]:
    """Shapes, dtypes and format as LMCache's allocators take them: one of each where there is one."""
    import torch

    shapes = [torch.Size(shape) for shape in layout.shapes]
    dtypes = [getattr(torch, dtype) for dtype in layout.dtypes]
    fmt = MemoryFormat[layout.format]
    return (shapes[0], dtypes[0], fmt) if len(shapes) == 1 else (shapes, dtypes, fmt)
