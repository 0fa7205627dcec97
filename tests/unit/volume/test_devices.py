"""Several roots of unequal speed: stores go where they are written, and are found wherever they lie."""

from __future__ import annotations

import errno
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from volumes import MIB, PAYLOAD_BYTES, Bench, key, load, namespace_of, payload, record_files, store, wait_for

from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import Completion, Priority, ToSlot, Transfer, WriteRecord
from rewarm.testing.engines import Counting
from rewarm.volume import Namespace, Outcome, StoreHandle, Volume, create_volume
from rewarm.volume.quota import NO_TENANT, tenant_of
from rewarm.volume.session import Did, SessionReader


class Gated(Counting):
    """Writes below one directory do not end until they may."""

    def __init__(self) -> None:
        super().__init__(open_engine(EngineConfig(ring_bytes=4 * MIB, slot_bytes=MIB)))
        self.closed = ""
        self.may_end = threading.Event()

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        first = transfers[0]
        if isinstance(first, WriteRecord) and self.closed and first.path.startswith(self.closed):
            assert self.may_end.wait(30)
        return super().submit(transfers, priority=priority, deadline_s=deadline_s)


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    roots = [str(tmp_path / name) for name in "abc"]
    create_volume(roots, capacity_bytes=96 * MIB)
    return roots


def first_root(volume: Volume, number: int) -> str:
    return volume.roots[volume.placement.order(key(number))[0]].name


def start_store(namespace: Namespace, numbers: Sequence[int]) -> tuple[StoreHandle, Any]:
    buffer = alloc_aligned(65536 * len(numbers))
    for position, number in enumerate(numbers):
        buffer.view[position * 65536 :][:PAYLOAD_BYTES] = payload(number)
    return namespace.store([(key(n), buffer.address + i * 65536) for i, n in enumerate(numbers)]), buffer


def test_a_root_that_does_not_keep_up_loses_stores_until_it_does(three: list[str]) -> None:
    engine = Gated()
    bench = Bench(engine)
    volume = bench.open(*three)
    now = [100.0]
    volume.clock = lambda: now[0]
    namespace = namespace_of(volume)
    engine.closed = three[0]
    mine = [n for n in range(200) if first_root(volume, n) == three[0]]
    hung, memory = start_store(namespace, mine[:2])
    thread = volume._store_threads[0]
    wait_for(lambda: thread.lag_s(now[0]) == 0 and thread._since is not None, "the writes to begin")
    now[0] += 0.4
    late, more_memory = start_store(namespace, mine[2:4])
    now[0] += 0.2
    handle, third_memory = start_store(namespace, mine[4:20])
    assert handle.wait(30)
    assert handle.results() == [True] * 16
    assert set(handle.elsewhere) == {key(n) for n in mine[4:20]}
    assert set(handle.elsewhere.values()) == {root.file.root_id for root in volume.roots[1:]}
    assert not late.done(), "by then it was not known to be slow"
    engine.may_end.set()
    assert hung.wait(30)
    assert late.wait(30)
    assert not late.elsewhere
    wait_for(lambda: thread._since is None, "the root to be idle")
    assert store(namespace, mine[20:24]) == [True] * 4
    assert len(record_files(three[0])) == 8, "it is used again"
    assert load(namespace, mine[:24]) == [Outcome.HIT] * 24
    for buffer in (memory, more_memory, third_memory):
        buffer.close()
    bench.close()


def test_where_all_are_behind_the_one_least_behind_is_next(three: list[str], bench: Bench) -> None:
    volume = bench.open(*three)
    for lags_s, chosen in (([0, 0, 0], 2), ([0, 0, 0.5], 2), ([0, 0, 0.6], 0), ([1, 0, 1], 1), ([1, 2, 3], 0)):
        assert volume._root_to_store_on([2, 0, 1], lags_s, MIB) == chosen
    volume.roots[0].health.note_store(errno.EIO)
    assert volume._root_to_store_on([2, 0, 1], [1, 2, 3], MIB) == 1


