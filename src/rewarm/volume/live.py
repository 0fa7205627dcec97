"""What each process that stores on a volume says of itself about once a second, for whoever watches.

A small file in its session on every root, all with the same content: any root that answers tells of those that do not.

The page is docs/format/volume-v1.md. Nothing depends on these files: one that is missing or unsound is not shown.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rewarm.engine.checksum import crc32c
from rewarm.errors import DamageError, StorageError
from rewarm.volume.layout import open_regular

if TYPE_CHECKING:
    from rewarm.volume.volume import Volume

_log = logging.getLogger(__name__)

LIVE_FILE = "live"
LIVE_BYTES = 8192
MAX_ROOTS = 32
"""Told of; further roots of a volume are left out."""
_MAGIC = b"RWL1"
_HEAD = struct.Struct("<4sI")
_WHO = struct.Struct("<16sQQdII64s32s")
_NUMBERS = struct.Struct("<14d")
_ROOT = struct.Struct("<16s128s8d")
_SAME_S = 0.5
"""The threads of all roots write what one of them gathered."""
_TRIES = 3
"""A read that falls into a write is torn; the next is not."""


@dataclass(frozen=True, slots=True)
class RootNumbers:
    """Of one root, as one process sees it. Counts are since the process opened the volume."""

    read_bytes: float = 0.0
    """Of records, read and checked."""
    read_s: float = 0.0
    """While one of them at least was being read."""
    written_bytes: float = 0.0
    write_s: float = 0.0
    is_read: float = 0.0
    """1; 0 while the root is left alone (it fails, hangs, or turned much slower), or away."""
    is_written: float = 0.0
    """1; 0 while nothing is stored there, after an error or for want of room."""
    damaged_records: float = 0.0
    io_errors: float = 0.0


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of one process. Counts are since it opened the volume."""

    lookup_tokens: float = 0.0
    """Prompt tokens that were looked up."""
    hit_tokens: float = 0.0
    """Of them, those that were found and asked to be loaded."""
    loaded_records: float = 0.0
    lost_loads: float = 0.0
    """Records that were asked for and computed instead."""
    load_bytes: float = 0.0
    stored_records: float = 0.0
    lost_stores: float = 0.0
    """Records that were dropped, or failed to be written."""
    store_bytes: float = 0.0
    load_queue_bytes: float = 0.0
    """Of loads that are not in place yet."""
    store_queue_bytes: float = 0.0
    """That wait to be written, or are."""
    records: float = 0.0
    """That its index knows."""
    slow_loads: float = 0.0
    evicted_records: float = 0.0
    """By the janitor that it started."""
    is_full: float = 0.0
    """1 while stores are paused because the volume or its disk is full."""


@dataclass(frozen=True, slots=True)
class Live:
    """What one process says."""

    instance: str
    """Of this opening of the volume, 32 hexadecimal digits."""
    pid: int
    """On its host, in its own container."""
    host: str
    title: str
    """What the process calls itself."""
    started_ns: int
    """Unix time of the opening."""
    written_ns: int
    """Unix time of this, by its clock."""
    clock_s: float
    """The same on a clock that only goes forward, for rates."""
    numbers: Numbers
    roots: dict[str, tuple[str, RootNumbers]]
    """root_id -> the path that this process knows it by, its numbers."""


