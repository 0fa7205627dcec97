"""In the guest, after the cut: mount each rebuilt drive, open the volumes on it, and ask for all that was ever stored.

    check.py SPEC.json

What a file holds is judged here by the bytes that were stored, beside what the volume makes of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import MOUNT, PAGE_BYTES, answer, identity_of, key_of, payload_of, read_spec, root_of, say, sh

from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import Engine, ToMemory
from rewarm.engine.record import parse_header
from rewarm.errors import DamageError, FormatVersionError
from rewarm.volume import Outcome, Volume
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths, key_of_name
from rewarm.volume.recovery import boot_id, host_name, read_mark
from rewarm.volume.usage import read_usage
from rewarm.volume.verify import verify_volume

BATCH = 16
SCAN_TIMEOUT_S = LOAD_TIMEOUT_S = 120.0
MORE = 64
"""Records beyond the last one of a phase: stored while the host pulled the plug, or never."""


def main() -> None:
    spec = read_spec()
    engine = open_engine(EngineConfig(kind=spec["engine"]))
    for number, device in sorted(drives().items()):
        sh("mount", "-o", "noatime", str(device), str(MOUNT))
        volumes = {phase: Check(phase, asked, engine).all() for phase, asked in spec["phases"].items()}
        answer("check", drive=number, careless=check_careless(spec), volumes=volumes)
        sh("umount", str(MOUNT))
        say(f"drive {number} checked")
    engine.close()


def drives() -> dict[int, Path]:
    """Namespace number -> device; the kernel's own numbering may differ."""
    return {int((path / "nsid").read_text()): Path("/dev") / path.name for path in Path("/sys/block").glob("nvme*n*")}


def check_careless(spec: dict[str, Any]) -> Counter[str]:
    """What is left of the files that were written without any care."""
    found: Counter[str] = Counter()
    for number in range(sum(asked["batches"] for asked in spec["phases"].values())):
        key = key_of("careless", number)
        try:
            payload = (MOUNT / "careless" / key.hex()).read_bytes()
        except FileNotFoundError:
            continue
        found["whole" if payload == payload_of(key, spec["careless_bytes"]) else "torn" if payload else "empty"] += 1
    return found


