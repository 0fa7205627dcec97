"""Volumes that lie: every malformed file, and what must follow. Never a wrong byte, an exception, or a wait."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from volumes import MIB, PAYLOAD_BYTES, RECORD_BYTES, Bench, load, namespace_of, record_path, store, tree

from rewarm.engine import EngineConfig, open_engine
from rewarm.engine.checksum import crc32c
from rewarm.errors import DamageError, FormatVersionError, RewarmError, StorageError, UsageError
from rewarm.volume import Outcome, create_volume
from rewarm.volume.info import volume_info
from rewarm.volume.janitor import root_janitor
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths, read_root_file
from rewarm.volume.usage import read_usage
from rewarm.volume.verify import verify_volume

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A closed volume with records 0 to 7."""
    path = str(tmp_path / "kv")
    create_volume([path], capacity_bytes=8 * MIB)
    bench = Bench()
    assert all(store(namespace_of(bench.open(path)), range(8)))
    bench.close()
    return path


def sealed(page: bytes) -> bytes:
    """A header page whose own checksum holds."""
    return page[:4] + struct.pack("<I", crc32c(page[8:])) + page[8:]


def set_field(offset: int, form: str, value: int) -> Callable[[bytes], bytes]:
    """A record with one field of its header changed, and the header's checksum made good."""

    def change(content: bytes) -> bytes:
        page = bytearray(content[:4096])
        struct.pack_into(form, page, offset, value)
        return sealed(bytes(page)) + content[4096:]

    return change


RECORDS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "header only": lambda content: content[:4096],
    "a byte short": lambda content: content[:-1],
    "all zeros": lambda content: bytes(len(content)),
    "all ones": lambda content: b"\xff" * len(content),
    "magic": lambda content: sealed(b"RWR0" + content[4:4096]) + content[4096:],
    "header checksum": lambda content: content[:4] + b"\0\0\0\0" + content[8:],
    "last byte of the header page": lambda content: content[:4095] + b"\1" + content[4096:],
    "first byte of the payload": lambda content: content[:4096] + bytes([content[4096] ^ 1]) + content[4097:],
    "last byte of the payload": lambda content: content[:-1] + bytes([content[-1] ^ 0x80]),
    "version 0": set_field(8, "<H", 0),
    "version 2": set_field(8, "<H", 2),
    "version 65535": set_field(8, "<H", 65535),
    "checksum kind 0": set_field(12, "<I", 0),
    "checksum kind 2": set_field(12, "<I", 2),
    "payload of 0": set_field(16, "<Q", 0),
    "payload one less": set_field(16, "<Q", PAYLOAD_BYTES - 1),
    "payload of 2^64-1": set_field(16, "<Q", 2**64 - 1),
    "piece of 0": set_field(24, "<I", 0),
    "piece of 4096": set_field(24, "<I", 4096),
    "piece of 2^32-4096": set_field(24, "<I", 2**32 - 4096),
    "no pieces": set_field(28, "<I", 0),
    "2^32-1 pieces": set_field(28, "<I", 2**32 - 1),
    "another key": set_field(32, "<Q", 7),
    "another namespace": set_field(64, "<Q", 7),
    "another checksum": set_field(1024, "<I", 7),
}


@pytest.mark.parametrize("kind", ["pure", "auto"])
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_lies_is_damage_and_nothing_else(name: str, kind: str, root: str) -> None:
    bench = Bench(open_engine(EngineConfig(kind=kind)))
    namespace = namespace_of(bench.open(root))
    path = record_path(root, namespace, 0)
    path.write_bytes(RECORDS[name](path.read_bytes()))
    assert load(namespace, [0, 1]) == [Outcome.DAMAGED, Outcome.HIT]
    assert store(namespace, [0]) == [True]
    assert load(namespace, [0]) == [Outcome.HIT]
    bench.close()


def test_a_record_in_another_ones_place_is_damage(root: str) -> None:
    bench = Bench()
    namespace = namespace_of(bench.open(root))
    one, other = record_path(root, namespace, 0), record_path(root, namespace, 1)
    one.write_bytes(other.read_bytes())
    assert load(namespace, [0, 1]) == [Outcome.DAMAGED, Outcome.HIT]
    bench.close()


def as_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def as_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


KINDS = [as_link, as_loop, as_pipe, as_directory]


