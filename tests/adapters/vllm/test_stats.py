"""Metrics through vLLM's classes: nothing is lost or counted twice on the way."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from prometheus_client import CollectorRegistry, Histogram

from rewarm.adapters.vllm.stats import RewarmStats, observations
from rewarm.metrics import BY_NAME, Counters

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
