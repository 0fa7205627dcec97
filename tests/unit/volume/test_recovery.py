"""After an unclean boot what was written last is looked at before it counts; the cuts themselves are in tests/vm."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from volumes import Bench, load, namespace_of, record_path, store, tree

from rewarm.volume import Namespace, Outcome
from rewarm.volume.layout import RootPaths
from rewarm.volume.recovery import Recovery, SyncMark, boot_id, host_name, read_mark, recover_root

EARLIER_BOOT = "00000000-0000-4000-8000-000000000000"
NUM_RECORDS = 6


@pytest.fixture
def stored(root: str, bench: Bench) -> Namespace:
    """A namespace of six records, whose volume is closed."""
    volume = bench.open(root)
    namespace = namespace_of(volume)
    assert store(namespace, range(NUM_RECORDS)) == [True] * NUM_RECORDS
    volume.close()
    return namespace


def set_mark(root: str, boot: str, synced_ns: int) -> None:
    mark = Path(RootPaths(root).sync_mark(host_name()))
    mark.write_text(json.dumps({"boot_id": boot, "synced_ns": synced_ns}))


def tear(path: Path) -> None:
    """Zeros for the last 4096 bytes, as a lost block leaves them; the length stays."""
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)


def test_what_is_not_whole_goes_and_the_rest_is_served(root: str, bench: Bench, stored: Namespace) -> None:
    tear(record_path(root, stored, 1))
    record_path(root, stored, 3).write_bytes(b"")
    set_mark(root, EARLIER_BOOT, time.time_ns() - 60 * 10**9)
    namespace = namespace_of(bench.open(root))
    assert len(namespace) == NUM_RECORDS - 2
    assert not record_path(root, stored, 1).exists()
    assert not record_path(root, stored, 3).exists()
    hit, miss = Outcome.HIT, Outcome.MISS
    assert load(namespace, range(NUM_RECORDS)) == [hit, miss, hit, miss, hit, hit]
    mark = read_mark(RootPaths(root), host_name())
    assert mark is not None
    assert mark.boot_id == boot_id()
    assert recover_root(RootPaths(root)) is None


def test_what_was_synced_before_is_not_read_again(root: str, bench: Bench, stored: Namespace) -> None:
    path = record_path(root, stored, 2)
    tear(path)
    before = time.time() - 3600
    os.utime(path, (before, before))
    set_mark(root, EARLIER_BOOT, time.time_ns() - 60 * 10**9)
    assert recover_root(RootPaths(root)) == Recovery(NUM_RECORDS, NUM_RECORDS - 1, 0)
    assert load(namespace_of(bench.open(root)), [2]) == [Outcome.DAMAGED]


def test_a_size_that_cannot_be_is_seen_however_old(root: str, stored: Namespace) -> None:
    path = record_path(root, stored, 2)
    path.write_bytes(b"")
    os.utime(path, (0, 0))
    set_mark(root, EARLIER_BOOT, time.time_ns())
    done = recover_root(RootPaths(root))
    assert done is not None
    assert done.num_removed == 1


def test_a_mark_of_this_boot_means_nothing_to_do(root: str, stored: Namespace) -> None:
    tear(record_path(root, stored, 1))
    set_mark(root, boot_id(), 0)
    assert recover_root(RootPaths(root)) is None
    assert record_path(root, stored, 1).exists()


@pytest.mark.parametrize("content", [b"", bytes(80), b"[]", b'{"boot_id": "x"}', b'{"boot_id": "x", "synced_ns": "y"}'])
def test_a_damaged_mark_has_everything_checked(content: bytes, root: str, stored: Namespace) -> None:
    path = record_path(root, stored, 4)
    tear(path)
    os.utime(path, (1, 1))
    Path(RootPaths(root).sync_mark(host_name())).write_bytes(content)
    assert read_mark(RootPaths(root), host_name()) == SyncMark("", 0)
    assert recover_root(RootPaths(root)) == Recovery(NUM_RECORDS, NUM_RECORDS, 1)


def test_a_host_that_never_wrote_here_trusts_the_others(root: str, stored: Namespace) -> None:
    tear(record_path(root, stored, 1))
    Path(RootPaths(root).sync_mark(host_name())).unlink()
    assert recover_root(RootPaths(root)) == Recovery()
    assert record_path(root, stored, 1).exists()


def test_a_reader_changes_nothing(root: str, bench: Bench, stored: Namespace) -> None:
    tear(record_path(root, stored, 1))
    set_mark(root, EARLIER_BOOT, 0)
    before = tree(root)
    namespace = namespace_of(bench.open(root, read_only=True))
    assert load(namespace, [0, 1]) == [Outcome.HIT, Outcome.DAMAGED]
    assert tree(root) == before


def test_one_does_it_and_the_others_wait(root: str, stored: Namespace) -> None:
    tear(record_path(root, stored, 1))
    set_mark(root, EARLIER_BOOT, 0)
    found: list[Recovery | None] = []
    threads = [threading.Thread(target=lambda: found.append(recover_root(RootPaths(root)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [done for done in found if done is not None] == [Recovery(NUM_RECORDS, NUM_RECORDS, 1)]
    assert len(found) == 4