class LiveReport:
    """Gathers what a process says. Thread-safe, no I/O on the volume."""

    def __init__(self, volume: Volume, clock: Callable[[], float] = time.monotonic) -> None:
        self._volume = volume
        self._clock = clock
        self._instance = os.urandom(16).hex()
        self._started_ns = time.time_ns()
        self._lock = threading.Lock()
        self._content = b""
        self._at_s = -math.inf

    def content(self) -> bytes:
        """What to write now, LIVE_BYTES long; empty where that cannot be said."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._at_s >= _SAME_S:
                self._at_s = now_s
                try:
                    self._content = pack(self._gather(now_s))
                except Exception:  # noqa: BLE001 - as the next line says, and it is logged
                    # An exception here would end a thread that stores; what is shown is worth less than that.
                    self._content, self._at_s = b"", math.inf
                    _log.exception("rewarm volume top does not show this process")
            return self._content

    def _gather(self, now_s: float) -> Live:
        sums = {(name, labels): numbers[0] for name, labels, numbers in self._volume.counters.samples()}

        def total(name: str, *labels: str) -> float:
            return sum(sums.get((name, (label,) if label else ()), 0.0) for label in labels or ("",))

        numbers = Numbers(
            lookup_tokens=total("rewarm_kv_lookup_tokens_total"),
            hit_tokens=total("rewarm_kv_hit_tokens_total"),
            loaded_records=total("rewarm_kv_loads_total", "hit"),
            lost_loads=total("rewarm_kv_loads_total", "miss", "damaged", "io_error", "timeout", "cut"),
            load_bytes=total("rewarm_kv_load_bytes_total"),
            stored_records=total("rewarm_kv_stores_total", "stored"),
            lost_stores=total("rewarm_kv_stores_total", "dropped", "failed"),
            store_bytes=total("rewarm_kv_store_bytes_total"),
            load_queue_bytes=total("rewarm_kv_load_queue_bytes"),
            store_queue_bytes=total("rewarm_kv_store_queue_bytes"),
            records=total("rewarm_volume_records"),
            slow_loads=total("rewarm_kv_slow_loads_total"),
            evicted_records=total("rewarm_evicted_records_total"),
            is_full=total("rewarm_kv_stores_paused"),
        )
        roots = {}
        for number, root in list(enumerate(self._volume.roots)):
            if root.is_member:
                flow = self._volume.flow(number)
                told = RootNumbers(
                    read_bytes=flow.num_bytes,
                    read_s=flow.busy_s,
                    written_bytes=total("rewarm_root_written_bytes_total", root.name),
                    write_s=total("rewarm_root_write_seconds_total", root.name),
                    is_read=float(not (root.health.loads.is_on or root.is_away)),
                    is_written=float(not root.health.stores.is_on),
                    damaged_records=total("rewarm_damaged_records_total", root.name),
                    io_errors=total("rewarm_io_errors_total", root.name),
                )
                roots[root.file.root_id] = (root.name, told)
        return Live(
            self._instance,
            os.getpid(),
            os.uname().nodename,
            _own_title(),
            self._started_ns,
            time.time_ns(),
            now_s,
            numbers,
            roots,
        )


def pack(live: Live) -> bytes:
    """The file's bytes."""
    roots = list(live.roots.items())[:MAX_ROOTS]
    body = _WHO.pack(
        bytes.fromhex(live.instance),
        live.written_ns,
        live.started_ns,
        live.clock_s,
        live.pid,
        len(roots),
        _cut(live.host, 64),
        _cut(live.title, 32),
    )
    body += _NUMBERS.pack(*astuple(live.numbers))
    for root_id, (path, numbers) in roots:
        body += _ROOT.pack(bytes.fromhex(root_id), _cut(path, 128), *astuple(numbers))
    body = body.ljust(LIVE_BYTES - _HEAD.size, b"\0")
    return _HEAD.pack(_MAGIC, crc32c(body)) + body


def parse(content: bytes, path: str) -> Live:
    """What a file says.

    Raises:
        DamageError: It is no such file, or not whole.
    """
    if len(content) != LIVE_BYTES:
        raise DamageError(f"{path} has {len(content)} bytes, not {LIVE_BYTES}")
    magic, checksum = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    if magic != _MAGIC:
        raise DamageError(f"{path} is of another kind or release")
    if checksum != crc32c(body):
        raise DamageError(f"{path} does not match its checksum")
    instance, written_ns, started_ns, clock_s, pid, num_roots, host, title = _WHO.unpack_from(body)
    values = _NUMBERS.unpack_from(body, _WHO.size)
    if num_roots > MAX_ROOTS:
        raise DamageError(f"{path} tells of {num_roots} roots, more than {MAX_ROOTS}")
    roots = {}
    all_values = [clock_s, *values]
    for number in range(num_roots):
        root_id, name, *counts = _ROOT.unpack_from(body, _WHO.size + _NUMBERS.size + number * _ROOT.size)
        roots[root_id.hex()] = (_text(name), RootNumbers(*counts))
        all_values += counts
    if not all(math.isfinite(value) and value >= 0 for value in all_values):
        raise DamageError(f"{path} has numbers that are none")
    return Live(
        instance.hex(), pid, _text(host), _text(title), started_ns, written_ns, clock_s, Numbers(*values), roots
    )


def read_live(directory: str) -> Live | None:
    """What the process of a session says; None: nothing yet.

    Raises:
        DamageError: Its file is no such file, or not whole.
        StorageError: It cannot be read.
    """
    path = os.path.join(directory, LIVE_FILE)
    for attempt in range(_TRIES):
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error
        try:
            return parse(os.pread(descriptor, LIVE_BYTES + 1, 0), path)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error
        except DamageError:
            if attempt == _TRIES - 1:
                raise
        finally:
            os.close(descriptor)
    return None


def _own_title() -> str:
    """The name of this process's first thread: servers set it, and it has no arguments, which may hold secrets."""
    try:
        return Path("/proc/self/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cut(text: str, num_bytes: int) -> bytes:
    """The end of a text: of a path, what tells it from others."""
    return os.fsencode(text)[-num_bytes:]


def _text(content: bytes) -> str:
    """Printable, whatever is in the file."""
    text = content.rstrip(b"\0").decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


assert _NUMBERS.size == 8 * len(fields(Numbers))
assert _ROOT.size == 16 + 128 + 8 * len(fields(RootNumbers))
assert _HEAD.size + _WHO.size + _NUMBERS.size + MAX_ROOTS * _ROOT.size <= LIVE_BYTES
