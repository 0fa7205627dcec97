"""The policy beside a server: counters, the log, rates for the next start, and that nothing gets out."""

from __future__ import annotations

import json
import logging
import os
import timeit
from pathlib import Path
from typing import Any

import pytest

from rewarm.engine.base import Flow
from rewarm.kv.choose import GROUP_S
from rewarm.kv.chunks import LoadTimes, StepReport
from rewarm.kv.decision_log import MAX_LOG_BYTES, DecisionLog, log_files, read_log
from rewarm.kv.pilot import Pilot
from rewarm.kv.policy import PrefixHit
from rewarm.metrics import Counters

CHUNK_TOKENS, CHUNK_BYTES = 256, 64 << 20


def make(policy: str = "auto", log: DecisionLog | None = None, **more: Any) -> tuple[Pilot, Counters]:
    counters = Counters()
    given = {
        "shares": {"0": 1.0},
        "chunk_tokens": CHUNK_TOKENS,
        "chunk_bytes": CHUNK_BYTES,
        "step_tokens": 8192,
        **more,
    }
    return Pilot(policy, counters=counters, log=log, **given), counters


def hit(name: str, num_chunks: int = 16) -> PrefixHit:
    tokens = num_chunks * CHUNK_TOKENS
    return PrefixHit(name, tokens + 10, 0, tokens, num_chunks)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def serve(pilot: Pilot, clock: Clock, request: PrefixHit, step: int, seconds: float = 0.5) -> None:
    """One request from its arrival to the end of its prompt, in one or two steps."""
    pilot.learn(request)
    clock.now += GROUP_S  # nobody comes with it
    num_tokens = pilot.decide(request)
    assert num_tokens is not None
    pilot.ordered(request, num_tokens)
    if num_tokens:
        pilot.begin_step(step, [])
        clock.now += seconds
        num_chunks = num_tokens // CHUNK_TOKENS
        report = StepReport(step=step, placed={request.request_id: num_chunks})
        report.delivered = {"0": Flow(num_chunks * CHUNK_BYTES, seconds)}
        pilot.end_step(report, {request.request_id: num_tokens})
    pilot.begin_step(step + 1, [(request.request_id, num_tokens, request.num_request_tokens)])
    clock.now += seconds
    pilot.end_step(StepReport(step=step + 1), {})
    pilot.forget(request.request_id)


def test_decisions_are_counted_and_logged_and_rates_are_kept(tmp_path: Path) -> None:
    folder, clock = tmp_path / "policy", Clock()
    pilot, counters = make(log=DecisionLog(str(folder), "name"), clock=clock)
    serve(pilot, clock, PrefixHit("miss", 4000, 0, 0, 0), 1)
    serve(pilot, clock, hit("first"), 3)
    serve(pilot, clock, hit("second"), 5)
    pilot.close()
    assert counters.value("rewarm_kv_decisions_total", "not_stored") == 1
    assert counters.value("rewarm_kv_decisions_total", "unmeasured") == 1
    lines = read_log(folder / "name.jsonl").lines
    assert lines[0]["schema"] == "rewarm.kv-decisions/1"
    decisions = [line for line in lines if "request_id" in line]
    assert [line["reason"] for line in decisions[:2]] == ["not_stored", "unmeasured"]
    assert decisions[2]["predicted_s"] is not None
    assert all(line["actual_s"] > 0 for line in decisions)
    assert (folder / "name.jsonl").stat().st_mode & 0o777 == 0o600
    again, _ = make(log=DecisionLog(str(folder), "name"))
    assert again.costs.pace() == pytest.approx(0.5 / 16 / CHUNK_BYTES, rel=0.1)
    again.close()


