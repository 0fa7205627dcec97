"""What must hold for the figures to mean anything: each proof a Finding with what was expected and what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewarm.platform.findings import Finding, Verdict
from rewarm.trial.blocks import Block, of
from rewarm.trial.plan import Plan
from rewarm.trial.schedule import CANARY, FILL, NOISE, RECOMPUTE, RECOVER, REFERENCE, RESTART, server_of
from rewarm.units import format_size

ENOUGH = 0.9
"""Share of what a block asked for that must have come from below: the last, cut chunk of a prompt is computed."""
NOT_COMPUTED = 0.5
"""A first pass that takes less than this share of recompute's time was not computed."""

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Outputs against the run without a cache."""

    compared: int
    mismatched: int
    noise_compared: int
    """The same, for the run without a cache against itself."""
    noise_mismatched: int


def check_tokens(blocks: Sequence[Block]) -> TokenCheck:
    """Compare every output token with that of the run without a cache."""
    expected: dict[tuple[str, int], tuple[int, ...]] = {}
    for block in blocks:
        if block.arm == RECOMPUTE:
            for request in block.requests:
                if not request.error:
                    expected.setdefault((_kind(block), request.context), request.tokens)
    tier, own = [0, 0], [-len(expected), 0]  # a reference is not compared with itself
    for block in blocks:
        for request in block.requests:
            wanted = expected.get((_kind(block), request.context))
            if wanted is not None and not request.error:
                count = own if block.arm == RECOMPUTE else tier
                count[0] += 1
                count[1] += request.tokens != wanted
    return TokenCheck(tier[0], tier[1], own[0], own[1])


def _kind(block: Block) -> str:
    return CANARY if block.phase == CANARY else FILL


def check_all(plan: Plan, events: Events, blocks: Sequence[Block]) -> list[Finding]:
    """All proofs but that of the tokens, in the order in which a report shows them."""
    cold = [block for block in blocks if block.phase in (RESTART, NOISE, RECOVER) and block.arm != RECOMPUTE]
    return [
        _requests(plan, blocks),
        _restart(plan, events, blocks),
        _page_cache(cold),
        _hits(cold),
        _reads(events, cold),
        _canaries(plan, blocks),
        _empty_tier(plan, blocks),
        _same_command(events),
        _ours(events),
        _clean(events),
    ]


def _finding(holds: bool | None, name: str, found: str, expected: str, source: str) -> Finding:
    verdict = {True: Verdict.OK, False: Verdict.FAIL, None: Verdict.UNKNOWN}[holds]
    return Finding(verdict, name, found, expected, source=source)


def _requests(plan: Plan, blocks: Sequence[Block]) -> Finding:
    requests = [request for block in blocks for request in block.requests]
    errors = [request.error for request in requests if request.error]
    short = sum(not request.error and len(request.tokens) != plan.load.output_tokens for request in requests)
    found = f"{len(requests)} requests, {len(errors)} errors, {short} short answers"
    if errors:
        found += f"; first: {errors[0]}"
    holds = not errors and not short if requests else None
    return _finding(holds, "requests.answered", found, "every request answered in full", "the client")


def _restart(plan: Plan, events: Events, blocks: Sequence[Block]) -> Finding:
    tiers = [arm for arm in plan.trial.arms if arm != RECOMPUTE]
    proven = 0
    for server in tiers:
        pids = {event["pid"] for event in events if event["event"] == "server_started" and event["server"] == server}
        stopped = any(event["event"] == "server_stopped" and event["server"] == server for event in events)
        hits = [_hit_share(block) for block in of(blocks, RESTART, server)]
        proven += len(pids) > 1 and stopped and bool(hits) and hits[0] >= ENOUGH
    found = f"{proven} of {len(tiers)} tiers answered from a new process after the old one ended"
    return _finding(proven == len(tiers), "cold.restart", found, "all", "process ids, the servers' own counters")


def _page_cache(cold: Sequence[Block]) -> Finding:
    proofs = [block.cold for block in cold if block.cold is not None]
    resident = sum(proof["resident_pages"] for proof in proofs)
    methods = sorted({proof["method"] for proof in proofs})
    found = f"{resident} pages resident before {len(proofs)} of {len(cold)} blocks"
    holds = resident == 0 and len(proofs) == len(cold) if cold else None
    return _finding(holds, "cold.page_cache", found, "0 pages before each block", ", ".join(methods) or "-")


def _hit_share(block: Block) -> float:
    return block.counters.get("external_hits", 0) / max(block.prompt_tokens, 1)


def _hits(cold: Sequence[Block]) -> Finding:
    least = min((_hit_share(block) for block in cold), default=math.nan)
    device = max((block.counters.get("device_hits", 0) / block.prompt_tokens for block in cold), default=math.nan)
    found = f"at least {least:.1%} of a block's tokens from the tier, at most {device:.1%} from the device"
    holds = least >= ENOUGH and device <= 1 - ENOUGH if cold else None
    expected = f"{ENOUGH:.0%} or more from the tier"
    return _finding(holds, "cold.hits", found, expected, "external_prefix_cache_hits, prefix_cache_hits")


def _reads(events: Events, cold: Sequence[Block]) -> Finding:
    stored = {event["server"]: event["bytes"] / event["tokens"] for event in events if event["event"] == "drained"}
    known = [block for block in cold if block.read_bytes is not None and server_of(block.arm) in stored]
    weights = [stored[server_of(block.arm)] * block.prompt_tokens for block in known]
    # A tier that had nothing in its files when it was drained proves nothing by what it reads.
    shares = [(block.read_bytes or 0) / weight if weight else 0.0 for block, weight in zip(known, weights, strict=True)]
    least = min(shares, default=math.nan)
    total = format_size(sum(block.read_bytes or 0 for block in known))
    found = f"{total} in {len(known)} of {len(cold)} blocks, at least {least:.1%} of what a block's tokens weigh"
    holds = least >= ENOUGH if known and len(known) == len(cold) else None
    return _finding(holds, "cold.reads", found, f"{ENOUGH:.0%} or more below the page cache", "/proc/PID/io read_bytes")


def _canaries(plan: Plan, blocks: Sequence[Block]) -> Finding:
    tiers = [arm for arm in plan.trial.arms if arm != RECOMPUTE]
    found = [block for arm in tiers for block in of(blocks, CANARY, arm)]
    hits = sum(block.counters.get("external_hits", 0) for block in found)
    text = f"{hits:.0f} tokens hit in {len(found)} canaries"
    holds = hits == 0 if len(found) >= len(tiers) else None
    return _finding(holds, "control.canaries", text, "0: never sent before", "external_prefix_cache_hits")


def _empty_tier(plan: Plan, blocks: Sequence[Block]) -> Finding:
    reference = {block.group: block.mean_ttft_s for block in of(blocks, REFERENCE, RECOMPUTE)}
    fills = [block for arm in plan.trial.arms for block in of(blocks, FILL, arm) if block.group in reference]
    hits = sum(block.counters.get("external_hits", 0) for block in fills)
    least = min((block.mean_ttft_s / reference[block.group] for block in fills), default=math.nan)
    found = f"{hits:.0f} tokens hit, TTFT at least {least:.2f} of recompute's, in {len(fills)} blocks"
    holds = hits == 0 and least >= NOT_COMPUTED if fills else None
    expected = f"0 hits, {NOT_COMPUTED} or more: an empty tier computes"
    return _finding(holds, "control.empty_tier", found, expected, "the first pass of each tier")


def _same_command(events: Events) -> Finding:
    commands = {canonical_command(event) for event in events if event["event"] == "server_started"}
    found = f"{len(commands)} different command lines and environments besides the connector"
    holds = len(commands) == 1 if commands else None
    return _finding(holds, "arms.same_server", found, "1", "the commands as started")


def canonical_command(event: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """A server's command line and environment without what must differ: port, name, connector."""
    words, kept = iter(event["command"]), []
    for word in words:
        if word in DIFFERS:
            next(words, None)
        else:
            kept.append(word)
    return tuple(kept), tuple(sorted(event["env"].items()))


DIFFERS = ("--port", "--served-model-name", "--kv-transfer-config")


def _ours(events: Events) -> Finding:
    started = [event for event in events if event["event"] == "server_started"]
    ours = sum(event["listener_is_ours"] and event["name_is_ours"] for event in started)
    found = f"{ours} of {len(started)} servers listened with a process of ours and knew their own name"
    holds = ours == len(started) if started else None
    return _finding(holds, "server.ours", found, "all", "the listening socket's process, /v1/models")


def _clean(events: Events) -> Finding:
    started = sum(event["event"] == "server_started" for event in events)
    stopped = [event for event in events if event["event"] == "server_stopped"]
    clean = sum(event["port_is_free"] and not event["left_in_shm"] and not event["killed"] for event in stopped)
    left = sorted({name for event in stopped for name in event["left_in_shm"]})
    found = f"{clean} of {started} servers ended by themselves and left nothing" + (f"; left: {left}" if left else "")
    holds = clean == started if started else None
    return _finding(holds, "server.clean", found, "all", "processes, the port, /dev/shm")
