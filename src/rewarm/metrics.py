"""Every metric that Rewarm keeps, declared once, and the counters that hold them.

Base units, ``_total`` on counters, few labels with few values, never a key or a request. Anything above this module
adds to a Counters; an adapter ships ``take()`` from each rank to where its server's metrics are read and renders
METRICS there. The page docs/reference/metrics.md is made from the table, and each metric has a place on the dashboard,
in scripts/grafana_panels.py.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Kind(Enum):
    """What a metric's numbers mean."""

    COUNTER = "counter"
    """Only grows; adds up over ranks."""
    GAUGE = "gauge"
    """The present value; the newest one counts, or those of all ranks add up. NaN: there is none any more."""
    HISTOGRAM = "histogram"
    """Observations in buckets, with their sum; adds up over ranks."""


COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds: a load of one chunk from local flash takes milliseconds, one of a long context from a slow array many
seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()
    """All that its last label may be; empty: the roots, or it has no label."""
    adds_up: bool = False
    """Of a gauge: the server's is the sum over its ranks."""

    def label_values(self, roots: Sequence[str]) -> list[tuple[str, ...]]:
        """All values that its labels may have on a volume of these roots."""
        of = {"root": tuple(roots)}
        return list(itertools.product(*(of.get(label, self.values) for label in self.labels)))


_EVICTED = "that this server's janitor removed to stay within the capacity; of servers that share a volume one evicts"
_LOAD_OUTCOMES = ("hit", "miss", "damaged", "io_error", "timeout", "cut")
_STORE_OUTCOMES = ("stored", "skipped", "dropped", "failed")
_PROMOTION_OUTCOMES = ("promoted", "skipped", "dropped", "failed")
LOAD_PARTS = ("queue", "read", "copy", "scatter", "step")
"""Labels of rewarm_kv_load_part_seconds, in the order of a load."""
WAYS = ("loads", "stores")
RATIO_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
DECISION_REASONS = (
    "always_load",
    "never",
    "not_stored",
    "unmeasured",
    "load_faster",
    "compute_faster",
    "spread_load",
    "spread_compute",
    "split",
    "probe_load",
    "probe_compute",
    "hold",
    "cut",
)
"""Labels of rewarm_kv_decisions_total; docs/guides/policy.md says what each means."""

