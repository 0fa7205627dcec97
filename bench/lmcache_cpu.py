"""LMCache's own disk tiers and Rewarm's seats, in turn, through LMCache's real classes, on one directory.

    python bench/lmcache_cpu.py DIRECTORY --output bench/results/lmcache-cpu.json

Needs LMCache installed; no accelerator. Arms of LMCache's server: fs and fs_native, each as it comes and with
O_DIRECT, and Rewarm's L2 adapter. Arms of its engine: local disk, as it comes and with O_DIRECT, and Rewarm's plug-in.
Every arm stores the same objects, byte for byte. A turn drops their pages from the page cache, loads, and compares what
came with what was stored. Arms take turns, in an order that rotates.

Then, for each arm: what is found after a restart; what comes of a truncated and of a flipped file; what a full disk
does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmcache
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import LocalCPUBackend, LocalDiskBackend

from rewarm.adapters.lmcache import RewarmBackend
from rewarm.bench.cold import ColdCache
from rewarm.bench.environment import describe
from rewarm.units import GIB, MIB
from rewarm.volume import create_volume

MODEL = "bench/model"
SHAPE = (2, 16, 256, 512)
"""K and V, layers, tokens, heads times head size: 8 MiB of bfloat16, one chunk of 256 tokens."""
OBJECT_BYTES = 2 * 16 * 256 * 512 * 2
BAD = 3
"""Which of 8 objects has a damaged file: what is loaded as a prefix ends before it."""
REQUEST_OBJECTS = 12
AT_ONCE = (1, 4, 16)
WAIT_S = 120.0
FIRST_STORE_WAIT_S = 10.0
"""After that a store of the engine is taken to have failed: local disk never says so."""
FULL_DISK_BYTES = 128 * MIB
VOLUME_ON_FULL_DISK_BYTES = 96 * MIB
OTHERS_BYTES = 80 * MIB
"""What something else then takes of it, so that the disk is full before the volume is."""


def content(number: int) -> torch.Tensor:
    """The bytes of object ``number``: no two are alike, no page of one repeats."""
    words = torch.empty(OBJECT_BYTES // 8, dtype=torch.int64)
    return words.random_(generator=torch.Generator().manual_seed(number)).view(torch.uint8)


class Server:
    """An L2 adapter, driven as LMCache's controllers drive it."""

    family = "server"

    def __init__(self, make: Callable[[], Any]) -> None:
        self.adapter = make()
        self._numbers: dict[int, Any] = {}

    @staticmethod
    def key(number: int) -> ObjectKey:
        return ObjectKey(chunk_hash=number.to_bytes(4, "big") * 8, model_name=MODEL, kv_rank=0x01000100)

    def _run(self, fd: int, tasks: list[int], ask: Callable[[int], Any]) -> list[Any]:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        found: dict[int, Any] = {}
        end = time.monotonic() + WAIT_S
        while len(found) < len(tasks):
            if time.monotonic() > end:
                raise TimeoutError("a task did not end")
            poll.poll(1000)
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            for task in tasks:
                if task not in found and (result := ask(task)) is not None:
                    found[task] = result
        return [found[task] for task in tasks]

    def store(self, numbers: Sequence[int], objects: Sequence[Any]) -> bool:
        task = self.adapter.submit_store_task([self.key(n) for n in numbers], list(objects))
        done: dict[int, Any] = {}

        def ask(wanted: int) -> Any:
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(wanted)

        return bool(self._run(self.adapter.get_store_event_fd(), [task], ask)[0].is_successful())

    def find(self, numbers: Sequence[int]) -> int:
        task = self.adapter.submit_lookup_and_lock_task([self.key(n) for n in numbers], {})
        bitmap = self._run(
            self.adapter.get_lookup_and_lock_event_fd(), [task], self.adapter.query_lookup_and_lock_result
        )[0]
        return sum(bitmap.test(index) for index in range(len(numbers)))

    def load(self, requests: Sequence[Sequence[int]], buffers: Buffers) -> list[list[Any]]:
        """Each request's objects, None where one is a miss."""
        targets = [[buffers.take() for _ in numbers] for numbers in requests]
        tasks = [
            self.adapter.submit_load_task([self.key(n) for n in numbers], some)
            for numbers, some in zip(requests, targets, strict=True)
        ]
        bitmaps = self._run(self.adapter.get_load_event_fd(), tasks, self.adapter.query_load_result)
        return [
            [target if bitmap.test(index) else None for index, target in enumerate(some)]
            for bitmap, some in zip(bitmaps, targets, strict=True)
        ]

    def give_back(self, loaded: Sequence[Sequence[Any]]) -> None:
        """The buffers are the caller's anyway."""

    def close(self) -> None:
        self.adapter.close()


