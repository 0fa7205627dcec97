"""Small volumes for tests: keys and payloads that follow from a number, an engine, and waits with a time limit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rewarm.engine import Engine, EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import ToMemory
from rewarm.units import round_up
from rewarm.volume import Namespace, Outcome, Volume
from rewarm.volume.layout import RootPaths

KIB, MIB = 1024, 1024 * 1024
PAYLOAD_BYTES = 60 * KIB
RECORD_BYTES = 64 * KIB
IDENTITY = {"model": "tiny", "dtype": "float32", "block_tokens": 16}


def key(number: int) -> bytes:
    """The key of a number."""
    return hashlib.sha256(b"key %d" % number).digest()


def payload(number: int, num_bytes: int = PAYLOAD_BYTES) -> bytes:
    """The bytes that belong to a number."""
    return hashlib.shake_128(b"payload %d" % number).digest(num_bytes)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
    """Look until it holds; fails after the time limit and says what it waited for."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for: {what}"
        time.sleep(0.01)


class Bench:
    """Opens volumes and closes what it opened."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or open_engine(EngineConfig(ring_bytes=4 * MIB, slot_bytes=MIB))
        self._volumes: list[Volume] = []

    def open(self, *roots: str, janitor: bool = False, **options: Any) -> Volume:
        """A volume, without a janitor where none is asked for."""
        volume = Volume.open(roots, engine=self.engine, janitor=janitor, **options)
        self._volumes.append(volume)
        return volume

    def close(self) -> None:
        """All of it."""
        for volume in self._volumes:
            volume.close()
        self.engine.close()


def namespace_of(volume: Volume, payload_bytes: int = PAYLOAD_BYTES, **more: Any) -> Namespace:
    """The usual namespace, scanned."""
    namespace = volume.namespace({**IDENTITY, **more}, payload_bytes=payload_bytes)
    assert namespace.wait_scanned(30)
    return namespace


def store(namespace: Namespace, numbers: Sequence[int], timeout_s: float = 60.0) -> list[bool]:
    """Store the records of these numbers as one request."""
    if not numbers:
        return []
    step = round_up(namespace.payload_bytes, 4096)
    buffer = alloc_aligned(step * len(numbers))
    items = []
    for position, number in enumerate(numbers):
        at = position * step
        buffer.view[at : at + namespace.payload_bytes] = payload(number, namespace.payload_bytes)
        items.append((key(number), buffer.address + at))
    handle = namespace.store(items)
    assert handle.wait(timeout_s), "the store did not end"
    buffer.close()
    return handle.results()


def load(namespace: Namespace, numbers: Sequence[int], timeout_s: float = 60.0) -> list[Outcome]:
    """Load them and compare every byte of a HIT with what belongs to its number."""
    if not numbers:
        return []
    step = round_up(namespace.payload_bytes, 4096)
    buffer = alloc_aligned(step * len(numbers))
    handle = namespace.load([(key(n), ToMemory(buffer.address + i * step)) for i, n in enumerate(numbers)])
    assert handle.wait(timeout_s), "the load did not end"
    outcomes = handle.results()
    for position, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
        if outcome is Outcome.HIT:
            found = bytes(buffer.view[position * step :][: namespace.payload_bytes])
            assert found == payload(number, namespace.payload_bytes), f"wrong bytes of {number}"
    buffer.close()
    return outcomes


def record_path(root: str, namespace: Namespace, number: int) -> Path:
    """Where the record of a number lies."""
    return Path(RootPaths(root).record(namespace.id, key(number)))


def record_files(root: str) -> list[Path]:
    """All records of a root."""
    return sorted(path for path in Path(root).glob("*/*/*.rec") if path.parts[-3] != ".rewarm")


def record_sizes(root: str) -> int:
    """Bytes of all record files that are there now, while others come and go."""
    total = 0
    for path in record_files(root):
        with suppress(FileNotFoundError):
            total += os.stat(path).st_size
    return total


def tree(root: str) -> dict[str, tuple[str, bytes]]:
    """Everything below a directory: kind and content; to see that nothing was changed."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.fsencode(os.readlink(path)))
        elif path.is_file():
            found[name] = ("file", path.read_bytes())
        else:
            found[name] = ("directory" if path.is_dir() else "other", b"")
    return found


def mounted(place: Path, options: str) -> Callable[[], None] | None:
    """Mount a small tmpfs; returns how to unmount it, None where this user or container may not mount."""
    place.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        return None
    return lambda: subprocess.run(["umount", "-l", str(place)], check=False) and None
