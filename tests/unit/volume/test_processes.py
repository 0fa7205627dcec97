"""Many processes on one volume: one budget, one janitor, and nothing is left of those that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from volumes import (
    MIB,
    RECORD_BYTES,
    Bench,
    key,
    load,
    namespace_of,
    record_files,
    record_sizes,
    store,
    wait_for,
)

from rewarm.errors import BusyError
from rewarm.volume import Outcome, Volume, create_volume
from rewarm.volume.janitor import process as janitor_process
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths
from rewarm.volume.usage import read_usage

TESTS = Path(__file__).parents[2]


class Writers:
    """Processes of tests/support/volume_process.py."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(self, roots: str, first: int, count: int, *options: str) -> subprocess.Popen[str]:
        script = str(TESTS / "support" / "volume_process.py")
        command = [sys.executable, script, roots, str(first), str(count), *options]
        env = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
        process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            with suppress(BrokenPipeError):
                process.communicate(timeout=60)


def stored(process: subprocess.Popen[str], count: int) -> int:
    """Read its lines until it has gone through ``count`` records; how many of them it stored."""
    assert process.stdout is not None
    last = 0
    for _ in range(1 + -(-count // 8)):
        last = int(process.stdout.readline())
    return last


@pytest.fixture
def writers() -> Iterator[Writers]:
    """Ended at the end."""
    made = Writers()
    yield made
    made.end()


def lock_holders(path: str) -> list[int]:
    """Process ids that hold a lock of a file, those that wait left out."""
    inode = str(os.stat(path).st_ino)
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
    return [int(line[4]) for line in lines if line[1] == "FLOCK" and line[5].split(":")[2] == inode]


def temporaries(root: str) -> list[Path]:
    return list(Path(root, ".rewarm", "sessions").glob("*/tmp-*"))


def exact_usage(root: str) -> int:
    """What the budget says after a janitor has looked, when nobody writes."""
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    janitor.finish()
    return read_usage(RootPaths(root).usage).used_bytes


def test_three_writers_keep_one_budget_under_one_janitor(tmp_path: Path, writers: Writers, bench: Bench) -> None:
    root, capacity = str(tmp_path / "kv"), 8 * MIB
    create_volume([root], capacity_bytes=capacity)
    lock = RootPaths(root).janitor_lock
    bench.open(root, janitor=True)
    wait_for(lambda: os.path.exists(lock) and lock_holders(lock), "a janitor")
    processes = [writers.start(root, 1000 * n, 160, "--janitor") for n in range(3)]
    counts, most = [0, 0, 0], 0
    for _ in range(21):  # a line at the start and one for each request
        for number, process in enumerate(processes):
            assert process.stdout is not None
            counts[number] = int(process.stdout.readline())
            most = max(most, record_sizes(root), read_usage(RootPaths(root).usage).used_bytes)
            assert len(lock_holders(lock)) == 1
    assert min(counts) > 80, "a janitor makes room for all of them"
    assert 0.9 * capacity <= most <= capacity
    usage = read_usage(RootPaths(root).usage)
    assert usage.evicted_records >= sum(counts) - capacity // RECORD_BYTES
    writers.end()
    bench.close()
    used = exact_usage(root)
    assert used == len(record_files(root)) * RECORD_BYTES <= capacity
    assert not temporaries(root)


def test_each_eviction_is_counted_by_one_process(tmp_path: Path, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=4 * MIB)
    servers = [bench.open(root, janitor=True) for _ in range(2)]
    ranks = [bench.open(root) for _ in range(2)]
    first = 0
    while read_usage(RootPaths(root).usage).evicted_records < 64:
        assert first < 2000
        store(namespace_of(ranks[first % 2]), range(first, first + 16))
        first += 16
    wait_for(lambda: sum(counted(server)[0] for server in servers) >= 16, "a server to tell while it runs")
    for volume in (*ranks, *servers):
        volume.close()
    usage = read_usage(RootPaths(root).usage)
    assert [sum(pair) for pair in zip(*map(counted, servers), strict=True)] == [
        usage.evicted_records,
        usage.evicted_bytes,
    ]
    assert [counted(rank) for rank in ranks] == [(0, 0), (0, 0)]


def counted(volume: Volume) -> tuple[float, float]:
    """(records, bytes) that a process says were evicted."""
    value = volume.counters.value
    return value("rewarm_evicted_records_total"), value("rewarm_evicted_bytes_total")


def test_a_janitor_that_lived_long_is_started_again_soon(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(janitor_process.time, "monotonic", lambda: now[0])
    janitor = janitor_process.JanitorProcess([root])
    try:

        def starts_after_kill() -> bool:
            pid = janitor.pid
            os.kill(pid, signal.SIGKILL)
            janitor._process.wait()
            janitor.ensure()
            return janitor.pid != pid

        assert starts_after_kill()
        assert not starts_after_kill(), "it pauses after the first one"
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            now[0] += pause
            janitor.ensure()
            assert starts_after_kill() is False, f"a pause of more than {pause} s"
        now[0] += 60
        janitor.ensure()
        now[0] += 61
        assert starts_after_kill(), "it lived for more than a minute"
        assert not starts_after_kill()
        now[0] += 1
        janitor.ensure()
        assert janitor._process.poll() is None
    finally:
        janitor.close()


def test_kill_9_of_the_janitor_hands_over(tmp_path: Path, writers: Writers, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=4 * MIB)
    lock = RootPaths(root).janitor_lock
    other = writers.start(root, 0, 8, "--janitor")
    assert stored(other, 8) == 8
    volume = bench.open(root, janitor=True)
    namespace = namespace_of(volume)
    wait_for(lambda: os.path.exists(lock) and lock_holders(lock), "a janitor")
    killed = []
    for _ in range(3):
        (holder,) = lock_holders(lock)
        os.kill(holder, signal.SIGKILL)
        killed.append(holder)
        wait_for(lambda: set(lock_holders(lock)) - set(killed), "another janitor")
    first = 1000
    while read_usage(RootPaths(root).usage).evicted_records < 16:
        assert first < 2000
        store(namespace, range(first, first + 16))
        first += 16
    assert record_sizes(root) <= 4 * MIB


def test_kill_9_of_a_writer_leaves_no_temporary_and_no_lost_budget(tmp_path: Path, writers: Writers) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=64 * MIB)
    for _ in range(4):
        before = len(record_files(root))
        writer = writers.start(root, 0, 800)
        wait_for(lambda count=before: len(record_files(root)) > count or temporaries(root), "a store")
        writer.kill()
        writer.communicate()
    used = exact_usage(root)
    assert not temporaries(root)
    assert not list(Path(root, ".rewarm", "sessions").iterdir())
    assert used == len(record_files(root)) * RECORD_BYTES


def test_a_janitor_that_runs_cleans_up_after_a_killed_writer(tmp_path: Path, writers: Writers, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=64 * MIB)
    bench.open(root, janitor=True)
    writer = writers.start(root, 0, 800)
    wait_for(lambda: record_files(root), "a store")
    writer.kill()
    writer.communicate()
    gone = f"{writer.pid}-*"
    wait_for(lambda: not list(Path(root, ".rewarm", "sessions").glob(gone)), "the janitor to remove the session")
    wait_for(lambda: read_usage(RootPaths(root).usage).used_bytes == len(record_files(root)) * RECORD_BYTES, "a count")


def test_two_processes_with_different_roots_of_one_volume(tmp_path: Path, writers: Writers, bench: Bench) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    one = writers.start(roots[1], 0, 40)
    assert stored(one, 40) == 40
    assert len(record_files(roots[1])) == 40
    both = namespace_of(bench.open(*roots))
    assert load(both, range(40)) == [Outcome.HIT] * 40
    other = writers.start(":".join(roots), 100, 40)
    assert stored(other, 40) == 40
    assert record_files(roots[0])
    assert not any(both.contains(key(n)) for n in range(100, 140))
    assert both.probe([key(n) for n in range(100, 140)]).wait(10)
    assert all(both.contains(key(n)) for n in range(100, 140))
    assert load(both, range(100, 140)) == [Outcome.HIT] * 40


def test_a_key_that_two_processes_store_is_whole(tmp_path: Path, writers: Writers, bench: Bench) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=64 * MIB)
    for process in [writers.start(root, 0, 160) for _ in range(2)]:
        assert stored(process, 160) == 160
    assert load(namespace_of(bench.open(root)), range(160)) == [Outcome.HIT] * 160
    writers.end()
    bench.close()
    assert exact_usage(root) == 160 * RECORD_BYTES


def test_two_janitors_at_once_are_harmless(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(100)))
    janitors = [RootJanitor(root), RootJanitor(root)]
    for janitor in janitors:
        janitor.prepare()
    for janitor in janitors:
        janitor.evict(20 * RECORD_BYTES)
    left = len(record_files(root))
    assert 20 <= left <= 80
    for janitor in janitors:
        janitor.finish()
    assert read_usage(RootPaths(root).usage).used_bytes == left * RECORD_BYTES


def test_a_janitor_that_knows_only_records_that_are_gone_looks_again(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(8)))
    janitor = RootJanitor(root)
    janitor.prepare()
    for path in record_files(root):
        path.unlink()
    assert all(store(namespace, range(100, 108)))
    assert janitor.evict(2 * RECORD_BYTES) == 2 * RECORD_BYTES
    janitor.finish()
    assert len(record_files(root)) == 6


def test_a_forked_child_is_told_so(root: str, bench: Bench) -> None:
    volume = bench.open(root)
    namespace = namespace_of(volume)
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        try:
            namespace.load([])
        except BusyError:
            volume.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store(namespace, [1]) == [True]