class Check:
    """One phase's volume on one drive."""

    def __init__(self, phase: str, asked: dict[str, Any], engine: Engine) -> None:
        self.phase, self.engine = phase, engine
        self.paths = RootPaths(root_of(phase))
        self.payload_bytes: int = asked["payload_bytes"]
        self.keys = [key_of(phase, number) for number in range(asked["batches"] * asked["batch"] + MORE)]
        padded_bytes = -(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES
        self.buffers = [alloc_aligned(padded_bytes) for _ in range(BATCH)]

    def all(self) -> dict[str, Any]:
        """What was found; ``error`` says which step did not work."""
        found: dict[str, Any] = {"is_there": Path(self.paths.root).exists(), "hits": [], "error": ""}
        if found["is_there"]:
            for step in (self.look, self.ask, self.tidy, self.verify, self.use):
                found["error"] = _error_of(step, found)
                if found["error"]:
                    break
        for buffer in self.buffers:
            buffer.close()
        return found

    def look(self, found: dict[str, Any]) -> None:
        """The files as the cut left them, before any of the volume's code sees them."""
        files: Counter[str] = Counter()
        self.whole = set()
        for path in sorted(Path(self.paths.root).glob("*/??/*.rec")):
            key = key_of_name(path.name)
            assert key is not None
            content = path.read_bytes()
            is_whole = _has_header(content, key) and content[PAGE_BYTES:][: self.payload_bytes] == payload_of(
                key, self.payload_bytes
            )
            files["whole" if is_whole else "damaged" if content else "empty"] += 1
            if is_whole:
                self.whole.add(key)
        found["files_before"] = files

    def ask(self, found: dict[str, Any]) -> None:
        """Open the volume as a server does, and load every record that was ever stored."""
        mark = read_mark(self.paths, host_name())
        volume = Volume.open([self.paths.root], engine=self.engine, janitor=False)
        after = read_mark(self.paths, host_name())
        found["mark_before"] = "none" if mark is None else "damaged" if not mark.boot_id else "earlier boot"
        found["is_recovered"] = (
            after is not None and after.boot_id == boot_id() and (mark is None or mark.boot_id != after.boot_id)
        )
        namespace = volume.namespace(identity_of(self.phase), payload_bytes=self.payload_bytes)
        if not volume.wait_scanned(SCAN_TIMEOUT_S):
            raise TimeoutError("the namespace was not scanned")
        counts: Counter[str] = Counter(wrong=0, present_but_missed=0, whole_but_missed=0)
        for first in range(0, len(self.keys), BATCH):
            keys = self.keys[first : first + BATCH]
            were_present = [namespace.contains(key) for key in keys]
            handle = namespace.load(
                [(key, ToMemory(buffer.address)) for key, buffer in zip(keys, self.buffers, strict=False)]
            )
            if not handle.wait(LOAD_TIMEOUT_S):
                raise TimeoutError("a load did not end")
            for position, outcome in enumerate(handle.results()):
                key = keys[position]
                if outcome is Outcome.HIT:
                    found["hits"].append(first + position)
                    served = bytes(self.buffers[position].view[: self.payload_bytes])
                    counts["wrong"] += served != payload_of(key, self.payload_bytes)
                else:
                    counts["present_but_missed"] += were_present[position]
                    counts["whole_but_missed"] += key in self.whole
        volume.close()
        found |= counts

    def tidy(self, found: dict[str, Any]) -> None:
        """A round of the janitor: what dead processes left goes, and the budget is what the directories hold."""
        janitor = RootJanitor(self.paths.root)
        with janitor.alone() as is_alone:
            if not is_alone:
                raise RuntimeError("somebody holds the janitor's lock")
            janitor.prepare()
            janitor.step()
            janitor.finish()
        root = Path(self.paths.root)
        names = [*os.listdir(self.paths.sessions), *(n for n in os.listdir(self.paths.state) if n.endswith(".tmp"))]
        found["leftovers"] = names
        found["budget_off_bytes"] = read_usage(self.paths.usage).used_bytes - sum(
            path.stat().st_size for pattern in ("*/??/*.rec", ".rewarm/quarantine/*") for path in root.glob(pattern)
        )

    def verify(self, found: dict[str, Any]) -> None:
        """Read every record of the volume, as `rewarm volume verify` does."""
        report = verify_volume([self.paths.root])
        bad = [*report.damaged, *report.unreadable, *report.skipped]
        found |= {"verified": report.num_records, "damaged_after": len(bad)}

    def use(self, found: dict[str, Any]) -> None:
        """Store a record that was never there, and load it."""
        key, buffer = key_of(f"{self.phase} afterwards", 0), self.buffers[0]
        volume = Volume.open([self.paths.root], engine=self.engine, janitor=False)
        namespace = volume.namespace(identity_of(self.phase), payload_bytes=self.payload_bytes)
        buffer.view[: self.payload_bytes] = payload_of(key, self.payload_bytes)
        stored = namespace.store([(key, buffer.address)])
        stored.wait(LOAD_TIMEOUT_S)
        loaded = namespace.load([(key, ToMemory(self.buffers[1].address))])
        loaded.wait(LOAD_TIMEOUT_S)
        found["works_on"] = stored.results() == [True] and loaded.results() == [Outcome.HIT]
        volume.close()


def _error_of(step: Callable[[dict[str, Any]], None], found: dict[str, Any]) -> str:
    """How a step failed; empty when it did not."""
    try:
        step(found)
    except Exception as error:  # noqa: BLE001 - one volume that fails must not hide the others
        return f"{step.__name__}: {type(error).__name__}: {error}"
    return ""


def _has_header(content: bytes, key: bytes) -> bool:
    try:
        return parse_header(content[:PAGE_BYTES]).key == key
    except (DamageError, FormatVersionError):
        return False


if __name__ == "__main__":
    main()
