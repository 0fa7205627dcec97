"""The load policies on simulated servers: fewer cases than `rewarm bench policy` has, and the same bounds."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest

from rewarm.bench.policy import study
from rewarm.bench.policy.cases import Case, Knowledge, judge_case, make_case, run_policy
from rewarm.bench.policy.offline import _end_s, _Job, best_makespan_s
from rewarm.bench.policy.replay import read_trace, replay
from rewarm.bench.policy.scenes import scenes
from rewarm.bench.policy.server import Clock, Server
from rewarm.bench.policy.world import Machine, Prompt, Root
from rewarm.errors import DamageError, UsageError
from rewarm.kv.choose import GROUP_SHARE
from rewarm.kv.decision_log import SCHEMA
from rewarm.kv.policy import prediction_errors

MACHINE = Machine(
    root_bytes_a_s=(1e9,),
    shares=(1.0,),
    base_s=0.01,
    token_s=1e-4,
    pair_s=0.0,
    chunk_tokens=256,
    chunk_bytes=10_000_000,
    step_tokens=4096,
)


def serve(machine: Machine, policy: str, *prompts: Prompt) -> dict[str, float]:
    clock = Clock()
    case = Case(0, machine, prompts)
    from rewarm.bench.policy.cases import make_policy

    return Server(machine, make_policy(policy, case, Knowledge.NOTHING, clock), clock).run(prompts).end_s


def test_a_simulated_server_takes_what_its_machine_takes() -> None:
    prompt = Prompt("a", 1.0, 8192, 32)
    assert serve(MACHINE, "never", prompt)["a"] == pytest.approx(1.0 + 0.8192 + 2 * 0.01)
    # 32 chunks of 10 ms, then a step for the last token.
    assert serve(MACHINE, "always_load", prompt)["a"] == pytest.approx(1.0 + 0.32 + 0.01 + 1e-4)
    slow = replace(MACHINE, changes=((1.16, 0.1),))
    assert serve(slow, "always_load", prompt)["a"] == pytest.approx(1.0 + 0.16 + 1.6 + 0.01 + 1e-4)


def test_a_running_prompt_takes_the_tokens_of_a_step_and_who_waits_is_not_asked_for() -> None:
    long, late = Prompt("long", 0.0, 16384, 0), Prompt("late", 0.1, 8192, 32)
    ends = serve(MACHINE, "always_load", long, late)
    assert ends["late"] > ends["long"], "its load began when the long one was done"
    limited = serve(replace(MACHINE, prefill_limit=4032), "always_load", long, late)
    assert limited["late"] == pytest.approx(limited["long"], abs=0.5)


def test_with_two_steps_in_flight_a_load_waits_for_the_step_that_runs_and_its_end_is_heard_late() -> None:
    long, late = Prompt("long", 0.0, 16384, 0), Prompt("late", 0.01, 8192, 32)
    machine = replace(MACHINE, prefill_limit=4032, steps_in_flight=2, ring_chunks=8)
    step_s = 0.01 + 4032 * 1e-4
    ends = serve(machine, "always_load", long, late)
    # It is asked for when the first step has ended, its load goes on when the second has; the report of that one is
    # of its begin, so that the end of the load is seen with the one after the next.
    in_place_s = 2 * step_s + (32 - 8) * 0.01
    assert ends["late"] > in_place_s + step_s
    assert ends["late"] == pytest.approx(ends["long"], abs=step_s)
    alone = serve(machine, "always_load", Prompt("alone", 0.0, 8192, 32))
    assert alone["alone"] == pytest.approx(0.32 + 0.01 + 1e-4, abs=0.001), "nothing is late where nothing runs"


def test_a_ring_that_is_full_is_no_busy_time() -> None:
    root = Root(replace(MACHINE, ring_chunks=4), width=4)
    prompt = Prompt("a", 0.0, 8192, 32)
    for chunk in range(32):
        root.add(prompt, chunk, gate_s=1.0)
    assert len(root.advance(0.0, 0.9)) == 4
    num_read, busy_s = root.take()
    assert num_read == pytest.approx(4)
    assert busy_s == pytest.approx(0.04)
    root.advance(0.9, 1.06)
    assert root.take() == (pytest.approx(6), pytest.approx(0.06))


def test_the_best_schedule_is_no_worse_than_any_order_and_choice() -> None:
    rng = random.Random(5)
    for number in range(1, 12, 2):
        case = make_case(number)
        if len(case.prompts) > 3:
            case = replace(case, prompts=case.prompts[:3])
        best = best_makespan_s(case.machine, case.prompts)
        jobs = [_Job(case.machine, prompt) for prompt in case.prompts]
        first = min(job.arrival_s for job in jobs)
        for _ in range(200):
            counts = [rng.choice([0, rng.randint(0, job.num_chunks), job.num_chunks]) for job in jobs]
            for order in itertools.permutations(range(len(jobs))):
                assert best <= (_end_s(jobs, counts, order) - first) * 1.05


def test_auto_comes_near_the_best_schedule_and_does_no_harm() -> None:
    results = [judge_case(make_case(number), Knowledge.SEEN) for number in range(80)]
    assert statistics.fmean(result.to_best for result in results) <= 1.1
    assert max(result.to_best for result in results) <= 1.6
    assert statistics.fmean(result.to_fixed for result in results) <= 0.97
    assert sum(result.to_fixed > study.HARM for result in results) <= 0.03 * len(results)
    assert max(result.idle_share for result in results) <= GROUP_SHARE


def test_runs_are_the_same_each_time() -> None:
    for number in range(6):
        first, second = (run_policy(make_case(number), "auto") for _ in range(2))
        assert first.end_s == second.end_s


def test_predictions_are_within_a_fifth() -> None:
    errors = [e for number in range(40) for e in prediction_errors(run_policy(make_case(number), "auto").decisions)]
    assert len(errors) > 60
    assert statistics.median(errors) <= 0.2


def test_storage_that_turns_ten_times_slower_never_costs_a_tenth_after_two_seconds() -> None:
    assert max(study.slow_storage()) <= 1.1


def test_groups_use_both_lanes_of_a_disk_and_load_from_memory_and_nothing_is_slower_than_computing() -> None:
    for scene in scenes():
        assert scene.auto_s <= 1.03 * scene.compute_s, scene
        if scene.storage == "tmpfs":
            assert scene.num_loaded == scene.num_requests, scene
        elif scene.num_requests > 1 and (scene.storage == "disk" or "20ms" not in scene.name):
            assert scene.auto_s <= 1.12 * scene.floor_s, scene


def log_lines() -> list[dict[str, object]]:
    head = {
        "schema": SCHEMA, "policy": "always_load", "chunk_tokens": 256, "chunk_bytes": 10_000_000, "step_tokens": 4096,
        "shares": [1.0], "root_bytes_a_s": [1e9], "prefill_s": [0.01, 1e-4, 0.0],
    }  # fmt: skip
    lines: list[dict[str, object]] = [head]
    for number in range(4):
        decision = {
            "request_id": f"r{number}", "at": 50.0 + number * 0.001, "waited_s": 0.0, "reason": "always_load",
            "num_request_tokens": 16384, "num_resident_tokens": 0, "num_stored_tokens": 16384, "actual_s": 0.7,
        }  # fmt: skip
        lines.append(decision)
    return lines


def test_a_servers_log_is_replayed_under_each_policy() -> None:
    trace = read_trace(log_lines())
    assert trace.actual_s == (0.7,) * 4
    results = {one.policy: one for one in replay(trace)}
    assert results["never"].end_s == pytest.approx(4 * (1.6384 + 0.04), rel=0.02)
    assert results["always_load"].num_loads == 4
    assert results["auto"].end_s <= 1.02 * min(results["never"].end_s, results["always_load"].end_s)


def test_a_log_that_cannot_be_replayed_says_why() -> None:
    with pytest.raises(UsageError, match="no request"):
        read_trace([])
    with pytest.raises(UsageError, match="not 'rewarm"):
        read_trace([{"schema": "other/1"}])
    unlearned = [{**log_lines()[0], "root_bytes_a_s": [], "prefill_s": []}, *log_lines()[1:]]
    with pytest.raises(UsageError, match="not yet learned"):
        read_trace(unlearned)
    for broken in ({"at": "soon"}, {"num_request_tokens": None}):
        with pytest.raises(DamageError):
            read_trace([log_lines()[0], {**log_lines()[1], **broken}])


HOSTILE = [float("nan"), float("inf"), -1, 10**400, True, "1", [], {}, 1e300]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:10])
@pytest.mark.parametrize(
    "name", ["at", "waited_s", "num_request_tokens", "num_resident_tokens", "num_stored_tokens", "actual_s"]
)
def test_a_request_with_an_odd_number_is_named_and_nothing_is_replayed(name: str, value: object) -> None:
    with pytest.raises(DamageError) as caught:
        read_trace([log_lines()[0], {**log_lines()[1], name: value}])
    assert caught.value.hint
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("value", [*HOSTILE, 0], ids=lambda value: str(value)[:10])
@pytest.mark.parametrize("name", ["chunk_tokens", "chunk_bytes", "step_tokens", "shares"])
def test_a_server_with_an_odd_number_is_named(name: str, value: object) -> None:
    odd = [value] if name == "shares" else value
    with pytest.raises(DamageError):
        read_trace([{**log_lines()[0], name: odd}, log_lines()[1]])
