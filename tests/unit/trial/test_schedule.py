from __future__ import annotations

import itertools

import pytest

from rewarm.trial import prompts, schedule
from rewarm.trial.plan import DEMO, from_document
from rewarm.trial.schedule import CANARY, FILL, NOISE, RECOMPUTE, RECOVER, RESTART, Step, make_schedule, server_of

PLAN = from_document({**DEMO, "load": {"groups": 2}}, where="test")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("arms", [["recompute", "fs", "rewarm"], ["recompute", "fs"], ["recompute", "rewarm"]])
def test_every_block_runs_on_a_started_warm_server(together: bool, arms: list[str]) -> None:
    plan = from_document({**DEMO, "trial": {"arms": arms}}, where="test")
    alive: set[str] = set()
    warm: set[str] = set()
    for step in make_schedule(plan, 1, together=together):
        if step.kind == "start":
            assert not alive & set(step.servers)
            alive |= set(step.servers)
            assert together or len(alive) == 1
        elif step.kind == "stop":
            alive -= set(step.servers)
            warm -= set(step.servers)
        elif step.kind == "warm":
            warm |= set(step.servers)
        elif step.kind == "drop":
            assert not alive & set(step.servers)
        elif step.kind == "block":
            assert server_of(step.arm) in alive & warm
    assert not alive


@pytest.mark.parametrize("together", [True, False])
def test_what_is_recovered_was_filled_and_its_server_restarted_once(together: bool) -> None:
    steps = make_schedule(PLAN, 1, together=together)
    for arm in ("fs", "rewarm"):
        groups = {step.group for step in steps if step.arm == arm and step.phase == FILL}
        assert groups == set(range(PLAN.load.groups))
        recovered = [step for step in steps if step.arm == arm and step.phase == RECOVER]
        assert {step.group for step in recovered} == groups
        kinds = [step.kind for step in steps if arm in step.servers]
        assert kinds[:7] == ["start", "warm", "drain", "stop", "drop", "start", "warm"]
        blocks = [step.phase for step in steps if server_of(step.arm) == arm and step.kind == "block"]
        after_fill = list(itertools.dropwhile(lambda phase: phase == FILL, blocks))
        assert after_fill[0] == RESTART
        assert after_fill[1] == NOISE


@pytest.mark.parametrize("together", [True, False])
def test_all_arms_meet_in_every_pair_with_the_same_prompts(together: bool) -> None:
    steps = [step for step in make_schedule(PLAN, 1, together=together) if step.phase == RECOVER]
    for pair in range(PLAN.load.pairs):
        of_pair = [step for step in steps if step.pair == pair]
        assert {step.arm for step in of_pair} >= {"fs", "fs_limited", "rewarm"}
        assert len({step.group for step in of_pair}) == 1
    assert sum(step.arm == RECOMPUTE for step in steps) == schedule.RECOMPUTE_PAIRS


def test_neighbouring_pairs_turn_the_order_round() -> None:
    orders = {}
    for step in make_schedule(PLAN, 3, together=True):
        if step.phase == RECOVER and step.arm != RECOMPUTE:
            orders.setdefault(step.pair, []).append(step.arm)
    assert all(orders[pair] == orders[pair + 1][::-1] for pair in range(0, PLAN.load.pairs - 1, 2))


def test_the_seed_decides_the_order() -> None:
    def orders(seed: int) -> list[Step]:
        return make_schedule(PLAN, seed, together=True)

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_every_arm_gets_a_canary() -> None:
    steps = make_schedule(PLAN, 1, together=True)
    assert {step.arm for step in steps if step.phase == CANARY} == {"recompute", "fs", "rewarm"}


def test_prompts_follow_from_the_seed_and_differ_from_the_first_tokens_on() -> None:
    kinds = (prompts.FILL, prompts.WARM_UP, prompts.CANARY)
    texts = [tuple(prompts.context(5, kind, number, 500)) for kind in kinds for number in range(20)]
    assert len({text[:16] for text in texts}) == len(texts)
    assert prompts.context(5, prompts.FILL, 3, 500) == prompts.context(5, prompts.FILL, 3, 500)
    assert prompts.context(6, prompts.FILL, 3, 500) != prompts.context(5, prompts.FILL, 3, 500)
    assert set(itertools.chain(*texts)) <= set(prompts.TOKENS)
