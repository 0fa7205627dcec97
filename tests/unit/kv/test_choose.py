"""The load policy by itself, its clock in the test's hand."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from rewarm.kv.choose import CUT_GAIN, GROUP_S, GROUP_SHARE, PROBE_AFTER_S, QUIET_SHARE, LoadPolicy
from rewarm.kv.costs import LOAD_OVERHEAD_S, Costs
from rewarm.kv.policy import PrefixHit, Reason
from rewarm.kv.rates import PrefillModel, StorageRates

CHUNK_TOKENS, CHUNK_BYTES = 256, 64 << 20
TOKEN_S = 1e-4
"""A chunk computes in 25.6 ms."""


class Rig:
    """A policy that knows a storage of so many seconds a chunk, and a GPU of TOKEN_S a token."""

    def __init__(self, name: str = "auto", *, chunk_s: float = 0.01, is_known: bool = True, **more: int) -> None:
        self.now = 1000.0
        rates = [CHUNK_BYTES / chunk_s] if is_known else []
        self.costs = Costs(
            storage=StorageRates([1.0], rates),
            prefill=PrefillModel((0.0, TOKEN_S, 0.0) if is_known else ()),
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
            step_tokens=8192,
        )
        self.policy = LoadPolicy(name, self.costs, clock=lambda: self.now, **more)
        self.chunk_s = chunk_s
        self.step = 0

    def hit(
        self, name: str, num_chunks: int = 64, *, extra: int = 16, resident: int = 0, prefix: bytes = b""
    ) -> PrefixHit:
        tokens = num_chunks * CHUNK_TOKENS
        return PrefixHit(
            name, tokens + extra, resident, tokens - resident, num_chunks - resident // CHUNK_TOKENS, prefix
        )

    def ask(self, hit: PrefixHit, *, is_new: bool = False) -> int | None:
        """A new request may be held back for others that come with it; others have waited for longer than that."""
        if not is_new:
            self.policy.learn(hit)
            self.now += GROUP_S
        answer = self.policy.decide(hit)
        if answer is not None:
            self.policy.ordered(hit, answer)
        return answer

    def run_step(self, seconds: float, parts: list[tuple[str, int, int]] | None = None) -> None:
        self.step += 1
        self.policy.step_begun(self.step, parts or [])
        self.now += seconds
        self.policy.step_ended(self.step)

    def compute(self, hit: PrefixHit, begin: int = 0, seconds: float | None = None) -> None:
        """A step that ends a prompt."""
        tokens = hit.num_request_tokens - begin
        self.run_step(
            tokens * TOKEN_S if seconds is None else seconds, [(hit.request_id, begin, hit.num_request_tokens)]
        )

    def deliver(self, name: str, num_chunks: float, seconds: float) -> None:
        self.policy.moved(0, num_chunks * CHUNK_BYTES, seconds)
        self.policy.loaded(name, num_chunks)

    def reasons(self) -> list[Reason]:
        return [reason for reason, _ in self.policy.made]


@pytest.mark.parametrize(
    ("chunk_s", "loads", "reason"), [(0.01, True, Reason.LOAD_FASTER), (0.1, False, Reason.COMPUTE_FASTER)]
)
def test_a_single_request_takes_the_faster_lane(chunk_s: float, loads: bool, reason: Reason) -> None:
    rig = Rig(chunk_s=chunk_s)
    hit = rig.hit("a")
    assert rig.ask(hit) == (hit.num_stored_tokens if loads else 0)
    ((made, decision),) = rig.policy.made
    assert made is reason
    assert decision is not None
    assert decision.predicted_load_s == pytest.approx(64 * chunk_s + LOAD_OVERHEAD_S, rel=0.02)
    assert decision.predicted_compute_s == pytest.approx(hit.num_request_tokens * TOKEN_S, rel=0.05)
    assert decision.predicted_s == min(decision.predicted_load_s, decision.predicted_compute_s)


@pytest.mark.parametrize(("name", "loads"), [("always_load", True), ("never", False)])
def test_the_fixed_policies_do_as_they_are_called_and_predict_all_the_same(name: str, loads: bool) -> None:
    for is_known in (True, False):
        rig = Rig(name, chunk_s=0.1 if loads else 0.001, is_known=is_known)
        for number in range(5):
            hit = rig.hit(str(number))
            assert rig.ask(hit) == (hit.num_stored_tokens if loads else 0)
        assert rig.reasons() == [Reason(name)] * 5
        assert all((one.predicted_s is not None) is is_known for _, one in rig.policy.made if one)
        assert rig.policy.to_cut() == []


def test_what_is_not_stored_is_computed() -> None:
    rig = Rig()
    assert rig.ask(PrefixHit("a", 1000, 0, 0, 0)) == 0
    assert rig.reasons() == [Reason.NOT_STORED]


def test_a_decision_ends_with_what_it_took() -> None:
    rig = Rig()
    hit = rig.hit("a")
    rig.ask(hit)
    rig.run_step(0.66)
    rig.deliver("a", 64, 0.64)
    rig.policy.load_ended("a", hit.num_stored_tokens)
    rig.run_step(0.02, [("a", hit.num_stored_tokens, hit.num_request_tokens)])
    (decision,) = rig.policy.ended
    assert decision.load_s == pytest.approx(0.66)
    assert decision.actual_s == pytest.approx(0.68)
    assert decision.load_bytes == 64 * CHUNK_BYTES
    assert abs(decision.predicted_s - decision.actual_s) < 0.05 * decision.actual_s  # type: ignore[operator]


def test_several_requests_use_both_lanes_and_loads_are_ordered_first() -> None:
    rig = Rig(chunk_s=0.03)
    hits = [rig.hit(name) for name in "abcd"]
    for hit in hits:
        rig.policy.learn(hit)
    answers = {hit.request_id: rig.ask(hit) for hit in hits}
    held = [name for name, answer in answers.items() if answer is None]
    loaded = [name for name, answer in answers.items() if answer]
    assert loaded
    assert held
    # In the next pass those that were held are computed: never twice in a row while nothing is computed.
    rig.run_step(0.001)
    again = {hit.request_id: rig.ask(hit) for hit in hits if hit.request_id in held}
    assert None not in again.values()
    assert 0 in again.values()


def test_nothing_waits_while_nothing_loads() -> None:
    """Whatever comes in whatever order: a pass in which every answer is None leaves something loading or computing."""
    rng = random.Random(7)
    for _ in range(300):
        rig = Rig(chunk_s=10 ** rng.uniform(-3, 0), is_known=rng.random() < 0.8)
        waiting = [rig.hit(str(n), rng.randint(1, 100), extra=rng.randint(1, 5000)) for n in range(rng.randint(1, 8))]
        for hit in waiting:
            if rng.random() < 0.7:
                rig.policy.learn(hit)
        active = 0
        for _ in range(3):
            answers = [rig.ask(hit) for hit in waiting]
            active += sum(answer is not None for answer in answers)
            waiting = [hit for hit, answer in zip(waiting, answers, strict=True) if answer is None]
            assert active
            rig.run_step(0.001)


def test_requests_that_share_a_prefix_count_as_one_load() -> None:
    rig = Rig(chunk_s=0.02)
    for name in "abcdef":
        rig.policy.learn(rig.hit(name, prefix=b"document"))
    assert rig.ask(rig.hit("a", prefix=b"document")) == 64 * CHUNK_TOKENS


def test_a_load_that_turns_slow_is_cut_and_its_prefix_is_kept() -> None:
    rig = Rig(chunk_s=0.01)
    hit = rig.hit("a")
    assert rig.ask(hit)
    rig.run_step(0.1)
    rig.deliver("a", 10, 0.1)
    assert rig.policy.to_cut() == []
    cuts: list[str] = []
    for _ in range(100):
        rig.run_step(0.05)
        rig.deliver("a", 0.25, 0.05)  # 20 times slower than before
        cuts = rig.policy.to_cut()
        if cuts:
            break
    assert cuts == ["a"]
    assert rig.now < 1000.0 + 1.0, "within a second"
    assert rig.policy.to_cut() == [], "named once"
    rig.policy.load_ended("a", 10 * CHUNK_TOKENS)
    assert rig.reasons()[-1] is Reason.CUT
    rig.compute(hit, 10 * CHUNK_TOKENS)
    (decision,) = rig.policy.ended
    assert decision.was_cut


def test_what_was_cut_with_nothing_in_place_is_computed() -> None:
    rig = Rig(chunk_s=0.01)
    hit = rig.hit("a")
    assert rig.ask(hit)
    for _ in range(20):
        rig.run_step(0.05)
        rig.policy.moved(0, 0, 0.05)
    assert rig.policy.to_cut() == ["a"]
    rig.policy.load_ended("a", 0)
    assert rig.ask(hit) == 0


def test_a_load_that_is_nearly_done_is_not_cut() -> None:
    rig = Rig(chunk_s=0.02)
    hit = rig.hit("a")
    assert rig.ask(hit)
    for _ in range(60):
        rig.run_step(0.022 + 0.02 * CUT_GAIN / 2)
        rig.deliver("a", 1, 0.02 * (1 + CUT_GAIN / 2))
        assert rig.policy.to_cut() == []


def test_lanes_that_are_equal_do_not_make_it_flap() -> None:
    rng = random.Random(3)
    rig = Rig(chunk_s=(16400 * TOKEN_S - LOAD_OVERHEAD_S) / 64)
    answers = []
    for number in range(50):
        hit = rig.hit(str(number))
        loads = bool(rig.ask(hit))
        if rig.reasons()[-1] not in (Reason.PROBE_LOAD, Reason.PROBE_COMPUTE):
            answers.append(loads)
        noise = rng.uniform(0.99, 1.01)
        if loads:
            rig.run_step(rig.chunk_s * 64 * noise)
            rig.deliver(hit.request_id, 64, rig.chunk_s * 64 * noise)
            rig.policy.load_ended(hit.request_id, hit.num_stored_tokens)
            rig.compute(hit, hit.num_stored_tokens)
        else:
            rig.compute(hit, 0, hit.num_request_tokens * TOKEN_S * noise)
    assert len(answers) > 40
    assert sum(a != b for a, b in itertools.pairwise(answers)) <= 1


def test_a_storage_that_healed_is_found_by_probes_that_cost_next_to_nothing() -> None:
    rig = Rig(chunk_s=0.25)  # ten times slower than computing; in truth it is fast again
    loaded_at = None
    spent = 0.0
    for number in range(400):
        hit = rig.hit(str(number))
        tokens = rig.ask(hit)
        assert tokens is not None
        chunks = tokens // CHUNK_TOKENS
        if rig.reasons()[-1] is Reason.PROBE_LOAD:
            spent += LOAD_OVERHEAD_S + chunks * 0.25
        elif tokens:
            loaded_at = rig.now
            break
        if chunks:
            rig.run_step(chunks * 0.005)
            rig.deliver(hit.request_id, chunks, chunks * 0.005)
            rig.policy.load_ended(hit.request_id, tokens)
        rig.compute(hit, tokens)
    assert loaded_at is not None
    assert loaded_at - 1000.0 > PROBE_AFTER_S
    assert spent <= 0.02 * (loaded_at - 1000.0)


def test_without_any_knowledge_one_request_goes_each_way_and_the_others_wait_for_what_they_tell() -> None:
    rig = Rig(is_known=False)
    hits = [rig.hit(name) for name in "abc"]
    assert rig.ask(hits[0]) == hits[0].num_stored_tokens
    assert rig.ask(hits[1]) == 0
    assert rig.ask(hits[2]) is None
    rig.run_step(0.8, [("b", 0, 8192)])
    rig.deliver("a", 32, 0.8)
    assert rig.ask(hits[2]) is not None
    assert rig.reasons()[:3] == [Reason.UNMEASURED, Reason.UNMEASURED, Reason.HOLD]


def test_a_server_that_forgets_requests_leaves_nothing_behind() -> None:
    rig = Rig(chunk_s=0.03)
    for number in range(200):
        hit = rig.hit(str(number))
        rig.policy.learn(hit)
        if number % 3:
            rig.ask(hit)
        if number % 5 == 0:
            rig.policy.load_ended(hit.request_id, 0)
        rig.policy.forget(hit.request_id)
        rig.policy.forget("never heard of")
    assert not rig.policy._waiting
    assert not rig.policy._active
    assert not rig.policy._answers


def test_a_request_that_ends_with_its_prompt_has_an_outcome_too() -> None:
    rig = Rig(chunk_s=1.0)
    hit = rig.hit("a")
    assert rig.ask(hit) == 0
    rig.policy.step_begun(1, [("a", 0, hit.num_request_tokens)])
    rig.now += 1.6
    rig.policy.forget("a")
    rig.policy.step_ended(1)
    (decision,) = rig.policy.ended
    assert decision.actual_s == pytest.approx(1.6)


def test_a_request_that_was_preempted_is_asked_for_again() -> None:
    rig = Rig(chunk_s=0.01)
    hit = rig.hit("a")
    assert rig.ask(hit)
    assert rig.ask(rig.hit("a", 70)) == 70 * CHUNK_TOKENS


def test_a_step_with_next_to_no_tokens_left_takes_no_new_prompt() -> None:
    rig = Rig(chunk_s=9.0, prefill_limit=8192 - 64)
    assert rig.ask(rig.hit("a")) == 0
    assert rig.ask(rig.hit("b", 62)) is None
    rig.compute(rig.hit("a"))
    assert rig.ask(rig.hit("b", 62)) == 0


def test_what_a_load_costs_besides_its_bytes_is_learned_from_those_that_were_alone() -> None:
    rig = Rig(chunk_s=0.01)
    for number in range(30):
        hit = rig.hit(str(number), 4)
        assert rig.ask(hit) == hit.num_stored_tokens
        rig.run_step(0.04 + 0.002)
        rig.deliver(hit.request_id, 4, 0.04)
        rig.policy.load_ended(hit.request_id, hit.num_stored_tokens)
        rig.compute(hit, hit.num_stored_tokens)
    assert rig.costs.overhead_s == pytest.approx(0.002, rel=0.1)
    first, second = rig.hit("x", 4), rig.hit("y", 4)
    for hit in (first, second):
        rig.ask(hit)
    rig.run_step(0.5)
    for hit in (first, second):
        rig.policy.load_ended(hit.request_id, hit.num_stored_tokens)
    assert rig.costs.overhead_s == pytest.approx(0.002, rel=0.1)


def test_a_request_that_was_held_back_is_asked_for_without_delay() -> None:
    rig = Rig(chunk_s=0.03)
    hits = [rig.hit(name) for name in "abcd"]
    for hit in hits:
        rig.policy.learn(hit)
    assert None in [rig.ask(hit) for hit in hits]
    assert rig.policy.is_hurried
    rig.run_step(0.001)
    assert not rig.policy.is_hurried


def test_compute_is_probed_only_where_that_costs_next_to_nothing() -> None:
    rig = Rig(chunk_s=0.01)
    for number in range(100):
        hit = rig.hit(str(number))
        assert rig.ask(hit) == hit.num_stored_tokens
        rig.run_step(0.65)
        rig.deliver(hit.request_id, 64, 0.64)
        rig.policy.load_ended(hit.request_id, hit.num_stored_tokens)
        rig.compute(hit, hit.num_stored_tokens)
    assert Reason.PROBE_COMPUTE not in rig.reasons()


def test_long_requests_that_come_with_others_are_decided_with_them() -> None:
    """The first of them would take all tokens of some steps, and the loads of the others would begin after that."""
    rig = Rig(chunk_s=0.03)
    hits = [rig.hit(name) for name in "abcd"]
    answers: dict[str, int | None] = {}

    def ask_all(hits: list[PrefixHit]) -> None:
        for hit in hits:
            if answers.get(hit.request_id) is None:
                answers[hit.request_id] = rig.ask(hit, is_new=True)
        rig.run_step(0.002)

    for number in range(len(hits)):
        rig.policy.learn(hits[number])
        ask_all(hits[: number + 1])
    for _ in range(20):
        ask_all(hits)
    assert any(answers.values()), "one lane loads"
    assert 0 in answers.values(), "the other one computes"
    waits = [decision.waited_s for _, decision in rig.policy.made if decision]
    assert max(waits) <= GROUP_SHARE * hits[0].num_request_tokens * TOKEN_S + 0.01


def test_who_comes_alone_waits_for_nobody_to_speak_of() -> None:
    rig = Rig(chunk_s=0.1)
    for number in range(50):
        hit = rig.hit(str(number))
        rig.policy.learn(hit)
        while rig.ask(hit, is_new=True) is None:
            rig.run_step(0.001)
        rig.compute(hit)
    waits = [decision.waited_s for _, decision in rig.policy.made if decision]
    assert len(waits) == 50
    assert max(waits) <= QUIET_SHARE * hit.num_request_tokens * TOKEN_S + 0.001
    assert rig.ask(rig.hit("short", 10), is_new=True) is not None, "an empty step would cost it too much"


def test_loading_goes_before_computing_that_is_hardly_faster() -> None:
    for count in (2, 4, 9):
        rig = Rig(chunk_s=0.0025)  # ten times faster than computing: one of nine computed would save a tenth
        hits = [rig.hit(str(number)) for number in range(count)]
        for hit in hits:
            rig.policy.learn(hit)
        assert [rig.ask(hit) for hit in hits] == [64 * CHUNK_TOKENS] * count


@pytest.mark.parametrize(("in_host", "loads"), [(0, False), (32, False), (56, True), (64, True)])
def test_what_lies_in_memory_is_loaded_where_flash_alone_would_be_too_slow(in_host: int, loads: bool) -> None:
    """64 chunks: 1.64 s to compute, 6.4 s from flash, 0.3 s from memory; both are read at once."""
    rig = Rig(chunk_s=0.1)
    rig.costs.storage.host.observe(CHUNK_BYTES, 0.005)
    hit = dataclasses.replace(rig.hit("a"), num_host_chunks=in_host)
    assert rig.ask(hit) == (hit.num_stored_tokens if loads else 0)
    ((_, decision),) = rig.policy.made
    assert decision is not None
    expected_s = max((64 - in_host) * 0.1, in_host * 0.005)
    assert decision.predicted_load_s == pytest.approx(expected_s + LOAD_OVERHEAD_S, rel=0.02)


def test_a_load_from_memory_keeps_storage_busy_for_its_own_time_only() -> None:
    rig = Rig(chunk_s=0.1)
    rig.costs.storage.host.observe(CHUNK_BYTES, 0.005)
    first = dataclasses.replace(rig.hit("a"), num_host_chunks=64)
    assert rig.ask(first)
    assert rig.policy._underway.storage_s(rig.costs.pace() or 0.0) == pytest.approx(64 * 0.005, rel=0.02)
    second = dataclasses.replace(rig.hit("b"), num_host_chunks=64)
    assert rig.ask(second), "0.64 s, with the one before it"
    assert rig.policy.to_cut() == []


def test_a_host_tier_that_turns_slow_is_noticed() -> None:
    rig = Rig(chunk_s=0.1)
    rig.policy.host_moved(CHUNK_BYTES * 100, 0.5)
    hit = dataclasses.replace(rig.hit("a"), num_host_chunks=64)
    assert rig.ask(hit)
    rig.policy.load_ended("a", hit.num_stored_tokens)
    rig.compute(hit, begin=hit.num_stored_tokens)
    for _ in range(20):
        rig.policy.host_moved(CHUNK_BYTES * 4, 0.4)
    assert rig.ask(dataclasses.replace(hit, request_id="b")) == 0
