"""What the parts of the suite share."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rewarm.engine.base import (
    BlockPlanes,
    Completion,
    Engine,
    EngineConfig,
    Priority,
    ReadRecord,
    RecordTarget,
    ToBlocks,
    Transfer,
    WriteRecord,
)
from rewarm.engine.memory import AlignedBuffer, alloc_aligned, view_at
from rewarm.engine.record import record_bytes
from rewarm.errors import UnsupportedError
from rewarm.units import MIB

KEY = bytes(range(32))
NAMESPACE = bytes(range(100, 132))
CREATED_NS = 1_700_000_000_123_456_789
LIMIT_S = 60.0
"""A wait that takes longer has failed."""
NUM_SLOTS = 3
SLOT_BYTES = record_bytes(3 * MIB)


class Base:
    """Fixtures: ``engine`` has four workers and a ring of NUM_SLOTS slots; ``engines`` makes others; all are closed."""

    make: ClassVar[Callable[[EngineConfig], Engine]]

    @pytest.fixture
    def engines(self) -> Iterator[Callable[..., Engine]]:
        """Makes engines: fields of EngineConfig by name."""
        made: list[Engine] = []

        def open_one(**fields: Any) -> Engine:
            ring = {"ring_bytes": NUM_SLOTS * SLOT_BYTES, "slot_bytes": SLOT_BYTES}
            try:
                engine = type(self).make(EngineConfig(**{"num_workers": 4, **ring, **fields}))
            except UnsupportedError as error:
                pytest.skip(str(error))
            made.append(engine)
            return engine

        yield open_one
        for engine in made:
            if hold := getattr(engine, "hold", None):
                hold(None)
            engine.close()

    @pytest.fixture
    def engine(self, engines: Callable[..., Engine]) -> Engine:
        """The usual engine."""
        return engines()


def hold(engine: Engine, part: str | None) -> None:
    """Let the I/O of files hang whose path contains ``part``; None ends it."""
    if not (method := getattr(engine, "hold", None)):
        pytest.skip(f"engine {engine.name} has no hold(): its I/O cannot be made to hang")
    method(part)


def num_queued(engine: Engine) -> int:
    """Transfers that have no worker yet. For engines with ``usage()``."""
    usage: Callable[[], dict[str, int]] | None = getattr(engine, "usage", None)
    if usage is None:
        pytest.skip(f"engine {engine.name} has no usage(): whether a transfer has started cannot be seen")
    return usage()["queued"]


def finished(completion: Completion) -> list[int]:
    """The results, once the batch is done."""
    assert completion.wait(LIMIT_S), f"the batch was not done after {LIMIT_S} s"
    return completion.results()


def run(engine: Engine, *transfers: Transfer, priority: Priority = Priority.LOAD) -> list[int]:
    """Submit a batch and wait for it."""
    return finished(engine.submit(transfers, priority=priority))


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that nothing tells of."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.001)


def random_buffer(num_bytes: int, seed: int = 0) -> AlignedBuffer:
    """Aligned memory with room for the padded payload; every byte of it is random."""
    buffer = alloc_aligned(record_bytes(num_bytes))
    buffer.view[:] = random.Random(seed).randbytes(len(buffer.view))
    return buffer


def write_of(path: Path, buffer: AlignedBuffer, num_bytes: int, **fields: Any) -> WriteRecord:
    """The store of a buffer's first bytes."""
    temporary = str(path.with_name(path.name + ".tmp"))
    usual = {"key": KEY, "namespace_id": NAMESPACE, "created_ns": CREATED_NS, "temporary_path": temporary}
    return WriteRecord(path=str(path), address=buffer.address, payload_bytes=num_bytes, **{**usual, **fields})


def read_of(path: Path, num_bytes: int, target: RecordTarget, **fields: Any) -> ReadRecord:
    """The load of a record of write_of()."""
    usual: dict[str, Any] = {"key": KEY, "namespace_id": NAMESPACE}
    return ReadRecord(path=str(path), payload_bytes=num_bytes, target=target, **{**usual, **fields})


def stored(engine: Engine, path: Path, num_bytes: int, seed: int = 0) -> bytes:
    """Write a record and return its payload."""
    buffer = random_buffer(num_bytes, seed)
    assert run(engine, write_of(path, buffer, num_bytes), priority=Priority.STORE) == [0]
    return bytes(buffer.view[:num_bytes])


def slot_payload(completion: Completion, index: int, num_bytes: int) -> bytes:
    """What lies in the slot of a transfer."""
    return bytes(view_at(completion.slot_address(index), num_bytes))


class Cache:
    """A KV cache of P planes of B blocks in host memory, full of random bytes."""

    def __init__(self, num_planes: int, num_blocks: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.buffers = [random_buffer(num_blocks * page_bytes, 1000 + plane) for plane in range(num_planes)]
        self.planes = BlockPlanes(array("Q", [buffer.address for buffer in self.buffers]), page_bytes)

    def page(self, plane: int, block: int) -> memoryview:
        """The bytes of one block in one plane."""
        return self.buffers[plane].view[block * self.page_bytes : (block + 1) * self.page_bytes]

    def bytes(self) -> bytes:
        """All of it."""
        return b"".join(bytes(buffer.view) for buffer in self.buffers)

    def target(self, block_ids: list[int], skip_blocks: int = 0) -> ToBlocks:
        """Blocks of this cache as the place of a payload."""
        return ToBlocks(self.planes, array("q", block_ids), skip_blocks)