def test_a_root_for_which_much_more_waits_than_for_others_is_passed_by(three: list[str], bench: Bench) -> None:
    volume = bench.open(*three)
    threads = volume._store_threads
    for waiting, chosen in (
        ([0, 0, 3], 2),  # three records are nothing
        ([0, 0, 4], 0),
        ([4, 0, 4], 1),
        ([9, 8, 10], 2),
        ([40, 30, 60], 0),  # the mean is 43, half of it 21
        ([40, 30, 50], 2),
    ):
        for thread, records in zip(threads, waiting, strict=True):
            thread.queued_bytes = records * MIB
        assert volume._root_to_store_on([2, 0, 1], [0, 0, 0], MIB) == chosen, waiting
    threads[1].queued_bytes = threads[2].queued_bytes = 99 * MIB
    threads[0].queued_bytes = 0
    assert volume._root_to_store_on([2, 0, 1], [0.6, 0, 0], MIB) == 2, "what hangs has a short queue, and is not asked"
    for thread in threads:
        thread.queued_bytes = 0


def test_a_root_that_cannot_be_read_is_not_written_to_either(three: list[str], bench: Bench) -> None:
    volume = bench.open(*three)
    namespace = namespace_of(volume)
    volume.roots[1].health.loads.failed()
    assert all(store(namespace, range(40)))
    assert [len(record_files(root)) > 0 for root in three] == [True, False, True]
    for root in volume.roots:
        root.health.loads.failed()
    assert all(store(namespace, range(40, 60))), "all the same where no other is left"
    assert len(record_files(three[1])) > 0


def test_what_was_queued_is_counted_until_it_is_written(three: list[str]) -> None:
    engine = Gated()
    bench = Bench(engine)
    volume = bench.open(*three)
    namespace = namespace_of(volume)
    engine.closed = three[0]
    mine = [n for n in range(200) if first_root(volume, n) == three[0]][:2]
    handle, memory = start_store(namespace, mine)
    assert volume._store_threads[0].queued_bytes == 2 * namespace.file.record_bytes
    engine.may_end.set()
    assert handle.wait(30)
    wait_for(lambda: not volume._store_threads[0].queued_bytes, "the count to go down")
    memory.close()
    bench.close()


def test_who_does_not_know_a_record_looks_on_every_root(three: list[str], bench: Bench) -> None:
    reader = namespace_of(bench.open(*three))
    writer_volume = bench.open(*three)
    writer = namespace_of(writer_volume)
    writer_volume.roots[0].health.stores.failed()
    assert all(store(writer, range(40)))
    assert not record_files(three[0])
    assert not any(reader.contains(key(n)) for n in range(40))
    assert load(reader, range(41)) == [Outcome.HIT] * 40 + [Outcome.MISS]
    # Into ring slots, as records come.
    another = namespace_of(bench.open(*three))
    for n in range(40):
        another.note_absent([key(n)])
    handle = another.load([(key(n), ToSlot()) for n in range(41)])
    found: dict[int, Outcome] = {}
    while len(found) < 41:
        poll = select.poll()
        poll.register(handle.fileno(), select.POLLIN)
        assert poll.poll(30_000), "nothing ended"
        for index, outcome in handle.take():
            found[index] = outcome
            if outcome is Outcome.HIT:
                assert handle.root_of(index) > 0
                handle.release(index)
    assert [found[n] for n in range(41)] == [Outcome.HIT] * 40 + [Outcome.MISS]
    assert handle.done()
    assert handle.results() == [Outcome.HIT] * 40 + [Outcome.MISS]


def test_a_load_that_is_cancelled_looks_no_further(three: list[str], bench: Bench) -> None:
    engine = Counting(bench.engine)
    counted = Bench(engine)
    namespace = namespace_of(counted.open(*three, read_only=True))
    handle = namespace.load([(key(1), ToSlot())])
    handle.cancel()
    assert handle.wait(30)
    assert engine.transfers["ReadRecord"] == 1
    counted.close()


def test_uses_and_owners_are_noted_on_the_root_where_a_record_is(three: list[str], bench: Bench) -> None:
    volume = bench.open(*three)
    namespace = namespace_of(volume)
    number = next(n for n in range(100) if first_root(volume, n) == three[0])
    namespace.note_present([key(number)], volume.roots[2].file.root_id)
    namespace.touch([key(number)])
    namespace.own([key(number)], tenant_of("acme"))
    namespace.note_present([key(1)], "0" * 32)
    assert namespace.contains(key(1)), "a root that is not used here counts as the first one"
    for number_of_root, expected in ((0, []), (2, [(Did.TOUCHED, NO_TENANT), (Did.OWNED, tenant_of("acme"))])):
        session = volume.roots[number_of_root].session
        assert session is not None
        session.flush()
        noted = list(SessionReader(session.directory).read())
        assert [(did, tenant) for did, _, _, tenant in noted] == expected
