"""A reuse trace: which blocks of KV each request needs, and when. Read and written as Mooncake's JSONL.

One line a request, as published with the FAST'25 paper of Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release)::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` is in milliseconds; ``hash_ids`` name the blocks of 512 tokens of the input, equal for equal prefixes, the
last of them often not full. Our generator adds ``output_hash_ids``: the blocks that are full once the answer is there.
Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rewarm.errors import DamageError
from rewarm.inputs import read_input, shown
from rewarm.units import GIB

BLOCK_TOKENS = 512
MAX_BYTES = GIB
"""Of a file; the largest that Mooncake published has 60 MB."""
MAX_TOKENS = 1 << 40
MAX_ID = (1 << 63) - 1
MAX_TIME_MS = 1e15
"""Before the year 33,658, for those who count from 1970."""
_HINT = 'like {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}'


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request."""

    time_s: float
    input_tokens: int
    output_tokens: int
    input_blocks: tuple[int, ...]
    """Ids of the full blocks of the input, front to back."""
    output_blocks: tuple[int, ...] = ()
    """Ids of the blocks that generation fills; empty where a file does not tell."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: list[TraceRequest]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        """Of all requests."""
        return sum(request.input_tokens for request in self.requests)

    def num_blocks(self) -> int:
        """Different full blocks."""
        return len({block for request in self.requests for block in (*request.input_blocks, *request.output_blocks)})


def read_trace(path: Path) -> Trace:
    """The trace of a JSONL file, named after it.

    Raises:
        StorageError: It cannot be read.
        UsageError: It is no regular file, or far too long.
        DamageError: A line is not of the format above; the message names it.
    """
    lines = enumerate(read_input(str(path), MAX_BYTES).split(b"\n"), 1)
    requests = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    requests.sort(key=lambda request: request.time_s)
    return Trace(path.stem, requests)


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSONL; what was generated reads back as it was."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(_line(request))}\n" for request in trace.requests)


def _parse(line: bytes, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
        time_s = _time_ms(row["timestamp"]) / 1000
        input_tokens, output_tokens = (_count(row[name], MAX_TOKENS) for name in ("input_length", "output_length"))
        blocks = tuple(_count(block, MAX_ID) for block in row["hash_ids"])
        output_blocks = tuple(_count(block, MAX_ID) for block in row.get("output_hash_ids", ()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{where} is no line of a trace: {error!r}", hint=_HINT) from error
    if len(blocks) < input_tokens // BLOCK_TOKENS:
        raise DamageError(f"{where} has {len(blocks)} blocks for {input_tokens} tokens", hint=_HINT)
    return TraceRequest(time_s, input_tokens, output_tokens, blocks[: input_tokens // BLOCK_TOKENS], output_blocks)


def _count(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{shown(value)} is not 0 to {most}")
    return value


def _time_ms(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_TIME_MS:
        raise ValueError(f"{shown(value)} is no time in milliseconds")  # NaN is none either
    return float(value)


def _line(request: TraceRequest) -> dict[str, int | list[int]]:
    return {
        "timestamp": round(request.time_s * 1000),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.input_blocks),
        "output_hash_ids": list(request.output_blocks),
    }


def merged(name: str, requests: Iterable[TraceRequest]) -> Trace:
    """A trace of requests in any order."""
    return Trace(name, sorted(requests, key=lambda request: request.time_s))
