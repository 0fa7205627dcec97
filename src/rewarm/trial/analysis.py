"""From the events of a trial to its result: figures, proofs, gates, verdict. Nothing else goes in, so that anyone can
compute it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from rewarm.errors import DamageError, RewarmError
from rewarm.trial.blocks import Block, noise_pairs, of, read_blocks
from rewarm.trial.gates import NAMES, judge_all, verdict_of
from rewarm.trial.plan import from_document
from rewarm.trial.proofs import check_all, check_tokens
from rewarm.trial.schedule import FILL, RECOMPUTE, RECOVER, RESTART, tier_arms
from rewarm.trial.stats import noise

SCHEMA = "rewarm.trial/1"


def analyse(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of result.json.

    Raises:
        DamageError: The events are not those of a trial.
    """
    try:
        return _analyse(events)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RewarmError) as error:
        raise DamageError(f"the events are not those of a trial: {type(error).__name__}: {error}") from error


def _analyse(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, last = events[0], events[-1]
    plan = from_document(first["plan"], where="events.jsonl")
    outcome = last["outcome"] if last["event"] == "trial_ended" else "cut off"
    blocks = read_blocks(events)
    tokens = check_tokens(blocks)
    proofs = check_all(plan, events, blocks)
    gates = judge_all(plan, blocks, proofs, tokens)
    verdict = verdict_of(gates, plan.gates.required, complete=outcome == "complete")
    return {
        "schema": SCHEMA,
        "rewarm": first["rewarm"],
        "started": first["at"],
        "ended": last["at"],
        "outcome": outcome,
        "message": last.get("message", ""),
        "wall_s": last.get("wall_s"),
        "verdict": verdict.value,
        "seed": first["seed"],
        "plan": plan.as_json(),
        "context_tokens": next((each["context_tokens"] for each in events if each["event"] == "load_chosen"), None),
        "environment": first["environment"],
        "gates": [gate.as_json(required=gate.name in plan.gates.required) for gate in gates],
        "proofs": [proof.as_json() for proof in proofs],
        "arms": {arm: _figures(arm, blocks) for arm in NAMES if arm in (RECOMPUTE, *tier_arms(plan))},
        "noise": {arm: _noise(blocks, arm) for arm in plan.trial.arms if noise_pairs(blocks, arm)},
        "servers": _servers(events),
    }


def _figures(arm: str, blocks: Sequence[Block]) -> dict[str, Any]:
    found = of(blocks, RECOVER, arm)
    ttft_s = [request.ttft_s for block in found for request in block.requests]
    if not ttft_s:
        return {"blocks": 0}
    rates = [block.read_bytes_s for block in found if block.read_bytes_s]
    steps_s = [
        (request.total_s - request.ttft_s) / (len(request.tokens) - 1)
        for block in found
        for request in block.requests
        if len(request.tokens) > 1
    ]
    p50, p90, p99 = (float(np.percentile(ttft_s, share)) for share in (50, 90, 99))
    restart = of(blocks, RESTART, arm)
    fill = of(blocks, FILL, arm)
    return {
        "blocks": len(found),
        "requests": len(ttft_s),
        "ttft_s": {"mean": fmean(ttft_s), "p50": p50, "p90": p90, "p99": p99, "max": max(ttft_s)},
        "tokens_per_s": median(block.tokens_per_s for block in found),
        "tpot_ms": 1e3 * fmean(steps_s) if steps_s else None,
        "read_bytes": median(block.read_bytes or 0 for block in found),
        "read_bytes_s": median(rates) if rates else None,
        "limit_bytes_s": found[-1].limit_bytes_s,
        "restart_ttft_s": restart[0].mean_ttft_s if restart else None,
        "fill_ttft_s": fmean(block.mean_ttft_s for block in fill) if fill else None,
    }


def _noise(blocks: Sequence[Block], arm: str) -> dict[str, Any]:
    found = noise_pairs(blocks, arm)
    log_rms = noise([a.mean_ttft_s for a, _ in found], [b.mean_ttft_s for _, b in found])
    return {"pairs": len(found), "spread": math.expm1(log_rms)}


def _servers(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kept = ("server", "pid", "start_s", "command", "env")
    return [{name: event[name] for name in kept} for event in events if event["event"] == "server_started"]
