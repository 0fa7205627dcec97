"""In the guest, before the cut: XFS on the logged drive, then stores and evictions until the host pulls the plug.

    load.py SPEC.json

Each phase makes a volume of its own and stores more than it may hold, with the janitor's process beside. After each
acknowledgement a note goes into the drive's last block, behind the file system's end: it needs no flush, and in the
write log it says what had been acknowledged before any cut.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from common import MOUNT, OUT, PAGE_BYTES, answer, identity_of, key_of, payload_of, read_spec, root_of, say, sh

from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.volume import Volume, create_volume
from rewarm.volume.layout import RootPaths
from rewarm.volume.recovery import host_name, write_mark
from rewarm.volume.usage import read_usage

DRIVE, LOOP = Path("/dev/nvme0n1"), Path("/dev/loop0")
STORE_TIMEOUT_S = 120.0


def main() -> None:
    spec = read_spec()
    make_file_system(spec["xfs_bytes"])
    say("file system made")
    notes = Notes(spec["note_at"])
    careless = Careless(MOUNT / "careless", spec["careless_bytes"])
    phases: dict[str, dict[str, Any]] = spec["phases"]
    last = list(phases)[-1]
    for phase, asked in phases.items():
        # A file system that refuses O_DIRECT makes the engine use the page cache; here it is made to.
        with mock.patch.object(os, "O_DIRECT", 0) if asked["page_cache"] else nullcontext():
            store = Store(phase, asked)
            notes.note(phase=phase, **{phase: 0})
            for batch in range(asked["batches"]):
                notes.note(**{phase: store.next_batch()})
                careless.store()
                notes.note(careless=careless.stored)
                if batch % asked["batches_a_mark"] == asked["batches_a_mark"] - 1:
                    write_mark(RootPaths(root_of(phase)), host_name())  # the janitor does it every five minutes
            answer("load", phase=phase, engine=store.engine.name, stored=store.stored, evicted=store.evicted())
            say(f"{phase}: {store.stored} records stored, {store.evicted()} evicted")
            if phase == last:
                (OUT / "cut").touch()
                while True:
                    store.next_batch()
            store.close()


def write_through_loop() -> None:
    """Put the file system on a loop device over the drive.

    QEMU's NVMe drive announces FUA and then forgets it (seen in 7.2: no such flag in the log), which would lose writes
    that the kernel rightly takes for durable. A loop device has no FUA, so that the kernel sends a flush instead.
    """
    sh("losetup", "--direct-io=on", f"--sector-size={PAGE_BYTES}", str(LOOP), str(DRIVE))
    queue = Path("/sys/block/loop0/queue")
    facts = (queue / "fua", queue / "write_cache", queue.parent / "loop/dio")
    found = [path.read_text().strip() for path in facts]
    if found != ["0", "write back", "1"]:
        raise SystemExit(f"loop device is not as needed: fua, write_cache, dio = {found}")


def make_file_system(xfs_bytes: int) -> None:
    write_through_loop()
    # Commit the log and write dirty pages every second or two instead of every thirty, so that a short run meets many.
    # Before the mount: XFS takes the first delay from there.
    Path("/proc/sys/fs/xfs/xfssyncd_centisecs").write_text("100")
    Path("/proc/sys/vm/dirty_writeback_centisecs").write_text("50")
    Path("/proc/sys/vm/dirty_expire_centisecs").write_text("150")
    sh("mkfs.xfs", "-q", "-K", "-d", f"size={xfs_bytes}", str(LOOP))
    sh("mount", "-o", "noatime", str(LOOP), str(MOUNT))


class Notes:
    """What has been acknowledged so far, into the write log."""

    def __init__(self, note_at: int) -> None:
        self.page = mmap.mmap(-1, PAGE_BYTES)
        self.file = os.open(DRIVE, os.O_WRONLY | os.O_DIRECT)
        self.note_at = note_at
        self.said: dict[str, Any] = {}

    def note(self, **acknowledged: Any) -> None:
        self.said |= acknowledged
        self.page[:] = json.dumps(self.said).encode().ljust(PAGE_BYTES)
        os.pwrite(self.file, self.page, self.note_at)


class Careless:
    """The control: through the page cache, renamed, no flush, no checksum. The cuts must tear some of these."""

    def __init__(self, folder: Path, payload_bytes: int) -> None:
        self.folder = folder
        self.payload_bytes = payload_bytes
        folder.mkdir()
        self.stored = 0

    def store(self) -> None:
        key = key_of("careless", self.stored)
        temporary = self.folder / "tmp"
        temporary.write_bytes(payload_of(key, self.payload_bytes))
        temporary.rename(self.folder / key.hex())
        self.stored += 1


class Store:
    """A phase's volume, opened as a server opens it; the oldest records go as its janitor says."""

    def __init__(self, phase: str, asked: dict[str, Any]) -> None:
        self.phase, self.root, self.stored = phase, root_of(phase), 0
        self.payload_bytes: int = asked["payload_bytes"]
        create_volume([self.root], capacity_bytes=asked["capacity_bytes"])
        self.engine = open_engine(EngineConfig(kind=asked["engine"]))
        self.volume = Volume.open([self.root], engine=self.engine, durable=asked["durable"])
        self.namespace = self.volume.namespace(identity_of(phase), payload_bytes=self.payload_bytes)
        self.buffers = [alloc_aligned(-(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES) for _ in range(asked["batch"])]

    def next_batch(self) -> int:
        """Store some records; returns how many there were so far."""
        waiting = []
        for number, buffer in enumerate(self.buffers, self.stored):
            key = key_of(self.phase, number)
            buffer.view[: self.payload_bytes] = payload_of(key, self.payload_bytes)
            waiting.append((key, buffer.address))
        end = time.monotonic() + STORE_TIMEOUT_S
        while waiting:  # what found no room in time is given up, which is right; here the janitor has one slow core
            if time.monotonic() > end:
                raise SystemExit(f"{self.phase}: no room after {STORE_TIMEOUT_S:.0f} s: {read_usage(self.usage_path)}")
            handle = self.namespace.store(waiting)
            handle.wait(STORE_TIMEOUT_S)
            waiting = [each for each, is_stored in zip(waiting, handle.results(), strict=True) if not is_stored]
        self.stored += len(self.buffers)
        return self.stored

    @property
    def usage_path(self) -> str:
        return RootPaths(self.root).usage

    def evicted(self) -> int:
        return read_usage(self.usage_path).evicted_records

    def close(self) -> None:
        self.volume.close()
        self.engine.close()


if __name__ == "__main__":
    main()
