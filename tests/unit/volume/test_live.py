"""What processes say of themselves for whoever watches: its bytes, hostile files, and that it never harms a server."""

from __future__ import annotations

import logging
import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from volumes import MIB, Bench, load, namespace_of, store, wait_for

from rewarm.engine.checksum import crc32c
from rewarm.errors import DamageError, StorageError
from rewarm.volume import Volume, create_volume
from rewarm.volume.health import RootHealth
from rewarm.volume.layout import RootPaths, read_root_file
from rewarm.volume.live import LIVE_BYTES, MAX_ROOTS, Live, LiveReport, Numbers, RootNumbers, pack, parse, read_live
from rewarm.volume.session import SessionReader, session_directories

ROOT_ID = "0123456789abcdef" * 2
LIVE = Live(
    instance="ff" * 16,
    pid=4711,
    host="node-a",
    title="server",
    started_ns=10**18,
    written_ns=10**18 + 5,
    clock_s=12.5,
    numbers=Numbers(*range(14)),
    roots={ROOT_ID: ("/mnt/a", RootNumbers(*range(8)))},
)


def session_of(root: str) -> str:
    (directory,) = [path for path in session_directories(RootPaths(root)) if not SessionReader(path).is_dead()]
    return directory


def told(root: str) -> Live | None:
    return read_live(session_of(root))


def signed(body: bytes) -> bytes:
    return struct.pack("<4sI", b"RWL1", crc32c(body)) + body


def test_what_is_written_is_read_again() -> None:
    content = pack(LIVE)
    assert len(content) == LIVE_BYTES
    assert parse(content, "live") == LIVE


def test_many_roots_and_long_names_are_cut() -> None:
    roots = {f"{number:032x}": (f"/{'x' * 500}/{number}", RootNumbers()) for number in range(MAX_ROOTS + 3)}
    found = parse(pack(replace(LIVE, roots=roots, host="h" * 99, title="\x1b[31mred\udcff")), "live")
    assert list(found.roots) == list(roots)[:MAX_ROOTS]
    assert found.roots[f"{7:032x}"][0].endswith("x/7")
    assert len(found.host) == 64
    assert found.title.isprintable()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 bytes"),
        (pack(LIVE)[:-1], f"has {LIVE_BYTES - 1} bytes"),
        (pack(LIVE) + b"\0", f"has {LIVE_BYTES + 1} bytes"),
        (bytes(LIVE_BYTES), "another kind or release"),
        (b"RWL2" + pack(LIVE)[4:], "another kind or release"),
        (pack(LIVE)[:300] + bytes([pack(LIVE)[300] ^ 1]) + pack(LIVE)[301:], "checksum"),
        (pack(replace(LIVE, numbers=Numbers(math.nan))), "numbers that are none"),
        (pack(replace(LIVE, clock_s=math.inf)), "numbers that are none"),
        (pack(replace(LIVE, numbers=Numbers(-1))), "numbers that are none"),
        (pack(replace(LIVE, roots={ROOT_ID: ("/a", RootNumbers(math.nan))})), "numbers that are none"),
        (signed(pack(LIVE)[8:52] + struct.pack("<I", MAX_ROOTS + 1) + pack(LIVE)[56:]), "roots, more than"),
    ],
)
def test_a_file_that_is_not_whole_or_of_another_kind_is_told_apart(content: bytes, says: str) -> None:
    with pytest.raises(DamageError, match=says):
        parse(content, "live")


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "endless"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "live"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to("/etc/hostname")
    elif kind == "directory":
        place.mkdir()
    else:
        with place.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises((StorageError, DamageError)):
        read_live(str(tmp_path))
    assert read_live(str(tmp_path / "nowhere")) is None


def test_a_read_that_falls_into_a_write_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "live").write_bytes(pack(LIVE))
    torn = [pack(LIVE)[:100] + bytes(LIVE_BYTES - 100)]
    whole = os.pread

    def pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
        return torn.pop() if torn else whole(descriptor, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert read_live(str(tmp_path)) == LIVE
    assert not torn


def test_an_open_volume_says_what_it_does_on_every_root(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    volume = bench.open(*roots)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(40)))
    load(namespace, range(40))
    volume.counters.add("rewarm_kv_lookup_tokens_total", 100)
    volume.counters.add("rewarm_kv_loads_total", 2, "miss")
    volume.counters.add("rewarm_kv_loads_total", 3, "timeout")

    def is_told() -> bool:
        both = [told(root) for root in roots]
        return all(live is not None and live.numbers.lookup_tokens == 100 for live in both)

    wait_for(is_told, "both files")
    for root in roots:
        live = told(root)
        assert live is not None
        assert live.pid == os.getpid()
        assert live.numbers.records == 40
        assert live.numbers.lost_loads == 5
        assert {path for path, _ in live.roots.values()} == set(roots)
        for path, numbers in live.roots.values():
            assert numbers.read_bytes >= numbers.written_bytes > 0, path
            assert numbers.is_read == numbers.is_written == 1
    volume.roots[1].health = RootHealth(lambda: 5.0)
    volume.roots[1].health.loads.failed()
    wait_for(lambda: _is_read(roots[0], read_root_file(roots[1]).root_id) == 0, "the root that is left alone")
    volume.close()
    assert not session_directories(RootPaths(roots[0])) or all(
        SessionReader(directory).is_dead() for directory in session_directories(RootPaths(roots[0]))
    )


