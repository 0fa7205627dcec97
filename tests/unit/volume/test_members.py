"""Roots that come and go while servers use a volume: they are used, or left alone, and no error is seen."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from volumes import MIB, Bench, key, load, namespace_of, record_files, store, wait_for

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.errors import DamageError, FormatVersionError, StorageError, UsageError, VolumeFull
from rewarm.metrics import BY_NAME, GAUGE
from rewarm.volume import Outcome, Volume, create, create_volume, members
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths, read_root_file
from rewarm.volume.members import add_root, members_of, read_members, remove_root
from rewarm.volume.pins import Pin, read_pins, remove_pin, write_pin
from rewarm.volume.quota import Quotas, read_quotas, tenant_of, write_quotas
from rewarm.volume.session import SessionReader, session_directories
from rewarm.volume.usage import read_usage


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A volume of 2 x 32 MiB."""
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    return roots


@pytest.fixture
def third(tmp_path: Path) -> str:
    return str(tmp_path / "c")


def names(volume: Volume) -> list[str]:
    return [root.name for root in volume.roots if root.is_member]


def test_a_root_that_is_added_is_used_by_servers_that_run(two: list[str], third: str, bench: Bench) -> None:
    first, second = bench.open(*two, store_bytes_per_day=96 * MIB), bench.open(*two)
    one, other = namespace_of(first), namespace_of(second)
    assert all(store(one, range(60)))
    add_root(two, third, capacity_bytes=64 * MIB)
    for volume in (first, second):
        volume.look_at_roots()
        assert names(volume) == [*two, third]
        assert volume.num_changes == 1
        assert volume.capacity_bytes == 128 * MIB
        assert volume.counters.value("rewarm_volume_capacity_bytes") == 128 * MIB
    assert list(first.shares().values()) == pytest.approx([0.25, 0.25, 0.5], abs=0.01)
    assert first.store_budget_bytes(2) == pytest.approx(48 * MIB, rel=0.01)
    assert all(store(one, range(100, 160)))
    assert 15 < len(record_files(third)) < 45
    wait_for(other.probe([key(n) for n in range(160)]).wait, "the other server's look")
    assert load(other, [*range(60), *range(100, 160)]) == [Outcome.HIT] * 120
    assert load(one, [*range(60), *range(100, 160)]) == [Outcome.HIT] * 120, "nothing was lost"


def test_a_root_that_is_removed_loses_what_lay_there_and_no_more(two: list[str], third: str, bench: Bench) -> None:
    add_root(two, third, capacity_bytes=32 * MIB)
    volume = bench.open(*two, third)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(90)))
    lost = {path.name for path in record_files(two[1])}
    there = [n for n in range(90) if f"{key(n).hex()}.rec" not in lost]
    assert 0 < len(lost) < 60
    volume._housekeep()
    assert volume.counters.value("rewarm_root_healthy", two[1]) == 1
    remove_root(two, two[1])
    volume.look_at_roots()
    assert names(volume) == [two[0], third]
    volume._housekeep()
    gauges = [
        (name, labels, numbers[0]) for name, labels, numbers in volume.counters.samples() if BY_NAME[name].kind is GAUGE
    ]
    gone = [math.isnan(number) for _, labels, number in gauges if labels == (two[1],)]
    assert len(gone) >= 5
    assert all(gone), "nothing is said of it any more"
    assert not any(math.isnan(number) for _, labels, number in gauges if labels != (two[1],))
    assert [namespace.contains(key(n)) for n in range(90)] == [n in there for n in range(90)]
    assert load(namespace, there) == [Outcome.HIT] * len(there)
    away = [n for n in range(90) if n not in there]
    assert set(load(namespace, away)) == {Outcome.MISS}
    assert all(store(namespace, away)), "they are stored anew, elsewhere"
    assert len(record_files(two[1])) == len(lost), "nothing there is touched"
    assert not [d for d in session_directories(RootPaths(two[1])) if not SessionReader(d).is_dead()]
    assert volume.used_bytes() == sum(read_usage(RootPaths(root).usage).used_bytes for root in (two[0], third))
    again = bench.open(*two)
    assert names(again) == [two[0], third], "the configuration names the old ones; the volume knows better"
    volume.close()


def test_a_root_that_comes_back_has_its_records_again(two: list[str], bench: Bench) -> None:
    volume = bench.open(*two)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(40)))
    remove_root(two, two[1])
    volume.look_at_roots()
    assert not all(namespace.contains(key(n)) for n in range(40))
    assert add_root(two[:1], two[1], capacity_bytes=0).capacity_bytes == 32 * MIB
    volume.look_at_roots()
    wait_for(lambda: all(namespace.contains(key(n)) for n in range(40)), "its names to be read")
    assert load(namespace, range(40)) == [Outcome.HIT] * 40
    assert all(store(namespace, range(100, 140)))


