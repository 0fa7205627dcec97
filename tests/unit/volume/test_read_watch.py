"""A root that delivers far less than it did is noticed, left alone, and used again when it is healed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from volumes import MIB, Bench, key, load, namespace_of, store, wait_for

from rewarm.engine import EngineConfig, open_engine, probe_engines
from rewarm.engine.base import Flow, ToSlot
from rewarm.volume import Outcome, create_volume, read_watch
from rewarm.volume.health import RootHealth
from rewarm.volume.read_watch import LOOK_S, ReadWatch

RATE = 2000.0 * MIB


class World:
    """Roots of a pace that can be set, a clock, and a watch that looks at them."""

    def __init__(self, num_roots: int = 3) -> None:
        self.now = 1000.0
        self.health = [RootHealth(lambda: self.now) for _ in range(num_roots)]
        self.roots: list[Any] = [
            SimpleNamespace(name=f"/root{n}", is_member=True, health=health) for n, health in enumerate(self.health)
        ]
        self.pace = [1.0] * num_roots
        self.busy = [1.0] * num_roots
        self.flows = [Flow()] * num_roots
        self.watch = ReadWatch(self.roots, self.flows.__getitem__, lambda: self.now)
        self.cut: list[int] = []
        self.watch.look()

    def part(self, root: int) -> Any:
        part = WatchedPart(root, self.cut)
        self.watch._parts.add(part)  # without a thread that looks by itself
        return part

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            for number, (pace, busy) in enumerate(zip(self.pace, self.busy, strict=True)):
                if not self.health[number].loads.is_on:
                    self.flows[number] += Flow(pace * busy * RATE * LOOK_S, busy * LOOK_S)
            self.watch.look()

    def paused(self) -> list[bool]:
        return [health.loads.is_on for health in self.health]


class WatchedPart:
    """A part of a load that notes its cut."""

    def __init__(self, root: int, cut: list[int]) -> None:
        self.root = root
        self.completion = SimpleNamespace(cancel=lambda: cut.append(root), done=lambda: True)


@pytest.mark.parametrize("pace", [0.1, 0.0], ids=["ten times slower", "hung"])
def test_a_root_that_turns_slow_is_left_alone_within_a_second(pace: float, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.run(2)
    assert world.paused() == [False] * 3
    parts = [world.part(0), world.part(1)]
    world.pace[1] = pace
    began = world.now
    while not any(world.paused()):
        world.run(LOOK_S)
        assert world.now - began < 1.0
    assert world.paused() == [False, True, False]
    assert world.cut == [1], "its reads are given up, those of others go on"
    assert "root1 delivers far less than it did" in caplog.text
    assert parts


def test_it_is_tried_again_less_and_less_often_and_returns_when_healed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.run(2)
    world.pace[1] = 0.1
    tried = {world.flows[1].num_bytes}
    for _ in range(150):
        world.run(LOOK_S)
        tried.add(world.flows[1].num_bytes)
    assert world.paused()[1]
    assert len(tried) <= 1 + 3 + 4, "in 0.3 s at first, then after pauses of 1, 2, 4 and 8 s, and shortly"
    assert caplog.text.count("far less") == 1
    world.pace[1] = 1.0
    world.run(10)
    assert not world.paused()[1]
    assert not world.health[1].is_slow
    assert caplog.text.count("delivers as before") == 1
    world.pace[1] = 0.1
    while not world.paused()[1]:
        world.run(LOOK_S)
    read_bytes = world.flows[1].num_bytes
    world.run(0.9)
    assert world.flows[1].num_bytes == read_bytes
    world.run(0.2)
    assert world.flows[1].num_bytes > read_bytes, "tried after a second, as the first time"


def test_what_slows_all_roots_down_is_not_one_root_s_fault() -> None:
    world = World()
    world.run(2)
    world.pace = [0.1, 0.08, 0.12]
    world.run(5)
    assert world.paused() == [False] * 3


def test_a_root_that_was_slow_from_the_beginning_is_used() -> None:
    world = World()
    world.pace = [1.0, 0.05, 1.0]
    world.run(5)
    assert world.paused() == [False] * 3


def test_a_root_that_is_alone_or_whose_others_have_nothing_to_do_is_used() -> None:
    world = World()
    world.run(2)
    world.busy = [0.0, 1.0, 0.0]
    world.pace[1] = 0.1
    world.run(3)
    assert world.paused() == [False] * 3


def test_little_use_says_little() -> None:
    """Single small reads now and then wait longer for each byte than long loads do."""
    world = World()
    world.run(2)
    world.busy = [0.02] * 3
    world.pace = [1.0, 0.15, 1.0]
    world.run(10)
    assert world.paused() == [False] * 3
    assert World(1).paused() == [False]


def test_two_of_three_may_be_slow_at_once_and_a_removed_one_is_not_looked_at() -> None:
    world = World()
    world.run(2)
    world.pace = [0.1, 1.0, 0.0]
    world.run(0.7)
    assert world.paused() == [True, False, True]
    world.roots[1].is_member = False
    world.run(3)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that judges a root by a few small records."""
    for name, value in (("MIN_EXPECTED_BYTES", 1), ("_FIRST_BYTES", 1), ("_FIRST_BUSY_S", 0.0), ("LEAST_WORK_S", 0.0)):
        monkeypatch.setattr(read_watch, name, value)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["pure", "threads", "io_uring"])
