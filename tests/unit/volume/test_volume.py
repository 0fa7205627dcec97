"""Records come back, are counted, and what the volume does beside the server's thread."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from volumes import (
    IDENTITY,
    MIB,
    RECORD_BYTES,
    Bench,
    key,
    load,
    namespace_of,
    record_files,
    record_path,
    store,
    tree,
    wait_for,
)

from rewarm.engine import alloc_aligned
from rewarm.engine.base import Completion, Engine, ToMemory, ToSlot
from rewarm.errors import BusyError, UsageError, VolumeClosed
from rewarm.testing.engines import Counting
from rewarm.volume import Outcome, StoreHandle, Volume, create_volume
from rewarm.volume.namespace import FIRST_RECORDS
from rewarm.volume.usage import read_usage


def test_records_come_back_in_another_process_life(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    assert store(namespace, range(20)) == [True] * 20
    again = namespace_of(bench.open(root))
    assert len(again) == 20
    assert [n for n in range(30) if again.contains(key(n))] == list(range(20))
    assert load(again, [0, 19, 20]) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]


def test_another_identity_sees_nothing(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    store(namespace_of(volume), range(4))
    other = namespace_of(volume, dtype="bfloat16")
    assert not other.contains(key(0))
    assert load(other, range(4)) == [Outcome.MISS] * 4
    assert volume.namespace(IDENTITY, payload_bytes=namespace_of(volume).payload_bytes) is namespace_of(volume)
    with pytest.raises(UsageError, match="records of 61440 bytes"):
        volume.namespace(IDENTITY, payload_bytes=4096)


def test_a_second_process_probes_what_the_first_stored(root: str, bench: Bench) -> None:
    first, second = namespace_of(bench.open(root)), namespace_of(bench.open(root))
    store(first, range(3))
    assert not second.contains(key(0))
    assert second.probe([key(n) for n in range(4)]).wait(10)
    assert [second.contains(key(n)) for n in range(4)] == [True, True, True, False]
    record_path(root, first, 1).unlink()
    assert second.probe([key(1)]).wait(10)
    assert not second.contains(key(1))


def test_a_load_takes_records_as_they_end(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    store(namespace, range(3))
    handle = namespace.load([(key(n), ToSlot()) for n in (0, 1, 2, 9)])
    assert handle.fileno() >= 0
    taken = dict(handle.take()) if handle.wait(10) else {}
    assert taken == {0: Outcome.HIT, 1: Outcome.HIT, 2: Outcome.HIT, 3: Outcome.MISS}
    assert handle.slot_address(2) % 4096 == 0
    for index in range(3):
        handle.release(index)


def test_a_key_that_is_stored_twice_at_once_is_paid_once(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    assert store(namespace, [1, 1, 2, 1]) == [True] * 4
    assert store(namespace, [1, 2]) == [True] * 2
    assert read_usage(f"{root}/.rewarm/usage").used_bytes == 2 * RECORD_BYTES


def test_a_batch_as_large_as_the_volume_does_not_empty_it(tmp_path: Path, bench: Bench) -> None:
    root = str(tmp_path / "v")
    create_volume([root], capacity_bytes=2 * MIB)
    volume = bench.open(root, janitor=True)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(24)))
    assert sum(store(namespace, range(100, 164))) > 32
    assert len(record_files(root)) >= 16
    huge = namespace_of(volume, payload_bytes=3 * MIB, other=1)
    count = len(record_files(root))
    assert store(huge, [1]) == [False]
    assert len(record_files(root)) >= count - 1, "a record that can never fit made others go"


def test_damage_is_a_miss_a_counter_and_written_anew(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    namespace = namespace_of(volume)
    store(namespace, range(2))
    path = record_path(root, namespace, 0)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    assert load(namespace, [0, 1]) == [Outcome.DAMAGED, Outcome.HIT]
    assert not namespace.contains(key(0))
    assert namespace.probe([key(0)]).wait(10)
    assert not namespace.contains(key(0)), "a probe brought a damaged record back"
    assert values(volume)["rewarm_damaged_records_total"] == 1
    assert store(namespace, [0]) == [True]
    assert load(namespace, [0]) == [Outcome.HIT]


@pytest.mark.parametrize("what", ["directory", "link", "pipe", "empty"])
def test_what_is_no_file_is_damage_and_the_janitor_puts_it_aside(what: str, root: str, bench: Bench) -> None:
    volume = bench.open(root, janitor=True)
    namespace = namespace_of(volume)
    store(namespace, range(2))
    path = record_path(root, namespace, 0)
    path.unlink()
    plant(path, what, record_path(root, namespace, 1))
    assert load(namespace, [0, 1]) == [Outcome.DAMAGED, Outcome.HIT]
    wait_for(lambda: not os.path.lexists(path), "the janitor to put it aside")
    assert store(namespace, [0]) == [True]
    assert load(namespace, [0, 1]) == [Outcome.HIT] * 2


def plant(path: Path, what: str, other: Path) -> None:
    if what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to(other)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.touch()


def test_read_only_leaves_no_trace(root: str, bench: Bench) -> None:
    writer = bench.open(root)
    store(namespace_of(writer), range(3))
    writer.close()
    before = tree(root)
    volume = bench.open(root, read_only=True)
    namespace = namespace_of(volume)
    namespace.touch([key(0)])
    assert load(namespace, [0, 7]) == [Outcome.HIT, Outcome.MISS]
    new = volume.namespace({"another": "identity"}, payload_bytes=4096)
    assert new.wait_scanned(10)
    with pytest.raises(UsageError, match="read-only"):
        namespace.store([(key(1), 4096)])
    volume.close()
    assert tree(root) == before


def test_a_closed_volume_says_so_and_settles_every_store(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    namespace = namespace_of(volume)
    volume.close()
    volume.close()
    with pytest.raises(VolumeClosed):
        namespace.load([])
    buffer = alloc_aligned(namespace.payload_bytes)
    handle = StoreHandle(1)
    volume.queue_stores(namespace, [(key(1), buffer.address)], handle)  # as if it had passed the check before close()
    assert handle.wait(10)
    assert handle.results() == [False]


def test_malformed_arguments_are_usage_errors(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    with pytest.raises(UsageError, match="32 bytes"):
        namespace.probe([b"short"])
    with pytest.raises(UsageError, match="aligned"):
        namespace.store([(key(1), 4097)])
    with pytest.raises(UsageError, match="plain JSON"):
        bench.open(root).namespace({"a": float("nan")}, payload_bytes=1)


def test_a_large_load_is_one_load(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root), payload_bytes=4096)
    numbers = list(range(5 * FIRST_RECORDS))
    assert all(store(namespace, numbers))
    assert set(load(namespace, numbers)) == {Outcome.HIT}
    assert set(load(namespace, [*numbers, 10_000])) == {Outcome.HIT, Outcome.MISS}


class Keeping(Counting):
    """Keeps the completions."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.completions: list[Completion] = []

    def submit(self, *arguments: Any, **options: Any) -> Completion:
        self.completions.append(super().submit(*arguments, **options))
        return self.completions[-1]


