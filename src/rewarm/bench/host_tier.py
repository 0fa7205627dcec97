"""The host tier beside flash: one request from memory, half of it from memory, and all of it from flash, in turn."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rewarm.bench.alternate import alternate
from rewarm.bench.arms import Shape, Stopwatch, Turn, size_label
from rewarm.bench.cold import ColdCache
from rewarm.bench.memory import Memory
from rewarm.bench.report import Figure, measured
from rewarm.bench.workdir import work_directory
from rewarm.engine import EngineConfig, open_engine
from rewarm.engine.base import ToMemory
from rewarm.engine.workers import TMPFS, file_system_type, num_workers_in_memory
from rewarm.errors import RewarmError, StorageError, UnsupportedError
from rewarm.metrics import Counters
from rewarm.units import MIB
from rewarm.volume import Outcome, Volume, create_volume
from rewarm.volume.tiered import HOST_ROOT, TieredNamespace, TieredVolume

IN_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 64 * MIB
_PROMOTE_LIMIT_S = 300.0


def host_figures(
    directory: Path,
    shape: Shape,
    *,
    kind: str,
    memory: Memory,
    cold: ColdCache,
    rounds: int,
    step: Callable[[str], None],
) -> Iterator[Figure]:
    """Rates of a load of one request; the floor is the same load from flash, cold, before and after it.

    Args:
        directory: On the device; exists.
        shape: Of one request.
        kind: Engine kind of both tiers.
        memory: Where loads go, with what they are compared.
        cold: Makes files on the device cold.
        rounds: Turns of each.
        step: Called after each turn.
    Raises:
        UnsupportedError: There is no tmpfs, or too little room in it.
        StorageError: A record was not where it should have been.
    """
    with ExitStack() as stack:
        tiers = _Tiers(directory, shape, kind, memory, cold, stack)
        takes = {"host": partial(tiers.load, 1.0), "host_half": partial(tiers.load, 0.5)}
        taken = alternate(partial(tiers.load, 0.0), takes, rounds=rounds, step=step)
        for name in takes:
            pairs = taken.of(name)
            yield measured(
                f"kv.{name}.{size_label(shape.chunk_bytes)}",
                "GiB/s",
                [pair.turn.gib_s for pair in pairs],
                floors=[pair.base_gib_s for pair in pairs],
                engine=tiers.engine_name,
                note="the floor is the same load from flash",
            )


class _Tiers:
    """A volume with a host tier for each share of the request that is to lie in memory."""

    def __init__(
        self, directory: Path, shape: Shape, kind: str, memory: Memory, cold: ColdCache, stack: ExitStack
    ) -> None:
        self._shape, self._memory, self._cold = shape, memory, cold
        if file_system_type(str(IN_MEMORY)) != TMPFS:
            raise UnsupportedError(f"no host tier: {IN_MEMORY} is no tmpfs here")
        size = 2 * shape.num_bytes + _SPARE_BYTES
        try:
            in_memory = stack.enter_context(work_directory(IN_MEMORY, need_bytes=size + _SPARE_BYTES, less=""))
        except RewarmError as error:
            raise UnsupportedError(f"no host tier: {error.message}") from error
        self._roots = [str(directory / "host-tier"), str(in_memory / "copies")]
        for root in self._roots:
            create_volume([root], capacity_bytes=size)
        self._engines = [
            open_engine(EngineConfig(kind=kind)),
            open_engine(EngineConfig(kind=kind, num_workers=num_workers_in_memory())),
        ]
        for engine in self._engines:
            stack.callback(engine.close)
        self.engine_name = self._engines[0].name
        filled = self._open(read_only=False)
        try:
            for share in (1.0, 0.5):
                self._fill(filled, share)
        finally:
            filled.close()
        self._volume = self._open(read_only=True)  # promotes nothing while it is measured
        stack.callback(self._volume.close)
        os.sync()

    def load(self, share: float) -> Turn:
        """Load the request with this share of its chunks in memory, the rest cold on flash; all bytes are compared."""
        namespace = self._namespace(self._volume, share)
        expected = self._in_memory(share)
        chunks = range(self._shape.num_chunks)
        self._cold.drop([self._file(namespace, chunk) for chunk in chunks if chunk not in expected])
        self._memory.clear(self._shape.num_bytes)
        with Stopwatch().running() as watch:
            handle = namespace.load(self._targets(chunks))
            handle.wait()
        if set(handle.results()) != {Outcome.HIT}:
            raise StorageError("a record was missed that had been stored", path=self._roots[0])
        if {chunk for chunk in chunks if handle.root_of(chunk) == HOST_ROOT} != expected:
            raise StorageError("a record did not come from the tier where it should be", path=self._roots[1])
        self._memory.check(self._shape.num_bytes, "the host tier")
        return Turn(watch.seconds, self._shape.num_bytes, watch.cpu_s, watch.read_bytes)

    def _open(self, *, read_only: bool) -> TieredVolume:
        flash = Volume.open(self._roots[:1], engine=self._engines[0], janitor=False)
        host = Volume.open(self._roots[1:], engine=self._engines[1], janitor=False, read_only=read_only)
        return TieredVolume(flash, host, Counters())

    def _fill(self, volume: TieredVolume, share: float) -> None:
        namespace = self._namespace(volume, share)
        source, size = self._memory.source_address, self._shape.chunk_bytes
        stored = namespace.store([(_key(chunk), source + chunk * size) for chunk in range(self._shape.num_chunks)])
        stored.wait()
        if not all(stored.results()):
            raise StorageError("the volume could not store its chunks", path=self._roots[0])
        for _ in range(2):
            loaded = namespace.load(self._targets(self._in_memory(share)))
            loaded.wait()
            loaded.results()
        if not volume.wait_promoted(_PROMOTE_LIMIT_S):
            raise StorageError(f"copies were not made within {_PROMOTE_LIMIT_S:.0f} s", path=self._roots[1])

    def _namespace(self, volume: TieredVolume, share: float) -> TieredNamespace:
        """Where nothing lies in memory, the records are those of the share 1: they are read from flash alone."""
        identity = {"kind": "bench", "share": share or 1.0}
        namespace = volume.namespace(identity, payload_bytes=self._shape.chunk_bytes)
        namespace.wait_scanned()
        return namespace if share else TieredNamespace(namespace.flash, None, None, Counters())

    def _in_memory(self, share: float) -> set[int]:
        """Chunks: every so many."""
        return set(range(0, self._shape.num_chunks, round(1 / share))) if share else set()

    def _targets(self, chunks: Iterable[int]) -> Sequence[tuple[bytes, ToMemory]]:
        base, size = self._memory.target_address, self._shape.chunk_bytes
        return [(_key(chunk), ToMemory(base + chunk * size)) for chunk in chunks]

    def _file(self, namespace: TieredNamespace, chunk: int) -> Path:
        return Path(self._volume.roots[HOST_ROOT + 1].paths.record(namespace.id, _key(chunk)))


def _key(chunk: int) -> bytes:
    return hashlib.sha256(f"chunk {chunk}".encode()).digest()
