"""Disks that are full, fail, hang, turn read-only or go away: misses and pauses, no exception, no wrong byte."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from volumes import (
    MIB,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Bench,
    key,
    load,
    namespace_of,
    record_files,
    record_path,
    store,
    wait_for,
)

from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import Probe, ReadRecord, ToSlot, Transfer, WriteRecord
from rewarm.engine.pure import PureCompletion, PureEngine
from rewarm.errors import StorageError
from rewarm.testing.engines import Faulty, Slow
from rewarm.units import round_up
from rewarm.volume import Namespace, Outcome, StoreHandle, Volume, create_volume, recovery
from rewarm.volume.check import RecordChecker
from rewarm.volume.health import BadRecords, Pause, RootHealth
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths
from rewarm.volume.session import ENTRY, Session, SessionReader
from rewarm.volume.usage import read_usage


def is_paused(volume: Volume) -> bool:
    """What the metric says."""
    return volume.counters.value("rewarm_kv_stores_paused") == 1


def test_a_disk_that_others_fill_shrinks_the_volume(small_disk: Callable[[str], Path], bench: Bench) -> None:
    root = str(small_disk("size=40m") / "kv")
    create_volume([root], capacity_bytes=20 * MIB)
    volume = bench.open(root, janitor=True)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(200)))
    filler = Path(root).parent / "others"
    filler.write_bytes(bytes(40 * MIB - 200 * RECORD_BYTES - 4 * MIB))
    first, results = 1000, []
    while first < 1160:
        results += store(namespace, range(first, first + 8))
        first += 8
    assert sum(results) > 140, "the janitor makes room on a full disk"
    there = [n for n in [*range(200), *range(1000, 1160)] if namespace.contains(key(n))]
    assert Outcome.HIT in load(namespace, there)
    assert read_usage(RootPaths(root).usage).evicted_records >= 80


def test_a_full_disk_without_a_janitor_pauses_stores(small_disk: Callable[[str], Path], bench: Bench) -> None:
    root = str(small_disk("size=24m") / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    volume = bench.open(root)
    namespace = namespace_of(volume)
    filler = Path(root).parent / "others"
    filler.write_bytes(bytes(22 * MIB))
    results = store(namespace, range(100))
    assert 0 < sum(results) < 100
    assert load(namespace, range(100)) == [Outcome.HIT if done else Outcome.MISS for done in results]
    assert volume.roots[0].health.stores.is_on
    wait_for(lambda: is_paused(volume), "the gauge")
    assert store(namespace, [200]) == [False]
    filler.unlink()
    wait_for(lambda: all(store(namespace, [201])), "stores to go on")
    wait_for(lambda: not is_paused(volume), "the gauge")
    assert not list(Path(root, ".rewarm", "sessions").glob("*/tmp-*"))
    count = len(record_files(root))
    wait_for(lambda: read_usage(RootPaths(root).usage).used_bytes == count * RECORD_BYTES, "the budget")


def test_a_server_starts_on_a_full_disk(small_disk: Callable[[str], Path], bench: Bench) -> None:
    root = str(small_disk("size=40m") / "kv")
    create_volume([root], capacity_bytes=20 * MIB)
    volume = bench.open(root)
    assert all(store(namespace_of(volume), range(200)))
    volume.close()
    with (Path(root).parent / "others").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    again = bench.open(root)
    namespace = namespace_of(again)
    assert 100 < load(namespace, range(200)).count(Outcome.HIT) < 200, "some made room for the session"
    assert store(namespace, [1000]) == [True]


def test_a_volume_full_without_a_janitor_pauses_stores(tmp_path: Path, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=MIB)
    volume = bench.open(root)
    namespace = namespace_of(volume)
    assert sum(store(namespace, range(32))) == 16
    assert len(record_files(root)) == 16
    assert volume.roots[0].health.stores.is_on
    assert store(namespace, [100]) == [False]


def test_a_root_that_turns_read_only(root: str) -> None:
    broken = [False]
    bench = faulty(lambda transfer: errno.EROFS if broken[0] and isinstance(transfer, WriteRecord) else 0)
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(8)))
    broken[0] = True
    assert store(namespace, range(100, 108)) == [False] * 8
    assert load(namespace, range(8)) == [Outcome.HIT] * 8
    broken[0] = False
    wait_for(lambda: all(store(namespace, [200])), "stores to go on")
    bench.close()


def test_a_root_that_is_mounted_read_only(small_disk: Callable[[str], Path], bench: Bench) -> None:
    disk = small_disk("size=40m")
    root = str(disk / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    volume = bench.open(root)
    assert all(store(namespace_of(volume), range(8)))
    volume.close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system") as caught:
        bench.open(root)
    assert "read-only" in caught.value.hint
    assert load(namespace_of(bench.open(root, read_only=True)), range(8)) == [Outcome.HIT] * 8


def test_a_root_that_is_removed_under_a_server(root: str, bench: Bench) -> None:
    volume = bench.open(root, janitor=True)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(8)))
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
    assert load(namespace, range(8)) == [Outcome.MISS] * 8
    assert store(namespace, range(100, 104)) == [False] * 4
    assert namespace.probe([key(1)]).wait(10)
    assert not namespace.contains(key(1))
    volume.close()
    assert not Path(root, "rewarm.volume").exists()
    assert not record_files(root)


def test_a_root_that_is_unmounted_is_not_written_below(small_disk: Callable[[str], Path], bench: Bench) -> None:
    disk = small_disk("size=40m")
    create_volume([str(disk)], capacity_bytes=8 * MIB)
    volume = bench.open(str(disk), janitor=True)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(8)))
    subprocess.run(["umount", "-l", str(disk)], check=True)
    assert store(namespace, range(100, 104)) == [False] * 4
    assert load(namespace, range(8)) == [Outcome.MISS] * 8
    volume.close()
    assert not list(disk.iterdir())


def faulty(fail: Callable[[Transfer], int]) -> Bench:
    """A bench whose engine fails these transfers."""
    inner = open_engine(EngineConfig(kind="pure", ring_bytes=4 * MIB, slot_bytes=MIB))
    return Bench(Faulty(inner, fail_at=lambda _number, transfer: fail(transfer)))


def test_eio_on_reads_retires_the_root_until_it_works_again(root: str) -> None:
    broken = [True]
    bench = faulty(lambda transfer: errno.EIO if broken[0] and isinstance(transfer, (ReadRecord, Probe)) else 0)
    volume = bench.open(root)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(4)))
    assert load(namespace, [0]) == [Outcome.IO_ERROR]
    assert not namespace.contains(key(1)), "a root that fails holds nothing for now"
    assert load(namespace, [1]) == [Outcome.IO_ERROR]
    assert volume.counters.value("rewarm_io_errors_total", root) == 1, "the second one was not even tried"
    assert namespace.probe([key(2)]).done()
    broken[0] = False
    wait_for(lambda: namespace.contains(key(1)), "the pause to end")
    assert load(namespace, range(4)) == [Outcome.HIT] * 4
    bench.close()


def test_a_record_that_is_unreadable_for_good_is_written_anew(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, broken = [100.0], [True]
    bench = faulty(
        lambda transfer: errno.EIO if broken[0] and isinstance(transfer, ReadRecord) and transfer.key == key(1) else 0
    )
    volume = bench.open(root)
    volume.roots[0].health = RootHealth(lambda: now[0])
    namespace = namespace_of(volume)
    assert all(store(namespace, range(4)))
    assert load(namespace, [1]) == [Outcome.IO_ERROR]
    assert load(namespace, [0]) == [Outcome.IO_ERROR], "for all that is known, the root fails"
    now[0] += 1
    assert load(namespace, [1]) == [Outcome.IO_ERROR]
    now[0] += 1
    assert load(namespace, [0]) == [Outcome.IO_ERROR], "nothing else was read since: it may still be the root"
    now[0] += 1
    assert load(namespace, [0, 2]) == [Outcome.HIT] * 2
    assert store(namespace, [1]) == [True]
    assert namespace.contains(key(1))
    assert load(namespace, [1]) == [Outcome.IO_ERROR]
    assert not namespace.contains(key(1))
    assert load(namespace, [0]) == [Outcome.HIT], "one bad record is not the root's fault"
    assert volume.counters.value("rewarm_damaged_records_total", root) == 1
    before = record_path(root, namespace, 1).stat().st_ino
    volume.close()
    with monkeypatch.context() as unreadable:
        unreadable.setattr(RecordChecker, "check", lambda self, path, key: errno.EIO)
        janitor = RootJanitor(root)
        janitor.prepare()
        janitor.step()
        janitor.finish()
    assert [path.stat().st_ino for path in Path(root, ".rewarm", "quarantine").iterdir()] == [before]
    assert read_usage(RootPaths(root).usage).used_bytes == 4 * RECORD_BYTES, "quarantined ones count"
    broken[0] = False
    again = namespace_of(bench.open(root))
    assert store(again, [1]) == [True]
    assert load(again, range(4)) == [Outcome.HIT] * 4
    bench.close()


def test_a_record_that_cannot_be_read_is_written_anew_by_the_same_server(root: str) -> None:
    def fault(transfer: Transfer) -> int:
        path = record_path(root, namespace, 1) if isinstance(transfer, ReadRecord) else Path("/")
        return errno.EIO if str(path) == getattr(transfer, "path", "") and path.stat().st_ino in bad else 0

    bad: set[int] = set()
    bench = faulty(fault)
    volume = bench.open(root)
    volume.roots[0].health = RootHealth(lambda: now[0])
    now = [100.0]
    namespace = namespace_of(volume)
    assert all(store(namespace, range(4)))
    bad.add(record_path(root, namespace, 1).stat().st_ino)
    assert load(namespace, range(4)) == [Outcome.HIT, Outcome.IO_ERROR, Outcome.HIT, Outcome.HIT]
    now[0] += 1
    assert load(namespace, [1]) == [Outcome.IO_ERROR]
    assert store(namespace, [1]) == [True]
    assert load(namespace, [1]) == [Outcome.HIT]
    bench.close()


def test_a_root_that_fails_for_all_has_no_bad_record() -> None:
    bad = BadRecords()
    assert [bad.failed(name) for name in (b"a", b"b", b"a", b"b", b"a")] == [False] * 5
    bad.delivered([b"a"])
    assert not bad.failed(b"a"), "it was read since"
    assert bad.failed(b"b")


def test_eio_on_writes_pauses_stores_and_gives_the_room_back(root: str) -> None:
    broken = [True]
    bench = faulty(lambda transfer: errno.EIO if broken[0] and isinstance(transfer, WriteRecord) else 0)
    namespace = namespace_of(bench.open(root))
    assert store(namespace, range(4)) == [False] * 4
    assert read_usage(RootPaths(root).usage).used_bytes == 0
    broken[0] = False
    wait_for(lambda: all(store(namespace, range(4))), "stores to go on")
    assert read_usage(RootPaths(root).usage).used_bytes == 4 * RECORD_BYTES
    bench.close()


def test_each_write_may_fail_and_the_budget_stays_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewarm.volume.store_thread.ROOM_WAIT_S", 0.05)  # there is no janitor to wait for
    for number in range(1, 9):
        root = str(tmp_path / str(number))
        create_volume([root], capacity_bytes=8 * MIB)
        inner = open_engine(EngineConfig(kind="pure"))
        bench = Bench(Faulty(inner, fail_at=number, error=errno.EDQUOT))
        namespace = namespace_of(bench.open(root))
        assert sum(store(namespace, range(8))) == 8, "what found the disk full is tried again"
        assert read_usage(RootPaths(root).usage).used_bytes == 8 * RECORD_BYTES
        bench.close()


def test_a_root_that_hangs_is_a_timeout_and_then_left_alone(root: str) -> None:
    inner = open_engine(EngineConfig(kind="pure", ring_bytes=4 * MIB, slot_bytes=MIB))
    bench = Bench(inner)
    assert all(store(namespace_of(bench.open(root)), range(2)))
    slow = Bench(Slow(inner, delay_s=30.0))
    namespace = namespace_of(slow.open(root, read_only=True))
    handle = namespace.load([(key(0), ToSlot())], deadline_s=0.05)
    assert handle.wait(10)
    assert handle.results() == [Outcome.TIMEOUT]
    assert not namespace.contains(key(1))
    slow.close()
    bench.close()


def test_a_cancelled_load_blames_nobody(root: str) -> None:
    inner = open_engine(EngineConfig(kind="pure", ring_bytes=4 * MIB, slot_bytes=MIB))
    bench = Bench(inner)
    assert all(store(namespace_of(bench.open(root)), range(2)))
    slow = Bench(Slow(inner, delay_s=30.0))
    namespace = namespace_of(slow.open(root, read_only=True))
    handle = namespace.load([(key(0), ToSlot())])
    handle.cancel()
    assert handle.wait(10)
    assert handle.results() == [Outcome.TIMEOUT]
    assert namespace.contains(key(1))
    slow.close()
    bench.close()


@contextmanager
def hanging_store(
    root: str, before: Callable[[Namespace], None] = lambda _: None
) -> Iterator[tuple[Namespace, StoreHandle, Callable[[], None]]]:
    """Two records are stored, and the second hangs until the last thing that this gives is called."""
    engine = PureEngine(EngineConfig(kind="pure", ring_bytes=4 * MIB, slot_bytes=MIB))
    bench = Bench(engine)
    namespace = namespace_of(bench.open(root))
    before(namespace)
    step = round_up(namespace.payload_bytes, 4096)
    buffer = alloc_aligned(2 * step)
    engine.hold(record_path(root, namespace, 1).name)
    try:
        handle = namespace.store([(key(number), buffer.address + number * step) for number in range(2)])
        yield namespace, handle, lambda: engine.hold(None)
    finally:
        engine.hold(None)
        bench.close()
        buffer.close()


def test_a_record_is_known_and_its_memory_free_while_one_beside_it_hangs(root: str) -> None:
    with hanging_store(root) as (namespace, handle, let_go):
        taken: list[tuple[int, bool, bool]] = []
        wait_for(lambda: bool(taken.extend(handle.take()) or taken), "the record that does not hang")
        assert taken == [(0, True, True)]
        assert namespace.contains(key(0))
        assert not handle.done()
        let_go()
        assert handle.wait(30)
        assert handle.take() == [(1, True, True)]
        assert handle.results() == [True, True]


def test_no_memory_is_free_before_its_record_is_written_whatever_fails(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise StorageError("the index fails", errno=errno.EIO)

    with hanging_store(root, before=lambda namespace: monkeypatch.setattr(namespace, "learn", fail)) as (_, handle, go):
        assert failed.wait(30)
        assert handle.take() == []
        go()
        assert handle.wait(30)
        assert not all(handle.results())


def test_stores_end_where_no_descriptor_is_left_for_an_event(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    bench = Bench(open_engine(EngineConfig(kind="pure", ring_bytes=4 * MIB, slot_bytes=MIB)))
    namespace = namespace_of(bench.open(root))
    with monkeypatch.context() as short:
        short.setattr(PureCompletion, "fileno", refuse)
        assert store(namespace, range(5)) == [True] * 5
    assert load(namespace, range(5)) == [Outcome.HIT] * 5
    bench.close()


def test_pauses_double_until_it_works() -> None:
    now = [100.0]
    pause = Pause(lambda: now[0])
    lengths = []
    for _ in range(8):
        pause.failed()
        pause.failed()
        start = now[0]
        while pause.is_on:
            now[0] += 0.5
        lengths.append(now[0] - start)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60]
    pause.worked()
    pause.failed()
    now[0] += 1
    assert not pause.is_on


# After an unclean boot


def crash(root: str, namespace_records: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a power cut leaves it: these files have these bytes, and the kernel has another boot id."""
    for path, content in namespace_records.items():
        path.write_bytes(content)
    monkeypatch.setattr(recovery, "boot_id", lambda: "the next boot")


