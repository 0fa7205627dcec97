"""The order of a trial: a plain list of steps, all from the plan and the seed, so that it can be read before it runs.

Arms work in turn on the same prompts. Within a pair their order is drawn from the seed, and turned round in the next
pair (A B, B A), so that a slow drift of the machine falls on all alike. Fixed rules, not choices made while it runs:
each start is followed by a warm-up that no figure counts, the first recovery after a restart is a proof and counts in
no figure, and each arm is measured against itself before it is measured against another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rewarm.trial.plan import Plan

RECOMPUTE, FS, FS_LIMITED, REWARM = "recompute", "fs", "fs_limited", "rewarm"

REFERENCE, FILL, NOISE, RESTART, RECOVER, CANARY = "reference", "fill", "noise", "restart", "recover", "canary"
"""Phases of blocks. reference: the run without a cache that all tokens are compared with. fill: the first pass on an
empty tier. noise: an arm against itself. restart: the first recovery after a real restart. recover: what counts.
canary: prompts that were never sent, which must miss."""

RECOMPUTE_PAIRS = 3
"""Recomputing takes by far the most time, and its ratio is far from every threshold."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step; what a field is for is said by ``kind``."""

    kind: str
    """start, warm, block, drain, drop, stop: of the servers named; choose: the length of contexts; throttle: limit the
    baseline from here on.
    """
    servers: tuple[str, ...] = ()
    arm: str = ""
    phase: str = ""
    group: int = 0
    pair: int = 0


def server_of(arm: str) -> str:
    """The server that an arm's blocks run on; the limited baseline shares that of vLLM's own tier."""
    return FS if arm == FS_LIMITED else arm


def tier_arms(plan: Plan) -> list[str]:
    """Arms that recover from a tier, the limited baseline last."""
    arms = [arm for arm in plan.trial.arms if arm != RECOMPUTE]
    return [*arms, FS_LIMITED] if is_throttled(plan) else arms


def is_throttled(plan: Plan) -> bool:
    """Whether there is a limited baseline: asked for, and with both tiers at hand."""
    return plan.baseline.throttle > 0 and {FS, REWARM} <= set(plan.trial.arms)


def baseline_arm(plan: Plan) -> str:
    """The arm that gate G3 compares with."""
    return FS_LIMITED if is_throttled(plan) else FS


def make_schedule(plan: Plan, seed: int, *, together: bool) -> list[Step]:
    """All steps in order.

    Args:
        plan: Of the trial.
        seed: Orders are drawn from it.
        together: All servers live at once; else one at a time.
    """
    draw = random.Random(f"rewarm trial {seed} order")
    return list(_together(plan, draw) if together else _in_turn(plan, draw))


def _together(plan: Plan, draw: random.Random) -> Iterator[Step]:
    arms, tiers = plan.trial.arms, tuple(arm for arm in plan.trial.arms if arm != RECOMPUTE)
    yield from (Step("start", arms), Step("choose"))
    yield from (Step("warm", (server,)) for server in arms)
    for group in range(plan.load.groups):
        for arm in draw.sample(arms, len(arms)):
            yield Step("block", arm=arm, phase=REFERENCE if arm == RECOMPUTE else FILL, group=group)
    yield Step("block", arm=RECOMPUTE, phase=NOISE)
    yield from (Step("drain", (server,)) for server in tiers)
    yield Step("stop", tiers)
    yield from (Step("drop", (server,)) for server in tiers)
    yield Step("start", tiers)
    yield from (Step("warm", (server,)) for server in tiers)
    yield from (Step("block", arm=arm, phase=RESTART) for arm in draw.sample(tiers, len(tiers)))
    for pair in range(plan.load.noise_pairs):
        for arm in draw.sample(tiers, len(tiers)):
            yield from _noise_pair(plan, arm, pair)
    if is_throttled(plan):
        yield Step("throttle")
    order: list[str] = []
    for pair in range(plan.load.pairs):
        every = [*tier_arms(plan), RECOMPUTE]
        order = order[::-1] if pair % 2 else draw.sample(every, len(every))
        for arm in order:
            if arm != RECOMPUTE or pair in _recompute_pairs(plan):
                yield _recover(plan, arm, pair)
    yield from (Step("block", arm=arm, phase=CANARY) for arm in draw.sample(arms, len(arms)))
    yield Step("stop", arms)


def _in_turn(plan: Plan, draw: random.Random) -> Iterator[Step]:
    tiers = [arm for arm in plan.trial.arms if arm != RECOMPUTE]
    yield from (Step("start", (RECOMPUTE,)), Step("choose"), Step("warm", (RECOMPUTE,)))
    for group in range(plan.load.groups):
        yield Step("block", arm=RECOMPUTE, phase=REFERENCE, group=group)
    yield Step("block", arm=RECOMPUTE, phase=NOISE)
    yield from (_recover(plan, RECOMPUTE, pair) for pair in _recompute_pairs(plan))
    yield from (Step("block", arm=RECOMPUTE, phase=CANARY), Step("stop", (RECOMPUTE,)))
    for server in draw.sample(tiers, len(tiers)):
        yield from (Step("start", (server,)), Step("warm", (server,)))
        for group in range(plan.load.groups):
            yield Step("block", arm=server, phase=FILL, group=group)
        yield from (Step("drain", (server,)), Step("stop", (server,)), Step("drop", (server,)))
    # A B B A with one start less: the candidate, the baseline with all its blocks, the candidate again.
    first, *others = reversed(tiers)
    half = plan.load.pairs // 2 if others else plan.load.pairs
    yield from _session(plan, first, range(half), noise=True, canary=not others)
    for server in others:
        yield from _session(plan, server, range(plan.load.pairs), noise=True, canary=True)
    if others:
        yield from _session(plan, first, range(half, plan.load.pairs), noise=False, canary=True)


def _session(plan: Plan, server: str, pairs: Sequence[int], *, noise: bool, canary: bool) -> Iterator[Step]:
    yield from (Step("start", (server,)), Step("warm", (server,)), Step("block", arm=server, phase=RESTART))
    for pair in range(plan.load.noise_pairs if noise else 0):
        yield from _noise_pair(plan, server, pair)
    if server == FS and is_throttled(plan):
        yield Step("throttle")
    for pair in pairs:
        arms = [arm for arm in tier_arms(plan) if server_of(arm) == server]
        yield from (_recover(plan, arm, pair) for arm in (arms[::-1] if pair % 2 else arms))
    if canary:
        yield Step("block", arm=server, phase=CANARY)
    yield from (Step("stop", (server,)), Step("drop", (server,)))


def _noise_pair(plan: Plan, arm: str, pair: int) -> Iterator[Step]:
    for _ in range(2):
        yield Step("block", arm=arm, phase=NOISE, group=pair % plan.load.groups, pair=pair)


def _recover(plan: Plan, arm: str, pair: int) -> Step:
    return Step("block", arm=arm, phase=RECOVER, group=pair % plan.load.groups, pair=pair)


def _recompute_pairs(plan: Plan) -> list[int]:
    last = plan.load.pairs - 1
    count = min(RECOMPUTE_PAIRS, plan.load.pairs)
    return [round(index * last / (count - 1)) for index in range(count)]