METRICS: tuple[Metric, ...] = (
    Metric("rewarm_kv_lookup_tokens_total", COUNTER, "Prompt tokens that were looked up."),
    Metric("rewarm_kv_hit_tokens_total", COUNTER, "Prompt tokens found on the volume and asked to be loaded."),
    Metric(
        "rewarm_kv_loads_total",
        COUNTER,
        f"Records asked for, by outcome: {', '.join(_LOAD_OUTCOMES)} (computed instead).",
        ("outcome",),
        values=_LOAD_OUTCOMES,
    ),
    Metric("rewarm_kv_load_bytes_total", COUNTER, "Payload bytes delivered into the server's KV blocks."),
    Metric(
        "rewarm_kv_load_seconds",
        HISTOGRAM,
        "Time of one request's load, from submit until its last block is in place.",
        buckets=SECONDS_BUCKETS,
    ),
    Metric(
        "rewarm_kv_load_part_seconds",
        HISTOGRAM,
        "The same by part: queue (no I/O of it under way: it waits for workers or the ring), read (and check), copy "
        "(to the device, after the last read), scatter (of the last chunk), step (in place, until the server looks).",
        ("part",),
        SECONDS_BUCKETS,
        LOAD_PARTS,
    ),
    Metric(
        "rewarm_kv_slow_loads_total",
        COUNTER,
        "Loads over 1 s that took twice as long as predicted, or longer than computing was to take; they are logged.",
    ),
    Metric("rewarm_kv_load_queue_bytes", GAUGE, "Bytes of loads under way that are not in place yet.", adds_up=True),
    Metric(
        "rewarm_kv_decisions_total",
        COUNTER,
        "Choices between loading and computing a stored prefix, by reason (guides/policy.md).",
        ("reason",),
        values=DECISION_REASONS,
    ),
    Metric(
        "rewarm_kv_decisions_ended_total",
        COUNTER,
        "Those whose prompt is there by now and whose time was predicted; the next three add up their seconds.",
        ("reason",),
        values=DECISION_REASONS,
    ),
    Metric(
        "rewarm_kv_decision_predicted_seconds_total",
        COUNTER,
        "Seconds until the prompt is there, as predicted for what was chosen.",
        ("reason",),
        values=DECISION_REASONS,
    ),
    Metric(
        "rewarm_kv_decision_compute_seconds_total",
        COUNTER,
        "The same, as predicted for computing all of it.",
        ("reason",),
        values=DECISION_REASONS,
    ),
    Metric("rewarm_kv_decision_actual_seconds_total", COUNTER, "What it took.", ("reason",), values=DECISION_REASONS),
    Metric(
        "rewarm_kv_decision_error_ratio",
        HISTOGRAM,
        "How far off predictions were: the difference to the actual time, over that time.",
        buckets=RATIO_BUCKETS,
    ),
    Metric(
        "rewarm_kv_stores_total",
        COUNTER,
        "Records to be written, by outcome: stored, skipped (there already), dropped (no room in the store buffer "
        "until its request ended, the store budget was spent, or a chunk before it failed), failed.",
        ("outcome",),
        values=_STORE_OUTCOMES,
    ),
    Metric(
        "rewarm_kv_stores_put_off_total",
        COUNTER,
        "Times that a record found no room in the store buffer and was put off to a later step.",
    ),
    Metric("rewarm_kv_store_queue_bytes", GAUGE, "Bytes that wait to be written, or are.", adds_up=True),
    Metric("rewarm_kv_store_bytes_total", COUNTER, "Payload bytes written; the wear of the flash follows from it."),
    Metric("rewarm_kv_stores_paused", GAUGE, "1 while stores are paused because the volume or its disk is full."),
    Metric("rewarm_damaged_records_total", COUNTER, "Records refused because a check did not match.", ("root",)),
    Metric("rewarm_io_errors_total", COUNTER, "I/O errors that the storage reported.", ("root",)),
    Metric(
        "rewarm_root_healthy",
        GAUGE,
        "1 while a root is read from; 0 while it is left alone (it fails, hangs, or turned much slower), or away.",
        ("root",),
    ),
    Metric(
        "rewarm_root_stores_paused",
        GAUGE,
        "1 while nothing is stored on a root, after an error or for want of room.",
        ("root",),
    ),
    Metric(
        "rewarm_root_pauses_total",
        COUNTER,
        "Times that a root began to be left alone, for loads (it fails, hangs, or turned much slower) or for stores.",
        ("root", "way"),
        values=WAYS,
    ),
    Metric(
        "rewarm_root_read_bytes_total",
        COUNTER,
        "Bytes of records that loads read from a root, checked.",
        ("root",),
    ),
    Metric(
        "rewarm_root_read_seconds_total",
        COUNTER,
        "Seconds in which a rank was reading from a root; of several ranks they add up.",
        ("root",),
    ),
    Metric(
        "rewarm_root_read_bytes_per_second",
        GAUGE,
        "What a root delivers while it reads, as the policy estimates it now.",
        ("root",),
    ),
    Metric("rewarm_root_written_bytes_total", COUNTER, "Bytes of records that this server wrote to a root.", ("root",)),
    Metric("rewarm_root_write_seconds_total", COUNTER, "Seconds in which it wrote them.", ("root",)),
    Metric("rewarm_root_used_bytes", GAUGE, "Bytes that a root holds, of all processes and servers.", ("root",)),
    Metric("rewarm_root_capacity_bytes", GAUGE, "Bytes that a root may hold.", ("root",)),
    Metric("rewarm_kv_stores_over_budget_total", COUNTER, "Records not written: kv.store_bytes_per_day was spent."),
    Metric(
        "rewarm_root_store_budget_left_bytes",
        GAUGE,
        "What kv.store_bytes_per_day leaves to be written to a root now; only where it is set.",
        ("root",),
    ),
    Metric(
        "rewarm_root_written_day_bytes",
        GAUGE,
        "Bytes that all processes wrote to a root in the last 24 whole hours and the one that goes on.",
        ("root",),
    ),
    Metric("rewarm_root_dwpd", GAUGE, "Those bytes over the size of the file system: drive writes a day.", ("root",)),
    Metric("rewarm_root_endurance_ratio", GAUGE, "That over kv.dwpd; above 1 the flash wears out early.", ("root",)),
    Metric("rewarm_volume_records", GAUGE, "Records that the index of this process knows."),
    Metric("rewarm_volume_used_bytes", GAUGE, "Bytes that the volume holds, the records of all processes and servers."),
    Metric("rewarm_volume_capacity_bytes", GAUGE, "Bytes that the volume may hold."),
    Metric("rewarm_volume_scan_seconds", GAUGE, "Time that the scan at open took."),
    Metric("rewarm_evicted_records_total", COUNTER, f"Records {_EVICTED}."),
    Metric("rewarm_evicted_bytes_total", COUNTER, f"Bytes of the records {_EVICTED}."),
    Metric(
        "rewarm_evicted_unread_records_total",
        COUNTER,
        "Of these, records that nobody had loaded since they were stored.",
    ),
    Metric(
        "rewarm_janitor_running",
        GAUGE,
        "1 while this server's janitor process runs, which evicts or stands by for the one that does.",
    ),
    Metric(
        "rewarm_host_loads_total",
        COUNTER,
        "Records asked of the host tier, by outcome as above; what is no hit there is read from flash.",
        ("outcome",),
        values=_LOAD_OUTCOMES[:-1],
    ),
    Metric(
        "rewarm_host_promotions_total",
        COUNTER,
        "Records that were read from flash and were to be copied into the host tier, by outcome: promoted, skipped "
        "(there already, or the tier takes none now), dropped (too many waited), failed.",
        ("outcome",),
        values=_PROMOTION_OUTCOMES,
    ),
    Metric("rewarm_host_records", GAUGE, "Records in the host tier that this process knows."),
    Metric("rewarm_host_evicted_records_total", COUNTER, f"Records of the host tier {_EVICTED}."),
    Metric("rewarm_host_evicted_bytes_total", COUNTER, f"Bytes of the records of the host tier {_EVICTED}."),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def is_newest(metric: Metric) -> bool:
    """Whether the newest number counts, and nothing adds up."""
    return metric.kind is GAUGE and not metric.adds_up


Sample: TypeAlias = "tuple[str, tuple[str, ...], list[float]]"
"""(metric name, label values, numbers): one number for a counter or gauge; for a histogram the counts of each bucket
and of what lies above the last, then the sum. Plain types, so that it passes through any transport."""


class Counters:
    """The numbers of one process. Thread-safe.

    Raises:
        KeyError: A name that the table lacks.
        ValueError: Another kind, or another number of labels, than the table says.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self._taken: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self._watchers: list[Callable[[], None]] = []

    def watch(self, refresh: Callable[[], None]) -> None:
        """Call this before numbers are given out: it sets gauges that are always at hand, and does no I/O."""
        self._watchers.append(refresh)

    def unwatch(self, refresh: Callable[[], None]) -> None:
        """Call it no more; one that was never given is no error."""
        self._watchers = [watcher for watcher in self._watchers if watcher != refresh]

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter."""
        cell = self._cell(name, labels, COUNTER)
        with self._lock:
            cell[0] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        cell = self._cell(name, labels, GAUGE)
        with self._lock:
            cell[0] = value

    def forget(self, label: str) -> None:
        """What has this label is no more: its gauges have no value from now on, until they are set again."""
        with self._lock:
            for (name, labels), cell in self._values.items():
                if label in labels and BY_NAME[name].kind is GAUGE:
                    cell[0] = math.nan

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add an observation to a histogram."""
        cell = self._cell(name, labels, HISTOGRAM)
        bucket = bisect.bisect_left(BY_NAME[name].buckets, value)
        with self._lock:
            cell[bucket] += 1
            cell[-1] += value

    def value(self, name: str, *labels: str) -> float:
        """The present value of a counter or gauge; of a histogram, the number of observations."""
        self._refresh()
        with self._lock:
            numbers = self._values.get((name, labels), [0])
            return sum(numbers[:-1]) if BY_NAME[name].kind is HISTOGRAM else numbers[0]

    def samples(self) -> list[Sample]:
        """Everything, since the start."""
        self._refresh()
        with self._lock:
            return [(name, labels, list(numbers)) for (name, labels), numbers in self._values.items()]

    def take(self) -> list[Sample]:
        """What changed since the last take: growth of counters, histograms and gauges that add up; values of others."""
        self._refresh()
        changes: list[Sample] = []
        with self._lock:
            for key, numbers in self._values.items():
                before = self._taken.get(key)
                if numbers == before:  # by identity first: a NaN is told once
                    continue
                self._taken[key] = list(numbers)
                if before is None or is_newest(BY_NAME[key[0]]):
                    changes.append((*key, list(numbers)))
                else:
                    changes.append((*key, [now - then for now, then in zip(numbers, before, strict=True)]))
        return changes

    def merge(self, samples: Iterable[tuple[str, Sequence[str], Sequence[float]]]) -> None:
        """Add what another process took; gauges that do not add up are overwritten."""
        for name, labels, numbers in samples:
            kind = BY_NAME[name].kind
            cell = self._cell(name, tuple(labels), kind)
            is_new = is_newest(BY_NAME[name])
            with self._lock:
                for index, number in enumerate(numbers):
                    cell[index] = number if is_new else cell[index] + number

    def _refresh(self) -> None:
        for refresh in self._watchers:
            refresh()

    def _cell(self, name: str, labels: tuple[str, ...], kind: Kind) -> list[float]:
        cell = self._values.get((name, labels))
        if cell is not None and BY_NAME[name].kind is kind:
            return cell
        metric = BY_NAME[name]
        if metric.kind is not kind or len(metric.labels) != len(labels):
            raise ValueError(f"{name} is a {metric.kind.value} with labels {metric.labels}")
        width = len(metric.buckets) + 2 if kind is HISTOGRAM else 1
        with self._lock:
            return self._values.setdefault((name, labels), [0] * width)
