"""Deadlines, cancels, order, events, slots, misuse, the end of an engine."""

from __future__ import annotations

import errno
import os
import select
import threading
import warnings
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rewarm.engine.base import (
    NUM_ROOTS,
    BlockPlanes,
    Completion,
    Engine,
    Flow,
    Priority,
    Probe,
    Read,
    ToBlocks,
    ToMemory,
    ToSlot,
    Transfer,
    Unlink,
    Write,
)
from rewarm.engine.memory import alloc_aligned
from rewarm.engine.record import record_bytes
from rewarm.errors import BusyError, UsageError, VolumeClosed
from rewarm.testing.engine_contract.helpers import (
    LIMIT_S,
    NUM_SLOTS,
    Base,
    Cache,
    finished,
    hold,
    num_queued,
    random_buffer,
    read_of,
    run,
    stored,
    until,
    write_of,
)
from rewarm.units import MIB

SHORT_S = 0.02
"""A deadline that comes soon; no test depends on how soon."""


def readable(completion: Completion) -> bool:
    """Whether the completion's eventfd is readable now."""
    return bool(select.select([completion.fileno()], [], [], 0)[0])


def until_readable(completion: Completion) -> None:
    """Wait for the completion's eventfd."""
    assert select.select([completion.fileno()], [], [], LIMIT_S)[0], f"no event in {LIMIT_S} s"


def all_slots_work(engine: Engine, path: Path, num_bytes: int) -> None:
    """Every slot of the ring can be held at once: none is lost any more."""
    completion = engine.submit([read_of(path, num_bytes, ToSlot())] * NUM_SLOTS)
    assert finished(completion) == [0] * NUM_SLOTS
    assert len({completion.slot_address(index) for index in range(NUM_SLOTS)}) == NUM_SLOTS