class Buffers:
    """Host memory for a server's objects, as its L1 has it: aligned, allocated once."""

    def __init__(self, count: int) -> None:
        big = torch.empty(count * OBJECT_BYTES + 4096, dtype=torch.uint8)
        self._all = big[-big.data_ptr() % 4096 :][: count * OBJECT_BYTES]
        self._all.zero_()
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def take(self) -> TensorMemoryObj:
        raw = self._all[self._next * OBJECT_BYTES :][:OBJECT_BYTES]
        self._next += 1
        shape = torch.Size(SHAPE)
        meta = MemoryObjMetadata(
            shape=shape,
            dtype=torch.bfloat16,
            address=0,
            phy_size=OBJECT_BYTES,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[shape],
            dtypes=[torch.bfloat16],
        )
        return TensorMemoryObj(raw, meta, None)


class Engine:
    """A storage backend of LMCache's engine, with its CPU backend's memory."""

    family = "engine"

    def __init__(self, make: Callable[[], tuple[Any, Any]]) -> None:
        self.cpu, self.backend = make()

    @staticmethod
    def key(number: int) -> CacheEngineKey:
        return CacheEngineKey(MODEL, 1, 0, number * 2654435761 + 1, torch.bfloat16)

    def allocate(self) -> Any:
        memory_obj = self.cpu.allocate(torch.Size(SHAPE), torch.bfloat16)
        assert memory_obj is not None, "LMCache's memory is too small for this bench"
        return memory_obj

    def store(self, numbers: Sequence[int], objects: Sequence[Any]) -> bool:
        done = threading.Semaphore(0)
        keys = [self.key(n) for n in numbers]
        self.backend.batched_submit_put_task(keys, list(objects), on_complete_callback=lambda _key: done.release())
        stored = sum(done.acquire(timeout=0.2 if index else FIRST_STORE_WAIT_S) for index in range(len(keys)))
        return stored == len(keys)

    def find(self, numbers: Sequence[int]) -> int:
        return sum(self.backend.contains(self.key(n)) for n in numbers)

    def load(self, requests: Sequence[Sequence[int]], _buffers: Buffers) -> list[list[Any]]:
        keys = [[self.key(n) for n in numbers] for numbers in requests]
        if len(keys) == 1:
            return [self.backend.batched_get_blocking(keys[0])]
        with ThreadPoolExecutor(len(keys)) as pool:
            return list(pool.map(self.backend.batched_get_blocking, keys))

    def give_back(self, loaded: Sequence[Sequence[Any]]) -> None:
        for memory_obj in (found for some in loaded for found in some if found is not None):
            memory_obj.ref_count_down()

    def close(self) -> None:
        self.backend.close()


