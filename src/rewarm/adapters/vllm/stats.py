"""Rewarm's metrics on their way through vLLM: counted in a rank, added up, rendered where /metrics is served."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from rewarm.config import KvConfig, resolve
from rewarm.errors import RewarmError
from rewarm.metrics import BY_NAME, METRICS, Counters, Kind, Metric, Sample, is_newest
from rewarm.volume.host_tier import host_root
from rewarm.volume.layout import read_root_file

_SAMPLES = "samples"
_DETAILS = ("rewarm_root_", "rewarm_kv_decision_", "rewarm_kv_decisions_ended_")


class RewarmStats(KVConnectorStats):  # type: ignore[misc]
    """Samples of one interval, as plain types under one key of ``data``."""

    data: dict[str, Any]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RewarmStats:
        """From what Counters.take() gave."""
        return cls(data={_SAMPLES: list(samples)})

    def reset(self) -> None:
        """See vLLM's base class."""
        self.data = {_SAMPLES: []}

    def aggregate(self, other: RewarmStats) -> RewarmStats:
        """See vLLM's base class."""
        self.data = {_SAMPLES: [*self.data.get(_SAMPLES, ()), *other.data.get(_SAMPLES, ())]}
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number a metric and label, for vLLM's log line: what is not 0 of counters and histograms, less the
        details of roots and decisions.
        """
        counters = Counters()
        counters.merge(self.data.get(_SAMPLES, ()))
        reduced: dict[str, int | float] = {}
        for name, labels, numbers in counters.samples():
            number = numbers[-1] if BY_NAME[name].kind is Kind.HISTOGRAM else numbers[0]
            if number and BY_NAME[name].kind is not Kind.GAUGE and not name.startswith(_DETAILS):
                key = name.removeprefix("rewarm_").removesuffix("_total")
                reduced["_".join((key, *labels))] = round(number, 3)
        return reduced

    def is_empty(self) -> bool:
        """See vLLM's base class."""
        return not self.data.get(_SAMPLES)


class RewarmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The table rewarm.metrics.METRICS in the registry of the process that serves /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engine_labels = per_engine_labelvalues
        self._metrics = {metric.name: _register(metric, metric_types, labelnames) for metric in METRICS}
        self._totals: dict[tuple[int, str, tuple[str, ...]], float] = {}
        # Counters show from the start, with 0: what first appears with 1 has not grown by Prometheus' rules. A gauge
        # shows once its value is known.
        roots = _roots_of(vllm_config)
        for metric in (one for one in METRICS if one.kind is not Kind.GAUGE):
            for engine, labels in itertools.product(per_engine_labelvalues.values(), metric.label_values(roots)):
                self._metrics[metric.name].labels(*engine, *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See vLLM's base class."""
        for name, labels, numbers in transfer_stats_data.get(_SAMPLES, ()):
            metric = BY_NAME.get(name)
            if metric is None:
                continue
            values = (*self._engine_labels[engine_idx], *labels)
            if metric.kind is Kind.GAUGE and math.isnan(numbers[0]):
                with suppress(KeyError):
                    self._metrics[name].remove(*values)
                continue
            cell = self._metrics[name].labels(*values)
            if metric.kind is Kind.COUNTER:
                cell.inc(numbers[0])
            elif metric.kind is Kind.GAUGE:
                cell.set(self._level(metric, engine_idx, tuple(labels), numbers[0]))
            else:
                for value in observations(metric, numbers):
                    cell.observe(value)

    def _level(self, metric: Metric, engine_idx: int, labels: tuple[str, ...], number: float) -> float:
        """What a gauge stands at; of one that adds up, the number is its growth on one rank."""
        if is_newest(metric):
            return number
        key = (engine_idx, metric.name, labels)
        self._totals[key] = self._totals.get(key, 0) + number
        return self._totals[key]


def _roots_of(vllm_config: Any) -> list[str]:
    """The roots as ranks will name them; none where the configuration is one that they will refuse."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    with suppress(RewarmError):
        kv = resolve(KvConfig, server=extra).config
        roots = [os.path.realpath(root) for root in kv.roots]
        if kv.host_bytes and roots:
            with suppress(RewarmError):
                roots.append(os.path.realpath(host_root(read_root_file(roots[0]).volume_id, kv.host_root)))
        return roots
    return []


def observations(metric: Metric, numbers: Sequence[float]) -> list[float]:
    """Values that fall into the buckets of a histogram's sample and lie as near to its mean as these allow.

    One observation, which is what a step has most often, comes back as it was.
    """
    counts, total = [int(count) for count in numbers[:-1]], numbers[-1]
    mean = total / max(1, sum(counts))
    bounds = (-math.inf, *metric.buckets, math.inf)
    values = []
    for index, count in enumerate(counts):
        # A bucket holds what is above the bound before it, up to and with its own.
        above = math.nextafter(bounds[index], math.inf)
        values += [min(max(mean, above), bounds[index + 1])] * count
    return values


def _register(metric: Metric, metric_types: Mapping[Any, Any], labelnames: list[str]) -> Any:
    names = [*labelnames, *metric.labels]
    if metric.kind is Kind.COUNTER:
        return metric_types[Counter](name=metric.name, documentation=metric.help, labelnames=names)
    if metric.kind is Kind.GAUGE:
        return metric_types[Gauge](
            name=metric.name, documentation=metric.help, labelnames=names, multiprocess_mode="mostrecent"
        )
    return metric_types[Histogram](
        name=metric.name, documentation=metric.help, labelnames=names, buckets=metric.buckets
    )