def test_after_an_unclean_boot_new_records_are_checked_before_they_count(
    root: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(6)))
    paths = [record_path(root, namespace, n) for n in range(6)]
    whole = paths[0].read_bytes()
    crash(root, {paths[1]: b"", paths[2]: bytes(len(whole)), paths[3]: whole[:8192]}, monkeypatch)
    again = namespace_of(bench.open(root))
    assert [again.contains(key(n)) for n in range(6)] == [True, False, False, False, True, True]
    assert load(again, [0, 4, 5]) == [Outcome.HIT] * 3
    mark = json.loads(next(Path(root, ".rewarm").glob("sync-*")).read_text())
    assert mark["boot_id"] == "the next boot"
    assert read_usage(RootPaths(root).usage).used_bytes == 3 * RECORD_BYTES


def test_after_an_unclean_boot_what_was_synced_is_not_read(
    root: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(6)))
    for n in range(6):
        os.utime(record_path(root, namespace, n), (1, 1))
    monkeypatch.setattr(recovery, "boot_id", lambda: "the next boot")
    done = recovery.recover_root(RootPaths(root))
    assert done is not None
    assert (done.num_records, done.num_checked, done.num_removed) == (6, 0, 0)
    assert recovery.recover_root(RootPaths(root)) is None, "once is enough"


