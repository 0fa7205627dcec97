"""``rewarm bench device``: what a server's worker does for the KV tier, without a server, on the device that is here.

A KV cache as vLLM has it, a volume with the KV of R requests, and in each round, in turn: the plain copies that nothing
can beat, each step of a load alone, one load, R loads at once, a store. After every load its bytes are compared on the
device, in blocks that were poisoned before and lie elsewhere in each round.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewarm.bench import environment
from rewarm.bench.cold import ColdCache
from rewarm.bench.report import Figure, Report, measured
from rewarm.bench.workdir import work_directory
from rewarm.config import KvConfig
from rewarm.engine.record import record_bytes
from rewarm.engine.workers import in_memory
from rewarm.errors import UnsupportedError, UsageError
from rewarm.kv.chunks import DEVICE_TARGET_BYTES, HOST_TARGET_BYTES, choose_chunk_tokens
from rewarm.units import GIB, MIB, format_size
from rewarm.volume import create_volume

if TYPE_CHECKING:
    from rewarm.bench.device_turns import DeviceRank, LoadTurn

BLOCK_TOKENS = 16
"""Tokens a KV block: what vLLM chooses."""
_ELEMENT_BYTES = 2
"""Of bfloat16."""
_SPARE_BYTES = 256 * MIB
"""Room beyond the records: names, and what a file system wants for itself."""

_LESS = "fewer --requests, --tokens or --layers need less"

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured; the defaults are a model of 32 billion parameters on one device, 4 GiB a request."""

    device: str = "auto"
    """``auto``, ``cpu``, or an accelerator as torch names it: ``cuda``, ``cuda:1``."""
    layers: int = 64
    kv_heads: int = 8
    head_size: int = 128
    tokens: int = 16384
    """Of a request."""
    requests: int = 4
    """R, loaded at once."""
    rounds: int = 3
    chunk_tokens: int = 0
    """0: as a server chooses it."""
    ring_bytes: int = KvConfig().ring_bytes

    @property
    def block_bytes(self) -> int:
        """Of one KV block over all layers."""
        return self.layers * self.kv_heads * self.head_size * 2 * BLOCK_TOKENS * _ELEMENT_BYTES

    @property
    def num_steps(self) -> int:
        """Progress steps: fills, then the turns of all rounds."""
        return self.requests + self.rounds * (6 if self.requests > 1 else 5)

    def chunk_blocks(self, *, on_host: bool) -> int:
        """KV blocks in a record.

        Raises:
            UsageError: The tokens of a request are not whole chunks, or a chunk is not whole blocks.
        """
        chunk_tokens = choose_chunk_tokens(
            self.block_bytes,
            BLOCK_TOKENS,
            target_bytes=HOST_TARGET_BYTES if on_host else DEVICE_TARGET_BYTES,
            asked_tokens=self.chunk_tokens,
        )
        if self.tokens % chunk_tokens:
            whole = -(-self.tokens // chunk_tokens) * chunk_tokens
            fits = self.tokens % BLOCK_TOKENS == 0  # a chunk is whole blocks
            smaller = f", or --chunk-tokens {math.gcd(self.tokens, chunk_tokens)}" if fits else ""
            raise UsageError(
                f"{self.tokens} tokens a request are no multiple of a chunk of {chunk_tokens}",
                hint=f"use --tokens {whole}{smaller}",
            )
        return chunk_tokens // BLOCK_TOKENS

    def capacity_bytes(self, chunk_blocks: int) -> int:
        """Room for R requests, and one that is written anew."""
        num_chunks = (self.requests + 1) * (self.tokens // BLOCK_TOKENS // chunk_blocks)
        return num_chunks * record_bytes(self.block_bytes * chunk_blocks) + _SPARE_BYTES


def run(root: Path, plan: Plan, *, command: str, step: Step = lambda _: None) -> Report:
    """Measure, in a directory of its own below ``root`` that is removed again.

    Args:
        root: An existing directory on the storage to be measured.
        plan: What to measure.
        command: The command line that asked for it, kept in the report.
        step: Called after each turn with what it was.
    Raises:
        UnsupportedError: No torch, no such device, or one with too little memory.
        UsageError: Sizes that do not fit together.
        StorageError: ``root`` cannot be used, or a load or a store failed.
        VolumeFull: Too little room.
        DamageError: A load delivered other bytes than were stored.
    """
    device = find_device(plan.device)
    started, start = datetime.now(timezone.utc), time.monotonic()
    conditions = environment.describe(root)  # with torch's version among the packages
    chunk_blocks = plan.chunk_blocks(on_host=device.type == "cpu")
    capacity_bytes = plan.capacity_bytes(chunk_blocks)
    cold = None if in_memory(str(root)) else ColdCache.detect()  # a cache in memory cannot be dropped
    with ExitStack() as stack:
        directory = stack.enter_context(work_directory(root, need_bytes=capacity_bytes + _SPARE_BYTES, less=_LESS))
        volume = directory / "volume"
        create_volume([str(volume)], capacity_bytes=capacity_bytes)
        rank = _open_rank(plan, device, volume, chunk_blocks)
        stack.callback(rank.close)
        figures = _figures(rank, plan, cold, step)
        conditions |= _conditions(rank, plan, cold, chunk_blocks)
    conditions["loadavg_after"] = list(os.getloadavg())
    return Report(
        command=command,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - start,
        figures=figures,
        environment=conditions,
        notes=[] if device.type != "cpu" else ["no device but host memory: the floor is a copy within it"],
    )


def find_device(name: str) -> Any:
    """The torch.device that ``Plan.device`` names.

    Raises:
        UnsupportedError: torch is not installed, or has no such device here.
        UsageError: Not a name of a device.
    """
    try:
        import torch
    except ImportError as missing:
        raise UnsupportedError(
            "this bench needs torch, which is not installed",
            hint="run it in the model server's Python environment, or: pip install torch",
        ) from missing
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device(here.type, 0) if here else torch.device("cpu")
    try:
        asked = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{name!r} is not a device", hint="auto, cpu, or as torch names it: cuda, cuda:1") from error
    if asked.type == "cpu":
        return asked
    if here is None or asked.type != here.type or (asked.index or 0) >= torch.accelerator.device_count():
        found = f"{torch.accelerator.device_count()} of {here.type}" if here else "none"
        raise UnsupportedError(f"there is no device {name} here; torch {torch.__version__} has {found}")
    return torch.device(asked.type, asked.index or 0)


def _open_rank(plan: Plan, device: Any, volume: Path, chunk_blocks: int) -> DeviceRank:
    from rewarm.bench.device_cache import KvCache
    from rewarm.bench.device_turns import DeviceRank

    request_blocks = plan.tokens // BLOCK_TOKENS
    cache = KvCache(
        device,
        layers=plan.layers,
        shape=(plan.kv_heads, BLOCK_TOKENS, 2 * plan.head_size),  # vLLM's: K and V of a token side by side
        requests=plan.requests,
        request_blocks=request_blocks,
    )
    kv = KvConfig(roots=(str(volume),), ring_bytes=plan.ring_bytes)
    return DeviceRank(cache, kv, request_blocks=request_blocks, chunk_blocks=chunk_blocks)


class _Series:
    """Values of each figure, and their floors, one a round."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], tuple[list[float], list[float]]] = {}

    def add(self, name: str, value: float, *, floor: float | None = None, unit: str = "ms") -> None:
        values, floors = self._rounds.setdefault((f"kv.device.{name}", unit), ([], []))
        values.append(value)
        floors += [] if floor is None else [floor]

    def add_load(self, turn: LoadTurn, *, floor: float) -> None:
        """All of it, each request where there were several, and the waterfall."""
        name = f"load.x{len(turn.ended)}"
        self.add(name, turn.ended[-1], floor=floor)
        parts = {str(number): ended for number, ended in enumerate(turn.ended, 1)} if len(turn.ended) > 1 else {}
        for part, value in (parts | {"returned": turn.returned} | turn.marks).items():
            self.add(f"{name}.{part}", value, floor=floor)

    def figures(self, engine: str) -> list[Figure]:
        return [
            measured(name, unit, values, floors=floors, engine="" if ".link." in name else engine)
            for (name, unit), (values, floors) in self._rounds.items()
        ]


def _figures(rank: DeviceRank, plan: Plan, cold: ColdCache | None, step: Step) -> list[Figure]:
    rank.cache.shuffle(0)
    for request in range(plan.requests):
        rank.cache.paint(request)
        rank.fill(request)
        step(f"fill {request}")
    os.sync()
    rank.warm_up()
    series = _Series()
    for number in range(plan.rounds):
        _measure(rank, plan, number, series, cold, step)
    return series.figures(rank.side.engine.name)


def _measure(rank: DeviceRank, plan: Plan, number: int, series: _Series, cold: ColdCache | None, step: Step) -> None:
    """One round."""
    gib, num_chunks = rank.request_bytes / GIB, rank.num_chunks
    request = number % plan.requests

    def done(what: str) -> None:
        step(what)
        if cold is not None:
            cold.drop(rank.record_files())

    rank.cache.shuffle(number + 1)
    link = rank.link_in_ms(num_chunks)
    series.add("link.in", gib / link * 1000, unit="GiB/s")
    link_out = gib / rank.link_out_ms(num_chunks) * 1000
    series.add("link.out", link_out, unit="GiB/s")
    done("link")
    series.add("read", rank.read_ms(request), floor=link)
    done("read")
    series.add("scatter", rank.scatter_ms(request), floor=link)
    step("scatter")
    at_once = [list(range(plan.requests))] if plan.requests > 1 else []
    for requests in [[request], *at_once]:
        rank.cache.poison()
        floor = link if len(requests) == 1 else rank.link_in_ms(num_chunks * len(requests))
        series.add_load(rank.load(requests), floor=floor)
        rank.cache.check(requests)
        done(f"load x{len(requests)}")
    series.add("store", rank.store_gib_s(request), floor=link_out, unit="GiB/s")
    step("store")


def _conditions(rank: DeviceRank, plan: Plan, cold: ColdCache | None, chunk_blocks: int) -> dict[str, Any]:
    """What a reader needs beside the machine, for the environment."""
    setup = rank.side.setup
    return {
        "accelerator": rank.device_name,
        "engine": rank.side.engine.name,
        "kv": asdict(plan) | {"chunk_tokens": chunk_blocks * BLOCK_TOKENS},
        "request_bytes": rank.request_bytes,
        "chunk_bytes": rank.payload_bytes,
        "ring": f"{rank.side.ring_bytes // rank.side.slot_bytes} slots of {format_size(rank.side.slot_bytes)}",
        "store_buffer_bytes": setup.store_buffer_bytes,
        "planes": len(setup.planes.planes),
        "open_s": rank.open_s,
        "cold": f"{cold.method}; 0 resident pages in {cold.files_asked} files" if cold else "no: the root is in memory",
    }