def test_a_load_over_a_root_that_hangs_ends_long_before_its_deadline(tmp_path: Path, kind: str) -> None:
    if reason := probe_engines()[kind]:
        pytest.skip(f"no engine {kind} here: {reason}")
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    engine = open_engine(EngineConfig(kind=kind, ring_bytes=4 * MIB, slot_bytes=MIB))
    bench = Bench(engine)
    volume = bench.open(*roots)
    namespace = namespace_of(volume)
    numbers = range(24)
    assert all(store(namespace, numbers))
    there: list[int] = []

    def load_to_slots() -> dict[int, Outcome]:
        handle = namespace.load([(key(n), ToSlot()) for n in numbers], deadline_s=600)
        there[:] = [handle.root_of(n) for n in numbers]
        found: dict[int, Outcome] = {}

        def all_ended() -> bool:
            for index, outcome in handle.take():
                found[index] = outcome
                if outcome is Outcome.HIT:
                    handle.release(index)
            return len(found) == len(numbers)

        wait_for(all_ended, "the load to end")
        return found

    for _ in range(3):
        assert set(load_to_slots().values()) == {Outcome.HIT}
    engine.hold(roots[1])  # type: ignore[attr-defined]
    found = load_to_slots()
    assert {n: found[n] for n in numbers if not there[n]} == dict.fromkeys(
        (n for n in numbers if not there[n]), Outcome.HIT
    )
    assert {found[n] for n in numbers if there[n]} == {Outcome.TIMEOUT}
    assert volume.paused() == {volume.roots[1].file.root_id}
    assert not any(namespace.contains(key(n)) for n in numbers if there[n])
    engine.hold(None)  # type: ignore[attr-defined]
    wait_for(lambda: not volume.paused(), "the pause to end")
    assert load(namespace, numbers) == [Outcome.HIT] * len(numbers)
    bench.close()


def test_another_process_of_the_server_follows(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    rank, scheduler = bench.open(*roots), bench.open(*roots)
    namespace = namespace_of(scheduler)
    numbers = range(20)
    assert all(store(namespace, numbers))
    rank.roots[0].health.loads.failed()
    scheduler.follow(rank.paused())
    known = [namespace.contains(key(n)) for n in numbers]
    assert known == [namespace._indexes[1].contains(key(n)) for n in numbers]
    assert any(known)
    assert not all(known)
    scheduler.follow(set())
    scheduler.follow({"another"})
    assert scheduler.paused() == rank.paused()
