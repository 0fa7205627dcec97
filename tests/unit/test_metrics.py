from __future__ import annotations

import json
import math
import re
import threading

import pytest

from rewarm.metrics import BY_NAME, COUNTER, GAUGE, HISTOGRAM, METRICS, Counters


def test_the_table_keeps_its_own_rules() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"rewarm_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is COUNTER)
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {"key", "request", "request_id"} & set(metric.labels)


def test_counters_gauges_and_histograms_hold_what_they_were_told() -> None:
    counters = Counters()
    counters.add("rewarm_kv_loads_total", 2, "hit")
    counters.add("rewarm_kv_loads_total", 1, "miss")
    counters.add("rewarm_kv_loads_total", 1, "hit")
    counters.set("rewarm_volume_records", 5)
    counters.set("rewarm_volume_records", 4)
    counters.observe("rewarm_kv_load_seconds", 0.001)
    counters.observe("rewarm_kv_load_seconds", 99.0)
    assert counters.value("rewarm_kv_loads_total", "hit") == 3
    assert counters.value("rewarm_kv_loads_total", "damaged") == 0
    assert counters.value("rewarm_volume_records") == 4
    assert counters.value("rewarm_kv_load_seconds") == 2
    numbers = {name: values for name, _, values in counters.samples()}["rewarm_kv_load_seconds"]
    assert (numbers[0], numbers[-2], numbers[-1]) == (1, 1, pytest.approx(99.001))


def test_take_gives_growth_once_and_merge_adds_it_up() -> None:
    rank, server = Counters(), Counters()
    for amount in (1, 2):
        rank.add("rewarm_kv_load_bytes_total", amount)
        rank.observe("rewarm_kv_load_seconds", 0.02)
        rank.set("rewarm_kv_stores_paused", amount - 1)
        server.merge(json.loads(json.dumps(rank.take())))
    assert rank.take() == []
    assert sorted(server.samples()) == sorted(rank.samples())
    rank.set("rewarm_kv_stores_paused", 0)
    server.merge(rank.take())
    assert server.value("rewarm_kv_stores_paused") == 0


def test_a_name_or_kind_or_label_that_the_table_lacks_is_refused() -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        counters.add("rewarm_no_such_total")
    with pytest.raises(ValueError, match="is a gauge"):
        counters.add("rewarm_volume_records")
    with pytest.raises(ValueError, match="labels"):
        counters.add("rewarm_kv_loads_total")
    counters.add("rewarm_kv_loads_total", 1, "hit")
    with pytest.raises(ValueError, match="is a counter"):
        counters.set("rewarm_kv_loads_total", 1, "hit")
    assert counters.value("rewarm_kv_loads_total", "hit") == 1


def test_threads_lose_nothing() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(5_000):
            counters.add("rewarm_kv_load_bytes_total", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert counters.value("rewarm_kv_load_bytes_total") == 20_000


def test_a_gauge_that_adds_up_is_the_sum_over_ranks_and_others_the_newest() -> None:
    ranks, server = [Counters(), Counters()], Counters()
    for levels in ((3, 4), (5, 6), (0, 1)):
        for rank, level in zip(ranks, levels, strict=True):
            rank.set("rewarm_kv_store_queue_bytes", level)
            rank.set("rewarm_volume_records", level)
            server.merge(rank.take())
        assert server.value("rewarm_kv_store_queue_bytes") == sum(levels)
        assert server.value("rewarm_volume_records") == levels[1]


def test_gauges_at_hand_are_refreshed_before_numbers_are_given_out() -> None:
    counters, levels = Counters(), iter(range(1, 9))

    def refresh() -> None:
        counters.set("rewarm_volume_records", next(levels))

    counters.watch(refresh)
    assert counters.take() == [("rewarm_volume_records", (), [1])]
    assert counters.value("rewarm_volume_records") == 2
    assert counters.samples() == [("rewarm_volume_records", (), [3])]
    counters.unwatch(refresh)
    counters.unwatch(refresh)
    assert counters.value("rewarm_volume_records") == 3


def test_gauges_of_what_is_gone_are_told_once_as_nan_until_they_are_set_again() -> None:
    counters, server = Counters(), Counters()
    for root in ("/a", "/b"):
        counters.set("rewarm_root_healthy", 1, root)
        counters.add("rewarm_io_errors_total", 2, root)
    server.merge(counters.take())
    counters.forget("/a")
    told = counters.take()
    assert [(name, labels) for name, labels, _ in told] == [("rewarm_root_healthy", ("/a",))]
    assert math.isnan(told[0][2][0])
    assert counters.take() == []
    server.merge(told)
    assert math.isnan(server.value("rewarm_root_healthy", "/a"))
    assert (server.value("rewarm_root_healthy", "/b"), server.value("rewarm_io_errors_total", "/a")) == (1, 2)
    counters.set("rewarm_root_healthy", 0, "/a")
    assert counters.take() == [("rewarm_root_healthy", ("/a",), [0])]


def test_every_label_but_the_root_has_all_its_values_in_the_table() -> None:
    for metric in METRICS:
        own = [label for label in metric.labels if label != "root"]
        assert len(own) == bool(metric.values), metric.name
        labels = metric.label_values(["/a", "/b"])
        assert len(labels) == len(set(labels)) == (2 if "root" in metric.labels else 1) * max(1, len(metric.values))
        assert all(len(values) == len(metric.labels) for values in labels)
        assert not metric.adds_up or metric.kind is GAUGE
