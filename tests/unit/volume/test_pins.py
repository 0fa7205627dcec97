"""Pins: their files, hostile ones among them, and the janitor that never evicts what they name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from volumes import MIB, RECORD_BYTES, Bench, key, namespace_of, record_path, store, wait_for

from rewarm.engine.checksum import crc32c
from rewarm.errors import BusyError, DamageError, FormatVersionError, RewarmError, StorageError, UsageError
from rewarm.volume import create_volume, pins
from rewarm.volume.evict import evict_until
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths
from rewarm.volume.pins import Pin, WatchedPins, pin_names, pin_state, read_pin, read_pins, remove_pin, write_pin
from rewarm.volume.quota import Quotas, tenant_of, write_quotas
from rewarm.volume.usage import UsageFile

NOW_S = 1_800_000_000.0


def pin_of(place: bytes, *numbers: int, name: str = "one", until_s: float | None = None) -> Pin:
    return Pin(
        name=name,
        num_tokens=100,
        num_chunks=len(numbers),
        created_s=NOW_S,
        until_s=until_s,
        entries=[(place, key(number)) for number in numbers],
    )


def file_of(root: str, name: str = "one") -> Path:
    return Path(RootPaths(root).pins) / f"{name}.pin"


def content_of(header: Any, entries: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = len(text).to_bytes(4, "little") + text + entries
    return b"RWP1" + crc32c(memoryview(body)).to_bytes(4, "little") + body


HEADER = {
    "format": "rewarm.pin", "version": 1, "name": "one", "num_tokens": 5, "num_chunks": 1, "created_s": 1.0,
    "until_s": None,
}  # fmt: skip


def test_a_pin_reads_back_and_goes(root: str) -> None:
    assert pin_names(root) == []
    assert read_pins(root) == ([], [])
    made = pin_of(bytes(32), 1, 2, until_s=NOW_S + 5)
    write_pin(root, made)
    assert read_pin(root, "one") == made
    assert file_of(root).stat().st_mode & 0o777 == 0o600
    assert (made.has_ended(NOW_S + 4.9), made.has_ended(NOW_S + 5)) == (False, True)
    assert remove_pin(root, "one")
    assert not remove_pin(root, "one")
    with pytest.raises(UsageError):
        read_pin(root, "one")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", ".hidden", "x" * 65, "a\nb", "a\0b", "é"])
def test_a_name_is_one_file_s(root: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        pins.check_name(name)
    assert len(caught.value.message) < 200
    with pytest.raises(UsageError):
        remove_pin(root, name)


def write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def of_another_user(path: Path) -> None:
    write_bytes(path, content_of(HEADER))
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(path, 12345, -1)


HOSTILE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: write_bytes(path, b""),
    "short": lambda path: write_bytes(path, b"RWP1abc"),
    "noise": lambda path: write_bytes(path, os.urandom(5000)),
    "flipped": lambda path: write_bytes(path, content_of(HEADER)[:-1] + b"!"),
    "cut": lambda path: write_bytes(path, content_of(HEADER, bytes(128))[:-64]),
    "odd entries": lambda path: write_bytes(path, content_of(HEADER, bytes(63))),
    "long header": lambda path: write_bytes(path, b"RWP1" + bytes(4) + b"\xff\xff\xff\xff"),
    "no JSON": lambda path: write_bytes(path, content_of(b"{")),
    "deep JSON": lambda path: write_bytes(path, content_of(b"[" * 100_000)),
    "a list": lambda path: write_bytes(path, content_of([])),
    "another name": lambda path: write_bytes(path, content_of({**HEADER, "name": "two"})),
    "another format": lambda path: write_bytes(path, content_of({**HEADER, "format": "rewarm.quotas"})),
    "a false version": lambda path: write_bytes(path, content_of({**HEADER, "version": True})),
    "a time that is none": lambda path: write_bytes(path, content_of({**HEADER, "until_s": float("nan")})),
    "a time without an end": lambda path: write_bytes(path, content_of({**HEADER, "until_s": float("inf")})),
    "a time in words": lambda path: write_bytes(path, content_of({**HEADER, "until_s": "soon"})),
    "a huge time": lambda path: write_bytes(path, content_of({**HEADER, "until_s": 10**400})),
    "chunks below none": lambda path: write_bytes(path, content_of({**HEADER, "num_chunks": -1})),
    "more chunks than records": lambda path: write_bytes(path, content_of({**HEADER, "num_chunks": 2}, bytes(64))),
    "a link": a_link,
    "a pipe": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "of another user": of_another_user,
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_file_pins_nothing_and_says_so_once(
    root: str, how: str, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = namespace_of(bench.open(root))
    store(namespace, range(4))
    write_pin(root, pin_of(namespace.id, 0, name="good"))
    HOSTILE[how](file_of(root))
    with pytest.raises((DamageError, StorageError)):
        read_pin(root, "one")
    known, wrong = read_pins(root)
    assert ([one.name for one in known], len(wrong)) == (["good"], 1)
    with caplog.at_level(logging.WARNING):
        janitor = RootJanitor(root)
        janitor.prepare()
        janitor.step()
        janitor._next_look = 0.0
        janitor.step()
        janitor.evict(4 * RECORD_BYTES)
        janitor.finish()
    assert len([record for record in caplog.records if "one.pin" in record.getMessage()]) == 1
    assert left(root, namespace, range(4)) == [0]
    if how != "a directory":
        assert remove_pin(root, "one"), "whatever it is, it can be taken away"


def test_a_newer_file_is_refused_by_its_version(root: str) -> None:
    write_pin(root, pin_of(bytes(32), 1))
    write_bytes(file_of(root), content_of({**HEADER, "version": 2}))
    with pytest.raises(FormatVersionError):
        read_pin(root, "one")


def test_too_many_records_are_refused_written_or_read(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_ENTRIES", 3)
    with pytest.raises(UsageError):
        write_pin(root, pin_of(bytes(32), *range(4)))
    monkeypatch.setattr(pins, "MAX_PINNED", 5)
    write_pin(root, pin_of(bytes(32), 1, 2, 3, name="a"))
    write_pin(root, pin_of(bytes(32), 4, 5, 6, name="b"))
    known, wrong = read_pins(root)
    assert [one.name for one in known] == ["a"]
    assert len(wrong) == 1
    monkeypatch.setattr(pins, "_MAX_FILE_BYTES", 100)
    assert isinstance(read_pins(root)[1][0], StorageError)


def left(root: str, namespace: Any, numbers: range) -> list[int]:
    return [number for number in numbers if record_path(root, namespace, number).exists()]


def test_a_janitor_evicts_all_but_what_is_pinned_and_ends_there(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    store(namespace, range(10))
    write_pin(root, pin_of(namespace.id, 2, 3, 7, 40))
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    with UsageFile(RootPaths(root).usage).update() as usage:
        usage.pressure_bytes = 20 * RECORD_BYTES
    assert janitor.evict(20 * RECORD_BYTES) == 7 * RECORD_BYTES
    assert left(root, namespace, range(50)) == [2, 3, 7]
    assert UsageFile(RootPaths(root).usage).read().pressure_bytes == 0, "nobody waits for what never comes"
    store(namespace, [40, 41])
    janitor._next_look = 0.0
    janitor.step()
    assert janitor.evict(20 * RECORD_BYTES) == RECORD_BYTES
    assert left(root, namespace, range(50)) == [2, 3, 7, 40], "it was pinned before it came"
    janitor.finish()
    again = RootJanitor(root)  # a restart
    again.prepare()
    again.step()
    assert again.evict(20 * RECORD_BYTES) == 0
    remove_pin(root, "one")
    again._next_look = 0.0
    again.step()
    assert again.evict(20 * RECORD_BYTES) == 4 * RECORD_BYTES
    again.finish()


def test_a_namespace_that_comes_after_its_pin_is_pinned(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    place = namespace_of(volume, later=1)
    write_pin(root, pin_of(place.id, 1))
    janitor._next_look = 0.0
    janitor.step()
    store(place, [1, 2])
    janitor._next_look = 0.0
    janitor.step()
    janitor.evict(10 * RECORD_BYTES)
    janitor.finish()
    assert left(root, place, range(3)) == [1]


def test_a_pin_ends_at_its_time_without_any_change_of_a_file(root: str) -> None:
    now = [NOW_S]
    watched = WatchedPins(root, lambda: now[0])
    assert watched.changed() is None
    write_pin(root, pin_of(bytes(32), 1, until_s=NOW_S + 10))
    write_pin(root, pin_of(bytes(32), 2, name="two"))

    def names() -> list[str] | None:
        changed = watched.changed()
        return None if changed is None else [one.name for one in changed]

    assert (names(), names()) == (["one", "two"], None)
    now[0] += 10
    assert (names(), names()) == (["two"], None)
    write_pin(root, pin_of(bytes(32), 3, name="two"))
    assert (names(), names()) == (["two"], None)
    remove_pin(root, "two")
    assert (names(), names()) == ([], None)


def test_a_tenant_above_its_quota_keeps_what_is_pinned(root: str, bench: Bench) -> None:
    acme = tenant_of("acme")
    namespace = namespace_of(bench.open(root))
    namespace.own([key(number) for number in range(10)], acme)
    store(namespace, range(10))
    write_pin(root, pin_of(namespace.id, *range(5)))
    write_quotas(root, Quotas(1.0, {acme: 3 * RECORD_BYTES / (64 * MIB)}))
    bench.close()
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    janitor.finish()
    assert left(root, namespace, range(10)) == [0, 1, 2, 3, 4]


def test_evict_until_leaves_pins_alone_unless_it_is_told_otherwise(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    store(namespace, range(8))
    write_pin(root, pin_of(namespace.id, 1, 4))
    assert evict_until([root], lambda capacity: capacity).num_records == 6
    assert left(root, namespace, range(8)) == [1, 4]
    holder = RootJanitor(root)
    with holder.alone(), pytest.raises(BusyError) as caught:
        evict_until([root], lambda capacity: capacity, pinned_too=True)
    assert "unpin" in caught.value.hint
    assert evict_until([root], lambda capacity: capacity, pinned_too=True).num_records == 2


def test_what_of_a_pin_is_there_counts_whole_chunks_of_the_ranks_that_store(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    namespace = namespace_of(bench.open(*roots))
    entries = [(namespace.id, key(number)) for number in range(12)]  # 3 chunks of 4 ranks, of which two store
    made = Pin(name="x", num_tokens=9, num_chunks=3, created_s=1.0, until_s=None, entries=entries)
    state = pin_state(roots, made)
    assert (state.num_chunks_present, state.present_bytes, state.whole_bytes) == (0, 0, 12 * RECORD_BYTES)
    store(namespace, [0, 2, 4, 8, 10])
    state = pin_state(roots, made)
    assert (state.num_chunks_present, state.present_bytes, state.whole_bytes) == (2, 5 * RECORD_BYTES, 6 * RECORD_BYTES)
    assert pin_state(roots, Pin(name="x", num_tokens=0, num_chunks=0, created_s=1.0, until_s=None, entries=[]))
    assert pins.pins_of(roots, {namespace.id}) == []
    write_pin(roots[1], made)
    assert pins.pins_of(roots, {namespace.id}) == ["x"]


def test_a_pins_directory_that_is_no_directory_keeps_nobody_from_evicting(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    store(namespace, range(3))
    Path(RootPaths(root).pins).write_text("no directory")
    with pytest.raises((OSError, RewarmError)):
        read_pins(root)
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    assert janitor.evict(RECORD_BYTES) == RECORD_BYTES
    janitor.finish()


def test_a_servers_janitor_heeds_a_pin_that_another_process_wrote(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root, janitor=True))
    store(namespace, range(6))
    wait_for(lambda: Path(RootPaths(root).janitor_lock).exists(), "the janitor")
    write_pin(root, pin_of(namespace.id, 0, 5))
    evict_until([root], lambda capacity: capacity)
    wait_for(lambda: left(root, namespace, range(6)) == [0, 5], "the end of what is not pinned")