def test_a_load_that_is_refused_in_the_middle_has_let_go_of_its_memory(root: str, bench: Bench) -> None:
    bench.engine = engine = Keeping(bench.engine)
    namespace = namespace_of(bench.open(root), payload_bytes=4096)
    numbers = range(3 * FIRST_RECORDS)
    buffer = alloc_aligned(4096 * len(numbers))
    targets = [(key(number), ToMemory(buffer.address + 4096 * number)) for number in numbers]
    targets[-1] = (key(0), ToMemory(buffer.address + 1))
    with pytest.raises(UsageError, match="aligned"):
        namespace.load(targets)
    assert engine.completions
    assert all(completion.done() for completion in engine.completions)
    buffer.close()


def test_a_result_before_the_end_is_refused(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    namespace = namespace_of(volume)
    with pytest.raises(BusyError):
        StoreHandle(1).results()
    assert namespace.load([]).results() == []
    assert namespace.load([]).fileno() == -1


def test_lookups_go_on_while_others_write(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    store(namespace, range(50))
    wrong: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            wrong.extend(n for n in range(50) if not namespace.contains(key(n)))

    thread = threading.Thread(target=look)
    thread.start()
    for n in range(1000, 5000):
        namespace.note_present([key(n)])
    stop.set()
    thread.join(10)
    assert not wrong


def test_two_roots_split_the_records_and_one_alone_keeps_its_own(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in ("a", "b")]
    create_volume(roots, capacity_bytes=64 * MIB)
    both = bench.open(*roots)
    namespace = namespace_of(both)
    assert all(store(namespace, range(60)))
    counts = [len(record_files(root)) for root in roots]
    assert min(counts) > 10
    assert load(namespace, range(60)) == [Outcome.HIT] * 60
    alone = namespace_of(bench.open(roots[1]))
    assert len(alone) == counts[1]
    other_way = namespace_of(bench.open(roots[1], roots[0]))
    assert load(other_way, range(60)) == [Outcome.HIT] * 60


def test_a_root_that_fails_is_left_alone_and_the_other_serves(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [str(tmp_path / name) for name in ("a", "b")]
    create_volume(roots, capacity_bytes=64 * MIB)
    volume = bench.open(*roots)
    namespace = namespace_of(volume)
    store(namespace, range(40))
    volume.roots[0].health.note_load(errno.EIO)
    here = [namespace.contains(key(n)) for n in range(40)]
    assert 0 < sum(here) < 40
    outcomes = load(namespace, range(40))
    assert {outcome for outcome, there in zip(outcomes, here, strict=True) if there} == {Outcome.HIT}
    assert Outcome.HIT not in {outcome for outcome, there in zip(outcomes, here, strict=True) if not there}
    volume.roots[0].health.note_store(errno.EIO)
    assert all(store(namespace, range(100, 120))), "the other root takes what is stored"
    assert load(namespace, range(100, 120)) == [Outcome.HIT] * 20


def values(volume: Volume) -> dict[str, float]:
    return {name: numbers[0] for name, _, numbers in volume.counters.take()}