def test_after_an_unclean_boot_a_read_only_server_changes_nothing(
    root: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(2)))
    crash(root, {record_path(root, namespace, 0): b""}, monkeypatch)
    assert load(namespace_of(bench.open(root, read_only=True)), range(2)) == [Outcome.DAMAGED, Outcome.HIT]
    assert record_path(root, namespace, 0).exists()


# Logs and order


def test_a_log_goes_on_as_long_as_a_janitor_reads_it(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewarm.volume.session._ROTATE_BYTES", 10 * ENTRY.size)
    monkeypatch.setattr("rewarm.volume.session._MAX_LOG_FILES", 4)
    session = Session(RootPaths(root))
    reader = SessionReader(session.directory)
    seen = 0
    for _ in range(100):
        session.note(2, bytes(32), [key(1)] * 5)  # type: ignore[arg-type]
        session.flush()
        seen += len(list(reader.read()))
    assert seen == 500
    for _ in range(100):
        session.note(2, bytes(32), [key(1)] * 5)  # type: ignore[arg-type]
        session.flush()
    assert len(list(Path(session.directory).glob("log-*"))) == 4, "nobody reads: the log ends"
    session.close()


def test_an_entry_that_was_cut_spoils_no_other(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(RootPaths(root))
    reader = SessionReader(session.directory)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:100]))
        session.note(2, bytes(32), [key(1)] * 3)  # type: ignore[arg-type]
        session.flush()
    session.note(2, bytes(32), [key(2)] * 3)  # type: ignore[arg-type]
    session.flush()
    assert [entry[2] for entry in reader.read()] == [key(1), key(2), key(2), key(2)]
    session.close()