def arms(
    place: Path, loop: asyncio.AbstractEventLoop, cpu_gib: float, volume_bytes: int = 24 * GIB
) -> dict[str, Callable[[], Any]]:
    """Name -> what makes it; each in its own folder of ``place``."""

    def folder(name: str) -> str:
        path = place / name
        path.mkdir(exist_ok=True)
        return str(path)

    def volume(name: str) -> str:
        root = place / name
        if not root.exists():
            create_volume([str(root)], capacity_bytes=volume_bytes)
        return str(root)

    def ours(name: str, **more: Any) -> Any:
        params = {"roots": [volume(name)], "weights": {MODEL: "label:bench"}, **more}
        return create_l2_adapter(PluginL2AdapterConfig("rewarm.adapters.lmcache", "RewarmL2", params))

    cpus: list[Any] = []
    """LMCache's memory, one for all arms: they take turns."""

    def engine(**values: Any) -> tuple[Any, Any, Any]:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=cpu_gib,
            pre_caching_hash_algorithm="sha256_cbor",
            **values,
        )
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(SHAPE[1], SHAPE[0], 256, 8, 64),
            role="worker",
        )
        if not cpus:
            cpus.append(LocalCPUBackend(config, metadata, "cpu"))
        return config, metadata, cpus[0]

    def local_disk(name: str, extra: dict[str, Any]) -> tuple[Any, Any]:
        config, metadata, cpu = engine(local_disk=f"file://{folder(name)}/", max_local_disk_size=24, extra_config=extra)
        return cpu, LocalDiskBackend(config, loop, cpu, "cpu", None, metadata)

    def plug_in(name: str) -> tuple[Any, Any]:
        extra = {"rewarm.roots": [volume(name)], "rewarm.weights": {MODEL: "label:bench"}}
        config, metadata, cpu = engine(extra_config=extra)
        return cpu, RewarmBackend(config=config, metadata=metadata, local_cpu_backend=cpu, loop=loop)

    def fs(name: str, kind: Any, *, use_odirect: bool) -> Any:
        return create_l2_adapter(kind(folder(name), use_odirect=use_odirect))

    return {
        "fs": lambda: Server(lambda: fs("fs", FSL2AdapterConfig, use_odirect=False)),
        "fs, O_DIRECT": lambda: Server(lambda: fs("fs-direct", FSL2AdapterConfig, use_odirect=True)),
        "fs_native": lambda: Server(lambda: fs("native", FSNativeL2AdapterConfig, use_odirect=False)),
        "fs_native, O_DIRECT": lambda: Server(lambda: fs("native-direct", FSNativeL2AdapterConfig, use_odirect=True)),
        "rewarm L2": lambda: Server(lambda: ours("rewarm-l2")),
        "local disk": lambda: Engine(lambda: local_disk("local", {})),
        "local disk, O_DIRECT": lambda: Engine(lambda: local_disk("local-direct", {"use_odirect": True})),
        "rewarm plug-in": lambda: Engine(lambda: plug_in("rewarm-plug-in")),
    }


STOCK = {"server": "fs", "engine": "local disk"}
"""The arm that ratios are taken against: what LMCache does by default."""


def fill(arm: Any, numbers: Sequence[int], buffers: Buffers) -> float:
    """Store objects, a request at a time; seconds until all are stored."""
    seconds = 0.0
    for start in range(0, len(numbers), REQUEST_OBJECTS):
        some = numbers[start : start + REQUEST_OBJECTS]
        buffers.rewind()
        objects = [arm.allocate() if isinstance(arm, Engine) else buffers.take() for _ in some]
        for number, memory_obj in zip(some, objects, strict=True):
            memory_obj.raw_tensor[:OBJECT_BYTES].copy_(content(number))
        started = time.perf_counter()
        assert arm.store(some, objects), "a store failed"
        seconds += time.perf_counter() - started
        if isinstance(arm, Engine):
            for memory_obj in objects:
                memory_obj.ref_count_down()
    return seconds


