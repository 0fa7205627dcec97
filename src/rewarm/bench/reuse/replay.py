"""What an order of eviction makes of a trace: the tier as a set of names, without its bytes.

A request finds its first blocks in the server's own memory (a least-recently-used prefix cache), the next ones on the
volume as far as they are there without a gap, and computes the rest. What the volume lacks is stored, by the rule that
the server would follow. One block is one record, all are of one size.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Protocol

from rewarm.bench.reuse.trace import BLOCK_TOKENS, Trace, TraceRequest
from rewarm.volume.janitor.order import NAME_BYTES, EvictionOrder


class Order(Protocol):
    """Who is to go first. Blocks are noted in the order in which the janitor notes records."""

    def add(self, block: int) -> None:
        """It was stored."""

    def touch(self, block: int) -> None:
        """It was used."""

    def pop(self) -> int:
        """The block to evict now."""


class VolumeOrder:
    """The volume's own."""

    def __init__(self) -> None:
        self.order = EvictionOrder()
        self.order.set_size(bytes(2), 1)

    def add(self, block: int) -> None:
        """See Order."""
        self.order.add(_name(block))

    def touch(self, block: int) -> None:
        """See Order."""
        self.order.touch(_name(block))

    def pop(self) -> int:
        """See Order."""
        name = self.order.pop()
        assert name is not None, "asked to evict from an empty volume"
        return int.from_bytes(name[-8:], "big")


class FixedShare(VolumeOrder):
    """S3-FIFO as published: the small queue has a tenth."""

    def touch(self, block: int) -> None:
        """See Order."""
        self.order.small_share = 0.1
        super().touch(block)

    def add(self, block: int) -> None:
        """See Order."""
        super().add(block)
        self.order.small_share = 0.1


class LeastRecentlyUsed:
    """What most caches have. The last blocks of a context are noted first, so they go first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        """See Order."""
        self._blocks[block] = None

    def touch(self, block: int) -> None:
        """See Order."""
        if block in self._blocks:
            self._blocks.move_to_end(block)

    def pop(self) -> int:
        """See Order."""
        return self._blocks.popitem(last=False)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one request asks of the tier, once the server's own memory gave what it had."""

    time_s: float
    wanted: Sequence[int]
    """Blocks of the input that the server's memory lacks, front to back."""
    resident: Sequence[int]
    """Those before them."""
    made: Sequence[int]
    """Blocks that generation fills."""
    input_tokens: int


class ServerMemory:
    """The prefix cache of a server: the last used blocks, front to back of a context as long as there is no gap."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def ask(self, request: TraceRequest) -> Asked:
        """Serve a request; what it brings in pushes out what was used least lately."""
        blocks = request.input_blocks
        num_resident = next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed((*blocks, *request.output_blocks)):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
        return Asked(
            time_s=request.time_s,
            wanted=blocks[num_resident:],
            resident=blocks[:num_resident],
            made=request.output_blocks,
            input_tokens=request.input_tokens,
        )


def asked_of_tier(trace: Trace, memory_blocks: int) -> list[Asked]:
    """The trace as the tier sees it."""
    memory = ServerMemory(memory_blocks)
    return [memory.ask(request) for request in trace.requests]


@dataclass(slots=True)
class Tally:
    """What a replay counted."""

    asked_tokens: int = 0
    """Of inputs, less what the server's memory had; the last, partial block of each with it."""
    hit_blocks: int = 0
    asked_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0

    @property
    def token_rate(self) -> float:
        """Tokens loaded, of those that the server's memory lacked."""
        return self.hit_blocks * BLOCK_TOKENS / self.asked_tokens if self.asked_tokens else 0.0

    @property
    def byte_rate(self) -> float:
        """Bytes loaded, of those of all full blocks that were asked for."""
        return self.hit_blocks / self.asked_blocks if self.asked_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRule:
    """When a computed block is stored; the names are those of ``kv.store``."""

    name: str = "always"
    min_tokens: int = 0
    """For prompts_over_tokens."""
    blocks_per_day: int = 0
    """Stored in any 24 hours at most; 0: no bound."""