def test_a_server_starts_without_a_root_that_is_away_and_uses_it_later(two: list[str], bench: Bench) -> None:
    assert all(store(namespace_of(bench.open(*two)), range(40)))
    hidden = f"{two[1]}.hidden"
    os.rename(two[1], hidden)
    with pytest.raises(UsageError, match="holds no volume"):
        bench.open(*two)
    volume = bench.open(*two, may_be_away=True)
    namespace = namespace_of(volume)
    there = [n for n in range(40) if namespace.contains(key(n))]
    assert 0 < len(there) < 40
    volume.look_at_roots()
    assert names(volume) == two[:1]
    assert [volume.counters.value("rewarm_root_healthy", root) for root in two] == [1, 0]
    os.rename(hidden, two[1])
    volume.look_at_roots()
    assert names(volume) == two
    assert [volume.counters.value("rewarm_root_healthy", root) for root in two] == [1, 1]
    wait_for(lambda: all(namespace.contains(key(n)) for n in range(40)), "its names to be read")
    assert load(namespace, range(40)) == [Outcome.HIT] * 40
    with pytest.raises(UsageError, match="holds no volume"):
        bench.open(f"{two[0]}.no", f"{two[1]}.no", may_be_away=True)


def test_a_root_that_is_away_and_then_removed_is_missed_no_more(two: list[str], third: str, bench: Bench) -> None:
    add_root(two, third, capacity_bytes=32 * MIB)
    shutil.rmtree(two[1])
    volume = bench.open(*two, may_be_away=True)
    assert volume.counters.value("rewarm_root_healthy", two[1]) == 0
    remove_root([two[0]], two[1])
    volume.look_at_roots()
    assert math.isnan(volume.counters.value("rewarm_root_healthy", two[1]))
    assert not volume.away


def test_reads_only_and_yet_follows(two: list[str], third: str, bench: Bench) -> None:
    reader = bench.open(*two, read_only=True)
    namespace = namespace_of(reader)
    add_root(two, third, capacity_bytes=32 * MIB)
    writer = namespace_of(bench.open(*two))
    assert all(store(writer, range(60)))
    reader.look_at_roots()
    assert namespace.probe([key(n) for n in range(60)]).wait(10)
    assert load(namespace, range(60)) == [Outcome.HIT] * 60
    remove_root(two, third)
    reader.look_at_roots()
    assert 0 < sum(namespace.contains(key(n)) for n in range(60)) < 60


def test_a_root_that_cannot_be_reached_is_removed_by_its_id_or_the_path_that_others_know(
    two: list[str], third: str
) -> None:
    root_id = read_root_file(two[1]).root_id
    shutil.rmtree(two[1])
    with pytest.raises(UsageError, match="no root of this volume") as caught:
        remove_root(two, two[1])
    assert "root_id" in caught.value.hint
    add_root(two[:1], third, capacity_bytes=32 * MIB)
    shutil.rmtree(third)
    assert remove_root(two[:1], third).path == third
    with pytest.raises(UsageError, match="no root of this volume"):
        remove_root(two[:1], root_id)


@pytest.mark.parametrize("broken", range(1, 8))
def test_a_crash_at_any_write_leaves_the_root_out_or_in(
    broken: int, two: list[str], third: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = bench.open(*two)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(20)))
    count = [0]

    def failing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == broken:
                raise OSError(errno.EIO, "cut off")
            return inner(*args, **options)

        return call

    with monkeypatch.context() as cut:
        cut.setattr(members, "replace_file", failing(members.replace_file))
        cut.setattr(create, "write_new", failing(create.write_new))
        with suppress(StorageError):
            add_root(two, third, capacity_bytes=32 * MIB)
    volume.look_at_roots()
    assert set(two) <= set(names(volume))
    assert load(namespace, range(20)) == [Outcome.HIT] * 20
    if third not in names(volume):
        add_root(two, third, capacity_bytes=32 * MIB)
        volume.look_at_roots()
    assert names(volume) == [*two, third]
    assert all(store(namespace, range(100, 130)))


def test_the_janitor_of_a_removed_root_ends(two: list[str], bench: Bench) -> None:
    volume = bench.open(*two)
    assert all(store(namespace_of(volume), range(20)))
    janitor = RootJanitor(two[1])
    rounds = iter(range(100))

    def stop(_seconds: float) -> bool:
        if next(rounds) == 0:
            remove_root(two, two[1])
        return False

    janitor.run(stop)
    assert next(rounds) < 100, "it ended by itself"
    volume.close()


