"""``rewarm bench kv``: the storage path of KV chunks on one directory, all sides in turn, in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rewarm.bench import environment
from rewarm.bench.arms import Shape, Side
from rewarm.bench.cold import ColdCache
from rewarm.bench.floor import FloorSide, open_floor
from rewarm.bench.fs_tier import FsTierSide
from rewarm.bench.gil import busy_neighbour, sleeper
from rewarm.bench.host_tier import host_figures
from rewarm.bench.index import index_figures
from rewarm.bench.memory import Memory
from rewarm.bench.reads import Contest, engine_of, read_cold, store_new
from rewarm.bench.report import Figure, Report
from rewarm.bench.volume_side import VolumeSide
from rewarm.bench.workdir import work_directory
from rewarm.engine import ENGINE_KINDS, open_engine, probe_engines
from rewarm.engine.base import EngineConfig
from rewarm.errors import UnsupportedError
from rewarm.units import GIB, KIB, MIB

Step = Callable[[str], None]

MAX_ENGINES = len(ENGINE_KINDS)

_ONE = tuple(Shape(chunk, 1, 256 * MIB) for chunk in (128 * KIB, 1 * MIB, 4 * MIB))
_FOUR = tuple(Shape(chunk, 4, 128 * MIB) for chunk in (128 * KIB, 1 * MIB, 4 * MIB))
_SIXTEEN = tuple(Shape(chunk, 16, 32 * MIB) for chunk in (128 * KIB, 1 * MIB, 4 * MIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    read_shapes: tuple[Shape, ...] = _ONE + _FOUR + _SIXTEEN
    store_shapes: tuple[Shape, ...] = _ONE
    gil_shape: Shape = _ONE[1]
    rounds: int = 7
    """Of one request at a time, which goals stand on, and of the GIL's figures."""
    crowd_rounds: int = 3
    """Of several requests at once, and of stores."""
    host_shape: Shape = _ONE[2]
    sleep_phase_s: float = 2.0
    index_records: int = 200_000
    index_rounds: int = 3
    engines: tuple[str, ...] = ()
    """Engine kinds; empty: what ``auto`` chooses first, then the others that this machine has."""
    floor_tool: str = "auto"
    with_peer: bool = True

    @property
    def half_bytes(self) -> int:
        """Payload of the largest shape."""
        shapes = (*self.read_shapes, *self.store_shapes, self.gil_shape, self.host_shape)
        return max(shape.num_bytes for shape in shapes)

    @property
    def filled_bytes(self) -> int:
        """Payload that one side keeps on the device: the largest shape of each chunk size."""
        largest: dict[int, int] = {}
        for shape in (*self.read_shapes, self.gil_shape):
            largest[shape.chunk_bytes] = max(largest.get(shape.chunk_bytes, 0), shape.num_bytes)
        return sum(largest.values())

    @property
    def need_bytes(self) -> int:
        """Room on the device: what each side keeps, what the floor keeps and writes anew, and the index's names."""
        return self.filled_bytes * (MAX_ENGINES + 1) + self.half_bytes * 3 + self.host_shape.num_bytes * 2 + GIB

    @property
    def num_steps(self) -> int:
        """Upper bound of progress steps, for the bar: a side's turn, or a round of the index."""
        sides = MAX_ENGINES + 2  # and the peer on two kinds of memory
        reads = sum(self._rounds_of(shape) for shape in self.read_shapes) * sides
        return reads + len(self.store_shapes) * self.crowd_rounds * sides + self.rounds * 8 + self.index_rounds + 2

    def _rounds_of(self, shape: Shape) -> int:
        return self.rounds if shape.num_requests == 1 else self.crowd_rounds


FULL = Plan()
QUICK = Plan(read_shapes=_ONE + _SIXTEEN[1:2], store_shapes=_ONE[1:2], rounds=3, crowd_rounds=2, sleep_phase_s=1.0)


