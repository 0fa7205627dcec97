"""Which loads are called slow, and the one line that says where their time went."""

from __future__ import annotations

import logging

import pytest

from rewarm.kv.chunks import LoadTimes, StepReport
from rewarm.kv.policy import Decision, Reason
from rewarm.kv.slow_loads import SAY_EVERY_S, SlowLoads, describe, is_slow

TIMES = LoadTimes((0.1, 1.5, 0.25, 0.05, 0.1), {"a": 3 << 30, "b": 1 << 30})
NAMES = {"a": "/mnt/a", "b": "/mnt/b"}.__getitem__


def decision(load_s: float | None, predicted_load_s: float | None, predicted_compute_s: float | None) -> Decision:
    made = Decision(
        "req-1", 0.0, 0.02, Reason.LOAD_FASTER, 4100, 0, 4096, 4096, 4 << 30, predicted_load_s, predicted_compute_s, 1.0
    )
    made.load_s = load_s
    return made


@pytest.mark.parametrize(
    ("load_s", "predicted_load_s", "predicted_compute_s", "slow"),
    [
        (2.0, 0.9, 5.0, True),
        (2.0, 1.1, 5.0, False),
        (2.0, 1.1, 1.9, True),
        (2.0, None, 1.9, True),
        (0.99, 0.1, 0.1, False),
        (9.0, None, None, False),
        (None, 0.1, 0.1, False),
    ],
)
def test_what_is_slow(
    load_s: float | None, predicted_load_s: float | None, predicted_compute_s: float | None, slow: bool
) -> None:
    assert is_slow(decision(load_s, predicted_load_s, predicted_compute_s)) is slow


def test_the_line_has_all_parts() -> None:
    text = describe(decision(2.0, 0.9, 1.9), TIMES, NAMES)
    assert text == (
        "slow load of request req-1: 2.000 s for 4096 tokens, 4.0 GiB from /mnt/a (3.0 GiB), /mnt/b (1.0 GiB); "
        "seconds: admission 0.020, queue 0.100, read 1.500, copy 0.250, scatter 0.050, step 0.100; "
        "predicted: load 0.900, compute 1.900"
    )
    text = describe(decision(2.0, None, 1.9), LoadTimes(), NAMES)
    assert "0 B from no root" in text
    assert "load unknown" in text


def test_lines_are_bounded_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    slow_loads = SlowLoads(NAMES, lambda: now)
    with caplog.at_level(logging.INFO, "vllm.rewarm"):
        for _ in range(4):
            assert slow_loads.ended(decision(2.0, 0.9, 1.9), TIMES)
        assert not slow_loads.ended(decision(0.5, 0.1, 0.1), TIMES)
        assert len(caplog.records) == 1
        now = SAY_EVERY_S
        assert slow_loads.ended(decision(2.0, 0.9, 1.9), TIMES)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert caplog.messages[1].endswith("; 3 more since the last such line")


def test_ranks_report_the_slower_one_and_the_bytes_of_all() -> None:
    one, other = StepReport(times={"r": TIMES}), StepReport(times={"r": LoadTimes((0.0, 9.0, 0.0, 0.0, 0.0), {"b": 5})})
    one.add(other)
    assert one.times["r"] == LoadTimes((0.0, 9.0, 0.0, 0.0, 0.0), {"a": 3 << 30, "b": (1 << 30) + 5})