def test_a_policy_that_fails_is_off_and_what_is_stored_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    for policy, expected in (("auto", 16 * CHUNK_TOKENS), ("always_load", 16 * CHUNK_TOKENS), ("never", 0)):
        pilot, _ = make(policy)
        pilot._policy.decide = lambda _hit: 1 / 0  # type: ignore[method-assign, assignment]
        with caplog.at_level(logging.ERROR):
            assert pilot.decide(hit("a")) == expected
        assert "load policy failed" in caplog.text
        caplog.clear()
        pilot.ordered(hit("a"), expected)
        assert pilot.begin_step(1, []) == []
        pilot.end_step(StepReport(step=1), {"a": 5})
        pilot.forget("a")
        assert not pilot.is_asking
        assert not caplog.text, "it says so once"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[1, 2]",
        b'{"root_bytes_a_s": [1e400], "prefill_s": ["a"]}',
        b'{"root_bytes_a_s": [NaN], "prefill_s": [NaN, 1, 1]}',
        b'{"root_bytes_a_s": [1' + b"0" * 5000 + b'], "prefill_s": []}',
        b"{" * 9999,
    ],
)
def test_what_lies_in_the_folder_is_no_danger(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "name.json").write_bytes(content)
    (tmp_path / "name.jsonl").write_bytes(content)
    pilot, _ = make(log=DecisionLog(str(tmp_path), "name"))
    assert pilot.costs.pace() is None
    pilot.close()
    assert isinstance(read_log(tmp_path / "name.jsonl").lines, list)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "name.jsonl").symlink_to(victim)
    pilot, _ = make(log=DecisionLog(str(folder), "name"))
    pilot.close()
    assert victim.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = DecisionLog(str(tmp_path / "file" / "policy"), "name")
    for number in range(5):
        log.add({"number": number})
    log.close()
    assert caplog.text.count("decisions are not kept") == 1


def test_a_log_is_bounded_and_read_from_its_older_part_on(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path), "name")
    text = "x" * 4000
    count = 2 * MAX_LOG_BYTES // 4000 + 100
    for number in range(0, count, 500):
        for line in range(number, min(number + 500, count)):
            log.add({"number": line, "text": text})
        while log._queue.qsize():
            os.sched_yield()
    log.close()
    files = log_files(str(tmp_path))
    assert [file.name for file in files] == ["name.1.jsonl", "name.jsonl"]
    assert sum(file.stat().st_size for file in files) < 2 * MAX_LOG_BYTES + 20_000
    numbers = [line["number"] for file in files for line in read_log(file).lines]
    assert numbers == list(range(numbers[0], count))


def test_a_report_that_is_a_step_old_makes_no_load_look_slow() -> None:
    clock = Clock()
    pilot, _ = make(clock=clock)
    serve(pilot, clock, PrefixHit("miss", 8192, 0, 0, 0), 1, 0.8)
    for step in (3, 5):
        serve(pilot, clock, hit(str(step), 64), step, 0.64)  # 10 ms a chunk, a tenth of computing
    pilot.learn(loading := hit("a", 64))
    assert pilot.decide(loading) == 64 * CHUNK_TOKENS
    pilot.ordered(loading, 64 * CHUNK_TOKENS)
    begun = clock.now
    assert pilot.begin_step(7, [("other", 0, 8192)]) == []
    clock.now += 0.6
    report = StepReport(step=7, told_at=begun + 0.01, placed={"a": 1})
    report.delivered = {"0": Flow(CHUNK_BYTES, 0.01)}
    pilot.end_step(report, {})
    assert pilot.begin_step(8, [("other", 8192, 16384)]) == []
    ((ask, chunks_left),) = pilot._policy._underway.loads(0.01 / CHUNK_BYTES)
    assert ask.hit == loading
    assert chunks_left == pytest.approx(63 - 59)


