"""What is learned of storage and of computing, and how it is let go of again."""

from __future__ import annotations

import json
import math
import random

import pytest

from rewarm.kv.rates import PrefillModel, RootRate, StorageRates, pairs_of, rates_from_json, rates_to_json

GB = 1e9


def test_a_root_is_as_fast_as_it_delivers_while_it_is_busy() -> None:
    rate = RootRate()
    assert rate.bytes_a_s == 0
    for _ in range(20):
        rate.observe(0.2 * GB, 0.1)
    assert rate.bytes_a_s == pytest.approx(2 * GB)


def test_loads_that_end_together_do_not_make_a_root_faster() -> None:
    """Two that share it: the first seems to take twice its time, the second none."""
    rate = RootRate()
    for _ in range(10):
        rate.observe(1 * GB, 1.0)
        rate.observe(1 * GB, 1e-9)
    assert rate.bytes_a_s == pytest.approx(2 * GB, rel=0.02)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_root_that_turns_slow_or_fast_is_known_within_a_second(factor: float) -> None:
    rate = RootRate()
    for _ in range(200):
        rate.observe(0.05 * 2 * GB, 0.05)
    seconds = 0.0
    while not 0.75 < rate.bytes_a_s / (2 * GB * factor) < 1.33:
        rate.observe(0.05 * 2 * GB * factor, 0.05)
        seconds += 0.05
        assert seconds < 1.0
    assert seconds < 1.0


def test_a_root_that_delivers_nothing_counts_as_slower_and_slower() -> None:
    rate = RootRate(2 * GB)
    seen = []
    for _ in range(5):
        rate.observe(0, 0.1)
        seen.append(rate.bytes_a_s)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 0.01 * GB


def test_a_root_that_has_delivered_nothing_yet_is_unknown() -> None:
    rate = RootRate()
    for _ in range(3):
        rate.observe(0, 0.1)
    assert rate.bytes_a_s == 0
    for _ in range(20):
        rate.observe(1e8, 0.1)
    assert rate.bytes_a_s > 0.8 * GB


def test_one_odd_window_changes_little() -> None:
    rate = RootRate()
    for _ in range(100):
        rate.observe(0.1 * GB, 0.1)
    rate.observe(0.01 * GB, 0.1)
    assert rate.bytes_a_s == pytest.approx(1 * GB, rel=0.1)


def test_short_loads_change_an_estimate_within_dozens() -> None:
    rate = RootRate()
    for rate_gb, count in ((1.0, 100), (1.8, 30)):
        for _ in range(count):
            rate.observe(0.02 * rate_gb * GB, 0.02)
    assert rate.bytes_a_s == pytest.approx(1.8 * GB, rel=0.08)


def test_a_load_ends_with_the_slowest_root() -> None:
    storage = StorageRates([0.5, 0.5], [4 * GB, 1 * GB])
    assert storage.seconds_a_byte() == pytest.approx(0.5 / GB)
    assert storage.seconds(10_000, 1_000_000) == pytest.approx(5.0, rel=0.01)
    assert storage.seconds(2, 1_000_000) > 2 * 0.5 * 1_000_000 / GB, "both may lie on the slow one"
    assert StorageRates([0.5, 0.5], [4 * GB]).seconds_a_byte() == pytest.approx(0.125 / GB)
    assert StorageRates([0.5, 0.5]).seconds_a_byte() is None
    assert StorageRates([0.5, 0.5]).seconds(10, 100) == 0


def test_a_prefill_is_learned_from_its_steps() -> None:
    truth = (0.01, 5e-5, 2e-9)
    model = PrefillModel()
    assert not model.is_known
    rng = random.Random(1)
    for _ in range(60):
        begin, tokens = rng.choice([0, 4096, 16384, 30000]), rng.randint(64, 4096)
        pairs = pairs_of(begin, begin + tokens)
        model.observe(tokens, pairs, truth[0] + truth[1] * tokens + truth[2] * pairs)
    base, a_token, a_pair = model.coefficients
    assert base == pytest.approx(truth[0], rel=0.05)
    assert a_token == pytest.approx(truth[1], rel=0.05)
    assert a_pair == pytest.approx(truth[2], rel=0.05)
    assert model.seconds(0, 32768) == pytest.approx(truth[1] * 32768 + truth[2] * 32768**2 / 2, rel=0.02)


def test_one_step_is_enough_to_predict_such_steps() -> None:
    model = PrefillModel()
    model.observe(8192, pairs_of(0, 8192), 0.8)
    assert model.is_known
    assert model.seconds(0, 8192) == pytest.approx(0.8, rel=0.02)
    assert model.seconds(8192, 16384) > 0.8, "late tokens are dearer"
    assert all(coefficient >= 0 for coefficient in model.coefficients)


def test_one_step_in_which_something_was_compiled_changes_little() -> None:
    model = PrefillModel()
    for _ in range(10):
        model.observe(4096, pairs_of(0, 4096), 0.4)
    model.observe(4096, pairs_of(0, 4096), 8.0)
    assert model.seconds(0, 4096) == pytest.approx(0.4, rel=0.3)
    first = PrefillModel()
    first.observe(4096, pairs_of(0, 4096), 8.0)
    for _ in range(4):
        first.observe(4096, pairs_of(0, 4096), 0.4)
    assert first.seconds(0, 4096) < 3.0, "where it was the first one it is outvoted"