@dataclass(slots=True, kw_only=True)
class _Run:
    """What a run has open, and what it found so far."""

    plan: Plan
    directory: Path
    step: Step
    cold: ColdCache
    memory: Memory
    """Of our engines; the peer has memory of its own kind."""
    notes: list[str] = field(default_factory=list)

    def contest(self, stack: ExitStack) -> Contest:
        """Open every side and fill its files."""
        ours = [self._ours(kind, stack) for kind in self.plan.engines or _engine_kinds()]
        peers = self._peers(stack) if self.plan.with_peer else []
        size = self.plan.half_bytes
        calibration_bytes = min(256 * MIB, size)
        floor = open_floor(
            self.directory, file_bytes=size, calibration_bytes=calibration_bytes, tool=self.plan.floor_tool
        )
        stack.callback(floor.close)
        contest = Contest(floor=floor, ours=ours, peer=peers[0] if peers else None, witnesses=peers[1:], cold=self.cold)
        for shape in sorted({*self.plan.read_shapes, self.plan.gil_shape}, key=lambda shape: -shape.num_bytes):
            for side in contest.sides:
                side.fill(shape)
        os.sync()
        return contest

    def _ours(self, kind: str, stack: ExitStack) -> VolumeSide:
        directory = self.directory / f"rewarm-{kind}"
        side = VolumeSide(directory, self.memory, kind=kind, capacity_bytes=self.plan.filled_bytes)
        stack.callback(side.close)
        return side

    def _peers(self, stack: ExitStack) -> list[Side]:
        """vLLM's fs tier on shared memory, which it has in a server, and on the memory that our engines have."""
        shared = Memory(self.plan.half_bytes, shared=True)
        stack.callback(shared.close)
        try:
            peer = FsTierSide(self.directory / "fs-tier", shared)
        except UnsupportedError as missing:
            self.notes.append(f"no peer: {missing.message}")
            return []
        stack.callback(peer.close)
        witness = FsTierSide(self.directory / "fs-tier", self.memory, name="fs tier in our memory")
        stack.callback(witness.close)
        return [peer, witness]


def run(root: Path, plan: Plan, *, command: str, step: Step = lambda _: None) -> Report:
    """Measure, in a directory of its own below ``root`` that is removed again.

    Args:
        root: An existing directory on the device to be measured.
        plan: What to measure.
        command: The command line that asked for it, kept in the report.
        step: Called after each turn with what it was.
    Raises:
        StorageError: ``root`` cannot be used, or a side failed.
        VolumeFull: Too little room.
    """
    started, start = datetime.now(timezone.utc), time.monotonic()
    conditions = environment.describe(root)
    with ExitStack() as stack:
        directory = stack.enter_context(work_directory(root, need_bytes=plan.need_bytes, less="--quick needs less"))
        memory = Memory(plan.half_bytes)
        stack.callback(memory.close)
        bench = _Run(plan=plan, directory=directory, step=step, cold=ColdCache.detect(), memory=memory)
        contest = bench.contest(stack)
        figures = list(_figures(bench, contest))
        conditions |= _sides(contest, bench.cold)
    conditions["loadavg_after"] = list(os.getloadavg())
    return Report(
        command=command,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - start,
        figures=figures,
        environment=conditions,
        notes=bench.notes,
    )


def _figures(bench: _Run, contest: Contest) -> Iterator[Figure]:
    plan, step = bench.plan, bench.step
    for shape in plan.read_shapes:
        rounds = plan.rounds if shape.num_requests == 1 else plan.crowd_rounds
        yield from read_cold(contest, shape, rounds=rounds, step=step)
    for shape in plan.store_shapes:
        yield from store_new(contest, shape, rounds=plan.crowd_rounds, step=step)
    yield from busy_neighbour(contest, plan.gil_shape, rounds=plan.rounds, step=step)
    try:
        yield from host_figures(
            bench.directory,
            plan.host_shape,
            kind=plan.engines[0] if plan.engines else "auto",
            memory=bench.memory,
            cold=bench.cold,
            rounds=plan.rounds,
            step=step,
        )
    except UnsupportedError as missing:
        bench.notes.append(missing.message)
    yield sleeper(contest, plan.gil_shape, rounds=plan.rounds, phase_s=plan.sleep_phase_s, step=step)
    if plan.index_records:
        directory = bench.directory / "index"
        yield from index_figures(
            directory, num_records=plan.index_records, rounds=plan.index_rounds, cold=bench.cold, step=step
        )


def _engine_kinds() -> tuple[str, ...]:
    """What ``auto`` chooses, then every other kind that is here."""
    engine = open_engine(EngineConfig())
    chosen = engine.name
    engine.close()
    others = (kind for kind, reason in probe_engines().items() if not reason and kind != chosen)
    return (chosen, *others)


def _sides(contest: Contest, cold: ColdCache) -> dict[str, Any]:
    """How the sides were set up, for the environment."""
    floor = contest.floor
    assert isinstance(floor, FloorSide)
    return {
        "engine": engine_of(contest.ours[0]),
        "floor": f"{floor.name}: read {floor.setting_read}; write {floor.setting_write}",
        "peer": contest.peer.name if contest.peer else None,
        "cold": f"{cold.method}; 0 resident pages by {cold.asked_with or 'nothing asked'} in {cold.files_asked} files",
    }