def wrong_and_missed(loaded: Sequence[Sequence[Any]], requests: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(objects that were handed over as good and are not, objects that were not handed over)."""
    wrong = missed = 0
    for some, numbers in zip(loaded, requests, strict=True):
        for found, number in zip(some, numbers, strict=True):
            if found is None:
                missed += 1
            elif not torch.equal(found.raw_tensor[:OBJECT_BYTES], content(number)):
                wrong += 1
    return wrong, missed


def timed(names: dict[str, Callable[[], Any]], place: Path, turns: int, buffers: Buffers) -> dict[str, Any]:
    """Cold loads of every arm in turn."""
    numbers = list(range(max(AT_ONCE) * REQUEST_OBJECTS))
    cold = ColdCache(as_root=False)  # the machine's other work keeps its cache
    made = {}
    store_s = {}
    for name, make in names.items():
        made[name] = make()
        store_s[name] = fill(made[name], numbers, buffers)
        print(f"stored by {name}: {len(numbers) * OBJECT_BYTES / GIB / store_s[name]:.2f} GiB/s", file=sys.stderr)
    os.sync()
    seconds: dict[str, dict[int, list[float]]] = {name: {count: [] for count in AT_ONCE} for name in names}
    cpu_s: dict[str, dict[int, list[float]]] = {name: {count: [] for count in AT_ONCE} for name in names}
    wrong = dict.fromkeys(names, 0)
    missed = dict.fromkeys(names, 0)
    for count in AT_ONCE:
        for turn in range(turns):
            order = list(names)[turn % len(names) :] + list(names)[: turn % len(names)]
            for name in order:
                first = turn % (max(AT_ONCE) // count) * count
                requests = [
                    numbers[n * REQUEST_OBJECTS : (n + 1) * REQUEST_OBJECTS] for n in range(first, first + count)
                ]
                cold.drop(sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size > MIB))
                buffers.rewind()
                gc.collect()
                before, cpu = time.perf_counter(), time.process_time()
                loaded = made[name].load(requests, buffers)
                seconds[name][count].append(time.perf_counter() - before)
                cpu_s[name][count].append(time.process_time() - cpu)
                some_wrong, some_missed = wrong_and_missed(loaded, requests)
                wrong[name] += some_wrong
                missed[name] += some_missed
                made[name].give_back(loaded)
    family = {name: made[name].family for name in names}
    for arm in made.values():
        arm.close()
    result: dict[str, Any] = {"cold_method": cold.method, "arms": {}}
    for name in names:
        rows = {}
        for count in AT_ONCE:
            took = seconds[name][count]
            stock = seconds[STOCK[family[name]]][count]
            gib = count * REQUEST_OBJECTS * OBJECT_BYTES / GIB
            rows[str(count)] = {
                "seconds": took,
                "gib_s_median": gib / statistics.median(took),
                "times_as_fast_as_stock_median": statistics.median(s / t for s, t in zip(stock, took, strict=True)),
                "cpu_s_per_gib_median": statistics.median(cpu_s[name][count]) / gib,
            }
        result["arms"][name] = {
            "family": family[name],
            "store_gib_s": len(numbers) * OBJECT_BYTES / GIB / store_s[name],
            "at_once": rows,
            "objects_wrong": wrong[name],
            "objects_missed": missed[name],
        }
    return result


def object_files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size >= OBJECT_BYTES)


def faults(make: Callable[[], Any], place: Path, buffers: Buffers) -> dict[str, Any]:
    """Restart, a truncated file, a flipped file: what is found, handed over, and wrong of 8 objects."""
    numbers = list(range(1000, 1008))
    result: dict[str, Any] = {}
    for fault in ("restart", "truncated", "flipped"):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        arm = make()
        fill(arm, numbers[:BAD], buffers)
        before = set(object_files(place))
        fill(arm, numbers[BAD : BAD + 1], buffers)
        (path,) = set(object_files(place)) - before
        fill(arm, numbers[BAD + 1 :], buffers)
        if fault == "restart":
            arm.close()
            arm = make()
        else:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data[: len(data) // 2] if fault == "truncated" else data)
        found = wait_found(arm, numbers) if fault == "restart" else arm.find(numbers)
        try:
            spoil(arm, buffers, len(numbers))
            loaded = arm.load([numbers], buffers)
            wrong, missed = wrong_and_missed(loaded, [numbers])
            arm.give_back(loaded)
            result[fault] = {"found": found, "handed_over": len(numbers) - missed, "wrong": wrong}
        except Exception as error:  # noqa: BLE001 - the finding
            result[fault] = {"found": found, "raised": repr(error)[:200]}
        arm.close()
    return result


def spoil(arm: Any, buffers: Buffers, count: int) -> None:
    """Fill the memory that the next objects are loaded into: what was stored from it must not be taken for loaded."""
    buffers.rewind()
    objects = [arm.allocate() if isinstance(arm, Engine) else buffers.take() for _ in range(count)]
    for memory_obj in objects:
        memory_obj.raw_tensor.fill_(7)
    buffers.rewind()
    if isinstance(arm, Engine):
        arm.give_back([objects])


def wait_found(arm: Any, numbers: Sequence[int]) -> int:
    """What an arm finds once it had a second to look."""
    end = time.monotonic() + 1.0
    while arm.find(numbers) < len(numbers) and time.monotonic() < end:
        time.sleep(0.05)
    return int(arm.find(numbers))


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """A tmpfs that a few objects fill; None where this user may mount none."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_BYTES}", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        yield None
        return
    try:
        yield place
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(place)], check=False)


