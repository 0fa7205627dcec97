"""Two volumes seen as one: copies in memory are read first, made of what is used, and may be lost in any way."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from volumes import (
    IDENTITY,
    KIB,
    MIB,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Bench,
    key,
    load,
    payload,
    record_files,
    record_path,
    store,
    wait_for,
)

from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import Completion, Priority, ReadRecord, ToMemory, ToSlot, Transfer
from rewarm.engine.memory import view_at
from rewarm.errors import BusyError, UsageError, VolumeClosed
from rewarm.metrics import Counters
from rewarm.testing.engines import Counting, Faulty
from rewarm.volume import LoadHandle, Outcome, create_volume, promote
from rewarm.volume.handles import Part
from rewarm.volume.host_tier import HostCounters
from rewarm.volume.session import Did, SessionReader
from rewarm.volume.tiered import HOST_ROOT, TieredNamespace, TieredVolume
from rewarm.volume.usage import read_usage

HIT, MISS, DAMAGED = Outcome.HIT, Outcome.MISS, Outcome.DAMAGED


class Tier:
    """A volume with a host tier beside it, both in folders of a test."""

    def __init__(self, bench: Bench, folder: Path, capacity_bytes: int = 8 * MIB, **options: Any) -> None:
        self.flash_root, self.host_root = str(folder / "flash"), str(folder / "host")
        for root, size in ((self.flash_root, 64 * MIB), (self.host_root, capacity_bytes)):
            if not os.path.exists(root):
                create_volume([root], capacity_bytes=size)
        self.counters = Counters()
        self.host_counters = HostCounters(self.counters)
        flash = bench.open(self.flash_root, counters=self.counters, **options)
        self.host = bench.open(self.host_root, counters=self.host_counters, **options)
        self.volume = TieredVolume(flash, self.host, self.counters)
        self.namespace = self.volume.namespace(IDENTITY, payload_bytes=PAYLOAD_BYTES)
        assert self.volume.wait_scanned(30)

    def promoted(self, numbers: Sequence[int]) -> None:
        """Store these records, and use them as often as it takes."""
        assert store(self.namespace, numbers) == [True] * len(numbers)
        self.used_twice(numbers)

    def used_twice(self, numbers: Sequence[int]) -> None:
        for _ in range(2):
            assert load(self.namespace, numbers) == [HIT] * len(numbers)
        assert self.volume.wait_promoted(30)

    def host_loads(self, outcome: str) -> float:
        return self.counters.value("rewarm_host_loads_total", outcome)

    def promotions(self, outcome: str) -> float:
        return self.counters.value("rewarm_host_promotions_total", outcome)


@pytest.fixture
def tier(bench: Bench, tmp_path: Path) -> Any:
    made = Tier(bench, tmp_path)
    yield made
    made.volume.close()


def roots_of(namespace: TieredNamespace, numbers: Sequence[int]) -> list[int]:
    """Which roots a load of these reads from, once it is done."""
    step = 64 * KIB
    buffer = alloc_aligned(step * len(numbers))
    handle = namespace.load([(key(n), ToMemory(buffer.address + i * step)) for i, n in enumerate(numbers)])
    assert handle.wait(30)
    assert handle.results() == [HIT] * len(numbers)
    for position, number in enumerate(numbers):
        assert bytes(buffer.view[position * step :][:PAYLOAD_BYTES]) == payload(number)
    buffer.close()
    return [handle.root_of(index) for index in range(len(numbers))]


# What goes where.


def test_what_is_stored_goes_to_flash_alone_and_what_is_used_twice_to_both(tier: Tier) -> None:
    assert store(tier.namespace, range(6)) == [True] * 6
    assert load(tier.namespace, [1, 2, 3, 9]) == [HIT, HIT, HIT, MISS]
    assert tier.volume.wait_promoted(30)
    assert len(record_files(tier.flash_root)) == 6
    assert not record_files(tier.host_root)
    assert load(tier.namespace, [1, 2, 9]) == [HIT, HIT, MISS]
    assert tier.volume.wait_promoted(30)
    assert len(record_files(tier.host_root)) == 2
    assert tier.promotions("promoted") == 2
    assert [n for n in range(6) if tier.namespace.is_in_host(key(n))] == [1, 2]
    assert len(record_files(tier.flash_root)) == 6, "flash keeps all"


def test_a_copy_is_read_from_memory_and_counted(tier: Tier) -> None:
    tier.promoted([1, 2])
    store(tier.namespace, [3])
    for _ in range(2):
        assert roots_of(tier.namespace, [3, 1, 2]) == [1, HOST_ROOT, HOST_ROOT]
    assert tier.host_loads("hit") == 4
    assert tier.volume.wait_promoted(30)
    assert tier.promotions("promoted") == 3, "3 was used twice, too"


def test_the_host_root_is_the_first_and_flash_roots_keep_their_numbers(tier: Tier) -> None:
    assert [root.name for root in tier.volume.roots] == [tier.host_root, tier.flash_root]
    assert tier.volume.host_root.name == tier.host_root
    assert list(tier.volume.shares()) == [tier.volume.roots[1].file.root_id]
    assert tier.volume.id == tier.volume.roots[1].file.volume_id
    assert tier.volume.policy_directory.startswith(tier.flash_root)


def test_a_record_that_flash_evicted_is_still_served_from_its_copy(tier: Tier) -> None:
    tier.promoted([4])
    record_path(tier.flash_root, tier.namespace, 4).unlink()
    assert load(tier.namespace, [4]) == [HIT]
    tier.namespace.flash.note_absent([key(4)])
    assert tier.namespace.contains(key(4))
    tier.namespace.note_absent([key(4)])
    assert not tier.namespace.contains(key(4))


def test_a_restart_finds_the_copies(bench: Bench, tmp_path: Path) -> None:
    first = Tier(bench, tmp_path)
    first.promoted(range(5))
    first.volume.close()
    second = Tier(bench, tmp_path)
    assert roots_of(second.namespace, range(5)) == [HOST_ROOT] * 5
    second.volume.close()


def test_a_second_server_finds_what_the_first_promoted_within_a_look(bench: Bench, tmp_path: Path) -> None:
    first, second = Tier(bench, tmp_path), Tier(bench, tmp_path)
    first.promoted(range(4))
    wait_for(lambda: second.namespace.is_in_host(key(3)), "a look at the host tier")
    store_only = [n for n in range(4) if second.namespace.flash.contains(key(n))]
    assert store_only == []
    assert roots_of(second.namespace, range(4)) == [HOST_ROOT] * 4
    # And what both use is copied once.
    store(first.namespace, [7])
    assert second.namespace.probe([key(7)]).wait(30)
    for one in (first, second, first, second):
        load(one.namespace, [7])
        assert one.volume.wait_promoted(30)
    assert first.promotions("promoted") + second.promotions("promoted") == 5
    assert second.promotions("skipped") == 1
    for one in (first, second):
        one.volume.close()


def test_a_look_learns_of_what_others_removed(tier: Tier) -> None:
    tier.promoted([1, 2])
    record_path(tier.host_root, tier.namespace, 1).unlink()
    with tier.host.roots[0].usage.update() as usage:  # as a janitor that evicts
        usage.evicted_bytes += RECORD_BYTES
    wait_for(lambda: not tier.namespace.is_in_host(key(1)), "a look")
    assert tier.namespace.is_in_host(key(2))


def test_what_was_read_once_is_remembered_to_a_bound(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promote, "MAX_REMEMBERED", 4)
    store(tier.namespace, range(8))
    for number in (0, 1, 2, 3, 4, 5, 4, 0):
        load(tier.namespace, [number])
    assert tier.volume.wait_promoted(30)
    assert [n for n in range(8) if tier.namespace.is_in_host(key(n))] == [4]


def test_the_janitor_demotes_and_nothing_is_lost(bench: Bench, tmp_path: Path) -> None:
    tier = Tier(bench, tmp_path, capacity_bytes=MIB, janitor=True)
    assert store(tier.namespace, range(60)) == [True] * 60
    for start in range(0, 60, 4):
        tier.used_twice(range(start, start + 4))
    assert len(record_files(tier.host_root)) * RECORD_BYTES <= MIB
    assert read_usage(str(Path(tier.host_root, ".rewarm", "usage"))).evicted_records > 0
    assert load(tier.namespace, range(60)) == [HIT] * 60
    assert len(record_files(tier.flash_root)) == 60
    tier.volume.close()
    assert tier.counters.value("rewarm_host_evicted_records_total") > 0
    assert tier.counters.value("rewarm_evicted_records_total") == 0, "of flash"


# What is wrong with a copy is a matter of speed.


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "directory", "fifo", "link", "gone"])
def test_a_damaged_copy_is_served_from_flash(tier: Tier, damage: str, tmp_path: Path) -> None:
    tier.promoted([1, 2, 3])
    path = record_path(tier.host_root, tier.namespace, 2)
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "link":
        other = tmp_path / "other"
        other.write_bytes(record_path(tier.host_root, tier.namespace, 1).read_bytes())
        path.symlink_to(other)
    elif damage != "gone":
        path.write_bytes({"flip": content[:9000] + b"?" + content[9001:], "cut": content[:5000], "empty": b""}[damage])
    assert roots_of(tier.namespace, [1, 2, 3]) == [HOST_ROOT, 1, HOST_ROOT]
    assert tier.host_loads("hit") == 2
    assert sum(tier.host_loads(name) for name in ("miss", "damaged", "io_error")) == 1
    if damage in {"flip", "cut", "empty"}:
        assert tier.counters.value("rewarm_damaged_records_total", tier.host_root) == 1
    assert tier.counters.value("rewarm_damaged_records_total", tier.flash_root) == 0


def test_a_damaged_copy_is_made_anew(tier: Tier) -> None:
    tier.promoted([2])
    path = record_path(tier.host_root, tier.namespace, 2)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert roots_of(tier.namespace, [2]) == [1]
    assert tier.volume.wait_promoted(30)
    assert roots_of(tier.namespace, [2]) == [HOST_ROOT]


def test_a_load_that_moves_tells_the_roots_and_when_it_is_done(tier: Tier) -> None:
    tier.promoted([1, 2])
    record_path(tier.host_root, tier.namespace, 2).unlink()
    handle = tier.namespace.load([(key(1), ToSlot()), (key(2), ToSlot()), (key(8), ToSlot())], 30.0)
    taken: dict[int, Outcome] = {}
    while not handle.done():
        poll = select.poll()
        poll.register(handle.fileno(), select.POLLIN)
        assert poll.poll(30_000), "nothing ended"
        taken.update(handle.take())
    taken.update(handle.take())
    assert taken == {0: HIT, 1: HIT, 2: MISS}
    assert [handle.root_of(index) for index in (0, 1)] == [HOST_ROOT, 1]
    assert bytes(view_at(handle.slot_address(1), PAYLOAD_BYTES)) == payload(2)
    handle.release(0)
    handle.release(1)


def test_both_tiers_damaged_is_a_damaged_record(tier: Tier) -> None:
    tier.promoted([1])
    for root in (tier.host_root, tier.flash_root):
        path = record_path(root, tier.namespace, 1)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert load(tier.namespace, [1]) == [DAMAGED]
    assert not tier.namespace.contains(key(1))
    assert store(tier.namespace, [1]) == [True], "computed and stored anew"
    assert load(tier.namespace, [1]) == [HIT]


def test_a_host_root_that_is_removed_under_load_costs_speed_only(tier: Tier) -> None:
    tier.promoted(range(20))
    ended = threading.Event()
    seen: list[Outcome] = []

    def use() -> None:
        while not ended.is_set():
            seen.extend(load(tier.namespace, range(20)))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        wait_for(lambda: len(seen) > 40, "loads")
        shutil.rmtree(tier.host_root, ignore_errors=True)
        wait_for(lambda: not tier.volume.host_root.is_member, "a look at what is gone")
        num_seen = len(seen)
        wait_for(lambda: len(seen) > num_seen + 40, "loads after it")
    finally:
        ended.set()
        thread.join()
    assert set(seen) == {HIT}
    assert tier.volume.wait_promoted(30)
    assert store(tier.namespace, [100]) == [True]
    assert load(tier.namespace, [100]) == [HIT]
    assert not any(tier.namespace.is_in_host(key(n)) for n in range(20))


def test_a_host_root_that_another_one_took_the_place_of_is_not_written_to(tier: Tier) -> None:
    tier.promoted([1])
    os.rename(tier.host_root, tier.host_root + ".old")
    create_volume([tier.host_root], capacity_bytes=8 * MIB)
    wait_for(lambda: not tier.volume.host_root.is_member, "a look")
    store(tier.namespace, [2])
    tier.used_twice([1, 2])
    assert not record_files(tier.host_root)


class Broken(Faulty):
    """Transfers below one directory fail with an errno."""

    def __init__(self) -> None:
        self.below, self.errno = "", 0
        inner = open_engine(EngineConfig(ring_bytes=4 * MIB, slot_bytes=MIB))
        super().__init__(inner, fail_at=self._fault)

    def _fault(self, _number: int, transfer: Transfer) -> int:
        path = getattr(transfer, "path", "")
        return self.errno if self.below and path.startswith(self.below) else 0


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM, errno.EMFILE])
def test_a_host_root_that_fails_is_left_alone_for_a_while(tmp_path: Path, error: int) -> None:
    engine = Broken()
    bench = Bench(engine)
    tier = Tier(bench, tmp_path)
    tier.promoted(range(3))
    engine.below, engine.errno = tier.host_root, error
    for _ in range(3):
        assert load(tier.namespace, range(3)) == [HIT] * 3
    assert tier.counters.value("rewarm_io_errors_total", tier.host_root) >= 1
    assert not tier.volume.roots[1].health.loads.is_on, "flash has nothing to do with it"
    tier.volume.close()
    bench.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_host_root_that_takes_nothing_stops_no_store(tmp_path: Path, error: int) -> None:
    engine = Broken()
    bench = Bench(engine)
    tier = Tier(bench, tmp_path)
    engine.below, engine.errno = tier.host_root, error
    assert store(tier.namespace, range(4)) == [True] * 4
    tier.used_twice(range(4))
    assert tier.promotions("promoted") == 0
    assert tier.promotions("failed") + tier.promotions("skipped") == 4
    assert store(tier.namespace, range(10, 14)) == [True] * 4
    assert tier.counters.value("rewarm_kv_stores_paused") == 0, "of flash"
    tier.volume.close()
    bench.close()


def test_a_tmpfs_that_fills_up_stops_promotions_and_nothing_else(
    small_disk: Callable[[str], Path], tmp_path: Path, bench: Bench
) -> None:
    disk = small_disk("size=40m")
    (tmp_path / "x").mkdir()
    host = disk / "host"
    create_volume([str(host)], capacity_bytes=8 * MIB)
    os.symlink(host, tmp_path / "x" / "host")
    tier = Tier(bench, tmp_path / "x")
    free = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize))
    assert store(tier.namespace, range(4)) == [True] * 4
    tier.used_twice(range(4))
    assert tier.promotions("promoted") < 4
    assert store(tier.namespace, range(10, 14)) == [True] * 4
    assert load(tier.namespace, range(10, 14)) == [HIT] * 4
    tier.volume.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "load", "damage", "remove", "swap", "evict", "look"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_whatever_becomes_of_copies_what_is_on_flash_is_a_hit_with_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    bench = Bench(open_engine(EngineConfig(kind="pure", num_workers=2)))
    tier = Tier(bench, tmp_path_factory.mktemp("tier"))
    stored: set[int] = set()
    for step, number in steps:
        path = record_path(tier.host_root, tier.namespace, number)
        if step == "store":
            assert store(tier.namespace, [number, number + 10]) == [True] * 2
            stored |= {number, number + 10}
        elif step == "load":
            asked = [number, number + 10, (number + 1) % 10]
            for _ in range(2):
                assert load(tier.namespace, asked) == [HIT if n in stored else MISS for n in asked]
            assert tier.volume.wait_promoted(30)
        elif step == "look":
            tier.namespace.rescan()
        elif path.exists():
            if step == "damage":
                path.write_bytes(path.read_bytes()[:6000])
            elif step == "swap":  # a whole record in another one's place
                others = record_files(tier.host_root)
                path.write_bytes(others[0].read_bytes())
            elif step == "remove":
                path.unlink()
            else:
                shutil.rmtree(path.parent)
    assert load(tier.namespace, sorted(stored)) == [HIT] * len(stored)
    tier.volume.close()
    bench.close()


# Promotion.


class Gated(Counting):
    """Reads at STORE priority below one directory wait until they may go on."""

    def __init__(self) -> None:
        super().__init__(open_engine(EngineConfig(ring_bytes=4 * MIB, slot_bytes=MIB)))
        self.may_go = threading.Event()
        self.priorities: list[Priority] = []

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        if isinstance(transfers[0], ReadRecord):
            self.priorities.append(priority)
            if priority is Priority.STORE:
                assert self.may_go.wait(30)
        return super().submit(transfers, priority=priority, deadline_s=deadline_s)


def test_promotion_is_behind_all_loads_bounded_and_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promote, "MAX_WAITING", 4)
    engine = Gated()
    bench = Bench(engine)
    tier = Tier(bench, tmp_path)
    store(tier.namespace, range(12))
    assert load(tier.namespace, range(12)) == [HIT] * 12, "no load waits for a promotion"
    assert load(tier.namespace, range(12)) == [HIT] * 12
    assert tier.promotions("dropped") > 0
    assert store(tier.namespace, [50]) == [True]
    engine.may_go.set()
    assert tier.volume.wait_promoted(30)
    assert 4 <= tier.promotions("promoted") <= 5, "four waited, and one was under way"
    assert engine.priorities.count(Priority.STORE) == tier.promotions("promoted")
    tier.volume.close()
    bench.close()


def test_close_ends_promotion_soon(tmp_path: Path) -> None:
    engine = Gated()
    bench = Bench(engine)
    tier = Tier(bench, tmp_path)
    store(tier.namespace, range(8))
    for _ in range(2):
        load(tier.namespace, range(8))
    promoter = tier.volume._promoter
    assert promoter is not None

    def let_go() -> None:
        wait_for(lambda: promoter._is_closing, "close()")
        engine.may_go.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    tier.volume.close()
    tier.volume.close()
    thread.join()
    assert tier.promotions("promoted") <= 1
    with pytest.raises(VolumeClosed):
        tier.namespace.load([(key(1), ToSlot())])
    bench.close()


def test_a_record_that_went_from_flash_meanwhile_is_not_promoted(tmp_path: Path) -> None:
    engine = Gated()
    bench = Bench(engine)
    tier = Tier(bench, tmp_path)
    store(tier.namespace, [1, 2])
    for _ in range(2):
        load(tier.namespace, [1, 2])
    for number in (1, 2):
        record_path(tier.flash_root, tier.namespace, number).unlink()
    engine.may_go.set()
    assert tier.volume.wait_promoted(30)
    assert tier.promotions("failed") == 2
    assert not record_files(tier.host_root)
    tier.volume.close()
    bench.close()


def test_two_models_share_a_tier(tier: Tier) -> None:
    other = tier.volume.namespace({**IDENTITY, "model": "large"}, payload_bytes=200 * KIB)
    assert other.wait_scanned(30)
    assert store(other, [1]) == [True]
    tier.promoted([1])
    for _ in range(2):
        assert load(other, [1]) == [HIT]
    assert tier.volume.wait_promoted(30)
    assert other.is_in_host(key(1))
    assert load(other, [1]) == [HIT]
    assert load(tier.namespace, [1]) == [HIT]
    assert tier.volume.namespace(IDENTITY, payload_bytes=PAYLOAD_BYTES) is tier.namespace
    with pytest.raises(UsageError, match="records of 61440 bytes"):
        tier.volume.namespace(IDENTITY, payload_bytes=4096)


def test_a_read_only_volume_promotes_nothing(bench: Bench, tmp_path: Path) -> None:
    writer = Tier(bench, tmp_path)
    writer.promoted([1])
    store(writer.namespace, [2])
    reader = Tier(bench, tmp_path, read_only=True)
    before = record_files(reader.host_root)
    assert roots_of(reader.namespace, [1, 2]) == [HOST_ROOT, 1]
    assert reader.volume.wait_promoted(30)
    assert record_files(reader.host_root) == before
    for one in (reader, writer):
        one.volume.close()


def test_a_tier_too_small_for_a_record_says_so_and_is_done_without(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(bench, tmp_path, capacity_bytes=MIB)
    large = tier.volume.namespace({**IDENTITY, "model": "large"}, payload_bytes=2 * MIB)
    assert "room for 0 records" in caplog.text
    assert store(large, [1]) == [True]
    for _ in range(2):
        assert load(large, [1]) == [HIT]
    assert tier.volume.wait_promoted(30)
    assert load(large, [1]) == [HIT]
    tier.volume.close()


def test_a_host_volume_that_cannot_have_a_namespace_is_done_without(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(bench, tmp_path)
    shutil.rmtree(tier.host_root)
    other = tier.volume.namespace({**IDENTITY, "model": "other"}, payload_bytes=PAYLOAD_BYTES)
    assert "nothing is kept in the host tier" in caplog.text
    assert store(other, [1]) == [True]
    assert load(other, [1]) == [HIT]
    assert other.probe([key(1)]).wait(30)
    other.touch([key(1)])
    other.note_absent([key(1)])
    assert other.wait_scanned(30)
    assert not other.is_in_host(key(1))
    tier.volume.close()


# What each tier is told.


def noted(root: str) -> list[tuple[Did, bytes]]:
    sessions = sorted(Path(root, ".rewarm", "sessions").iterdir())
    return [(did, name) for session in sessions for did, _, name, _ in SessionReader(str(session)).read()]


def test_a_use_is_noted_in_both_and_an_owner_on_flash(tier: Tier) -> None:
    tier.promoted([1])
    store(tier.namespace, [2])
    tier.namespace.touch([key(1), key(2)])
    tier.namespace.own([key(1)], b"tenant1")
    for root in tier.volume.roots:
        assert root.session is not None
        root.session.flush()
    on_flash, in_host = noted(tier.flash_root), noted(tier.host_root)
    assert [name for did, name in on_flash if did is Did.TOUCHED] == [key(1), key(2)]
    assert [name for did, name in in_host if did is Did.TOUCHED] == [key(1)]
    assert [name for did, name in on_flash if did is Did.OWNED] == [key(1)]
    assert [name for did, name in in_host if did is Did.OWNED] == []


def test_wear_and_budget_are_those_of_flash(bench: Bench, tmp_path: Path) -> None:
    tier = Tier(bench, tmp_path)
    tier.promoted(range(6))
    assert not tier.volume.is_over_budget
    for root in (tier.host_root, tier.flash_root):
        wait_for(lambda name=root: tier.counters.value("rewarm_root_used_bytes", name) == 6 * RECORD_BYTES, "a count")
    assert tier.counters.value("rewarm_volume_used_bytes") == 6 * RECORD_BYTES
    tier.counters.take()
    assert tier.counters.value("rewarm_root_capacity_bytes", tier.host_root) == 8 * MIB
    assert tier.counters.value("rewarm_volume_capacity_bytes") == 64 * MIB
    assert tier.counters.value("rewarm_host_records") == tier.counters.value("rewarm_volume_records") == 6
    assert tier.counters.value("rewarm_root_written_day_bytes", tier.host_root) == 0
    assert tier.host_counters.value("rewarm_root_written_day_bytes", tier.host_root) > 0
    tier.volume.close()


def test_it_belongs_to_the_process_that_opened_it(tier: Tier) -> None:
    tier.promoted([1])
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            tier.namespace.load([(key(1), ToSlot())])
        except BusyError:
            os.write(write_end, b"busy")
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 10) == b"busy"
    os.waitpid(child, 0)
    os.close(read_end)


# A process that is killed.


def test_kill_9_in_the_middle_of_promotions_leaves_nothing_wrong(tmp_path: Path, bench: Bench) -> None:
    tier = Tier(bench, tmp_path)
    assert store(tier.namespace, range(200)) == [True] * 200
    program = str(Path(__file__).parents[2] / "support" / "promoting_process.py")
    for _ in range(3):
        before = len(record_files(tier.host_root))
        child = subprocess.Popen(
            [sys.executable, program, tier.flash_root, tier.host_root, "200"], stdout=subprocess.PIPE
        )
        wait_for(lambda count=before: len(record_files(tier.host_root)) > count, "a record to be promoted")
        child.send_signal(signal.SIGKILL)
        child.communicate()
        for path in record_files(tier.host_root)[::2]:
            path.unlink()  # so that the next one has something to do
    tier.namespace.rescan()
    assert load(tier.namespace, range(200)) == [HIT] * 200
    tier.volume.close()
    after = Tier(bench, tmp_path, janitor=True)
    sessions = Path(tier.host_root, ".rewarm", "sessions")
    wait_for(lambda: len(list(sessions.iterdir())) == 1, "the janitor to remove what the dead left")
    assert not list(sessions.glob("*/tmp-*"))
    assert load(after.namespace, range(200)) == [HIT] * 200
    after.volume.close()


class _Ends:
    """A completion that ends while it is looked at: after so many looks."""

    def __init__(self, looks: int, result: int) -> None:
        self.looks, self.result, self.taken = looks, result, False

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def take(self) -> list[tuple[int, int]]:
        if self.looks > 0 or self.taken:
            return []
        self.looks, self.taken = 0, True
        return [(0, self.result)]


@pytest.mark.parametrize("looks", range(4))
@pytest.mark.parametrize("later", range(4))
def test_done_is_never_said_too_early_nor_kept_back_once_all_is_taken(looks: int, later: int) -> None:
    """Who is told no waits for the descriptor, which tells of nothing that was taken before."""
    first: Any = _Ends(looks, errno.EBADMSG)
    other: Any = _Ends(later, 0)
    parts = [Part(first, [0], lambda _: None, HOST_ROOT, is_copy=True)]
    handle = LoadHandle(1, parts, [], lambda _: [Part(other, [0], lambda _: None, 1)])
    for _ in range(20):
        if handle.done():
            break
        assert not (first.taken and other.taken), "all of it was taken, and it is said not to be done"
    assert handle.results() == [HIT]
    assert handle.root_of(0) == 1
