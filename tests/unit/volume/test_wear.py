"""Bytes written by the hour, the budget of a day that many processes share, and what metrics and info say of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from volumes import MIB, RECORD_BYTES, Bench, namespace_of, store

from rewarm.metrics import Counters
from rewarm.volume import create_volume
from rewarm.volume.info import volume_info
from rewarm.volume.layout import RootPaths
from rewarm.volume.usage import read_usage
from rewarm.volume.wear import DAY_HOURS, HOUR_S, NUM_HOURS, WEAR_BYTES, Wear, WearFile, read_wear

START_S = 480_000 * HOUR_S + 1200.0


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "wear")


def test_hours_fall_out_of_the_day_and_of_the_month(place: str) -> None:
    clock = Clock()
    file = WearFile(place, clock)
    for _ in range(2000):
        assert file.spend(10, 1, 0) == 1
        clock.now_s += HOUR_S
    wear = read_wear(place)
    assert wear.total_bytes == 20_000
    assert wear.written_since(DAY_HOURS, clock.now_s - HOUR_S) == 250
    assert wear.mean_per_day(clock.now_s - HOUR_S) == pytest.approx(240)
    clock.now_s += 100 * HOUR_S
    assert wear.written_since(DAY_HOURS, clock.now_s) == 0
    assert wear.written_since(NUM_HOURS - 1, clock.now_s) == (NUM_HOURS - 101) * 10
    assert wear.mean_per_day(clock.now_s + 10_000 * HOUR_S) == 0
    file.close()


def test_the_first_day_counts_as_a_whole_one() -> None:
    wear = Wear()
    wear.add(1000, START_S)
    assert wear.mean_per_day(START_S) == 1000
    assert wear.mean_per_day(START_S + 3 * DAY_HOURS * HOUR_S - HOUR_S) == pytest.approx(1000 / 3)


def test_a_budget_holds_in_every_24_hours(place: str) -> None:
    clock, spent = Clock(), list[tuple[float, int]]()
    file = WearFile(place, clock)
    for _ in range(1000):
        spent.append((clock.now_s, 100 * file.spend(100, 7, 5000)))
        clock.now_s += 777
    file.close()
    assert sum(num_bytes for _, num_bytes in spent) > 4 * 5000, "it goes on when hours fall out"
    for begin, _ in spent:
        assert sum(n for at, n in spent if begin <= at < begin + DAY_HOURS * HOUR_S) <= 5000


def test_a_clock_that_is_set_back_opens_no_new_budget(place: str) -> None:
    clock = Clock()
    file = WearFile(place, clock)
    assert file.spend(100, 50, 5000) == 50
    clock.now_s -= 1_000_000
    assert file.spend(100, 1, 5000) == 0
    clock.now_s = START_S
    assert file.spend(100, 1, 5000) == 0
    file.give_back(300)
    assert file.spend(100, 5, 5000) == 3
    file.close()


def test_many_writers_share_one_budget(place: str) -> None:
    def spend(_: int) -> int:
        file = WearFile(place)
        try:
            return sum(file.spend(10, 3, 1000) for _ in range(40))
        finally:
            file.close()

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(spend, range(8))) == 100


@pytest.mark.parametrize(
    "content", [b"", b"x" * WEAR_BYTES, b"RWW1" + b"\xff" * (WEAR_BYTES - 4), bytes(WEAR_BYTES + 1)]
)
def test_an_unsound_file_counts_from_zero(place: str, content: bytes) -> None:
    Path(place).write_bytes(content)
    assert read_wear(place) == Wear()
    file = WearFile(place, Clock())
    assert file.spend(10, 2, 0) == 2
    file.close()
    assert read_wear(place).total_bytes == 20


def test_a_pipe_in_its_place_reads_as_nothing_and_is_set_aside(place: str) -> None:
    os.mkfifo(place)
    assert read_wear(place) == Wear()
    assert WearFile(place).spend(1, 1, 0) == 1
    assert read_wear(place).total_bytes == 1
    assert [path.is_fifo() for path in Path(place).parent.glob("wear.aside-*")] == [True]


def test_a_spent_budget_ends_stores_over_restarts_and_takes_no_room(tmp_path: Path, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in ("a", "b")]
    create_volume(roots, capacity_bytes=64 * MIB)
    budget = 10 * RECORD_BYTES + 100  # 5 records a root
    counters = Counters()
    volume = bench.open(*roots, counters=counters, store_bytes_per_day=budget, rated_dwpd=0.5)
    assert not volume.is_over_budget
    results = store(namespace_of(volume), range(60))
    assert sum(results) == 10
    assert volume.is_over_budget
    assert counters.value("rewarm_kv_stores_over_budget_total") == 50
    volume.close()
    for root in roots:
        usage = read_usage(RootPaths(root).usage)
        assert (usage.used_bytes, usage.pressure_bytes) == (5 * RECORD_BYTES, 0)
        assert counters.value("rewarm_root_written_day_bytes", root) == 5 * RECORD_BYTES
        assert counters.value("rewarm_root_dwpd", root) > 0
        ratio = counters.value("rewarm_root_endurance_ratio", root) / counters.value("rewarm_root_dwpd", root)
        assert ratio == pytest.approx(2)
    volume = bench.open(*roots, store_bytes_per_day=budget)
    assert not any(store(namespace_of(volume), range(100, 120)))
    volume.close()
    volume = bench.open(*roots)
    assert all(store(namespace_of(volume), range(100, 104))), "a server without a bound stores"
    volume.close()
    infos = volume_info(roots).roots
    assert sum(info.wear.total_bytes for info in infos) == 14 * RECORD_BYTES


def test_there_is_room_in_the_budget_again_when_hours_fall_out(root: str, bench: Bench) -> None:
    volume = bench.open(root, store_bytes_per_day=4 * RECORD_BYTES)
    assert sum(store(namespace_of(volume), range(6))) == 4
    assert volume.is_over_budget
    (thread,) = volume._store_threads
    wear = read_wear(RootPaths(root).wear)
    thread.note_wear(wear, wear.last_hour * HOUR_S + 20 * HOUR_S)
    assert volume.is_over_budget
    thread.note_wear(wear, wear.last_hour * HOUR_S + 26 * HOUR_S)
    assert not volume.is_over_budget
