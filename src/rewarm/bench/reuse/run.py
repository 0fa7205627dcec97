"""``rewarm bench eviction``: hit rates of the volume's order beside LRU, S3-FIFO and the offline optimum; wear by rule.

No bytes are moved and no clock is read: the same traces give the same figures on any machine.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rewarm.bench import environment
from rewarm.bench.report import Figure, Report, measured
from rewarm.bench.reuse.generate import RECIPES, generate
from rewarm.bench.reuse.replay import (
    Asked,
    FixedShare,
    LeastRecentlyUsed,
    Order,
    StoreRule,
    Tally,
    VolumeOrder,
    asked_of_tier,
    optimum,
    replay,
)
from rewarm.bench.reuse.tiers import RULES, replay_tiers
from rewarm.bench.reuse.trace import BLOCK_TOKENS, Trace, read_trace
from rewarm.errors import StorageError, UsageError
from rewarm.inputs import shown
from rewarm.units import GIB, KIB

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Capacities, as parts of the bytes of all different blocks of a trace."""
WEAR_SHARE = 0.2
"""Capacity for the figures of store rules."""
HOST_SHARE = 0.05
"""Of such a volume, for the figures of a host tier."""
PROMPT_TOKENS = 4096
"""For prompts_over_tokens."""
BUDGET_SHARE = 0.5
"""Store budget, as a part of what ``always`` writes a day."""
BYTES_PER_TOKEN = 128 * KIB
"""Of KV: Llama 3 8B in bf16 (32 layers, 8 heads, 128 wide, K and V)."""
_DAY_S = 86_400.0

ORDERS: dict[str, tuple[Callable[[], Order], bool]] = {
    "rewarm": (VolumeOrder, False),
    "lru": (LeastRecentlyUsed, True),
    "s3fifo": (FixedShare, False),
    "whole_prefix": (VolumeOrder, True),
}
"""Name to (order, whether a use counts for the whole prefix). The third is what Rewarm had before, the last one was
tried and is not used; see the guide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is replayed."""

    traces: tuple[str, ...] = tuple(RECIPES)
    """Kinds to generate, or paths of JSONL files."""
    seed: int = 1
    scale: float = 1.0
    memory_bytes: int = 64 * GIB
    """KV that the server itself holds: what it serves never asks the volume."""
    shares: tuple[float, ...] = SHARES

    @property
    def num_steps(self) -> int:
        """Of progress: replays."""
        return len(self.traces) * (len(self.shares) * (len(ORDERS) + 1) + len(_rules(1)) + len(RULES))