@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_file_in_place_of_a_record(make: Callable[[Path], None], root: str) -> None:
    bench = Bench()
    namespace = namespace_of(bench.open(root))
    make(record_path(root, namespace, 0))
    assert load(namespace, [0, 1]) == [Outcome.DAMAGED, Outcome.HIT]
    bench.close()
    assert len(verify_volume([root]).damaged) == 1
    assert [problem.is_removed for problem in verify_volume([root], repair=True).damaged] == [True]
    assert verify_volume([root]).num_records == 7


NAMES = [
    "x.rec",
    "0" * 64 + ".REC",
    "A" * 64 + ".rec",
    "0" * 63 + ".rec",
    "0" * 64 + ".rec.tmp",
    " " * 64 + ".rec",
    "é.rec",
]


def test_other_names_are_left_alone(root: str) -> None:
    bench = Bench()
    volume = bench.open(root)
    namespace = namespace_of(volume)
    directory = record_path(root, namespace, 0).parent
    for name in NAMES:
        (directory / name).write_bytes(b"not ours")
    (directory / ("f" * 64 + ".rec")).write_bytes(b"in the wrong directory")
    Path(root, "0" * 63).mkdir()
    Path(root, "A" * 64).mkdir()
    volume.close()
    again = namespace_of(bench.open(root))
    assert len(again) == 8
    bench.close()
    janitor = RootJanitor(root)
    janitor.prepare()
    assert read_usage(RootPaths(root).usage).used_bytes == 8 * RECORD_BYTES
    janitor.evict(8 * MIB)
    janitor.finish()
    assert {path.name for path in directory.iterdir()} == {*NAMES, "f" * 64 + ".rec"}
    assert volume_info([root]).num_records == 0


GOOD: dict[str, Any] = {
    "format": "rewarm.volume",
    "version": 1,
    "volume_id": "0" * 32,
    "root_id": "1" * 32,
    "capacity_bytes": 1 << 20,
    "created_ns": 1,
}


def version_of(digits: str) -> bytes:
    return json.dumps(GOOD).replace('"version": 1', f'"version": {digits}').encode()


VOLUME_FILES: dict[str, tuple[bytes, type[RewarmError]]] = {
    "empty": (b"", DamageError),
    "zeros": (bytes(300), DamageError),
    "not UTF-8": (b'{"a": "\xff"}', DamageError),
    "a list": (b"[]", DamageError),
    "deep": (b"[" * 100_000 + b"]" * 100_000, DamageError),
    "long": (b" " * (1 << 20) + json.dumps(GOOD).encode(), StorageError),
    "another format": (json.dumps({**GOOD, "format": "other"}).encode(), DamageError),
    "no version": (json.dumps({**GOOD, "version": None}).encode(), DamageError),
    "version as text": (json.dumps({**GOOD, "version": "1"}).encode(), DamageError),
    "version true": (json.dumps({**GOOD, "version": True}).encode(), DamageError),
    "version 0": (json.dumps({**GOOD, "version": 0}).encode(), DamageError),
    "version 2": (json.dumps({**GOOD, "version": 2}).encode(), FormatVersionError),
    "version 10^4000": (
        json.dumps(GOOD).replace('"version": 1', '"version": 1' + "0" * 4000).encode(),
        FormatVersionError,
    ),
    "version of 5,000 digits": (
        json.dumps(GOOD).replace('"version": 1', '"version": 1' + "0" * 5000).encode(),
        DamageError,
    ),
    "a field missing": (json.dumps({n: v for n, v in GOOD.items() if n != "root_id"}).encode(), DamageError),
    "id of another length": (json.dumps({**GOOD, "volume_id": "0" * 31}).encode(), DamageError),
    "id that moves a terminal": (json.dumps({**GOOD, "volume_id": "\x1b[2J" + "0" * 28}).encode(), DamageError),
    "id as a number": (json.dumps({**GOOD, "root_id": 10**31}).encode(), DamageError),
    "capacity 0": (json.dumps({**GOOD, "capacity_bytes": 0}).encode(), DamageError),
    "capacity below 0": (json.dumps({**GOOD, "capacity_bytes": -1}).encode(), DamageError),
    "capacity 2^63": (json.dumps({**GOOD, "capacity_bytes": 2**63}).encode(), DamageError),
    "capacity as a float": (json.dumps({**GOOD, "capacity_bytes": 1e9}).encode(), DamageError),
    "capacity NaN": (json.dumps({**GOOD, "capacity_bytes": float("nan")}).encode(), DamageError),
}


