"""The policies on random machines: how near ``auto`` comes to the best schedule, and whether it ever does harm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from rewarm import __version__
from rewarm.bench.policy.cases import Knowledge, Result, judge_case, make_case, run_policy
from rewarm.bench.policy.scenes import LARGE, scenes, serve
from rewarm.bench.policy.world import Prompt
from rewarm.bench.report import Figure, Report
from rewarm.bench.stats import spread
from rewarm.kv.policy import prediction_errors

HARM = 1.03
"""Above so many times the better of the fixed policies, auto has done harm."""


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
    idle = [result.idle_share for result in results]
    return [*figures, _figure(f"policy.{knowledge.value}.idle.worst", "of the time", idle, max(idle))]


def _scenes() -> list[Figure]:
    """Each by itself, and what is worst of all: the goals are for that."""
    figures = []
    played = list(scenes())
    for scene in played:
        ratios = (
            ("to_floor", scene.auto_s / scene.floor_s),
            ("to_compute", scene.auto_s / scene.compute_s),
            ("loaded", scene.num_loaded / scene.num_requests),
        )
        figures += [_figure(f"policy.scene.{scene.name}.{what}", "", [ratio], ratio) for what, ratio in ratios]
    to_compute = [scene.auto_s / scene.compute_s for scene in played]
    four = [scene.auto_s / scene.floor_s for scene in played if scene.storage == "disk" and scene.num_requests == 4]
    loaded = [scene.num_loaded / scene.num_requests for scene in played if scene.storage == "tmpfs"]
    slow = slow_storage()
    return [
        *figures,
        _figure("policy.scenes.to_compute.worst", "", to_compute, max(to_compute)),
        _figure("policy.scenes.disk.four.to_floor.worst", "", four, max(four)),
        _figure("policy.scenes.tmpfs.computed.most", "of the requests", loaded, 1 - min(loaded)),
        _figure("policy.slow_storage.to_compute.worst", "", slow, max(slow)),
    ]


def slow_storage() -> list[float]:
    """Seconds of each request over those of computing it, from 2 s after storage has turned ten times slower."""
    fast = replace(LARGE, root_bytes_a_s=(8e9,), changes=((30.0, 0.1),))
    chunks = 16384 // LARGE.chunk_tokens
    prompts = [Prompt(f"p{index}", index * 2.5, 16384, chunks) for index in range(40)]
    alone = [Prompt("alone", 0.0, 16384, chunks)]
    alone_s = serve(fast, "never", alone).makespan_s(alone)
    outcome = serve(fast, "auto", prompts)
    late = [prompt for prompt in prompts if prompt.arrival_s >= 32.0]
    return [(outcome.end_s[prompt.name] - prompt.arrival_s) / alone_s for prompt in late]


def _figure(name: str, unit: str, values: Sequence[float], value: float) -> Figure:
    return Figure(name=name, value=value, unit=unit, spread=spread(values))
