"""A trial that never ran: events as the runner writes them, with figures that a test chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rewarm.trial.analysis import analyse
from rewarm.trial.evidence import EventLog, read_events, write_manifest, write_result
from rewarm.trial.plan import DEMO, Plan, from_document, settle
from rewarm.trial.report import write_reports
from rewarm.trial.schedule import CANARY, FILL, FS_LIMITED, RECOMPUTE, Step, make_schedule

KV_BYTES = 16384
CONTEXT_TOKENS = 4096
TTFT_S = {"recompute": 12.0, "fs": 0.40, "fs_limited": 0.60, "rewarm": 0.30}
TOKENS_PER_S = {"recompute": 1.0, "fs": 30.0, "fs_limited": 24.0, "rewarm": 36.0}

Change = Callable[[str, dict[str, Any]], None]
"""Gets each event's name and fields before it is written."""


class Maker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, *, document: Mapping[str, Any] = DEMO, ttft_s: Mapping[str, float] = TTFT_S, change: Change | None = None
    ) -> dict[str, Any]:
        """Write a whole folder; returns its result."""
        plan = settle(from_document(document, where="test"), on_cpu=True, free_bytes=1 << 40)
        log = EventLog(self.folder)

        def add(event: str, **fields: Any) -> None:
            if change:
                change(event, fields)
            log.add(event, **fields)

        _write(plan, {**TTFT_S, **ttft_s}, add)
        log.close()
        events = read_events(self.folder)
        result = analyse(events)
        write_result(self.folder, result)
        write_reports(self.folder, result, events)
        write_manifest(self.folder)
        return result


@pytest.fixture
def make_trial(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "trial")


def _write(plan: Plan, ttft_s: Mapping[str, float], add: Callable[..., None]) -> None:
    draw = random.Random(1)
    environment = {"vllm": "0.32.0", "device": "cpu"}
    add("trial_started", plan=plan.as_json(), seed=1, rewarm="0", environment=environment)
    add("load_chosen", context_tokens=CONTEXT_TOKENS, probe_s=[2.0, 1.0])
    at_s, pid = 0.0, 100
    for step in make_schedule(plan, 1, together=True):
        for server in step.servers:
            pid += 1
            _server_event(step, server, pid, plan, add)
        if step.kind == "block":
            block = _block(plan, step, ttft_s, draw)
            add("block", start_s=at_s, **block)
            at_s += block["wall_s"]
    add("trial_ended", outcome="complete", message="", wall_s=at_s)


def _server_event(step: Step, server: str, pid: int, plan: Plan, add: Callable[..., None]) -> None:
    if step.kind == "start":
        command = ["vllm", "serve", "m", "--port", str(pid), "--served-model-name", f"n{pid}"]
        if server != RECOMPUTE:
            command += ["--kv-transfer-config", f'{{"kv_connector":"{server}"}}']
        ours = {"listener_is_ours": True, "name_is_ours": True}
        add("server_started", server=server, pid=pid, start_s=35.0, command=command, env={"A": "1"}, **ours)
    elif step.kind == "drain":
        tokens = CONTEXT_TOKENS * plan.load.concurrency * plan.load.groups
        add("drained", server=server, files=10, bytes=tokens * KV_BYTES, tokens=tokens, wait_s=1.0)
    elif step.kind == "stop":
        add("server_stopped", server=server, port_is_free=True, left_in_shm=[], killed=False, stop_s=4.0)


def _block(plan: Plan, step: Step, ttft_s: Mapping[str, float], draw: random.Random) -> dict[str, Any]:
    load = plan.load
    arm = step.arm
    hits = arm != RECOMPUTE and step.phase not in (FILL, CANARY)
    mean = (ttft_s[arm] if hits or arm == RECOMPUTE else ttft_s[RECOMPUTE]) * draw.gauss(1, 0.02)
    requests = [
        {
            "context": step.group * load.concurrency + index,
            "prompt_tokens": CONTEXT_TOKENS,
            "ttft_s": mean * (0.8 + 0.4 * index / max(load.concurrency - 1, 1)),
            "total_s": mean * 1.5,
            "tokens": [index, step.group, step.phase == CANARY] + [7] * (load.output_tokens - 3),
            "error": "",
        }
        for index in range(load.concurrency)
    ]
    tokens = CONTEXT_TOKENS * load.concurrency
    read = tokens * KV_BYTES if hits else 0
    return {
        "arm": arm,
        "phase": step.phase,
        "group": step.group,
        "pair": step.pair,
        "wall_s": load.output_tokens * load.concurrency / TOKENS_PER_S[arm] * draw.gauss(1, 0.02),
        "requests": requests,
        "counters": {"external_hits": tokens - load.concurrency if hits else 0, "device_hits": 0},
        "read_bytes": read,
        "cold": {"method": "fadvise, cachestat", "files": 10, "bytes": read, "resident_pages": 0} if hits else None,
        "samples": [[0.0, 0], [mean / 2, read], [mean, read]] if hits else [],
        "limit_bytes_s": 6e8 if arm == FS_LIMITED else 0.0,
    }