def replay(
    trace: Sequence[Asked],
    order: Order,
    capacity_blocks: int,
    *,
    rule: StoreRule | None = None,
    touch_whole_prefix: bool = False,
) -> Tally:
    """Run a trace against a volume of so many blocks.

    Args:
        trace: From asked_of_tier().
        order: Empty.
        capacity_blocks: At least 1.
        rule: Default: all that is computed is stored.
        touch_whole_prefix: Whether a request that loads or stores counts as a use of all blocks before, too; else what
            it loads is used.
    """
    tally, present, gate = Tally(), set[int](), _Gate(rule or StoreRule())
    for asked in trace:
        wanted = asked.wanted
        num_hits = next((n for n, block in enumerate(wanted) if block not in present), len(wanted))
        tally.asked_tokens += asked.input_tokens - len(asked.resident) * BLOCK_TOKENS
        tally.asked_blocks += len(wanted)
        tally.hit_blocks += num_hits
        whole = (*asked.resident, *wanted, *asked.made)
        stored = [block for block in whole if block not in present and gate.lets(block, asked)]
        for block in reversed(stored):  # as the janitor takes a log: the newest first
            order.add(block)
        present.update(stored)
        tally.stored_blocks += len(stored)
        if not touch_whole_prefix:
            used: Sequence[int] = wanted[:num_hits]
        elif stored or num_hits:
            new = set(stored)
            used = [block for block in whole if block not in new]
        else:
            used = ()
        for block in reversed(used):
            order.touch(block)
        while len(present) > capacity_blocks:
            present.discard(order.pop())
            tally.evicted_blocks += 1
    return tally


class _Gate:
    """Lets a block be stored, or not."""

    _DAY_S = 86_400.0
    _HOUR_S = 3600.0

    def __init__(self, rule: StoreRule) -> None:
        self._rule = rule
        self._seen: set[int] = set()
        self._hours: OrderedDict[int, int] = OrderedDict()

    def lets(self, block: int, asked: Asked) -> bool:
        """True counts it as stored."""
        rule = self._rule
        if rule.name == "on_reuse" and block not in self._seen:
            self._seen.add(block)
            return False
        if rule.name == "prompts_over_tokens" and asked.input_tokens < rule.min_tokens:
            return False
        return not rule.blocks_per_day or self._spend(asked.time_s)

    def _spend(self, time_s: float) -> bool:
        hour = int(time_s // self._HOUR_S)
        while self._hours and next(iter(self._hours)) < hour - 24:
            self._hours.popitem(last=False)
        if sum(self._hours.values()) >= self._rule.blocks_per_day:
            return False
        self._hours[hour] = self._hours.get(hour, 0) + 1
        return True


def optimum(trace: Sequence[Asked], capacity_blocks: int) -> Tally:
    """The offline optimum: what is needed again soonest stays, and what is never needed again is not stored.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, with bypass. A block is needed
    again no later than the blocks behind it, so that what it keeps has no gaps, and counting single blocks counts
    prefixes. A block that the server's memory has is not asked of the tier.
    """
    tally, kept, heap = Tally(), dict[int, int](), list[tuple[int, int, int]]()
    for asked, uses in zip(trace, _next_uses(trace), strict=True):
        tally.asked_tokens += asked.input_tokens - len(asked.resident) * BLOCK_TOKENS
        tally.asked_blocks += len(asked.wanted)
        for depth, (block, use) in enumerate(zip((*asked.wanted, *asked.made), uses, strict=True)):
            if depth < len(asked.wanted) and block in kept:
                tally.hit_blocks += 1
            if use == _NEVER:
                kept.pop(block, None)
                continue
            tally.stored_blocks += block not in kept
            kept[block] = use
            heapq.heappush(heap, (-use, -depth, block))
            while len(kept) > capacity_blocks:
                use_of_last, _, last = heapq.heappop(heap)
                if kept.get(last) == -use_of_last:
                    del kept[last]
                    tally.evicted_blocks += 1
    return tally


_NEVER = 1 << 60


def _next_uses(trace: Sequence[Asked]) -> Iterator[list[int]]:
    """For each request, when each of its blocks is asked of the tier again: the number of that request."""
    following: dict[int, int] = {}
    found = []
    for number in range(len(trace) - 1, -1, -1):
        asked = trace[number]
        found.append([following.get(block, _NEVER) for block in (*asked.wanted, *asked.made)])
        for block in asked.wanted:
            following[block] = number
    return reversed(found)


@cache
def _name(block: int) -> bytes:
    """As a record's, in the namespace with number 0: the key is a digest that ends with the block."""
    return bytes(2) + blake2b(block.to_bytes(8, "big"), digest_size=NAME_BYTES - 10).digest() + block.to_bytes(8, "big")
