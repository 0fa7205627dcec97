"""The policies on random machines: how near ``auto`` comes to the best schedule, and whether it ever does harm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from rewarm import __version__
from rewarm.bench.policy.cases import Knowledge, Result, judge_case, make_case, run_policy
from rewarm.bench.policy.replay import replay_policy
from rewarm.bench.policy.server import Clock, Server
from rewarm.bench.policy.world import Machine, Prompt
from rewarm.bench.report import Figure, Report
from rewarm.bench.stats import spread
from rewarm.kv.policy import prediction_errors

HARM = 1.03
"""Above so many times the better of the fixed policies, auto has done harm."""

H200 = Machine(
    root_bytes_a_s=(1.87e9,),
    shares=(1.0,),
    base_s=0.02,
    token_s=8.5e-5,
    pair_s=8.5e-5 / 24576,
    chunk_tokens=256,
    chunk_bytes=67_108_864,
    step_tokens=8192,
    load_overhead_s=0.01,
)
"""Like the H200 with a disk in docs/guides/vllm.md: 16,384 tokens of 64 layers compute in 1.9 s and load in 2.3 s."""


def run(num_cases: int, *, command: str, step: Callable[[], None]) -> Report:
    """All figures; the same for the same number of cases.

    Args:
        num_cases: How many random cases for each state of knowledge.
        command: For the report.
        step: Called after each case.
    """
    started, begun = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    figures: list[Figure] = []
    errors: list[float] = []
    best: dict[int, float] = {}
    for knowledge in Knowledge:
        results = []
        for number in range(num_cases):
            case = make_case(number)
            result = judge_case(case, knowledge, best.get(number))
            best[number] = min(best.get(number, result.best_s), result.best_s)
            results.append(result)
            if knowledge is Knowledge.SEEN:
                errors += prediction_errors(run_policy(case, "auto", knowledge).decisions)
            step()
        figures += _figures(results, knowledge)
    figures.append(_figure("policy.prediction_error", "of the actual time", errors, statistics.median(errors)))
    figures += _scenes()
    return Report(
        command=command,
        started=started,
        seconds=time.monotonic() - begun,
        figures=figures,
        environment={"rewarm": __version__, "simulated": True, "cases": num_cases},
        notes=["all times are simulated: no device, no server and no clock of this machine is in them"],
    )


def _figures(results: Sequence[Result], knowledge: Knowledge) -> list[Figure]:
    figures = []
    for arrival, chosen in (
        ("at_once", [result for result in results if result.case.number % 2]),
        ("in_turn", [result for result in results if not result.case.number % 2]),
    ):
        name = f"policy.{knowledge.value}.{arrival}"
        to_best = [result.to_best for result in chosen]
        to_fixed = [result.to_fixed for result in chosen]
        harmed = sum(ratio > HARM for ratio in to_fixed) / len(to_fixed)
        figures += [
            _figure(f"{name}.to_best.mean", "", to_best, statistics.fmean(to_best)),
            _figure(f"{name}.to_best.worst", "", to_best, max(to_best)),
            _figure(f"{name}.to_fixed.mean", "", to_fixed, statistics.fmean(to_fixed)),
            _figure(f"{name}.to_fixed.worst", "", to_fixed, max(to_fixed)),
            _figure(f"{name}.to_fixed.above_3_percent", "of the cases", to_fixed, harmed),
        ]
    waits = sum(result.idle_waits for result in results)
    return [*figures, _figure(f"policy.{knowledge.value}.idle_waits", "steps", [float(waits)], float(waits))]


def _scenes() -> list[Figure]:
    """Four contexts at once on the machine of H200, and one after the other while storage turns slow and heals."""
    figures = []
    chunks = 16384 // H200.chunk_tokens
    alone_s = _makespan_s(H200, "never", [Prompt("a", 0.0, 16384, chunks)])
    load_s = chunks * H200.chunk_bytes / H200.root_bytes_a_s[0]
    floor_s = 4 / (1 / alone_s + 1 / load_s)
    for name, gap_s, limit in (("at_once", 0.0, 0), ("2ms_apart", 0.002, 0), ("2ms_apart_limit", 0.002, 8128)):
        prompts = [Prompt(f"p{index}", index * gap_s, 16384, chunks) for index in range(4)]
        machine = replace(H200, prefill_limit=limit)
        walls = {policy: _makespan_s(machine, policy, prompts) for policy in ("auto", "never", "always_load")}
        best_s = min(walls["never"], walls["always_load"])
        figures += [
            _figure(f"policy.four.{name}.to_floor", "", [walls["auto"] / floor_s], walls["auto"] / floor_s),
            _figure(f"policy.four.{name}.to_fixed", "", [walls["auto"] / best_s], walls["auto"] / best_s),
        ]
    slow = _slow_storage(alone_s)
    return [*figures, _figure("policy.slow_storage.to_compute.worst", "", slow, max(slow))]


def _slow_storage(alone_s: float) -> list[float]:
    """Seconds of each request over those of computing it, from 2 s after storage has turned ten times slower."""
    fast = replace(H200, root_bytes_a_s=(8e9,), changes=((30.0, 0.1),))
    chunks = 16384 // H200.chunk_tokens
    prompts = [Prompt(f"p{index}", index * 2.5, 16384, chunks) for index in range(40)]
    clock = Clock()
    outcome = Server(fast, replay_policy(fast, "auto", clock), clock).run(prompts)
    late = [prompt for prompt in prompts if prompt.arrival_s >= 32.0]
    return [(outcome.end_s[prompt.name] - prompt.arrival_s) / alone_s for prompt in late]


def _makespan_s(machine: Machine, policy: str, prompts: Sequence[Prompt]) -> float:
    clock = Clock()
    return Server(machine, replay_policy(machine, policy, clock), clock).run(prompts).makespan_s(prompts)


def _figure(name: str, unit: str, values: Sequence[float], value: float) -> Figure:
    return Figure(name=name, value=value, unit=unit, spread=spread(values))
