"""Watching a volume: rates from what was said twice, and who is silent, hung, gone, unsound or added is told apart."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from volumes import MIB, Bench, namespace_of, store, wait_for

from rewarm.errors import DamageError, StorageError, UsageError
from rewarm.volume import create_volume
from rewarm.volume.layout import RootFile, RootPaths, read_root_file
from rewarm.volume.live import Live, Numbers, RootNumbers, pack
from rewarm.volume.members import Member, add_root, remove_root
from rewarm.volume.session import Session
from rewarm.volume.usage import Usage
from rewarm.volume.watch import STALE_S, Device, RootLook, Watch, look_at

A, B = "a" * 32, "b" * 32
HOST = os.uname().nodename


class World:
    """A clock, and what looks at two roots find."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks: dict[str, RootLook] = {}
        self.hung: dict[str, threading.Event] = {}
        self.slept = 0
        for path, root_id in (("/a", A), ("/b", B)):
            self.looks[path] = RootLook(path, self.now, RootFile("v" * 32, root_id, 1000, 1), usage=Usage(400))

    def look(self, path: str) -> RootLook:
        if path in self.hung:
            assert self.hung[path].wait(60)
        if path not in self.looks:
            return RootLook(path, self.now, trouble=UsageError(f"{path} holds no volume"))
        return replace(self.looks[path], at_s=self.now)

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += seconds

    def watch(self, *roots: str) -> Watch:
        return Watch(
            roots or ("/a", "/b"),
            look=self.look,
            clock=lambda: self.now,
            wall_clock=lambda: 5000 + self.now,
            sleep=self.sleep,
        )

    def say(self, *lives: Live) -> None:
        for look in self.looks.values():
            look.lives = list(lives)


def live(clock_s: float, instance: str = "1", pid: int = 7, host: str = HOST, **numbers: float) -> Live:
    roots = {
        A: ("/a", RootNumbers(read_bytes=100 * clock_s, read_s=0.25 * clock_s, is_read=1, is_written=1)),
        B: ("/b", RootNumbers(written_bytes=10 * clock_s, is_read=1, is_written=1, io_errors=2)),
    }
    written_ns = int((6000 + clock_s) * 1e9)
    return Live(instance * 32, pid, host, "server", 0, written_ns, clock_s, Numbers(**numbers), roots)


@pytest.fixture
def world() -> World:
    return World()


def test_rates_follow_from_what_was_said_last_and_before(world: World) -> None:
    watch = world.watch()
    world.say(live(0, hit_tokens=10, lookup_tokens=100, records=5))
    assert watch.poll(5).processes[0].read_bytes_s == 0
    world.now += 1
    world.say(live(2, hit_tokens=70, lookup_tokens=200, records=6, load_queue_bytes=99))
    picture = watch.poll(5)
    a, b = picture.roots
    assert (a.read_bytes_s, a.written_bytes_s, a.read_share) == (100, 0, 0.25)
    assert (b.read_bytes_s, b.written_bytes_s, b.io_errors, b.trouble) == (0, 10, 2, "")
    (process,) = picture.processes
    assert (process.read_bytes_s, process.written_bytes_s) == (100, 10)
    assert (process.gains.hit_tokens, process.gains.lookup_tokens) == (30, 50)
    assert (process.totals.records, process.totals.load_queue_bytes) == (6, 99)
    world.now += 1
    assert watch.poll(5).processes[0].read_bytes_s == 100, "nothing new was said: the last rates stand"


def test_both_sides_of_a_server_are_one_process(world: World) -> None:
    watch = world.watch()
    for clock_s in (0, 1):
        world.say(
            live(clock_s, "1", lookup_tokens=50 * clock_s, records=9),
            live(clock_s, "2", loaded_records=3 * clock_s, records=8),
            live(clock_s, "3", pid=8),
        )
        picture = watch.poll(5)
    first, second = picture.processes
    assert (first.pid, second.pid) == (7, 8)
    assert (first.gains.lookup_tokens, first.gains.loaded_records, first.totals.records) == (50, 3, 9)
    assert (first.read_bytes_s, second.read_bytes_s) == (200, 100)
    assert picture.roots[0].read_bytes_s == 300


