"""Archives: what export writes, import brings back; what anybody else writes is refused where that is seen."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from volumes import (
    MIB,
    RECORD_BYTES,
    Bench,
    key,
    load,
    namespace_of,
    record_files,
    record_path,
    store,
    tree,
    wait_for,
)

from rewarm.engine import EngineConfig, open_engine
from rewarm.engine.base import WriteRecord
from rewarm.errors import DamageError, FormatVersionError, StorageError
from rewarm.testing.engines import Faulty
from rewarm.volume import Outcome, create_volume
from rewarm.volume.archive import export_archive, import_archive
from rewarm.volume.janitor.process import JanitorProcess
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.usage import read_usage
from rewarm.volume.verify import verify_volume

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Records 0 to 5."""
    root = str(tmp_path_factory.mktemp("source") / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    bench = Bench()
    assert all(store(namespace_of(bench.open(root)), range(6)))
    bench.close()
    stream = io.BytesIO()
    assert export_archive([root], stream).num_records == 6
    return stream.getvalue()


@pytest.fixture
def target(tmp_path: Path) -> str:
    """An empty volume."""
    root = str(tmp_path / "target")
    create_volume([root], capacity_bytes=8 * MIB)
    return root


Parts = list[tuple[tarfile.TarInfo, bytes]]


def parts_of(archive: bytes) -> Parts:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar.getmembers()]  # type: ignore[union-attr]


