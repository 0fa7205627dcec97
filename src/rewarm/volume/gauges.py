"""What an open volume tells of itself in metrics."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rewarm.metrics import WAYS
from rewarm.volume.open_root import Root, device_bytes
from rewarm.volume.usage import read_usage
from rewarm.volume.wear import DAY_HOURS, read_wear

if TYPE_CHECKING:
    from rewarm.volume.janitor.process import JanitorProcess
    from rewarm.volume.volume import Volume


class Gauges:
    """Of one volume; each method may be called by any thread."""

    def __init__(self, volume: Volume, rated_dwpd: float) -> None:
        """
        Args:
            volume: Whose counters are set.
            rated_dwpd: Drive writes a day that its flash is rated for; 0: not known.
        """
        self._volume = volume
        self._counters = volume.counters
        self._rated_dwpd = rated_dwpd
        self._lock = threading.Lock()
        """Held while gauges of roots are set: those of a root that is forgotten meanwhile stay so."""
        self._used_bytes: dict[str, int] = {}
        self._pauses: dict[tuple[str, str], int] = {}
        self._away: set[str] = set()

    def at_hand(self) -> None:
        """What is in memory: also of a volume that is only read, and while a root hangs. No I/O."""
        volume, counters = self._volume, self._counters
        counters.set("rewarm_volume_records", volume.num_records)
        counters.set("rewarm_volume_capacity_bytes", volume.capacity_bytes)
        if not volume.read_only:
            counters.set("rewarm_kv_stores_paused", float(volume.is_full))
        with self._lock:
            self._note_away(set(volume.away))
            for root in [root for root in volume.roots if root.is_member]:
                counters.set("rewarm_root_capacity_bytes", root.file.capacity_bytes, root.name)
                is_read = not (root.health.loads.is_on or root.is_away)
                counters.set("rewarm_root_healthy", float(is_read), root.name)
                counters.set("rewarm_root_stores_paused", float(root.health.stores.is_on), root.name)
                for way, pause in zip(WAYS, (root.health.loads, root.health.stores), strict=True):
                    count, counted = pause.count, self._pauses.get((root.name, way), 0)
                    self._pauses[root.name, way] = count
                    counters.add("rewarm_root_pauses_total", max(0, count - counted), root.name, way)

    def _note_away(self, away: set[str]) -> None:
        """Say of roots that were named and are not there that they serve nothing."""
        for path in self._away - away:
            self._counters.forget(path)
        for path in away:
            self._counters.set("rewarm_root_healthy", 0.0, path)
        self._away = away

    def look_at(self, number: int) -> None:
        """Of one root that is written to, what its files say."""
        root, now_s = self._volume.roots[number], time.time()
        usage, wear = read_usage(root.paths.usage), read_wear(root.paths.wear)
        self._volume.note_wear(number, wear, now_s)
        written = wear.written_since(DAY_HOURS, now_s)
        gauges: dict[str, float] = {}
        if usage.is_known:
            gauges["rewarm_root_used_bytes"] = usage.used_bytes
        with suppress(OSError):  # away, and no store has met that yet: the thread that counts goes on
            dwpd = written / device_bytes(root.name)
            gauges |= {"rewarm_root_written_day_bytes": written, "rewarm_root_dwpd": dwpd}
            if budget := self._volume.store_budget_bytes(number):
                gauges["rewarm_root_store_budget_left_bytes"] = max(0, budget - written)
            if self._rated_dwpd:
                gauges["rewarm_root_endurance_ratio"] = dwpd / self._rated_dwpd
        with self._lock:
            if root.is_member:
                for name, value in gauges.items():
                    self._counters.set(name, value, root.name)
                if usage.is_known:
                    self._used_bytes[root.name] = usage.used_bytes
                self._counters.set("rewarm_volume_used_bytes", sum(self._used_bytes.values()))

    def forget(self, root: Root) -> None:
        """A root was removed from the volume."""
        with self._lock:
            self._used_bytes.pop(root.name, None)
            self._counters.forget(root.name)
            self._counters.set("rewarm_volume_used_bytes", sum(self._used_bytes.values()))

    def evicted(self, janitor: JanitorProcess) -> None:
        """What the own child evicted: of all the processes of a volume, one counts each record."""
        records, num_bytes, unread = janitor.take_evicted()
        self._counters.add("rewarm_evicted_records_total", records)
        self._counters.add("rewarm_evicted_bytes_total", num_bytes)
        self._counters.add("rewarm_evicted_unread_records_total", unread)