def run(plan: Plan, *, command: str, step: Callable[[str], None] = lambda _: None) -> Report:
    """Replay all of a plan.

    Raises:
        UsageError, StorageError, DamageError: A trace that is not known, or cannot be read.
    """
    started, start = datetime.now(timezone.utc), time.monotonic()
    figures: list[Figure] = []
    notes = []
    for name in plan.traces:
        trace = open_trace(name, seed=plan.seed, scale=plan.scale)
        asked = asked_of_tier(trace, plan.memory_bytes // (BLOCK_TOKENS * BYTES_PER_TOKEN))
        notes.append(_describe(trace, asked))
        figures += _hit_rates(trace, asked, plan.shares, step)
        figures += _wear(trace, asked, step)
        figures += _host_tier(trace, asked, step)
    return Report(
        command=command,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - start,
        figures=figures,
        environment=environment.describe(Path.cwd()),
        notes=notes,
    )


def open_trace(name: str, *, seed: int, scale: float) -> Trace:
    """A kind to generate, or a file."""
    if name in RECIPES:
        return generate(name, seed=seed, scale=scale)
    try:
        trace = read_trace(Path(name))
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise UsageError(f"{shown(name)} is no trace", hint=f"a JSONL file, or one of: {', '.join(RECIPES)}") from None
    if trace.seconds <= 0:
        raise UsageError(f"{name} has no requests, or all at one time", hint="replays need times that go on")
    if not any(request.input_blocks for request in trace.requests):
        raise UsageError(
            f"{name} has no prompt of {BLOCK_TOKENS} tokens or more",
            hint="a record has that many: nothing would be kept",
        )
    return trace


def _describe(trace: Trace, asked: Sequence[Asked]) -> str:
    in_memory = 1 - sum(len(one.wanted) for one in asked) / sum(len(one.wanted) + len(one.resident) for one in asked)
    footprint = trace.num_blocks() * BLOCK_TOKENS * BYTES_PER_TOKEN / GIB
    return (
        f"{trace.name}: {len(trace.requests):,} requests in {trace.seconds / 3600:.1f} h, "
        f"{trace.input_tokens / len(trace.requests):,.0f} tokens each, {footprint:,.0f} GiB of different blocks; "
        f"the server's memory serves {in_memory:.0%} of the blocks"
    )


def _hit_rates(
    trace: Trace, asked: Sequence[Asked], shares: Sequence[float], step: Callable[[str], None]
) -> Iterator[Figure]:
    num_blocks = trace.num_blocks()
    for share in shares:
        capacity = max(1, int(num_blocks * share))
        tallies = {"optimum": optimum(asked, capacity)}
        step(trace.name)
        for name, (make, whole_prefix) in ORDERS.items():
            tallies[name] = replay(asked, make(), capacity, touch_whole_prefix=whole_prefix)
            step(trace.name)
        best, lru = tallies["optimum"], tallies["lru"]
        where = f"{trace.name}.{share * 100:g}pct"
        for name, tally in tallies.items():
            for unit in ("token", "byte"):
                rate = _rate(tally, unit)
                yield measured(
                    f"eviction.{unit}_hits.{where}@{name}",
                    "%",
                    [100 * rate],
                    floors=[100 * _rate(best, unit)],
                    peers=[100 * _rate(lru, unit)],
                    engine=name,
                    note=f"{capacity} records of {BLOCK_TOKENS} tokens",
                )


def _rate(tally: Tally, unit: str) -> float:
    return tally.token_rate if unit == "token" else tally.byte_rate


def _rules(blocks_per_day: int) -> dict[str, StoreRule]:
    return {
        "always": StoreRule(),
        "on_reuse": StoreRule(name="on_reuse"),
        "prompts_over_tokens": StoreRule(name="prompts_over_tokens", min_tokens=PROMPT_TOKENS),
        "always_with_budget": StoreRule(blocks_per_day=blocks_per_day),
        "on_reuse_with_budget": StoreRule(name="on_reuse", blocks_per_day=blocks_per_day),
    }


def _wear(trace: Trace, asked: Sequence[Asked], step: Callable[[str], None]) -> Iterator[Figure]:
    """GB written a day and hits that are left, for each rule of ``kv.store``."""
    capacity = max(1, int(trace.num_blocks() * WEAR_SHARE))
    days = max(trace.seconds, 1.0) / _DAY_S
    always: Tally | None = None
    rules = _rules(1)
    for name in rules:
        budget = int(BUDGET_SHARE * always.stored_blocks / max(1.0, days)) if always else 1
        tally = replay(asked, VolumeOrder(), capacity, rule=_rules(budget)[name])
        always = always or tally
        step(trace.name)
        note = f"volume of {WEAR_SHARE:.0%} of the trace, {BYTES_PER_TOKEN // KIB} KiB a token"
        if name == "prompts_over_tokens":
            note += f"; prompts of {PROMPT_TOKENS} tokens and more"
        if name.endswith("_budget"):
            note += f"; budget {_gb(budget):.0f} GB in 24 hours"
        yield measured(
            f"eviction.written_gb_per_day.{trace.name}@{name}",
            "GB/day",
            [_gb(tally.stored_blocks) / days],
            peers=[_gb(always.stored_blocks) / days],
            engine=name,
            note=note,
        )
        yield measured(
            f"eviction.token_hits_by_rule.{trace.name}@{name}",
            "%",
            [100 * tally.token_rate],
            peers=[100 * always.token_rate],
            engine=name,
            note=note,
        )


def _host_tier(trace: Trace, asked: Sequence[Asked], step: Callable[[str], None]) -> Iterator[Figure]:
    """What comes from memory, and what flash reads for that, by when records are copied there."""
    flash_blocks = max(1, int(trace.num_blocks() * WEAR_SHARE))
    host_blocks = max(1, int(flash_blocks * HOST_SHARE))
    for rule, copied_at in RULES.items():
        tally = replay_tiers(asked, flash_blocks, host_blocks, copied_at=copied_at)
        step(trace.name)
        note = f"volume of {WEAR_SHARE:.0%} of the trace, host tier of {HOST_SHARE:.0%} of that; {tally.copied} copies"
        for what, rate in (("hits", tally.host_rate), ("reads", tally.read_rate)):
            yield measured(f"eviction.host_{what}.{trace.name}@{rule}", "%", [100 * rate], engine=rule, note=note)


def _gb(num_blocks: int) -> float:
    return num_blocks * BLOCK_TOKENS * BYTES_PER_TOKEN / 1e9