def packed(parts: Parts, form: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for info, content in parts:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def edited(change: Callable[[Parts], Any]) -> Callable[[bytes], bytes]:
    def edit(archive: bytes) -> bytes:
        parts = parts_of(archive)
        change(parts)
        return packed(parts)

    return edit


def named(name: str) -> Callable[[Parts], None]:
    def rename(parts: Parts) -> None:
        parts[2][0].name = name

    return rename


def typed(kind: bytes, link: str = "") -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts[2][0].type, parts[2][0].linkname = kind, link
        parts[2] = (parts[2][0], b"")

    return change


def content(index: int, change: Callable[[bytes], bytes]) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        parts[index] = (parts[index][0], change(parts[index][1]))

    return edit


def head(**changes: Any) -> Callable[[Parts], None]:
    return content(0, lambda text: json.dumps({**json.loads(text), **changes}).encode())


def size_field(text: bytes) -> Callable[[bytes], bytes]:
    """The size of the second record, as raw bytes, with the header's checksum made good."""

    def edit(archive: bytes) -> bytes:
        at = parts_of(archive)[2][0].offset
        block = bytearray(archive[at : at + 512])
        assert block[257:262] == b"ustar"
        block[124:136] = text
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return archive[:at] + bytes(block) + archive[at + 512 :]

    return edit


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


ZEROS = "0" * 64
HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda archive: b"",
    "a text": lambda archive: b"hello" * 1000,
    "zeros": lambda archive: bytes(10240),
    "no head": edited(lambda parts: parts.pop(0)),
    "the head twice": edited(lambda parts: parts.insert(1, parts[0])),
    "the head is no JSON": edited(content(0, lambda text: b"{")),
    "the head is a list": edited(content(0, lambda text: b"[]")),
    "the head is deep": edited(content(0, lambda text: b"[" * 100_000)),
    "another format": edited(head(format="rewarm.volume")),
    "version as text": edited(head(version="1")),
    "version 0": edited(head(version=0)),
    "namespaces is a number": edited(head(namespaces=5)),
    "a namespace is a number": edited(head(namespaces=[5])),
    "payload below 0": edited(head(namespaces=[{"id": ZEROS, "payload_bytes": -1, "identity": {}}])),
    "payload of 2^62": edited(head(namespaces=[{"id": ZEROS, "payload_bytes": 2**62, "identity": {}}])),
    "another id": edited(head(namespaces=[{"id": ZEROS, "payload_bytes": 4096, "identity": {}}])),
    "no namespaces": edited(head(namespaces=[])),
    "a path upwards": edited(named("../../../../etc/cron.d/x")),
    "an absolute path": edited(named("/etc/cron.d/x")),
    "a path upwards in a record's name": edited(named(f"{ZEROS}/../{ZEROS}.rec")),
    "another namespace": edited(named(f"{ZEROS}/00/{ZEROS}.rec")),
    "a file beside": edited(named("README")),
    "the wrong two digits": edited(
        lambda parts: setattr(parts[2][0], "name", parts[2][0].name[:65] + "zz" + parts[2][0].name[67:])
    ),
    "a symbolic link": edited(typed(tarfile.SYMTYPE, "/etc/passwd")),
    "a hard link": edited(typed(tarfile.LNKTYPE, "/etc/passwd")),
    "a directory": edited(typed(tarfile.DIRTYPE)),
    "a device": edited(typed(tarfile.CHRTYPE)),
    "a pipe": edited(typed(tarfile.FIFOTYPE)),
    "a sparse file": edited(typed(tarfile.GNUTYPE_SPARSE)),
    "a long name": edited(typed(tarfile.GNUTYPE_LONGNAME)),
    "an extended header": edited(typed(tarfile.XHDTYPE)),
    "a short record": edited(content(2, lambda record: record[:-512])),
    "an empty record": edited(content(2, lambda record: b"")),
    "a long record": edited(content(2, lambda record: record + bytes(512))),
    "a size of 8 GiB": size_field(b"77777777777\0"),
    "a size below 0": size_field(b"\xff" * 12),
    "a size of 2^80": size_field(b"\x80" + b"\xff" * 11),
    "a size of letters": size_field(b"abcdefghijk\0"),
    "a flipped bit in a record's header page": edited(content(2, flip(40))),
    "a flipped bit in a payload": edited(content(2, flip(RECORD_BYTES - 1))),
    "a flipped bit in a tar header": lambda archive: (
        flip(len(archive) // 512 // 2 * 512)(archive) and flip(1541)(archive)
    ),
    "another record's bytes": edited(lambda parts: content(2, lambda _r: parts[3][1])(parts)),
    "a record left out": edited(lambda parts: parts.pop(2)),
    "a record twice": edited(lambda parts: parts.insert(2, parts[2])),
    "two records in another order": edited(lambda parts: parts.insert(2, parts.pop(3))),
    "no manifest": edited(lambda parts: parts.pop()),
    "an empty manifest": edited(content(-1, lambda text: b"")),
    "another manifest": edited(content(-1, flip(3))),
    "a file after the manifest": edited(lambda parts: parts.append(parts[2])),
    "no end": lambda archive: archive[: len(archive) // 512 * 512 - 20 * 512].rstrip(b"\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_what_came_before_is_whole(name: str, archive: bytes, target: str) -> None:
    evil = HOSTILE[name](archive)
    assert evil != archive
    around = tree(str(Path(target).parent))
    with pytest.raises(DamageError) as caught:
        import_archive(io.BytesIO(evil), [target])
    assert "\n" not in caught.value.message
    report = verify_volume([target])
    assert (report.damaged, report.unreadable) == ([], [])
    outside = {path for path in tree(str(Path(target).parent)) if not path.startswith("target/")}
    assert outside == {path for path in around if not path.startswith("target/")}


def test_an_archive_of_a_newer_format_is_refused_by_name(archive: bytes, target: str) -> None:
    before = tree(target)
    with pytest.raises(FormatVersionError):
        import_archive(io.BytesIO(edited(head(version=2))(archive)), [target])
    assert tree(target) == before


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.33, 0.5, 0.77, 0.9, 0.97])
def test_an_archive_that_is_cut_short_goes_on_later(share: float, archive: bytes, target: str) -> None:
    whole = len(archive.rstrip(b"\0")) + 512
    with pytest.raises(DamageError, match=r"cut short|no archive"):
        import_archive(io.BytesIO(archive[: int(whole * share)]), [target])
    there = len(record_files(target))
    done = import_archive(io.BytesIO(archive), [target])
    assert (done.num_present, done.num_records) == (there, 6 - there)
    bench = Bench()
    assert load(namespace_of(bench.open(target)), range(6)) == [Outcome.HIT] * 6
    bench.close()


def test_import_goes_through_the_budget(archive: bytes, tmp_path: Path) -> None:
    root = str(tmp_path / "small")
    create_volume([root], capacity_bytes=MIB)
    bench = Bench()
    namespace = namespace_of(bench.open(root))
    assert all(store(namespace, range(100, 112)))
    import_archive(io.BytesIO(archive), [root])
    usage = read_usage(f"{root}/.rewarm/usage")
    assert usage.evicted_records >= 2
    assert usage.used_bytes == len(record_files(root)) * RECORD_BYTES <= MIB
    bench.close()


class _StillBorn(JanitorProcess):
    """A janitor that is killed as soon as it is there."""

    def _start(self) -> subprocess.Popen[bytes]:
        process = super()._start()
        process.kill()
        return process


def test_import_makes_room_itself_where_no_janitor_lives(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewarm.volume.volume.JanitorProcess", _StillBorn)
    root = str(tmp_path / "small")
    create_volume([root], capacity_bytes=MIB)
    bench = Bench()
    assert all(store(namespace_of(bench.open(root)), range(100, 116)))
    bench.close()
    assert import_archive(io.BytesIO(archive), [root]).num_records == 6
    usage = read_usage(f"{root}/.rewarm/usage")
    assert usage.evicted_records >= 6
    assert usage.used_bytes == len(record_files(root)) * RECORD_BYTES <= MIB


def _failing_writes(config: EngineConfig) -> Faulty:
    return Faulty(
        open_engine(config), fail_at=lambda _, transfer: errno.EIO if isinstance(transfer, WriteRecord) else 0
    )


def test_import_says_which_disk_fails_and_how(archive: bytes, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewarm.volume.archive._TRIES", 2)
    monkeypatch.setattr("rewarm.volume.archive.open_engine", _failing_writes)
    with pytest.raises(StorageError, match=rf"{target}: Input/output error\); 0 were imported"):
        import_archive(io.BytesIO(archive), [target])


def test_import_of_records_that_no_root_can_hold(tmp_path: Path) -> None:
    source, small = str(tmp_path / "source"), str(tmp_path / "small")
    create_volume([source], capacity_bytes=16 * MIB)
    create_volume([small], capacity_bytes=MIB)
    bench = Bench(open_engine(EngineConfig(ring_bytes=8 * MIB, slot_bytes=4 * MIB)))
    assert store(namespace_of(bench.open(source), payload_bytes=2 * MIB), [1]) == [True]
    bench.close()
    stream = io.BytesIO()
    export_archive([source], stream)
    stream.seek(0)
    with pytest.raises(StorageError, match=r"a record of 2.0 MiB does not fit into 1.0 MiB\); 0 were imported"):
        import_archive(stream, [small])


def test_import_into_a_volume_that_takes_nothing_says_so(
    archive: bytes, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewarm.volume.store_thread.StoreThread._store", lambda thread, items: None)
    with pytest.raises(StorageError, match=r"takes no more records \(.* of 8.0 MiB used.*\); 0 were imported"):
        import_archive(io.BytesIO(archive), [target])


def test_what_was_there_before_is_not_taken_off_what_was_imported(
    archive: bytes, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DamageError, match="cut short"):
        import_archive(io.BytesIO(archive[: len(archive.rstrip(b"\0")) // 2]), [target])
    assert record_files(target)
    monkeypatch.setattr("rewarm.volume.store_thread.StoreThread._store", lambda thread, items: None)
    with pytest.raises(StorageError, match=r"takes no more records \(.* of 8.0 MiB used.*\); 0 were imported"):
        import_archive(io.BytesIO(archive), [target])


def test_export_leaves_damage_out_and_says_how_much(target: str, archive: bytes) -> None:
    import_archive(io.BytesIO(archive), [target])
    bench = Bench()
    namespace = namespace_of(bench.open(target))
    path = record_path(target, namespace, 3)
    path.write_bytes(flip(5000)(path.read_bytes()))
    stream = io.BytesIO()
    done = export_archive([target], stream)
    assert (done.num_records, done.num_left_out) == (5, 1)
    assert key(3).hex() not in stream.getvalue().decode("latin1")
    assert export_archive([target], io.BytesIO(), only=[]).num_records == 0
    bench.close()


def test_kill_9_at_any_time_leaves_whole_records_and_the_import_goes_on(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    for root in (source, target):
        create_volume([root], capacity_bytes=32 * MIB)
    bench = Bench()
    assert all(store(namespace_of(bench.open(source)), range(200)))
    with Path(tmp_path / "kv.tar").open("wb") as file:
        export_archive([source], file)
    for wanted in (1, 60, 130):
        words = ["volume", "import", target, "--from", str(tmp_path / "kv.tar")]
        process = subprocess.Popen(
            [sys.executable, "-m", "rewarm.cli.main", *words],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        wait_for(
            lambda n=wanted, p=process: len(record_files(target)) >= n or p.poll() is not None,
            f"{wanted} records",
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert verify_volume([target]).damaged == []
    with Path(tmp_path / "kv.tar").open("rb") as file:
        done = import_archive(file, [target])
    assert done.num_present >= 130
    assert done.num_records + done.num_present == 200
    assert load(namespace_of(bench.open(target)), range(200)) == [Outcome.HIT] * 200
    bench.close()
    janitor = RootJanitor(target)
    janitor.prepare()
    janitor.step()
    janitor.finish()
    assert not list(Path(target, ".rewarm", "sessions").iterdir())
    assert read_usage(f"{target}/.rewarm/usage").used_bytes == 200 * RECORD_BYTES
