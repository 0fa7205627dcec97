"""Which chunks can be loaded and which are worth storing: the scheduler's side, without torch and without I/O.

A chunk counts as present when the record of every shard is. The index of each namespace answers at once; what it does
not know is probed in one batch off this thread, and until the answer is there (or the wait has lasted long enough) a
lookup says "not yet".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rewarm.kv.chunks import StepReport
from rewarm.kv.keys import group_chunk, shard_key
from rewarm.volume import Outcome

PROBE_LIMIT_S = 1.0
"""How long a lookup waits for the file system before it goes on with what the index knows."""
PROBE_GRACE_S = 0.001
"""How long the first look at a probe may wait in place: most local ones end sooner, and a further step costs more."""
MAX_PROBE_KEYS = 4096
"""Keys a probe. A longer unknown prefix is looked at in part; what lies behind is computed again."""
COOL_S = 60.0
"""How long a chunk that failed to load counts as absent, whatever the file system says, unless it is stored again."""
MAX_REMEMBERED = 200_000
"""Chunk ids that each of the bounded memories here keeps: about 30 MB at most."""


class ProbeHandle(Protocol):
    """A look at the file system that goes on elsewhere; it feeds the namespace's index."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...


class NamespaceIndex(Protocol):
    """What ChunkPresence needs of a namespace."""

    def contains(self, key: bytes) -> bool: ...
    def probe(self, keys: Sequence[bytes]) -> ProbeHandle: ...
    def note_present(self, keys: Sequence[bytes], root_id: str = "") -> None: ...
    def note_absent(self, keys: Sequence[bytes]) -> None: ...
    def is_in_host(self, key: bytes) -> bool: ...
    def touch(self, keys: Sequence[bytes]) -> None: ...
    def own(self, keys: Sequence[bytes], tenant: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of every chunk."""

    namespace: NamespaceIndex
    rank: int

    def key(self, chunk: bytes) -> bytes:
        """The record key of this part of ``chunk``."""
        return shard_key(chunk, self.rank)


class PrefixLookup:
    """The lookup of one request: started once, asked at every step until it answers, remembered after that."""

    def __init__(self, presence: ChunkPresence, chunks: Sequence[bytes], first: int) -> None:
        self._presence = presence
        self.chunks = chunks
        """Ids of all chunks of the request."""
        self.first = first
        """The chunk from which on presence was looked up; those before are resident."""
        self._probes: list[ProbeHandle] | None = None
        self._num_in_host: dict[tuple[int, int], int] = {}
        self._started = presence.clock()
        self._end: int | None = None

    def end(self) -> int | None:
        """As ChunkPresence.count_present(); None: not known yet, ask again."""
        if self._end is None:
            self._end = self._look()
        return self._end

    def num_in_host(self, first: int, end: int) -> int:
        """As ChunkPresence.count_in_host() of these chunks, when it was asked first."""
        if (first, end) not in self._num_in_host:
            self._num_in_host[first, end] = self._presence.count_in_host(self.chunks[first:end])
        return self._num_in_host[first, end]

    def _look(self) -> int | None:
        end = self._presence.count_present(self.chunks, self.first)
        if end == len(self.chunks):
            return end
        if self._probes is None:
            self._probes = self._presence.probe_unknown(self.chunks[end:])
            deadline = self._started + PROBE_GRACE_S
            for probe in self._probes:
                probe.wait(max(0.0, deadline - self._presence.clock()))
        if all(probe.done() for probe in self._probes):
            return self._presence.count_present(self.chunks, end)
        return end if self._presence.clock() - self._started > PROBE_LIMIT_S else None


class ChunkPresence:
    """Presence of chunks over all shards, and the stores that are under way. One thread, no I/O."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        store: str,
        windows: Sequence[int] = (0,),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            shards: Where the parts of each chunk lie; at least one.
            store: ``always``, or ``on_reuse``: only what is computed a second time.
            windows: For each KV cache group, how many chunks before the end of a prefix it needs; 0: all.
            clock: Seconds, never backwards.
        """
        self._windows = tuple(windows)
        self._shards = tuple(shards)
        self._store_on_reuse = store == "on_reuse"
        self.clock = clock
        self._cooling: dict[bytes, float] = {}
        self._storing: dict[bytes, int] = {}
        self._elsewhere: dict[bytes, str] = {}
        """Record key -> root_id, until every rank has stored its part of the chunk."""
        self._seen: dict[bytes, None] = {}

    def look_up(self, chunks: Sequence[bytes], first: int) -> PrefixLookup:
        """Ask how far ``chunks`` are present without a gap, from index ``first`` on."""
        return PrefixLookup(self, chunks, first)

    def is_present(self, chunk: bytes) -> bool:
        """Whether every shard's record of one group's chunk is known to be there; in memory only."""
        if self._cooling and self._is_cooling(chunk):
            return False
        return all(shard.namespace.contains(shard.key(chunk)) for shard in self._shards)

    def count_present(self, chunks: Sequence[bytes], first: int) -> int:
        """How many leading chunks can be had: those before ``first`` are resident, the others are present in each
        group that needs them.

        Args:
            chunks: As chunk_id() named them; what other groups keep of them is found by group_chunk().
            first: Where to begin; also the least that is returned.
        """
        end = len(chunks)
        for group, window in enumerate(self._windows):
            if not window:
                end = self._count_group(chunks, first, end, group)
        while end > first:
            gap = max((self._gap(chunks, first, end, group) for group in range(len(self._windows))), default=-1)
            if gap < 0:
                break
            end = gap
        return end

    def _count_group(self, chunks: Sequence[bytes], first: int, end: int, group: int) -> int:
        for index in range(first, end):
            if not self.is_present(group_chunk(chunks[index], group) if group else chunks[index]):
                return index
        return end

    def _gap(self, chunks: Sequence[bytes], first: int, end: int, group: int) -> int:
        """The last chunk that the window of ``group`` needs before ``end`` and lacks; -1: none."""
        begin = max(first, end - self._windows[group])
        lacking = (i for i in range(end - 1, begin - 1, -1) if not self.is_present(group_chunk(chunks[i], group)))
        return next(lacking, -1) if self._windows[group] else -1

    def count_in_host(self, chunks: Sequence[bytes]) -> int:
        """Of chunks, those of which the host tier is known to have every shard's record; in memory only."""
        return sum(all(shard.namespace.is_in_host(shard.key(chunk)) for shard in self._shards) for chunk in chunks)

    def probe_unknown(self, chunks: Sequence[bytes]) -> list[ProbeHandle]:
        """Start to look in the file system for the records of ``chunks`` that the index lacks."""
        wanted: dict[int, list[bytes]] = {}
        groups = range(len(self._windows))
        for base in chunks[: max(1, MAX_PROBE_KEYS // len(self._shards) // len(groups))]:
            if self._is_cooling(base):
                break
            for chunk in (group_chunk(base, group) for group in groups):
                for number, shard in enumerate(self._shards):
                    key = shard.key(chunk)
                    if not shard.namespace.contains(key):
                        wanted.setdefault(number, []).append(key)
        return [self._shards[number].namespace.probe(keys) for number, keys in wanted.items()]

    def probe(self, chunks: Sequence[bytes]) -> list[ProbeHandle]:
        """Start to look in the file system for all records of ``chunks``, known or not; the index learns."""
        return [shard.namespace.probe([shard.key(chunk) for chunk in chunks]) for shard in self._shards]

    def touch(self, chunks: Iterable[bytes]) -> None:
        """Note that ``chunks`` are about to be loaded, for the order of eviction."""
        chunks = list(chunks)
        for shard in self._shards:
            shard.namespace.touch([shard.key(chunk) for chunk in chunks])

    def own(self, chunks: Iterable[bytes], tenant: bytes) -> None:
        """Note that ``chunks``, stored or about to be, are a tenant's, for its quota."""
        chunks = list(chunks)
        for shard in self._shards:
            shard.namespace.own([shard.key(chunk) for chunk in chunks], tenant)

    def wants_store(self, chunk: bytes) -> bool:
        """Whether to store a chunk that has just been computed; True marks it as being stored."""
        if chunk in self._storing or self.is_present(chunk):
            return False
        if self._store_on_reuse and chunk not in self._seen:
            _remember(self._seen, chunk, None)
            return False
        _remember(self._storing, chunk, 0)
        return True

    def is_storing(self, chunk: bytes) -> bool:
        """Whether a store is under way that some rank has not yet told the end of."""
        return chunk in self._storing

    def take(self, report: StepReport) -> None:
        """Learn what the ranks stored, gave up and failed to load."""
        for key, root_id in report.elsewhere.items():
            _remember(self._elsewhere, key, root_id)
        for chunk, count in report.stored.items():
            if chunk not in self._storing:
                continue  # another rank gave it up before
            self._storing[chunk] += count
            if self._storing[chunk] >= len(self._shards):
                del self._storing[chunk]
                self._cooling.pop(chunk, None)
                self._note_present(chunk)
        for chunk in (*report.dropped, *report.put_off):
            self._storing.pop(chunk, None)
        for chunk, outcome in report.failed.items():
            # Absent from now on: a lookup that still found it would load and fail in a circle, for ever.
            _remember(self._cooling, chunk, self.clock() + COOL_S)
            if outcome in (Outcome.MISS, Outcome.DAMAGED):
                for shard in self._shards:
                    shard.namespace.note_absent([shard.key(chunk)])

    def _note_present(self, chunk: bytes) -> None:
        for shard in self._shards:
            key = shard.key(chunk)
            shard.namespace.note_present([key], self._elsewhere.pop(key, ""))

    def _is_cooling(self, chunk: bytes) -> bool:
        until = self._cooling.get(chunk)
        if until is None:
            return False
        if self.clock() < until:
            return True
        del self._cooling[chunk]
        return False


V = TypeVar("V")


def _remember(memory: dict[bytes, V], key: bytes, value: V) -> None:
    """Put into a memory of bounded size, the newest last."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MAX_REMEMBERED:
        del memory[next(iter(memory))]
