"""One process of the index bench: ``python -m rewarm.bench.index_child ROOT[:ROOT...] NUM_RECORDS MODE``.

Modes: ``measure`` prints scan, look-ups and memory; ``guarded`` makes the look-ups on a thread that may not touch the
file system; ``control`` does the same and then calls stat on that thread, which must end the process (SIGSYS).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from statistics import median

from rewarm.bench.index import IDENTITY, NUM_LOOKUPS, PAYLOAD_BYTES, index_keys
from rewarm.bench.no_file_calls import forbid_file_calls
from rewarm.engine import open_engine
from rewarm.engine.base import EngineConfig
from rewarm.errors import UnsupportedError
from rewarm.volume import Namespace, Volume

_SCAN_LIMIT_S = 240.0
_REPEATS = 20


def main(roots: str, num_records: int, mode: str) -> int:
    """Do one mode's work and print what was found as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    engine = open_engine(EngineConfig())
    before = _resident_bytes()
    start = time.perf_counter()
    volume = Volume.open(roots.split(os.pathsep), engine=engine, janitor=False)
    namespace = volume.namespace(IDENTITY, payload_bytes=PAYLOAD_BYTES)
    if not volume.wait_scanned(_SCAN_LIMIT_S):
        raise TimeoutError(f"scan not done after {_SCAN_LIMIT_S} s")
    scan_s = time.perf_counter() - start
    grown = _resident_bytes() - before
    keys = _spread_keys(num_records)
    absent = list(islice(index_keys(num_records + NUM_LOOKUPS), num_records, None))
    if mode == "measure":
        found: dict[str, object] = {
            "scan_s": scan_s,
            "bytes_per_record": grown / num_records,
            "lookups_ms": median(_time_lookups(namespace, keys) for _ in range(_REPEATS)) * 1000,
            "lookups_absent_ms": median(_time_lookups(namespace, absent, 0) for _ in range(_REPEATS)) * 1000,
            "engine": engine.name,
        }
    else:
        found = _guarded(namespace, keys, touch_a_file=mode == "control")
    print(json.dumps(found))  # noqa: T201 - the parent reads it
    volume.close()
    engine.close()
    return 0


def _spread_keys(num_records: int) -> list[bytes]:
    """NUM_LOOKUPS keys from all over the volume."""
    return list(islice(index_keys(num_records), 0, None, max(1, num_records // NUM_LOOKUPS)))[:NUM_LOOKUPS]


def _time_lookups(namespace: Namespace, keys: list[bytes], num_there: int = NUM_LOOKUPS) -> float:
    """Seconds of one call a key, as vLLM makes them."""
    contains = namespace.contains
    present = 0
    start = time.perf_counter()
    for key in keys:
        if contains(key):
            present += 1
    seconds = time.perf_counter() - start
    if present != num_there:
        raise AssertionError(f"{present} of {len(keys)} keys were found")
    return seconds


def _guarded(namespace: Namespace, keys: list[bytes], *, touch_a_file: bool) -> dict[str, object]:
    reasons: list[str] = []

    def look_up() -> None:
        try:
            forbid_file_calls()
        except UnsupportedError as problem:
            reasons.append(problem.message)
            return
        _time_lookups(namespace, keys)
        if touch_a_file:
            Path("/").exists()

    thread = threading.Thread(target=look_up)
    thread.start()
    thread.join()
    return {"reason": reasons[0] if reasons else ""}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
