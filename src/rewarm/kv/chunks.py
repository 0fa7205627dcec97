"""How many tokens make a chunk, and the orders that pass from the scheduler's side to the ranks."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from rewarm.engine.base import Flow
from rewarm.errors import UsageError
from rewarm.metrics import LOAD_PARTS
from rewarm.units import MIB, format_size

HOST_TARGET_BYTES = 4 * MIB
"""KV in host memory: a record of this size reads at full device speed and keeps prefixes fine."""
DEVICE_TARGET_BYTES = 16 * MIB
"""KV on a device: each chunk costs the server's interpreter some launches. From tmpfs to an H200 (floor 78 ms) 4.3 GB
took 86 ms in chunks of 16 MiB, 91 in 8 MiB, 97 in 4 MiB, 125 in 64 MiB."""
MAX_PAYLOAD_BYTES = 256 * MIB


def choose_chunk_tokens(block_bytes: int, block_tokens: int, *, target_bytes: int, asked_tokens: int = 0) -> int:
    """Tokens a chunk: the asked number, else the smallest power of two of blocks that reaches ``target_bytes``.

    The guide, docs/guides/vllm.md, "Chunk size", says what follows from it.

    Args:
        block_bytes: Bytes of one KV block over all layers of one rank.
        block_tokens: Tokens a KV block.
        target_bytes: HOST_TARGET_BYTES or DEVICE_TARGET_BYTES.
        asked_tokens: What the user asked for; 0: choose.
    Raises:
        UsageError: The asked number is no multiple of the block, or its record would be too large.
    """
    if asked_tokens:
        if asked_tokens % block_tokens:
            lower = max(block_tokens, asked_tokens // block_tokens * block_tokens)
            raise UsageError(
                f"chunk_tokens {asked_tokens} is not a multiple of this server's block of {block_tokens} tokens",
                hint=f"use {lower} or {lower + block_tokens}, or leave it out",
            )
        payload_bytes = asked_tokens // block_tokens * block_bytes
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise UsageError(
                f"a chunk of {asked_tokens} tokens takes {format_size(payload_bytes)} a rank here, "
                f"more than {format_size(MAX_PAYLOAD_BYTES)}",
                hint="use fewer tokens a chunk, or leave chunk_tokens out",
            )
        return asked_tokens
    num_blocks = 1
    while num_blocks * block_bytes < target_bytes:
        num_blocks *= 2
    return num_blocks * block_tokens


@dataclass(slots=True)
class ChunkLoad:
    """One chunk to load into the server's blocks."""

    chunk: bytes
    """The chunk id; each rank derives its own record key."""
    block_ids: array[int]
    """array('q'): blocks to fill, in chunk order, after the first ``skip_blocks``."""
    skip_blocks: int = 0
    """Leading blocks of the chunk that are resident already and are left alone."""


@dataclass(slots=True)
class LoadOrder:
    """All chunks to load for one request, in prefix order."""

    request_id: str
    chunks: list[ChunkLoad]


@dataclass(slots=True)
class StoreOrder:
    """One chunk to store: its blocks hold their KV by the end of the step that carries this order."""

    chunk: bytes
    block_ids: array[int]


@dataclass(slots=True)
class StepOrders:
    """What one step of the server asks of every rank."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    late_stores: list[StoreOrder] = field(default_factory=list)
    """Stores of finished requests, whose blocks were filled in earlier steps and are held."""
    released: list[str] = field(default_factory=list)
    """Finished requests whose blocks are held no longer."""
    step: int = 0
    """Number of the step, for the report on it."""
    cuts: list[str] = field(default_factory=list)
    """Requests whose load is to be ended: what is not in place yet is computed."""
    idle: bool = False
    """The step computes nothing: a rank may wait some milliseconds for what it loads, lest the loop spins."""
    identity: str = ""
    """Canonical JSON of the part of the identity that all ranks share; sent until every rank has told its layout."""


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Where the time of a load that has ended went."""

    parts: tuple[float, ...] = (0.0,) * len(LOAD_PARTS)
    """Seconds of each of metrics.LOAD_PARTS; they add up to the load's."""
    root_bytes: dict[str, int] = field(default_factory=dict)
    """root_id -> bytes that came from it."""

    def __add__(self, other: LoadTimes) -> LoadTimes:
        """Of two ranks: the times of the slower one, and the bytes of both."""
        both = dict(self.root_bytes)
        for root_id, num_bytes in other.root_bytes.items():
            both[root_id] = both.get(root_id, 0) + num_bytes
        return LoadTimes(max(self.parts, other.parts, key=sum), both)


