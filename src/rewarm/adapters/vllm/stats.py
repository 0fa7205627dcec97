"""Rewarm's metrics on their way through vLLM: counted in a rank, added up, rendered where /metrics is served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from rewarm.metrics import BY_NAME, METRICS, Counters, Kind, Metric, Sample

_SAMPLES = "samples"


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
        """One number a metric and label, for vLLM's log line; gauges are left out."""
        counters = Counters()
        counters.merge(self.data.get(_SAMPLES, ()))
        reduced: dict[str, int | float] = {}
        for name, labels, numbers in counters.samples():
            if BY_NAME[name].kind is not Kind.GAUGE:
                number = numbers[-1] if BY_NAME[name].kind is Kind.HISTOGRAM else numbers[0]
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
        for metric in METRICS:
            if not metric.labels:
                for values in per_engine_labelvalues.values():
                    self._metrics[metric.name].labels(*values)  # shows from the start, with 0

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See vLLM's base class."""
        for name, labels, numbers in transfer_stats_data.get(_SAMPLES, ()):
            metric = BY_NAME.get(name)
            if metric is None:
                continue
            cell = self._metrics[name].labels(*self._engine_labels[engine_idx], *labels)
            if metric.kind is Kind.COUNTER:
                cell.inc(numbers[0])
            elif metric.kind is Kind.GAUGE:
                cell.set(numbers[0])
            else:
                for value in observations(metric, numbers):
                    cell.observe(value)


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