@pytest.mark.parametrize("name", VOLUME_FILES)
def test_a_volume_file_that_lies_is_refused_and_nothing_is_changed(name: str, root: str) -> None:
    content, error = VOLUME_FILES[name]
    Path(root, "rewarm.volume").write_bytes(content)
    before = tree(root)
    bench = Bench()
    for attempt in (lambda: bench.open(root), lambda: bench.open(root, read_only=True), lambda: volume_info([root])):
        with pytest.raises(error):
            attempt()
    bench.close()
    assert tree(root) == before


def test_further_fields_are_ignored(root: str) -> None:
    Path(root, "rewarm.volume").write_text(json.dumps({**GOOD, "later": [1, 2]}))
    assert read_root_file(root).capacity_bytes == 1 << 20


@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_file_in_place_of_the_volume_file(make: Callable[[Path], None], root: str) -> None:
    make(Path(root, "rewarm.volume"))
    with pytest.raises((StorageError, UsageError)):
        read_root_file(root)


def describe(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda good: json.dumps({**good, **changes}).encode()


NAMESPACE_FILES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda good: b"",
    "another identity": describe(identity={"model": "other"}),
    "identity as text": describe(identity="tiny"),
    "identity with NaN": describe(identity={"a": float("nan")}),
    "deep identity": lambda good: (
        b'{"format":"rewarm.namespace","version":1,"payload_bytes":1,"identity":' + b'{"a":' * 900 + b"1" + b"}" * 901
    ),
    "payload 0": describe(payload_bytes=0),
    "payload true": describe(payload_bytes=True),
    "payload 2^62": describe(payload_bytes=2**62),
    "payload as a float": describe(payload_bytes=4096.0),
    "another format": describe(format="rewarm.volume"),
}


@pytest.mark.parametrize("name", NAMESPACE_FILES)
def test_a_namespace_file_that_lies_is_written_anew_by_who_knows(name: str, root: str) -> None:
    bench = Bench()
    namespace_id = namespace_of(bench.open(root)).id
    path = Path(RootPaths(root).namespace(namespace_id), "namespace.json")
    path.write_bytes(NAMESPACE_FILES[name](json.loads(path.read_bytes())))
    info = volume_info([root])
    assert (info.num_records, info.namespaces[0].payload_bytes) == (8, 0)
    assert info.namespaces[0].trouble
    assert len(verify_volume([root]).damaged) == 8
    assert load(namespace_of(bench.open(root)), range(8)) == [Outcome.HIT] * 8
    assert verify_volume([root]).damaged == []
    bench.close()


def test_records_that_nobody_can_describe_are_evicted_first(root: str) -> None:
    bench = Bench()
    volume = bench.open(root)
    other = namespace_of(volume, dtype="other")
    assert all(store(other, range(4)))
    Path(RootPaths(root).namespace(namespace_of(volume).id), "namespace.json").unlink()
    bench.close()
    janitor = RootJanitor(root)
    janitor.prepare()
    assert janitor.evict(RECORD_BYTES) == 8 * RECORD_BYTES
    janitor.finish()
    assert volume_info([root]).num_records == 4
    assert read_usage(RootPaths(root).usage).used_bytes == 4 * RECORD_BYTES


def test_a_namespace_of_a_newer_format_is_refused_and_kept(root: str) -> None:
    bench = Bench()
    namespace_id = namespace_of(bench.open(root)).id
    path = Path(RootPaths(root).namespace(namespace_id), "namespace.json")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": 2}))
    with pytest.raises(FormatVersionError):
        namespace_of(bench.open(root))
    bench.close()
    report = verify_volume([root], repair=True)
    assert (report.num_records, report.damaged, len(report.skipped)) == (0, [], 1)
    janitor = RootJanitor(root)
    janitor.prepare()
    assert janitor.evict(MIB) == 0
    janitor.finish()
    assert volume_info([root]).num_records == 8