@dataclass(slots=True)
class StepReport:
    """What the ranks tell the scheduler's side after a step; reports of several ranks add up."""

    step: int = 0
    """The step that has ended."""
    num_ranks: int = 1
    """Ranks that this report is from."""
    told_at: float = math.inf
    """Monotonic time of the rank's host when it was made, of several ranks the oldest; infinite: not said."""
    store_room: int = 0
    """Stores that could be staged at once now, where there is least room."""
    store_stuck_s: float = 0.0
    """Seconds in which no store that is under way has ended, where that is longest; 0: none is under way."""

    layouts: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Rank -> (canonical JSON of the layout of its planes, bytes of its part of a chunk); told once."""
    stored: dict[bytes, int] = field(default_factory=dict)
    """Chunk id -> ranks that hold its record now."""
    paused: set[str] = field(default_factory=set)
    """root_id of each root that a rank does not read now."""
    elsewhere: dict[bytes, str] = field(default_factory=dict)
    """Record key -> root_id, of stored records that are on another root than their first one."""
    dropped: dict[bytes, int] = field(default_factory=dict)
    """Chunk id -> ranks whose write failed: a full volume, an I/O error."""
    put_off: dict[bytes, int] = field(default_factory=dict)
    """Chunk id -> ranks that had no room to stage it; it may be ordered again while its blocks are held."""
    failed: dict[bytes, int] = field(default_factory=dict)
    """Chunk id -> the worst Outcome of a load that was not HIT, and was not cut either."""
    placed: dict[str, int] = field(default_factory=dict)
    """Request -> parts of chunks that its load has put in place since the last report."""
    short: dict[str, int] = field(default_factory=dict)
    """Request whose load has ended early -> the first of its chunks that is not in place."""
    delivered: dict[str, Flow] = field(default_factory=dict)
    """root_id -> what it delivered since the last report, added up over ranks."""
    times: dict[str, LoadTimes] = field(default_factory=dict)
    """Request whose load has ended -> where its time went."""

    def add(self, other: StepReport) -> None:
        """Take another rank's report in."""
        self.layouts.update(other.layouts)
        self.elsewhere.update(other.elsewhere)
        self.paused |= other.paused
        self.step = max(self.step, other.step)
        self.told_at = min(self.told_at, other.told_at)
        self.store_room = min(self.store_room, other.store_room)
        self.store_stuck_s = max(self.store_stuck_s, other.store_stuck_s)
        self.num_ranks += other.num_ranks
        pairs = ((self.stored, other.stored), (self.dropped, other.dropped), (self.put_off, other.put_off))
        for mine, theirs in pairs:
            for chunk, count in theirs.items():
                mine[chunk] = mine.get(chunk, 0) + count
        for chunk, outcome in other.failed.items():
            self.failed[chunk] = max(self.failed.get(chunk, 0), outcome)
        for request_id, count in other.placed.items():
            self.placed[request_id] = self.placed.get(request_id, 0) + count
        for request_id, index in other.short.items():
            self.short[request_id] = min(self.short.get(request_id, index), index)
        for root, flow in other.delivered.items():
            self.delivered[root] = self.delivered.get(root, Flow()) + flow
        for request_id, times in other.times.items():
            self.times[request_id] = self.times.get(request_id, LoadTimes()) + times
