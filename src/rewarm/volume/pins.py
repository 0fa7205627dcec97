"""Records that a janitor never evicts, by name: small files in each root, written by people's commands.

A pin names records by namespace and key, there or not: one that comes later is pinned when it comes. The page is
docs/format/volume-v1.md, ".rewarm/pins".
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rewarm.engine.checksum import crc32c
from rewarm.errors import DamageError, FormatVersionError, RewarmError, StorageError, UsageError
from rewarm.volume.layout import DIR_MODE, RootPaths, read_namespace_file, read_small_file, replace_file

_log = logging.getLogger(__name__)

SUFFIX = ".pin"
MAX_PINS = 1000
MAX_ENTRIES = 1 << 20
"""Records that one pin may name."""
MAX_PINNED = 2 << 20
"""Records that all pins of a root may name: 300 MB in its janitor."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAGIC = b"RWP1"
_START = struct.Struct("<4sII")
_ENTRY_BYTES = 64
_MAX_HEADER_BYTES = 4096
_MAX_FILE_BYTES = _START.size + _MAX_HEADER_BYTES + MAX_ENTRIES * _ENTRY_BYTES
_FORMAT, _VERSION = "rewarm.pin", 1
_HINT = "remove it with `rewarm kv unpin DIR --name NAME`, then pin again; until then it pins nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One file."""

    name: str
    num_tokens: int
    """Of the prompt."""
    num_chunks: int
    """The entries are those of one chunk after the other, the same number each."""
    created_s: float
    """Unix time."""
    until_s: float | None
    """Unix time at which it ends; None: never."""
    entries: Sequence[tuple[bytes, bytes]]
    """(namespace id, key)"""

    def has_ended(self, now_s: float) -> bool:
        """Whether it pins nothing any more."""
        return self.until_s is not None and now_s >= self.until_s