ODD: dict[str, bytes] = {
    "no JSON": b"{",
    "a list": b"[]",
    "no roots": b'{"format": "rewarm.roots", "version": 1}',
    "roots of numbers": b'{"format": "rewarm.roots", "version": 1, "roots": [1, 2]}',
    "a root of odd fields": json.dumps(
        {
            "format": "rewarm.roots",
            "version": 1,
            "roots": [{"root_id": "0" * 32, "path": "x", "is_member": 1, "changed_ns": -1}],
        }
    ).encode(),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("what", ODD)
def test_a_file_that_lies_says_nothing_and_the_other_roots_count(
    what: str, two: list[str], third: str, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    add_root(two, third, capacity_bytes=32 * MIB)
    volume = bench.open(*two)
    Path(RootPaths(two[0]).members).write_bytes(ODD[what])
    with pytest.raises(DamageError):
        read_members(two[0])
    volume.look_at_roots()
    assert names(volume) == [*two, third]
    assert "rewarm.roots" in caplog.text
    gone = remove_root(two, third)
    assert read_members(two[0]) == read_members(two[1]), "and the file is sound again"
    assert members_of(two)[gone.root_id] == gone
    volume.look_at_roots()
    assert names(volume) == two


def test_pipes_links_and_newer_files(two: list[str], third: str, bench: Bench) -> None:
    path = Path(RootPaths(two[0]).members)
    os.mkfifo(path)
    with pytest.raises(StorageError):
        read_members(two[0])
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(StorageError):
        read_members(two[0])
    path.unlink()
    path.write_text('{"format": "rewarm.roots", "version": 2, "roots": []}')
    with pytest.raises(FormatVersionError):
        add_root(two, third, capacity_bytes=32 * MIB)
    assert names(bench.open(*two)) == two


def test_what_cannot_be_added_or_removed(two: list[str], third: str, tmp_path: Path, root: str) -> None:
    for bad in (two[0], root, str(Path(two[0]) / "inside")):
        with pytest.raises(UsageError):
            add_root(two, bad, capacity_bytes=32 * MIB)
    with pytest.raises(UsageError, match="too small"):
        add_root(two, third, capacity_bytes=5)
    with pytest.raises(VolumeFull):
        add_root(two, third, capacity_bytes=1 << 60)
    assert not Path(third).exists()
    with pytest.raises(UsageError, match="no root of this volume"):
        remove_root(two, root)
    remove_root(two, two[0])
    with pytest.raises(UsageError, match="at least one root"):
        remove_root(two[1:], two[1])
    with pytest.raises(UsageError, match="were removed"):
        add_root(two[:1], third, capacity_bytes=32 * MIB)


def test_the_command_line(two: list[str], third: str, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: str) -> tuple[int, dict[str, Any]]:
        code = run(cli, ["volume", *words, "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else {}

    assert call("add-root", *two, "--new", third) == (2, {})
    code, made = call("add-root", *two, "--new", third, "--size", "16MiB")
    assert (code, made["path"], made["capacity_bytes"]) == (0, third, 16 * MIB)
    assert run(cli, ["volume", "info", *two]) == 0
    assert f"{third} is a root of this volume too" in capsys.readouterr().err
    code, gone = call("remove-root", *two, "--old", third)
    assert (code, gone["root_id"], gone["is_member"]) == (0, made["root_id"], False)
    assert run(cli, ["volume", "info", *two, third]) == 0
    assert f"{third} was removed from this volume" in capsys.readouterr().err
    assert run(cli, ["volume", "add-root", *two, "--new", third]) == 0
    assert "16.0 MiB" in capsys.readouterr().out


def test_a_root_that_is_added_has_the_quotas_and_pins_of_the_others(two: list[str], third: str) -> None:
    quotas = Quotas(0.5, {tenant_of("acme"): 0.1})
    pin = Pin(name="system", num_tokens=1, num_chunks=1, created_s=1.0, until_s=None, entries=[(bytes(32), key(1))])
    for root in two:
        write_quotas(root, quotas)
    write_pin(two[1], pin)
    add_root(two, third, capacity_bytes=32 * MIB)
    assert read_quotas(third) == quotas
    assert read_pins(third) == ([pin], [])
    remove_root(two, third)
    remove_pin(two[1], "system")
    for root in two:
        write_quotas(root, Quotas())
    add_root(two, third, capacity_bytes=32 * MIB)
    assert read_quotas(third) == Quotas()
    assert read_pins(third) == ([], []), "what was said while it was away holds"
