"""What is known of loads is old when it is heard: what they have brought since is estimated."""

from __future__ import annotations

import math

import pytest

from rewarm.kv.costs import Costs
from rewarm.kv.policy import PrefixHit
from rewarm.kv.rates import PrefillModel, StorageRates
from rewarm.kv.underway import Ask, Underway

CHUNK_TOKENS, CHUNK_BYTES = 256, 64 << 20
TOKEN_S, CHUNK_S = 1e-4, 0.01
PACE = CHUNK_S / CHUNK_BYTES


class Rig:
    """A server that is told of by hand, with loads of 10 ms a chunk."""

    def __init__(self) -> None:
        self.now = 1000.0
        costs = Costs(
            storage=StorageRates([1.0], [1 / PACE]),
            prefill=PrefillModel((0.0, TOKEN_S, 0.0)),
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
            step_tokens=8192,
        )
        self.underway = Underway(costs, lambda: self.now)

    def order(self, name: str, num_chunks: int) -> Ask:
        tokens = num_chunks * CHUNK_TOKENS
        ask = Ask(PrefixHit(name, tokens + 16, 0, tokens, num_chunks), self.now)
        self.underway.order(ask, tokens)
        return ask

    def left(self) -> list[float]:
        return [chunks for _, chunks in self.underway.loads(PACE)]


def test_what_loads_have_brought_since_a_report_is_estimated_in_their_order() -> None:
    rig = Rig()
    rig.order("a", 10)
    rig.order("b", 10)
    assert rig.left() == [10, 10]
    rig.underway.begin_step(1, [("x", 0, 8192)])
    rig.now += 0.05
    assert rig.left() == pytest.approx([5, 10])
    rig.now += 0.07
    assert rig.left() == pytest.approx([0, 8])
    rig.now += 9.0
    assert rig.left() == [0, 0], "nobody has said so, but they should have ended"
    assert rig.underway.storage_s(PACE) == 0


def test_a_report_is_of_the_time_when_it_was_made() -> None:
    rig = Rig()
    ask = rig.order("a", 100)
    rig.underway.begin_step(1, [("x", 0, 8192)])
    rig.now += 0.8
    ask.chunks_left = 98  # as of 20 ms after the order
    rig.underway.end_step(1, 1000.02)
    assert rig.left() == pytest.approx([20])
    assert rig.underway.storage_s(PACE) == pytest.approx(0.2)


@pytest.mark.parametrize(("told_at", "left"), [(math.inf, 98), (1e9, 98), (0.0, 18), (-math.inf, 18)])
def test_a_report_of_another_clock_is_no_older_than_its_step_and_no_younger_than_now(
    told_at: float, left: float
) -> None:
    rig = Rig()
    ask = rig.order("a", 100)
    rig.underway.begin_step(1, [("x", 0, 8192)])
    rig.now += 0.8
    ask.chunks_left = 98
    rig.underway.end_step(1, told_at)
    assert rig.left() == pytest.approx([left])


def test_a_load_behind_a_running_step_begins_when_that_has_ended() -> None:
    rig = Rig()
    rig.underway.begin_step(1, [("x", 0, 8192)])
    rig.now += 0.1
    ask = rig.order("a", 10)
    later = rig.order("b", 10)
    rig.underway.begin_step(2, [])
    rig.now += 0.2
    assert rig.left() == [10, 10], "not a chunk can be in place"
    ends = dict(zip("ab", (ready_s for _, ready_s in rig.underway.load_ends_s(PACE)), strict=True))
    assert ends == pytest.approx({"a": 0.5192 + 0.1, "b": 0.5192 + 0.2}, abs=5e-3)
    rig.now += 0.6
    rig.underway.end_step(1, 1000.0)
    assert ask.behind == later.behind == 0
    rig.now += 0.05
    assert rig.left() == pytest.approx([5, 10])


def test_a_step_that_computes_no_prompt_holds_no_load_up() -> None:
    rig = Rig()
    rig.underway.begin_step(1, [])
    rig.order("a", 10)
    rig.now += 0.05
    assert rig.left() == pytest.approx([5])


def test_steps_that_never_told_their_end_are_forgotten() -> None:
    rig = Rig()
    for step in (1, 2, 3):
        rig.underway.begin_step(step, [("x", 0, 8192)])
    assert rig.underway.steps_s() == pytest.approx(3 * 0.8192, rel=0.01)
    assert rig.underway.steps_s(2) == pytest.approx(2 * 0.8192, rel=0.01)
    rig.now += 0.8
    assert rig.underway.end_step(3, math.inf) is not None
    assert rig.underway.steps_s() == 0
    assert rig.underway.end_step(2, math.inf) is None