def check_name(name: str) -> str:
    """A pin's name, which is a file's.

    Raises:
        UsageError: It is none.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is no name for a pin", hint="1 to 64 letters, digits, dots, dashes, underscores"
        )
    return name


def write_pin(root: str, pin: Pin) -> None:
    """Put a pin in place of what there is of that name, durably; the janitor heeds it within seconds.

    Raises:
        UsageError: Too many records.
        OSError: It cannot be written.
    """
    if len(pin.entries) > MAX_ENTRIES:
        raise UsageError(
            f"this pin names {len(pin.entries):,} records, more than {MAX_ENTRIES:,}", hint="pin a shorter prompt"
        )
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": pin.name,
        "num_tokens": pin.num_tokens,
        "num_chunks": pin.num_chunks,
        "created_s": pin.created_s,
        "until_s": pin.until_s,
    }
    text = json.dumps(header, allow_nan=False).encode()
    body = len(text).to_bytes(4, "little") + text + b"".join(map(b"".join, pin.entries))
    with suppress(FileExistsError):
        os.mkdir(RootPaths(root).pins, DIR_MODE)
    replace_file(_path(root, pin.name), _MAGIC + crc32c(memoryview(body)).to_bytes(4, "little") + body, durable=True)


def remove_pin(root: str, name: str) -> bool:
    """Take a pin away, whatever the file is; False: there is none."""
    try:
        os.unlink(_path(root, check_name(name)))
    except FileNotFoundError:
        return False
    return True


def read_pin(root: str, name: str) -> Pin:
    """What a pin says.

    Raises:
        UsageError: There is none of that name.
        DamageError: The file is not what write_pin() writes.
        FormatVersionError: A newer Rewarm wrote it.
        StorageError: It cannot be read.
    """
    path = _path(root, name)
    try:
        if os.stat(path, follow_symlinks=False).st_uid not in {os.stat(root).st_uid, os.geteuid()}:
            raise DamageError(f"{path} belongs to another user than the volume", hint=_HINT)
        return _parse(path, name, read_small_file(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        raise UsageError(f"there is no pin {name!r}", hint="rewarm kv pins DIR lists them") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error


def read_pins(root: str) -> tuple[list[Pin], list[RewarmError]]:
    """The pins of a root by name, ended ones among them, and what is wrong with those that cannot be read.

    Raises:
        OSError: The directory cannot be read.
    """
    pins: list[Pin] = []
    wrong: list[RewarmError] = []
    num_pinned = 0
    for name in pin_names(root):
        try:
            pin = read_pin(root, name)
        except RewarmError as error:
            wrong.append(error)
            continue
        num_pinned += len(pin.entries)
        if num_pinned > MAX_PINNED:
            wrong.append(DamageError(f"{root}: more than {MAX_PINNED:,} records are pinned", hint=_HINT))
            break
        pins.append(pin)
    return pins, wrong


def pin_names(root: str) -> list[str]:
    """Names that have a file.

    Raises:
        OSError: The directory cannot be read.
    """
    try:
        files = os.listdir(RootPaths(root).pins)
    except FileNotFoundError:
        return []
    names = (file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))[:MAX_PINS]


@dataclass(frozen=True, slots=True)
class PinState:
    """What of a pin is on the volume."""

    num_chunks_present: int
    """Chunks all of whose records are there, those of ranks that store none left out."""
    present_bytes: int
    whole_bytes: int
    """Of the pin when all of it is there; an upper bound while nothing is, since it is not known which ranks store."""


def pin_state(roots: Sequence[str], pin: Pin) -> PinState:
    """Look which records are there; asks the file system for each."""
    sizes = {place: _record_bytes(roots, place) for place in {place for place, _ in pin.entries}}
    paths = [RootPaths(root) for root in roots]
    is_there = [any(os.path.lexists(one.record(*entry)) for one in paths) for entry in pin.entries]
    per_chunk = len(pin.entries) // max(1, pin.num_chunks)
    slots = [slot for slot in range(per_chunk) if any(is_there[slot::per_chunk])]
    whole = [all(is_there[start + slot] for slot in slots) for start in range(0, len(is_there), per_chunk or 1)]
    present_bytes = sum(sizes[place] for (place, _), there in zip(pin.entries, is_there, strict=True) if there)
    chunk_bytes = sum(sizes[pin.entries[slot][0]] for slot in slots or range(per_chunk))
    return PinState(sum(whole) if slots else 0, present_bytes, chunk_bytes * pin.num_chunks)


def _record_bytes(roots: Sequence[str], namespace_id: bytes) -> int:
    """Of a namespace; 0: nothing describes it."""
    for root in roots:
        with suppress(RewarmError):
            return read_namespace_file(root, namespace_id).record_bytes
    return 0


def copy_pins(roots: Sequence[str], new: str) -> None:
    """Give a root the pins of the others and no more: what it has of its own is from a time when it was no member.

    Raises:
        OSError: They cannot be read or written.
    """
    known: dict[str, Pin] = {}
    for root in roots:
        for pin in read_pins(root)[0]:
            known.setdefault(pin.name, pin)
    for name in pin_names(new):
        if name not in known:
            remove_pin(new, name)
    for pin in known.values():
        write_pin(new, pin)


def pins_of(roots: Sequence[str], namespaces: Collection[bytes]) -> list[str]:
    """Names of the pins that hold now and have records of these namespaces."""
    found = {
        pin.name
        for root in roots
        for pin in read_pins(root)[0]
        if not pin.has_ended(time.time()) and any(place in namespaces for place, _ in pin.entries)
    }
    return sorted(found)


class WatchedPins:
    """The records of a root that are pinned now, read again where a file is another one or a pin has ended."""

    def __init__(self, root: str, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._clock = clock
        self._seen: object = ()
        self._pins: list[Pin] = []
        self._active: list[Pin] = []

    def changed(self) -> Iterable[Pin] | None:
        """The pins that hold now; None: the same as at the last call.

        Raises:
            OSError: The directory cannot be read; those before hold on.
        """
        seen = self._look()
        if seen != self._seen:
            self._pins, wrong = read_pins(self._root)
            self._seen = seen
            for error in wrong:
                _log.warning("%s: %s", self._root, error)
        now_s = self._clock()
        active = [pin for pin in self._pins if not pin.has_ended(now_s)]
        if active == self._active:  # the same objects, where no file changed
            return None
        self._active = active
        return active

    def _look(self) -> object:
        found = []
        for name in pin_names(self._root):
            with suppress(FileNotFoundError):
                stat = os.stat(_path(self._root, name), follow_symlinks=False)
                found.append((name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)


def _path(root: str, name: str) -> str:
    return os.path.join(RootPaths(root).pins, f"{name}{SUFFIX}")


def _parse(path: str, name: str, content: bytes) -> Pin:
    damaged = DamageError(f"{path} is no pin", hint=_HINT)
    if len(content) < _START.size:
        raise damaged
    magic, checksum, header_bytes = _START.unpack_from(content)
    entries = memoryview(content)[_START.size + header_bytes :]
    if magic != _MAGIC or checksum != crc32c(memoryview(content)[8:]) or len(entries) % _ENTRY_BYTES:
        raise damaged
    try:
        header = json.loads(content[_START.size : _START.size + header_bytes])
        version, num_chunks = _count(header["version"]), _count(header["num_chunks"])
        if version > _VERSION:
            raise FormatVersionError(path, found=version, known=_VERSION)
        is_right = (header["format"], version, header["name"]) == (_FORMAT, _VERSION, name)
        if not is_right or len(entries) // _ENTRY_BYTES % max(1, num_chunks):
            raise damaged
        until_s = header["until_s"]
        return Pin(
            name=name,
            num_tokens=_count(header["num_tokens"]),
            num_chunks=num_chunks,
            created_s=_time(header["created_s"]),
            until_s=None if until_s is None else _time(until_s),
            entries=[
                (bytes(entries[at : at + 32]), bytes(entries[at + 32 : at + 64]))
                for at in range(0, len(entries), _ENTRY_BYTES)
            ],
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise damaged from error


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1 << 40:
        raise ValueError("no count")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no time")
    return float(value)