def _is_read(root: str, of: str) -> float | None:
    live = told(root)
    return None if live is None else live.roots[of][1].is_read


def test_a_dead_session_is_removed_with_its_file(root: str, bench: Bench) -> None:
    bench.open(root)
    wait_for(lambda: told(root) is not None, "the file")
    directory = session_of(root)
    bench.close()
    SessionReader(directory).remove()
    assert not os.path.lexists(directory)


def test_a_reader_leaves_no_file(root: str, bench: Bench) -> None:
    volume = bench.open(root, read_only=True)
    assert len(volume.live_report()) == LIVE_BYTES
    assert not session_directories(RootPaths(root))


def test_a_file_that_cannot_be_written_harms_nobody(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    os.mkdir(os.path.join(session_of(root), "live"))
    namespace = namespace_of(volume)
    assert all(store(namespace, range(10)))
    wait_for(lambda: volume.counters.value("rewarm_root_used_bytes", root) > 0, "the rest of the housekeeping")
    assert all(store(namespace, range(10, 20)))
    assert not volume.roots[0].health.stores.is_on


def test_numbers_that_cannot_be_gathered_are_said_once_and_harm_nobody(
    root: str, bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LiveReport, now_s: float) -> Live:
        raise ZeroDivisionError

    monkeypatch.setattr(LiveReport, "_gather", broken)
    with caplog.at_level(logging.ERROR):
        volume = bench.open(root)
        assert volume.live_report() == volume.live_report() == b""
        namespace = namespace_of(volume)
        assert all(store(namespace, range(10)))
        wait_for(lambda: volume.counters.value("rewarm_root_used_bytes", root) > 0, "the housekeeping")
    assert caplog.text.count("does not show this process") == 1
    assert told(root) is None


def test_threads_of_all_roots_share_what_was_gathered(root: str, bench: Bench) -> None:
    now = 100.0
    report = LiveReport(bench.open(root), clock=lambda: now)
    first = report.content()
    assert report.content() is first
    now = 100.6
    second = report.content()
    assert second != first
    assert parse(second, "live").clock_s - parse(first, "live").clock_s == pytest.approx(0.6)


def test_a_root_that_fails_keeps_what_was_said_last(root: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = bench.open(root)
    wait_for(lambda: told(root) is not None, "the file")
    written: list[Any] = []
    session = volume.roots[0].session
    assert session is not None
    volume.roots[0].health = RootHealth(lambda: 5.0)
    volume.roots[0].health.note_store(5)
    monkeypatch.setattr(session, "tell", written.append)
    thread = volume._store_threads[0]
    thread._tell()
    assert not written
    volume.roots[0].health = RootHealth(lambda: 5.0)
    volume.roots[0].health.note_store(28)  # full: it can still be written to
    thread._tell()
    assert written


def test_a_root_that_goes_away_and_comes_back_is_seen_without_any_request(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    volume, gone_id = bench.open(*roots), read_root_file(roots[1]).root_id
    wait_for(lambda: _is_read(roots[0], gone_id) == 1, "what the process says of both")
    os.rename(roots[1], f"{roots[1]}.away")  # as after an unmount: other files, or none, under the old name
    wait_for(lambda: _is_read(roots[0], gone_id) == 0, "the root that is away")
    assert [volume.counters.value("rewarm_root_healthy", root) for root in roots] == [1, 0]
    os.rename(f"{roots[1]}.away", roots[1])
    wait_for(lambda: _is_read(roots[0], gone_id) == 1, "the root that is back")
    assert [volume.counters.value("rewarm_root_healthy", root) for root in roots] == [1, 1]


def test_volumes_of_one_process_are_told_apart(root: str, bench: Bench) -> None:
    volumes: list[Volume] = [bench.open(root), bench.open(root)]
    assert parse(volumes[0].live_report(), "").instance != parse(volumes[1].live_report(), "").instance