class ControlContract(Base):
    """What a caller can do with a batch under way."""

    @pytest.mark.parametrize("way", ["deadline", "cancel"])
    def test_a_read_into_blocks_that_hangs_ends_at_once(self, engine: Engine, tmp_path: Path, way: str) -> None:
        payload = stored(engine, tmp_path / "slow.rec", MIB)
        cache = Cache(num_planes=1, num_blocks=1, page_bytes=MIB)
        before = cache.bytes()
        hold(engine, "slow.rec")
        reads = [read_of(tmp_path / "slow.rec", MIB, target) for target in (cache.target([0]), ToSlot())]
        completion = engine.submit(reads, deadline_s=SHORT_S if way == "deadline" else None)
        if way == "cancel":
            completion.cancel()
            assert completion.done()
        assert finished(completion) == [errno.ETIMEDOUT if way == "deadline" else errno.ECANCELED] * 2
        with pytest.raises(UsageError):
            completion.slot_address(1)
        hold(engine, None)
        all_slots_work(engine, tmp_path / "slow.rec", MIB)
        assert cache.bytes() == before != payload

    @pytest.mark.parametrize("way", ["deadline", "cancel"])
    def test_what_moves_in_place_is_waited_for(self, engine: Engine, tmp_path: Path, way: str) -> None:
        stored(engine, tmp_path / "slow.rec", 3 * MIB)
        (tmp_path / "slow.plain").write_bytes(bytes(3 * MIB))
        outs = [random_buffer(3 * MIB, seed) for seed in range(3)]
        hold(engine, "slow.")
        transfers: list[Transfer] = [
            read_of(tmp_path / "slow.rec", 3 * MIB, ToMemory(outs[0].address)),
            Read(str(tmp_path / "slow.plain"), 0, outs[1].address, 3 * MIB),
            Write(str(tmp_path / "slow.plain"), 0, outs[2].address, 3 * MIB),
        ]
        completion = engine.submit(transfers, deadline_s=SHORT_S if way == "deadline" else None)
        until(lambda: is_started(engine), "the transfers to start")
        waiter = threading.Thread(target=completion.cancel) if way == "cancel" else None
        if waiter:
            waiter.start()
        assert not completion.wait(2 * SHORT_S)
        hold(engine, None)
        reason = errno.ETIMEDOUT if way == "deadline" else errno.ECANCELED
        assert finished(completion) == [reason] * 3
        after = [bytes(out.view) for out in outs]
        if waiter:
            waiter.join(LIMIT_S)
            assert not waiter.is_alive()
        all_slots_work(engine, tmp_path / "slow.rec", 3 * MIB)
        assert [bytes(out.view) for out in outs] == after

    @pytest.mark.parametrize("way", ["deadline", "cancel"])
    def test_what_is_queued_ends_untouched(self, engines: Callable[..., Engine], tmp_path: Path, way: str) -> None:
        engine = engines(num_workers=1)
        stored(engine, tmp_path / "r.rec", 8192)
        (tmp_path / "gate").touch()
        hold(engine, "gate")
        gate = engine.submit([Probe(str(tmp_path / "gate"))])
        until(lambda: is_started(engine), "the gate to start")
        out = random_buffer(8192, seed=1)
        before = bytes(out.view)
        transfers: list[Transfer] = [
            read_of(tmp_path / "r.rec", 8192, ToMemory(out.address)),
            write_of(tmp_path / "new.rec", out, 8192),
            Unlink(str(tmp_path / "r.rec")),
        ]
        completion = engine.submit(transfers, deadline_s=SHORT_S if way == "deadline" else None)
        if way == "cancel":
            completion.cancel()
        assert finished(completion) == [errno.ETIMEDOUT if way == "deadline" else errno.ECANCELED] * 3
        hold(engine, None)
        assert finished(gate) == [0]
        assert run(engine, Probe(str(tmp_path / "r.rec"))) == [0]
        assert bytes(out.view) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["gate", "r.rec"]

    def test_a_store_that_is_cancelled_under_way_leaves_neither_name(self, engine: Engine, tmp_path: Path) -> None:
        hold(engine, "slow.rec")
        completion = engine.submit([write_of(tmp_path / "slow.rec", random_buffer(MIB), MIB)], priority=Priority.STORE)
        until(lambda: is_started(engine), "the store to start")
        waiter = threading.Thread(target=completion.cancel)
        waiter.start()
        assert not completion.wait(SHORT_S)
        hold(engine, None)
        assert finished(completion) == [errno.ECANCELED]
        waiter.join(LIMIT_S)
        assert not list(tmp_path.iterdir())

    def test_a_deadline_that_is_kept_changes_nothing(self, engine: Engine, tmp_path: Path) -> None:
        payload = stored(engine, tmp_path / "r.rec", MIB)
        out = random_buffer(MIB, seed=1)
        completion = engine.submit([read_of(tmp_path / "r.rec", MIB, ToMemory(out.address))], deadline_s=10 * LIMIT_S)
        assert finished(completion) == [0]
        completion.cancel()
        assert completion.results() == [0]
        assert bytes(out.view[:MIB]) == payload

    def test_loads_go_before_stores(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        engine = engines(num_workers=1)
        for name in ("gate", "file"):
            (tmp_path / name).touch()
        hold(engine, "gate")
        gate = engine.submit([Probe(str(tmp_path / "gate"))])
        until(lambda: is_started(engine), "the gate to start")
        looks = engine.submit([Probe(str(tmp_path / "file"))], priority=Priority.STORE)
        first = engine.submit([Probe(str(tmp_path / "file")), Unlink(str(tmp_path / "file"))])
        then = engine.submit([Probe(str(tmp_path / "file"))])
        hold(engine, None)
        assert finished(gate) == [0]
        assert finished(first) == [0, 0]
        assert finished(then) == [errno.ENOENT]
        assert finished(looks) == [errno.ENOENT]

    def test_time_in_which_nothing_moves_is_told_apart(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        engine = engines(num_workers=1)
        stored(engine, tmp_path / "r.rec", 4096)
        hold(engine, "r.rec")
        moving = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())])
        until(lambda: is_started(engine), "the first read to start")
        behind = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())])
        until(lambda: behind.times().total_s > 0.01, "time to pass")
        times = behind.times()
        assert times.waited_s == times.total_s
        times = moving.times()
        assert times.total_s - times.waited_s >= 0.01
        hold(engine, None)
        assert finished(moving) == [0]
        assert finished(behind) == [0]
        times = behind.times()
        assert 0.01 <= times.waited_s <= times.total_s
        assert behind.times() == times

    def test_a_batch_that_ends_while_it_waits_has_waited_all_the_time(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", 4096)
        holder = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())] * NUM_SLOTS)
        assert finished(holder) == [0] * NUM_SLOTS
        completion = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())])
        completion.cancel()
        assert finished(completion) == [errno.ECANCELED]
        assert completion.times().waited_s == completion.times().total_s

    def test_each_root_has_the_bytes_that_came_from_it(self, engine: Engine, tmp_path: Path) -> None:
        num_bytes = 3 * MIB - 5
        stored(engine, tmp_path / "r.rec", num_bytes)
        (tmp_path / "bad.rec").write_bytes(bytes(4096 * 2))
        assert engine.flow(7) == engine.flow(8) == Flow()
        buffer = random_buffer(num_bytes)
        reads = [
            read_of(tmp_path / "r.rec", num_bytes, ToMemory(buffer.address), root=7),
            read_of(tmp_path / "r.rec", num_bytes, ToSlot(), root=8),
            read_of(tmp_path / "bad.rec", 4096, ToSlot(), root=9),
            read_of(tmp_path / "none.rec", 4096, ToSlot(), root=9),
        ]
        assert run(engine, *reads) == [0, 0, errno.EBADMSG, errno.ENOENT]
        for root in (7, 8):
            assert engine.flow(root).num_bytes == record_bytes(num_bytes)
            assert engine.flow(root).busy_s > 0
            assert engine.flow(root) == engine.flow(root), "nothing is under way"
        assert engine.flow(9).num_bytes == 0
        for root in (-1, NUM_ROOTS):
            with pytest.raises(UsageError):
                engine.flow(root)
            with pytest.raises(UsageError):
                engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot(), root=root)])

    def test_a_root_is_busy_while_it_reads_and_not_while_its_reads_wait_for_the_ring(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        stored(engine, tmp_path / "slow.rec", 4096)
        stored(engine, tmp_path / "r.rec", 4096)
        hold(engine, "slow")
        slow = engine.submit([read_of(tmp_path / "slow.rec", 4096, ToSlot(), root=1)])
        until(lambda: is_started(engine), "the read to start")
        until(lambda: engine.flow(1).busy_s > 0.01, "time to pass")
        assert engine.flow(1).num_bytes == 0
        hold(engine, None)
        assert finished(slow) == [0]
        holders = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())] * (NUM_SLOTS - 1))
        assert finished(holders) == [0] * (NUM_SLOTS - 1)
        waits = engine.submit([read_of(tmp_path / "slow.rec", 4096, ToSlot(), root=1)])
        before = engine.flow(1)
        until(lambda: waits.times().total_s > 0.01, "time to pass")
        assert engine.flow(1) == before
        slow.release(0)
        assert finished(waits) == [0]
        assert engine.flow(1).num_bytes == 2 * record_bytes(4096)

    def test_the_event_tells_of_results_to_take(self, engine: Engine, tmp_path: Path) -> None:
        for name in ("fast", "slow"):
            (tmp_path / name).touch()
        hold(engine, "slow")
        completion = engine.submit([Probe(str(tmp_path / "slow")), Probe(str(tmp_path / "fast"))])
        until_readable(completion)
        assert completion.take() == [(1, 0)]
        assert not readable(completion)
        assert completion.take() == []
        hold(engine, None)
        until_readable(completion)
        assert completion.take() == [(0, 0)]
        assert not readable(completion)
        assert completion.done()

    def test_the_event_of_what_ended_before_it_was_asked_for(self, engine: Engine, tmp_path: Path) -> None:
        completion = engine.submit([Probe(str(tmp_path))])
        assert completion.wait(LIMIT_S)
        assert readable(completion)
        assert completion.fileno() == completion.fileno()
        assert completion.take() == [(0, 0)]
        assert not readable(completion)

    def test_the_event_tells_of_a_deadline(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "slow.rec", 4096)
        hold(engine, "slow")
        completion = engine.submit([read_of(tmp_path / "slow.rec", 4096, ToSlot())], deadline_s=SHORT_S)
        until_readable(completion)
        assert completion.take() == [(0, errno.ETIMEDOUT)]

    def test_reads_wait_for_slots(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", 4096)
        completion = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())] * (NUM_SLOTS + 1))
        taken: list[tuple[int, int]] = []
        while len(taken) < NUM_SLOTS:
            until_readable(completion)
            taken += completion.take()
        assert run(engine, Probe(str(tmp_path / "r.rec"))) == [0]
        assert not completion.done()
        completion.release(taken[0][0])
        assert finished(completion) == [0] * (NUM_SLOTS + 1)

    def test_slots_come_back_with_the_completion(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", 4096)
        for _ in range(3):
            completion = engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())] * NUM_SLOTS)
            assert completion.wait(LIMIT_S)
            del completion
        engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())] * NUM_SLOTS)  # given up before it ended
        all_slots_work(engine, tmp_path / "r.rec", 4096)

    def test_slots_that_are_not_held(self, engine: Engine, tmp_path: Path) -> None:
        stored(engine, tmp_path / "r.rec", 4096)
        reads = [read_of(tmp_path / "r.rec", 4096, ToSlot()), read_of(tmp_path / "no.rec", 4096, ToSlot())]
        completion = engine.submit(reads)
        assert finished(completion) == [0, errno.ENOENT]
        completion.release(0)
        for index in (0, 1, 2, -1):
            with pytest.raises(UsageError):
                completion.release(index)
            with pytest.raises(UsageError):
                completion.slot_address(index)

    def test_results_are_asked_for_too_early(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "slow").touch()
        hold(engine, "slow")
        completion = engine.submit([Probe(str(tmp_path / "slow"))])
        assert not completion.done()
        assert not completion.wait(0)
        with pytest.raises(BusyError):
            completion.results()

    def test_transfers_that_are_malformed(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        buffer, path = alloc_aligned(MIB), tmp_path / "r.rec"
        good = read_of(path, 8192, ToMemory(buffer.address))
        cache = Cache(num_planes=2, num_blocks=4, page_bytes=4096)
        wrong_arrays = BlockPlanes(array("q", [1, 2]), 4096)
        bad: list[Transfer] = [
            replace(good, target=ToMemory(buffer.address + 1)),
            replace(good, target=ToMemory(0)),
            replace(good, key=b"short"),
            replace(good, namespace_id=bytes(33)),
            replace(good, payload_bytes=0),
            replace(good, payload_bytes=-1),
            replace(good, payload_bytes=1 << 62),
            replace(good, payload_bytes=16 * MIB, target=ToSlot()),
            replace(good, target=cache.target([0, 1])),
            replace(good, target=cache.target([-1])),
            replace(good, target=cache.target([], skip_blocks=-1)),
            replace(good, target=ToBlocks(wrong_arrays, array("q", [0]))),
            replace(good, target=ToBlocks(cache.planes, array("i", [0]))),
            replace(good, path="with\0in"),
            write_of(path, buffer, 0),
            replace(write_of(path, buffer, 100), address=buffer.address + 512),
            Read(str(path), -1, buffer.address, 1),
            Read(str(path), 0, buffer.address, -1),
            Write(str(path), 0, 0, 1),
        ]
        for transfer in bad:
            with pytest.raises(UsageError):
                engine.submit([Unlink(str(tmp_path / "file")), transfer])
        assert run(engine, Probe(str(tmp_path / "file"))) == [0]

    def test_reads_into_a_ring_that_is_not_there(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        engine = engines(ring_bytes=0, slot_bytes=0)
        with pytest.raises(UsageError):
            engine.submit([read_of(tmp_path / "r.rec", 4096, ToSlot())])

    @pytest.mark.parametrize(
        "fields",
        [{"slot_bytes": 100}, {"slot_bytes": 0}, {"ring_bytes": 8192}, {"ring_address": 5}, {"num_workers": -1}],
        ids=str,
    )
    def test_rings_that_cannot_be(self, engines: Callable[..., Engine], fields: dict[str, int]) -> None:
        with pytest.raises(UsageError):
            engines(**fields)

    def test_a_closed_engine(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        engine = engines()
        completion = engine.submit([Probe(str(tmp_path))])
        assert finished(completion) == [0]
        engine.close()
        engine.close()
        assert completion.done()
        assert completion.take() == [(0, 0)]
        with pytest.raises(VolumeClosed):
            engine.submit([Probe(str(tmp_path))])

    def test_closing_with_work_under_way(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        engine = engines(num_workers=2)
        stored(engine, tmp_path / "slow.rec", 4096)
        hold(engine, "slow")
        ring = engine.submit([read_of(tmp_path / "slow.rec", 4096, ToSlot())])
        out = random_buffer(4096)
        place = engine.submit([read_of(tmp_path / "slow.rec", 4096, ToMemory(out.address))])
        until(lambda: is_started(engine), "the reads to start")
        queued = engine.submit([Unlink(str(tmp_path / "slow.rec"))] * 5, priority=Priority.STORE)
        closing = threading.Thread(target=engine.close)
        closing.start()
        assert finished(ring) == [errno.ECANCELED]
        assert not place.done()
        hold(engine, None)
        closing.join(LIMIT_S)
        assert not closing.is_alive()
        assert finished(place) == [errno.ECANCELED]
        assert set(finished(queued)) <= {errno.ECANCELED, errno.ENOENT, 0}

    def test_a_forked_child_is_refused(self, engine: Engine, tmp_path: Path) -> None:
        completion = engine.submit([Probe(str(tmp_path))])
        assert completion.wait(LIMIT_S)

        def is_refused(call: Callable[[], object]) -> bool:
            try:
                call()
            except BusyError:
                return True
            return False

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork() in a process with threads is the point
            child = os.fork()
        if not child:
            planes, blocks = BlockPlanes(array("Q"), 1), array("q")
            calls: list[Callable[[], object]] = [
                lambda: engine.flow(0),
                lambda: engine.submit([]),
                lambda: engine.gather(planes, blocks, 0),
                completion.done,
                completion.take,
                completion.results,
                completion.cancel,
                completion.fileno,
                completion.times,
                lambda: completion.wait(0),
            ]
            engine.close()
            os._exit(0 if all(map(is_refused, calls)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run(engine, Probe(str(tmp_path))) == [0]


def is_started(engine: Engine) -> bool:
    """Nothing is queued any more: all that was submitted has a worker. For engines with ``usage()``."""
    return num_queued(engine) == 0