def test_an_order_that_cannot_be_saved_delays_no_eviction(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(RootPaths(root).order).unlink(missing_ok=True)
    Path(RootPaths(root).order, "in the way").mkdir(parents=True)
    janitor = RootJanitor(root)
    with monkeypatch.context() as at_once:
        at_once.setattr(root_janitor, "SAVE_S", 0.0)
        janitor.prepare()
    with pytest.raises(OSError, match="order"):
        janitor.step()
    janitor.step()  # the next try comes when it is due, so that no pause after an error grows


STATE: dict[str, Callable[[RootPaths], object]] = {
    "usage is empty": lambda paths: Path(paths.usage).write_bytes(b""),
    "usage is missing": lambda paths: Path(paths.usage).unlink(),
    "usage is damaged": lambda paths: Path(paths.usage).write_bytes(bytes(48)),
    "usage is huge": lambda paths: Path(paths.usage).write_bytes(usage_of(2**64 - 1)),
    "order is damaged": lambda paths: Path(paths.order).write_bytes(b"RWO1" + bytes(80)),
    "order is a pipe": lambda paths: os.mkfifo(paths.order),
    "order is a link": lambda paths: os.symlink("/etc/passwd", paths.order),
    "marks are damaged": lambda paths: [p.write_bytes(b"{") for p in Path(paths.state).glob("sync-*")],
    "marks are lists": lambda paths: [p.write_bytes(b"[1]") for p in Path(paths.state).glob("sync-*")],
    "marks are late": lambda paths: [
        p.write_bytes(b'{"boot_id": "x", "synced_ns": 1' + b"0" * 100 + b"}") for p in Path(paths.state).glob("sync-*")
    ],
    "no sessions": lambda paths: shutil.rmtree(paths.sessions),
    "no quarantine": lambda paths: os.rmdir(paths.quarantine),
    "a session without a lock": lambda paths: Path(paths.sessions, "1-a").mkdir(),
    "a session that is a file": lambda paths: Path(paths.sessions, "1-b").touch(),
    "a session whose lock is a pipe": lambda paths: (
        Path(paths.sessions, "1-c").mkdir(),
        os.mkfifo(Path(paths.sessions, "1-c", "lock")),
    ),
    "a log that is a pipe": lambda paths: (
        Path(paths.sessions, "1-d").mkdir(),
        Path(paths.sessions, "1-d", "lock").touch(),
        os.mkfifo(Path(paths.sessions, "1-d", "log-000000")),
    ),
    "a log of noise": lambda paths: (
        Path(paths.sessions, "1-e").mkdir(),
        Path(paths.sessions, "1-e", "log-000000").write_bytes(os.urandom(7200 + 5)),
    ),
    **{
        f"{name} is {what}": lambda paths, name=name, plant=plant: _in_place_of(Path(paths.state, name), plant)
        for name in ("usage", "wear", "janitor.lock", "recovery.lock")
        for what, plant in {
            "a directory": lambda path: (path.mkdir(), (path / "letter").touch()),
            "a pipe": os.mkfifo,
            "a link": lambda path: os.symlink("/etc/passwd", path),
        }.items()
    },
    "order of 16 GB": lambda paths: (Path(paths.order).touch(), os.truncate(paths.order, 16 << 30)),
    "a directory in quarantine": lambda paths: [Path(paths.quarantine, f"0{n}").mkdir() for n in range(12)],
}


def _in_place_of(path: Path, plant: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    plant(path)


def usage_of(number: int) -> bytes:
    numbers = struct.pack("<5Q", *[number] * 5)
    return b"RWU1" + struct.pack("<I", crc32c(numbers)) + numbers


@pytest.mark.parametrize("name", STATE)
def test_working_state_that_lies_costs_no_record(name: str, root: str) -> None:
    paths = RootPaths(root)
    STATE[name](paths)
    bench = Bench()
    namespace = namespace_of(bench.open(root))
    assert load(namespace, range(8)) == [Outcome.HIT] * 8
    janitor = RootJanitor(root)
    with janitor.alone() as is_alone:
        assert is_alone
    janitor.prepare()
    janitor.step()
    assert store(namespace, [100]) == [True]
    assert abs(read_usage(paths.usage).used_bytes - 9 * RECORD_BYTES) < 13 * 4096
    assert load(namespace, [*range(8), 100]) == [Outcome.HIT] * 9
    janitor.finish()
    bench.close()


def test_the_janitor_removes_nothing_through_a_planted_link(root: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("lock", "log-1", "tmp-1", "letter"):
        (precious / name).write_text("mine")
    for name in ("1-f", "new-1-f"):
        os.symlink(precious, os.path.join(RootPaths(root).sessions, name))
    os.utime(precious, (0, 0))
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    janitor.finish()
    assert len(list(precious.iterdir())) == 4
