"""Random machines and prompts, and how policies do on them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rewarm.bench.policy.offline import best_makespan_s
from rewarm.bench.policy.server import Clock, Outcome, Server
from rewarm.bench.policy.world import Machine, Prompt
from rewarm.kv.choose import LoadPolicy
from rewarm.kv.costs import Costs
from rewarm.kv.rates import PrefillModel, StorageRates

LAUNCH_S = 0.002
"""To give a step to a device that runs its steps by itself."""
WARM_UP_S = 10_000.0
"""When the prompts that count begin to arrive; those that a server has seen before are long done by then."""


class Knowledge(str, Enum):
    """What the policy has to go by when the prompts that count arrive."""

    SEEN = "seen"
    """It began with nothing; three single prompts came before: one that nobody had stored, then two that were."""
    PRIOR = "prior"
    """It just started, with the last run's rates, each of which is wrong by up to a factor of 1.5."""
    NOTHING = "nothing"
    """It just started, for the first time ever."""


@dataclass(frozen=True, slots=True)
class Case:
    """One machine and the prompts that count."""

    number: int
    machine: Machine
    prompts: tuple[Prompt, ...]


def make_case(number: int) -> Case:
    """The same for the same number: odd ones arrive at once, even ones one after the other. Half have two steps in
    flight, half decode after their prompts.
    """
    rng = random.Random(f"policy case {number}")
    chunk_tokens = rng.choice([128, 256, 512])
    token_s = _log_uniform(rng, 1e-5, 1e-3)
    # For the token at this place, attention takes as long as all else.
    pair_s = token_s / _log_uniform(rng, 8192, 65536)
    lengths = [int(_log_uniform(rng, 1024, 65536)) for _ in range(rng.randint(1, 5 if number % 2 else 4))]
    typical = sorted(lengths)[len(lengths) // 2]
    compute_s = token_s * typical + pair_s * typical * typical / 2
    load_s = compute_s * _log_uniform(rng, 1 / 8, 8)
    chunk_bytes = chunk_tokens * rng.choice([32, 64, 128, 256]) * 1024
    total_bytes_a_s = typical / chunk_tokens * chunk_bytes / load_s
    num_roots = rng.choice([1, 1, 2, 3])
    parts = [_log_uniform(rng, 0.5, 2.0) for _ in range(num_roots)]
    machine = Machine(
        root_bytes_a_s=tuple(total_bytes_a_s * part / sum(parts) for part in parts),
        shares=(1 / num_roots,) * num_roots,
        base_s=min(_log_uniform(rng, 0.002, 0.02), compute_s / 20),
        token_s=token_s,
        pair_s=pair_s,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
        step_tokens=rng.choice([2048, 4096, 8192, 16384]),
        load_overhead_s=rng.uniform(0.0, 0.01),
        read_noise=rng.choice([0.0, 0.05, 0.2]),
        compute_noise=rng.choice([0.0, 0.01, 0.03]),
        seed=number,
        steps_in_flight=1 + number // 2 % 2,
        launch_s=LAUNCH_S,
        ring_chunks=8,
        decode_tokens=number // 4 % 2 * 16,
    )
    at_s, prompts = WARM_UP_S, []
    for index, length in enumerate(lengths):
        stored = max(1, int(length * rng.choice([1.0, 1.0, rng.uniform(0.3, 1.0)])) // chunk_tokens)
        prompts.append(Prompt(f"p{index}", at_s, length, stored))
        if number % 2 == 0:
            at_s += rng.expovariate(1 / compute_s)
    return Case(number, machine, tuple(prompts))


def run_policy(case: Case, name: str, knowledge: Knowledge = Knowledge.SEEN) -> Outcome:
    """Serve a case's prompts, those that came before included."""
    clock = Clock()
    policy = make_policy(name, case, knowledge, clock)
    before = _seen_before(case) if name == "auto" and knowledge is Knowledge.SEEN else []
    if not before:
        clock.now_s = WARM_UP_S
    return Server(case.machine, policy, clock).run([*before, *case.prompts])


def make_policy(name: str, case: Case, knowledge: Knowledge, clock: Clock) -> LoadPolicy:
    """A policy by its name in the configuration."""
    machine = case.machine
    known: Sequence[float] = ()
    prior: Sequence[float] = ()
    if knowledge is Knowledge.PRIOR:
        rng = random.Random(f"prior {case.number}")
        known = [rate * _log_uniform(rng, 1 / 1.5, 1.5) for rate in machine.root_bytes_a_s]
        wrong = _log_uniform(rng, 1 / 1.5, 1.5)
        prior = [machine.base_s * wrong, machine.token_s * wrong, machine.pair_s * wrong]
    costs = Costs(
        storage=StorageRates(machine.shares, known),
        prefill=PrefillModel(prior),
        chunk_tokens=machine.chunk_tokens,
        chunk_bytes=machine.chunk_bytes,
        step_tokens=machine.step_tokens,
    )
    return LoadPolicy(name, costs, prefill_limit=machine.prefill_limit, clock=clock)


def _seen_before(case: Case) -> list[Prompt]:
    rng = random.Random(f"before {case.number}")
    tokens = case.machine.chunk_tokens
    lengths = [int(_log_uniform(rng, 4096, 32768)) for _ in range(3)]
    return [
        Prompt("computed", 0.0, lengths[0], 0),
        Prompt("stored", WARM_UP_S / 3, lengths[1], max(1, lengths[1] // tokens)),
        Prompt("stored too", WARM_UP_S * 2 / 3, lengths[2], max(1, lengths[2] // tokens)),
    ]


@dataclass(frozen=True, slots=True)
class Result:
    """Makespans of one case, in seconds."""

    case: Case
    auto_s: float
    load_s: float
    compute_s: float
    best_s: float
    idle_share: float
    """Part of auto_s in which nothing was computed or loaded though a request waited."""

    @property
    def to_best(self) -> float:
        """Of auto, over the best schedule's."""
        return self.auto_s / self.best_s

    @property
    def to_fixed(self) -> float:
        """Of auto, over the better of loading all and computing all."""
        return self.auto_s / min(self.load_s, self.compute_s)


def judge_case(case: Case, knowledge: Knowledge, best_s: float | None = None) -> Result:
    """All policies on one case."""
    auto = run_policy(case, "auto", knowledge)
    auto_s = auto.makespan_s(case.prompts)
    load_s, compute_s = (run_policy(case, name).makespan_s(case.prompts) for name in ("always_load", "never"))
    if best_s is None:
        best_s = min(best_makespan_s(case.machine, case.prompts), auto_s, load_s, compute_s)
    return Result(case, auto_s, load_s, compute_s, min(best_s, auto_s), auto.idle_share(case.prompts))


def with_change(case: Case, after_s: float, factor: float) -> Case:
    """The same with storage that turns slow or fast that long after the first arrival."""
    return replace(case, machine=replace(case.machine, changes=((WARM_UP_S + after_s, factor),)))


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