def test_a_gpu_that_turns_slow_is_followed() -> None:
    model = PrefillModel()
    for factor, count in ((1, 50), (3, 50)):
        for tokens in [2048, 4096] * (count // 2):
            model.observe(tokens, pairs_of(0, tokens), tokens * 1e-4 * factor)
    assert model.seconds(0, 4096) == pytest.approx(4096 * 3e-4, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_no_sequence_of_steps_gives_a_negative_or_endless_prediction(seed: int) -> None:
    rng = random.Random(seed)
    model = PrefillModel()
    for _ in range(rng.randint(1, 30)):
        tokens, begin = rng.randint(1, 20000), rng.randint(0, 100000)
        model.observe(tokens, pairs_of(begin, begin + tokens), 10 ** rng.uniform(-4, 2))
        for end in (1, 1000, 100000):
            assert 0 <= model.seconds(0, end) < math.inf
            assert model.coefficients[0] >= 0


def test_rates_survive_a_restart_and_nonsense_is_no_prior() -> None:
    storage, prefill = StorageRates([0.5, 0.5], [4 * GB, 1 * GB]), PrefillModel()
    for tokens in (512, 4096, 8192):
        prefill.observe(tokens, pairs_of(0, tokens), 0.01 + 1e-4 * tokens)
    kept = json.loads(json.dumps(rates_to_json(storage, prefill)))
    again, learned = rates_from_json([0.5, 0.5], kept)
    assert [root.bytes_a_s for root in again.roots] == pytest.approx([4 * GB, 1 * GB])
    assert learned.seconds(0, 8192) == pytest.approx(prefill.seconds(0, 8192), rel=0.05)
    for nonsense in (
        {},
        {"root_bytes_a_s": "x"},
        {"root_bytes_a_s": [1, -1], "prefill_s": [1, 2]},
        {"prefill_s": None},
    ):
        again, learned = rates_from_json([0.5, 0.5], nonsense)
        assert again.seconds_a_byte() is None
        assert not learned.is_known
    assert rates_from_json([1.0], kept)[0].seconds_a_byte() is None, "a root has come or gone"
    for odd in (math.nan, math.inf, 10**400, -1, 1e-300, None, "x", [], True):
        again, learned = rates_from_json([0.5, 0.5], {**kept, "root_bytes_a_s": [odd, GB]})
        assert [root.bytes_a_s for root in again.roots] == pytest.approx([0, GB]), "it hides no other"
        assert learned.is_known
        again, learned = rates_from_json([0.5, 0.5], {**kept, "prefill_s": [0.01, odd, 0.0]})
        assert not learned.is_known


def test_a_prior_is_corrected_by_what_is_seen() -> None:
    model = PrefillModel((0.0, 1e-3, 0.0))
    assert model.seconds(0, 1000) == pytest.approx(1.0, rel=0.05)
    for _ in range(5):
        for tokens in (1024, 8192):
            model.observe(tokens, pairs_of(0, tokens), tokens * 1e-4)
    assert model.seconds(0, 8192) == pytest.approx(0.8192, rel=0.3)


def test_a_host_tier_is_read_beside_flash() -> None:
    storage = StorageRates([1.0], [1 * GB], 10 * GB)
    for share, seconds in ((0.0, 4.0), (0.5, 2.0), (0.9, 0.4), (1.0, 0.4)):
        assert storage.seconds(4, GB, share) == pytest.approx(seconds), share
        assert storage.weight(share) * 4 == pytest.approx(seconds), "of a long load"
    assert storage.weight(0.95) == pytest.approx(0.095), "memory ends last"
    assert storage.seconds_a_byte() == pytest.approx(1 / GB), "of flash"


def test_an_unknown_host_tier_counts_as_flash_and_unknown_flash_as_the_host_tier() -> None:
    storage = StorageRates([0.5, 0.5], [1 * GB, 1 * GB])
    assert storage.weight(1.0) == 1.0
    assert storage.seconds(8, GB, 1.0) == storage.seconds(8, GB)
    fresh = StorageRates([0.5, 0.5])
    assert fresh.seconds_a_byte() is None
    fresh.host.observe(10 * GB, 1.0)
    assert fresh.seconds_a_byte() == pytest.approx(0.5 / (10 * GB)), "else a server that flash never serves stays blind"
    assert fresh.weight(0.0) == 1.0


def test_the_rate_of_the_host_tier_survives_a_restart() -> None:
    kept = rates_to_json(StorageRates([1.0], [GB], 7 * GB), PrefillModel())
    assert rates_from_json([1.0], kept)[0].host.bytes_a_s == pytest.approx(7 * GB)
    assert "host_bytes_a_s" not in rates_to_json(StorageRates([1.0], [GB]), PrefillModel())
    for nonsense in ("x", None, -1, [7], float("inf"), True):
        assert rates_from_json([1.0], {"host_bytes_a_s": nonsense})[0].host.bytes_a_s == 0