def test_who_is_silent_is_shown_with_its_age_and_without_rates(world: World) -> None:
    watch = world.watch()
    for clock_s in (0, 1):
        world.say(live(clock_s))
        watch.poll(5)
    world.now += STALE_S + 1
    picture = watch.poll(5)
    (process,) = picture.processes
    assert process.is_stale
    assert process.age_s == STALE_S + 1
    assert process.read_bytes_s == picture.roots[0].read_bytes_s == 0


def test_who_was_silent_before_is_silent_from_the_first_picture(world: World) -> None:
    old = live(0)
    world.say(replace(old, written_ns=int(5900 * 1e9)), replace(old, instance="2" * 32, pid=8, host="elsewhere"))
    picture = world.watch().poll(5)
    assert [(process.pid, process.age_s) for process in picture.processes] == [(8, 0), (7, 100)]


def test_who_is_gone_is_shown_no_more(world: World) -> None:
    watch = world.watch()
    world.say(live(0))
    assert watch.poll(5).processes
    world.say()
    assert not watch.poll(5).processes


def test_settling_waits_for_the_second_word_and_for_no_silent_one(world: World) -> None:
    spoken = iter([0, 0, 0, 1, 1])

    def look(path: str) -> RootLook:
        found = world.look(path)
        if path == "/a":
            found.lives = [live(next(spoken)), replace(live(0, "2"), written_ns=1)]
        return found

    watch = Watch(["/a", "/b"], look=look, clock=lambda: world.now, wall_clock=lambda: 6000.0, sleep=world.sleep)
    picture = watch.settle(5)
    assert world.slept == 3
    assert picture.roots[0].read_bytes_s == 100
    assert [process.is_stale for process in picture.processes] == [True]


def test_settling_ends_when_somebody_does_not_speak_again(world: World) -> None:
    world.say(live(0))
    picture = world.watch().settle(5)
    assert picture.processes[0].read_bytes_s == 0
    assert 1 < world.slept < 100


def test_a_root_that_hangs_holds_nobody_up_and_the_others_tell_of_it(world: World) -> None:
    world.hung["/b"] = threading.Event()
    watch = world.watch()
    try:
        for clock_s in (0, 1):
            world.say(live(clock_s))
            picture = watch.poll(0.05)
    finally:
        world.hung["/b"].set()
    a, b = picture.roots
    assert a.trouble == ""
    assert (b.trouble, b.root_id, b.written_bytes_s) == ("does not answer", B, 10)
    del world.hung["/b"]
    wait_for(lambda: watch.poll(5).roots[1].trouble == "", "the root that answers again")


def test_a_root_that_is_left_alone_says_by_whom(world: World) -> None:
    said = live(0)
    said.roots[B] = ("/b", replace(said.roots[B][1], is_read=0))
    world.say(said, live(0, "2", pid=9))
    assert [root.trouble for root in world.watch().poll(5).roots] == ["", "left alone by 7"]


def test_devices_and_evictions_from_two_looks(world: World) -> None:
    watch = world.watch("/a")
    look = world.looks["/a"]
    look.device, look.usage = Device(100, 200, 3), Usage(400, 7, evicted_bytes=1000)
    assert watch.poll(5).roots[0].device_reads_s is None
    world.now += 2
    look.device, look.usage = Device(300, 200, 4), Usage(500, 8, evicted_bytes=5000)
    root = watch.poll(5).roots[0]
    assert (root.device_reads_s, root.device_writes_s, root.device_in_flight) == (100, 0, 4)
    assert (root.used_bytes, root.wanted_bytes, root.evicted_bytes_s) == (500, 8, 2000)


def test_roots_that_were_added_are_found_and_removed_ones_left_out(world: World) -> None:
    watch = world.watch("/a")
    assert [root.path for root in watch.poll(5).roots] == ["/a"]
    world.looks["/a"].members = {B: Member(B, "/b", is_member=True, changed_ns=1)}
    watch.poll(5)
    assert [root.path for root in watch.poll(5).roots] == ["/a", "/b"]
    world.looks["/a"].members = {B: Member(B, "/b", is_member=False, changed_ns=2)}
    assert [root.path for root in watch.poll(5).roots] == ["/a"]


