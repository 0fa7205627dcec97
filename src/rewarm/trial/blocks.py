"""Blocks as the evidence has them, and the figures of one block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rewarm.trial import schedule


@dataclass(frozen=True, slots=True)
class Request:
    """One completion."""

    context: int
    prompt_tokens: int
    ttft_s: float
    total_s: float
    tokens: tuple[int, ...]
    error: str


@dataclass(frozen=True, slots=True)
class Block:
    """One event of kind ``block``."""

    arm: str
    phase: str
    group: int
    pair: int
    start_s: float
    """Since the trial began."""
    wall_s: float
    """From the first request sent to the last answer's end."""
    requests: tuple[Request, ...]
    counters: Mapping[str, float]
    """What the server counted during the block: external_hits, external_queries, device_hits; tokens."""
    read_bytes: int | None
    """What its processes read from below the page cache; None where the kernel does not say."""
    cold: Mapping[str, Any] | None
    """The proof before the block: how, files, bytes, resident_pages; None for arms that have no files."""
    samples: Sequence[Sequence[float]]
    """(seconds since the block's start, bytes read so far)."""
    limit_bytes_s: float
    """What the baseline was limited to; 0: nothing."""

    @property
    def mean_ttft_s(self) -> float:
        """Mean over the requests."""
        return fmean(request.ttft_s for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second over the block."""
        return sum(len(request.tokens) for request in self.requests) / self.wall_s

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def read_bytes_s(self) -> float | None:
        """Bytes read over the time to the last first token: the bandwidth that the recovery saw."""
        return self.read_bytes / max(request.ttft_s for request in self.requests) if self.read_bytes else None

    @property
    def is_whole(self) -> bool:
        """Every request was answered."""
        return not any(request.error for request in self.requests)


_MAX_BLOCK_S = 1e6


def read_blocks(events: Sequence[Mapping[str, Any]]) -> list[Block]:
    """All blocks of a trial, in order."""
    return [_block(event) for event in events if event["event"] == "block"]


def _block(event: Mapping[str, Any]) -> Block:
    """Raises ValueError for samples that no meter took: the reports draw them as they are."""
    for at_s, num_bytes in event["samples"]:
        if not (0 <= at_s < _MAX_BLOCK_S and num_bytes >= 0):
            raise ValueError(f"a sample at {at_s} s of {num_bytes} bytes")
    fields = {name: event[name] for name in Block.__dataclass_fields__ if name != "requests"}
    requests = tuple(Request(**{**each, "tokens": tuple(each["tokens"])}) for each in event["requests"])
    return Block(**fields, requests=requests)


def of(blocks: Sequence[Block], phase: str, arm: str) -> list[Block]:
    """The whole blocks of one phase and arm."""
    return [block for block in blocks if block.phase == phase and block.arm == arm and block.is_whole]


def pairs(blocks: Sequence[Block], candidate: str, baseline: str) -> list[tuple[Block, Block]]:
    """Blocks of two arms that were measured as pairs."""
    others = {block.pair: block for block in of(blocks, schedule.RECOVER, baseline)}
    found = of(blocks, schedule.RECOVER, candidate)
    return [(block, others[block.pair]) for block in found if block.pair in others]


def noise_pairs(blocks: Sequence[Block], arm: str) -> list[tuple[Block, Block]]:
    """Blocks of an arm that were measured against itself."""
    found = of(blocks, schedule.NOISE, arm)
    return [(a, b) for a, b in zip(found[::2], found[1::2], strict=False) if a.pair == b.pair]
