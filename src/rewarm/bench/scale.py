"""``rewarm bench scale``: a volume of very many records on several roots, as a server and as its janitor meet it.

The records are empty files of the right names (index.py says why that is enough). A janitor runs as servers run it, a
process of its own; meanwhile this process plays servers: it stores and touches at fixed rates, and the volume is full,
so that as much is evicted. What a removal of a long file costs the file system is not in the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

from rewarm.bench import environment
from rewarm.bench.cold import ColdCache
from rewarm.bench.index import IDENTITY, NUM_LOOKUPS, PAYLOAD_BYTES, index_keys, run_child
from rewarm.bench.report import Figure, Report, measured
from rewarm.bench.workdir import work_directory
from rewarm.engine.record import record_bytes
from rewarm.errors import StorageError
from rewarm.units import GIB
from rewarm.volume import create_volume
from rewarm.volume.count import recount
from rewarm.volume.janitor.process import JanitorProcess
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import NamespaceFile, RootPaths, identity_id, read_root_file, write_namespace_file
from rewarm.volume.placement import Placement
from rewarm.volume.session import Did, Session
from rewarm.volume.usage import UsageFile, read_usage

_RECORD_BYTES = record_bytes(PAYLOAD_BYTES)
_READY_LIMIT_S = 300.0
_IDLE_SHARE = 0.1
"""CPU use of a janitor that has read all names and waits."""
_FILE_BYTES = 300
"""Of the disk, for the name and inode of an empty file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_records: int = 1_000_000
    num_roots: int = 4
    rounds: int = 3
    """Fresh processes for scan and look-ups."""
    work_s: float = 60.0
    """How long the janitor is watched, at rest and at work."""
    stores_per_s: int = 200
    """Over all roots, and as many evictions; records of 16 MiB would be 3.1 GiB/s."""
    touches_per_s: int = 2000


def run(root: Path, plan: Plan, *, command: str, step: Callable[[str], None] = lambda _: None) -> Report:
    """Measure, in a directory of its own below ``root`` that is removed again.

    Raises:
        StorageError, VolumeFull: ``root`` cannot be used, or has too little room.
    """
    started, start = datetime.now(timezone.utc), time.monotonic()
    conditions = environment.describe(root)
    need_bytes = plan.num_records * _FILE_BYTES + GIB
    with ExitStack() as stack:
        directory = stack.enter_context(
            work_directory(root.resolve(), need_bytes=need_bytes, less="fewer --records need less")
        )
        volume = _NamedVolume(directory, plan)
        volume.fill()
        step("names made")
        figures = _index_figures(volume, plan, step)
        figures += _janitor_figures(volume, plan, step)
        figures.append(_total_memory(figures))
    conditions["loadavg_after"] = list(os.getloadavg())
    return Report(
        command=command,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - start,
        figures=figures,
        environment=conditions,
        notes=[f"{plan.num_records:,} records over {plan.num_roots} roots of one device"],
    )


