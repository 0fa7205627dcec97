"""Where a host tier lies: made once, shared, checked for who owns it and how much memory there is."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from volumes import MIB, Bench, load, namespace_of, record_files, store, wait_for

from rewarm.engine import EngineConfig, open_engine
from rewarm.engine.workers import TMPFS, file_system_type
from rewarm.errors import BusyError, FormatVersionError, RewarmError, StorageError, UnsupportedError, UsageError
from rewarm.metrics import Counters
from rewarm.volume import Outcome, Volume, create_volume, host_tier
from rewarm.volume.host_memory import free_memory
from rewarm.volume.host_tier import host_root, prepare, with_host_tier
from rewarm.volume.layout import RootPaths, read_root_file
from rewarm.volume.tiered import TieredVolume
from rewarm.volume.watch import look_at

SIZE = 64 * MIB
VOLUME_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on a tmpfs, of this user alone."""
    if file_system_type("/dev/shm") != TMPFS:
        pytest.skip("/dev/shm is no tmpfs here")
    place = Path(tempfile.mkdtemp(prefix="rewarm-test-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


def tiered(bench: Bench, root: str, place: Path, size: int = SIZE, **options: bool) -> TieredVolume:
    volume = with_host_tier(
        bench.open(root, **options),
        capacity_bytes=size,
        place=str(place),
        engine=bench.engine,
        counters=Counters(),
        janitor=False,
    )
    assert isinstance(volume, TieredVolume)
    return volume


def test_it_is_made_with_the_first_start_and_found_by_the_next(root: str, bench: Bench, memory: Path) -> None:
    place = memory / "new"
    first = tiered(bench, root, place)
    where = Path(host_root(first.id, str(place)))
    assert where == place / first.id
    assert first.host_root.name == str(where)
    for directory in (place, where):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert read_root_file(str(where)).capacity_bytes == SIZE
    namespace = namespace_of(first)
    store(namespace, range(4))
    for _ in range(2):
        load(namespace, range(4))
    assert first.wait_promoted(30)
    second = tiered(bench, root, place)
    other = namespace_of(second)
    assert [other.is_in_host(bytes(32)), len(record_files(str(where)))] == [False, 4]
    assert load(other, range(4)) == [Outcome.HIT] * 4
    first.close()
    second.close()
    again = tiered(bench, root, place)
    assert load(namespace_of(again), range(4)) == [Outcome.HIT] * 4
    assert again.host_root.file.root_id == first.host_root.file.root_id
    again.close()


def test_it_can_be_watched_like_any_volume(root: str, bench: Bench, memory: Path) -> None:
    volume = tiered(bench, root, memory)
    namespace = namespace_of(volume)
    store(namespace, range(4))
    for _ in range(3):
        load(namespace, range(4))
        assert volume.wait_promoted(30)
    where = volume.host_root

    def read_bytes() -> float:
        return sum(live.roots[where.file.root_id][1].read_bytes for live in look_at(where.name).lives)

    wait_for(lambda: read_bytes() > 0, "what the process says of the host tier")
    assert [live.pid for live in look_at(where.name).lives] == [os.getpid()]
    volume.close()


def test_the_usual_place_is_this_users_own() -> None:
    assert host_root(VOLUME_ID) == f"/dev/shm/rewarm-{os.geteuid()}/{VOLUME_ID}"


def test_two_that_start_at_once_make_one(memory: Path) -> None:
    root = str(memory / VOLUME_ID)
    errors: list[RewarmError] = []

    def make() -> None:
        try:
            prepare(root, SIZE)
        except RewarmError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert read_root_file(root).capacity_bytes == SIZE


def test_a_link_in_its_place_is_refused_and_not_followed(memory: Path) -> None:
    other = memory / "other"
    other.mkdir(mode=0o700)
    (memory / "link").symlink_to(other)
    with pytest.raises(StorageError, match="is a symbolic link") as caught:
        prepare(str(memory / "link" / VOLUME_ID), SIZE)
    assert "kv.host_root" in caught.value.hint
    (memory / VOLUME_ID).symlink_to(other)
    with pytest.raises(StorageError, match="is a symbolic link"):
        prepare(str(memory / VOLUME_ID), SIZE)
    (memory / VOLUME_ID).unlink()
    (memory / f"{VOLUME_ID}.lock").unlink()
    (memory / f"{VOLUME_ID}.lock").symlink_to(other / "planted")
    with pytest.raises(StorageError, match="cannot be made"):
        prepare(str(memory / VOLUME_ID), SIZE)
    assert list(other.iterdir()) == []


def test_somebody_elses_directory_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(host_tier.os, "geteuid", lambda: own + 1)
    with pytest.raises(StorageError, match=rf"belongs to user {own}, and the server runs as user {own + 1}"):
        prepare(str(memory / VOLUME_ID), SIZE)
    assert not list(memory.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(memory: Path, mode: int) -> None:
    memory.chmod(mode)
    with pytest.raises(StorageError, match="can be written to by others"):
        prepare(str(memory / VOLUME_ID), SIZE)


def test_a_file_in_its_place_is_refused(memory: Path) -> None:
    (memory / "file").write_bytes(b"mine")
    with pytest.raises(StorageError, match="is not a directory"):
        prepare(str(memory / "file" / VOLUME_ID), SIZE)
    (memory / VOLUME_ID).write_bytes(b"mine")
    with pytest.raises(StorageError, match="is not a directory"):
        prepare(str(memory / VOLUME_ID), SIZE)
    assert (memory / VOLUME_ID).read_bytes() == b"mine"


def test_a_place_whose_parent_is_missing(memory: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as caught:
        prepare(str(memory / "a" / "b" / VOLUME_ID), SIZE)
    assert "kv.host_root" in caught.value.hint


def test_a_place_that_is_not_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "file_system_type", lambda _path: 0xEF53)
    with pytest.raises(UsageError, match=r"does not lie in memory \(file system type 0xef53\)"):
        prepare(str(tmp_path / "host" / VOLUME_ID), SIZE)


def test_a_hugetlbfs_is_refused_by_name_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "file_system_type", lambda _path: 0x958458F6)
    with pytest.raises(UnsupportedError, match="hugetlbfs, whose files can be mapped but not written to"):
        prepare(str(tmp_path / "host" / VOLUME_ID), SIZE)


def test_more_than_the_tmpfs_has_is_refused(memory: Path, small_disk: Callable[[str], Path]) -> None:
    with pytest.raises(StorageError, match=r"needs 1048576\.0 TiB, and the tmpfs below .* has .* left"):
        prepare(str(memory / VOLUME_ID), 1 << 60)
    assert not (memory / VOLUME_ID).exists()
    disk = small_disk("size=64m,mode=700")
    with pytest.raises(StorageError, match=r"the tmpfs below .* has 32\.0 MiB left") as caught:
        prepare(str(disk / VOLUME_ID), SIZE)
    assert "--shm-size" in caught.value.hint


def test_more_than_a_memory_limit_leaves_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "free_memory", lambda: (10 * MIB, "the memory limit of cgroup /pod"))
    with pytest.raises(StorageError, match=r"and the memory limit of cgroup /pod has 10\.0 MiB left"):
        prepare(str(memory / VOLUME_ID), SIZE)


def test_memory_that_a_tier_of_another_volume_holds_is_named_where_there_is_too_little(
    root: str, bench: Bench, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiered(bench, root, memory)
    namespace = namespace_of(other)
    store(namespace, range(16))
    for _ in range(2):
        load(namespace, range(16))
    assert other.wait_promoted(30)
    monkeypatch.setattr(host_tier, "free_memory", lambda: (MIB, "this machine"))
    with pytest.raises(StorageError) as caught:
        prepare(str(memory / VOLUME_ID), SIZE)
    assert "raise the limit" in caught.value.hint, "it is in use"
    other.close()
    with pytest.raises(StorageError) as caught:
        prepare(str(memory / VOLUME_ID), SIZE)
    assert caught.value.hint == f"{memory / other.id} holds 1.0 MiB that no server uses now: remove it"


def test_what_is_there_needs_no_room_again(
    root: str, bench: Bench, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "free_memory", lambda: (SIZE, "this machine"))
    first = tiered(bench, root, memory)
    namespace = namespace_of(first)
    store(namespace, range(16))
    for _ in range(2):
        load(namespace, range(16))
    assert first.wait_promoted(30)
    first.close()
    monkeypatch.setattr(host_tier, "free_memory", lambda: (SIZE - MIB, "this machine"))  # the records are a MiB
    tiered(bench, root, memory).close()
    monkeypatch.setattr(host_tier, "free_memory", lambda: (SIZE - 2 * MIB, "this machine"))
    with pytest.raises(StorageError, match="needs 63"):
        tiered(bench, root, memory)


def test_another_size_holds_once_nobody_uses_it(
    root: str, bench: Bench, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tiered(bench, root, memory)
    namespace = namespace_of(first)
    store(namespace, range(4))
    for _ in range(2):
        load(namespace, range(4))
    assert first.wait_promoted(30)
    second = tiered(bench, root, memory, size=2 * SIZE)
    assert second.host_root.file.capacity_bytes == SIZE
    assert "keeps its size of 64.0 MiB while servers use it" in caplog.text
    first.close()
    second.close()
    third = tiered(bench, root, memory, size=2 * SIZE)
    assert third.host_root.file.capacity_bytes == 2 * SIZE
    assert len(record_files(third.host_root.name)) == 4, "what is there stays"
    assert load(namespace_of(third), range(4)) == [Outcome.HIT] * 4
    third.close()


def test_what_a_killed_start_left_is_removed(memory: Path) -> None:
    root = memory / VOLUME_ID
    (root / ".rewarm" / "sessions").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    prepare(str(root), SIZE)
    assert read_root_file(str(root)).capacity_bytes == SIZE
    (root / "rewarm.volume").write_bytes(b"{")
    prepare(str(root), SIZE)
    assert read_root_file(str(root)).capacity_bytes == SIZE


def test_one_of_a_newer_release_is_left_alone(memory: Path) -> None:
    root = memory / VOLUME_ID
    prepare(str(root), SIZE)
    path = root / "rewarm.volume"
    newer = path.read_bytes().replace(b'"version": 1', b'"version": 2')
    path.write_bytes(newer)
    with pytest.raises(FormatVersionError):
        prepare(str(root), SIZE)
    assert path.read_bytes() == newer


def test_a_process_that_hangs_while_it_makes_one_is_told_of(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "LOCK_WAIT_S", 0.0)
    with (memory / f"{VOLUME_ID}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process has held"):
            prepare(str(memory / VOLUME_ID), SIZE)
    prepare(str(memory / VOLUME_ID), SIZE)


def test_a_server_that_only_reads_makes_none(
    root: str, bench: Bench, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, counters = bench.engine, Counters()

    def open_it() -> object:
        flash = bench.open(root, read_only=True)
        return with_host_tier(
            flash, capacity_bytes=SIZE, place=str(memory), engine=engine, counters=counters, janitor=False
        )

    assert isinstance(open_it(), Volume)
    assert "makes none" in caplog.text
    assert not list(memory.iterdir())
    tiered(bench, root, memory).close()
    found = open_it()
    assert isinstance(found, TieredVolume)
    found.close()


def test_a_host_tier_that_cannot_be_had_leaves_the_volume_as_it_was(tmp_path: Path, memory: Path) -> None:
    from rewarm.config import KvConfig
    from rewarm.kv.rank import open_volume

    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=64 * MIB)
    memory.chmod(0o777)
    engine = open_engine(EngineConfig())
    kv = KvConfig(roots=(root,), host_bytes=SIZE, host_root=str(memory))
    with pytest.raises(RewarmError, match="can be written to by others"):
        open_volume(kv, engine, Counters(), janitor=False)
    assert not os.listdir(RootPaths(root).sessions) or all(
        not host_tier.SessionReader(str(one)).inflight_bytes() for one in Path(RootPaths(root).sessions).iterdir()
    )
    memory.chmod(0o700)
    volume = open_volume(kv, engine, Counters(), janitor=True)
    assert isinstance(volume, TieredVolume)
    volume.close()
    engine.close()


# How much memory there is.


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal:  1000 kB\nMemAvailable:   900 kB\n")
    return tmp_path


def free(machine: Path) -> tuple[int, str]:
    return free_memory(str(machine / "proc"), str(machine / "cg"))


def test_without_limits_it_is_what_the_machine_has(machine: Path) -> None:
    assert free(machine) == (900 * 1024, "this machine")
    write(machine / "proc/self/cgroup", "0::/user.slice\n")
    write(machine / "cg/user.slice/memory.max", "max\n")
    write(machine / "cg/user.slice/memory.current", "5\n")
    assert free(machine) == (900 * 1024, "this machine")


def test_the_nearest_limit_of_any_parent_counts_less_what_is_in_use(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a/b\n")
    write(machine / "cg/a/memory.max", "500000\n")
    write(machine / "cg/a/memory.current", "450000\n")
    write(machine / "cg/a/memory.stat", "anon 1\nfile 300000\nshmem 250000\ninactive_file 30000\nactive_file 20000\n")
    write(machine / "cg/a/b/memory.max", "400000\n")
    write(machine / "cg/a/b/memory.current", "1000\n")
    assert free(machine) == (100_000, "the memory limit of cgroup /a")


def test_a_container_sees_its_own_limit_at_the_top(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/\n")
    write(machine / "cg/memory.max", "4096\n")
    write(machine / "cg/memory.current", "9000\n")
    assert free(machine) == (0, "the memory limit of cgroup /")


def test_cgroup_v1(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "9:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    write(machine / "cg/memory/memory.limit_in_bytes", "70000\n")
    write(machine / "cg/memory/memory.usage_in_bytes", "30000\n")
    write(machine / "cg/memory/memory.stat", "total_inactive_file 1000\ntotal_active_file 0\n")
    assert free(machine) == (41_000, "the memory limit of cgroup /")
    write(machine / "cg/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert free(machine)[1] == "this machine"


@pytest.mark.parametrize("text", ["", "garbage", "0::\n", "::::\n", "\x00\n0:memory\n"])
def test_odd_files_bound_nothing(machine: Path, text: str) -> None:
    write(machine / "proc/self/cgroup", text)
    assert free(machine) == (900 * 1024, "this machine")
    write(machine / "proc/meminfo", text)
    assert free(machine)[0] > 1 << 50
