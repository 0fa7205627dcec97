"""What routers are told: each chunk once, its end when it is known, little memory, nothing that throws."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from rewarm.kv.announcer import LOOK_CHUNKS, LOOK_S, Announcer
from rewarm.kv.chunks import StepReport
from rewarm.kv.presence import ChunkPresence, Shard
from rewarm.volume import Outcome

BLOCKS = 4
CHUNKS = [bytes([number]) * 32 for number in range(8)]


class Probe:
    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.is_done = False

    def finish(self) -> None:
        self._answer()
        self.is_done = True

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.is_done


class Namespace:
    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.on_disk: set[bytes] = set()
        self.probes: list[tuple[list[bytes], Probe]] = []

    def contains(self, key: bytes) -> bool:
        return key in self.known

    def probe(self, keys: Sequence[bytes]) -> Probe:
        made = Probe(lambda: self.known.difference_update(set(keys) - self.on_disk))
        self.probes.append((list(keys), made))
        return made

    def note_present(self, keys: Sequence[bytes], root_id: str = "") -> None:
        self.known.update(keys)
        self.on_disk.update(keys)

    def note_absent(self, keys: Sequence[bytes]) -> None:
        self.known.difference_update(keys)


class Maker:
    """The request is a list of chunks here; an event a tuple."""

    def hashes(self, request: list[bytes], index: int) -> list[bytes]:
        return [request[index][:8] + bytes([block]) * 24 for block in range(BLOCKS)]

    def stored(self, request: list[bytes], index: int) -> tuple[str, list[bytes]]:
        return "stored", self.hashes(request, index)

    def removed(self, hashes: list[bytes]) -> tuple[str, list[bytes]]:
        return "removed", hashes


class Case:
    def __init__(self, num_ranks: int = 1, **settings: Any) -> None:
        self.now = 1000.0
        self.namespaces = [Namespace() for _ in range(num_ranks)]
        shards = [Shard(namespace, rank) for rank, namespace in enumerate(self.namespaces)]
        self.presence = ChunkPresence(shards, store="always", clock=lambda: self.now)
        self.announcer = Announcer(self.presence, Maker(), **settings)

    def order(self, index: int) -> None:
        assert self.presence.wants_store(CHUNKS[index])
        self.announcer.ordered(CHUNKS[index], CHUNKS, index)

    def report(self, **what: Any) -> None:
        report = StepReport(**what)
        self.presence.take(report)
        self.announcer.take(report)

    def events(self) -> list[tuple[str, int]]:
        """(what, number of the chunk)"""
        told = self.announcer.take_events()
        assert all(len(hashes) == BLOCKS and hashes == Maker().hashes([hashes[0]], 0) for _, hashes in told)
        return [(what, hashes[0][0]) for what, hashes in told]

    def store(self, index: int) -> None:
        self.order(index)
        self.report(stored={CHUNKS[index]: len(self.namespaces)})

    def evict(self, index: int) -> None:
        for rank, namespace in enumerate(self.namespaces):
            namespace.on_disk.discard(Shard(namespace, rank).key(CHUNKS[index]))


def test_a_chunk_is_announced_when_the_last_rank_has_written_it() -> None:
    case = Case(num_ranks=2)
    case.order(0)
    assert case.events() == []
    case.report(stored={CHUNKS[0]: 1})
    assert case.events() == []
    case.report(stored={CHUNKS[0]: 1})
    assert case.events() == [("stored", 0)]
    case.announcer.found(CHUNKS[0], CHUNKS, 0)
    assert case.events() == [], "once"


@pytest.mark.parametrize("end", ["dropped", "put_off"])
def test_a_store_that_failed_is_not_announced(end: str) -> None:
    case = Case(num_ranks=2)
    case.order(1)
    case.report(**{end: {CHUNKS[1]: 1}})
    case.report(stored={CHUNKS[1]: 1})
    assert case.events() == []
    case.store(1)
    assert case.events() == [("stored", 1)], "the next one is"


def test_what_others_stored_is_announced_when_it_is_found() -> None:
    case = Case()
    case.announcer.found(CHUNKS[3], CHUNKS, 3)
    assert case.events() == [("stored", 3)]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [(Outcome.MISS, True), (Outcome.DAMAGED, True), (Outcome.IO_ERROR, False), (Outcome.TIMEOUT, False)],
)
def test_a_load_that_shows_that_a_chunk_is_gone_is_told(outcome: Outcome, told: bool) -> None:
    case = Case()
    case.store(2)
    case.report(failed={CHUNKS[2]: int(outcome)})
    assert case.events() == [("stored", 2), *([("removed", 2)] if told else [])]


def test_what_is_evicted_is_told_after_the_next_look() -> None:
    case = Case(num_ranks=2)
    for index in range(3):
        case.store(index)
    assert len(case.events()) == 3
    (_, probe), (_, second) = case.namespaces[0].probes + case.namespaces[1].probes  # the first look
    probe.finish()
    second.finish()
    assert case.events() == []
    case.evict(1)
    assert case.events() == [], "no look is due"
    assert sum(len(namespace.probes) for namespace in case.namespaces) == 2
    case.now += LOOK_S
    assert case.events() == []
    for namespace in case.namespaces:
        namespace.probes[-1][1].finish()
    assert case.events() == [("removed", 1)]
    case.announcer.found(CHUNKS[1], CHUNKS, 1)
    assert case.events() == [("stored", 1)], "it came back"


def test_each_look_takes_the_chunks_that_were_longest_not_looked_at() -> None:
    case = Case()
    chunks = [number.to_bytes(32, "big") for number in range(LOOK_CHUNKS + 10)]
    for index, chunk in enumerate(chunks):
        case.announcer.found(chunk, chunks, index)
    looked: list[bytes] = []
    for _ in range(2):
        case.announcer.take_events()
        keys, probe = case.namespaces[0].probes[-1]
        assert len(keys) == LOOK_CHUNKS
        case.namespaces[0].known.update(keys)  # all is there
        case.namespaces[0].on_disk.update(keys)
        probe.finish()
        case.announcer.take_events()
        looked += keys
        case.now += LOOK_S
    assert set(looked) == {Shard(case.namespaces[0], 0).key(chunk) for chunk in chunks}


def test_what_does_not_fit_into_the_memory_is_announced_as_gone_oldest_first() -> None:
    case = Case(max_blocks=2 * BLOCKS)
    for index in range(4):
        case.announcer.found(CHUNKS[index], CHUNKS, index)
    told = case.events()
    assert told == [("stored", 0), ("stored", 1), ("stored", 2), ("removed", 0), ("stored", 3), ("removed", 1)]


def test_after_a_reset_all_is_gone() -> None:
    case = Case()
    case.store(0)
    case.order(1)
    case.announcer.forget()
    case.report(stored={CHUNKS[1]: 1})
    assert case.events() == [("stored", 0), ("removed", 0)]


def test_a_maker_that_fails_ends_the_events_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("another vLLM")

    case = Case()
    monkeypatch.setattr(Maker, "stored", fail)
    with caplog.at_level(logging.ERROR):
        case.store(0)
        case.announcer.found(CHUNKS[1], CHUNKS, 1)
    assert len(caplog.records) == 1
    assert case.events() == []
