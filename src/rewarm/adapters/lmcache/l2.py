"""The seat in LMCache's multi-process server: an L2 adapter, loaded by ``"type": "plugin"``.

LMCache's two controller threads submit tasks and poll three eventfds; three threads here do what may wait. A failed
store fails its task, a damaged or missing object is a 0 in a bitmap, and nothing raises but the constructor.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from rewarm.adapters.lmcache.keys import object_key, object_name
from rewarm.adapters.lmcache.memory import buffer_of
from rewarm.adapters.lmcache.names import Group, Naming
from rewarm.adapters.lmcache.objects import ObjectLoad, ObjectName, Objects, ObjectStore
from rewarm.adapters.lmcache.pages import list_page
from rewarm.adapters.lmcache.settings import read_settings
from rewarm.adapters.lmcache.versions import bitmap_class, check_version, installed_version
from rewarm.adapters.seats import LMCACHE, claim, hinted, release
from rewarm.errors import RewarmError

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import KeyListPage, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger("lmcache.rewarm")

SEAT = "lmcache-mp"
WHERE = "adapter_params"
FIND_WAIT_S = 5.0
"""How long a lookup waits for a disk; what is not known by then is a miss."""
STALL_S = 30.0
"""A store that has waited so long, with none ending meanwhile, says that the disk hangs: further ones fail at once, so
that they do not lock ever more of LMCache's memory."""
CLOSE_WAIT_S = 10.0
_POLL_S = 0.05
_TELL_KEYS = 1024
"""Keys in one notice to LMCache's eviction, of those that a restart found."""


