"""The look at what servers leave sees those of this test run, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from leftovers import Leftovers

MAKE = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
os.close(descriptor)
print("made", flush=True)
sys.stdin.read()
"""


def wait_for(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)


def child(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def test_what_a_child_leaves_is_seen_and_what_others_make_is_not() -> None:
    mine, kept, others = (Path(f"/dev/shm/rewarm-test-{os.getpid()}-{name}") for name in ("mine", "kept", "others"))
    try:
        leftovers = Leftovers()
        others.write_bytes(b"of another server, which ends before the look")
        first, second = child(mine), child(kept)
        wait_for(lambda: {mine, kept} <= leftovers.seen(), "a look at both")
        first.communicate()
        assert leftovers.left() == [mine], "the other child still has what it made"
        second.communicate()
    finally:
        for path in (mine, kept, others):
            path.unlink(missing_ok=True)