def test_the_order_of_use_survives_restarts(tmp_path: Path, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    volume = bench.open(root)
    namespace = namespace_of(volume)
    for first in range(0, 96, 8):
        assert all(store(namespace, range(first, first + 8)))
    used = range(0, 96, 4)
    namespace.touch([key(n) for n in used])
    volume.close()
    for amount in (20, 40):
        janitor = RootJanitor(root)
        janitor.prepare()
        janitor.step()
        janitor.evict(amount * RECORD_BYTES)
        janitor.finish()
    left = [n for n in range(96) if record_path(root, namespace, n).exists()]
    assert len(left) == 36
    assert set(used) <= set(left), "what was used went before what was not"


def test_a_scan_does_not_push_out_what_is_used(tmp_path: Path, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    volume = bench.open(root, janitor=True)
    namespace = namespace_of(volume)
    hot = range(24)
    assert all(store(namespace, hot))
    first = 1000
    while read_usage(RootPaths(root).usage).evicted_records < 300:
        namespace.touch([key(n) for n in hot])
        store(namespace, range(first, first + 16))
        first += 16
        assert first < 4000
    kept = load(namespace, hot).count(Outcome.HIT)
    assert kept >= 20, f"{kept} of 24 records in use are left after {first - 1000} that were stored once"


def test_payloads_of_odd_sizes(tmp_path: Path, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=32 * MIB)
    volume = bench.open(root)
    for num_bytes in (1, 4095, 4096, 4097, MIB - 4096, MIB, MIB + 1, PAYLOAD_BYTES):
        namespace = namespace_of(volume, payload_bytes=num_bytes, size=num_bytes)
        assert store(namespace, [1, 2]) == [True, True]
        assert load(namespace, [1, 2, 3]) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
    buffer = alloc_aligned(4096)
    buffer.close()


def test_counting_a_root_that_is_gone_ends_no_thread_that_stores(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    volume = bench.open(*roots)
    Path(roots[1]).rename(tmp_path / "away")
    volume._housekeep()  # what a store thread calls every second, before any store has met the fault
    Path(tmp_path / "away").rename(roots[1])
    assert all(store(namespace_of(volume), range(20)))
