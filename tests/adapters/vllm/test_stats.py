"""Metrics through vLLM's classes: nothing is lost or counted twice on the way."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from functools import partial
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rewarm.adapters.vllm.stats import RewarmPromMetrics, RewarmStats, observations
from rewarm.metrics import BY_NAME, GAUGE, METRICS, Counters

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LOAD_SECONDS = "rewarm_kv_load_seconds"


def test_ranks_add_up_and_a_reset_empties() -> None:
    ranks = []
    for _ in range(2):
        counters = Counters()
        counters.add("rewarm_kv_loads_total", 3, "hit")
        counters.set("rewarm_volume_records", 7)
        counters.observe(LOAD_SECONDS, 0.25)
        ranks.append(RewarmStats.of(counters.take()))
    total = ranks[0].aggregate(ranks[1])
    assert total.reduce() == {"kv_loads_hit": 6, "kv_load_seconds": 0.5}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


@pytest.mark.parametrize("values", [[0.0131], [0.0001], [45.0], [0.002, 0.3, 0.4, 60.0]])
def test_a_histogram_keeps_its_buckets_and_a_single_value_as_it_was(values: list[float]) -> None:
    counters = Counters()
    for value in values:
        counters.observe(LOAD_SECONDS, value)
    ((_, _, numbers),) = counters.take()
    metric = BY_NAME[LOAD_SECONDS]
    registry = CollectorRegistry()
    rendered = Histogram("h", "h", buckets=metric.buckets, registry=registry)
    for value in observations(metric, numbers):
        rendered.observe(value)
    for index, bound in enumerate(metric.buckets):
        assert registry.get_sample_value("h_bucket", {"le": str(float(bound))}) == sum(numbers[: index + 1])
    assert registry.get_sample_value("h_count") == len(values)
    if len(values) == 1:
        assert registry.get_sample_value("h_sum") == pytest.approx(values[0])


def rendered(root: Path) -> tuple[RewarmPromMetrics, CollectorRegistry]:
    """What a server of one engine makes, in a registry of its own."""
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"roots": [str(root)]}))
    return RewarmPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]}), registry


def test_every_counter_shows_from_the_start_and_a_gauge_once_it_is_known(tmp_path: Path) -> None:
    metrics, registry = rendered(tmp_path)
    engine = {"model_name": "m", "engine": "0"}

    def shown(name: str, labels: tuple[str, ...]) -> float | None:
        suffix = "_count" if BY_NAME[name].buckets else ""
        return registry.get_sample_value(
            name + suffix, {**engine, **dict(zip(BY_NAME[name].labels, labels, strict=True))}
        )

    for metric in METRICS:
        for labels in metric.label_values([str(tmp_path)]):
            assert shown(metric.name, labels) == (None if metric.kind is GAUGE else 0), metric.name
    counters = Counters()
    for metric in METRICS:
        for labels in metric.label_values([str(tmp_path)]):
            {"counter": counters.add, "gauge": counters.set, "histogram": counters.observe}[metric.kind.value](
                metric.name, 3, *labels
            )
    metrics.observe(RewarmStats.of(counters.take()).data)
    for metric in METRICS:
        for labels in metric.label_values([str(tmp_path)]):
            assert shown(metric.name, labels) == (1 if metric.buckets else 3), metric.name


def test_gauges_of_ranks_add_up_where_they_should(tmp_path: Path) -> None:
    metrics, registry = rendered(tmp_path)
    ranks = [Counters(), Counters()]
    for levels in ((5, 7), (2, 0)):
        for rank, level in zip(ranks, levels, strict=True):
            rank.set("rewarm_kv_load_queue_bytes", level)
            metrics.observe(RewarmStats.of(rank.take()).data)
        shown = registry.get_sample_value("rewarm_kv_load_queue_bytes", {"model_name": "m", "engine": "0"})
        assert shown == sum(levels)


def test_a_gauge_of_a_root_that_was_removed_is_shown_no_more_until_it_is_back(tmp_path: Path) -> None:
    metrics, registry = rendered(tmp_path)
    counters = Counters()
    name, engine = "rewarm_root_healthy", {"model_name": "m", "engine": "0"}

    def shown(root: str) -> float | None:
        metrics.observe(RewarmStats.of(counters.take()).data)
        return registry.get_sample_value(name, {**engine, "root": root})

    counters.set(name, 1, "/a")
    counters.set(name, 1, "/b")
    assert (shown("/a"), shown("/b")) == (1, 1)
    counters.forget("/a")
    assert (shown("/a"), shown("/b")) == (None, 1)
    counters.forget("/a")
    assert shown("/a") is None
    counters.set(name, 0, "/a")
    assert shown("/a") == 0


def test_a_configuration_that_will_be_refused_shows_no_roots() -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"no_such_key": 1}))
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    RewarmPromMetrics(config, types, ["engine"], {0: ["0"]})
    assert registry.get_sample_value("rewarm_kv_loads_total", {"engine": "0", "outcome": "hit"}) == 0