def full_disk(make: Callable[[], Any], place: Path, buffers: Buffers) -> dict[str, Any]:
    """Twice as many objects as the disk holds: what is said, what is found, what of that is wrong."""
    numbers = list(range(2000, 2012))
    arm = make()
    (place / "others").write_bytes(bytes(OTHERS_BYTES))
    said, raised = 0, ""
    for number in numbers:
        buffers.rewind()
        memory_obj = arm.allocate() if isinstance(arm, Engine) else buffers.take()
        memory_obj.raw_tensor[:OBJECT_BYTES].copy_(content(number))
        try:
            said += arm.store([number], [memory_obj])
        except Exception as error:  # noqa: BLE001 - the finding
            raised = repr(error)[:200]
        if isinstance(arm, Engine):
            memory_obj.ref_count_down()
    found = arm.find(numbers)
    buffers.rewind()
    handed_over = wrong = 0
    for number in numbers:
        loaded = arm.load([[number]], buffers)
        some_wrong, some_missed = wrong_and_missed(loaded, [[number]])
        handed_over += 1 - some_missed
        wrong += some_wrong
        arm.give_back(loaded)
    arm.close()
    whole = OBJECT_BYTES
    sizes = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
    return {
        "stored": len(numbers),
        "said_stored": said,
        "found": found,
        "handed_over": handed_over,
        "wrong": wrong,
        "raised": raised,
        "cut_files_left": sum(MIB < size < whole for size in sizes),
    }


def main() -> int:
    """Run all, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the device to measure; 12 GiB are written below it")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", action="append", help="only these arms")
    asked = parser.parse_args()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    buffers = Buffers(max(AT_ONCE) * REQUEST_OBJECTS)
    cpu_gib = (max(AT_ONCE) * REQUEST_OBJECTS + 8) * OBJECT_BYTES / GIB
    with tempfile.TemporaryDirectory(dir=asked.directory, prefix="rewarm-lmcache-") as scratch:
        place = Path(scratch) / "timed"
        place.mkdir()
        every = arms(place, loop, cpu_gib)
        chosen = {name: every[name] for name in asked.only or every}
        result: dict[str, Any] = {
            "schema": "rewarm.lmcache-cpu/1",
            "environment": describe(place),
            "lmcache": lmcache.__version__,
            "object_bytes": OBJECT_BYTES,
            "request_objects": REQUEST_OBJECTS,
            "turns": asked.turns,
            **timed(chosen, place, asked.turns, buffers),
        }
        result["environment"]["loadavg_after"] = list(os.getloadavg())
        shutil.rmtree(place)
        for name in chosen:
            bad = Path(scratch) / "faults"
            bad.mkdir()
            result["arms"][name]["faults"] = faults(arms(bad, loop, 1.0)[name], bad, buffers)
            shutil.rmtree(bad)
            with small_disk(Path(scratch) / "small") as small:
                if small is not None:
                    result["arms"][name]["full_disk"] = full_disk(
                        arms(small, loop, 1.0, VOLUME_ON_FULL_DISK_BYTES)[name], small, buffers
                    )
            shutil.rmtree(Path(scratch) / "small", ignore_errors=True)
    print(table(result))
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    loop.call_soon_threadsafe(loop.stop)
    return 0


def table(result: dict[str, Any]) -> str:
    """The result as lines of text."""
    lines = ["arm                    GiB/s at 1, 4, 16 at once; times stock; wrong, missed; faults; full disk"]
    for name, arm in result["arms"].items():
        rates = " ".join(f"{arm['at_once'][str(count)]['gib_s_median']:5.2f}" for count in AT_ONCE)
        ratios = " ".join(f"{arm['at_once'][str(count)]['times_as_fast_as_stock_median']:4.2f}x" for count in AT_ONCE)
        wrong = f"{arm['objects_wrong']}, {arm['objects_missed']}"
        lines.append(f"{name:22} {rates}  {ratios}  {wrong}  {arm.get('faults')}  {arm.get('full_disk')}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