class _NamedVolume:
    """A volume whose records are names; full but for what a janitor keeps free."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.roots = [directory / f"root{number}" for number in range(plan.num_roots)]
        self._plan = plan
        create_volume([str(root) for root in self.roots], capacity_bytes=plan.num_records * _RECORD_BYTES)
        files = [read_root_file(str(root)) for root in self.roots]
        self._placement = Placement([file.root_id for file in files], [float(file.capacity_bytes) for file in files])
        self._namespace = NamespaceFile(identity_id(IDENTITY), PAYLOAD_BYTES, IDENTITY)
        for root in self.roots:
            write_namespace_file(str(root), self._namespace)
            for digits in range(256):
                (root / self._namespace.id.hex() / f"{digits:02x}").mkdir()

    def fill(self) -> None:
        """Make the names, and count them."""
        for key in index_keys(self._plan.num_records):
            self._touch_file(key)
        os.sync()
        for root in self.roots:
            usage = UsageFile(RootPaths(str(root)).usage)
            recount(RootPaths(str(root)), usage)
            usage.close()

    def store(self, sessions: Sequence[Session], usages: Sequence[UsageFile], keys: Sequence[bytes]) -> None:
        """As servers do: reserve, put the file there, log it."""
        by_root: dict[int, list[bytes]] = {}
        for key in keys:
            by_root.setdefault(self._touch_file(key), []).append(key)
        for number, stored in by_root.items():
            usages[number].reserve(_RECORD_BYTES, len(stored), 1 << 62)
            sessions[number].note(Did.STORED, self._namespace.id, stored)

    def touch(self, sessions: Sequence[Session], keys: Sequence[bytes]) -> None:
        """Log uses."""
        for key in keys:
            sessions[self._placement.order(key)[0]].note(Did.TOUCHED, self._namespace.id, (key,))

    def evicted(self) -> int:
        """Records, over all roots."""
        return sum(read_usage(RootPaths(str(root)).usage).evicted_records for root in self.roots)

    def _touch_file(self, key: bytes) -> int:
        number = self._placement.order(key)[0]
        path = RootPaths(str(self.roots[number])).record(self._namespace.id, key)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        return number


def _index_figures(volume: _NamedVolume, plan: Plan, step: Callable[[str], None]) -> list[Figure]:
    cold, found = ColdCache.detect(), []
    for _ in range(plan.rounds):
        cold.drop([root / "rewarm.volume" for root in volume.roots])
        found.append(run_child(volume.roots[0], plan.num_records, "measure", *volume.roots[1:]))
        step("index")
    warmth = "" if cold.as_root else "; directory blocks stay cached: only root can drop them"

    def figure(name: str, unit: str, key: str, note: str) -> Figure:
        return measured(f"scale.{name}", unit, [float(one[key]) for one in found], note=note)

    calls = f"{NUM_LOOKUPS} keys, one call each; median of 20 in each process"
    return [
        figure("scan", "s", "scan_s", f"cold{warmth}"),
        figure("lookups_1000", "ms", "lookups_ms", f"{calls}; all present"),
        figure("lookups_absent_1000", "ms", "lookups_absent_ms", f"{calls}; none present, so every root is asked"),
        figure("index_bytes_per_record", "B", "bytes_per_record", "of a server: growth of its resident set"),
    ]


def _janitor_figures(volume: _NamedVolume, plan: Plan, step: Callable[[str], None]) -> list[Figure]:
    empty_bytes = _empty_janitor_bytes(volume)
    process = JanitorProcess([str(root) for root in volume.roots])
    try:
        ready_s = _wait_idle(process.pid)
        grown = _resident_bytes(process.pid) - empty_bytes
        step("janitor ready")
        rest = _watch(process.pid, plan.work_s, lambda _second: None)
        step("at rest")
        with ExitStack() as stack:
            sessions = [Session(RootPaths(str(root))) for root in volume.roots]
            usages = [UsageFile(RootPaths(str(root)).usage) for root in volume.roots]
            for session, usage in zip(sessions, usages, strict=True):
                stack.callback(session.close)
                stack.callback(usage.close)
            fresh = index_keys_from(plan.num_records)
            known = index_keys(plan.num_records)
            # Half of what a janitor lets come together before it evicts, so that it does within the time.
            volume.store(sessions, usages, list(islice(fresh, plan.num_records // 200)))
            before = volume.evicted()

            def play(_second: int) -> None:
                volume.store(sessions, usages, list(islice(fresh, plan.stores_per_s)))
                volume.touch(sessions, list(islice(known, plan.touches_per_s)))
                for session in sessions:
                    session.flush()

            work = _watch(process.pid, plan.work_s, play)
        num_evicted = volume.evicted() - before
        step("at work")
        peak = _resident_bytes(process.pid, "VmHWM") - empty_bytes
    finally:
        process.close()
    saved_s = _save_seconds(volume)
    load = f"{plan.stores_per_s} stores and {plan.touches_per_s} uses a second; {num_evicted:,} evicted meanwhile"
    return [
        measured("scale.janitor.ready", "s", [ready_s], note="CPU seconds until names are read and the order is made"),
        measured("scale.janitor.cpu_at_rest", "%", [100 * rest], note=f"of one core, over {plan.work_s:.0f} s"),
        measured("scale.janitor.cpu_at_work", "%", [100 * work], note=f"of one core; {load}"),
        measured("scale.janitor.save", "s", [saved_s], note="CPU seconds to save the order of all roots, each 300 s"),
        measured("scale.janitor.bytes_per_record", "B", [grown / plan.num_records], note="growth of its resident set"),
        measured("scale.janitor.peak_bytes_per_record", "B", [peak / plan.num_records], note="at its highest"),
    ]


def _total_memory(figures: Sequence[Figure]) -> Figure:
    parts = {"scale.index_bytes_per_record", "scale.janitor.bytes_per_record"}
    total = sum(figure.value for figure in figures if figure.name in parts)
    return measured("scale.bytes_per_record", "B", [total], note="the index of one server and the janitor together")


def index_keys_from(begin: int) -> islice[bytes]:
    """Keys that index_keys(begin) has not."""
    return islice(index_keys(1 << 40), begin, None)


def _empty_janitor_bytes(volume: _NamedVolume) -> int:
    """Resident set of a janitor of as many roots without records."""
    places = [root.parent / f"empty{number}" for number, root in enumerate(volume.roots)]
    create_volume([str(place) for place in places], capacity_bytes=GIB)
    process = JanitorProcess([str(place) for place in places])
    try:
        _wait_idle(process.pid)
        return _resident_bytes(process.pid)
    finally:
        process.close()


def _watch(pid: int, seconds: float, play: Callable[[int], None]) -> float:
    """Share of a core that a process uses while ``play`` is called once a second."""
    begin_s, begin_cpu = time.monotonic(), _cpu_seconds(pid)
    second = 0
    while (passed := time.monotonic() - begin_s) < seconds:
        if passed >= second:
            play(second)
            second += 1
        time.sleep(0.02)
    return (_cpu_seconds(pid) - begin_cpu) / (time.monotonic() - begin_s)


def _wait_idle(pid: int) -> float:
    """Wait until a process has nothing more to do; returns its CPU seconds up to then."""
    end = time.monotonic() + _READY_LIMIT_S
    calm, last = 0, _cpu_seconds(pid)
    while calm < 3:
        if time.monotonic() > end:
            raise StorageError(f"the janitor was not done after {_READY_LIMIT_S:.0f} s")
        time.sleep(1.0)
        now = _cpu_seconds(pid)
        calm = calm + 1 if last > 0 and now - last < _IDLE_SHARE else 0
        last = now
    return last


def _save_seconds(volume: _NamedVolume) -> float:
    """CPU time of saving the order of all roots, in this process: once with what changed, less once without."""
    total = 0.0
    for root in volume.roots:
        janitor = RootJanitor(str(root))
        with janitor.alone():
            janitor.prepare()
            janitor.evict(_RECORD_BYTES)
            begin = time.process_time()
            janitor.save_order()
            total += time.process_time() - begin
            janitor.finish()
    return total


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise StorageError(f"the janitor (process {pid}) is gone")