def test_ranks_that_load_the_same_bytes_count_them_once() -> None:
    for num_holders, num_ranks in ((2, 2), (1, 2)):
        pilot, _ = make(num_holders=num_holders)
        for step in range(1, 40):
            pilot.begin_step(step, [])
            report = StepReport(step=step, num_ranks=num_ranks)
            report.delivered = {"0": Flow(num_ranks * CHUNK_BYTES // num_holders, num_ranks * 0.1)}
            pilot.end_step(report, {})
        assert pilot.costs.storage.seconds_a_byte() == pytest.approx(0.1 / CHUNK_BYTES)


def test_every_call_is_a_matter_of_microseconds() -> None:
    """Far from what it may take, so that a busy machine does not fail it: a plan per call would show all the same."""
    pilot, _ = make()
    for step in range(1, 20):
        pilot.begin_step(step, [("other", 0, 4096)])
        report = StepReport(step=step)
        report.delivered = {"0": Flow(CHUNK_BYTES, 0.03)}
        pilot.end_step(report, {})
    hits = [hit(str(number)) for number in range(200)]
    for one in hits:
        pilot.learn(one)
    pilot.decide(hits[0])
    seconds = min(timeit.repeat(lambda: [pilot.decide(one) for one in hits], number=1, repeat=5))
    assert seconds / len(hits) < 0.001


def test_json_of_a_decision_has_no_surprises(tmp_path: Path) -> None:
    clock = Clock()
    pilot, _ = make(log=DecisionLog(str(tmp_path), "name"), clock=clock)
    serve(pilot, clock, hit("a\n\x1b[31m"), 1)
    pilot.close()
    (text,) = (line for line in (tmp_path / "name.jsonl").read_text().splitlines() if "request_id" in line)
    assert json.loads(text)["request_id"] == "a\n\x1b[31m"


def test_ended_decisions_add_up_their_seconds_and_a_slow_load_is_counted() -> None:
    clock = Clock()
    pilot, counters = make("always_load", clock=clock, root_name={"0": "/mnt/a"}.__getitem__)
    serve(pilot, clock, hit("first"), 1)
    serve(pilot, clock, hit("second"), 3)
    before = counters.value("rewarm_kv_decisions_ended_total", "always_load")
    assert counters.value("rewarm_kv_slow_loads_total") == 0
    assert counters.value("rewarm_root_read_bytes_per_second", "/mnt/a") == pytest.approx(16 * CHUNK_BYTES / 0.5)
    actual_s = counters.value("rewarm_kv_decision_actual_seconds_total", "always_load")
    serve(pilot, clock, hit("third"), 5, seconds=4.0)
    assert counters.value("rewarm_kv_slow_loads_total") == 1
    assert counters.value("rewarm_kv_decisions_ended_total", "always_load") == before + 1
    assert counters.value("rewarm_kv_decision_actual_seconds_total", "always_load") == pytest.approx(actual_s + 8.0)
    assert counters.value("rewarm_kv_decision_predicted_seconds_total", "always_load") > 0
    assert counters.value("rewarm_kv_decision_compute_seconds_total", "always_load") > 0
    assert counters.value("rewarm_kv_decision_error_ratio") == before + 1
    assert not pilot._loading


@pytest.mark.parametrize(("num_holders", "num_ranks"), [(1, 1), (2, 2), (1, 4)])
def test_a_decision_tells_what_came_from_memory(tmp_path: Path, num_holders: int, num_ranks: int) -> None:
    """Ranks that load the same bytes tell them once each."""
    clock = Clock()
    log = DecisionLog(str(tmp_path), "name")
    pilot, _ = make("always_load", log=log, clock=clock, num_holders=num_holders, host_root_id="memory")
    request = hit("a", 4)
    pilot.learn(request)
    num_tokens = pilot.decide(request)
    assert num_tokens
    pilot.ordered(request, num_tokens)
    pilot.begin_step(1, [])
    clock.now += 0.5
    told = CHUNK_BYTES * num_ranks // num_holders
    report = StepReport(step=1, num_ranks=num_ranks)
    report.times = {"a": LoadTimes(root_bytes={"0": told, "memory": 3 * told})}
    report.delivered = {"0": Flow(told, 0.5), "memory": Flow(3 * told, 0.1)}
    pilot.end_step(report, {"a": num_tokens})
    pilot.begin_step(2, [("a", num_tokens, num_tokens + 10)])
    pilot.end_step(StepReport(step=2), {})
    pilot.close()
    (line,) = (line for line in read_log(str(tmp_path / "name.jsonl")).lines if "request_id" in line)
    assert (line["host_bytes"], line["load_bytes"]) == (3 * CHUNK_BYTES, 4 * CHUNK_BYTES)
    assert pilot.costs.storage.host.bytes_a_s == pytest.approx(3 * CHUNK_BYTES / 0.1 * num_ranks)
    assert pilot.costs.storage.seconds_a_byte() == pytest.approx(0.5 / CHUNK_BYTES / num_ranks), "of flash, apart"
    assert log.read_rates()["host_bytes_a_s"] > 0
    assert not pilot._is_off
