"""The index of a volume of many records: scan at open, look-ups as the server makes them, bytes a record.

A fresh process does each measurement (index_child.py), so that its memory is the index's and its scan is the first.
The records are empty files of the right names: a scan reads names only, which this bench would show if it were not so.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rewarm.bench.cold import ColdCache
from rewarm.bench.report import Figure, measured
from rewarm.engine import alloc_aligned, open_engine
from rewarm.engine.base import EngineConfig
from rewarm.engine.record import record_bytes
from rewarm.errors import StorageError
from rewarm.volume import Volume, create_volume

IDENTITY = {"kind": "bench index"}
PAYLOAD_BYTES = 4096
"""Small, so that a budget for all the records fits any device; the index does not care."""
NUM_LOOKUPS = 1000
_CHILD_LIMIT_S = 300


def index_figures(
    directory: Path, *, num_records: int, rounds: int, cold: ColdCache, step: Callable[[str], None]
) -> list[Figure]:
    """Scan, look-ups and memory of a volume of so many records; the files are made here.

    Args:
        directory: Root of the volume; must not exist.
        num_records: Record names to make.
        rounds: Fresh processes, each after a dropped cache.
        cold: Drops it.
        step: Called after each round.
    """
    make_named_volume(directory, num_records)
    step("names made")
    found = []
    for _ in range(rounds):
        cold.drop([directory / "rewarm.volume"])
        found.append(run_child(directory, num_records))
        step("index")

    def figure(name: str, unit: str, key: str, note: str = "") -> Figure:
        return measured(f"kv.index.{name}", unit, [float(one[key]) for one in found], note=note)

    warmth = "" if cold.as_root else "directory blocks stay cached: only root can drop them"
    return [
        figure("scan", "s", "scan_s", f"{num_records} records, cold; {warmth}".rstrip("; ")),
        figure("lookups_1000", "ms", "lookups_ms", "one call a key, all present; median of 20 in each process"),
        figure("bytes_per_record", "B", "bytes_per_record", "growth of the resident set over the scan"),
        *_file_calls(directory, num_records),
    ]


def make_named_volume(directory: Path, num_records: int) -> None:
    """Create a volume and put empty record files into it, named as one that was stored is named."""
    directory.mkdir(parents=True)
    create_volume([str(directory)], capacity_bytes=2 * num_records * record_bytes(PAYLOAD_BYTES))
    payload = alloc_aligned(PAYLOAD_BYTES)
    engine = open_engine(EngineConfig(kind="pure"))
    try:
        volume = Volume.open([str(directory)], engine=engine)
        namespace = volume.namespace(IDENTITY, payload_bytes=PAYLOAD_BYTES)
        handle = namespace.store([(next(index_keys(1)), payload.address)])
        handle.wait()
        base = directory / namespace.id.hex()
        volume.close()
    finally:
        engine.close()
        payload.close()
    (stored,) = base.rglob("*.rec")
    widths = [len(part) for part in stored.relative_to(base).parts[:-1]]
    made: set[Path] = set()
    for key in index_keys(num_records):
        path = _path_of(base, key.hex(), widths)
        if path.parent not in made:
            made.add(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    os.sync()  # what is not written yet stays in memory, whoever asks to drop it


def _path_of(base: Path, name: str, widths: list[int]) -> Path:
    """A record's path: directories named by the key's first digits, as many as the stored one's had."""
    parts, start = [], 0
    for width in widths:
        parts.append(name[start : start + width])
        start += width
    return base.joinpath(*parts, f"{name}.rec")


def index_keys(count: int) -> Iterator[bytes]:
    """Keys as chunk keys are: sha256 digests."""
    return (hashlib.sha256(f"record {number}".encode()).digest() for number in range(count))


def run_child(directory: Path, num_records: int, mode: str = "measure", *more: Path) -> dict[str, Any]:
    """What index_child found, in a process of its own, on one or more roots; ``returncode`` is its exit status."""
    roots = os.pathsep.join(map(str, (directory, *more)))
    command = [sys.executable, "-m", "rewarm.bench.index_child", roots, str(num_records), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CHILD_LIMIT_S)
    if done.returncode not in {0, -signal.SIGSYS}:
        raise StorageError(f"the index bench's process failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return found | {"returncode": done.returncode}


def _file_calls(directory: Path, num_records: int) -> list[Figure]:
    """1 where a look-up touched the file system, else 0; none where the guard is not seen to work."""
    guarded, control = (run_child(directory, num_records, mode) for mode in ("guarded", "control"))
    if control["returncode"] != -signal.SIGSYS:
        return []
    note = "a thread that dies at any file system call made the look-ups; one that calls stat died"
    touched = float(guarded["returncode"] != 0)
    return [measured("kv.index.lookups_touch_files", "", [touched], note=note)]