def test_a_root_that_only_processes_name_is_shown_by_their_word(world: World) -> None:
    watch = world.watch("/a")
    for clock_s in (0, 1):
        world.say(live(clock_s))
        picture = watch.poll(5)
    unnamed = picture.roots[1]
    assert (unnamed.path, unnamed.written_bytes_s, unnamed.capacity_bytes) == ("/b", 10, 0)
    assert "not named" in unnamed.trouble


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda world: world.looks.clear(), UsageError, "holds no volume"),
        (
            lambda world: world.looks.update(
                {path: RootLook(path, 0.0, trouble=DamageError(f"{path} is damaged")) for path in ("/a", "/b")}
            ),
            DamageError,
            "/a is damaged",
        ),
        (
            lambda world: setattr(world.looks["/b"], "file", RootFile("w" * 32, B, 1000, 1)),
            UsageError,
            "two different volumes",
        ),
    ],
)
def test_what_cannot_be_watched(
    world: World, change: Callable[[World], None], error: type[Exception], says: str
) -> None:
    change(world)
    with pytest.raises(error, match=says):
        world.watch().settle(5)


def test_where_no_root_answers(world: World) -> None:
    world.hung = {"/a": threading.Event(), "/b": threading.Event()}
    try:
        with pytest.raises(StorageError, match="/a does not answer"):
            world.watch().settle(0.05)
    finally:
        for event in world.hung.values():
            event.set()


def test_one_root_that_is_away_is_said_and_the_other_shown(world: World) -> None:
    del world.looks["/b"]
    picture = world.watch().settle(5)
    assert [root.trouble for root in picture.roots] == ["", "/b holds no volume"]


def test_a_look_at_a_real_root_skips_and_says_what_is_unsound(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    assert all(store(namespace_of(volume), range(5)))
    wait_for(lambda: look_at(root).lives, "what the process says")
    sessions = Path(RootPaths(root).sessions)
    held = [Session(RootPaths(root)) for _ in range(3)]
    for session in held:
        session.tell(pack(live(0)))
    assert len(look_at(root).lives) == 4
    truncated, flipped, foreign = (Path(session.directory) / "live" for session in held)
    truncated.write_bytes(b"RWL1")
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    foreign.unlink()
    os.mkfifo(foreign)
    (sessions / "1-foreign").mkdir()
    os.mkfifo(sessions / "1-foreign" / "lock")
    (sessions / "a file").write_text("x")
    look = look_at(root)
    assert [live.pid for live in look.lives] == [os.getpid()]
    assert len(look.skipped) == 4
    for path, says in ((truncated, "has 4 bytes"), (flipped, "checksum"), (foreign, "not a regular"), ("lock", "")):
        assert any(str(path) in line and says in line for line in look.skipped), (path, look.skipped)
    assert look.usage.used_bytes == 5 * 65536
    assert look.trouble is None
    for session in held:
        session.close()


def test_a_file_that_says_the_same_for_ever_is_silence(root: str, bench: Bench) -> None:
    """A frozen copy of a live file in a session whose lock is held: shown as silent, never as traffic."""
    bench.open(root)
    wait_for(lambda: look_at(root).lives, "what the process says")
    frozen, world = look_at(root), World()
    world.now = frozen.at_s
    world.looks = {root: frozen}
    watch = Watch([root], look=world.look, clock=lambda: world.now, wall_clock=lambda: frozen.lives[0].written_ns / 1e9)
    watch.poll(5)
    world.now += STALE_S + 1
    picture = watch.poll(5)
    assert picture.processes[0].is_stale
    assert picture.roots[0].read_bytes_s == 0


def test_real_roots_come_and_go(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "abc"]
    create_volume(roots[:2], capacity_bytes=64 * MIB)
    watch = Watch([roots[0]])
    watch.settle(5)
    add_root(roots[:2], roots[2], capacity_bytes=32 * MIB)
    wait_for(lambda: roots[2] in [root.path for root in watch.poll(5).roots], "the root that was added")
    remove_root([roots[0]], roots[2])
    wait_for(lambda: roots[2] not in [root.path for root in watch.poll(5).roots], "the root that was removed")
    assert read_root_file(roots[0]).volume_id == watch.poll(5).volume_id
