"""Rewarm's side: a volume of its own on one engine, driven through the same calls as the server's adapters."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from rewarm.bench.arms import Shape, Side, Stopwatch, Turn
from rewarm.bench.memory import Memory, requests_of
from rewarm.engine import open_engine
from rewarm.engine.base import Engine, EngineConfig, ToMemory
from rewarm.errors import StorageError
from rewarm.units import GIB
from rewarm.volume import Namespace, Outcome, Volume, create_volume

_SPARE_BYTES = GIB // 4
"""Capacity beyond the payload: header pages, and room so that nothing is evicted while it is measured."""


class VolumeSide(Side):
    """Loads are whole requests into memory in place (ToMemory), each header and piece checked."""

    def __init__(self, directory: Path, memory: Memory, *, kind: str, capacity_bytes: int) -> None:
        """Create a volume on an engine.

        Args:
            directory: Root of the volume; made if missing.
            memory: Sources and targets.
            kind: Engine kind, or ``auto``.
            capacity_bytes: Payload of all shapes that will be filled.
        """
        self._directory = directory
        self.memory: Memory = memory
        self.engine: Engine = open_engine(EngineConfig(kind=kind))
        self.name = f"rewarm {self.engine.name}"
        self._volume = _new_volume(directory, self.engine, capacity_bytes + _SPARE_BYTES)
        self._namespaces: dict[int, Namespace] = {}
        self._files: dict[int, dict[bytes, Path]] = {}
        self._numbers = itertools.count()

    def fill(self, shape: Shape) -> None:
        """Store the shape's chunks that are not there yet."""
        namespace = self._namespace(shape)
        missing = [chunk for chunk in range(shape.num_chunks) if not namespace.contains(_key(chunk))]
        handle = namespace.store([(_key(chunk), self._source(shape, chunk)) for chunk in missing])
        handle.wait()
        if not all(handle.results()):
            raise StorageError(f"{self.name} could not store its chunks", path=str(self._directory))
        found = (self._directory / namespace.id.hex()).rglob("*.rec")
        self._files[shape.chunk_bytes] = {bytes.fromhex(path.stem): path for path in found}

    def files(self, shape: Shape) -> Sequence[Path]:
        """Record files of the shape's chunks."""
        known = self._files[shape.chunk_bytes]
        return [known[_key(chunk)] for chunk in range(shape.num_chunks)]

    def load(self, shape: Shape) -> Turn:
        """One load a request, all submitted at once, waited for in order."""
        namespace = self._namespace(shape)
        base, size = self.memory.target_address, shape.chunk_bytes
        requests = [[(_key(chunk), ToMemory(base + chunk * size)) for chunk in r] for r in requests_of(shape)]
        with Stopwatch().running() as watch:
            handles = [namespace.load(request) for request in requests]
            for handle in handles:
                handle.wait()
        for handle in handles:
            outcomes = handle.results()
            if any(outcome is not Outcome.HIT for outcome in outcomes):
                raise StorageError(f"{self.name} missed chunks that it had stored", path=str(self._directory))
        return Turn(watch.seconds, shape.num_bytes, watch.cpu_s, watch.read_bytes)

    def store(self, shape: Shape) -> Turn:
        """One store a request, into a new volume that is removed afterwards."""
        directory = self._directory.with_name(f"{self._directory.name}-written-{next(self._numbers)}")
        volume = _new_volume(directory, self.engine, shape.num_bytes + _SPARE_BYTES)
        try:
            namespace = volume.namespace(_identity(shape), payload_bytes=shape.chunk_bytes)
            requests = [[(_key(chunk), self._source(shape, chunk)) for chunk in r] for r in requests_of(shape)]
            with Stopwatch().running() as watch:
                handles = [namespace.store(request) for request in requests]
                for handle in handles:
                    handle.wait()
            if not all(all(handle.results()) for handle in handles):
                raise StorageError(f"{self.name} could not store its chunks", path=str(directory))
        finally:
            volume.close()
            shutil.rmtree(directory)
        return Turn(watch.seconds, shape.num_bytes, watch.cpu_s, watch.written_bytes)

    def close(self) -> None:
        """Close volume and engine."""
        self._volume.close()
        self.engine.close()

    def _namespace(self, shape: Shape) -> Namespace:
        if shape.chunk_bytes not in self._namespaces:
            made = self._volume.namespace(_identity(shape), payload_bytes=shape.chunk_bytes)
            self._namespaces[shape.chunk_bytes] = made
        return self._namespaces[shape.chunk_bytes]

    def _source(self, shape: Shape, chunk: int) -> int:
        return self.memory.source_address + chunk * shape.chunk_bytes


def _new_volume(directory: Path, engine: Engine, capacity_bytes: int) -> Volume:
    directory.mkdir(parents=True)
    create_volume([str(directory)], capacity_bytes=capacity_bytes)
    return Volume.open([str(directory)], engine=engine)


def _identity(shape: Shape) -> dict[str, object]:
    return {"kind": "bench", "chunk_bytes": shape.chunk_bytes}


def _key(chunk: int) -> bytes:
    return hashlib.sha256(f"chunk {chunk}".encode()).digest()