class RewarmL2(L2AdapterInterface):  # type: ignore[misc]
    """See the head of this file."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """
        Args:
            params: ``adapter_params`` of the configuration: keys of Rewarm's [kv] section, and ``weights``.
            l1_memory_desc: LMCache's; not needed, since nothing is registered.
        Raises:
            RewarmError: This server cannot be served as it is configured; the text names the line to change.
        """
        try:
            settings = read_settings(params, where=WHERE)
            version = installed_version()
            check_version(
                version, allow_untested=settings.kv.allow_untested, line='"allow_untested": true in adapter_params'
            )
            self._bitmap = bitmap_class()
            naming = Naming(SEAT, version, settings.weights, settings.chunk_tokens, settings.kv.salt)
            self._objects = Objects(settings.kv, naming)
        except RewarmError as error:
            raise hinted(error) from None
        try:
            self._seat = claim(LMCACHE, f"{SEAT} {self._objects.volume.id}")
        except RewarmError as error:
            self._objects.close()
            raise hinted(error) from None
        super().__init__(max_capacity_bytes=self._objects.volume.capacity_bytes)
        self._weights = settings.weights
        self._lock = threading.Lock()
        self._next_task = 0
        self._fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(4)]
        self._store_fd, self._lookup_fd, self._load_fd, self._wake_fd = self._fds
        self._stored: dict[int, L2StoreResult] = {}
        self._looked_up: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._sizes: dict[ObjectKey, int] = {}
        """Of the keys that LMCache's accounting knows to be here."""
        self._told: set[tuple[Group, int]] = set()
        self._is_closing = False
        self._oldest_store = 0.0
        self._lookups: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[tuple[int, list[ObjectKey], list[MemoryObj]] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[int, list[ObjectKey], list[MemoryObj]]] = queue.SimpleQueue()
        self._notices: queue.SimpleQueue[tuple[Group, int] | None] = queue.SimpleQueue()
        runs = {
            "lookup": self._run_lookups,
            "store": self._run_stores,
            "load": self._run_loads,
            "tell": self._run_notices,
        }
        self._threads = [
            threading.Thread(target=run, name=f"rewarm-lmcache-{name}", daemon=True) for name, run in runs.items()
        ]
        for thread in self._threads:
            thread.start()
        logger.info("Rewarm: L2 adapter, engine %s, volume %s", self._objects.engine.name, ":".join(settings.kv.roots))

    # What LMCache polls.

    def get_store_event_fd(self) -> int:
        """See LMCache's base class."""
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """See LMCache's base class."""
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        """See LMCache's base class."""
        return self._load_fd

    # Stores.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See LMCache's base class."""
        task_id = self._new_task()
        if self._is_stalled() or self._is_closing:
            self._objects.counters.add("rewarm_kv_stores_total", len(keys), "failed")
            self._end_store(task_id, L2StoreResult(False, 0))
        else:
            self._stores.put((task_id, keys, objects))
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """See LMCache's base class."""
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    # Lookups.

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], *hints: object, **more: object) -> int:
        """See LMCache's base class; from 0.5.0 on it tells layouts too, which a lookup by name does not need."""
        task_id = self._new_task()
        self._lookups.put(lambda: self._look_up(task_id, keys))
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """See LMCache's base class."""
        with self._lock:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """See LMCache's base class. Nothing is locked: a lookup makes a record the last to be evicted, and one that is
        gone all the same is a miss in the load's bitmap.
        """

    # Loads.

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See LMCache's base class."""
        task_id = self._new_task()
        self._loads.put((task_id, keys, objects))
        _signal(self._wake_fd)
        return task_id

    def query_load_result(self, task_id: int) -> Any:
        """See LMCache's base class."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # What LMCache's eviction, quotas and listings ask for.

    def delete(self, keys: list[ObjectKey]) -> None:
        """See LMCache's base class; waits for the disk, a bounded time."""
        try:
            gone = self._objects.remove([object_name(key) for key in keys])
        except Exception:
            logger.exception("Rewarm: objects could not be deleted")
            return
        self._forget([key for key, is_gone in zip(keys, gone, strict=True) if is_gone])

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """See LMCache's base class; from 0.5.0 on. Objects of a cache_salt are listed once a request came with it: the
        volume tells nobody a salt.
        """
        return list_page(self._objects, model_name, page_size, cursor)

    def register_listener(self, listener: Any) -> None:
        """See LMCache's base class; the first one is told what a restart found."""
        super().register_listener(listener)
        self._tell_found()

    def get_usage(self) -> Any:
        """See LMCache's base class: what is known to be here, by cache_salt; the capacity is the whole volume's."""
        self._tell_found()
        return super().get_usage()

    def report_status(self) -> dict[str, Any]:
        """See LMCache's base class."""
        volume = self._objects.volume
        counters = self._objects.counters
        loads = {
            name: counters.value("rewarm_kv_loads_total", name)
            for name in ("hit", "miss", "damaged", "io_error", "timeout")
        }
        stores = {name: counters.value("rewarm_kv_stores_total", name) for name in ("stored", "skipped", "failed")}
        return {
            "is_healthy": not self._is_stalled() and any(not root.health.loads.is_on for root in volume.roots),
            "type": "RewarmL2",
            "roots": [root.name for root in volume.roots if root.is_member],
            "engine": self._objects.engine.name,
            "capacity_bytes": volume.capacity_bytes,
            "used_bytes": volume.used_bytes(),
            "loads": loads,
            "stores": stores,
            "stored_object_count": len(self._sizes),
            "stores_paused": bool(counters.value("rewarm_kv_stores_paused")),
        }

    def close(self) -> None:
        """See LMCache's base class. Waits a bounded time for what is under way."""
        if self._is_closing:
            return
        self._is_closing = True
        self._lookups.put(None)
        self._stores.put(None)
        self._notices.put(None)
        _signal(self._wake_fd)
        end = time.monotonic() + CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        self._objects.close()
        release(self._seat)
        if not any(thread.is_alive() for thread in self._threads):  # else a late one would signal another file
            for descriptor in self._fds:
                os.close(descriptor)

    # Lookups, on their thread.

    def _run_lookups(self) -> None:
        while (task := self._lookups.get()) is not None:
            task()

    def _look_up(self, task_id: int, keys: Sequence[ObjectKey]) -> None:
        bitmap = self._bitmap(len(keys))
        with _logged("a lookup"):
            names = [object_name(key) for key in keys]
            self._note_weights(names)
            for index, is_there in enumerate(self._objects.find(names, timeout_s=FIND_WAIT_S)):
                if is_there:
                    bitmap.set(index)
            self._forget([key for index, key in enumerate(keys) if key in self._sizes and not bitmap.test(index)])
            self._tell({(name.group, len(name.chunk_hash)) for name in names})
        with self._lock:
            self._looked_up[task_id] = bitmap
        _signal(self._lookup_fd)

    # Stores, on their thread.

    def _run_stores(self) -> None:
        pending: dict[int, tuple[list[ObjectKey], ObjectStore]] = {}
        is_open = True
        while is_open or pending:
            is_open = self._take_stores(pending, is_open) and is_open
            for task_id, (keys, store) in list(pending.items()):
                if store.done():
                    del pending[task_id]
                    self._finish_store(task_id, keys, store)
            self._oldest_store = min((store.started for _, store in pending.values()), default=0.0)
            if pending:
                next(iter(pending.values()))[1].wait(_POLL_S)

    def _take_stores(self, pending: dict[int, tuple[list[ObjectKey], ObjectStore]], is_open: bool) -> bool:
        """Start what was submitted; waits for it where nothing is under way. False: there will be no more."""
        with suppress(queue.Empty):
            while is_open:
                item = self._stores.get(block=not pending)
                if item is None:
                    return False
                task_id, keys, objects = item
                self._oldest_store = self._oldest_store or time.monotonic()
                try:
                    names = [object_name(key) for key in keys]
                    self._note_weights(names)
                    pending[task_id] = (
                        keys,
                        self._objects.store(names, [buffer_of(obj, has_format=False) for obj in objects]),
                    )
                except Exception:
                    logger.exception("Rewarm: a store failed")
                    self._end_store(task_id, L2StoreResult(False, 0))
        return True

    def _finish_store(self, task_id: int, keys: list[ObjectKey], store: ObjectStore) -> None:
        result = L2StoreResult(False, 0)
        with _logged("a store"):
            self._objects.settled(store)
            stored = store.stored()
            new = {
                key: size
                for key, size, is_stored in zip(keys, store.sizes, stored, strict=True)
                if is_stored and key not in self._sizes
            }
            self._remember(new)
            self._tell({(object_name(key).group, len(key.chunk_hash)) for key in keys})
            result = L2StoreResult(all(stored), sum(new.values()) if all(stored) else 0)
        self._end_store(task_id, result)

    def _end_store(self, task_id: int, result: L2StoreResult) -> None:
        with self._lock:
            self._stored[task_id] = result
        _signal(self._store_fd)

    def _is_stalled(self) -> bool:
        return bool(self._oldest_store) and time.monotonic() - self._oldest_store > STALL_S

    # Loads, on their thread.

    def _run_loads(self) -> None:
        active: dict[int, tuple[list[ObjectKey], ObjectLoad]] = {}
        while not (self._is_closing and not active):
            self._wait_for_loads(active)
            with suppress(queue.Empty):
                while True:
                    task_id, keys, objects = self._loads.get_nowait()
                    load = ObjectLoad(len(keys), time.monotonic(), 0)
                    with _logged("a load"):
                        load = self._objects.load(
                            [object_name(key) for key in keys], [buffer_of(obj, has_format=False) for obj in objects]
                        )
                    active[task_id] = keys, load
            for task_id, (keys, load) in list(active.items()):
                if self._is_closing:
                    load.cancel()
                if load.done():
                    del active[task_id]
                    self._finish_load(task_id, keys, load)

    def _wait_for_loads(self, active: Mapping[int, tuple[list[ObjectKey], ObjectLoad]]) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for _, load in active.values():
            for descriptor in load.filenos():
                poll.register(descriptor, select.POLLIN)
        poll.poll(_POLL_S * 1000 if active else None)  # a deadline passes only when somebody asks
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _finish_load(self, task_id: int, keys: list[ObjectKey], load: ObjectLoad) -> None:
        bitmap = self._bitmap(len(keys))
        with _logged("a load"):
            self._objects.ended(load)
            self._forget([keys[index] for index in load.gone() if keys[index] in self._sizes])
            hits = [index for index, is_hit in enumerate(load.hits()) if is_hit]
            for index in hits:
                bitmap.set(index)
            if hits:
                self._notify_keys_accessed([keys[index] for index in hits])
        with self._lock:
            self._loaded[task_id] = bitmap
        _signal(self._load_fd)

    # What LMCache's accounting knows.

    def _tell_found(self) -> None:
        if not self._is_closing:
            self._tell(set(self._objects.catalog.groups()))

    def _tell(self, groups: set[tuple[Group, int]]) -> None:
        """Have what the volume holds of groups counted, once."""
        with self._lock:
            new = groups - self._told
            self._told |= new
        for group in new:
            self._notices.put(group)

    def _run_notices(self) -> None:
        while (item := self._notices.get()) is not None:
            group, hash_bytes = item
            found: dict[ObjectKey, int] = {}
            with _logged("counting what is there"):
                for chunk_hash, num_bytes in self._objects.listing(group, hash_bytes):
                    found[object_key(group, chunk_hash)] = num_bytes
                    if len(found) >= _TELL_KEYS:
                        self._remember(found)
                        found = {}
                    if self._is_closing:
                        return
                self._remember(found)

    def _remember(self, found: Mapping[ObjectKey, int]) -> None:
        with self._lock:
            new = {key: size for key, size in found.items() if key not in self._sizes}
            self._sizes.update(new)
        if new:
            self._notify_keys_stored(list(new), list(new.values()))

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            sizes = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
        if sizes:
            self._notify_keys_deleted(list(sizes), list(sizes.values()))

    def _note_weights(self, names: Sequence[ObjectName]) -> None:
        """Say once what keeps a model's records from outliving this run."""
        for model in {name.group.model for name in names} - set(self._weights):
            print_ = self._weights[model]
            if print_.reason:
                logger.warning(
                    "Rewarm: %s: what is stored in this run is not found by the next; name its weights in "
                    'adapter_params, like "weights": {"%s": "/models/DIR"}',
                    print_.reason,
                    model,
                )

    def _new_task(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Goes on after an exception, which must end no thread and reach none of LMCache's, and says what it was."""
    try:
        yield
    except Exception:
        logger.exception("Rewarm: %s failed", what)


def _signal(descriptor: int) -> None:
    with suppress(OSError):  # closed meanwhile
        os.eventfd_write(descriptor, 1)
